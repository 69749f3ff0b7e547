/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A call at which the supervisor is still looking when it is killed: it must not run any more, for nobody has
 * recorded it. Its path lies on a page that waits for a userfaultfd which nobody serves, so that the look takes
 * its time. Prints what the call answered, or that it runs. Exit code 77: no userfaultfd can be had.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096UL

static char *map(int kind)
{
    return mmap(NULL, PAGE, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
}

/* The call waits for the page: a call that had not been let run wouldn't. */
static void runs(int signal)
{
    static const char said[] = "truncate: runs\n";
    ssize_t written = write(1, said, sizeof said - 1);
    (void)signal, (void)written;
    _exit(1);
}

int main(void)
{
    /* Shared memory is a file, so that it matters which one is truncated. */
    char *page = map(MAP_SHARED), *missing = map(MAP_PRIVATE);
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register watch = {{(uintptr_t)missing, PAGE}, UFFDIO_REGISTER_MODE_MISSING, 0};
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) != 0) {
        printf("userfaultfd: %s\n", strerror(errno));
        return 77;
    }
    int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct ummunotify_register_ioctl r = {(uintptr_t)page, (uintptr_t)page + PAGE, 1, 0, 0};
    if (fd < 0 || ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0 || ioctl(uffd, UFFDIO_REGISTER, &watch) != 0) {
        perror("open");
        return 1;
    }
    signal(SIGALRM, runs);
    alarm(8);
    printf("ready\n");
    fflush(stdout);
    /* With other tasks in the process the path wouldn't be looked at. */
    long result = truncate(missing, 0);
    printf("truncate: %s\n", result == 0 ? "0" : strerrorname_np(errno));
    fflush(stdout);
    _exit(0);
}
