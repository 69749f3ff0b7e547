/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the model clients serve: an application of a few dozen buffers. Other threads unmap, map anew, move
 * and discard them all the time, and before each use the client is asked for a registration that is valid.
 * A buffer isn't changed while it is being used, as no application frees what it is sending.
 */
#ifndef APPLICATION_H
#define APPLICATION_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <linux/ummunotify.h>

#define PAGE 4096ul
#define DEVICE "/dev/ummunotify"
#define BUFFERS 24

struct buffer {
    pthread_mutex_t lock; /* held while it is used or changed */
    char *memory;
    size_t length;
    unsigned generation; /* how often its memory was changed: the truth that a cache must not fall behind */
};

/* A cache as the application sees it. */
struct cache {
    const char *name;
    /* Called with the buffer's lock held: the generation that its registration, old or new, was made for. */
    unsigned (*registered_generation)(struct buffer *buffer, unsigned number);
    /* Called when nobody changes anything any more: the client has nothing left to be told. */
    bool (*settled)(void);
    /* Unregisters everything. */
    void (*clear)(void);
    volatile uint64_t *counter;
    /* How long those who change memory rest after each change: a client that spins until it has heard of
       everything needs a moment in which that is so. */
    unsigned rest_microseconds;
};

/* Runs the application for `milliseconds`; returns the exit code of the program. */
int application(const struct cache *cache, unsigned milliseconds);

/* Ends the program with a message and the errno. */
_Noreturn void die(const char *what);
/* Prints `ok WHAT` or `FAIL WHAT`, and remembers the latter. */
void expect(bool good, const char *what);
int exit_code(void);

#endif
