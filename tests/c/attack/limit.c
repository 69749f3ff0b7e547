/*
 * A time limit as ISO C programs set it, by signal() and siglongjmp, ends a loop of calls of the device, again and again.
 * Afterwards other signals must come as ever.
 */
#define _XOPEN_SOURCE 700
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static sigjmp_buf home;
static volatile sig_atomic_t got;
static int device;

static void limit(int number)
{
	(void)number;
	siglongjmp(home, 1);
}

static void count(int number)
{
	(void)number;
	got++;
}

static void work(void)
{
	for (;;) {
		struct ummunotify_register_ioctl region = { 0x1000, 0x2000, 1, 0, 0 };
		uint64_t cookie = 1;

		ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region);
		ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
	}
}

/* On a deeper stack than the loop's. */
static int comes(int before)
{
	volatile char room[4096];

	for (time_t end = time(NULL) + 20; got == before; room[0]++)
		if (time(NULL) > end)
			return 0;
	return 1;
}

int main(void)
{
	struct sigaction action;

	memset(&action, 0, sizeof(action));
	action.sa_handler = count;
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	if (device < 0 || sigaction(SIGUSR1, &action, NULL))
		return perror("start"), 2;
	for (volatile int i = 0; i < 300; i++) {
		struct itimerval soon = { { 0, 0 }, { 0, 500 + i * 7 } };
		int before = got;

		if (!sigsetjmp(home, 1)) {
			/* With the options of the build this is glibc's __sysv_signal. */
			if (signal(SIGALRM, limit) == SIG_ERR || setitimer(ITIMER_REAL, &soon, NULL))
				return perror("timer"), 2;
			work();
		}
		kill(getpid(), SIGUSR1);
		if (!comes(before)) {
			printf("round %d: SIGUSR1 is lost\n", i);
			return 1;
		}
	}
	puts("well");
	return 0;
}
