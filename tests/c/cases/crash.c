/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The interception itself crashes, or changes what it passes on. */
#define _GNU_SOURCE
#include "cases.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_bool over;

static void *map_and_unmap(void *rounds_)
{
	atomic_ulong *rounds = rounds_;

	while (!over) {
		char *memory = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		NEED(memory != MAP_FAILED);
		memset(memory, 7, 8 * PAGE);
		NEED(madvise(memory, 4 * PAGE, MADV_DONTNEED) == 0 && memory[0] == 0 && memory[4 * PAGE] == 7);
		NEED(munmap(memory, 8 * PAGE) == 0);
		++*rounds;
	}
	return NULL;
}

/* 8 threads change mappings while the device is opened and closed, a thousand times. */
static void open_under_load(int argc, char **argv)
{
	int opens = argc > 0 ? atoi(argv[0]) : 1000;
	pthread_t threads[8];
	atomic_ulong rounds = 0;
	double longest = 0;

	for (int i = 0; i < 8; i++)
		NEED(pthread_create(&threads[i], NULL, map_and_unmap, &rounds) == 0);
	for (int i = 0; i < opens; i++) {
		double start = now();
		int fd = open(DEVICE, O_RDONLY);

		NEED(fd >= 0);
		if (now() - start > longest)
			longest = now() - start;
		NEED(close(fd) == 0);
	}
	over = true;
	for (int i = 0; i < 8; i++)
		pthread_join(threads[i], NULL);
	printf("%d opens, the longest %.3f s, %lu rounds of the threads\n", opens, longest, rounds);
	/* Well under a second on a machine that does nothing else; what hangs takes longer than this. */
	NEED(longest < 5 && rounds > 0);
}

/* Every argument of a variadic call arrives. */
static void variadic(int argc, char **argv)
{
	(void)argc, (void)argv;
	for (int with_device = 0; with_device < 2; with_device++) {
		char *from = map(PAGE), *to = map(4 * PAGE), name[] = "variadic-XXXXXX";
		struct stat status;
		int pipes[2], count = -1, fd;

		*from = 42;
		NEED(munmap(to, 4 * PAGE) == 0);
		NEED(mremap(from, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to && *to == 42);
		NEED((char *)syscall(SYS_mremap, to, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, from) == from);
		NEED(*from == 42 && munmap(from, PAGE) == 0);
		umask(0);
		NEED((fd = mkstemp(name)) >= 0 && close(fd) == 0 && unlink(name) == 0);
		NEED((fd = open(name, O_CREAT | O_EXCL | O_RDWR, 0640)) >= 0);
		NEED(fstat(fd, &status) == 0 && (status.st_mode & 07777) == 0640 && close(fd) == 0 && unlink(name) == 0);
		NEED((fd = openat(AT_FDCWD, name, O_CREAT | O_EXCL | O_RDWR, 0604)) >= 0);
		NEED(fstat(fd, &status) == 0 && (status.st_mode & 07777) == 0604 && unlink(name) == 0);
		NEED(fcntl(fd, F_DUPFD, 200) == 200 && close(200) == 0 && close(fd) == 0);
		NEED((fd = open(".", O_TMPFILE | O_RDWR, 0600)) >= 0 || errno == EOPNOTSUPP);
		NEED(fd < 0 || (fstat(fd, &status) == 0 && (status.st_mode & 07777) == 0600 && close(fd) == 0));
		NEED(pipe(pipes) == 0 && write(pipes[1], "four", 4) == 4);
		NEED(ioctl(pipes[0], FIONREAD, &count) == 0 && count == 4);
		close(pipes[0]);
		close(pipes[1]);
		if (!with_device)
			device_open();
	}
}

static unsigned long churn(unsigned seed, int rounds)
{
	unsigned long sum = 0;
	uint64_t state = seed;

	for (int i = 0; i < rounds; i++) {
		size_t size = 1024UL << random_number(&state) % 13;
		unsigned char *memory = malloc(size);

		NEED(memory);
		memory[0] = memory[size / 2] = memory[size - 1] = (unsigned char)random_number(&state);
		sum += memory[0] + memory[size / 2];
		free(memory);
	}
	return sum;
}

static unsigned long sums[16];
static int churn_rounds;

static void *churner(void *number)
{
	sums[(uintptr_t)number] = churn((unsigned)(uintptr_t)number, churn_rounds);
	return NULL;
}

static void churn_in_threads(void)
{
	pthread_t threads[16];

	for (uintptr_t i = 0; i < 16; i++)
		NEED(pthread_create(&threads[i], NULL, churner, (void *)i) == 0);
	for (int i = 0; i < 16; i++)
		pthread_join(threads[i], NULL);
}

/* 16 threads of malloc and free: the sums that one thread gets without the device, and no growth. */
static void malloc_storm(int argc, char **argv)
{
	unsigned long expected[16];
	long before, after;

	churn_rounds = argc > 0 ? atoi(argv[0]) : 2000;
	for (unsigned i = 0; i < 16; i++)
		expected[i] = churn(i, churn_rounds);
	device_open();
	watch(map(16 * PAGE), 16 * PAGE, 1);
	churn_in_threads();
	malloc_trim(0);
	before = status_kib("VmRSS");
	for (int i = 0; i < 3; i++)
		churn_in_threads();
	malloc_trim(0);
	after = status_kib("VmRSS");
	printf("resident before %ld KiB, after %ld KiB\n", before, after);
	NEED(memcmp(sums, expected, sizeof(sums)) == 0);
	NEED(after < before + 8 * 1024);
}

static const char *library;

static void *use_loaded_library(void *unused)
{
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	int (*library_open)(const char *, int, ...), (*library_ioctl)(int, unsigned long, ...);
	ssize_t (*library_read)(int, void *, size_t);
	struct ummunotify_event events[2];
	char *memory = map(PAGE);
	struct ummunotify_register_ioctl region = { (uintptr_t)memory, (uintptr_t)memory + PAGE, 5, 0, 0 };
	int fd;

	(void)unused;
	if (!handle)
		FAIL("dlopen: %s", dlerror());
	library_open = (int (*)(const char *, int, ...))dlsym(handle, "open");
	library_ioctl = (int (*)(int, unsigned long, ...))dlsym(handle, "ioctl");
	library_read = (ssize_t (*)(int, void *, size_t))dlsym(handle, "read");
	NEED(library_open && library_ioctl && library_read);
	/* The program's own calls don't go through a library that is loaded like this. */
	NEED(open(DEVICE, O_RDONLY) < 0 && errno == ENOENT);
	fd = library_open(DEVICE, O_RDONLY | O_NONBLOCK);
	if (fd < 0) {
		printf("refused with errno %d\n", errno);
		return NULL;
	}
	NEED(library_ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region) == 0);
	NEED(munmap(memory, PAGE) == 0);
	NEED(library_read(fd, events, sizeof(events)) == sizeof(events));
	NEED(events[0].type == UMMUNOTIFY_EVENT_TYPE_INVAL && events[0].user_cookie_counter == 5);
	printf("works\n");
	return NULL;
}

/* The library comes by dlopen(RTLD_LOCAL), from a thread that isn't the first. */
static void loaded_late(int argc, char **argv)
{
	pthread_t thread, load[2];
	atomic_ulong rounds = 0;

	NEED(argc == 1);
	library = argv[0];
	for (int i = 0; i < 2; i++)
		NEED(pthread_create(&load[i], NULL, map_and_unmap, &rounds) == 0);
	NEED(pthread_create(&thread, NULL, use_loaded_library, NULL) == 0);
	pthread_join(thread, NULL);
	over = true;
	for (int i = 0; i < 2; i++)
		pthread_join(load[i], NULL);
}

/* A plugin beside the program, which only the program's own search path finds, loaded once the device is open. */
static void plugins(int argc, char **argv)
{
	void *handle, *again;
	int (*add)(int, int);

	NEED(argc == 1);
	device_open();
	handle = dlopen(argv[0], RTLD_NOW);
	if (!handle)
		FAIL("dlopen: %s", dlerror());
	add = (int (*)(int, int))dlsym(handle, "add");
	NEED(add && add(40, 2) == 42);
	again = dlopen(argv[0], RTLD_NOW | RTLD_NOLOAD);
	NEED(again == handle && dlclose(again) == 0 && dlclose(handle) == 0);
	NEED(!dlopen("no-such-plugin.so", RTLD_NOW) && strstr(dlerror(), "no-such-plugin.so"));
}

const struct named_case crash_cases[] = {
	{ "open_under_load", open_under_load },
	{ "variadic", variadic },
	{ "malloc_storm", malloc_storm },
	{ "loaded_late", loaded_late },
	{ "plugins", plugins },
	{ NULL, NULL },
};
