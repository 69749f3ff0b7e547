/*
 * A client that waits for any child, as an init or a process manager does: it must see its own children and
 * nobody else's. With the argument "reaper" it is a subreaper, and orphans become its children, too.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define CHILDREN 3

static volatile sig_atomic_t signals;

static void on_child(int number)
{
	(void)number;
	signals++;
}

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

/* A child that makes an orphan and ends; the orphan ends with 9. */
static pid_t make_orphan(void)
{
	pid_t pid = fork();

	must(pid >= 0, "fork");
	if (pid == 0) {
		if (fork() == 0)
			_exit(9);
		_exit(8);
	}
	return pid;
}

int main(int argc, char **argv)
{
	struct ummunotify_register_ioctl region = { .user_cookie = 7 };
	struct ummunotify_event events[2];
	struct sigaction action = { .sa_handler = on_child, .sa_flags = SA_RESTART };
	int reaper = getpid() == 1, expected = CHILDREN, seen = 0, status, device;
	const volatile uint64_t *counter;
	siginfo_t info;
	pid_t pid;
	char *page;

	must(sigaction(SIGCHLD, &action, NULL) == 0, "sigaction");
	if (argc > 1 && strcmp(argv[1], "reaper") == 0) {
		must(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "PR_SET_CHILD_SUBREAPER");
		reaper = 1;
	}
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	must(device >= 0, "open");
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED, "mmap");

	/* Nobody is there yet. */
	must(wait(NULL) == -1 && errno == ECHILD, "wait without a child of its own");
	must(signals == 0, "no SIGCHLD without a child of its own");

	for (int i = 1; i <= CHILDREN; i++) {
		pid = fork();
		must(pid >= 0, "fork");
		if (pid == 0)
			_exit(i);
	}
	if (reaper) {
		make_orphan();
		expected += 2;
	}
	while ((pid = wait(&status)) > 0) {
		int code = WEXITSTATUS(status);

		must(WIFEXITED(status) && ((code >= 1 && code <= CHILDREN) || code == 8 || code == 9), "a child of its own");
		seen++;
	}
	must(errno == ECHILD, "wait until nobody is left");
	must(seen == expected, "every child of its own was seen");
	must(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "waitpid WNOHANG");
	must(waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == -1 && errno == ECHILD, "waitid");
	must(waitpid(0, NULL, WNOHANG) == -1 && errno == ECHILD, "waitpid of the group");

	/* And the device works here. */
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(page != MAP_FAILED, "mmap");
	*page = 1;
	region.start = (uintptr_t)page;
	region.end = region.start + PAGE;
	must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
	must(*counter == 0, "nothing was invalidated yet");
	must(munmap(page, PAGE) == 0, "munmap");
	must(*counter == 1, "the counter moved by one");
	must(read(device, events, sizeof(events)) == sizeof(events) && events[0].user_cookie_counter == 7 &&
	     events[0].flags == UMMUNOTIFY_EVENT_FLAG_HINT && events[1].user_cookie_counter == 1, "read");
	must(wait(NULL) == -1 && errno == ECHILD, "wait afterwards");
	close(device);
	must(wait(NULL) == -1 && errno == ECHILD, "wait after the close");
	printf("children %d, pid 1: %s\n", seen, getpid() == 1 ? "yes" : "no");
	return 0;
}
