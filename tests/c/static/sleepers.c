/*
 * Threads that sleep in blocking reads of one device while timers interrupt them all the time, and another thread
 * invalidates: each invalidation must reach some reader, soon, and no read may return anything but whole records
 * or EINTR.
 *
 *   sleepers ROUNDS [restart]    "restart": the handler is installed with SA_RESTART
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define READERS 3

static int device, restarts;
static atomic_ulong last, interrupted, wrong;
static atomic_int stop;
static pthread_t readers[READERS];

static void nothing(int number)
{
	(void)number;
}

static void *reader(void *unused)
{
	struct ummunotify_event events[128];

	while (!stop) {
		ssize_t got = read(device, events, sizeof(events));

		if (got == -1 && errno == EINTR && !restarts) {
			interrupted++;
			continue;
		}
		if (got <= 0 || got % sizeof(*events) != 0) {
			printf("read: %zd %s\n", got, got < 0 ? strerror(errno) : "");
			wrong++;
			return unused;
		}
		for (size_t i = 0; i < got / sizeof(*events); i++) {
			unsigned long value = events[i].user_cookie_counter, seen = last;

			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
				while (seen < value && !atomic_compare_exchange_weak(&last, &seen, value))
					;
		}
	}
	return unused;
}

static void *pester(void *unused)
{
	struct timespec pause = { 0, 300000 };

	while (!stop) {
		for (int i = 0; i < READERS; i++)
			pthread_kill(readers[i], SIGUSR1);
		nanosleep(&pause, NULL);
	}
	return unused;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = nothing };
	struct ummunotify_register_ioctl region = { .user_cookie = 1 };
	const volatile uint64_t *counter;
	long rounds = argc > 1 ? atol(argv[1]) : 100;
	pthread_t pesterer;
	double worst = 0;
	char *page;

	restarts = argc > 2;
	action.sa_flags = restarts ? SA_RESTART : 0;
	sigaction(SIGUSR1, &action, NULL);
	device = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC);
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	region.start = (uintptr_t)page;
	region.end = region.start + PAGE;
	if (device < 0 || counter == MAP_FAILED || ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		return 2;
	for (int i = 0; i < READERS; i++)
		pthread_create(&readers[i], NULL, reader, NULL);
	pthread_create(&pesterer, NULL, pester, NULL);
	for (long i = 1; i <= rounds && !wrong; i++) {
		double start = now(), end;

		*page = 1;
		if (madvise(page, PAGE, MADV_DONTNEED) != 0 || *counter < (uint64_t)i) {
			printf("round %ld: the counter is %lu\n", i, (unsigned long)*counter);
			return 1;
		}
		/* After-hits may have moved it further. */
		while (last < *counter && !wrong)
			if (now() - start > 10) {
				printf("round %ld: nobody was told of %lu, only of %lu\n", i, (unsigned long)*counter, last);
				return 1;
			}
		end = now();
		worst = end - start > worst ? end - start : worst;
	}
	stop = 1;
	pthread_join(pesterer, NULL);
	printf("rounds %ld, interrupted %lu, wrong %lu, worst %.1f ms\n", rounds, interrupted, wrong, worst * 1e3);
	fflush(stdout);
	_exit(wrong != 0);
}
