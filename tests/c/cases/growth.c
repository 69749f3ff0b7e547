/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Growth over many rounds, and memory of every kind. */
#define _GNU_SOURCE
#include "cases.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <unistd.h>

static long entries(const char *folder)
{
	DIR *d = opendir(folder);
	long n = 0;

	NEED(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static long mappings(void)
{
	FILE *file = fopen("/proc/self/maps", "re");
	long lines = 0;
	int c;

	NEED(file);
	while ((c = getc(file)) != EOF)
		lines += c == '\n';
	fclose(file);
	return lines;
}

struct usage {
	long resident, descriptors, mappings;
};

static struct usage usage(void)
{
	return (struct usage){ status_kib("VmRSS"), entries("/proc/self/fd"), mappings() };
}

/* Map, register, unmap, read, unregister, over and over: nothing grows, and what is unmapped is gone. */
static void rounds(int argc, char **argv)
{
	unsigned long all = argc > 0 ? strtoul(argv[0], NULL, 10) : 20000;
	struct usage early = { 0 }, late;
	long with, without;
	char *large;

	device_open();
	for (unsigned long i = 0; i < all; i++) {
		char *memory = map((1 + i % 4) * PAGE);

		if (i == all / 4)
			early = usage();
		watch(memory, (1 + i % 4) * PAGE, i);
		NEED(munmap(memory, (1 + i % 4) * PAGE) == 0);
		NEED(reported(i, NULL));
		unwatch(i);
	}
	late = usage();
	printf("%lu rounds: resident %ld to %ld KiB, descriptors %ld to %ld, mappings %ld to %ld\n", all,
	       early.resident, late.resident, early.descriptors, late.descriptors, early.mappings, late.mappings);
	NEED(late.resident <= early.resident + 512);
	NEED(late.descriptors == early.descriptors && late.mappings <= early.mappings + 2);
	large = map(64 << 20);
	watch(large, 64 << 20, 1);
	with = status_kib("VmRSS");
	NEED(munmap(large, 64 << 20) == 0);
	without = status_kib("VmRSS");
	printf("with 64 MiB %ld KiB, without %ld KiB\n", with, without);
	NEED(with - without > 60 * 1024);
}

static int seen_records;

static void count(const struct ummunotify_event *e)
{
	NEED(e->user_cookie_counter < 100 && !(e->flags & UMMUNOTIFY_EVENT_FLAG_HINT));
	seen_records++;
}

/* A client that registers and never reads; then it reads. */
static void never_reads(int argc, char **argv)
{
	unsigned long all = argc > 0 ? strtoul(argv[0], NULL, 10) : 20000;
	char *memory = map(100 * PAGE);
	struct usage early = { 0 }, late;

	device_open();
	for (uint64_t i = 0; i < 100; i++)
		watch(memory + i * PAGE, PAGE, i);
	for (unsigned long i = 0; i < all; i++) {
		NEED(madvise(memory + i % 100 * PAGE, PAGE, MADV_DONTNEED) == 0);
		if (i == all / 4)
			early = usage();
	}
	late = usage();
	NEED(late.resident <= early.resident + 512 && late.mappings <= early.mappings + 2);
	NEED(*counter == all);
	reported(0, count);
	NEED(seen_records == 100);
	NEED(madvise(memory, PAGE, MADV_DONTNEED) == 0 && reported(0, NULL) && *counter == all + 1);
}

static char bss[4 * PAGE] __attribute__((aligned(4096)));

/* Stack, .bss, a file mapping, shared memory, a hole: all may be registered, and an unpopulated page be read. */
static void kinds(int argc, char **argv)
{
	char stack[3 * PAGE], name[] = "kinds-XXXXXX";
	char *page_of_stack = (char *)(((uintptr_t)stack + PAGE - 1) & ~(PAGE - 1));
	char *hole = map(3 * PAGE), *file, *shared, *empty;
	int fd = mkstemp(name), segment = shmget(IPC_PRIVATE, 2 * PAGE, 0600);
	volatile char sum = 0;

	(void)argc, (void)argv;
	memset(stack, 1, sizeof(stack));
	NEED(fd >= 0 && unlink(name) == 0 && ftruncate(fd, 2 * PAGE) == 0 && segment >= 0);
	file = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	shared = shmat(segment, NULL, 0);
	empty = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	NEED(file != MAP_FAILED && shared != (void *)-1 && empty != MAP_FAILED);
	NEED(shmctl(segment, IPC_RMID, NULL) == 0);
	device_open();
	NEED(munmap(hole, 3 * PAGE) == 0);
	watch(page_of_stack, PAGE, 1);
	watch(bss, sizeof(bss), 2);
	watch(file, 2 * PAGE, 3);
	watch(shared, 2 * PAGE, 4);
	watch(hole, 3 * PAGE, 5);
	watch(empty, 2 * PAGE, 6);
	sum += bss[PAGE] + file[PAGE] + shared[PAGE] + empty[PAGE];
	NEED(*counter == 0 && !reported(1, NULL));
	NEED(madvise(page_of_stack, PAGE, MADV_DONTNEED) == 0 && reported(1, NULL));
	NEED(madvise(bss + PAGE, PAGE, MADV_DONTNEED) == 0 && reported(2, NULL));
	NEED(ftruncate(fd, 0) == 0 && reported(3, NULL));
	NEED(shmdt(shared) == 0 && reported(4, NULL));
	/* A mapping comes into the hole: none; it goes: one. */
	NEED(mmap(hole, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == hole);
	*hole = 1;
	NEED(!reported(5, NULL) && munmap(hole, PAGE) == 0 && reported(5, NULL));
	NEED(munmap(empty, 2 * PAGE) == 0 && reported(6, NULL));
	close(fd);
}

const struct named_case growth_cases[] = {
	{ "rounds", rounds },
	{ "never_reads", never_reads },
	{ "kinds", kinds },
	{ NULL, NULL },
};
