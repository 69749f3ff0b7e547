/*
 * The reuse race with io_uring: a page that a request drops, while others look at it, must never be current in a
 * cache that trusts the counter page.
 *
 *   reuse ROUNDS LEAST [lose]      goes on until LEAST dropped pages were seen; with lose, until so many were stale
 *
 * 77: there is no io_uring here.
 */
#define _GNU_SOURCE
#include "bout.h"
#include "ring.h"
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#define PAGE 4096UL
#define OWNERS 2
#define OTHERS 2

struct owner {
	/* The cache entry; `version` is odd while there is none. */
	_Atomic uint64_t version, generation;
	_Atomic(char *) page;
	_Atomic(const volatile uint64_t *) counter;
	uint64_t rounds, current;
} __attribute__((aligned(128)));

static struct owner owners[OWNERS];
static _Atomic uint64_t stale, seen_dropped;
static _Atomic int owners_running = OWNERS;
/* Of each owner; what is shown is of all. */
static struct bout bout;
static bool lose;

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(2);
	}
}

static void *owner_main(void *argument)
{
	struct owner *o = argument;
	struct ummunotify_event events[16];
	const volatile uint64_t *counter;
	struct ring ring = { 0 };
	int error, device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(device >= 0, "open /dev/ummunotify");
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED && page != MAP_FAILED, "mmap");
	error = ring_open(&ring);
	if (error != 0) {
		printf("io_uring_setup: %s\n", strerror(-error));
		exit(77);
	}
	atomic_store(&o->page, page);
	atomic_store(&o->counter, counter);
	for (uint64_t round = 1; bout_goes_on(&bout, round, atomic_load(lose ? &stale : &seen_dropped)); round++) {
		struct ummunotify_register_ioctl region = {
			.start = (uintptr_t)page, .end = (uintptr_t)page + PAGE, .user_cookie = round,
		};

		*(volatile uint64_t *)page = round;
		must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
		atomic_store(&o->generation, *counter);
		atomic_fetch_add(&o->version, 1);
		o->current += *counter == atomic_load(&o->generation);
		must(ring_madvise(&ring, page, PAGE, MADV_DONTNEED) == 0, "MADVISE through the ring");
		if (*counter == atomic_load(&o->generation))
			atomic_fetch_add(&stale, 1);
		atomic_fetch_add(&o->version, 1);
		must(ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &round) == 0, "UNREGISTER_REGION");
		while (read(device, events, sizeof(events)) > 0)
			;
		o->rounds++;
	}
	atomic_fetch_sub(&owners_running, 1);
	return NULL;
}

static void *other_main(void *unused)
{
	while (atomic_load(&owners_running) > 0) {
		sched_yield();
		for (int i = 0; i < OWNERS; i++) {
			struct owner *o = &owners[i];
			const volatile uint64_t *counter = atomic_load(&o->counter);
			uint64_t version = atomic_load(&o->version);

			if (counter == NULL || version % 2 == 0)
				continue;
			/* First the page, then the counter. */
			if (*(const volatile uint64_t *)atomic_load(&o->page) != 0)
				continue;
			int current = *counter == atomic_load(&o->generation);

			if (atomic_load(&o->version) == version) {
				atomic_fetch_add(&seen_dropped, 1);
				atomic_fetch_add(&stale, (uint64_t)current);
			}
		}
	}
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t threads[OWNERS + OTHERS];
	uint64_t rounds = 0, current = 0;

	if (argc < 3)
		return fprintf(stderr, "usage: reuse ROUNDS LEAST [lose]\n"), 2;
	bout_begin(&bout, argv[1], argv[2]);
	bout.rounds /= OWNERS;
	lose = argc > 3 && strcmp(argv[3], "lose") == 0;
	for (int i = 0; i < OWNERS; i++)
		must(pthread_create(&threads[i], NULL, owner_main, &owners[i]) == 0, "pthread_create");
	for (int i = 0; i < OTHERS; i++)
		must(pthread_create(&threads[OWNERS + i], NULL, other_main, NULL) == 0, "pthread_create");
	for (int i = 0; i < OWNERS + OTHERS; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < OWNERS; i++) {
		rounds += owners[i].rounds;
		current += owners[i].current;
	}
	printf("rounds=%lu stale=%lu current=%lu dropped=%lu\n", (unsigned long)rounds, (unsigned long)stale,
	       (unsigned long)current, (unsigned long)seen_dropped);
	return stale == 0 ? 0 : 1;
}
