/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Counts what calls cost in a guest whose clock counts instructions (QEMU's -icount shift=0: the time stamp counter goes up
 * by one with each). On one processor, so what a supervisor executes meanwhile is in it; caches and wake-ups aren't.
 *
 *   count plain|crowded|device [REGIONS]...
 *
 * `device` opens /dev/ummunotify, and does the work again with each of these numbers of regions elsewhere (ascending).
 * `crowded` is `plain` in a process that has more mapped, elsewhere.
 * `hit` leaves what it causes unread: somebody has been told already. Before each `first-hit` everything was read.
 * `register`, `unregister` and `events-1` are made as the Rust client makes them (ummunotify::client::Notifier): by the
 * preloaded library's functions where it is there, else by ioctl and read, as those whose names end in `-call` always are.
 * `register-hit` is `register` in a process whose regions are hit all the while: then the library looks ahead.
 *
 * Prints a line for each work: its name, the regions or `-`, and the instructions of a call in each layout, the least of
 * ROUNDS: now and then the kernel's allocators take a longer path, and how often hangs on all that happened before.
 *
 * Layouts: the kernel keeps mappings in a tree whose nodes hold up to 16 ranges, and by how full the nodes happen to be,
 * the same munmap costs some hundred instructions more or less; for each level of the tree it costs some hundred more.
 * So what a process has mapped besides, a preloaded library, say, would tell in a difference to one that hasn't. Here
 * around both places where something is mapped and unmapped lie so many further mappings that the nodes there hold
 * nothing else, and that the tree has three levels. They come and go at random, in the same order in every process, and
 * each work is done in each layout: processes are to be compared layout by layout. `crowded` against `plain` shows
 * what that is worth: 0, but for `free`, whose block lies among the libraries of the process, some 50.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
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

enum {
	PAGE = 4096, WARM = 64, REWARM = 2, ROUNDS = 16, LAYOUTS = 96, CROWD = 25, BLOCK = 33 << 20, COOKIE = 1,
	/* A further mapping may lie at each of so many places below and above, so far apart; beyond are some that stay. */
	SIDE = 32, STAY = 16, STEP = 8 * PAGE,
};

/* Nothing else is mapped there; the page table outlives the page, for these two neighbours' sake. */
static char *const place = (char *)0x200000004000;
static char *const neighbours[] = { (char *)0x200000001000, (char *)0x200000007000 };

static int device = -1, zero, null;
static const volatile uint64_t *counter;
/* Null without the library, or with a device that isn't its own. */
static const struct direct *direct;
static struct lease lease;
static char bytes[64];
static char *block;
/* From below: steps, a hole where malloc maps its block, steps. The block has the same page tables in every process. */
enum { ROOM = BLOCK + (1 << 20), EDGE = (STAY + SIDE) * STEP, AREA = EDGE + ROOM + EDGE, ALIGNMENT = 1 << 30 };
static char *area, *below;
/* Which further mappings there are: below and above the page, below and above the block. */
static bool there[4][SIDE];
static uint64_t draws;
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

static inline void add(uint64_t start, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = { .start = start, .end = start + PAGE, .user_cookie = cookie };

	if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		fail("REGISTER_REGION");
}

static void watch(void)
{
	if (device >= 0)
		add((uintptr_t)place, COOKIE);
}

static void forget(void)
{
	uint64_t cookie = COOKIE;

	if (device >= 0 && ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0)
		fail("UNREGISTER_REGION");
}

static inline void client_add(uint64_t start, uint64_t cookie)
{
	long answer = direct ? direct->register_region(&lease, device, start, start + PAGE, cookie) : NOT_HERE;

	if (answer == NOT_HERE)
		add(start, cookie);
	else if (answer != 0)
		fail("the library's register");
}

static void client_watch(void) { client_add((uintptr_t)place, COOKIE); }

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

/* Of count.sh; no library is preloaded into it. */
static void do_exec(void)
{
	char *argv[] = { "true", NULL }, *empty[] = { NULL };
	pid_t child;
	int status;

	if ((errno = posix_spawn(&child, "/tmp/true", NULL, NULL, argv, empty)) != 0 || waitpid(child, &status, 0) != child || status != 0)
		fail("/tmp/true");
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
static void unmap_place(void) { munmap(place, PAGE); }

static void allocate(void)
{
	block = malloc(BLOCK);
	if (block == NULL)
		fail("malloc");
	block[0] = 1;
}

static void map_watched(void) { map_place(); watch(); }
static void map_client_watched(void) { map_place(); client_watch(); }
static void touch(void) { place[0] = 1; }
static void touch_watched(void) { place[0] = 1; watch(); }
static void read_and_forget(void) { drain(); forget(); }
static void forget_and_unmap(void) { forget(); unmap_place(); }
static void client_forget_and_unmap(void) { client_forget(); unmap_place(); }
static void unmap_and_client_forget(void) { unmap_place(); client_forget(); }

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
	/* Needs the device; is counted among each number of regions; is done in one layout of so many. */
	int device, among, every;
	uint64_t least[LAYOUTS];
} works[] = {
	{ "counter", nothing, do_counter, nothing, 1, 0, 1, { 0 } },
	{ "thread", nothing, do_thread, nothing, 0, 0, 16, { 0 } },
	{ "exec-bare", nothing, do_exec, nothing, 0, 0, 16, { 0 } },
	{ "getppid", nothing, do_getppid, nothing, 0, 0, 1, { 0 } },
	{ "read", nothing, do_read, nothing, 0, 0, 1, { 0 } },
	{ "write", nothing, do_write, nothing, 0, 0, 1, { 0 } },
	{ "mmap", nothing, do_mmap, unmap_place, 0, 0, 1, { 0 } },
	{ "raw-mmap", nothing, do_raw_mmap, unmap_place, 0, 0, 1, { 0 } },
	{ "munmap", map_place, do_munmap, nothing, 0, 1, 1, { 0 } },
	{ "hit", map_watched, do_munmap, forget, 0, 1, 4, { 0 } },
	{ "first-hit", map_watched, do_munmap, read_and_forget, 1, 1, 4, { 0 } },
	{ "raw-munmap", map_place, do_raw_munmap, nothing, 0, 1, 1, { 0 } },
	{ "madvise", touch, do_madvise, nothing, 0, 1, 1, { 0 } },
	{ "discard", touch_watched, do_madvise, forget, 0, 1, 4, { 0 } },
	{ "free", allocate, do_free, nothing, 0, 1, 1, { 0 } },
	{ "register-hit", map_place, client_watch, unmap_and_client_forget, 1, 1, 4, { 0 } },
	{ "events-1", one_client_event, do_client_events, check_and_client_forget, 1, 1, 4, { 0 } },
	{ "events-1-call", one_event, do_events, check_and_forget, 1, 1, 4, { 0 } },
};

/* Counted before the others: while these go on, the process's own calls hit no region. */
static struct work calm[] = {
	{ "register", map_place, client_watch, client_forget_and_unmap, 1, 1, 4, { 0 } },
	{ "unregister", map_client_watched, client_forget, unmap_place, 1, 1, 4, { 0 } },
	{ "register-call", map_place, watch, forget_and_unmap, 1, 1, 4, { 0 } },
	{ "unregister-call", map_watched, forget, unmap_place, 1, 1, 4, { 0 } },
};

static uint32_t random_below(uint32_t limit)
{
	draws = draws * 6364136223846793005ULL + 1442695040888963407ULL;
	return (uint32_t)((draws >> 33) % limit);
}

/* One of the places of further mappings, which are joined with no other mapping: maps it or unmaps it. */
static void toggle(int side, int number)
{
	char *const starts[] = { place - SIDE * STEP, place + STEP, area + STAY * STEP, area + EDGE + ROOM };
	char *start = starts[side] + (size_t)number * STEP;

	if (there[side][number]) {
		munmap(start, PAGE);
		there[side][number] = false;
	} else {
		char *got = mmap(start, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (got == MAP_FAILED)
			fail("mmap of a further mapping");
		there[side][number] = got == start;
		/* Something of the process's own lies there. */
		if (got != start)
			munmap(got, PAGE);
	}
}

/* The next layout. */
static void toggle_all(void)
{
	for (int side = 0; side < 4; side++)
		for (int number = 0; number < SIDE; number++)
			if (random_below(2) != there[side][number])
				toggle(side, number);
}

static void map_at(char *start, size_t length, int protection)
{
	if (mmap(start, length, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != start)
		fail("mmap of what stays");
}

/* What lies around both places and stays, and the hole for the block. */
static void prepare(void)
{
	char *reserve = mmap(NULL, 2UL * ALIGNMENT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *hole;

	if (reserve == MAP_FAILED || raw_munmap(reserve, 2UL * ALIGNMENT) != 0)
		fail("mmap of an area");
	area = (char *)(((uintptr_t)reserve + ALIGNMENT) & -(uintptr_t)ALIGNMENT);
	for (int n = 0; n < STAY; n++) {
		map_at(place + (1 << 30) + n * STEP, PAGE, PROT_READ);
		map_at(area + n * STEP, PAGE, PROT_READ);
		map_at(area + AREA - (n + 1) * STEP, PAGE, PROT_READ);
	}
	map_at(area + EDGE + ROOM - STEP, PAGE, PROT_READ);
	/* Other holes that the block fits into are above, and are filled. */
	do
		hole = mmap(NULL, BLOCK + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	while (hole != MAP_FAILED && hole > area + AREA);
	if (hole == MAP_FAILED || raw_munmap(hole, BLOCK + PAGE) != 0 || (block = malloc(BLOCK)) == NULL)
		fail("mmap of a hole");
	if (block < area || block > area + AREA) {
		fprintf(stderr, "malloc's block is at %p, not in the hole of %p\n", (void *)block, (void *)area);
		exit(1);
	}
	/* The block's first page table outlives it. */
	below = (char *)((uintptr_t)block & -(uintptr_t)PAGE) - 2 * PAGE;
	map_at(below, PAGE, PROT_READ | PROT_WRITE);
	below[0] = 1;
	free(block);
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

/* In the layout that is. */
static void measure(struct work *work, int layout, uint64_t always)
{
	uint64_t least = UINT64_MAX;
	int stays = work->call == do_madvise;

	drain();
	if (stays)
		map_place();
	for (int n = layout == 0 ? -WARM : -REWARM; n < ROUNDS; n++) {
		void (*volatile call)(void) = work->call;
		uint64_t start;

		work->before();
		start = __rdtsc();
		call();
		start = __rdtsc() - start;
		start = start > always ? start - always : 0;
		if (n >= 0 && start < least)
			least = start;
		work->after();
	}
	if (stays)
		unmap_place();
	work->least[layout] = least;
}

/* Of these works all, or those that are counted among regions, or those that aren't. */
static void count_all(struct work *first, struct work *end, const char *among, bool some, bool others)
{
	uint64_t always = empty();

	draws = 1;
	for (int layout = 0; layout < LAYOUTS; layout++) {
		toggle_all();
		for (struct work *work = first; work < end; work++)
			if ((work->among ? some : others) && (!work->device || device >= 0) && layout % work->every == 0)
				measure(work, layout, always);
	}
	for (struct work *work = first; work < end; work++) {
		if (!(work->among ? some : others) || (work->device && device < 0))
			continue;
		printf("%s %s", work->name, among);
		for (int layout = 0; layout < LAYOUTS; layout += work->every)
			printf(" %lu", (unsigned long)work->least[layout]);
		printf("\n");
	}
	fflush(stdout);
}

static void count(const char *among, bool some, bool others)
{
	if (device >= 0 && some)
		count_all(calm, calm + sizeof calm / sizeof calm[0], among, some, others);
	count_all(works, works + sizeof works / sizeof works[0], among, some, others);
}

/* Half of them below everything, half above. */
static void fill(long wanted)
{
	char *hole = below + 2 * PAGE;

	/* What the process itself maps meanwhile shall not lie there. */
	map_at(hole, BLOCK + PAGE, PROT_NONE);
	for (; regions < wanted; regions++) {
		uint64_t low = 0x100000 + (uint64_t)regions * 8192;
		uint64_t start = regions % 2 == 0 ? low : 0x7fffffff0000 + low;

		client_add(start, (1ULL << 32) | (uint64_t)regions);
	}
	raw_munmap(hole, BLOCK + PAGE);
}

int main(int argc, char **argv)
{
	if (argc < 2 || (strcmp(argv[1], "plain") != 0 && strcmp(argv[1], "crowded") != 0 && strcmp(argv[1], "device") != 0)) {
		fprintf(stderr, "usage: count plain|crowded|device [REGIONS]...\n");
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
	/* Of two kinds, which aren't joined. */
	for (int n = 0; n < CROWD && strcmp(argv[1], "crowded") == 0; n++)
		if (mmap(NULL, PAGE, n % 2 == 0 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
			fail("mmap of a crowd");
	for (size_t n = 0; n < sizeof neighbours / sizeof neighbours[0]; n++) {
		if (mmap(neighbours[n], PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != neighbours[n])
			fail("mmap of a neighbour");
		neighbours[n][0] = 1;
	}
	prepare();
	count("-", device < 0, true);
	for (int argument = 2; argument < argc && device >= 0; argument++) {
		fill(atol(argv[argument]));
		count(argv[argument], true, false);
	}
	return 0;
}
