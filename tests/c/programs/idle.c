/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A process that for a while has no context, or only one that is closed.
 *
 *   idle heap      opens and closes the device, has the heap grow, opens the device again, and has the heap shrink
 *   idle hidden    closes the device, whose counter stays mapped, when nobody may look at it any more
 *   idle again     has the device open, executes itself, and ends with the counter of a closed context mapped
 *
 * 0 if every invalidation was counted.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define PAGE 4096ul
#define HEAP (1ul << 20)

static int opened(void)
{
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);

	if (device < 0)
		_exit(99);
	return device;
}

static const volatile uint64_t *counter_of(int device)
{
	void *at = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);

	if (at == MAP_FAILED)
		_exit(98);
	return at;
}

static void watch(int device, void *start, size_t bytes)
{
	struct ummunotify_register_ioctl region = { (uintptr_t)start, (uintptr_t)start + bytes, 7, 0, 0 };

	if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		_exit(97);
}

static int counts(const volatile uint64_t *counter, uint64_t before)
{
	if (*counter > before)
		return 0;
	fprintf(stderr, "the counter hasn't moved\n");
	return 1;
}

int main(int argc, char **argv)
{
	const char *way = argc > 1 ? argv[1] : "";
	const volatile uint64_t *counter;
	int device, other;

	if (strcmp(way, "heap") == 0) {
		close(opened());
		usleep(100000);
		if (sbrk((intptr_t)HEAP) == (void *)-1)
			return 96;
		device = opened();
		counter = counter_of(device);
		watch(device, (char *)sbrk(0) - 16 * PAGE, 16 * PAGE);
		if (sbrk(-(intptr_t)HEAP) == (void *)-1)
			return 96;
		return counts(counter, 0);
	}
	if (strcmp(way, "hidden") == 0) {
		char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		uint64_t before;

		device = opened();
		counter = counter_of(device);
		watch(device, page, PAGE);
		if (prctl(PR_SET_DUMPABLE, 0) != 0 || close(device) != 0)
			return 96;
		usleep(100000);
		before = *counter;
		if (munmap(page, PAGE) != 0)
			return 96;
		return counts(counter, before);
	}
	if (strcmp(way, "again") == 0) {
		opened();
		execv("/proc/self/exe", (char *[]){ argv[0], "once more", NULL });
		return 96;
	}
	if (strcmp(way, "once more") == 0) {
		device = opened();
		other = opened();
		counter_of(device);
		close(other);
		usleep(100000);
		close(device);
		usleep(100000);
		return 0;
	}
	fprintf(stderr, "usage: idle heap|hidden|again\n");
	return 2;
}
