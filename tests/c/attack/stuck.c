/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A process whose memory can't be read: a path that a call names lies on a page that waits for a userfaultfd which
 * nobody serves. Whoever looks at it for the supervisor sleeps. Another process of the same supervisor must not feel
 * it, and the process itself must be told that everything may be invalid, and go on once its page comes.
 *
 * Prints the longest call of the other process, in microseconds, while the first one was stuck.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static void need(int good, const char *what)
{
	if (!good) {
		printf("%s: %s\n", what, strerror(errno));
		fflush(stdout);
		_exit(1);
	}
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static char *map(void)
{
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	need(page != MAP_FAILED, "mmap");
	return page;
}

static int open_device(void)
{
	int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);

	need(fd >= 0, "open /dev/ummunotify");
	return fd;
}

static void watch(int device, const void *start, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = { (uintptr_t)start, (uintptr_t)start + PAGE, cookie, 0, 0 };

	need(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
}

static unsigned drain(int device, unsigned long *last_cookie)
{
	struct ummunotify_event events[16];
	ssize_t bytes = read(device, events, sizeof(events));

	need(bytes > 0 || errno == EAGAIN, "read");
	if (bytes <= 0)
		return 0;
	*last_cookie = events[0].user_cookie_counter;
	return (unsigned)((size_t)bytes / sizeof(*events));
}

/*
 * The other process: hits, each timed, until the first one was told that everything may be invalid. Then it lets the
 * page come, by closing the last descriptor of its userfaultfd.
 */
static void other(const volatile uint64_t *counter_of_stuck, int uffd)
{
	int device = open_device();
	double longest = 0, start = now(), told = 0;
	unsigned long rounds = 0, cookie;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (told == 0) {
		char *page = map();
		double before;

		*page = 1;
		watch(device, page, ++rounds);
		before = now();
		need(munmap(page, PAGE) == 0, "munmap");
		if (now() - before > longest)
			longest = now() - before;
		need(drain(device, &cookie) == 2 && cookie == rounds, "the other process is told");
		need(ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &rounds) == 0, "UNREGISTER_REGION");
		if (*counter_of_stuck != 0)
			told = now() - start;
		need(now() - start < 30e6, "the stuck process is told");
	}
	printf("told after %.0f ms; the longest of %lu calls of the other process took %.1f ms\n", told / 1e3, rounds,
	       longest / 1e3);
	/* The look that waits has a deadline of seconds, and none of it is felt here. */
	need(told > 1e6, "the look waited");
	need(longest < 1e6, "the other process isn't delayed");
	need(close(uffd) == 0, "close");
	fflush(stdout);
	_exit(0);
}

int main(void)
{
	int uffd, device, status, file;
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register unserved = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	const volatile uint64_t *counter;
	char *path = map(), *watched = map(), name[] = "stuck-XXXXXX", *mapped;
	unsigned long cookie;
	uint64_t before;
	pid_t child;

	/* One for faults of user mode alone wouldn't keep a reader waiting. */
	uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) != 0) {
		printf("LACKING userfaultfd: %s\n", strerror(errno));
		return 77;
	}
	device = open_device();
	counter = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, device, 0);
	need(counter != MAP_FAILED, "mmap of the counter");
	need((file = mkstemp(name)) >= 0 && unlink(name) == 0 && ftruncate(file, PAGE) == 0, "a file");
	mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	need(mapped != MAP_FAILED, "mmap of a file");
	*mapped = *watched = 1;
	unserved.range.start = (uintptr_t)path;
	unserved.range.len = PAGE;
	need(ioctl(uffd, UFFDIO_REGISTER, &unserved) == 0, "UFFDIO_REGISTER");
	child = fork();
	need(child >= 0, "fork");
	if (child == 0)
		other(counter, uffd);
	close(uffd);
	watch(device, mapped, 1);
	watch(device, watched, 2);
	need(*counter == 0, "nothing yet");
	/* Alone in its process, so that the path decides what is invalid. Nothing is on the page when it comes. */
	need(truncate(path, 0) != 0 && errno == ENOENT, "truncate of nothing");
	need(*counter > 0 && drain(device, &cookie) == 3, "both regions and LAST");
	need(waitpid(child, &status, 0) == child && status == 0, "the end of the other process");
	/* Exact again once the look that waited has come back, which nobody waits for. */
	for (double start = now(); now() - start < 10e6;) {
		before = *counter;
		need(madvise(watched, PAGE, MADV_DONTNEED) == 0 && *counter == before + 1, "madvise");
		if (drain(device, &cookie) == 2 && cookie == 2)
			return 0;
		usleep(1000);
	}
	need(0, "it works as before");
}
