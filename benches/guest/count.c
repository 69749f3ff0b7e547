/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Counts what calls cost in a guest whose clock counts instructions (QEMU's -icount shift=0: the time stamp counter goes up
 * by one with each). On one processor, so what a supervisor executes meanwhile is in it; caches and wake-ups aren't.
 *
 *   count plain|device [REGIONS]...
 *
 * `device` opens /dev/ummunotify, and does the work again with each of these numbers of regions elsewhere (ascending).
 * `hit` leaves what it causes unread: somebody has been told already. Before each `first-hit` everything was read.
 * `register`, `unregister` and `events-1` are made as the Rust client makes them (ummunotify::client::Notifier): by the
 * preloaded library's functions where it is there, else by ioctl and read, as those whose names end in `-call` always are.
 * Prints a line for each work: its name, the regions or `-`, and the least and the median instructions of a call.
 *
 * The kernel keeps mappings in a tree whose nodes hold up to 16, and by how full they happen to be, the same munmap costs
 * some hundred instructions more or less. So each work is done with 0 to 15 further mappings beside it; printed are means
 * over these layouts.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <linux/ummunotify.h>

/* emulator/abi/src/direct.rs: Lease, Direct, NOT_HERE and SYMBOL. */
struct lease { uint64_t words[16]; };
struct direct {
	long (*lease)(int fd, struct lease *lease);
	void (*release)(struct lease *lease);
	long (*register_region)(const struct lease *lease, int fd, uint64_t start, uint64_t end, uint64_t cookie);
	long (*unregister)(const struct lease *lease, int fd, uint64_t cookie);
	long (*read)(const struct lease *lease, int fd, struct ummunotify_event *records, size_t room, bool polled);
	long (*settle)(const struct lease *lease, int fd);
};
#define NOT_HERE LONG_MIN
#define SYMBOL "ummunotify_direct_1"

enum { PAGE = 4096, WARM = 64, ROUNDS = 31, LAYOUTS = 16, BLOCK = 33 << 20, FENCE = 64 << 20, COOKIE = 1 };

/* Nothing else is mapped there; the page table outlives the page, for these two neighbours' sake. */
static char *const place = (char *)0x200000004000;
static char *const neighbours[] = { (char *)0x200000001000, (char *)0x200000007000 };

static int device = -1, zero, null;
static const volatile uint64_t *counter;
/* Null without the library, or with a device that isn't its own. */
static const struct direct *direct;
static struct lease lease;
static char bytes[64];
static char *block, *below, *fence;
static long regions;
static volatile uint64_t sink;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void map_place(void)
{
	/* No MAP_FIXED: a plain mmap is never trapped. The kernel takes a hint that is free. */
	if (mmap(place, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != place)
		fail("mmap of the page");
	place[0] = 1;
}

static void drain(void)
{
	struct ummunotify_event events[64];

	while (device >= 0 && read(device, events, sizeof events) > 0)
		;
}

static void watch(void)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)place, .end = (uintptr_t)place + PAGE, .user_cookie = COOKIE,
	};

	if (device >= 0 && ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		fail("REGISTER_REGION");
}

static void forget(void)
{
	uint64_t cookie = COOKIE;

	if (device >= 0 && ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0)
		fail("UNREGISTER_REGION");
}

static void client_watch(void)
{
	uint64_t start = (uintptr_t)place;
	long answer = direct ? direct->register_region(&lease, device, start, start + PAGE, COOKIE) : NOT_HERE;

	if (answer == NOT_HERE)
		watch();
	else if (answer != 0)
		fail("the library's register");
}

static void client_forget(void)
{
	long answer = direct ? direct->unregister(&lease, device, COOKIE) : NOT_HERE;

	if (answer == NOT_HERE)
		forget();
	else if (answer != 0)
		fail("the library's unregister");
}

/* No hook of a library is in the way of these. */
static long raw_munmap(void *start, size_t length)
{
	long answer;

	__asm__ volatile("syscall" : "=a"(answer) : "0"((long)SYS_munmap), "D"(start), "S"(length)
			 : "rcx", "r11", "memory");
	return answer;
}

static void *raw_mmap(void *hint, size_t length)
{
	register long flags __asm__("r10") = MAP_PRIVATE | MAP_ANONYMOUS;
	register long file __asm__("r8") = -1;
	register long offset __asm__("r9") = 0;
	void *answer;

	__asm__ volatile("syscall" : "=a"(answer) : "0"((long)SYS_mmap), "D"(hint), "S"(length),
			 "d"((long)(PROT_READ | PROT_WRITE)), "r"(flags), "r"(file), "r"(offset)
			 : "rcx", "r11", "memory");
	return answer;
}

/* What is counted: the calls, and what comes before and after each. */
static void nothing(void) {}

static void *end_at_once(void *argument) { return argument; }

static void do_thread(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, end_at_once, NULL) != 0 || pthread_join(thread, NULL) != 0)
		fail("pthread_create");
}

static void do_counter(void) { sink = *counter; }
static void do_getppid(void) { sink = (uint64_t)syscall(SYS_getppid); }
static void do_read(void) { sink = (uint64_t)read(zero, bytes, sizeof bytes); }
static void do_write(void) { sink = (uint64_t)write(null, bytes, sizeof bytes); }
static void do_mmap(void) { sink = (uintptr_t)mmap(place, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }
static void do_raw_mmap(void) { sink = (uintptr_t)raw_mmap(place, PAGE); }
static void do_munmap(void) { munmap(place, PAGE); }
static void do_raw_munmap(void) { raw_munmap(place, PAGE); }
static void do_madvise(void) { madvise(place, PAGE, MADV_DONTNEED); }
static void do_free(void) { free(block); }
static void unmap_place(void) { raw_munmap(place, PAGE); }

static void allocate(void)
{
	block = malloc(BLOCK);
	if (block == NULL)
		fail("malloc");
	block[0] = 1;
	/* Whether the block's page table goes with it would depend on what else happens to lie there. */
	below = (char *)((uintptr_t)block & -(uintptr_t)PAGE) - 2 * PAGE;
	if (mmap(below, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != below)
		fail("mmap of the block's neighbour");
	below[0] = 1;
}

static void unmap_below(void) { raw_munmap(below, PAGE); }

static void map_watched(void) { map_place(); watch(); }
static void map_client_watched(void) { map_place(); client_watch(); }
static void touch(void) { place[0] = 1; }
static void touch_watched(void) { place[0] = 1; watch(); }
static void read_and_forget(void) { drain(); forget(); }
static void forget_and_unmap(void) { unmap_place(); forget(); }
static void client_forget_and_unmap(void) { unmap_place(); client_forget(); }

static void one_event(void)
{
	map_watched();
	munmap(place, PAGE);
}

static void one_client_event(void)
{
	map_client_watched();
	munmap(place, PAGE);
}

static void do_events(void)
{
	struct ummunotify_event events[64];

	sink = (uint64_t)read(device, events, sizeof events);
}

/* As of a client whose descriptor nobody was shown: nobody polls it. */
static void do_client_events(void)
{
	struct ummunotify_event events[64];
	long answer = direct ? direct->read(&lease, device, events, sizeof events / sizeof events[0], false) : NOT_HERE;

	if (answer == NOT_HERE)
		do_events();
	else
		sink = (uint64_t)answer;
}

/* The record and LAST. */
static void check_events(void)
{
	if (sink != 2 && sink != 2 * sizeof(struct ummunotify_event)) {
		fprintf(stderr, "a read of an event and LAST: %ld\n", (long)sink);
		exit(1);
	}
}

static void check_and_forget(void) { check_events(); forget(); }
static void check_and_client_forget(void) { check_events(); client_forget(); }

static struct work {
	const char *name;
	void (*before)(void), (*call)(void), (*after)(void);
	/* Needs the device; is counted among each number of regions; takes long, and is done in one layout. */
	int device, among, heavy;
} works[] = {
	{ "counter", nothing, do_counter, nothing, 1, 0, 0 },
	{ "thread", nothing, do_thread, nothing, 0, 0, 1 },
	{ "getppid", nothing, do_getppid, nothing, 0, 0, 0 },
	{ "read", nothing, do_read, nothing, 0, 0, 0 },
	{ "write", nothing, do_write, nothing, 0, 0, 0 },
	{ "mmap", nothing, do_mmap, unmap_place, 0, 0, 0 },
	{ "raw-mmap", nothing, do_raw_mmap, unmap_place, 0, 0, 0 },
	{ "munmap", map_place, do_munmap, nothing, 0, 1, 0 },
	{ "hit", map_watched, do_munmap, forget, 0, 1, 0 },
	{ "first-hit", map_watched, do_munmap, read_and_forget, 1, 1, 0 },
	{ "raw-munmap", map_place, do_raw_munmap, nothing, 0, 1, 0 },
	{ "madvise", touch, do_madvise, nothing, 0, 1, 0 },
	{ "discard", touch_watched, do_madvise, forget, 0, 1, 0 },
	{ "free", allocate, do_free, unmap_below, 0, 1, 0 },
	{ "register", map_place, client_watch, client_forget_and_unmap, 1, 1, 0 },
	{ "unregister", map_client_watched, client_forget, unmap_place, 1, 1, 0 },
	{ "events-1", one_client_event, do_client_events, check_and_client_forget, 1, 1, 0 },
	{ "register-call", map_place, watch, forget_and_unmap, 1, 1, 0 },
	{ "unregister-call", map_watched, forget, unmap_place, 1, 1, 0 },
	{ "events-1-call", one_event, do_events, check_and_forget, 1, 1, 0 },
};

static int by_value(const void *a, const void *b)
{
	uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

	return (left > right) - (left < right);
}

/* A mapping that is joined with no other, beside the page and beside what malloc maps. */
static void thicken(int layout)
{
	char *const beside[] = { place + 0x100000, fence - (128 << 20) };

	for (size_t n = 0; n < sizeof beside / sizeof beside[0]; n++) {
		char *hint = beside[n] + layout * 8 * PAGE;

		if (mmap(hint, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != hint)
			fail("mmap of a further mapping");
	}
}

static void thin(void)
{
	for (int layout = 1; layout < LAYOUTS; layout++) {
		raw_munmap(place + 0x100000 + layout * 8 * PAGE, PAGE);
		raw_munmap(fence - (128 << 20) + layout * 8 * PAGE, PAGE);
	}
}

/* Two looks at the clock and a call of a function, which every figure would hold. */
static uint64_t empty(void)
{
	uint64_t least = UINT64_MAX;

	for (int n = 0; n < WARM; n++) {
		void (*volatile call)(void) = nothing;
		uint64_t start = __rdtsc();

		call();
		start = __rdtsc() - start;
		least = start < least ? start : least;
	}
	return least;
}

static void count(const struct work *work, const char *among)
{
	static uint64_t taken[ROUNDS];
	uint64_t least = 0, median = 0, always = empty();
	int layouts = work->heavy ? 1 : LAYOUTS;
	int stays = strcmp(work->name, "madvise") == 0 || strcmp(work->name, "discard") == 0;

	/* What an earlier one left. */
	drain();
	if (stays)
		map_place();
	for (int layout = 0; layout < layouts; layout++) {
		if (layout > 0)
			thicken(layout);
		for (int n = layout == 0 && !work->heavy ? -WARM : -4; n < ROUNDS; n++) {
			void (*volatile call)(void) = work->call;
			uint64_t start;

			work->before();
			start = __rdtsc();
			call();
			start = __rdtsc() - start;
			if (n >= 0)
				taken[n] = start > always ? start - always : 0;
			work->after();
		}
		qsort(taken, ROUNDS, sizeof taken[0], by_value);
		least += taken[0];
		median += taken[ROUNDS / 2];
	}
	if (!work->heavy)
		thin();
	if (stays)
		unmap_place();
	printf("%s %s %lu %lu\n", work->name, among, (unsigned long)(least / layouts), (unsigned long)(median / layouts));
	fflush(stdout);
}

/* Half of them below everything, half above. */
static void fill(long wanted)
{
	for (; regions < wanted; regions++) {
		uint64_t low = 0x100000 + (uint64_t)regions * 8192;
		uint64_t start = regions % 2 == 0 ? low : 0x7fffffff0000 + low;
		struct ummunotify_register_ioctl region = {
			.start = start, .end = start + PAGE, .user_cookie = (1ULL << 32) | (uint64_t)regions,
		};

		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
			fail("REGISTER_REGION");
	}
}

int main(int argc, char **argv)
{
	if (argc < 2 || (strcmp(argv[1], "plain") != 0 && strcmp(argv[1], "device") != 0)) {
		fprintf(stderr, "usage: count plain|device [REGIONS]...\n");
		return 2;
	}
	zero = open("/dev/zero", O_RDONLY);
	null = open("/dev/null", O_WRONLY);
	if (zero < 0 || null < 0)
		fail("/dev/zero, /dev/null");
	if (strcmp(argv[1], "device") == 0) {
		device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
		if (device < 0)
			fail("/dev/ummunotify");
		counter = mmap(NULL, sizeof *counter, PROT_READ, MAP_SHARED, device, 0);
		if (counter == MAP_FAILED)
			fail("mmap of the counter");
		direct = dlsym(RTLD_DEFAULT, SYMBOL);
		if (direct && direct->lease(device, &lease) != 0)
			direct = NULL;
	}
	/* malloc's blocks come to lie below it, and are joined with no other mapping. */
	fence = mmap(NULL, FENCE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (fence == MAP_FAILED)
		fail("mmap of a fence");
	for (size_t n = 0; n < sizeof neighbours / sizeof neighbours[0]; n++) {
		if (mmap(neighbours[n], PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != neighbours[n])
			fail("mmap of a neighbour");
		neighbours[n][0] = 1;
	}
	for (size_t n = 0; n < sizeof works / sizeof works[0]; n++)
		if (!works[n].device || device >= 0)
			if (device < 0 || !works[n].among)
				count(&works[n], "-");
	for (int argument = 2; argument < argc && device >= 0; argument++) {
		fill(atol(argv[argument]));
		for (size_t n = 0; n < sizeof works / sizeof works[0]; n++)
			if (works[n].among)
				count(&works[n], argv[argument]);
	}
	return 0;
}
