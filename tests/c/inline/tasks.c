/*
 * Threads, and programs that posix_spawn starts: no trapped call makes them, and what they do is recorded no differently.
 * The filter's statistics tell how many were trapped.
 *
 *   tasks TIMES
 */
#define _GNU_SOURCE
#include "inline.h"
#include <errno.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;
static volatile uint64_t *counter;
static int device;

static void expect(const char *what, uint64_t got, uint64_t wanted)
{
	if (got != wanted) {
		printf("%s: counted %lu times instead of %lu\n", what, got, wanted);
		exit(1);
	}
}

static void *unmap(void *page)
{
	must(munmap(page, PAGE) == 0, "munmap in a thread");
	return NULL;
}

static void a_thread(void)
{
	char *page = pages_at(NULL, 1);
	uint64_t was = *counter;
	pthread_t thread;

	register_pages(device, page, 1, 1);
	must(pthread_create(&thread, NULL, unmap, page) == 0, "pthread_create");
	must(pthread_join(thread, NULL) == 0, "pthread_join");
	expect("a thread's munmap", *counter - was, 1);
	unregister_pages(device, 1);
}

static void no_program(void)
{
	char *arguments[] = { (char *)"none", NULL };
	pid_t child;

	must(posix_spawn(&child, "/nonexistent/none", NULL, NULL, arguments, environ) == ENOENT, "posix_spawn of nothing");
	child = vfork();
	must(child >= 0, "vfork");
	if (child == 0) {
		execve("/nonexistent/none", arguments, environ);
		_exit(errno == ENOENT ? 0 : 1);
	}
	int status;

	must(waitpid(child, &status, 0) == child && status == 0, "a vfork child without a program");
}

static void a_program(void)
{
	char *arguments[] = { (char *)"true", NULL };
	pid_t child;
	int status;

	must(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0, "posix_spawn");
	must(waitpid(child, &status, 0) == child && status == 0, "true");
}

int main(int argc, char **argv)
{
	long times = argc > 1 ? atol(argv[1]) : 1;

	device = open_device(&counter);
	for (long n = 0; n < times; n++)
		a_thread();
	for (long n = 0; n < times; n++)
		no_program();

	/* All that there is: a program whose calls were taken for ours would be counted. */
	struct ummunotify_register_ioctl all = { .start = PAGE, .end = 0x7ffffffff000, .user_cookie = 2 };
	uint64_t was = *counter;

	must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &all) == 0, "REGISTER_REGION");
	for (int n = 0; n < 5; n++)
		a_program();
	/* posix_spawn unmaps its child's stack. */
	expect("five programs", *counter - was, 5);
	unregister_pages(device, 2);

	/* An own program that there isn't: this one goes on as before. */
	char *page = pages_at(NULL, 1), *arguments[] = { (char *)"none", NULL };

	was = *counter;
	register_pages(device, page, 1, 3);
	must(execve("/nonexistent/none", arguments, environ) == -1 && errno == ENOENT, "execve of nothing");
	must(munmap(page, PAGE) == 0, "munmap");
	expect("munmap after a failed execve", *counter - was, 1);
	return 0;
}
