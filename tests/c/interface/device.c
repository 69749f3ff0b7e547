/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What the tests share: the device, memory, records, threads, child processes. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int open_device(int flags)
{
    int fd = open(DEVICE, flags);
    if (fd < 0)
        give_up("open");
    return fd;
}

int device(void)
{
    return open_device(O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

volatile uint64_t *counter_of(int fd)
{
    /* 8 bytes, as clients ask for. */
    void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        give_up("mmap of the counter");
    return page;
}

int reg_raw(int fd, uint64_t cookie, uint64_t start, uint64_t end)
{
    /* Garbage in what is ignored, as from a client that never set it. */
    struct ummunotify_register_ioctl r = {start, end, cookie, 0xdeadbeef, 0xa5a5a5a5};
    return ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r);
}

int reg(int fd, uint64_t cookie, const volatile void *start, const volatile void *end)
{
    return reg_raw(fd, cookie, (uintptr_t)start, (uintptr_t)end);
}

int unreg(int fd, uint64_t cookie)
{
    return ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
}

/*
 * Far below where mmap places mappings and far above the heap; addresses are never used twice, across forks
 * neither, since the next one is inherited.
 */
static uintptr_t next_area = 0x2a0000000000;

char *hole(size_t pages)
{
    uintptr_t start = next_area + 16 * PAGE;
    next_area = start + (pages + 16) * PAGE;
    return (char *)start;
}

char *area(size_t pages)
{
    char *start = hole(pages);
    char *p = mmap(start, pages * PAGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (p != start)
        give_up("mmap of an area");
    memset(p, 0x5a, pages * PAGE);
    return p;
}

void unmap(const volatile void *start, size_t pages)
{
    if (munmap((void *)start, pages * PAGE) != 0)
        give_up("munmap");
}

void discard(const volatile void *start, size_t pages)
{
    if (madvise((void *)start, pages * PAGE, MADV_DONTNEED) != 0)
        give_up("madvise");
}

static int print_event(char *out, size_t room, const struct ummunotify_event *e)
{
    if (e->type == UMMUNOTIFY_EVENT_TYPE_LAST && !e->flags && !e->hint_start && !e->hint_end)
        return snprintf(out, room, " LAST %llu", (unsigned long long)e->user_cookie_counter);
    return snprintf(out, room, " {type %u, flags %u, %#llx-%#llx, cookie %llu}", e->type, e->flags,
                    (unsigned long long)e->hint_start, (unsigned long long)e->hint_end,
                    (unsigned long long)e->user_cookie_counter);
}

static void print_events(char *out, size_t room, const struct ummunotify_event *e, size_t n)
{
    size_t used = (size_t)snprintf(out, room, "%zu records:", n);
    for (size_t i = 0; i < n && used + 96 < room; i++)
        used += (size_t)print_event(out + used, room - used, e + i);
}

bool got_records(const char *what, const void *buffer, ssize_t bytes, const struct ummunotify_event *want,
                 size_t n)
{
    int error = errno;
    char expected[440], got[440];
    print_events(expected, sizeof expected, want, n);
    if (bytes < 0)
        return check(false, what, expected, "-1 %s", strerrorname_np(error));
    if (bytes % (ssize_t)sizeof *want != 0)
        return check(false, what, expected, "%zd bytes", bytes);
    bool same = (size_t)bytes == n * sizeof *want && memcmp(buffer, want, (size_t)bytes) == 0;
    print_events(got, sizeof got, buffer, (size_t)bytes / sizeof *want);
    return check(same, what, expected, "%s", got);
}

bool reads(const char *what, int fd, size_t count, const struct ummunotify_event *want, size_t n)
{
    static _Alignas(8) unsigned char buffer[64 * 1024]; /* one thread of a test checks */
    if (count > sizeof buffer)
        give_up("a buffer of that size");
    memset(buffer, 0xa5, sizeof buffer);
    ssize_t bytes = read(fd, buffer, count);
    if (!got_records(what, buffer, bytes, want, n))
        return false;
    for (size_t i = (size_t)bytes; i < sizeof buffer; i++)
        if (buffer[i] != 0xa5)
            return check(false, what, "the bytes past the last record untouched", "byte %zu written", i);
    return true;
}

bool nothing(const char *what, int fd)
{
    struct ummunotify_event e[4];
    return fails(what, read(fd, e, sizeof e), EAGAIN);
}

void drain(int fd)
{
    struct ummunotify_event e[128];
    while (read(fd, e, sizeof e) > 0)
        ;
}

bool readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void *started(void *task_)
{
    struct task *task = task_;
    task->tid = (pid_t)syscall(SYS_gettid);
    return task->run(task->argument);
}

void start(struct task *task, void *(*run)(void *), void *argument)
{
    *task = (struct task){.run = run, .argument = argument};
    pthread_t thread;
    errno = pthread_create(&thread, NULL, started, task);
    if (errno)
        give_up("pthread_create");
    task->thread = (unsigned long)thread;
    while (!task->tid)
        nap(1);
}

/* State of the task, 0 if it is gone. */
static char state_of(pid_t tid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        snprintf(path, sizeof path, "/proc/%d/stat", tid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    char *end = strrchr(text, ')');
    return end && end[1] == ' ' ? end[2] : 0;
}

bool asleep(const char *what, pid_t tid)
{
    double end = now() + 5;
    char state = '?';
    for (int quiet = 0; quiet < 10;) {
        state = state_of(tid);
        quiet = state == 'S' ? quiet + 1 : 0;
        if (now() > end)
            return check(false, what, "a task that sleeps", "state %c", state ? state : '0');
        nap(2);
    }
    return true;
}

bool ends(const char *what, struct task *task)
{
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 10;
    errno = pthread_timedjoin_np((pthread_t)task->thread, NULL, &limit);
    return check(errno == 0, what, "a thread that ends", "one that goes on");
}

bool ended_well(const char *what, pid_t child)
{
    double end = now() + 10;
    int status;
    pid_t done;
    while ((done = waitpid(child, &status, WNOHANG)) == 0 && now() < end)
        nap(2);
    if (done == 0) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        return check(false, what, "a process that ends", "one that goes on");
    }
    if (done < 0)
        return works(what, done);
    return check(WIFEXITED(status) && WEXITSTATUS(status) == 0, what, "exit code 0", "status %#x",
                 (unsigned)status);
}

void nap(unsigned milliseconds)
{
    struct timespec t = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    nanosleep(&t, NULL);
}

double clock_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

double now(void)
{
    static double patience;
    if (patience == 0)
        patience = getenv(PATIENCE) ? atof(getenv(PATIENCE)) : 1;
    return clock_now() / patience;
}

void turns_init(struct turns *turns)
{
    if (pipe2(turns->to_child, O_CLOEXEC) != 0 || pipe2(turns->to_parent, O_CLOEXEC) != 0)
        give_up("pipe2");
}

static void give_turn(int fd)
{
    if (write(fd, "x", 1) != 1)
        give_up("giving the turn");
}

static void take_turn(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char byte;
    int n;
    while ((n = poll(&p, 1, 15000)) < 0 && errno == EINTR)
        ;
    if (n != 1 || read(fd, &byte, 1) != 1)
        give_up("waiting for the other process");
}

void tell_child(struct turns *turns)
{
    give_turn(turns->to_child[1]);
}

void wait_parent(struct turns *turns)
{
    take_turn(turns->to_child[0]);
}

void tell_parent(struct turns *turns)
{
    give_turn(turns->to_parent[1]);
}

void wait_child(struct turns *turns)
{
    take_turn(turns->to_parent[0]);
}

void exec_helper(char *const arguments[])
{
    char *argv[16] = {"suite", "--helper"};
    for (int i = 0; arguments[i] && i < 13; i++)
        argv[i + 2] = arguments[i];
    execv("/proc/self/exe", argv);
    give_up("execv");
}

pid_t spawn_helper(char *const arguments[])
{
    pid_t pid = fork();
    if (pid < 0)
        give_up("fork");
    if (pid == 0)
        exec_helper(arguments);
    return pid;
}
