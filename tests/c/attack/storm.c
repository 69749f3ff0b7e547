/*
 * Four threads invalidate regions of their own and know each invalidation; meanwhile others fork, spawn, vfork
 * with a failing exec, make and join threads, and a timer interrupts them all. After each call that invalidates,
 * the owner's counter must have moved: numbers of tasks come and go, and a supervisor that takes one for another
 * would miss it.
 *
 *   storm ROUNDS [restart]    "restart": the signal handler is installed with SA_RESTART
 *
 * Without SA_RESTART a call that waits for the supervisor can end with EINTR, before it has done anything: it is
 * counted and made again, and only then must the counter have moved.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define OWNERS 4

extern char **environ;

static atomic_int owners_left = OWNERS;
static atomic_long missed, rounds, forks, threads, failed, interruptions;
static long wanted;
static int restarts;

/* A call, again and again while a signal comes first. */
#define PATIENTLY(call) while ((call) != 0 && errno == EINTR && !restarts) interruptions++

static void interrupted(int signal)
{
	(void)signal;
}

static void complain(const char *what)
{
	perror(what);
	failed++;
}

static char *fresh_pages(void)
{
	char *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (pages == MAP_FAILED) {
		complain("mmap");
		exit(2);
	}
	*pages = 1;
	return pages;
}

static void *owner(void *argument)
{
	long number = (long)argument;
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	volatile uint64_t *counter;
	struct ummunotify_event events[16];

	if (device < 0) {
		perror("open");
		exit(2);
	}
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	if (counter == MAP_FAILED) {
		perror("mmap of the counter");
		exit(2);
	}
	for (uint64_t cookie = 0; cookie < (uint64_t)wanted; cookie++) {
		char *pages = fresh_pages();
		struct ummunotify_register_ioctl region = { (uintptr_t)pages, (uintptr_t)pages + 2 * PAGE, cookie, 0, 0 };
		size_t left = 2 * PAGE, gone = 0;
		uint64_t before;
		int result = 0;

		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0) {
			complain("register");
			munmap(pages, left);
			continue;
		}
		before = *counter;
		switch ((cookie + number) % 4) {
		case 0:
			PATIENTLY(result = munmap(pages, gone = left));
			break;
		case 1:
			PATIENTLY(result = madvise(pages, PAGE, MADV_DONTNEED));
			break;
		case 2:
			PATIENTLY(result = mprotect(pages, PAGE, PROT_READ));
			break;
		default:
			PATIENTLY(result = munmap(pages, gone = PAGE));
		}
		if (result != 0)
			complain("an operation");
		if (*counter == before)
			missed++;
		while (read(device, events, sizeof(events)) == (ssize_t)sizeof(events))
			;
		if (ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0)
			complain("unregister");
		if (gone < left) {
			PATIENTLY(result = munmap(pages + gone, left - gone));
			if (result != 0)
				complain("munmap");
		}
		rounds++;
	}
	owners_left--;
	return NULL;
}

static void reap(pid_t child)
{
	int status;

	if (child > 0)
		while (waitpid(child, &status, 0) < 0)
			;
}

static void *forker(void *argument)
{
	char *command[] = { "true", NULL };

	while (owners_left > 0) {
		pid_t child = fork();

		if (child == 0) {
			munmap(fresh_pages(), 2 * PAGE);
			_exit(0);
		}
		reap(child);
		if (posix_spawn(&child, "/bin/true", NULL, NULL, command, environ) == 0)
			reap(child);
		child = vfork();
		if (child == 0) {
			execl("/nonexistent", "nonexistent", (char *)NULL);
			_exit(0);
		}
		reap(child);
		forks++;
	}
	return argument;
}

static void *passing(void *argument)
{
	munmap(fresh_pages(), 2 * PAGE);
	return argument;
}

static void *threader(void *argument)
{
	while (owners_left > 0) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, passing, NULL) == 0) {
			pthread_join(thread, NULL);
			threads++;
		}
	}
	return argument;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = interrupted, .sa_flags = argc > 2 ? SA_RESTART : 0 };
	struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { 0 };
	pthread_t all[OWNERS + 2];

	restarts = argc > 2;
	wanted = argc > 1 ? atol(argv[1]) : 1000;
	sigaction(SIGALRM, &action, NULL);
	for (long i = 0; i < OWNERS; i++)
		pthread_create(&all[i], NULL, owner, (void *)i);
	pthread_create(&all[OWNERS], NULL, forker, NULL);
	pthread_create(&all[OWNERS + 1], NULL, threader, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	/*
	 * Joined without the timer: glibc aborts where the munmap of a stack fails, as it does with EINTR (see above)
	 * once more stacks have ended than it keeps.
	 */
	while (owners_left > 0)
		usleep(10000);
	setitimer(ITIMER_REAL, &never, NULL);
	for (int i = 0; i < OWNERS + 2; i++)
		pthread_join(all[i], NULL);
	printf("rounds=%ld missed=%ld forks=%ld threads=%ld failed=%ld interruptions=%ld\n", rounds, missed, forks,
	       threads, failed, interruptions);
	return missed != 0 || failed != 0;
}
