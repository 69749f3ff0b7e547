/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A child under job control and under a storm of signals, watched by its parent: stops, goes on, and gets its signals
 * as any process does, with the calls that it is in.
 *
 *   jobs own|inherited
 *
 * own: the child opens the device, its parent doesn't. inherited: the parent opens it before it forks.
 * The child has two threads that unmap memory all the time; none of these calls may fail.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define STOPS 20
#define SIGNALS 1000

struct shared {
	_Atomic uint64_t rounds, handled, queued, disorder, ready, resumed;
};

static struct shared *shared;

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		fflush(stdout);
		exit(1);
	}
}

static void nap(long microseconds)
{
	struct timespec t = { 0, microseconds * 1000 };

	while (nanosleep(&t, &t) != 0 && errno == EINTR)
		;
}

static int open_device(void)
{
	int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);

	must(fd >= 0, "open /dev/ummunotify");
	return fd;
}

static void on_plain(int number)
{
	(void)number;
	atomic_fetch_add(&shared->handled, 1);
}

static void on_queued(int number, siginfo_t *info, void *context)
{
	(void)number, (void)context;
	if ((uint64_t)info->si_value.sival_int != atomic_fetch_add(&shared->queued, 1))
		atomic_fetch_add(&shared->disorder, 1);
}

static void on_continue(int number)
{
	(void)number;
	atomic_fetch_add(&shared->resumed, 1);
}

/* With a region on the page, so that each call is recorded. */
static void *unmap(void *device)
{
	int fd = *(int *)device;

	for (uint64_t cookie = (uint64_t)gettid() << 32;; cookie++) {
		char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + PAGE, cookie, 0, 0 };
		struct ummunotify_event events[4];

		must(page != MAP_FAILED, "mmap");
		*page = 1;
		must(ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
		must(madvise(page, PAGE, MADV_DONTNEED) == 0, "madvise");
		must(munmap(page, PAGE) == 0, "munmap");
		must(ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0, "UNREGISTER_REGION");
		while (read(fd, events, sizeof(events)) > 0)
			;
		must(errno == EAGAIN, "read");
		atomic_fetch_add(&shared->rounds, 1);
	}
	return NULL;
}

static void child(int fd)
{
	struct sigaction plain = { .sa_handler = on_plain }, restart = { .sa_handler = on_plain, .sa_flags = SA_RESTART };
	struct sigaction queued = { .sa_sigaction = on_queued, .sa_flags = SA_SIGINFO };
	struct sigaction resumed = { .sa_handler = on_continue };
	pthread_t thread;
	sigset_t real_time;

	sigaction(SIGUSR1, &plain, NULL);
	sigaction(SIGUSR2, &restart, NULL);
	sigaction(SIGRTMIN, &queued, NULL);
	sigaction(SIGCONT, &resumed, NULL);
	if (fd < 0)
		fd = open_device();
	/* One thread takes those whose order is looked at. */
	sigemptyset(&real_time);
	sigaddset(&real_time, SIGRTMIN);
	pthread_sigmask(SIG_BLOCK, &real_time, NULL);
	must(pthread_create(&thread, NULL, unmap, &fd) == 0, "pthread_create");
	pthread_sigmask(SIG_UNBLOCK, &real_time, NULL);
	atomic_store(&shared->ready, 1);
	unmap(&fd);
}

/* Waits until the child has done more. */
static void goes_on(const char *when)
{
	uint64_t before = atomic_load(&shared->rounds);

	for (int i = 0; i < 10000 && atomic_load(&shared->rounds) < before + 2; i++)
		nap(1000);
	must(atomic_load(&shared->rounds) >= before + 2, when);
}

static void reaches(_Atomic uint64_t *word, uint64_t value, const char *what)
{
	for (int i = 0; i < 10000 && atomic_load(word) < value; i++)
		nap(1000);
	must(atomic_load(word) == value, what);
}

int main(int argc, char **argv)
{
	int status, fd = -1;
	pid_t pid;

	if (argc != 2)
		return 2;
	shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(shared != MAP_FAILED, "mmap");
	if (strcmp(argv[1], "inherited") == 0)
		fd = open_device();
	pid = fork();
	must(pid >= 0, "fork");
	if (pid == 0)
		child(fd);
	reaches(&shared->ready, 1, "the child is ready");

	for (int i = 0; i < STOPS; i++) {
		int how = i % 2 ? SIGTSTP : SIGSTOP;
		uint64_t rounds;

		goes_on("the child goes on");
		nap(i * 37 % 900);
		must(kill(pid, how) == 0, "kill");
		must(waitpid(pid, &status, WUNTRACED) == pid, "wait for the stop");
		must(WIFSTOPPED(status) && WSTOPSIG(status) == how, "it is a stop");
		rounds = atomic_load(&shared->rounds);
		/* What comes to a stopped process waits. */
		must(kill(pid, SIGUSR1) == 0, "kill");
		nap(3000);
		must(atomic_load(&shared->rounds) == rounds, "a stopped child does nothing");
		must(atomic_load(&shared->handled) == (uint64_t)i, "a stopped child handles nothing");
		must(waitpid(pid, &status, WUNTRACED | WCONTINUED | WNOHANG) == 0, "nothing else is told");
		must(kill(pid, SIGCONT) == 0, "kill");
		must(waitpid(pid, &status, WCONTINUED) == pid && WIFCONTINUED(status), "wait for going on");
		reaches(&shared->resumed, i + 1, "the handler of SIGCONT");
		reaches(&shared->handled, i + 1, "the signal that waited");
	}
	for (int i = 0; i < SIGNALS; i++) {
		union sigval value = { .sival_int = i };

		kill(pid, i % 2 ? SIGUSR1 : SIGUSR2);
		while (sigqueue(pid, SIGRTMIN, value) != 0)
			must(errno == EAGAIN, "sigqueue");
		if (i % 16 == 0)
			sched_yield();
	}
	reaches(&shared->queued, SIGNALS, "queued signals");
	must(atomic_load(&shared->disorder) == 0, "queued signals come in order");
	must(atomic_load(&shared->handled) > STOPS, "plain signals");
	goes_on("the child goes on after the storm");
	must(waitpid(pid, &status, WUNTRACED | WCONTINUED | WNOHANG) == 0, "nothing happened to it");
	/* A stopped process can be killed. */
	must(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid, "stop");
	must(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid, "kill");
	must(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it was killed");
	must(waitpid(-1, &status, 0) == -1 && errno == ECHILD, "no other child");
	printf("well\n");
	return 0;
}
