/*
 * A reader that is interrupted, whose number becomes another device's and then another file's: what is reported to
 * the first device must never end up in a read of the others.
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
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static int number;
static atomic_int step;
static ssize_t got;
static struct ummunotify_event events[8];

static void nothing(int signal)
{
	(void)signal;
}

static void rest(void)
{
	nanosleep(&(struct timespec){ 0, 100000000 }, NULL);
}

static void *reader(void *unused)
{
	for (;;) {
		int now = step;

		got = read(number, events, sizeof(events));
		if (got == -1 && errno == EINTR && step == now)
			step++;
		while (step == now + 1)
			;
		if (got > 0)
			return unused;
	}
}

static char *watched(int device, uint64_t cookie)
{
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + PAGE, cookie, 0, 0 };

	*page = 1;
	return ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0 ? page : NULL;
}

/* Interrupts the reader, and puts another file at its number before it reads again. */
static void interrupt_and_replace(pthread_t thread, int by)
{
	int now = step;

	rest();
	pthread_kill(thread, SIGUSR1);
	while (step == now)
		;
	dup2(by, number);
	step++;
	rest();
}

int main(void)
{
	struct sigaction action = { .sa_handler = nothing };
	int first = open("/dev/ummunotify", O_RDONLY), second = open("/dev/ummunotify", O_RDONLY), pipes[2];
	char *of_first = watched(first, 1), *of_second = watched(second, 2);
	char letters[8];
	pthread_t thread;

	if (first < 0 || second < 0 || !of_first || !of_second || pipe(pipes) != 0)
		return 2;
	sigaction(SIGUSR1, &action, NULL);
	number = dup(first);
	pthread_create(&thread, NULL, reader, NULL);

	interrupt_and_replace(thread, second);
	madvise(of_first, PAGE, MADV_DONTNEED);
	rest();
	madvise(of_second, PAGE, MADV_DONTNEED);
	pthread_join(thread, NULL);
	if (got != 2 * (ssize_t)sizeof(*events) || events[0].user_cookie_counter != 2)
		return printf("the second device's reader got %zd bytes, cookie %llu\n", got,
			      (unsigned long long)events[0].user_cookie_counter), 1;

	/* The first one's event is still there. */
	got = read(first, events, sizeof(events));
	if (got != 2 * (ssize_t)sizeof(*events) || events[0].user_cookie_counter != 1)
		return printf("the first device kept %zd bytes\n", got), 1;

	/* And a pipe of somebody else's. */
	step = 0;
	dup2(first, number);
	pthread_create(&thread, NULL, reader, NULL);
	interrupt_and_replace(thread, pipes[0]);
	madvise(of_first, PAGE, MADV_DONTNEED);
	rest();
	if (write(pipes[1], "letters", 8) != 8)
		return 2;
	pthread_join(thread, NULL);
	memcpy(letters, events, 8);
	if (got != 8 || strcmp(letters, "letters") != 0)
		return printf("the pipe's reader got %zd bytes\n", got), 1;
	return 0;
}
