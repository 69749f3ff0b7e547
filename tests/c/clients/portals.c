/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * As Portals 4 uses the device: a progress thread sleeps in epoll and reads one record at a time until LAST;
 * whoever wants a registration spins until the last LAST equals the counter page. It also registers ranges
 * of no length.
 */
#define _GNU_SOURCE
#include "application.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int fd, epoll;
static volatile uint64_t *counter;
static _Atomic uint64_t generation; /* of the last LAST */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    bool valid;
    unsigned generation;
} cached[BUFFERS];
static atomic_bool over;

static void unregister(uint64_t cookie)
{
    if (ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0)
        die("UNREGISTER_REGION");
}

static void *progress(void *unused)
{
    while (!over) {
        struct epoll_event ready;
        int n = epoll_wait(epoll, &ready, 1, 100);
        if (n < 0 && errno != EINTR)
            die("epoll_wait");
        if (n <= 0)
            continue;
        for (;;) {
            struct ummunotify_event e;
            ssize_t bytes = read(fd, &e, sizeof e);
            if (bytes < 0 && errno == EAGAIN)
                break;
            if (bytes != sizeof e)
                die("read of one record");
            if (e.type == UMMUNOTIFY_EVENT_TYPE_LAST) {
                generation = e.user_cookie_counter;
                break;
            }
            pthread_mutex_lock(&lock);
            if (e.user_cookie_counter < BUFFERS && cached[e.user_cookie_counter].valid) {
                cached[e.user_cookie_counter].valid = false;
                unregister(e.user_cookie_counter);
            }
            pthread_mutex_unlock(&lock);
        }
    }
    return unused;
}

/* Nothing but the progress thread can end this: a counter that no LAST reports is a hang. */
static void spin(void)
{
    struct timespec begin, t;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    while (generation != *counter) {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &t);
        if (t.tv_sec - begin.tv_sec > 10) {
            printf("LAST %llu, counter %llu\n", (unsigned long long)generation, (unsigned long long)*counter);
            errno = ETIMEDOUT;
            die("waiting until LAST equals the counter");
        }
    }
}

static unsigned registered_generation(struct buffer *b, unsigned number)
{
    spin();
    pthread_mutex_lock(&lock);
    if (!cached[number].valid) {
        struct ummunotify_register_ioctl r = {(uintptr_t)b->memory, (uintptr_t)b->memory + b->length, number, 0, 0};
        if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
            die("REGISTER_REGION");
        cached[number].valid = true;
        cached[number].generation = b->generation;
    }
    unsigned valid_for = cached[number].generation;
    pthread_mutex_unlock(&lock);
    return valid_for;
}

static bool settled(void)
{
    spin();
    return generation == *counter;
}

static void clear(void)
{
    pthread_mutex_lock(&lock);
    for (uint64_t i = 0; i < BUFFERS; i++) {
        if (cached[i].valid)
            unregister(i);
        cached[i].valid = false;
    }
    for (uint64_t i = 0; i < 8; i++)
        unregister(1000 + i);
    pthread_mutex_unlock(&lock);
}

int main(int argc, char **argv)
{
    fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        die("open");
    counter = mmap(NULL, sizeof *counter, PROT_READ, MAP_SHARED, fd, 0);
    if (counter == MAP_FAILED)
        die("mmap of the counter");
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t address = 0x2a8000000000 + i * (64 * PAGE) + i % 2 * 100;
        struct ummunotify_register_ioctl r = {address, address, 1000 + i, 0, 0};
        if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
            die("REGISTER_REGION without length");
    }
    epoll = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) != 0)
        die("epoll");
    pthread_t thread;
    errno = pthread_create(&thread, NULL, progress, NULL);
    if (errno)
        die("pthread_create");
    int code = application(&(struct cache){"portals", registered_generation, settled, clear, counter, 500},
                           argc > 1 ? (unsigned)atoi(argv[1]) : 1500);
    over = true;
    pthread_join(thread, NULL);
    return code;
}
