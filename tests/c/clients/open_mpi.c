/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * As Open MPI 1.5 to 2.0 used the device: one thread, never blocking; whenever the counter page differs from
 * the last LAST it reads a page of records at a time until they agree. A cookie is the address of the
 * registration; flags are never set. Handling an event unregisters the region, and that looks for events again.
 *
 * A look from inside the handling of a page can read a newer LAST than the one at the end of that page, which then
 * overwrites it: the client believes to be behind, reads EAGAIN and goes on, and asks again the next time. So the
 * newest LAST is kept beside it, as the device's answer.
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

struct registration {
    unsigned buffer, generation;
    bool valid;
    struct registration *next_dead;
};

static int fd;
static volatile uint64_t *counter;
static uint64_t last_counter, newest_last;
static struct registration *cached[BUFFERS], *dead;
static int depth;

static void release(void);

static void deregister(struct registration *r)
{
    release();
    if (!r->valid)
        return; /* an event for it was handled just now, inside */
    r->valid = false;
    cached[r->buffer] = NULL;
    uint64_t cookie = (uintptr_t)r;
    if (ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0)
        die("UNREGISTER_REGION");
    r->next_dead = dead;
    dead = r;
}

static void release(void)
{
    depth++;
    while (*counter != last_counter) {
        _Alignas(8) char page[4096];
        ssize_t n = read(fd, page, sizeof page);
        if (n < 0 && errno == EAGAIN)
            break;
        if (n <= 0)
            die("read");
        const struct ummunotify_event *e = (const void *)page;
        const struct ummunotify_event *final = e + n / (ssize_t)sizeof *e - 1;
        if (final->type == UMMUNOTIFY_EVENT_TYPE_LAST)
            newest_last = final->user_cookie_counter;
        for (ssize_t i = 0; i < n / (ssize_t)sizeof *e; i++) {
            if (e[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
                last_counter = e[i].user_cookie_counter;
            else if (((struct registration *)(uintptr_t)e[i].user_cookie_counter)->valid)
                deregister((struct registration *)(uintptr_t)e[i].user_cookie_counter);
        }
    }
    /* A record further up may still name them. */
    if (--depth == 0)
        for (struct registration *r; (r = dead); free(r))
            dead = r->next_dead;
}

static unsigned registered_generation(struct buffer *b, unsigned number)
{
    release();
    if (!cached[number]) {
        struct registration *r = malloc(sizeof *r);
        *r = (struct registration){number, b->generation, true, NULL};
        struct ummunotify_register_ioctl arguments;
        __asm__("" : "=m"(arguments));
        arguments.start = (uintptr_t)b->memory;
        arguments.end = (uintptr_t)b->memory + b->length;
        arguments.user_cookie = (uintptr_t)r;
        if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &arguments) != 0)
            die("REGISTER_REGION");
        cached[number] = r;
    }
    return cached[number]->generation;
}

static bool settled(void)
{
    release();
    return newest_last == *counter;
}

static void clear(void)
{
    for (int i = 0; i < BUFFERS; i++)
        if (cached[i])
            deregister(cached[i]);
}

int main(int argc, char **argv)
{
    fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        die("open");
    counter = mmap(NULL, sizeof *counter, PROT_READ, MAP_SHARED, fd, 0);
    if (counter == MAP_FAILED)
        die("mmap of the counter");
    return application(&(struct cache){"open_mpi", registered_generation, settled, clear, counter, 0},
                       argc > 1 ? (unsigned)atoi(argv[1]) : 1500);
}
