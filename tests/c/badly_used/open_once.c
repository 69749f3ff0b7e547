/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Opens the device; prints `open: ok` after one invalidation was reported, or `open: ERRNO`. Then it shows that
 * the process is none the worse for it. Exit code 0 or 3.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
    int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    int error = errno;
    char *p = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ummunotify_register_ioctl r = {(uintptr_t)p, (uintptr_t)p + 8192, 7, 0, 0};
    struct ummunotify_event e[4];
    if (fd >= 0 && ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
        perror("REGISTER_REGION");
    if (munmap(p, 8192) != 0)
        perror("munmap");
    if (fd < 0) {
        printf("open: %s\n", strerrorname_np(error));
        /* No child may have been left to be waited for. */
        if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD)
            printf("a child is left\n");
        return 3;
    }
    ssize_t n = read(fd, e, sizeof e);
    if (n == 64 && e[0].user_cookie_counter == 7 && e[1].user_cookie_counter == 1)
        printf("open: ok\n");
    else
        printf("read: %zd\n", n);
    return 0;
}
