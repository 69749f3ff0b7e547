/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* EXCHANGE_FEATURES, REGISTER_REGION, UNREGISTER_REGION and all other ioctls. */
#define _GNU_SOURCE
#include "check.h"

#include <asm/ioctls.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Pointers that user space may not read (or write) through. */
static struct {
    const char *name;
    void *pointer;
} bad[6];
enum { BAD = sizeof bad / sizeof bad[0] };

static void bad_pointers(size_t size)
{
    char *none = area(1), *edge = area(1);
    mprotect(none, PAGE, PROT_NONE);
    bad[0].name = "null", bad[0].pointer = NULL;
    bad[1].name = "low", bad[1].pointer = (void *)8;
    bad[2].name = "unmapped", bad[2].pointer = hole(1);
    bad[3].name = "prot_none", bad[3].pointer = none;
    bad[4].name = "kernel", bad[4].pointer = (void *)0xffff888000000000;
    /* All but its last byte could be read. */
    bad[5].name = "last_byte_unmapped", bad[5].pointer = edge + PAGE - size + 1;
}

static int exchange(int fd, void *word)
{
    return ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, word);
}

TEST(call_exchange_writes_zero)
{
    static const uint32_t words[] = {0, 1, 0xffffffff, 0xdeadbeef};
    for (size_t i = 0; i < 4; i++) {
        int fd = device();
        uint32_t word[3] = {0x11111111, words[i], 0x22222222};
        is("result", exchange(fd, &word[1]), 0);
        is_hex("word", word[1], 0);
        is_hex("before_it", word[0], 0x11111111);
        is_hex("after_it", word[2], 0x22222222);
    }
    int fd = device();
    char *page = area(2);
    memset(page, 0xff, PAGE);
    is("unaligned", exchange(fd, page + 4093), 0);
    is_hex("unaligned.word", (unsigned char)page[4093] | (unsigned char)page[4096] << 8, 0);
}

TEST(call_exchange_twice_is_einval)
{
    int fd = device();
    uint32_t word = 7;
    is("first", exchange(fd, &word), 0);
    word = 7;
    fails("second", exchange(fd, &word), EINVAL);
    is("word_untouched", word, 7);
    bad_pointers(4);
    for (int i = 0; i < BAD; i++) {
        variant(bad[i].name);
        /* EINVAL comes before the pointer is touched. */
        fails("second", exchange(fd, bad[i].pointer), EINVAL);
    }
    variant(NULL);
}

TEST(call_exchange_bad_pointer_is_efault)
{
    bad_pointers(4);
    char *read_only = area(1);
    mprotect(read_only, PAGE, PROT_READ);
    for (int i = 0; i <= BAD; i++) {
        variant(i < BAD ? bad[i].name : "read_only");
        int fd = device();
        uint32_t word = 7;
        fails("first", exchange(fd, i < BAD ? bad[i].pointer : read_only), EFAULT);
        fails("used_was_set", exchange(fd, &word), EINVAL);
        is("word_untouched", word, 7);
        close(fd);
    }
    variant(NULL);
}

/* Whether EXCHANGE still works on the context, which is closed then. */
static void unused(const char *what, int fd)
{
    uint32_t word = 7;
    is(what, exchange(fd, &word), 0);
    close(fd);
}

static void used(const char *what, int fd)
{
    uint32_t word = 7;
    fails(what, exchange(fd, &word), EINVAL);
    close(fd);
}

TEST(call_exchange_after_what_sets_used)
{
    char *a = area(2);
    struct ummunotify_event e[2];
    struct iovec v = {e, sizeof e};
    int fd = device();
    is("register.call", reg(fd, 1, a, a + PAGE), 0);
    used("register", fd);

    fd = device();
    reg(fd, 1, a, a + PAGE);
    fails("register_of_a_live_cookie.call", reg(fd, 1, a, a + PAGE), EINVAL);
    used("register_of_a_live_cookie", fd);

    fd = device();
    fails("read.call", read(fd, e, sizeof e), EAGAIN);
    used("read", fd);

    fd = device();
    fails("pread.call", pread(fd, e, sizeof e, 0), EAGAIN);
    used("pread", fd);

    fd = device();
    fails("readv.call", readv(fd, &v, 1), EAGAIN);
    used("readv", fd);

    fd = device();
    fails("read_of_nothing.call", read(fd, e, 0), EAGAIN);
    used("read_of_nothing", fd);
}

TEST(call_exchange_after_what_doesnt_set_used)
{
    char *a = area(2);
    uint64_t cookie = 1;
    int fd = device();
    fails("register_efault.call", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, NULL), EFAULT);
    unused("register_efault", fd);

    fd = device();
    fails("unregister.call", ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie), EINVAL);
    unused("unregister", fd);

    fd = device();
    fails("unregister_efault.call", ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, NULL), EFAULT);
    unused("unregister_efault", fd);

    fd = device();
    counter_of(fd);
    unused("mmap", fd);

    fd = device();
    is("poll.call", readable(fd), 0);
    unused("poll", fd);

    fd = device();
    fails("other_ioctl.call", ioctl(fd, _IO('U', 99), a), ENOTTY);
    unused("other_ioctl", fd);

    fd = device();
    is("fionbio.call", ioctl(fd, FIONBIO, &(int){1}), 0);
    unused("fionbio", fd);

    fd = device();
    int other = dup(fd);
    fcntl(fd, F_SETFL, 0);
    close(fd);
    unused("dup_and_fcntl", other);
}

TEST(call_register_bad_pointer_is_efault)
{
    int fd = device();
    bad_pointers(sizeof(struct ummunotify_register_ioctl));
    for (int i = 0; i < BAD; i++) {
        variant(bad[i].name);
        fails("register", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, bad[i].pointer), EFAULT);
    }
    variant(NULL);
    /* None of it was registered under whatever cookie could be read. */
    fails("no_trace", unreg(fd, 0x5a5a5a5a5a5a5a5a), EINVAL);
}

TEST(call_register_reads_only)
{
    int fd = device();
    char *a = area(2), *page = area(2);
    struct ummunotify_register_ioctl r = {(uintptr_t)a, (uintptr_t)(a + PAGE), 1, 2, 3};
    /* At the very end of a page and unaligned, in memory that can't be written. */
    char *at = page + PAGE - sizeof r - 1;
    memcpy(at, &r, sizeof r);
    mprotect(page, PAGE, PROT_READ);
    is("register", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, at), 0);
    check(memcmp(at, &r, sizeof r) == 0, "argument", "unchanged", "something else");
    /* Later changes of the argument change nothing. */
    mprotect(page, PAGE, PROT_READ | PROT_WRITE);
    memset(at, 0, sizeof r);
    discard(a, 2);
    READS("event", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_register_live_cookie_is_einval)
{
    int fd = device();
    char *a = area(4);
    is("first", reg(fd, 1, a, a + PAGE), 0);
    fails("same_range", reg(fd, 1, a, a + PAGE), EINVAL);
    fails("another_range", reg(fd, 1, a + 2 * PAGE, a + 4 * PAGE), EINVAL);
    discard(a + 2 * PAGE, 2);
    nothing("refused_range_isnt_watched", fd);
    discard(a, 1);
    fails("while_queued", reg(fd, 1, a, a + PAGE), EINVAL);
    READS("first_is_intact", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
    unmap(a, 4);
    fails("while_unmapped", reg(fd, 1, a, a + PAGE), EINVAL);
    drain(fd);
    is("unregister", unreg(fd, 1), 0);
    is("free_again", reg(fd, 1, a + 2 * PAGE, a + 3 * PAGE), 0);
}

TEST(call_register_checks_nothing_else)
{
    int fd = device();
    char *a = area(8), *unmapped = hole(4);
    uint64_t base = (uintptr_t)a;
    is("cookie_0", reg(fd, 0, a, a + PAGE), 0);
    is("cookie_all_ones", reg(fd, UINT64_MAX, a, a + PAGE), 0);
    is("cookie_top_bit", reg(fd, 1ull << 63, a, a + PAGE), 0);
    is("unmapped", reg(fd, 1, unmapped, unmapped + 4 * PAGE), 0);
    is("unaligned", reg_raw(fd, 2, base + 1, base + 4095), 0);
    is("zero_length", reg_raw(fd, 3, base + 5, base + 5), 0);
    is("zero_length_at_0", reg_raw(fd, 4, 0, 0), 0);
    is("inverted", reg_raw(fd, 5, base + 3 * PAGE, base + PAGE), 0);
    is("overlapping", reg_raw(fd, 6, base, base + 2 * PAGE), 0);
    is("the_same_again", reg_raw(fd, 7, base, base + 2 * PAGE), 0);
    is("everything", reg_raw(fd, 8, 0, UINT64_MAX), 0);
    is("kernel_addresses", reg_raw(fd, 9, 0xffff800000000000, UINT64_MAX), 0);
    is("end_at_0", reg_raw(fd, 10, UINT64_MAX, 0), 0);
    is("null_page", reg_raw(fd, 11, 0, PAGE), 0);
    for (uint32_t bit = 0; bit < 32; bit++) {
        struct ummunotify_register_ioctl r = {base, base + PAGE, 100 + bit, 1u << bit, 1u << bit};
        if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
            works("flags_and_reserved", -1);
    }
    struct ummunotify_register_ioctl r = {base, base + PAGE, 200, ~0u, ~0u};
    is("flags_and_reserved_all_ones", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r), 0);
    /* Cookies come back whole. */
    int other = device();
    reg(other, UINT64_MAX, a, a + PAGE);
    reg(other, 0, a + PAGE, a + 2 * PAGE);
    discard(a, 2);
    READS("cookies", other, 256, HINTED(UINT64_MAX, a, a + PAGE), HINTED(0, a + PAGE, a + 2 * PAGE), LAST(1));
}

TEST(call_register_unmapped_then_mapped)
{
    int fd = device();
    char *a = hole(4);
    reg(fd, 1, a, a + 4 * PAGE);
    void *p = mmap(a, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    check(p == a, "mmap", "the address asked for", "%p", p);
    nothing("mapping_it_is_no_event", fd);
    unmap(a + PAGE, 1);
    READS("unmapping_it_is", fd, 256, HINTED(1, a + PAGE, a + 2 * PAGE), LAST(1));
}

TEST(call_register_no_memory)
{
    skip("enomem", "memory can't be made short in a way that only the device feels");
}

TEST(call_unregister_bad_pointer_is_efault)
{
    int fd = device();
    bad_pointers(sizeof(uint64_t));
    for (int i = 0; i < BAD; i++) {
        variant(bad[i].name);
        fails("unregister", ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, bad[i].pointer), EFAULT);
    }
    variant(NULL);
}

TEST(call_unregister_unknown_is_einval)
{
    int fd = device();
    char *a = area(1);
    fails("never_registered", unreg(fd, 1), EINVAL);
    fails("zero", unreg(fd, 0), EINVAL);
    fails("all_ones", unreg(fd, UINT64_MAX), EINVAL);
    reg(fd, 1, a, a + PAGE);
    fails("another", unreg(fd, 2), EINVAL);
    fails("low_half_alike", unreg(fd, 1ull << 32 | 1), EINVAL);
    is("right", unreg(fd, 1), 0);
    fails("twice", unreg(fd, 1), EINVAL);
}

TEST(call_unregister_region_is_gone)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4);
    /* In memory that can't be written, unaligned, at the end of a page. */
    char *page = area(1);
    memcpy(page + PAGE - 9, &(uint64_t){1}, 8);
    mprotect(page, PAGE, PROT_READ);
    reg(fd, 1, a, a + PAGE);
    is("unregister", ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, page + PAGE - 9), 0);
    discard(a, 1);
    is("counter_stays", (long long)*counter, 0);
    nothing("nothing_reported", fd);
    is("cookie_is_free", reg(fd, 1, a + 2 * PAGE, a + 3 * PAGE), 0);
    discard(a, 1);
    is("old_range_isnt_watched", (long long)*counter, 0);
    discard(a + 2 * PAGE, 1);
    READS("new_range_is", fd, 256, HINTED(1, a + 2 * PAGE, a + 3 * PAGE), LAST(1));
}

TEST(call_unregister_takes_the_queued_event)
{
    int fd = device();
    char *a = area(8);
    for (uint64_t i = 0; i < 8; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    discard(a, 8);
    unreg(fd, 0);
    unreg(fd, 7);
    unreg(fd, 3);
    unreg(fd, 4);
    READS("others_in_order", fd, 4096, HINTED(1, a + PAGE, a + 2 * PAGE), HINTED(2, a + 2 * PAGE, a + 3 * PAGE),
          HINTED(5, a + 5 * PAGE, a + 6 * PAGE), HINTED(6, a + 6 * PAGE, a + 7 * PAGE), LAST(1));
    /* Registered again under the same cookie, the old event doesn't come back, and a new one has its hint. */
    discard(a + PAGE, 1);
    unreg(fd, 1);
    reg(fd, 1, a + PAGE, a + 2 * PAGE);
    READS("not_inherited", fd, 4096, LAST(2));
    discard(a + PAGE, 1);
    READS("hint_of_its_own", fd, 4096, HINTED(1, a + PAGE, a + 2 * PAGE), LAST(3));
}

TEST(call_unregister_between_reads)
{
    int fd = device();
    char *a = area(4);
    for (uint64_t i = 0; i < 4; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    discard(a, 4);
    READS("first", fd, 32, HINTED(0, a, a + PAGE));
    unreg(fd, 0);
    unreg(fd, 1);
    READS("second", fd, 32, HINTED(2, a + 2 * PAGE, a + 3 * PAGE));
    unreg(fd, 3);
    READS("last", fd, 32, LAST(1));
}

TEST(call_ioctl_unknown_is_enotty)
{
    int fd = device();
    char buffer[256];
    struct {
        const char *name;
        unsigned long request;
    } unknown[] = {
        {"zero", 0},
        {"all_ones", 0xffffffff},
        {"tcgets", TCGETS},
        {"tiocgwinsz", TIOCGWINSZ},
        {"fionread", FIONREAD},
        {"number_0", _IO('U', 0)},
        {"number_4", _IOW('U', 4, uint64_t)},
        {"register_wrong_direction", _IOR('U', 2, struct ummunotify_register_ioctl)},
        {"register_wrong_size", _IOW('U', 2, uint64_t)},
        {"exchange_wrong_size", _IOWR('U', 1, uint64_t)},
        {"unregister_wrong_size", _IOW('U', 3, uint32_t)},
        {"register_without_size", _IO('U', 2)},
        {"another_magic", _IOW('V', 2, struct ummunotify_register_ioctl)},
    };
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        memset(buffer, 0x77, sizeof buffer);
        fails(unknown[i].name, ioctl(fd, unknown[i].request, buffer), ENOTTY);
        for (size_t k = 0; k < sizeof buffer; k++)
            if (buffer[k] != 0x77)
                is("argument_untouched", buffer[k], 0x77);
    }
    fails("isatty", isatty(fd) ? 0 : -1, ENOTTY);
    /* Also while something could be read. */
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    fails("fionread_when_readable", ioctl(fd, FIONREAD, buffer), ENOTTY);
    fails("unknown_with_bad_pointer", ioctl(fd, _IOW('U', 9, uint64_t), NULL), ENOTTY);
}

TEST(call_ioctl_upper_half_of_the_request_is_ignored)
{
    int fd = device();
    char *a = area(1);
    /* As from `int request = UMMUNOTIFY_EXCHANGE_FEATURES`: sign-extended. */
    uint32_t word = 9;
    is("exchange", ioctl(fd, 0xffffffff00000000 | UMMUNOTIFY_EXCHANGE_FEATURES, &word), 0);
    is("word", word, 0);
    struct ummunotify_register_ioctl r = {(uintptr_t)a, (uintptr_t)(a + PAGE), 1, 0, 0};
    is("register", ioctl(fd, 0x1234567800000000 | UMMUNOTIFY_REGISTER_REGION, &r), 0);
    uint64_t cookie = 1;
    is("unregister", ioctl(fd, 0xffffffff00000000 | UMMUNOTIFY_UNREGISTER_REGION, &cookie), 0);
}

TEST(call_ioctl_of_the_vfs)
{
    int fd = device();
    is("fionbio.off", ioctl(fd, FIONBIO, &(int){0}), 0);
    is("fionbio.off.shows", fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    is("fionbio.on", ioctl(fd, FIONBIO, &(int){1}), 0);
    is("fionbio.on.shows", fcntl(fd, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    fails("fionbio.bad_pointer", ioctl(fd, FIONBIO, NULL), EFAULT);
    nothing("fionbio.acts", fd);
    is("fioasync.on", ioctl(fd, FIOASYNC, &(int){1}), 0);
    is("fioasync.on.shows", fcntl(fd, F_GETFL) & O_ASYNC, O_ASYNC);
    is("fioasync.off", ioctl(fd, FIOASYNC, &(int){0}), 0);
    is("fioasync.off.shows", fcntl(fd, F_GETFL) & O_ASYNC, 0);
    is("fionclex", ioctl(fd, FIONCLEX), 0);
    is("fionclex.shows", fcntl(fd, F_GETFD), 0);
    is("fioclex", ioctl(fd, FIOCLEX), 0);
    is("fioclex.shows", fcntl(fd, F_GETFD), FD_CLOEXEC);
}

TEST(call_ioctl_on_other_files)
{
    int pipes[2], n = 0;
    if (pipe(pipes) != 0 || write(pipes[1], "abc", 3) != 3)
        give_up("pipe");
    device();
    is("pipe.fionread", ioctl(pipes[0], FIONREAD, &n), 0);
    is("pipe.fionread.value", n, 3);
    fails("pipe.register", reg_raw(pipes[0], 1, 0, 1), ENOTTY);
    uint32_t word = 7;
    fails("pipe.exchange", exchange(pipes[0], &word), ENOTTY);
    fails("closed.register", reg_raw(999, 1, 0, 1), EBADF);
    fails("negative.register", reg_raw(-1, 1, 0, 1), EBADF);
}

TEST(call_ioctl_by_syscall)
{
    int fd = device();
    char *a = area(1);
    uint32_t word = 9;
    is("exchange", syscall(SYS_ioctl, fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), 0);
    is("word", word, 0);
    struct ummunotify_register_ioctl r = {(uintptr_t)a, (uintptr_t)(a + PAGE), 1, 0, 0};
    is("register", syscall(SYS_ioctl, fd, UMMUNOTIFY_REGISTER_REGION, &r), 0);
    fails("register_again", syscall(SYS_ioctl, fd, UMMUNOTIFY_REGISTER_REGION, &r), EINVAL);
    fails("bad_pointer", syscall(SYS_ioctl, fd, UMMUNOTIFY_REGISTER_REGION, NULL), EFAULT);
    discard(a, 1);
    struct ummunotify_event e[4];
    long bytes = syscall(SYS_read, fd, e, sizeof e);
    GOT("read", e, bytes, HINTED(1, a, a + PAGE), LAST(1));
    long page = syscall(SYS_mmap, NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (works("mmap", page))
        is("counter", (long long)*(volatile uint64_t *)page, 1);
    uint64_t cookie = 1;
    is("unregister", syscall(SYS_ioctl, fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie), 0);
    fails("tcgets", syscall(SYS_ioctl, fd, TCGETS, e), ENOTTY);
    is("close", syscall(SYS_close, fd), 0);
    fails("closed", syscall(SYS_ioctl, fd, UMMUNOTIFY_REGISTER_REGION, &r), EBADF);
}
