/*
 * The address-reuse race: a registration cache that is validated by the counter page alone must never answer
 * for memory that was unmapped and given to somebody else.
 *
 *   race ROUNDS LEAST [raw] [fork] [lose]
 *
 * raw: the mapping calls are instructions of this program, not libc's. fork: a child that was forked with a device
 * open runs the same race at the same time. It goes on until LEAST addresses were reused; with lose, until so many
 * were stale.
 *
 * Owners map a page, stamp it, register it, publish the cache entry (address, counter value, stamp), and unmap
 * it. Others map pages all the time; whoever is given an address that an entry names looks it up. The entry is
 * stale if the counter page still shows the entry's value although the page is another one: the stamp is gone.
 * Each owner has a context of its own, so that its counter moves by its own unmapping alone and a current
 * entry is the rule, not a lucky moment.
 */
#define _GNU_SOURCE
#include "bout.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
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

#define PAGE 4096UL
#define OWNERS 4
#define OTHERS 4
/* Pages that one of the others holds before it gives them back. */
#define HELD 16
/* Every so many rounds the address is freed by moving the page away. */
#define MOVE_EVERY 8
#define READ_EVERY 64

struct owner {
	/* The cache entry; `version` is odd while it changes. */
	_Atomic uint64_t version, address, generation, stamp;
	/* Version of the entry whose address was last seen in somebody else's hands. */
	_Atomic uint64_t reused_version;
	const volatile uint64_t *counter;
	int device, number;
	uint64_t rounds, current, outdated;
} __attribute__((aligned(128)));

static struct owner owners[OWNERS];
static _Atomic uint64_t reused, stale;
static _Atomic int owners_running = OWNERS;
/* Of each owner; what is shown is of all. */
static struct bout bout;

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(2);
	}
}

static bool raw, lose;

static long instruction(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = 0;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	if (result < 0 && result > -4096) {
		errno = (int)-result;
		return -1;
	}
	return result;
}

static int unmap(void *start)
{
	return raw ? (int)instruction(SYS_munmap, (long)start, PAGE, 0, 0, 0) : munmap(start, PAGE);
}

static char *move(char *page, char *place)
{
	const int flags = MREMAP_MAYMOVE | MREMAP_FIXED;

	return raw ? (char *)instruction(SYS_mremap, (long)page, PAGE, PAGE, flags, (long)place)
		   : mremap(page, PAGE, PAGE, flags, place);
}

static char *map_page(void)
{
	const int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *page = raw ? (char *)instruction(SYS_mmap, 0, PAGE, protection, flags, -1)
			 : mmap(NULL, PAGE, protection, flags, -1, 0);

	must(page != MAP_FAILED, "mmap");
	return page;
}

static void publish(struct owner *o, uint64_t address, uint64_t generation, uint64_t stamp)
{
	atomic_fetch_add(&o->version, 1);
	atomic_store(&o->address, address);
	atomic_store(&o->generation, generation);
	atomic_store(&o->stamp, stamp);
	atomic_fetch_add(&o->version, 1);
}

static void drain(const struct owner *o)
{
	struct ummunotify_event events[64];

	while (read(o->device, events, sizeof(events)) > 0)
		;
	must(errno == EAGAIN, "read");
}

static void *owner_main(void *argument)
{
	struct owner *o = argument;
	uint32_t features = 0;

	o->device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	must(o->device >= 0, "open /dev/ummunotify");
	must(ioctl(o->device, UMMUNOTIFY_EXCHANGE_FEATURES, &features) == 0, "EXCHANGE_FEATURES");
	o->counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, o->device, 0);
	must(o->counter != MAP_FAILED, "mmap of the counter");

	for (uint64_t round = 1; bout_goes_on(&bout, round, atomic_load(lose ? &stale : &reused)); round++) {
		uint64_t stamp = round * OWNERS + (uint64_t)o->number, generation;
		char *page = map_page();
		struct ummunotify_register_ioctl region = {
			.start = (uintptr_t)page,
			.end = (uintptr_t)page + PAGE,
			.user_cookie = stamp,
		};

		*(volatile uint64_t *)page = stamp;
		must(ioctl(o->device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
		generation = *o->counter;
		publish(o, (uintptr_t)page, generation, stamp);

		/* The cache would be of no use if its entries weren't current while the page is there. */
		if (*o->counter == generation)
			o->current++;
		else
			o->outdated++;

		if (round % MOVE_EVERY == 0) {
			/* The new place is already ours, so that no address is made up. */
			char *place = map_page();

			must(move(page, place) == place, "mremap");
			must(*(volatile uint64_t *)place == stamp, "the page moved");
			must(unmap(place) == 0, "munmap");
		} else {
			must(unmap(page) == 0, "munmap");
		}
		/* Only now may others run into the address: let them. */
		sched_yield();
		must(ioctl(o->device, UMMUNOTIFY_UNREGISTER_REGION, &stamp) == 0, "UNREGISTER_REGION");
		if (round % READ_EVERY == 0)
			drain(o);
		o->rounds++;
	}
	drain(o);
	atomic_fetch_sub(&owners_running, 1);
	return NULL;
}

/* `page` was just given to this thread. Does the cache answer for it? */
static void look_up(struct owner *o, const char *page)
{
	uint64_t version = atomic_load(&o->version), generation, stamp, seen;

	if (version % 2 != 0 || atomic_load(&o->address) != (uintptr_t)page)
		return;
	generation = atomic_load(&o->generation);
	stamp = atomic_load(&o->stamp);
	if (atomic_load(&o->version) != version)
		return;
	/*
	 * The entry is of this address, and this thread was given the address after the owner's page had gone
	 * from there: the owner can't get it back as long as it is held here.
	 */
	seen = atomic_load(&o->reused_version);
	if (seen < version && atomic_compare_exchange_strong(&o->reused_version, &seen, version))
		atomic_fetch_add(&reused, 1);
	if (*o->counter == generation && *(const volatile uint64_t *)page != stamp)
		atomic_fetch_add(&stale, 1);
}

static void *other_main(void *unused)
{
	char *held[HELD];
	int count = 0;

	while (atomic_load(&owners_running) > 0) {
		held[count] = map_page();
		for (int i = 0; i < OWNERS; i++) {
			if (owners[i].counter != NULL && owners[i].counter != MAP_FAILED)
				look_up(&owners[i], held[count]);
		}
		if (++count == HELD) {
			while (count > 0)
				must(unmap(held[--count]) == 0, "munmap");
		}
		sched_yield();
	}
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t owner_threads[OWNERS], other_threads[OTHERS];
	uint64_t rounds = 0, current = 0, outdated = 0;

	pid_t child = -1;
	int status = 0;

	if (argc < 3) {
		fprintf(stderr, "usage: race ROUNDS LEAST [raw] [fork] [lose]\n");
		return 2;
	}
	bout_begin(&bout, argv[1], argv[2]);
	bout.rounds /= OWNERS;
	for (int i = 3; i < argc; i++) {
		raw |= strcmp(argv[i], "raw") == 0;
		lose |= strcmp(argv[i], "lose") == 0;
		if (strcmp(argv[i], "fork") == 0) {
			must(open("/dev/ummunotify", O_RDONLY) >= 0, "open /dev/ummunotify");
			child = fork();
			must(child >= 0, "fork");
			/* What the child prints isn't the result: that is its exit code. */
			if (child == 0)
				must(freopen("/dev/null", "w", stdout) != NULL, "/dev/null");
		}
	}
	for (int i = 0; i < OWNERS; i++) {
		owners[i].number = i;
		must(pthread_create(&owner_threads[i], NULL, owner_main, &owners[i]) == 0, "pthread_create");
	}
	for (int i = 0; i < OTHERS; i++)
		must(pthread_create(&other_threads[i], NULL, other_main, NULL) == 0, "pthread_create");
	for (int i = 0; i < OWNERS; i++) {
		pthread_join(owner_threads[i], NULL);
		rounds += owners[i].rounds;
		current += owners[i].current;
		outdated += owners[i].outdated;
	}
	for (int i = 0; i < OTHERS; i++)
		pthread_join(other_threads[i], NULL);
	printf("rounds=%lu reused=%lu stale=%lu current=%lu outdated=%lu\n", (unsigned long)rounds,
	       (unsigned long)reused, (unsigned long)stale, (unsigned long)current, (unsigned long)outdated);
	if (child > 0)
		must(waitpid(child, &status, 0) == child, "waitpid");
	return stale == 0 && status == 0 ? 0 : 1;
}
