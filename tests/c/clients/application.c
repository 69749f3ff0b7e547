/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include "application.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static struct buffer buffers[BUFFERS];
static atomic_bool over;
static unsigned rest_microseconds;
static int failures;

void die(const char *what)
{
    printf("FAIL %s: %s\n", what, strerror(errno));
    fflush(stdout);
    exit(1);
}

void expect(bool good, const char *what)
{
    printf("%s %s\n", good ? "ok" : "FAIL", what);
    failures += !good;
}

int exit_code(void)
{
    return failures != 0;
}

static unsigned random_below(unsigned *state, unsigned n)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % n;
}

static void map_at(char *memory, size_t length, int flags)
{
    void *p = mmap(memory, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (p != memory)
        die("mmap");
}

/* Changes the memory of a buffer in one of the ways that make registrations of it stale. */
static void change(struct buffer *b, unsigned *state, unsigned number)
{
    size_t pages = b->length / PAGE, from = random_below(state, (unsigned)pages);
    size_t some = 1 + random_below(state, (unsigned)(pages - from));
    char *start = b->memory + from * PAGE;
    char *elsewhere = (char *)0x2b0000000000 + number * (64 * PAGE);
    switch (random_below(state, 5)) {
    case 0: /* the whole buffer is freed and had again */
        if (munmap(b->memory, b->length) != 0)
            die("munmap");
        map_at(b->memory, b->length, MAP_FIXED_NOREPLACE);
        break;
    case 1: /* a part of it */
        if (munmap(start, some * PAGE) != 0)
            die("munmap");
        map_at(start, some * PAGE, MAP_FIXED_NOREPLACE);
        break;
    case 2:
        map_at(start, some * PAGE, MAP_FIXED);
        break;
    case 3:
        if (madvise(start, some * PAGE, MADV_DONTNEED) != 0)
            die("madvise");
        break;
    case 4: /* moved away; something new in its place. One page: old kernels move one mapping at a time */
        some = 1;
        if (mremap(start, some * PAGE, some * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere) != elsewhere)
            die("mremap");
        map_at(start, some * PAGE, MAP_FIXED_NOREPLACE);
        if (munmap(elsewhere, some * PAGE) != 0)
            die("munmap");
        break;
    }
    memset(b->memory, (int)b->generation, b->length);
    b->generation++;
}

struct changer {
    pthread_t thread;
    unsigned number;
    atomic_ulong changes;
};

static void *change_all_the_time(void *changer_)
{
    struct changer *c = changer_;
    unsigned state = 77 + c->number;
    while (!over) {
        struct buffer *b = &buffers[random_below(&state, BUFFERS)];
        pthread_mutex_lock(&b->lock);
        change(b, &state, c->number);
        pthread_mutex_unlock(&b->lock);
        c->changes++;
        if (rest_microseconds)
            nanosleep(&(struct timespec){0, (long)rest_microseconds * 1000}, NULL);
    }
    return NULL;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int application(const struct cache *cache, unsigned milliseconds)
{
    rest_microseconds = cache->rest_microseconds;
    for (unsigned i = 0; i < BUFFERS; i++) {
        struct buffer *b = &buffers[i];
        pthread_mutex_init(&b->lock, NULL);
        b->memory = (char *)0x2a8000000000 + i * (64 * PAGE);
        b->length = (1 + i % 7) * PAGE;
        map_at(b->memory, b->length, MAP_FIXED_NOREPLACE);
        memset(b->memory, 1, b->length);
    }
    enum { CHANGERS = 2 };
    struct changer changers[CHANGERS] = {0};
    for (unsigned i = 0; i < CHANGERS; i++) {
        changers[i].number = i;
        errno = pthread_create(&changers[i].thread, NULL, change_all_the_time, &changers[i]);
        if (errno)
            die("pthread_create");
    }
    unsigned long uses = 0, stale = 0;
    unsigned state = 5;
    /* A busy machine gets more time, for there must be something to tell. */
    for (double end = now() + milliseconds / 1000.0;
         now() < end || ((uses < 200 || changers[0].changes + changers[1].changes < 200) && now() < end + 30); uses++) {
        unsigned number = random_below(&state, BUFFERS);
        struct buffer *b = &buffers[number];
        pthread_mutex_lock(&b->lock);
        stale += cache->registered_generation(b, number) != b->generation;
        pthread_mutex_unlock(&b->lock);
    }
    over = true;
    unsigned long changes = 0;
    for (unsigned i = 0; i < CHANGERS; i++) {
        pthread_join(changers[i].thread, NULL);
        changes += changers[i].changes;
    }
    expect(cache->settled(), "last value reported equals the counter");
    for (unsigned i = 0; i < BUFFERS; i++)
        stale += cache->registered_generation(&buffers[i], i) != buffers[i].generation;
    printf("%s: %lu uses, %lu changes, %lu stale, counter %llu\n", cache->name, uses, changes, stale,
           (unsigned long long)*cache->counter);
    expect(stale == 0, "no stale registration was used");
    expect(uses >= 100 && changes >= 100, "there was something to tell");
    /* One thread is left: from here everything is exact. */
    unsigned long late = 0;
    for (unsigned i = 0; i < 500; i++) {
        struct buffer *b = &buffers[i % BUFFERS];
        cache->registered_generation(b, i % BUFFERS);
        uint64_t before = *cache->counter;
        change(b, &state, 0);
        late += *cache->counter <= before;
        stale += cache->registered_generation(b, i % BUFFERS) != b->generation;
    }
    expect(late == 0, "the counter had moved when a call returned");
    expect(stale == 0, "no stale registration was used by one thread alone");
    cache->clear();
    uint64_t before = *cache->counter;
    for (unsigned i = 0; i < BUFFERS; i++)
        change(&buffers[i], &state, 0);
    expect(*cache->counter == before, "nothing registered, nothing counted");
    return exit_code();
}
