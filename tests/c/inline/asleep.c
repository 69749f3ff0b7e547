/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The device is opened for the first time while another thread sleeps. Says whether libc was patched, and what that thread
 * has seen of it.
 *
 *   asleep write|epoll|futex|poll
 */
#define _GNU_SOURCE
#include "inline.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

enum { MUCH = 1 << 20 };

static const char *kind;
static int ends[2], set;
static atomic_int tid;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char much[MUCH], taken[MUCH];
static const char *seen = "nothing";

static void *sleeper(void *argument)
{
	struct epoll_event event;
	struct pollfd polled = { ends[0], POLLIN, 0 };

	tid = (int)syscall(SYS_gettid);
	if (strcmp(kind, "write") == 0 && write(ends[1], much, MUCH) != MUCH)
		seen = "a part was written";
	if (strcmp(kind, "epoll") == 0 && epoll_wait(set, &event, 1, -1) != 1)
		seen = strerror(errno);
	if (strcmp(kind, "poll") == 0 && poll(&polled, 1, -1) != 1)
		seen = strerror(errno);
	if (strcmp(kind, "futex") == 0 && pthread_mutex_lock(&lock) != 0)
		seen = "an error";
	return argument;
}

/* Until it is in a call, and sleeps there. */
static void await_sleep(void)
{
	char path[64], text[256];

	do {
		char *state;
		FILE *file;

		usleep(1000);
		snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
		file = fopen(path, "r");
		state = file && fgets(text, sizeof text, file) ? strrchr(text, ')') : NULL;
		if (file)
			fclose(file);
		if (state && state[2] == 'S')
			return;
	} while (1);
}

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN };
	volatile uint64_t *counter;
	pthread_t thread;
	int device;
	char *p;

	must(argc == 2, "usage: asleep KIND");
	kind = argv[1];
	must(pipe(ends) == 0, "pipe");
	must((set = epoll_create1(0)) >= 0, "epoll_create1");
	must(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
	pthread_mutex_lock(&lock);
	must(pthread_create(&thread, NULL, sleeper, NULL) == 0, "pthread_create");
	while (!tid)
		;
	await_sleep();
	device = open_device(&counter);
	p = pages_at(NULL, 1);
	register_pages(device, p, 1, 1);
	munmap(p, PAGE);
	must(*counter == 1, "one invalidation");
	usleep(20000);
	pthread_mutex_unlock(&lock);
	if (strcmp(kind, "write") == 0)
		for (size_t got = 0; got < MUCH;) {
			ssize_t n = read(ends[0], taken, MUCH);

			must(n > 0, "read");
			got += (size_t)n;
			/* A part alone comes, and the rest never. */
			if (strcmp(seen, "nothing") != 0)
				break;
		}
	else
		must(write(ends[1], "", 1) == 1, "write");
	pthread_join(thread, NULL);
	printf("%s, the thread saw %s\n", patched((void *)munmap).stub ? "patched" : "not patched", seen);
	return 0;
}
