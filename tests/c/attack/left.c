/*
 * left ROUNDS LEAST
 *
 * A munmap waits in the kernel, while another thread populates memory, and a third registers what is about to be unmapped.
 * Then a signal comes, whose handler leaves the call by siglongjmp as soon as it is done. The registration must be reported
 * nevertheless. Goes on until LEAST registrations came while the call waited.
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
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "../bout.h"

#define PAGE 4096
#define MUCH (96ul << 20)

static char *page;
static sigjmp_buf home;
static _Atomic bool waits, populates, over;
static volatile sig_atomic_t left;

static void handle(int signal)
{
	(void)signal;
	if (waits) {
		left = 1;
		siglongjmp(home, 1);
	}
}

static void *populate(void *unused)
{
	void *much;

	(void)unused;
	populates = true;
	much = mmap(NULL, MUCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	populates = false;
	if (much != MAP_FAILED)
		munmap(much, MUCH);
	return NULL;
}

static void *take_away(void *unused)
{
	(void)unused;
	if (!sigsetjmp(home, 1)) {
		waits = true;
		munmap(page, PAGE);
	}
	waits = false;
	over = true;
	return NULL;
}

int main(int count, char **args)
{
	struct sigaction action = { .sa_handler = handle };
	struct timespec pause = { 0, 1000000 };
	static struct bout bout;
	uint64_t shown = 0, missed = 0;
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);

	if (count != 3)
		return 2;
	bout_begin(&bout, args[1], args[2]);
	/* Small pages take longer. */
	if (device < 0 || sigaction(SIGUSR1, &action, NULL) || prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		return perror("start"), 2;
	/* Registrations look at what is mapped, and would wait as well, until that was in vain for long. */
	for (uint64_t i = 0; i < 200; i++) {
		struct ummunotify_register_ioctl region = { PAGE, 2 * PAGE, i, 0, 0 };

		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) || ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &i))
			return perror("register"), 2;
	}
	for (uint64_t round = 1; bout_goes_on(&bout, round, shown); round++) {
		struct ummunotify_event events[8];
		pthread_t populating, taking;
		bool in_time, told = false;

		page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + PAGE, round, 0, 0 };

		left = 0;
		over = false;
		if (page == MAP_FAILED || pthread_create(&populating, NULL, populate, NULL))
			return perror("threads"), 2;
		while (!populates)
			sched_yield();
		if (pthread_create(&taking, NULL, take_away, NULL))
			return perror("threads"), 2;
		while (!waits && !over)
			sched_yield();
		nanosleep(&pause, NULL);
		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region))
			return perror("register"), 2;
		in_time = populates;
		pthread_kill(taking, SIGUSR1);
		pthread_join(taking, NULL);
		pthread_join(populating, NULL);
		for (ssize_t got; (got = read(device, events, sizeof(events))) > 0;)
			for (size_t i = 0; i < got / sizeof(*events); i++)
				told |= events[i].type == UMMUNOTIFY_EVENT_TYPE_INVAL;
		if (in_time && left) {
			shown++;
			missed += !told;
		}
		if (ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &round))
			return perror("unregister"), 2;
	}
	printf("left=%lu missed=%lu\n", shown, missed);
	return missed != 0;
}
