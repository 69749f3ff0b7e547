/*
 * The re-validation race: one thread unmaps a page and maps another in its place, as fast as it can; another reads
 * the device's events and registers the page again, pins what is there and believes it until the counter moves.
 *
 *   revalidate ROUNDS LEAST [lose]
 *
 * Whoever registers and pins again after the event was queued, but before the kernel has unmapped, holds the old
 * page. The counter must move once more when the call has ended, or what is believed is stale. What is pinned is
 * told by a stamp in the page, which is read through the kernel, for a registration with an adapter goes that way.
 * It goes on until something was believed LEAST times; with lose, until so much was stale.
 */
#define _GNU_SOURCE
#include "bout.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
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

static int device;
static volatile uint64_t *counter;
static char *place;
static atomic_int over;
static atomic_ulong validations;
/* What the reader believes: the stamp that it pinned, and the counter's value before it registered. `version` is
 * odd while they change. */
static _Atomic uint64_t version, pinned, generation;

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(2);
	}
}

/* The stamp of the page that is mapped now; 0 if none is. */
static uint64_t pin(void)
{
	uint64_t stamp = 0;
	struct iovec here = { &stamp, sizeof(stamp) }, there = { place, sizeof(stamp) };

	return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == sizeof(stamp) ? stamp : 0;
}

static void *validate(void *unused)
{
	struct ummunotify_register_ioctl region = { (uintptr_t)place, (uintptr_t)place + PAGE, 1, 0, 0 };
	uint64_t cookie = 1;

	(void)unused;
	while (!over) {
		struct ummunotify_event events[4];

		/* As a cache does that has seen the counter move: events until LAST, and then the region anew. */
		if (*counter == generation && pinned != 0)
			continue;
		version++;
		while (read(device, events, sizeof(events)) > 0)
			;
		ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
		generation = *counter;
		must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
		pinned = pin();
		version++;
		validations++;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	uint64_t round, stale = 0, believed = 0;
	struct bout bout = { 0 };
	int lose = argc > 3 && strcmp(argv[3], "lose") == 0;
	pthread_t reader;

	if (argc < 3)
		return fprintf(stderr, "usage: revalidate ROUNDS LEAST [lose]\n"), 2;
	bout_begin(&bout, argv[1], argv[2]);

	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	must(device >= 0, "open /dev/ummunotify");
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED, "mmap of the counter");
	place = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(place != MAP_FAILED, "mmap");
	must(pthread_create(&reader, NULL, validate, NULL) == 0, "pthread_create");
	for (round = 1; bout_goes_on(&bout, round, lose ? stale : believed); round++) {
		uint64_t before, stamp, value, now;

		must(munmap(place, PAGE) == 0, "munmap");
		/* The page is gone and no other is there: whatever is believed now is of an earlier one. */
		before = version;
		stamp = pinned;
		value = generation;
		now = *counter;
		if (before % 2 == 0 && before == version && stamp != 0) {
			believed++;
			stale += value == now;
		}
		must(mmap(place, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1,
			  0) == place,
		     "mmap at the same place");
		*(volatile uint64_t *)place = round;
		/* Now and then the reader gets time to believe in it. */
		if (round % 2 == 0)
			for (unsigned long was = validations, i = 0; validations == was && i < 2000; i++)
				__builtin_ia32_pause();
	}
	over = 1;
	pthread_join(reader, NULL);
	printf("rounds=%lu validations=%lu believed=%lu stale=%lu\n", round - 1, validations, believed, stale);
	return stale != 0;
}
