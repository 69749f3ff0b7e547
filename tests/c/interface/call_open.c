/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* open and its kin. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The entry points of _FORTIFY_SOURCE, called as the compiler would. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int dir, const char *path, int flags);
int __openat64_2(int dir, const char *path, int flags);

/* Checks that it is a fresh context, closes it. */
static void fresh(const char *name, int fd)
{
    variant(name);
    if (works("open", fd)) {
        is("not_readable", readable(fd), 0);
        volatile uint64_t *counter = counter_of(fd);
        is_hex("counter", *counter, 0);
        uint64_t cookie = 1;
        fails("nothing_registered", ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie), EINVAL);
        char *a = area(1);
        works("register", reg(fd, 1, a, a + PAGE));
        unmap(a, 1);
        is("counts", (long long)*counter, 1);
        READS("reports", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
        munmap((void *)counter, PAGE);
        is("close", close(fd), 0);
    }
    variant(NULL);
}

TEST(call_open_rdonly)
{
    fresh("o_rdonly", open(DEVICE, O_RDONLY));
    fresh("o_nonblock", open(DEVICE, O_RDONLY | O_NONBLOCK));
    fresh("o_cloexec", open(DEVICE, O_RDONLY | O_CLOEXEC));
    fresh("both", open(DEVICE, O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    fresh("with_a_mode", open(DEVICE, O_RDONLY | O_CREAT, 0600));
}

TEST(call_open_entry_points)
{
    int dir = open("/", O_RDONLY | O_DIRECTORY);
    fresh("open64", open64(DEVICE, O_RDONLY));
    fresh("openat", openat(AT_FDCWD, DEVICE, O_RDONLY));
    fresh("openat64", openat64(AT_FDCWD, DEVICE, O_RDONLY));
    fresh("openat_of_another_directory", openat(dir, DEVICE, O_RDONLY));
    fresh("openat_of_no_directory", openat(-1, DEVICE, O_RDONLY));
    fresh("open_2", __open_2(DEVICE, O_RDONLY));
    fresh("open64_2", __open64_2(DEVICE, O_RDONLY));
    fresh("openat_2", __openat_2(AT_FDCWD, DEVICE, O_RDONLY));
    fresh("openat64_2", __openat64_2(AT_FDCWD, DEVICE, O_RDONLY));
    fresh("syscall_open", (int)syscall(SYS_open, DEVICE, O_RDONLY | O_NONBLOCK, 0));
    fresh("syscall_openat", (int)syscall(SYS_openat, AT_FDCWD, DEVICE, O_RDONLY | O_NONBLOCK, 0));
}

TEST(call_open_flags_show)
{
    int plain = open_device(O_RDONLY), all = device();
    is("plain.access_mode", fcntl(plain, F_GETFL) & O_ACCMODE, O_RDONLY);
    is("plain.o_nonblock", fcntl(plain, F_GETFL) & O_NONBLOCK, 0);
    is("plain.o_cloexec", fcntl(plain, F_GETFD), 0);
    is("all.access_mode", fcntl(all, F_GETFL) & O_ACCMODE, O_RDONLY);
    is("all.o_nonblock", fcntl(all, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    is("all.o_cloexec", fcntl(all, F_GETFD), FD_CLOEXEC);
}

TEST(call_open_writable_is_einval)
{
    fails("o_wronly", open(DEVICE, O_WRONLY), EINVAL);
    fails("o_rdwr", open(DEVICE, O_RDWR), EINVAL);
    fails("o_rdwr_nonblock", open(DEVICE, O_RDWR | O_NONBLOCK | O_CLOEXEC), EINVAL);
    fails("o_rdwr_creat", open(DEVICE, O_RDWR | O_CREAT, 0600), EINVAL);
    fails("open64", open64(DEVICE, O_RDWR), EINVAL);
    fails("openat", openat(AT_FDCWD, DEVICE, O_WRONLY), EINVAL);
    fails("open_2", __open_2(DEVICE, O_RDWR), EINVAL);
    fails("syscall_open", syscall(SYS_open, DEVICE, O_RDWR, 0), EINVAL);
    fails("syscall_openat", syscall(SYS_openat, AT_FDCWD, DEVICE, O_WRONLY, 0), EINVAL);
    /* The refusals left nothing that would stand in the way. */
    fresh("afterwards", open(DEVICE, O_RDONLY));
}

TEST(call_open_lowest_free_number)
{
    int low = dup(STDOUT_FILENO), next = dup(STDOUT_FILENO);
    close(low);
    int first = device();
    is("first", first, low);
    close(next);
    int second = device();
    is("second", second, next);
    int third = device(), file = open("/dev/null", O_RDONLY);
    is("file_opened_next", file, third + 1);
}

TEST(call_open_other_paths_untouched)
{
    fails("missing_file", open("/dev/ummunotify.not", O_RDONLY), ENOENT);
    fails("prefix", open("/dev/ummunotif", O_RDONLY), ENOENT);
    fails("bad_pointer", open((const char *)8, O_RDONLY), EFAULT);
    fails("syscall_bad_pointer", syscall(SYS_openat, AT_FDCWD, (const char *)8, O_RDONLY, 0), EFAULT);
    fails("empty", open("", O_RDONLY), ENOENT);
    int null = open("/dev/null", O_RDWR);
    works("null", null);
    is("null.read", read(null, &(char){0}, 1), 0);
    is("null.write", write(null, "x", 1), 1);
    /* A path that ends where readable memory ends. */
    char *edge = area(1) + PAGE - sizeof "/dev/null";
    __builtin_memcpy(edge, "/dev/null", sizeof "/dev/null");
    works("path_at_the_end_of_memory", open(edge, O_RDONLY));
}

TEST(call_open_path_looks_like_a_device)
{
    struct stat s;
    struct statx x;
    is("access", access(DEVICE, R_OK), 0);
    is("access_exists", access(DEVICE, F_OK), 0);
    is("faccessat", faccessat(AT_FDCWD, DEVICE, R_OK, 0), 0);
    is("euidaccess", euidaccess(DEVICE, R_OK), 0);
    if (is("stat", stat(DEVICE, &s), 0))
        check(S_ISCHR(s.st_mode), "stat.type", "a character device", "mode %o", s.st_mode);
    if (is("lstat", lstat(DEVICE, &s), 0))
        check(S_ISCHR(s.st_mode), "lstat.type", "a character device", "mode %o", s.st_mode);
    if (is("fstatat", fstatat(AT_FDCWD, DEVICE, &s, 0), 0))
        check(S_ISCHR(s.st_mode), "fstatat.type", "a character device", "mode %o", s.st_mode);
    if (is("statx", statx(AT_FDCWD, DEVICE, 0, STATX_TYPE, &x), 0))
        check(S_ISCHR(x.stx_mode), "statx.type", "a character device", "mode %o", x.stx_mode);
    fails("another_path", access("/dev/ummunotify.not", F_OK), ENOENT);
    fails("stat_of_another_path", stat("/dev/ummunotify.not", &s), ENOENT);
}

TEST(call_open_contexts_are_independent)
{
    int one = device(), two = device();
    volatile uint64_t *counter_one = counter_of(one), *counter_two = counter_of(two);
    char *a = area(4);
    works("one.register", reg(one, 1, a, a + 4 * PAGE));
    works("two.same_cookie", reg(two, 1, a + 2 * PAGE, a + 4 * PAGE));
    discard(a, 1);
    is("one.counts", (long long)*counter_one, 1);
    is("two.doesnt", (long long)*counter_two, 0);
    is("one.readable", readable(one), 1);
    is("two.not", readable(two), 0);
    discard(a + 2 * PAGE, 1);
    is("one.counts_both", (long long)*counter_one, 2);
    is("two.counts_its_own", (long long)*counter_two, 1);
    READS("one.read", one, 256, BARE(1, a, a + 4 * PAGE), LAST(2));
    READS("two.read", two, 256, HINTED(1, a + 2 * PAGE, a + 3 * PAGE), LAST(1));
    unreg(one, 1);
    discard(a, 4);
    is("one.unregistered", (long long)*counter_one, 2);
    is("two.still_registered", (long long)*counter_two, 2);
    close(one);
    discard(a, 4);
    is("two.lives_on", (long long)*counter_two, 3);
    READS("two.reads_on", two, 256, BARE(1, a + 2 * PAGE, a + 4 * PAGE), LAST(3));
}

TEST_SLOW(call_open_64_contexts, 60)
{
    enum { N = 64 };
    int fd[N];
    volatile uint64_t *counter[N];
    char *a = area(N);
    long bad = 0;
    for (uint64_t i = 0; i < N; i++) {
        fd[i] = device();
        counter[i] = counter_of(fd[i]);
        bad += reg(fd[i], i, a, a + (i + 1) * PAGE) != 0;
    }
    is("registers_that_failed", bad, 0);
    /* Page i is in the regions of i and all after it. */
    for (size_t i = 0; i < N; i++)
        discard(a + i * PAGE, 1);
    for (uint64_t i = 0; i < N; i++)
        bad += *counter[i] != i + 1;
    is("counters_that_are_wrong", bad, 0);
    READS("first", fd[0], 256, HINTED(0, a, a + PAGE), LAST(1));
    for (uint64_t i = 1; i < N; i++) {
        struct ummunotify_event e[4];
        ssize_t n = read(fd[i], e, sizeof e);
        bad += n != 64 || e[0].user_cookie_counter != i || e[0].flags || e[1].user_cookie_counter != i + 1;
    }
    is("reads_that_are_wrong", bad, 0);
    for (size_t i = 0; i < N; i += 2)
        close(fd[i]);
    discard(a, N);
    for (uint64_t i = 1; i < N; i += 2)
        bad += *counter[i] != i + 2;
    is("counters_of_those_left_open", bad, 0);
}

static int descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 4096; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

TEST_SLOW(call_open_and_close_a_thousand_times, 60)
{
    int before = descriptors();
    long bad = 0;
    double slowest = 0;
    char *a = area(1);
    for (uint64_t i = 0; i < 1000; i++) {
        double begin = now();
        int fd = device();
        double took = now() - begin;
        slowest = took > slowest ? took : slowest;
        bad += reg(fd, i, a, a + PAGE) != 0;
        if (i % 2)
            discard(a, 1);
        if (i % 3 == 0)
            munmap((void *)counter_of(fd), PAGE);
        bad += close(fd) != 0;
    }
    is("calls_that_failed", bad, 0);
    is("descriptors_afterwards", descriptors(), before);
    /* Finds a hang, not a busy machine: an open starts no more than a few system calls and one exchange. */
    check(slowest < 10, "slowest_open", "less than ten seconds", "%.3f s", slowest);
    fresh("the_next", open(DEVICE, O_RDONLY));
}
