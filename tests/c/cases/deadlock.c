/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Deadlocks: locks of the application that are held around calls of the device by one thread and around calls that
 * invalidate by another. Every thread must go on; one that doesn't for five seconds is a deadlock.
 */
#define _GNU_SOURCE
#include "cases.h"

#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { WORKERS = 4 };

static atomic_bool over;
static atomic_ulong progress[WORKERS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, second_lock = PTHREAD_MUTEX_INITIALIZER;

struct worker {
	void (*step)(unsigned long round);
	unsigned number;
};

static void *work(void *worker_)
{
	const struct worker *w = worker_;

	while (!over)
		w->step(progress[w->number]++);
	return NULL;
}

/* Runs the steps against each other, each on a thread of its own. */
static void run_together(void (*const steps[])(unsigned long), unsigned n, double seconds)
{
	pthread_t threads[WORKERS];
	struct worker workers[WORKERS];
	unsigned long last[WORKERS] = { 0 };
	double moved[WORKERS], start = now();

	for (unsigned i = 0; i < n; i++) {
		moved[i] = start;
		workers[i] = (struct worker){ steps[i], i };
		NEED(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
	}
	while (now() - start < seconds) {
		nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
		for (unsigned i = 0; i < n; i++) {
			if (progress[i] != last[i]) {
				last[i] = progress[i];
				moved[i] = now();
			} else if (now() - moved[i] > 5) {
				FAIL("thread %u stands still after %lu rounds", i, last[i]);
			}
		}
	}
	over = true;
	for (unsigned i = 0; i < n; i++) {
		pthread_join(threads[i], NULL);
		printf("thread %u: %lu rounds\n", i, progress[i]);
		NEED(progress[i] > 0);
	}
}

/* ---- an allocator that calls madvise under its own lock ---- */

enum { CELLS = 64 };

static char *heap;
static bool used[CELLS];

static char *allocate(void)
{
	char *got = NULL;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < CELLS && !got; i++)
		if (!used[i]) {
			used[i] = true;
			got = heap + (size_t)i * PAGE;
		}
	pthread_mutex_unlock(&lock);
	return got;
}

static void release(char *cell)
{
	pthread_mutex_lock(&lock);
	used[(cell - heap) / PAGE] = false;
	NEED(madvise(cell, PAGE, MADV_DONTNEED) == 0);
	pthread_mutex_unlock(&lock);
}

static void use_cell(unsigned long round)
{
	char *cell = allocate();

	(void)round;
	if (cell) {
		*cell = 1;
		release(cell);
	}
}

static void read_with_allocations(unsigned long round)
{
	struct pollfd waiter = { device, POLLIN, 0 };
	char *cell;

	(void)round;
	NEED(poll(&waiter, 1, 10) >= 0);
	cell = allocate();
	reported(0, NULL);
	if (cell)
		release(cell);
}

static void register_under_lock(unsigned long round)
{
	uint64_t cookie = 1000 + round;

	pthread_mutex_lock(&lock);
	watch(heap, CELLS * PAGE, cookie);
	pthread_mutex_unlock(&lock);
	unwatch(cookie);
}

static void allocator(int argc, char **argv)
{
	void (*const steps[])(unsigned long) = { use_cell, use_cell, read_with_allocations, register_under_lock };

	device_open();
	heap = map(CELLS * PAGE);
	for (uint64_t i = 0; i < CELLS; i++)
		watch(heap + i * PAGE, PAGE, i + 1);
	run_together(steps, 4, argc > 0 ? atof(argv[0]) : 10);
	NEED(*counter > 0);
}

/* ---- arenas that are trimmed while others register ---- */

static unsigned long given_back;

/* Whatever free and malloc_trim gave back of a registered block was reported. */
static void trim_own_block(unsigned long round)
{
	size_t bytes = 96 * PAGE;
	uint64_t cookie = 1000000 + round;
	char *block = malloc(bytes);
	char *first = (char *)(((uintptr_t)block + PAGE - 1) & ~(PAGE - 1));
	unsigned char resident[94];
	uint64_t before;
	bool gone;

	NEED(block);
	memset(block, 3, bytes);
	pthread_mutex_lock(&second_lock);
	watch(first, 94 * PAGE, cookie);
	before = *counter;
	free(block);
	malloc_trim(0);
	gone = mincore(first, 94 * PAGE, resident) != 0;
	for (int i = 0; i < 94 && !gone; i++)
		gone = !(resident[i] & 1);
	NEED(!gone || *counter > before);
	NEED(reported(cookie, NULL) || !gone);
	given_back += gone;
	unwatch(cookie);
	pthread_mutex_unlock(&second_lock);
}

static void register_and_allocate(unsigned long round)
{
	char *block = malloc(200);

	NEED(block);
	memset(block, 4, 200);
	watch(block, 200, 2000000 + round);
	unwatch(2000000 + round);
	free(block);
}

static void trimmed(int argc, char **argv)
{
	void (*const steps[])(unsigned long) = { trim_own_block, register_and_allocate, trim_own_block };

	mallopt(M_MMAP_THRESHOLD, 64 << 20);
	mallopt(M_TRIM_THRESHOLD, 0);
	device_open();
	run_together(steps, 3, argc > 0 ? atof(argv[0]) : 3);
	printf("%lu blocks were given back\n", given_back);
	NEED(given_back > 0);
}

/* ---- sbrk and malloc in turn ---- */

static void sbrk_and_malloc(int argc, char **argv)
{
	unsigned long rounds = argc > 0 ? strtoul(argv[0], NULL, 10) : 2000;

	device_open();
	for (unsigned long i = 0; i < rounds; i++) {
		size_t bytes = (1 + i % 16) * PAGE;
		char *top = sbrk((intptr_t)bytes), *block;
		uint64_t before;

		NEED(top != (void *)-1);
		memset(top, 1, bytes);
		watch(top, bytes, i);
		before = *counter;
		NEED(sbrk(-(intptr_t)bytes) == top + bytes);
		NEED(*counter > before && reported(i, NULL));
		unwatch(i);
		NEED((block = malloc(1000 + i % 7 * 30000)));
		watch(block, 1000, i);
		memset(block, 2, 1000);
		unwatch(i);
		free(block);
	}
}

/* ---- locks that would join the registering thread and the unmapping one ---- */

static void register_holding(unsigned long round)
{
	pthread_mutex_lock(&lock);
	watch((void *)(round % 512 * PAGE), PAGE, 3000000 + round);
	unwatch(3000000 + round);
	pthread_mutex_unlock(&lock);
}

static void unmap_holding(unsigned long round)
{
	char *memory = map(2 * PAGE);

	pthread_mutex_lock(&second_lock);
	watch(memory, 2 * PAGE, 4000000 + round);
	pthread_mutex_lock(&lock);
	NEED(munmap(memory, 2 * PAGE) == 0);
	pthread_mutex_unlock(&lock);
	unwatch(4000000 + round);
	pthread_mutex_unlock(&second_lock);
}

static void read_holding(unsigned long round)
{
	(void)round;
	pthread_mutex_lock(&lock);
	reported(0, NULL);
	pthread_mutex_unlock(&lock);
}

static char *handler_memory;

/* Once, so that on a machine where a trapped call takes as long as this not only handlers run. */
static void soon(void)
{
	setitimer(ITIMER_REAL, &(struct itimerval){ { 0, 0 }, { 0, 1000 } }, NULL);
}

/* Comes in the midst of calls of the device, and invalidates. */
static void in_handler(int signal)
{
	int error = errno;

	(void)signal;
	/* EINTR where a further signal came before the supervisor had heard of the call. */
	if (madvise(handler_memory, PAGE, MADV_DONTNEED) != 0 && errno != EINTR)
		abort();
	if (!over)
		soon();
	errno = error;
}

static void locks(int argc, char **argv)
{
	void (*const steps[])(unsigned long) = { register_holding, unmap_holding, read_holding, register_holding };
	struct sigaction action = { .sa_handler = in_handler, .sa_flags = SA_RESTART };

	device_open();
	handler_memory = map(PAGE);
	watch(handler_memory, PAGE, 1);
	NEED(sigaction(SIGALRM, &action, NULL) == 0);
	soon();
	run_together(steps, 4, argc > 0 ? atof(argv[0]) : 3);
	NEED(*counter > 0);
}

const struct named_case deadlock_cases[] = {
	{ "allocator", allocator },
	{ "trimmed", trimmed },
	{ "sbrk_and_malloc", sbrk_and_malloc },
	{ "locks", locks },
	{ NULL, NULL },
};
