/*
 * Threads that may be cancelled at any instruction are cancelled while they register and unregister; and a handler leaves
 * reads by siglongjmp. None may leave a lock behind, which is taken over then, or the right to a context, which then stays
 * mapped when its descriptor is closed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define CONTEXTS 4
#define THREADS 200
#define JUMPS 500

static int device;
static _Atomic bool ready;

static void *work(void *number)
{
	uint64_t cookie = (uintptr_t)number;
	int before;

	pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, NULL);
	if (pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before) || before != PTHREAD_CANCEL_DEFERRED)
		return NULL;
	ready = true;
	for (;;) {
		struct ummunotify_register_ioctl region = { 0x1000, 0x2000, cookie, 0, 0 };

		ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region);
		ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
	}
}

static sigjmp_buf home;
static volatile sig_atomic_t reads, jumps;

static void jump(int signal)
{
	(void)signal;
	if (reads) {
		jumps++;
		siglongjmp(home, 1);
	}
}

/* Reads, in which there is nothing, until that many were left. */
static void leave(void)
{
	static const struct itimerval often = { { 0, 50 }, { 0, 50 } }, never;
	struct ummunotify_event event;

	jumps = 0;
	signal(SIGALRM, jump);
	setitimer(ITIMER_REAL, &often, NULL);
	sigsetjmp(home, 1);
	reads = 1;
	while (jumps < JUMPS)
		if (read(device, &event, sizeof(event)) >= 0)
			break;
	reads = 0;
	setitimer(ITIMER_REAL, &never, NULL);
	signal(SIGALRM, SIG_IGN);
}

/* Shared memory that is mapped, which contexts are. */
static unsigned mapped(void)
{
	FILE *table = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned n = 0;

	while (table && fgets(line, sizeof(line), table))
		n += strstr(line, "rw-s") != NULL;
	if (table)
		fclose(table);
	return n;
}

int main(void)
{
	unsigned first = 0, last = 0;
	uint64_t moved = 0;

	for (int n = 0; n < CONTEXTS; n++) {
		const volatile uint64_t *counter;

		device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
		counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
		if (device < 0 || counter == MAP_FAILED)
			return perror("start"), 2;
		for (uintptr_t i = 0; i < THREADS; i++) {
			struct timespec pause = { 0, (long)(i * 7919 % 200000) };
			pthread_t thread;
			void *result;

			ready = false;
			if (pthread_create(&thread, NULL, work, (void *)i))
				return perror("threads"), 2;
			while (!ready)
				sched_yield();
			nanosleep(&pause, NULL);
			if (pthread_cancel(thread) || pthread_join(thread, &result) || result != PTHREAD_CANCELED)
				return puts("not cancelled"), 2;
		}
		leave();
		moved += *counter;
		last = mapped();
		if (n == 0)
			first = last;
		munmap((void *)counter, 8);
		close(device);
	}
	printf("counter=%lu mapped=%u then=%u\n", moved, first, last);
	/* One that was closed may wait to be used again. */
	return last > 2 * first;
}
