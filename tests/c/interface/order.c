/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* "Ordering" and "Departures from the 2010 driver". */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* Another thread that discards a page as soon as it is told to, and says when that has returned. */
struct hitter {
    char *volatile page;
    volatile bool stop;
};

static void *hit_when_told(void *hitter_)
{
    struct hitter *h = hitter_;
    while (!h->stop) {
        char *page = __atomic_load_n(&h->page, __ATOMIC_ACQUIRE);
        if (!page)
            continue;
        madvise(page, PAGE, MADV_DONTNEED);
        __atomic_store_n(&h->page, NULL, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void hit_by(struct hitter *h, char *page)
{
    __atomic_store_n(&h->page, page, __ATOMIC_RELEASE);
}

static void hit_done(struct hitter *h)
{
    while (__atomic_load_n(&h->page, __ATOMIC_ACQUIRE))
        ;
}

TEST_SLOW(order_registered_before_is_reported, 60)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(1);
    struct hitter h = {0};
    struct task task;
    start(&task, hit_when_told, &h);
    long missed = 0, not_counted = 0, rounds = 0;
    double end = now() + 1;
    for (; rounds < 20 || (rounds < 2000 && now() < end); rounds++) {
        uint64_t before = *counter;
        /* Told only after REGISTER has returned: it is reported, whichever thread it was. */
        if (reg(fd, 1, a, a + PAGE) != 0)
            give_up("register");
        hit_by(&h, a);
        hit_done(&h);
        /* A plain load is enough: program order there, the acquire here. */
        not_counted += *counter == before;
        struct ummunotify_event e[4];
        ssize_t n = read(fd, e, sizeof e);
        missed += n < 32 || e[0].type != UMMUNOTIFY_EVENT_TYPE_INVAL || e[0].user_cookie_counter != 1;
        drain(fd);
        if (unreg(fd, 1) != 0)
            give_up("unregister");
        drain(fd);
    }
    h.stop = true;
    ends("thread", &task);
    is("missed", missed, 0);
    is("not_counted", not_counted, 0);
    at_least("rounds", rounds, 20);
}

TEST_SLOW(order_unregistered_is_never_reported, 60)
{
    int fd = device();
    char *a = area(1);
    struct hitter h = {0};
    struct task task;
    start(&task, hit_when_told, &h);
    long ghosts = 0, rounds = 0;
    double end = now() + 1;
    for (uint64_t cookie = 1; rounds < 20 || (rounds < 2000 && now() < end); rounds++, cookie++) {
        if (reg(fd, cookie, a, a + PAGE) != 0)
            give_up("register");
        hit_by(&h, a); /* races with the unregister */
        if (unreg(fd, cookie) != 0)
            give_up("unregister");
        struct ummunotify_event e[4];
        ssize_t n;
        while ((n = read(fd, e, sizeof e)) > 0)
            ghosts += e[0].type == UMMUNOTIFY_EVENT_TYPE_INVAL;
        hit_done(&h);
        while ((n = read(fd, e, sizeof e)) > 0)
            ghosts += e[0].type == UMMUNOTIFY_EVENT_TYPE_INVAL;
    }
    h.stop = true;
    ends("thread", &task);
    is("events_of_unregistered_regions", ghosts, 0);
    at_least("rounds", rounds, 20);
    nothing("in_the_end_nothing_is_left", fd);
}

enum { SHARED_REGIONS = 400 };

struct readers {
    int fd;
    unsigned seen[SHARED_REGIONS];
    uint64_t highest_last;
    volatile bool stop;
};

static void *read_and_count(void *readers_)
{
    struct readers *r = readers_;
    struct ummunotify_event e[5];
    for (;;) {
        bool last_round = r->stop;
        ssize_t n;
        while ((n = read(r->fd, e, sizeof e)) > 0)
            for (ssize_t i = 0; i < n / 32; i++) {
                if (e[i].type == UMMUNOTIFY_EVENT_TYPE_LAST) {
                    uint64_t seen = __atomic_load_n(&r->highest_last, __ATOMIC_RELAXED);
                    while (e[i].user_cookie_counter > seen &&
                           !__atomic_compare_exchange_n(&r->highest_last, &seen, e[i].user_cookie_counter, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                        ;
                } else if (e[i].user_cookie_counter < SHARED_REGIONS) {
                    __atomic_fetch_add(&r->seen[e[i].user_cookie_counter], 1, __ATOMIC_RELAXED);
                }
            }
        if (last_round)
            return NULL;
    }
}

TEST_SLOW(order_calls_are_atomic, 60)
{
    static struct readers r;
    r.fd = device();
    volatile uint64_t *counter = counter_of(r.fd);
    char *a = area(SHARED_REGIONS);
    for (uint64_t i = 0; i < SHARED_REGIONS; i++)
        reg(r.fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    struct task tasks[3];
    for (int i = 0; i < 3; i++)
        start(&tasks[i], read_and_count, &r);
    for (size_t i = 0; i < SHARED_REGIONS; i++)
        discard(a + i * PAGE, 1);
    r.stop = true;
    for (int i = 0; i < 3; i++)
        ends("reader", &tasks[i]);
    long lost = 0;
    uint64_t events = 0;
    for (size_t i = 0; i < SHARED_REGIONS; i++) {
        lost += r.seen[i] == 0;
        events += r.seen[i];
    }
    is("events_lost", lost, 0);
    /* Read before the hit's end, a region is hit again at its end: that counts, and then only. */
    at_least("counter", (long long)*counter, SHARED_REGIONS);
    check(events <= *counter, "events_doubled", "no more events than hits", "%llu for %llu",
          (unsigned long long)events, (unsigned long long)*counter);
    is("highest_last", (long long)r.highest_last, (long long)*counter);
    nothing("all_was_read", r.fd);
}

struct registrar {
    int fd;
    char *a;
    uint64_t first;
    long failed;
};

static void *register_many(void *registrar_)
{
    struct registrar *r = registrar_;
    for (int round = 0; round < 20; round++) {
        for (uint64_t i = 0; i < 50; i++)
            r->failed += reg(r->fd, r->first + i, r->a, r->a + PAGE) != 0;
        for (uint64_t i = 0; i < 50; i++)
            r->failed += unreg(r->fd, r->first + i) != 0;
    }
    return NULL;
}

TEST_SLOW(order_registering_threads, 60)
{
    int fd = device();
    char *a = area(1);
    struct registrar r[4];
    struct task tasks[4];
    for (uint64_t i = 0; i < 4; i++) {
        r[i] = (struct registrar){fd, a, i * 1000, 0};
        start(&tasks[i], register_many, &r[i]);
    }
    for (int i = 0; i < 200; i++)
        discard(a, 1);
    long failed = 0;
    for (int i = 0; i < 4; i++) {
        ends("thread", &tasks[i]);
        failed += r[i].failed;
    }
    is("calls_that_failed", failed, 0);
    drain(fd);
    discard(a, 1);
    nothing("nothing_is_registered_in_the_end", fd);
}

TEST(order_no_extra_event_without_a_race)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4);
    long wrong = 0;
    for (uint64_t i = 1; i <= 300; i++) {
        /* Registered right before and right after: the after-hit must tell them from a race. */
        reg(fd, 1, a, a + PAGE);
        discard(a, 1);
        reg(fd, 2, a, a + 2 * PAGE);
        struct ummunotify_event e[4];
        ssize_t n = read(fd, e, sizeof e);
        wrong += *counter != i || n != 64 || e[0].user_cookie_counter != 1 ||
                 e[0].flags != UMMUNOTIFY_EVENT_FLAG_HINT || e[1].user_cookie_counter != i;
        unreg(fd, 1);
        unreg(fd, 2);
    }
    is("rounds_that_differ", wrong, 0);
}

TEST(departure_1_unregistered_before_it_was_read)
{
    int fd = open_device(O_RDONLY);
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    unreg(fd, 1);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    is("poll", poll(&p, 1, 5000), 1);
    READS("last_without_blocking", fd, 256, LAST(1));
    is("equal_to_the_counter", (long long)*counter, 1);
    is("poll_afterwards", poll(&p, 1, 0), 0);
}

TEST(departure_2_efault_consumes_nothing)
{
    int fd = device();
    char *a = area(3), *edge = area(1) + PAGE - 64;
    for (uint64_t i = 0; i < 3; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    discard(a, 3);
    fails("third_record_is_bad", read(fd, edge, 256), EFAULT);
    unreg(fd, 1);
    discard(a + 2 * PAGE, 1);
    READS("all_there_with_their_hints", fd, 256, HINTED(0, a, a + PAGE), BARE(2, a + 2 * PAGE, a + 3 * PAGE), LAST(2));
}

TEST_SLOW(departure_3_a_million_regions, 300)
{
    enum { N = 1000000, HITS = 300 };
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(HITS), *far = hole(0) + (1ul << 36);
    double begin = now();
    long failed = 0;
    /* Scattered: in an order that is neither up nor down; one in 4000 lies in the area. */
    for (uint64_t i = 0; i < N; i++) {
        uint64_t k = i * 7919 % N;
        char *page = k % 4000 == 0 ? a + k / 4000 * PAGE : far + k * 2 * PAGE;
        failed += reg(fd, k, page, page + PAGE) != 0;
    }
    double registered = now() - begin;
    is("registers_that_failed", failed, 0);
    fails("cookie_taken", reg(fd, 123456, a, a + 1), EINVAL);
    is("none_hit", (long long)*counter, 0);
    begin = now();
    for (size_t i = 0; i < HITS; i++)
        discard(a + i * PAGE, 1);
    double looked_up = now() - begin;
    is("hits", (long long)*counter, N / 4000);
    long wrong = 0, events = 0;
    struct ummunotify_event e[128];
    ssize_t n;
    while ((n = read(fd, e, sizeof e)) > 0)
        for (ssize_t i = 0; i < n / 32; i++)
            if (e[i].type == UMMUNOTIFY_EVENT_TYPE_INVAL) {
                wrong += e[i].user_cookie_counter != (uint64_t)events * 4000 ||
                         e[i].hint_start != (uintptr_t)(a + events * (long)PAGE);
                events++;
            }
    is("events", events, N / 4000);
    is("events_that_are_wrong", wrong, 0);
    begin = now();
    for (uint64_t i = 0; i < N; i++)
        failed += unreg(fd, i * 6007 % N) != 0;
    double unregistered = now() - begin;
    is("unregisters_that_failed", failed, 0);
    discard(a, HITS);
    is("none_left", (long long)*counter, N / 4000);
    /* A list would need hours. */
    check(registered < 60, "time_to_register", "less than 60 s", "%.1f s", registered);
    check(unregistered < 60, "time_to_unregister", "less than 60 s", "%.1f s", unregistered);
    check(looked_up / HITS < 0.005, "time_of_a_lookup", "less than 5 ms", "%.6f s", looked_up / HITS);
    is("close", close(fd), 0);
}

TEST_SLOW(departure_3_one_invalidation_hits_many, 60)
{
    enum { N = 20000 };
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(8);
    for (uint64_t i = 0; i < N; i++)
        if (reg(fd, i, a + i, a + i + 1) != 0)
            give_up("register");
    unmap(a, 8);
    is("counter", (long long)*counter, 1);
    uint64_t next = 0;
    long wrong = 0;
    struct ummunotify_event e[128];
    ssize_t n;
    while ((n = read(fd, e, sizeof e)) > 0)
        for (ssize_t i = 0; i < n / 32; i++, next++)
            wrong += e[i].user_cookie_counter != (next < N ? next : 1) ||
                     e[i].flags != (next < N ? UMMUNOTIFY_EVENT_FLAG_HINT : 0);
    is("records", (long long)next, N + 1);
    is("records_that_are_wrong", wrong, 0);
}

TEST(departure_4_after_hit_is_no_second_hit)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(2);
    reg(fd, 1, a, a + 2 * PAGE);
    for (uint64_t i = 1; i <= 50; i++) {
        discard(a, 1);
        is("one_for_each", (long long)*counter, (long long)i);
        READS("with_its_hint", fd, 256, HINTED(1, a, a + PAGE), LAST(i));
    }
}

TEST(departure_5_readv_is_one_read)
{
    /* Blocking: a second read for the second segment would sleep. */
    int fd = open_device(O_RDONLY);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    struct ummunotify_event e[4];
    struct iovec v[2] = {{e, 64}, {e + 2, 64}};
    ssize_t n = readv(fd, v, 2);
    GOT("second_segment_isnt_waited_for", e, n, HINTED(1, a, a + PAGE), LAST(1));
    discard(a, 1);
    v[0].iov_len = 32;
    v[1] = (struct iovec){e + 1, 32};
    n = readv(fd, v, 2);
    GOT("last_in_the_second_segment", e, n, HINTED(1, a, a + PAGE), LAST(2));
}

TEST(departure_7_adopt_counter_is_no_feature)
{
    int fd = device();
    uint32_t word = 0xffffffff;
    is("exchange", ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), 0);
    is_hex("offers_nothing", word, 0);
}
