/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The counter page. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static long long map(int fd, size_t length, int prot, int flags, off_t offset)
{
    void *p = mmap(NULL, length, prot, flags, fd, offset);
    return p == MAP_FAILED ? -1 : (long long)(uintptr_t)p;
}

TEST(call_mmap_length)
{
    int fd = device();
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    static const size_t good[] = {1, 8, 100, 4095, 4096};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        long long p = map(fd, good[i], PROT_READ, MAP_SHARED, 0);
        if (works("rounds_up_to_a_page", p))
            is("counter", (long long)*(volatile uint64_t *)(uintptr_t)p, 1);
    }
    fails("zero", map(fd, 0, PROT_READ, MAP_SHARED, 0), EINVAL);
    fails("4097", map(fd, 4097, PROT_READ, MAP_SHARED, 0), EINVAL);
    fails("two_pages", map(fd, 2 * PAGE, PROT_READ, MAP_SHARED, 0), EINVAL);
    fails("private_two_pages", map(fd, 2 * PAGE, PROT_READ, MAP_PRIVATE, 0), EINVAL);
    fails("a_gigabyte", map(fd, 1ul << 30, PROT_READ, MAP_SHARED, 0), EINVAL);
}

TEST(call_mmap_offset)
{
    int fd = device();
    fails("one_page", map(fd, 8, PROT_READ, MAP_SHARED, PAGE), EINVAL);
    fails("far", map(fd, 8, PROT_READ, MAP_SHARED, 1l << 40), EINVAL);
    fails("private", map(fd, 8, PROT_READ, MAP_PRIVATE, PAGE), EINVAL);
    fails("not_a_page", map(fd, 8, PROT_READ, MAP_SHARED, 8), EINVAL);
}

TEST(call_mmap_shared_writable_is_eacces)
{
    int fd = device();
    fails("read_write", map(fd, 8, PROT_READ | PROT_WRITE, MAP_SHARED, 0), EACCES);
    fails("write", map(fd, PAGE, PROT_WRITE, MAP_SHARED, 0), EACCES);
    volatile uint64_t *counter = counter_of(fd);
    fails("mprotect_read_write", mprotect((void *)counter, PAGE, PROT_READ | PROT_WRITE), EACCES);
    fails("mprotect_write", mprotect((void *)counter, PAGE, PROT_WRITE), EACCES);
    is_hex("still_readable", *counter, 0);
    is("mprotect_none", mprotect((void *)counter, PAGE, PROT_NONE), 0);
    fails("mprotect_none_to_writable", mprotect((void *)counter, PAGE, PROT_READ | PROT_WRITE), EACCES);
    is("mprotect_read", mprotect((void *)counter, PAGE, PROT_READ), 0);
    is_hex("readable_again", *counter, 0);
}

TEST(call_mmap_private)
{
    int fd = device();
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    volatile uint64_t *shared = counter_of(fd);
    long long p = map(fd, 8, PROT_READ, MAP_PRIVATE, 0), w = map(fd, 8, PROT_READ | PROT_WRITE, MAP_PRIVATE, 0);
    if (!works("read_only", p) || !works("writable", w))
        return;
    volatile uint64_t *readable_copy = (uint64_t *)(uintptr_t)p, *copy = (uint64_t *)(uintptr_t)w;
    discard(a, 1);
    is("read_only.counts", (long long)*readable_copy, 1);
    is("writable.counts_until_written", (long long)*copy, 1);
    *copy = 77;
    is("written.is_a_copy", (long long)*copy, 77);
    is("written.others_unharmed", (long long)*shared, 1);
    discard(a, 1);
    is("written.counts_no_more", (long long)*copy, 77);
    is("counter_goes_on", (long long)*shared, 2);
    is("mprotect_of_private", mprotect((void *)readable_copy, PAGE, PROT_READ | PROT_WRITE), 0);
    READS("read", fd, 256, BARE(1, a, a + PAGE), LAST(2));
}

TEST(call_mmap_rest_of_the_page_is_zero)
{
    int fd = device();
    char *a = area(4);
    const char *page = (const char *)counter_of(fd);
    for (int round = 0; round < 3; round++) {
        long other = 0;
        for (size_t i = 8; i < PAGE; i++)
            other += page[i] != 0;
        is("bytes_that_are_not", other, 0);
        reg(fd, (uint64_t)round, a, a + 4 * PAGE);
        discard(a, 4);
        drain(fd);
        readable(fd);
    }
}

TEST(call_mmap_several)
{
    int fd = device();
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    volatile uint64_t *counter[8];
    for (int i = 0; i < 8; i++)
        counter[i] = counter_of(fd);
    discard(a, 1);
    for (int i = 0; i < 8; i++)
        is("each_counts", (long long)*counter[i], 1);
    for (int i = 0; i < 7; i++)
        is("unmap_one", munmap((void *)counter[i], PAGE), 0);
    discard(a, 1);
    is("one_left_counts", (long long)*counter[7], 2);
    is("unmap_the_last", munmap((void *)counter[7], PAGE), 0);
    discard(a, 1);
    is("mapped_anew", (long long)*counter_of(fd), 3);
    READS("read", fd, 256, BARE(1, a, a + PAGE), LAST(3));
}

TEST(call_mmap_flags)
{
    int fd = device();
    char *a = area(1), *place = area(3), *free_place = hole(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    void *fixed = mmap(place + PAGE, 8, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    check(fixed == place + PAGE, "map_fixed", "the address asked for", "%p", fixed);
    if (fixed != MAP_FAILED)
        is("map_fixed.counter", (long long)*(volatile uint64_t *)fixed, 1);
    is("map_fixed.page_before", place[PAGE - 1], 0x5a);
    is("map_fixed.page_after", place[2 * PAGE], 0x5a);
    void *hinted = mmap(free_place, 8, PROT_READ, MAP_SHARED, fd, 0);
    check(hinted == free_place, "address_as_a_hint", "the address wished for", "%p", hinted);
    void *none = mmap(NULL, 8, PROT_NONE, MAP_SHARED, fd, 0);
    check(none != MAP_FAILED, "prot_none", "a mapping", "%s", strerrorname_np(errno));
    long long p = map(fd, 8, PROT_READ, MAP_SHARED | MAP_POPULATE, 0);
    if (works("populate", p))
        is("populate.counter", (long long)*(volatile uint64_t *)(uintptr_t)p, 1);
    p = map(fd, 8, PROT_READ, MAP_SHARED_VALIDATE, 0);
    if (works("shared_validate", p))
        is("shared_validate.counter", (long long)*(volatile uint64_t *)(uintptr_t)p, 1);
    fails("no_kind", map(fd, 8, PROT_READ, 0, 0), EINVAL);
    p = (long long)mmap64(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (works("mmap64", p))
        is("mmap64.counter", (long long)*(volatile uint64_t *)(uintptr_t)p, 1);
}

TEST(call_mmap_over_a_region_hits_it)
{
    int fd = device();
    char *a = area(4);
    reg(fd, 1, a, a + 4 * PAGE);
    void *p = mmap(a + PAGE, 8, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    if (check(p == a + PAGE, "mmap", "the address asked for", "%p", p))
        is("counter", (long long)*(volatile uint64_t *)p, 1);
    READS("read", fd, 256, HINTED(1, a + PAGE, a + 2 * PAGE), LAST(1));
}

TEST(call_mmap_outlives_close)
{
    int fd = device();
    char *a = area(2);
    reg(fd, 1, a, a + PAGE);
    volatile uint64_t *one = counter_of(fd), *two = counter_of(fd);
    discard(a, 1);
    is("close", close(fd), 0);
    is("value_kept", (long long)*one, 1);
    discard(a, 1);
    is("goes_on_counting", (long long)*one, 2);
    discard(a + PAGE, 1);
    is("only_for_regions", (long long)*one, 2);
    is("unmap_one", munmap((void *)one, PAGE), 0);
    discard(a, 1);
    is("the_other_counts", (long long)*two, 3);
    for (uint64_t i = 4; i < 100; i++)
        discard(a, 1);
    is("and_counts", (long long)*two, 99);
    /* Other contexts come and go meanwhile. */
    for (int i = 0; i < 5; i++) {
        int other = device();
        reg(other, 1, a, a + PAGE);
        is("another_starts_at_0", (long long)*counter_of(other), 0);
        close(other);
    }
    discard(a, 1);
    is("still", (long long)*two, 100);
    is("unmap_the_last", munmap((void *)two, PAGE), 0);
    discard(a, 1);
}

TEST(call_mmap_of_other_files_untouched)
{
    device();
    int file = memfd_create("file", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, 4 * PAGE) != 0)
        give_up("memfd_create");
    works("shared_writable", map(file, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, 0));
    works("offset", map(file, PAGE, PROT_READ, MAP_SHARED, PAGE));
    works("anonymous", (long long)mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    int pipes[2];
    if (pipe(pipes) != 0)
        give_up("pipe");
    fails("pipe", map(pipes[0], 8, PROT_READ, MAP_SHARED, 0), ENODEV);
    fails("closed", map(999, 8, PROT_READ, MAP_SHARED, 0), EBADF);
}

static sigjmp_buf back;

static void on_fault(int number)
{
    siglongjmp(back, number);
}

TEST(call_mmap_is_read_only_memory)
{
    volatile uint64_t *counter = counter_of(device());
    signal(SIGSEGV, on_fault);
    int number = sigsetjmp(back, 1);
    if (number == 0)
        *counter = 5;
    is("write_faults", number, SIGSEGV);
    is("counter", (long long)*counter, 0);
}
