/*
 * The re-validation race: a cache that is told of an invalidation and takes the memory in again at once, before the
 * operation has acted, must not be left with what was there before.
 *
 *   revalidate KIND ROUNDS LEAST [lose]      KIND: unmap, move, parted, bare or discard
 *
 * A changer takes a page's memory away. Beside it a validator reads the events as fast as it can, registers the page
 * anew every other time, looks at it (that is its pin) and notes what it saw together with the counter's value of
 * the LAST before.
 * When the operation has returned, no note of the old contents may be current. A device that tells of an operation
 * before it acts, and not again when it has, leaves such notes. `parted` moves a mapping of which half is registered:
 * a watch on that half must be taken off for the call, so that it tells no end. `bare` unmaps memory that can't be
 * watched, a private mapping of a file on disk. It goes on until LEAST notes were
 * current when the operation began; with lose, until so many were stale.
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
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)
/* Microseconds. */
#define PATIENCE 300

static int device;
static const volatile uint64_t *counter;
static char *page;
static _Atomic int running = 1;
/* The note; `version` is odd while it changes. */
static _Atomic uint64_t version, noted_stamp, noted_generation;
static uint64_t taken_in, looks_in_vain;

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(2);
	}
}

static int64_t microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

static void note(uint64_t stamp, uint64_t generation)
{
	atomic_fetch_add(&version, 1);
	atomic_store(&noted_stamp, stamp);
	atomic_store(&noted_generation, generation);
	atomic_fetch_add(&version, 1);
}

/* True if events were read; `generation` is that of LAST. */
static int drain(uint64_t *generation)
{
	struct ummunotify_event events[16];
	int any = 0;
	ssize_t bytes;

	while ((bytes = read(device, events, sizeof(events))) > 0) {
		any = 1;
		for (size_t i = 0; i < (size_t)bytes / sizeof(events[0]); i++) {
			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
				*generation = events[i].user_cookie_counter;
		}
	}
	must(errno == EAGAIN, "read");
	return any;
}

/* Looks at the page, which may be gone. */
static int look(uint64_t *stamp)
{
	struct iovec here = { stamp, sizeof(*stamp) }, there = { page, sizeof(*stamp) };

	return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == (ssize_t)sizeof(*stamp);
}

static void *validator(void *unused)
{
	struct ummunotify_register_ioctl region = { .start = (uintptr_t)page, .end = (uintptr_t)page + PAGE };
	uint64_t cookie = 0, generation = 0, stamp, turn = 0;

	while (atomic_load(&running)) {
		if (cookie != 0 && !drain(&generation)) {
			sched_yield();
			continue;
		}
		/* Every other time the region stays as it is: what was read of it may be reported again. */
		if (turn++ % 2 == 0) {
			if (cookie != 0)
				must(ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0, "UNREGISTER_REGION");
			region.user_cookie = ++cookie;
			must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
		}
		if (look(&stamp)) {
			note(stamp, generation);
			taken_in++;
		} else {
			looks_in_vain++;
		}
	}
	return unused;
}

/* Whether the cache would answer with contents that are gone. */
static int is_stale(uint64_t gone)
{
	uint64_t before = atomic_load(&version), stamp = atomic_load(&noted_stamp);
	uint64_t generation = atomic_load(&noted_generation), now = *counter;

	return before % 2 == 0 && stamp == gone && generation == now && atomic_load(&version) == before;
}

int main(int argc, char **argv)
{
	int known = argc > 3, lose = argc > 4 && strcmp(argv[4], "lose") == 0;
	int bare = known && strcmp(argv[1], "bare") == 0, unmap = bare || (known && strcmp(argv[1], "unmap") == 0);
	int parted = known && strcmp(argv[1], "parted") == 0;
	int move = parted || (known && strcmp(argv[1], "move") == 0);
	uint64_t stamp, stale = 0, current = 0;
	struct bout bout = { 0 };
	const size_t whole = parted ? 2 * PAGE : PAGE;
	pthread_t thread;
	int backed = MAP_PRIVATE | (bare ? 0 : MAP_ANONYMOUS), fd = -1;
	char *elsewhere;

	if (!unmap && !move && (!known || strcmp(argv[1], "discard") != 0))
		return fprintf(stderr, "usage: revalidate unmap|move|parted|bare|discard ROUNDS LEAST [lose]\n"), 2;
	bout_begin(&bout, argv[2], argv[3]);
	if (bare) {
		fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
		must(fd >= 0, "/proc/self/exe");
	}
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	must(device >= 0, "open /dev/ummunotify");
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED, "mmap of the counter");
	/* Holes on either side, so that the page is a mapping of its own. */
	page = mmap(NULL, 7 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(page != MAP_FAILED, "mmap");
	must(munmap(page, 7 * PAGE) == 0, "munmap");
	elsewhere = page + 4 * PAGE;
	page += PAGE;
	must(mmap(page, whole, RW, backed | MAP_FIXED_NOREPLACE, fd, 0) == page, "mmap");
	*(volatile uint64_t *)page = 1;
	must(pthread_create(&thread, NULL, validator, NULL) == 0, "pthread_create");
	for (stamp = 1; bout_goes_on(&bout, stamp, lose ? stale : current); stamp++) {
		/* The race is on where the validator has taken the page in; it may be waiting for an event. */
		for (int64_t due = microseconds() + PATIENCE; atomic_load(&noted_stamp) != stamp && microseconds() < due;)
			sched_yield();
		current += atomic_load(&noted_stamp) == stamp && atomic_load(&noted_generation) == *counter;
		if (unmap) {
			must(munmap(page, whole) == 0, "munmap");
		} else if (move) {
			must(mremap(page, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere) == elsewhere, "mremap");
		} else {
			must(madvise(page, PAGE, MADV_DONTNEED) == 0, "madvise");
		}
		stale += (uint64_t)is_stale(stamp);
		if (move)
			must(munmap(elsewhere, whole) == 0, "munmap of the new place");
		if (unmap || move)
			must(mmap(page, whole, RW, backed | MAP_FIXED_NOREPLACE, fd, 0) == page, "mmap");
		*(volatile uint64_t *)page = stamp + 1;
	}
	atomic_store(&running, 0);
	pthread_join(thread, NULL);
	printf("%s rounds=%lu stale=%lu current=%lu taken=%lu vain=%lu\n", argv[1], (unsigned long)stamp - 1,
	       (unsigned long)stale, (unsigned long)current, (unsigned long)taken_in, (unsigned long)looks_in_vain);
	return stale == 0 ? 0 : 1;
}
