/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Starts another program, or opens the device for the first time, on a stack that is as small as may be: of a thread of
 * PTHREAD_STACK_MIN bytes, and of a signal handler on 8 KiB, as those have that start a debugger at a crash; for the
 * device on 4.5 KiB beside what the kernel puts there.
 *
 *   small thread|handler execve|execv|execvp|execvpe|posix_spawn|posix_spawnp PROGRAM [ARGUMENT ...]
 *   small thread|handler open DEVICE
 *
 * The exit code is the program's, or 0.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define HANDLER (2 * PAGE)
#define ROOM (8 * PAGE)

extern char **environ;
static const char *way;
static char **line;

static int is(const char *name)
{
	return strcmp(way, name) == 0;
}

/* Whether one invalidation is told. */
static int use(int device)
{
	struct ummunotify_event events[2];
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + PAGE, 7, 0, 0 };

	if (device < 0)
		return 94;
	if (page == MAP_FAILED || ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		return 93;
	if (munmap(page, PAGE) != 0 || read(device, events, sizeof(events)) != sizeof(events))
		return 92;
	return events[0].user_cookie_counter == 7 && close(device) == 0 ? 0 : 91;
}

static void *start(void *unused)
{
	pid_t pid = 0;
	int status = 0, failed = 0;

	if (is("open"))
		_exit(use(open(line[0], O_RDONLY | O_NONBLOCK)));
	if (is("posix_spawn"))
		failed = posix_spawn(&pid, line[0], NULL, NULL, line, environ);
	else if (is("posix_spawnp"))
		failed = posix_spawnp(&pid, line[0], NULL, NULL, line, environ);
	else if ((pid = fork()) == 0) {
		if (is("execve"))
			execve(line[0], line, environ);
		else if (is("execv"))
			execv(line[0], line);
		else if (is("execvp"))
			execvp(line[0], line);
		else if (is("execvpe"))
			execvpe(line[0], line, environ);
		_exit(98);
	}
	if (failed != 0 || pid < 0 || waitpid(pid, &status, 0) != pid)
		_exit(97);
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
	return unused;
}

static void handle(int signal)
{
	(void)signal;
	start(NULL);
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return fprintf(stderr, "usage: small thread|handler WAY PROGRAM [ARGUMENT ...]\n"), 2;
	way = argv[2];
	line = argv + 3;
	if (strcmp(argv[1], "thread") == 0) {
		pthread_attr_t attributes;
		pthread_t thread;

		if (pthread_attr_init(&attributes) != 0 ||
		    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN) != 0 ||
		    pthread_create(&thread, &attributes, start, NULL) != 0)
			return 96;
		pthread_join(thread, NULL);
	} else {
		/* Below it lies a page that nobody may touch. */
		char *room = mmap(NULL, PAGE + ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		size_t size = is("open") ? getauxval(AT_MINSIGSTKSZ) + PAGE + PAGE / 8 : HANDLER;
		stack_t stack = { .ss_sp = room + PAGE, .ss_size = size };
		struct sigaction action = { .sa_handler = handle, .sa_flags = SA_ONSTACK };

		if (room == MAP_FAILED || mprotect(room + PAGE, ROOM, PROT_READ | PROT_WRITE) != 0 ||
		    sigaltstack(&stack, NULL) != 0 || sigaction(SIGUSR1, &action, NULL) != 0)
			return 96;
		raise(SIGUSR1);
	}
	return 95;
}
