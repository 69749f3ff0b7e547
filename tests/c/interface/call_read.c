/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* read, readv, pread and kin on a descriptor that is readable or doesn't block. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

/* The entry points of _FORTIFY_SOURCE, called as the compiler would. */
ssize_t __read_chk(int fd, void *buffer, size_t count, size_t room);
ssize_t __pread_chk(int fd, void *buffer, size_t count, off_t offset, size_t room);
ssize_t __pread64_chk(int fd, void *buffer, size_t count, off64_t offset, size_t room);

enum { RECORD = 32 };

/* A context with regions 0 to n-1, page i of the area each, all of them hit by one invalidation. */
static int hit_context(char **area_out, uint64_t n)
{
    int fd = device();
    char *a = area(n);
    for (uint64_t i = 0; i < n; i++)
        if (reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE) != 0)
            give_up("register");
    discard(a, n);
    *area_out = a;
    return fd;
}

/* n records from region `first` on, and LAST where `last` isn't 0. */
static size_t page_records(struct ummunotify_event *out, char *a, uint64_t first, uint64_t n, uint64_t last)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = (struct ummunotify_event)HINTED(first + i, a + (first + i) * PAGE, a + (first + i + 1) * PAGE);
    if (last)
        out[n++] = (struct ummunotify_event)LAST(last);
    return n;
}

static void reads_pages(const char *what, int fd, size_t count, char *a, uint64_t first, uint64_t n, uint64_t last)
{
    struct ummunotify_event want[130];
    reads(what, fd, count, want, page_records(want, a, first, n, last));
}

TEST(call_read_not_readable_is_eagain)
{
    int fd = device();
    char *a = area(1);
    char buffer[256];
    nothing("fresh", fd);
    reg(fd, 1, a, a + PAGE);
    nothing("registered", fd);
    discard(a, 1);
    drain(fd);
    nothing("drained", fd);
    fails("count_0", read(fd, buffer, 0), EAGAIN);
    fails("count_31", read(fd, buffer, 31), EAGAIN);
    fails("unmapped_buffer", read(fd, hole(1), 64), EAGAIN);
    fails("null", syscall(SYS_read, fd, NULL, 64ul), EAGAIN);
}

TEST(call_read_o_nonblock_is_tested_at_each_call)
{
    int fd = open_device(O_RDONLY);
    /* Were it not, this would hang. */
    is("fcntl.on", fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
    nothing("fcntl", fd);
    is("fionbio.off", ioctl(fd, FIONBIO, &(int){0}), 0);
    is("fionbio.off.shows", fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    is("fionbio.on", ioctl(fd, FIONBIO, &(int){1}), 0);
    nothing("fionbio", fd);
    is("fcntl.off", fcntl(fd, F_SETFL, 0), 0);
    is("syscall.on", syscall(SYS_fcntl, fd, F_SETFL, O_NONBLOCK), 0);
    nothing("syscall", fd);
}

TEST(call_read_short)
{
    char *a;
    int fd = hit_context(&a, 3);
    reads_pages("all_and_last", fd, 8 * RECORD, a, 0, 3, 1);
    nothing("and_no_more", fd);

    fd = hit_context(&a, 3);
    reads_pages("exactly_with_last", fd, 4 * RECORD, a, 0, 3, 1);
    nothing("and_no_more_2", fd);

    fd = hit_context(&a, 3);
    reads_pages("two", fd, 2 * RECORD, a, 0, 2, 0);
    is("still_readable", readable(fd), 1);
    reads_pages("third_and_last", fd, 8 * RECORD, a, 2, 1, 1);

    fd = hit_context(&a, 3);
    reads_pages("one_by_one", fd, RECORD, a, 0, 1, 0);
    reads_pages("one_by_one", fd, RECORD, a, 1, 1, 0);
    reads_pages("one_by_one", fd, RECORD, a, 2, 1, 0);
    reads_pages("last_by_itself", fd, RECORD, a, 3, 0, 1);
    nothing("and_no_more_3", fd);
}

TEST(call_read_exactly_full)
{
    char *a;
    int fd = hit_context(&a, 3);
    reads_pages("full_of_invals", fd, 3 * RECORD, a, 0, 3, 0);
    is("still_readable", readable(fd), 1);
    READS("last_alone", fd, 8 * RECORD, LAST(1));
    is("not_readable", readable(fd), 0);
    nothing("and_no_more", fd);
}

TEST(call_read_odd_counts)
{
    char *a;
    int fd = hit_context(&a, 4);
    reads_pages("33", fd, 33, a, 0, 1, 0);
    reads_pages("63", fd, 63, a, 1, 1, 0);
    reads_pages("95", fd, 95, a, 2, 2, 0);
    READS("63_for_last", fd, 63, LAST(1));
    fd = hit_context(&a, 1);
    reads_pages("127", fd, 127, a, 0, 1, 1);
}

TEST(call_read_below_a_record_is_zero)
{
    char *a, buffer[64];
    int fd = hit_context(&a, 1);
    memset(buffer, 0x33, sizeof buffer);
    is("count_0", read(fd, buffer, 0), 0);
    is("count_1", read(fd, buffer, 1), 0);
    is("count_31", read(fd, buffer, 31), 0);
    for (size_t i = 0; i < sizeof buffer; i++)
        if (buffer[i] != 0x33)
            is("buffer_untouched", buffer[i], 0x33);
    is("still_readable", readable(fd), 1);
    reads_pages("nothing_consumed", fd, 32, a, 0, 1, 0);
    is("count_31_before_last", read(fd, buffer, 31), 0);
    is("still_readable_for_last", readable(fd), 1);
    READS("last_not_consumed", fd, 32, LAST(1));
}

TEST(call_read_page_size_is_the_most)
{
    char *a;
    int fd = hit_context(&a, 200);
    reads_pages("128_of_200", fd, 16 * PAGE, a, 0, 128, 0);
    reads_pages("72_and_last", fd, 16 * PAGE, a, 128, 72, 1);
    nothing("and_no_more", fd);

    fd = hit_context(&a, 128);
    reads_pages("128_of_128", fd, PAGE, a, 0, 128, 0);
    is("still_readable", readable(fd), 1);
    READS("last_alone", fd, PAGE, LAST(1));

    fd = hit_context(&a, 127);
    reads_pages("127_and_last", fd, PAGE, a, 0, 127, 1);
    nothing("and_no_more_2", fd);

    /* A count beyond the buffer is nobody's business as long as nothing is written there. */
    struct ummunotify_event e[130], want[130];
    fd = hit_context(&a, 129);
    long bytes = syscall(SYS_read, fd, e, 1ul << 30);
    got_records("count_of_a_gigabyte", e, bytes, want, page_records(want, a, 0, 128, 0));
}

TEST(call_read_bytes_past_the_last_record_untouched)
{
    char *a;
    int fd = hit_context(&a, 2);
    unsigned char *buffer = (unsigned char *)area(2);
    memset(buffer, 0xc3, 2 * PAGE);
    /* At an odd address, too. */
    is("bytes", read(fd, buffer + 1, 1000), 3 * RECORD);
    is("before", buffer[0], 0xc3);
    long touched = 0;
    for (size_t i = 1 + 3 * RECORD; i < 2 * PAGE; i++)
        touched += buffer[i] != 0xc3;
    is("after", touched, 0);
}

TEST(call_read_order_while_more_comes)
{
    int fd = device();
    char *a = area(6);
    for (uint64_t i = 0; i < 6; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    discard(a + 3 * PAGE, 3);
    READS("first_of_three", fd, RECORD, HINTED(3, a + 3 * PAGE, a + 4 * PAGE));
    discard(a, 4);
    READS("the_rest", fd, 4096, HINTED(4, a + 4 * PAGE, a + 5 * PAGE), HINTED(5, a + 5 * PAGE, a + 6 * PAGE),
          HINTED(0, a, a + PAGE), HINTED(1, a + PAGE, a + 2 * PAGE), HINTED(2, a + 2 * PAGE, a + 3 * PAGE),
          HINTED(3, a + 3 * PAGE, a + 4 * PAGE), LAST(2));
}

/* Reads 2 INVALs and LAST into a buffer so many bytes before the end of the stack that this runs on. */
static char *stack_end;
static bool beyond_is_there, beyond_is_writable;

static void reads_near_the_end(void)
{
    static const struct {
        const char *name;
        int before;
    } places[] = {
        {"all", 3 * RECORD},           {"but_a_byte", 3 * RECORD - 1}, {"but_a_word", 3 * RECORD - 8},
        {"but_a_record", 2 * RECORD},  {"a_record", RECORD},           {"nine_bytes", 9},
        {"eight_bytes", 8},            {"a_byte", 1},                  {"nothing", 0},
        {"one_beyond", -1},            {"a_record_beyond", -RECORD},   {"above_other_frames", 5 * PAGE + 3},
        {"far_above_in_two_pages", 4 * PAGE + 40},
    };
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        char *a, *buffer = stack_end - places[i].before;
        variant(places[i].name);
        int fd = hit_context(&a, 2);
        struct ummunotify_event want[3];
        page_records(want, a, 0, 2, 1);
        if (places[i].before >= 3 * RECORD || beyond_is_writable) {
            got_records("read", buffer, read(fd, buffer, 4096), want, 3);
        } else {
            fails("read", read(fd, buffer, 4096), EFAULT);
            reads("nothing_consumed", fd, 4096, want, 3);
        }
        nothing("and_no_more", fd);
        /* The same place for what is only read. */
        struct ummunotify_register_ioctl region = {
            .start = (uintptr_t)a, .end = (uintptr_t)a + PAGE, .user_cookie = 77};
        bool fits = beyond_is_writable || places[i].before >= (int)sizeof region;
        if (fits) {
            memcpy(buffer, &region, sizeof region);
            is("register", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, buffer), 0);
        } else if (!beyond_is_there)
            fails("register", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, buffer), EFAULT);
        close(fd);
    }
    variant(NULL);
}

/* A buffer in the caller's own frames is like any other: also where a stack ends that isn't the thread's first. */
static void on_a_stack(size_t beyond, int protection)
{
    /* Below the last pages, which `places` reads into, what runs here finds room. */
    enum { STACK = 15 };
    static ucontext_t back, there;
    char *stack = area(STACK + beyond);
    stack_end = stack + STACK * PAGE;
    beyond_is_there = beyond > 0;
    beyond_is_writable = beyond && protection & PROT_WRITE;
    if (beyond && mprotect(stack_end, PAGE, protection) != 0)
        give_up("mprotect");
    getcontext(&there);
    there.uc_stack.ss_sp = stack;
    there.uc_stack.ss_size = (STACK - 6) * PAGE;
    there.uc_link = &back;
    makecontext(&there, reads_near_the_end, 0);
    swapcontext(&back, &there);
}

TEST(call_read_into_a_stack_that_ends)
{
    on_a_stack(0, 0);
}

TEST(call_read_into_a_stack_before_read_only_memory)
{
    on_a_stack(1, PROT_READ);
}

TEST(call_read_into_a_stack_before_other_memory)
{
    on_a_stack(1, PROT_READ | PROT_WRITE);
}

/* Every way a buffer can be bad where 2 INVALs and LAST wait; nothing may be lost, also no hint. */
TEST(call_read_bad_buffer_is_efault)
{
    char *a;
    char *unmapped = hole(1), *read_only = area(1), *none = area(1), *edge = area(1);
    mprotect(read_only, PAGE, PROT_READ);
    mprotect(none, PAGE, PROT_NONE);
    struct {
        const char *name;
        void *buffer;
    } bad[] = {
        {"null", NULL},
        {"unmapped", unmapped},
        {"read_only", read_only},
        {"prot_none", none},
        {"kernel", (void *)0xffff888000000000},
        {"first_byte_only", edge + PAGE - 1},
        {"first_record_only", edge + PAGE - RECORD},
        {"within_the_second_record", edge + PAGE - RECORD - 8},
        {"all_but_last", edge + PAGE - 2 * RECORD},
        {"all_but_the_last_byte", edge + PAGE - 3 * RECORD + 1},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        variant(bad[i].name);
        int fd = hit_context(&a, 2);
        fails("read", syscall(SYS_read, fd, bad[i].buffer, 4096ul), EFAULT);
        is("still_readable", readable(fd), 1);
        fails("again", read(fd, bad[i].buffer, 4096), EFAULT);
        discard(a, 1);
        READS("nothing_consumed", fd, 4096, BARE(0, a, a + PAGE), HINTED(1, a + PAGE, a + 2 * PAGE), LAST(2));
        nothing("and_no_more", fd);
        close(fd);
    }
    /* For LAST alone. */
    variant("last");
    int fd = hit_context(&a, 1);
    unreg(fd, 0);
    fails("read", read(fd, unmapped, 32), EFAULT);
    is("still_readable", readable(fd), 1);
    READS("not_consumed", fd, 32, LAST(1));
    /* Too small a count never gets to the buffer. */
    variant("small_count");
    fd = hit_context(&a, 1);
    is("read", read(fd, unmapped, 31), 0);
    variant(NULL);
}

TEST(call_read_bad_tail_that_isnt_needed)
{
    char *a, *edge = area(1) + PAGE - 3 * RECORD;
    struct ummunotify_event want[3];
    int fd = hit_context(&a, 2);
    long bytes = syscall(SYS_read, fd, edge, 4096ul);
    got_records("records_fit", edge, bytes, want, page_records(want, a, 0, 2, 1));
    fd = hit_context(&a, 3);
    bytes = syscall(SYS_read, fd, edge, 3ul * RECORD + 5);
    got_records("count_fits", edge, bytes, want, page_records(want, a, 0, 3, 0));
}

/* readv over segments of these lengths, laid out with guards between them. */
static void readv_row(const char *name, const size_t *lengths, int n, uint64_t regions, uint64_t want_invals,
                      bool want_last)
{
    variant(name);
    char *a;
    int fd = hit_context(&a, regions);
    static unsigned char space[64 * 1024], flat[64 * 1024];
    memset(space, 0x99, sizeof space);
    struct iovec v[64];
    size_t at = 16, total = 0;
    for (int i = 0; i < n; i++) {
        v[i] = (struct iovec){space + at, lengths[i]};
        at += lengths[i] + 16;
    }
    ssize_t bytes = readv(fd, v, n);
    int error = errno;
    for (int i = 0; i < n; i++) {
        memcpy(flat + total, v[i].iov_base, lengths[i]);
        total += lengths[i];
    }
    struct ummunotify_event want[130];
    size_t records = page_records(want, a, 0, want_invals, want_last);
    errno = error;
    got_records("records", flat, bytes, want, records);
    long touched = 0;
    for (size_t i = records * RECORD; i < total; i++)
        touched += flat[i] != 0x99;
    at = 0;
    for (int i = 0; i <= n; i++) {
        for (size_t k = 0; k < 16; k++)
            touched += space[at + k] != 0x99;
        at += 16 + (i < n ? lengths[i] : 0);
    }
    is("bytes_touched_elsewhere", touched, 0);
    if (want_invals < regions)
        reads_pages("rest", fd, 4096, a, want_invals, regions - want_invals, 1);
    else if (!want_last)
        READS("rest", fd, 4096, LAST(1));
    else
        nothing("rest", fd);
    close(fd);
    variant(NULL);
}

#define READV_ROW(name, regions, invals, last, ...)                                           \
    readv_row(name, (const size_t[]){__VA_ARGS__}, sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t), \
              regions, invals, last)

TEST(call_readv_is_one_read_of_the_sum)
{
    READV_ROW("one_segment", 2, 2, true, 4096);
    READV_ROW("two_whole", 2, 2, true, 64, 64);
    READV_ROW("straddling", 2, 2, true, 40, 56);
    READV_ROW("straddling_twice", 3, 3, true, 33, 62, 33);
    READV_ROW("bytes", 1, 1, false, 1, 2, 3, 4, 5, 6, 7, 4);
    READV_ROW("thirty_one_and_one", 1, 1, false, 31, 1);
    READV_ROW("empty_ones_between", 1, 1, true, 0, 20, 0, 0, 50, 0);
    READV_ROW("sum_63", 2, 1, false, 40, 23);
    READV_ROW("sum_of_a_full_queue", 3, 3, false, 50, 46);
    READV_ROW("more_than_a_page", 200, 128, false, 1000, 5000, 5000);
    /* The first segment takes all there is: the second isn't asked for. */
    READV_ROW("second_unused", 1, 1, true, 64, 64);
}

TEST(call_readv_below_a_record_is_zero)
{
    char *a, buffer[64];
    int fd = hit_context(&a, 1);
    struct iovec v[2] = {{buffer, 15}, {buffer + 32, 16}};
    is("sum_31", readv(fd, v, 2), 0);
    v[0].iov_len = v[1].iov_len = 0;
    is("sum_0", readv(fd, v, 2), 0);
    is("no_segment", readv(fd, v, 0), 0);
    reads_pages("nothing_consumed", fd, 4096, a, 0, 1, 1);
}

TEST(call_readv_not_readable_is_eagain)
{
    int fd = device();
    char buffer[64];
    struct iovec v[2] = {{buffer, 15}, {buffer + 32, 16}};
    fails("sum_31", readv(fd, v, 2), EAGAIN);
    v[0].iov_len = 32;
    fails("sum_48", readv(fd, v, 2), EAGAIN);
    v[1].iov_base = hole(1);
    fails("unmapped_segment", readv(fd, v, 2), EAGAIN);
}

TEST(call_readv_bad_arguments)
{
    char *a, *unmapped = hole(1), buffer[128];
    struct iovec v[3] = {{buffer, 32}, {unmapped, 32}, {buffer + 32, 64}};
    int fd = hit_context(&a, 2);
    fails("bad_array", syscall(SYS_readv, fd, unmapped, 2), EFAULT);
    fails("null_array", syscall(SYS_readv, fd, NULL, 1), EFAULT);
    char *edge = area(1) + PAGE - sizeof v[0];
    memcpy(edge, v, sizeof v[0]);
    fails("array_half_unmapped", syscall(SYS_readv, fd, edge, 2), EFAULT);
    fails("negative_number", syscall(SYS_readv, fd, v, -1), EINVAL);
    fails("more_than_iov_max", syscall(SYS_readv, fd, v, 1025), EINVAL);
    v[0].iov_len = (size_t)-1;
    fails("negative_length", readv(fd, v, 1), EINVAL);
    v[0].iov_len = 32;
    fails("bad_segment", readv(fd, v, 3), EFAULT);
    v[1].iov_base = buffer + 32;
    v[1].iov_len = 40;
    v[2] = (struct iovec){unmapped, 64};
    fails("record_straddles_into_a_bad_segment", readv(fd, v, 3), EFAULT);
    is("still_readable", readable(fd), 1);
    reads_pages("nothing_consumed", fd, 4096, a, 0, 2, 1);
    /* A bad segment that nothing goes to is no error. */
    fd = hit_context(&a, 1);
    v[0].iov_len = 64;
    v[1] = (struct iovec){unmapped, 32};
    ssize_t bytes = readv(fd, v, 2);
    struct ummunotify_event want[2];
    got_records("bad_segment_that_isnt_needed", buffer, bytes, want, page_records(want, a, 0, 1, 1));
    fails("closed_descriptor", readv(-1, v, 1), EBADF);
}

TEST(call_pread_ignores_the_offset)
{
    char *a;
    static const off_t offsets[] = {0, 1, 4096, 1l << 40};
    struct ummunotify_event e[4], want[4];
    for (size_t i = 0; i < 4; i++) {
        int fd = hit_context(&a, 2);
        ssize_t bytes = pread(fd, e, RECORD, offsets[i]);
        got_records("pread", e, bytes, want, page_records(want, a, 0, 1, 0));
        bytes = pread64(fd, e, sizeof e, offsets[i]);
        got_records("pread64", e, bytes, want, page_records(want, a, 1, 1, 1));
        fails("not_readable", pread(fd, e, sizeof e, offsets[i]), EAGAIN);
        close(fd);
    }
    int fd = hit_context(&a, 1);
    fails("bad_buffer", pread(fd, hole(1), 64, 0), EFAULT);
    is("count_31", pread(fd, e, 31, 7), 0);
    long bytes = syscall(SYS_pread64, fd, e, sizeof e, 5l);
    got_records("by_syscall", e, bytes, want, page_records(want, a, 0, 1, 1));
    fd = hit_context(&a, 1);
    fails("negative_offset", pread(fd, e, sizeof e, -1), EINVAL);
}

TEST(call_preadv_ignores_the_offset)
{
    char *a, buffer[256], flat[256];
    struct ummunotify_event want[4];
    struct iovec v[2] = {{buffer, 40}, {buffer + 100, 56}};
    static const off_t offsets[] = {0, 4096, 1l << 40};
    for (size_t i = 0; i < 3; i++) {
        for (int call = 0; call < 4; call++) {
            static const char *const names[] = {"preadv", "preadv64", "preadv2", "preadv2_at_the_position"};
            int fd = hit_context(&a, 2);
            ssize_t bytes = call == 0   ? preadv(fd, v, 2, offsets[i])
                            : call == 1 ? preadv64(fd, v, 2, offsets[i])
                            : call == 2 ? preadv2(fd, v, 2, offsets[i], 0)
                                        : preadv2(fd, v, 2, -1, 0);
            memcpy(flat, buffer, 40);
            memcpy(flat + 40, buffer + 100, 56);
            got_records(names[call], flat, bytes, want, page_records(want, a, 0, 2, 1));
            close(fd);
        }
    }
}

TEST(call_read_fortified)
{
    char *a;
    struct ummunotify_event e[4], want[4];
    int fd = hit_context(&a, 3);
    ssize_t bytes = __read_chk(fd, e, RECORD, sizeof e);
    got_records("read_chk", e, bytes, want, page_records(want, a, 0, 1, 0));
    bytes = __pread_chk(fd, e, RECORD, 77, sizeof e);
    got_records("pread_chk", e, bytes, want, page_records(want, a, 1, 1, 0));
    bytes = __pread64_chk(fd, e, RECORD, 77, sizeof e);
    got_records("pread64_chk", e, bytes, want, page_records(want, a, 2, 1, 0));
    bytes = __read_chk(fd, e, sizeof e, sizeof e);
    GOT("last", e, bytes, LAST(1));
    fails("not_readable", __read_chk(fd, e, sizeof e, sizeof e), EAGAIN);
}

TEST(call_read_leaves_errno_alone)
{
    char *a;
    int fd = hit_context(&a, 1);
    errno = 4242;
    struct ummunotify_event e[4];
    ssize_t bytes = read(fd, e, sizeof e);
    int after = errno;
    is("bytes", bytes, 64);
    is("read", after, 4242);
    errno = 4242;
    reg(fd, 5, a, a + 1);
    after = errno;
    is("register", after, 4242);
    errno = 4242;
    unreg(fd, 5);
    after = errno;
    is("unregister", after, 4242);
}

TEST(call_write_is_ebadf)
{
    int fd = device();
    char *a = area(1);
    struct iovec v = {a, 1};
    fails("write", write(fd, "x", 1), EBADF);
    fails("pwrite", pwrite(fd, "x", 1, 0), EBADF);
    fails("writev", writev(fd, &v, 1), EBADF);
    is("not_readable_by_it", readable(fd), 0);
}

TEST(call_lseek_is_espipe)
{
    char *a;
    int fd = hit_context(&a, 1);
    fails("set", lseek(fd, 0, SEEK_SET), ESPIPE);
    fails("current", lseek(fd, 0, SEEK_CUR), ESPIPE);
    fails("end", lseek(fd, 0, SEEK_END), ESPIPE);
    fails("far", lseek64(fd, 1l << 40, SEEK_SET), ESPIPE);
    reads_pages("reads_on", fd, 4096, a, 0, 1, 1);
}
