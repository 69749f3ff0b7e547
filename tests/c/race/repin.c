/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The re-validation race by every kind of call, a round at a time: an event comes before the mapping changes.
 * Whoever reads it at once, registers again and pins again gets the old page, and then the page goes. Without a
 * second event at the end of the operation the new registration is stale, and the counter says that it is current.
 *
 *   repin ROUNDS LEAST [lose | nap]
 *
 * One thread puts a stamped page at an address, waits until the other has registered and pinned it, and takes it
 * away: by munmap, by moving it, by MADV_DONTNEED, by MAP_FIXED. The other is a registration cache that does
 * nothing but re-validate: whenever the counter has moved it reads the events, registers again (every other round;
 * else the region stays registered, and was only taken out of the queue), and pins. Pinning is a look at the stamp.
 * Once the page is gone, an entry that holds its stamp and that the counter calls current is stale.
 *
 * Prints how often the old page was pinned again after the event ("raced", else nothing was tested) and how often
 * that stayed stale. It goes on until LEAST have raced; with lose, until so many were stale.
 *
 * Where the operation follows its event within nanoseconds, another processor is too slow to come between. With nap all
 * is munmap, both threads share a processor, and the cache, which has the higher priority (SCHED_FIFO: root), sleeps while
 * nothing has changed: now and then its timer stops the other one just there, and it has all the time that it needs.
 */
#define _GNU_SOURCE
#include "bout.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define COOKIE 7

enum { MUNMAP, MOVE, DISCARD, REPLACE, WAYS };
static const char *const names[WAYS] = { "munmap", "mremap", "dontneed", "map_fixed" };

static char *page, *place;
static int device;
static const volatile uint64_t *counter;
static struct bout bout;
static bool lose, nap;
/* The last round, once that is known. */
static _Atomic uint64_t last = UINT64_MAX;
/* Rounds: the page is there; the cache has pinned it; it is gone; the cache has looked whether its entry is current. */
static _Atomic uint64_t there, pinned, gone, looked;

static uint64_t raced[WAYS], stale[WAYS];

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(2);
	}
}

static void wait_for(_Atomic uint64_t *word, uint64_t value)
{
	for (int i = 0; atomic_load(word) != value; i++) {
		if (i % 64 == 63)
			sched_yield();
	}
}

/* Long enough for the other thread to come to something. */
static void sleep_a_little(void)
{
	struct timespec time = { .tv_nsec = 20000 };

	nanosleep(&time, NULL);
}

/* For another time each time, about as long as the sleep is. */
static void do_something(void)
{
	static uint32_t seed = 1;

	seed = seed * 1103515245 + 12345;
	for (uint32_t turns = (seed >> 16) % 8192; turns > 0; turns--)
		__asm__ volatile("");
}

/* The stamp of the page, 0 if there is none. */
static uint64_t pin(void)
{
	uint64_t stamp = 0;
	struct iovec to = { &stamp, sizeof(stamp) }, from = { page, sizeof(stamp) };

	return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == sizeof(stamp) ? stamp : 0;
}

static void read_events(void)
{
	struct ummunotify_event events[8];

	while (read(device, events, sizeof(events)) > 0)
		;
	must(errno == EAGAIN, "read");
}

static void register_again(int live)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)page,
		.end = (uintptr_t)page + PAGE,
		.user_cookie = COOKIE,
	};
	uint64_t cookie = COOKIE;

	must(!live || ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0, "UNREGISTER_REGION");
	must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
}

static uint64_t sum(const uint64_t of[WAYS])
{
	uint64_t all = 0;

	for (int i = 0; i < WAYS; i++)
		all += of[i];
	return all;
}

static int way_of(uint64_t round)
{
	return nap ? MUNMAP : round / 2 % WAYS;
}

static void *cache(void *unused)
{
	/* Sleeps are as long as they say. */
	prctl(PR_SET_TIMERSLACK, 1);
	for (uint64_t round = 1;; round++) {
		uint64_t generation, stamp;
		int repinned = 0;

		while (nap && atomic_load(&there) != round)
			sleep_a_little();
		wait_for(&there, round);
		if (round > atomic_load(&last))
			break;
		read_events();
		register_again(round > 1);
		generation = *counter;
		stamp = pin();
		must(stamp == round, "the page is there");
		atomic_store(&pinned, round);

		for (int i = 0;; i++) {
			uint64_t over = atomic_load(&gone);

			if (*counter != generation) {
				read_events();
				if (round % 2 != 0)
					register_again(1);
				generation = *counter;
				stamp = pin();
				repinned |= stamp == round;
			} else if (over == round) {
				break;
			} else if (nap) {
				sleep_a_little();
			} else if (i % 64 == 63) {
				sched_yield();
			}
		}
		raced[way_of(round)] += repinned;
		stale[way_of(round)] += stamp == round;
		atomic_store(&looked, round);
	}
	return unused;
}

static void *map_at(void *address, int flags)
{
	return mmap(address, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

int main(int argc, char **argv)
{
	pthread_t thread;
	uint64_t round;

	if (argc < 3) {
		fprintf(stderr, "usage: repin ROUNDS LEAST [lose | nap]\n");
		return 2;
	}
	bout_begin(&bout, argv[1], argv[2]);
	lose = argc > 3 && strcmp(argv[3], "lose") == 0;
	nap = argc > 3 && strcmp(argv[3], "nap") == 0;
	if (nap) {
		cpu_set_t one;

		must(sched_getaffinity(0, sizeof(one), &one) == 0, "sched_getaffinity");
		for (int n = CPU_SETSIZE - 1, kept = 0; n >= 0; n--) {
			if (CPU_ISSET(n, &one) && kept++ > 0)
				CPU_CLR(n, &one);
		}
		must(sched_setaffinity(0, sizeof(one), &one) == 0, "sched_setaffinity");
	}
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	must(device >= 0, "open /dev/ummunotify");
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED, "mmap of the counter");
	page = map_at(NULL, 0);
	place = map_at(NULL, 0);
	must(page != MAP_FAILED && place != MAP_FAILED, "mmap");
	must(pthread_create(&thread, NULL, cache, NULL) == 0, "pthread_create");
	if (nap) {
		errno = pthread_setschedparam(thread, SCHED_FIFO, &(struct sched_param){ .sched_priority = 1 });
		if (errno != 0)
			return printf("LACKING SCHED_FIFO: %s\n", strerror(errno)), 77;
	}

	/* The other thread has counted the round before: it has looked. */
	for (round = 1; bout_goes_on(&bout, round, sum(lose ? stale : raced)); round++) {
		int way = way_of(round);

		*(volatile uint64_t *)page = round;
		atomic_store(&there, round);
		wait_for(&pinned, round);
		if (nap)
			do_something();
		switch (way) {
		case MUNMAP:
			must(munmap(page, PAGE) == 0, "munmap");
			break;
		case MOVE:
			must(mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place, "mremap");
			break;
		case DISCARD:
			must(madvise(page, PAGE, MADV_DONTNEED) == 0, "madvise");
			break;
		case REPLACE:
			must(map_at(page, MAP_FIXED) == page, "MAP_FIXED");
			break;
		}
		atomic_store(&gone, round);
		wait_for(&looked, round);
		if (way == MUNMAP || way == MOVE)
			must(map_at(page, MAP_FIXED_NOREPLACE) == page, "a page at the same address");
	}
	atomic_store(&last, round - 1);
	atomic_store(&there, round);
	pthread_join(thread, NULL);
	for (int i = 0; i < WAYS; i++)
		printf("%s: raced %lu, stale %lu\n", names[i], (unsigned long)raced[i], (unsigned long)stale[i]);
	printf("rounds=%lu raced=%lu stale=%lu\n", (unsigned long)round - 1, (unsigned long)sum(raced),
	       (unsigned long)sum(stale));
	return sum(stale) == 0 ? 0 : 1;
}
