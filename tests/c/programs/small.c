/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Starts another program on a stack that is as small as may be: of a thread of PTHREAD_STACK_MIN bytes, and of a signal
 * handler on 8 KiB, as those have that start a debugger at a crash.
 *
 *   small thread|handler execve|execv|execvp|execvpe|posix_spawn|posix_spawnp PROGRAM [ARGUMENT ...]
 *
 * The exit code is the program's.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define HANDLER 8192UL

extern char **environ;
static const char *way;
static char **line;

static int is(const char *name)
{
	return strcmp(way, name) == 0;
}

static void *start(void *unused)
{
	pid_t pid = 0;
	int status = 0, failed = 0;

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
		char *room = mmap(NULL, 4096 + HANDLER, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		stack_t stack = { .ss_sp = room + 4096, .ss_size = HANDLER };
		struct sigaction action = { .sa_handler = handle, .sa_flags = SA_ONSTACK };

		if (room == MAP_FAILED || mprotect(room + 4096, HANDLER, PROT_READ | PROT_WRITE) != 0 ||
		    sigaltstack(&stack, NULL) != 0 || sigaction(SIGUSR1, &action, NULL) != 0)
			return 96;
		raise(SIGUSR1);
	}
	return 95;
}
