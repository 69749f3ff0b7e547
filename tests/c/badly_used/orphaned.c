/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Opens two contexts, one with a thread that sleeps in read and one with a thread that sleeps in poll; prints
 * `ready` and waits for a line, before which somebody kills the supervisor. Then it calls whatever a client
 * calls and prints what came back. Nothing may hang, which is the caller's to judge.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int sleeper_fd, poller_fd;
/* Kernel ids of the threads that sleep, and how many have said what woke them. */
static _Atomic int reader, poller, said_so;

static void said(const char *what, long result)
{
    int error = errno;
    if (result == -1)
        printf("%s: %s\n", what, strerrorname_np(error));
    else
        printf("%s: %ld\n", what, result);
    fflush(stdout);
}

/* What a read returned: `EIO`, or the records. */
static void records(const char *what, int fd)
{
    struct ummunotify_event e[8];
    ssize_t n = read(fd, e, sizeof e);
    if (n < 0) {
        said(what, -1);
        return;
    }
    flockfile(stdout);
    printf("%s:", what);
    for (ssize_t i = 0; i < n / (ssize_t)sizeof e[0]; i++) {
        if (e[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
            printf(" LAST");
        else
            printf(" %llu%s", (unsigned long long)e[i].user_cookie_counter, e[i].flags ? "h" : "");
    }
    printf("\n");
    fflush(stdout);
    funlockfile(stdout);
}

static void *sleep_in_read(void *unused)
{
    reader = gettid();
    records("sleeping read", sleeper_fd);
    said_so++;
    return unused;
}

static void *sleep_in_poll(void *unused)
{
    struct pollfd p = {.fd = poller_fd, .events = POLLIN};
    poller = gettid();
    said("sleeping poll", poll(&p, 1, -1));
    said_so++;
    return unused;
}

/* Whether a thread sleeps in one of two calls (proc_pid_syscall(5)). */
static int sleeps_in(int thread, long one, long other)
{
    char path[64];
    long number = -1;
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", thread);
    FILE *file = fopen(path, "r");
    int known = file && fscanf(file, "%ld", &number) == 1;
    if (file)
        fclose(file);
    return known && (number == one || number == other);
}

static int reg(int fd, uint64_t cookie, char *start, char *end)
{
    struct ummunotify_register_ioctl r = {(uintptr_t)start, (uintptr_t)end, cookie, 0, 0};
    return ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r);
}

int main(void)
{
    char *a = mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    sleeper_fd = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC);
    poller_fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (sleeper_fd < 0 || poller_fd < 0) {
        perror("open");
        return 1;
    }
    volatile uint64_t *counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, poller_fd, 0);
    reg(sleeper_fd, 1, a, a + 4096);
    reg(poller_fd, 2, a, a + 4096);
    reg(poller_fd, 3, a + 8192, a + 12288);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, sleep_in_read, NULL);
    pthread_create(&threads[1], NULL, sleep_in_poll, NULL);
    while (!sleeps_in(reader, SYS_read, SYS_read) || !sleeps_in(poller, SYS_poll, SYS_ppoll))
        usleep(1000);
    printf("ready\n");
    fflush(stdout);
    char line[16];
    if (!fgets(line, sizeof line, stdin))
        return 1;
    uint64_t before = *counter;
    said("munmap", munmap(a, 4096));
    said("mmap of the counter", mmap(NULL, 8, PROT_READ, MAP_SHARED, poller_fd, 0) == MAP_FAILED ? -1 : 0);
    struct pollfd p = {.fd = poller_fd, .events = POLLIN};
    said("poll", poll(&p, 1, 1000));
    records("first read", poller_fd);
    printf("counter: %s\n", *counter > before ? "moved" : "the same");
    records("second read", poller_fd);
    said("register", reg(poller_fd, 4, a, a + 4096));
    uint64_t cookie = 2;
    said("unregister", ioctl(poller_fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie));
    /* Nothing else may be started by the threads: pthread_join frees memory, and can't any more. */
    while (said_so < 2)
        usleep(1000);
    records("read of the other", sleeper_fd);
    said("close", close(sleeper_fd));
    said("close of the other", close(poller_fd));
    int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
    said("open", fd < 0 ? -1 : 0);
    printf("done\n");
    fflush(stdout);
    _exit(0);
}
