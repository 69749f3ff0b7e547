/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* "Events and the counter", rules 1 to 10, and the binary layout. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

TEST(layout)
{
    is("register.size", sizeof(struct ummunotify_register_ioctl), 32);
    is("register.align", _Alignof(struct ummunotify_register_ioctl), 8);
    is("register.start", offsetof(struct ummunotify_register_ioctl, start), 0);
    is("register.end", offsetof(struct ummunotify_register_ioctl, end), 8);
    is("register.user_cookie", offsetof(struct ummunotify_register_ioctl, user_cookie), 16);
    is("register.flags", offsetof(struct ummunotify_register_ioctl, flags), 24);
    is("register.reserved", offsetof(struct ummunotify_register_ioctl, reserved), 28);
    is("event.size", sizeof(struct ummunotify_event), 32);
    is("event.align", _Alignof(struct ummunotify_event), 8);
    is("event.type", offsetof(struct ummunotify_event, type), 0);
    is("event.flags", offsetof(struct ummunotify_event, flags), 4);
    is("event.hint_start", offsetof(struct ummunotify_event, hint_start), 8);
    is("event.hint_end", offsetof(struct ummunotify_event, hint_end), 16);
    is("event.user_cookie_counter", offsetof(struct ummunotify_event, user_cookie_counter), 24);
    is("magic", UMMUNOTIFY_MAGIC, 'U');
    is_hex("exchange", UMMUNOTIFY_EXCHANGE_FEATURES, 0xc0045501);
    is_hex("register", UMMUNOTIFY_REGISTER_REGION, 0x40205502);
    is_hex("unregister", UMMUNOTIFY_UNREGISTER_REGION, 0x40085503);
    is("type.inval", UMMUNOTIFY_EVENT_TYPE_INVAL, 0);
    is("type.last", UMMUNOTIFY_EVENT_TYPE_LAST, 1);
    is("flag.hint", UMMUNOTIFY_EVENT_FLAG_HINT, 1);
}

TEST(rule_01_invalidations)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4), *b = area(4), *c = area(4), *d = area(4), *to = hole(4);
    reg(fd, 1, a, a + 4 * PAGE);
    reg(fd, 2, b, b + 4 * PAGE);
    reg(fd, 3, c, c + 4 * PAGE);
    reg(fd, 4, d, d + 4 * PAGE);
    unmap(a + PAGE, 2);
    is("munmap.counter", (long long)*counter, 1);
    READS("munmap", fd, 256, HINTED(1, a + PAGE, a + 3 * PAGE), LAST(1));
    discard(b, 4);
    is("dontneed.counter", (long long)*counter, 2);
    READS("dontneed", fd, 256, HINTED(2, b, b + 4 * PAGE), LAST(2));
    works("mremap.call", (long long)mremap(c, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to));
    is("mremap.counter", (long long)*counter, 4);
    READS("mremap", fd, 256, BARE(3, c, c + 4 * PAGE), LAST(4));
    void *fixed = mmap(d + PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    check(fixed == d + PAGE, "map_fixed.call", "the address asked for", "%p", fixed);
    is("map_fixed.counter", (long long)*counter, 5);
    READS("map_fixed", fd, 256, HINTED(4, d + PAGE, d + 2 * PAGE), LAST(5));
}

TEST(rule_01_additions_are_none)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = hole(16);
    reg(fd, 1, a, a + 16 * PAGE);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    works("mmap.call", (long long)mmap(a, 4 * PAGE, prot, flags | MAP_FIXED_NOREPLACE, -1, 0));
    is("mmap", (long long)*counter, 0);
    works("map_fixed.call", (long long)mmap(a + 4 * PAGE, 4 * PAGE, prot, flags | MAP_FIXED, -1, 0));
    is("map_fixed_into_a_hole", (long long)*counter, 0);
    works("populate.call",
          (long long)mmap(a + 8 * PAGE, 4 * PAGE, prot, flags | MAP_FIXED_NOREPLACE | MAP_POPULATE, -1, 0));
    is("map_populate", (long long)*counter, 0);
    for (size_t i = 0; i < 12; i++)
        a[i * PAGE] = 1;
    is("first_write", (long long)*counter, 0);
    nothing("nothing_to_read", fd);
}

/* One region and one munmap of pages 4 to 8 of an area of 12: hit or not, and the hint. */
static void hit_row(const char *name, int64_t start, int64_t end, bool hit)
{
    variant(name);
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(12);
    uint64_t base = (uintptr_t)a, s = base + 4 * PAGE, e = base + 8 * PAGE;
    uint64_t from = base + (uint64_t)start, to = base + (uint64_t)end;
    reg_raw(fd, 7, from, to);
    unmap(a + 4 * PAGE, 4);
    is("counter", (long long)*counter, hit);
    if (hit)
        READS("event", fd, 256, HINTED(7, from > s ? from : s, to < e ? to : e), LAST(1));
    else
        nothing("event", fd);
    variant(NULL);
    munmap((void *)counter, PAGE);
    close(fd);
}

TEST(rule_02_which_regions_are_hit)
{
    const int64_t p = PAGE;
    hit_row("same", 4 * p, 8 * p, true);
    hit_row("inside", 5 * p, 6 * p, true);
    hit_row("around", 2 * p, 10 * p, true);
    hit_row("over_the_start", 3 * p, 5 * p, true);
    hit_row("over_the_end", 7 * p, 9 * p, true);
    hit_row("ends_where_it_starts", 0, 4 * p, false);
    hit_row("starts_where_it_ends", 8 * p, 12 * p, false);
    hit_row("ends_one_byte_inside", 0, 4 * p + 1, true);
    hit_row("starts_one_byte_inside", 8 * p - 1, 12 * p, true);
    hit_row("one_byte", 6 * p + 123, 6 * p + 124, true);
    hit_row("below", 0, p, false);
    hit_row("above", 10 * p, 11 * p, false);
    /* The formula and nothing else: start < e and s < end. */
    hit_row("zero_length_inside", 6 * p, 6 * p, true);
    hit_row("zero_length_at_the_start", 4 * p, 4 * p, false);
    hit_row("zero_length_at_the_end", 8 * p, 8 * p, false);
    hit_row("inverted_inside", 7 * p, 5 * p, true);
    hit_row("inverted_from_above", 9 * p, 6 * p, false);
    hit_row("inverted_to_below", 6 * p, 3 * p, false);
    hit_row("inverted_around", 9 * p, 3 * p, false);
    hit_row("inverted_at_the_bounds", 8 * p - 1, 4 * p + 1, true);
}

TEST(rule_02_compares_unsigned)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4);
    uint64_t s = (uintptr_t)a + 2 * PAGE, e = s + 2 * PAGE, before = 0, after = 0;
    struct ummunotify_event records[8];
    ssize_t bytes = 0;
    reg_raw(fd, 1, 0, UINT64_MAX);
    reg_raw(fd, 2, 0, 1ull << 63);
    reg_raw(fd, 3, 1ull << 63, UINT64_MAX);
    reg_raw(fd, 4, UINT64_MAX, UINT64_MAX);
    reg_raw(fd, 5, UINT64_MAX, 0);
    reg_raw(fd, 6, 0, 0);
    /*
     * Two of them cover whatever this process writes, and a first write to a page that fork shares is an
     * invalidation, too. So the first round only touches what the second one will.
     */
    for (size_t round = 0; round < 2; round++) {
        drain(fd);
        before = *counter;
        unmap(a + round * 2 * PAGE, 2);
        after = *counter;
        bytes = read(fd, records, sizeof records);
    }
    is("counter", (long long)(after - before), 1);
    GOT("events", records, bytes, HINTED(2, s, e), HINTED(1, s, e), LAST(after));
}

TEST(rule_03_second_hit_clears_the_hint)
{
    int fd = device();
    char *a = area(6), *b = area(4);
    reg(fd, 1, a, a + 6 * PAGE);
    reg(fd, 2, b, b + 4 * PAGE);
    unmap(a + PAGE, 1);
    unmap(a + 3 * PAGE, 1);
    READS("other_range", fd, 256, BARE(1, a, a + 6 * PAGE), LAST(2));
    discard(b, 1);
    discard(b, 1);
    READS("same_range", fd, 256, BARE(2, b, b + 4 * PAGE), LAST(4));
    discard(b, 4);
    READS("hint_again_after_it_was_read", fd, 256, HINTED(2, b, b + 4 * PAGE), LAST(5));
    discard(b, 4);
    discard(b + PAGE, 1);
    discard(b + 2 * PAGE, 1);
    READS("third_hit", fd, 256, BARE(2, b, b + 4 * PAGE), LAST(8));
}

TEST(rule_03_hint_of_one_region_is_its_own)
{
    int fd = device();
    char *a = area(4);
    reg(fd, 1, a, a + PAGE);
    reg(fd, 2, a + PAGE, a + 4 * PAGE);
    discard(a, 2);
    discard(a + 2 * PAGE, 1);
    READS("events", fd, 256, HINTED(1, a, a + PAGE), BARE(2, a + PAGE, a + 4 * PAGE), LAST(2));
}

TEST(rule_04_ascending_start)
{
    int fd = device();
    char *a = area(8);
    reg(fd, 30, a + 3 * PAGE, a + 4 * PAGE);
    reg(fd, 10, a, a + 8 * PAGE);
    reg(fd, 50, a + 5 * PAGE, a + 6 * PAGE);
    reg(fd, 20, a + PAGE, a + 7 * PAGE);
    reg(fd, 40, a + 4 * PAGE + 1, a + 4 * PAGE + 2);
    discard(a, 8);
    READS("events", fd, 4096, HINTED(10, a, a + 8 * PAGE), HINTED(20, a + PAGE, a + 7 * PAGE),
          HINTED(30, a + 3 * PAGE, a + 4 * PAGE), HINTED(40, a + 4 * PAGE + 1, a + 4 * PAGE + 2),
          HINTED(50, a + 5 * PAGE, a + 6 * PAGE), LAST(1));
}

TEST(rule_04_equal_starts_later_first)
{
    int fd = device();
    char *a = area(4);
    reg(fd, 1, a, a + 4 * PAGE);
    reg(fd, 2, a, a + PAGE);
    reg(fd, 3, a, a + 2 * PAGE);
    discard(a, 4);
    READS("three", fd, 4096, HINTED(3, a, a + 2 * PAGE), HINTED(2, a, a + PAGE), HINTED(1, a, a + 4 * PAGE),
          LAST(1));
    unreg(fd, 1);
    reg(fd, 1, a, a + 3 * PAGE);
    discard(a, 4);
    READS("registered_again_is_later", fd, 4096, HINTED(1, a, a + 3 * PAGE), HINTED(3, a, a + 2 * PAGE),
          HINTED(2, a, a + PAGE), LAST(2));
    unreg(fd, 3);
    discard(a, 4);
    READS("one_in_the_middle_gone", fd, 4096, HINTED(1, a, a + 3 * PAGE), HINTED(2, a, a + PAGE), LAST(3));
}

TEST(rule_04_fifo_over_invalidations)
{
    int fd = device();
    char *a = area(6);
    for (uint64_t i = 0; i < 6; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    discard(a + 4 * PAGE, 1);
    discard(a + PAGE, 1);
    discard(a + 4 * PAGE, 1);
    /* 4 and 1 stand in the queue already and keep their places; the others come by their starts. */
    discard(a, 6);
    READS("events", fd, 4096, BARE(4, a + 4 * PAGE, a + 5 * PAGE), BARE(1, a + PAGE, a + 2 * PAGE),
          HINTED(0, a, a + PAGE), HINTED(2, a + 2 * PAGE, a + 3 * PAGE), HINTED(3, a + 3 * PAGE, a + 4 * PAGE),
          HINTED(5, a + 5 * PAGE, a + 6 * PAGE), LAST(4));
}

TEST(rule_04_equal_starts_a_hundred)
{
    int fd = device();
    char *a = area(2);
    for (uint64_t i = 0; i < 100; i++)
        reg(fd, i, a, a + PAGE + i);
    discard(a, 1);
    struct ummunotify_event want[101];
    for (uint64_t i = 0; i < 100; i++)
        want[i] = (struct ummunotify_event)HINTED(99 - i, a, a + PAGE);
    want[100] = (struct ummunotify_event)LAST(1);
    reads("events", fd, 4096, want, 101);
}

TEST(rule_05_counter)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(8), *other = area(4);
    is_hex("zero_at_open", *counter, 0);
    for (uint64_t i = 0; i < 4; i++)
        reg(fd, i, a + i * PAGE, a + 4 * PAGE);
    is("register_doesnt_count", (long long)*counter, 0);
    unmap(other, 4);
    is("no_region_hit", (long long)*counter, 0);
    discard(a + 4 * PAGE, 4);
    is("beside_the_regions", (long long)*counter, 0);
    discard(a, 4);
    is("one_for_four_regions", (long long)*counter, 1);
    discard(a, 4);
    is("one_for_four_queued_regions", (long long)*counter, 2);
    discard(a, 1);
    is("one_for_one_queued_region", (long long)*counter, 3);
    drain(fd);
    is("reading_doesnt_count", (long long)*counter, 3);
    discard(a + 3 * PAGE, 1);
    is("after_reading", (long long)*counter, 4);
    for (uint64_t i = 0; i < 4; i++)
        unreg(fd, i);
    is("unregister_doesnt_count", (long long)*counter, 4);
    unmap(a, 8);
    is("nothing_registered", (long long)*counter, 4);
}

TEST(rule_05_a_thousand_in_a_row)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(2);
    reg(fd, 1, a, a + 2 * PAGE);
    long wrong = 0;
    for (uint64_t i = 1; i <= 1000; i++) {
        discard(a, 2);
        wrong += *counter != i;
    }
    is("rounds_with_another_count", wrong, 0);
    READS("one_event", fd, 256, BARE(1, a, a + 2 * PAGE), LAST(1000));
}

/* Maps the address as soon as it is free and looks at the counter. */
struct reuse {
    volatile uint64_t *counter;
    char *volatile address;
    volatile uint64_t before;
    volatile long stale, got;
    volatile bool stop;
};

static void *take_addresses(void *reuse_)
{
    struct reuse *r = reuse_;
    while (!r->stop) {
        char *address = __atomic_load_n(&r->address, __ATOMIC_ACQUIRE);
        if (!address)
            continue;
        void *p = mmap(address, PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (p != address)
            continue;
        r->stale += *r->counter <= r->before;
        r->got++;
        __atomic_store_n(&r->address, NULL, __ATOMIC_RELEASE);
    }
    return NULL;
}

TEST_SLOW(rule_06_counter_moves_first, 60)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    struct reuse r = {.counter = counter};
    struct task taker;
    start(&taker, take_addresses, &r);
    long late = 0, rounds = 0;
    double end = now() + 5;
    for (; rounds < 100 || (rounds < 1000 && now() < end); rounds++) {
        r.before = *counter;
        /* The address can be had from the middle of the munmap on. */
        __atomic_store_n(&r.address, a, __ATOMIC_RELEASE);
        unmap(a, 1);
        late += *counter <= r.before;
        double limit = now() + 5;
        while (__atomic_load_n(&r.address, __ATOMIC_ACQUIRE) && now() < limit)
            ;
    }
    r.stop = true;
    ends("other_thread", &taker);
    is("calls_that_returned_before_the_counter_moved", late, 0);
    is("addresses_reused_before_the_counter_moved", r.stale, 0);
    is("addresses_reused", r.got, rounds);
    at_least("rounds", rounds, 100);
}

TEST(rule_07_stays_registered)
{
    int fd = device();
    char *a = area(2);
    reg(fd, 1, a, a + 2 * PAGE);
    for (uint64_t i = 1; i <= 5; i++) {
        discard(a, 1);
        READS("hit", fd, 256, HINTED(1, a, a + PAGE), LAST(i));
        nothing("and_no_more", fd);
    }
    fails("cookie_still_taken", reg(fd, 1, a, a + PAGE), EINVAL);
    unmap(a, 2);
    READS("unmapped", fd, 256, HINTED(1, a, a + 2 * PAGE), LAST(6));
    void *again = mmap(a, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
                       -1, 0);
    check(again == a, "map_again", "the address asked for", "%p", again);
    unmap(a, 2);
    READS("mapped_and_unmapped_again", fd, 256, HINTED(1, a, a + 2 * PAGE), LAST(7));
}

TEST(rule_08_reported_bounds)
{
    int fd = device();
    char *a = area(8);
    reg(fd, 1, a + 100, a + 5 * PAGE + 7);
    discard(a, 1);
    READS("clipped_at_the_regions_start", fd, 256, HINTED(1, a + 100, a + PAGE), LAST(1));
    discard(a + 5 * PAGE, 3);
    READS("clipped_at_the_regions_end", fd, 256, HINTED(1, a + 5 * PAGE, a + 5 * PAGE + 7), LAST(2));
    discard(a, 8);
    READS("clipped_at_both", fd, 256, HINTED(1, a + 100, a + 5 * PAGE + 7), LAST(3));
    discard(a + 2 * PAGE, 2);
    READS("not_clipped", fd, 256, HINTED(1, a + 2 * PAGE, a + 4 * PAGE), LAST(4));
    discard(a + 2 * PAGE, 2);
    discard(a + 2 * PAGE, 2);
    READS("without_hint_the_regions_bounds", fd, 256, BARE(1, a + 100, a + 5 * PAGE + 7), LAST(6));
    unreg(fd, 1);
    reg(fd, 2, a, a + 2 * PAGE);
    discard(a, 2);
    READS("whole_region_has_a_hint", fd, 256, HINTED(2, a, a + 2 * PAGE), LAST(7));
    unreg(fd, 2);
    reg(fd, 3, a + 3 * PAGE, a + PAGE);
    discard(a, 8);
    READS("inverted", fd, 256, HINTED(3, a + 3 * PAGE, a + PAGE), LAST(8));
    discard(a, 8);
    discard(a, 8);
    READS("inverted_without_hint", fd, 256, BARE(3, a + 3 * PAGE, a + PAGE), LAST(10));
}

TEST(rule_09_last)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4);
    reg(fd, 1, a, a + 4 * PAGE);
    struct ummunotify_event e[2];
    for (uint64_t i = 1; i <= 3; i++) {
        discard(a, 1);
        is("bytes", read(fd, e, sizeof e), sizeof e);
        is("type", e[1].type, UMMUNOTIFY_EVENT_TYPE_LAST);
        is("flags", e[1].flags, 0);
        is_hex("hint_start", e[1].hint_start, 0);
        is_hex("hint_end", e[1].hint_end, 0);
        is("value", (long long)e[1].user_cookie_counter, (long long)i);
        is("counter", (long long)*counter, (long long)i);
    }
    /* Between a read that took all INVALs and the one that gets LAST the counter goes on. */
    discard(a, 1);
    READS("inval_alone", fd, 32, HINTED(1, a, a + PAGE));
    discard(a, 1);
    READS("value_when_seen_empty", fd, 64, HINTED(1, a, a + PAGE), LAST(5));
}

TEST(rule_10_moved_counter_is_always_reported)
{
    int fd = device();
    char *a = area(4);
    is("fresh", readable(fd), 0);
    reg(fd, 1, a, a + 4 * PAGE);
    is("registered", readable(fd), 0);
    discard(a, 1);
    is("queued", readable(fd), 1);
    unreg(fd, 1);
    is("queue_emptied_by_unregister", readable(fd), 1);
    READS("last_alone", fd, 4096, LAST(1));
    is("reported", readable(fd), 0);
    nothing("and_no_more", fd);
    /* The same with a region that was hit before and is hit again, and one of two unregistered. */
    reg(fd, 2, a, a + PAGE);
    reg(fd, 3, a, a + 2 * PAGE);
    discard(a, 1);
    discard(a, 1);
    unreg(fd, 3);
    READS("the_other_remains", fd, 4096, BARE(2, a, a + PAGE), LAST(3));
    discard(a, 1);
    READS("taken_without_last", fd, 32, HINTED(2, a, a + PAGE));
    is("counter_not_reported_yet", readable(fd), 1);
    unreg(fd, 2);
    is("not_even_after_unregister", readable(fd), 1);
    READS("last_alone_later", fd, 4096, LAST(4));
    nothing("and_no_more_later", fd);
}
