/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What holds for an emulated device alone: its descriptor is a pipe, with one hidden companion. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST = 4096 };

/* The numbers of all open descriptors, but that of the listing itself. */
static int open_numbers(int *numbers)
{
    DIR *d = opendir("/proc/self/fd");
    if (!d)
        give_up("opendir");
    int n = 0;
    for (struct dirent *e; (e = readdir(d)) && n < MOST;)
        if (e->d_name[0] != '.' && atoi(e->d_name) != dirfd(d))
            numbers[n++] = atoi(e->d_name);
    closedir(d);
    return n;
}

/* Opens a context; *hidden is the one descriptor more that this may cost, -1 if there is none. */
static int device_and_hidden(int *hidden)
{
    static int before[MOST], after[MOST];
    int n = open_numbers(before), fd = device(), m = open_numbers(after);
    *hidden = -1;
    check(m - n == 1 || m - n == 2, "descriptors_more", "1 or 2", "%d", m - n);
    for (int i = 0; i < m; i++) {
        bool old = after[i] == fd;
        for (int k = 0; k < n; k++)
            old |= before[k] == after[i];
        if (!old)
            *hidden = after[i];
    }
    return fd;
}

/* The context still does all it should. */
static void works_on(int fd)
{
    char *a = area(1);
    uint64_t cookie = (uintptr_t)a;
    uint64_t before = *counter_of(fd);
    is("not_readable", readable(fd), 0);
    is("register", reg(fd, cookie, a, a + PAGE), 0);
    discard(a, 1);
    is("readable", readable(fd), 1);
    READS("read", fd, 256, HINTED(cookie, a, a + PAGE), LAST(before + 1));
    is("drained", readable(fd), 0);
    is("unregister", unreg(fd, cookie), 0);
}

TEST_EMULATED(emulated_descriptor_is_a_pipe)
{
    int fd = device(), same = dup(fd), other = device();
    struct stat s = {0}, t = {0}, u = {0};
    is("fstat", fstat(fd, &s), 0);
    check(S_ISFIFO(s.st_mode), "type", "a pipe", "mode %o", s.st_mode);
    fstat(same, &t);
    fstat(other, &u);
    is("dup_has_the_same_inode", s.st_ino == t.st_ino, true);
    is("another_context_has_another", s.st_ino != u.st_ino, true);
}

TEST_EMULATED(emulated_at_most_one_hidden_descriptor)
{
    static int numbers[MOST];
    int hidden, before = open_numbers(numbers), fd = device_and_hidden(&hidden);
    if (hidden >= 0) {
        at_least("number", hidden, 64);
        is("cloexec", fcntl(hidden, F_GETFD), FD_CLOEXEC);
    }
    int open_now = open_numbers(numbers), dups[4];
    for (int i = 0; i < 4; i++)
        dups[i] = dup(fd);
    is("dup_costs_no_more", open_numbers(numbers), open_now + 4);
    for (int i = 0; i < 4; i++)
        close(dups[i]);
    close(fd);
    is("close_closes_all", open_numbers(numbers), before);
    fd = device();
    volatile uint64_t *counter = counter_of(fd);
    close(fd);
    munmap((void *)counter, PAGE);
    is("also_after_the_mapping_is_gone", open_numbers(numbers), before);
}

TEST_EMULATED(emulated_hidden_descriptor_withstands_close)
{
    int hidden, fd = device_and_hidden(&hidden);
    variant("close");
    close(hidden);
    works_on(fd);
    variant("syscall");
    fd = device_and_hidden(&hidden);
    syscall(SYS_close, hidden);
    works_on(fd);
    variant("close_range");
    fd = device_and_hidden(&hidden);
    if (hidden >= 0)
        close_range((unsigned)hidden, (unsigned)hidden, 0);
    works_on(fd);
    variant("close_range_of_all_but_the_device");
    fd = device_and_hidden(&hidden);
    close_range((unsigned)fd + 1, ~0u, 0);
    works_on(fd);
    variant("loop_over_all_numbers");
    fd = device_and_hidden(&hidden);
    for (int i = 3; i < MOST; i++)
        if (i != fd)
            close(i);
    works_on(fd);
    variant(NULL);
}

/* The application takes the number for a file of its own: none of our bytes may get there. */
static void taken(const char *name, int (*take)(int from, int number))
{
    variant(name);
    int hidden, fd = device_and_hidden(&hidden), pipes[2];
    if (pipe2(pipes, O_NONBLOCK) != 0)
        give_up("pipe2");
    if (hidden < 0)
        hidden = 1000; /* none to be taken: any number will do */
    is("number_is_the_applications", take(pipes[1], hidden), hidden);
    works_on(fd);
    char byte;
    fails("nothing_written_into_its_file", read(pipes[0], &byte, 1), EAGAIN);
    is("its_file_works", write(hidden, "y", 1), 1);
    is("its_file_works.read", read(pipes[0], &byte, 1), 1);
    is("its_file_works.byte", byte, 'y');
    close(fd);
    is("its_file_survives_the_context", write(hidden, "z", 1), 1);
    variant(NULL);
}

static int take_by_dup3(int from, int number)
{
    return dup3(from, number, O_CLOEXEC);
}

static int take_by_syscall(int from, int number)
{
    return (int)syscall(SYS_dup2, from, number);
}

TEST_EMULATED(emulated_hidden_number_may_be_taken)
{
    taken("dup2", dup2);
    taken("dup3", take_by_dup3);
    taken("syscall", take_by_syscall);
}

TEST_EMULATED(emulated_no_adopt_counter)
{
    int fd = device(), memfd = memfd_create("counter", MFD_CLOEXEC);
    fails("adopt_counter", ioctl(fd, UMMUNOTIFY_ADOPT_COUNTER, &memfd), ENOTTY);
    fails("bad_pointer", ioctl(fd, UMMUNOTIFY_ADOPT_COUNTER, NULL), ENOTTY);
}

static int mappings(void)
{
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), lines = 0;
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;)
        for (ssize_t i = 0; i < n; i++)
            lines += buffer[i] == '\n';
    close(fd);
    return lines;
}

TEST_EMULATED(emulated_closed_contexts_leave_no_mapping)
{
    int fd = device();
    close(fd);
    int before = mappings();
    for (int i = 0; i < 100; i++) {
        fd = device();
        munmap((void *)counter_of(fd), PAGE);
        close(fd);
    }
    int after = mappings();
    /* With the inline layer up to 64 contexts stay mapped (two mappings each) for others to be mapped over. */
    const char *layers = getenv("UMMUNOTIFY_TRAP");
    int kept = layers && strstr(layers, "inline") ? 2 * 64 : 1;
    check(after <= before + kept, "mappings", "no more than before", "%d instead of %d", after, before);
}
