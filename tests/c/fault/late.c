/*
 * How late userfaultfd alone is: between the unmapping and the moment when the counter moves another thread can see
 * that the memory is gone, or have it. When munmap has returned, the counter has moved.
 *
 *   late ROUNDS LEAST       goes on until that was seen LEAST times
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
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096UL

static const volatile uint64_t *counter;
static _Atomic(char *) page;
/* The turn is odd while a page is there; addresses come back. */
static _Atomic uint64_t generation, window, turn;
static _Atomic int running = 1;

static void *watcher(void *unused)
{
	unsigned char resident;

	while (atomic_load(&running)) {
		uint64_t this = atomic_load(&turn);
		char *at = atomic_load(&page);

		if (this % 2 == 0 || mincore(at, PAGE, &resident) == 0 || errno != ENOMEM) {
			sched_yield();
			continue;
		}
		/* It is gone, and the counter doesn't say so yet. */
		if (*counter == atomic_load(&generation) && atomic_load(&turn) == this)
			atomic_fetch_add(&window, 1);
		while (atomic_load(&turn) == this && atomic_load(&running))
			sched_yield();
	}
	return unused;
}

int main(int argc, char **argv)
{
	uint64_t round, late = 0;
	struct bout bout = { 0 };
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	pthread_t thread;

	if (argc != 3)
		return fprintf(stderr, "usage: late ROUNDS LEAST\n"), 2;
	bout_begin(&bout, argv[1], argv[2]);
	if (device < 0)
		return perror("open /dev/ummunotify"), 2;
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	if (counter == MAP_FAILED || pthread_create(&thread, NULL, watcher, NULL) != 0)
		return 2;
	for (round = 1; bout_goes_on(&bout, round, atomic_load(&window)); round++) {
		struct ummunotify_event events[4];
		char *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ummunotify_register_ioctl region = { (uintptr_t)at, (uintptr_t)at + PAGE, round, 0, 0 };

		if (at == MAP_FAILED || ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
			return perror("REGISTER_REGION"), 2;
		*at = 1;
		atomic_store(&generation, *counter);
		atomic_store(&page, at);
		atomic_fetch_add(&turn, 1);
		if (munmap(at, PAGE) != 0)
			return perror("munmap"), 2;
		late += *counter == atomic_load(&generation);
		atomic_fetch_add(&turn, 1);
		ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &round);
		while (read(device, events, sizeof(events)) > 0)
			;
	}
	atomic_store(&running, 0);
	pthread_join(thread, NULL);
	printf("rounds=%lu late=%lu window=%lu\n", (unsigned long)round - 1, (unsigned long)late, (unsigned long)window);
	return late == 0 ? 0 : 1;
}
