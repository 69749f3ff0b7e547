/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * As a provider of libfabric uses the device: it passes the last byte of a range as its end, asks for one
 * event at a time, stops at the first INVAL, and comes back until there is none.
 */
#define _GNU_SOURCE
#include "application.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

static int fd;
static volatile uint64_t *counter;
static uint64_t last;
static struct {
    bool valid;
    unsigned generation;
} cached[BUFFERS];

/* The next region that isn't valid any more; false if there is none. */
static bool next_invalid(uint64_t *cookie)
{
    for (;;) {
        struct ummunotify_event e;
        ssize_t n = read(fd, &e, sizeof e);
        if (n < 0 && errno == EAGAIN)
            return false;
        if (n != sizeof e)
            die("read of one record");
        if (e.type == UMMUNOTIFY_EVENT_TYPE_INVAL) {
            *cookie = e.user_cookie_counter;
            return true;
        }
        last = e.user_cookie_counter;
    }
}

static void flush(void)
{
    uint64_t cookie;
    while (next_invalid(&cookie)) {
        if (cookie >= BUFFERS || !cached[cookie].valid) {
            errno = EINVAL;
            die("a cookie of a live region");
        }
        cached[cookie].valid = false;
        if (ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0)
            die("UNREGISTER_REGION");
    }
}

static unsigned registered_generation(struct buffer *b, unsigned number)
{
    flush();
    if (!cached[number].valid) {
        struct ummunotify_register_ioctl r = {
            .start = (uintptr_t)b->memory, .end = (uintptr_t)b->memory + b->length - 1, .user_cookie = number};
        if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
            die("REGISTER_REGION");
        cached[number].valid = true;
        cached[number].generation = b->generation;
    }
    return cached[number].generation;
}

static bool settled(void)
{
    flush();
    return last == *counter;
}

static void clear(void)
{
    for (uint64_t i = 0; i < BUFFERS; i++)
        if (cached[i].valid && ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &i) != 0)
            die("UNREGISTER_REGION");
}

int main(int argc, char **argv)
{
    fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        die("open");
    counter = mmap(NULL, sizeof *counter, PROT_READ, MAP_SHARED, fd, 0);
    if (counter == MAP_FAILED)
        die("mmap of the counter");
    return application(&(struct cache){"zhpe", registered_generation, settled, clear, counter, 0},
                       argc > 1 ? (unsigned)atoi(argv[1]) : 1500);
}
