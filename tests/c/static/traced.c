/*
 * A reader that is being traced: it can't be woken by ptrace. A signal ends its first read with EINTR, an invalidation
 * the second one with records. Waits for a line on standard input in between, for the tracer to come.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static int device;

static void nothing(int signal)
{
	(void)signal;
}

static void rest(void)
{
	nanosleep(&(struct timespec){ 0, 200000000 }, NULL);
}

static void *reader(void *unused)
{
	struct ummunotify_event events[8];

	for (int i = 0; i < 2; i++) {
		ssize_t got = read(device, events, sizeof(events));

		printf("read %s\n", got < 0 ? strerrorname_np(errno) : got == 2 * sizeof(*events) ? "records" : "garbage");
		fflush(stdout);
	}
	return unused;
}

int main(void)
{
	struct sigaction action = { .sa_handler = nothing };
	struct ummunotify_register_ioctl region = { .user_cookie = 1 };
	pthread_t thread;
	char line[16], *page;

	sigaction(SIGUSR1, &action, NULL);
	device = open("/dev/ummunotify", O_RDONLY);
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*page = 1;
	region.start = (uintptr_t)page;
	region.end = region.start + PAGE;
	if (device < 0 || ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		return 2;
	puts("ready");
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		return 2;
	pthread_create(&thread, NULL, reader, NULL);
	rest();
	pthread_kill(thread, SIGUSR1);
	rest();
	madvise(page, PAGE, MADV_DONTNEED);
	pthread_join(thread, NULL);
	return 0;
}
