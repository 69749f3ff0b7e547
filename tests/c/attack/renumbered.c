/*
 * A number becomes the device's while another thread finds out that it is an ordinary pipe: for that the shim asks at
 * the address that belongs to the pipe's inode, where somebody listens here who keeps it waiting. What the thread has
 * seen must not be believed of the device.
 *
 * Prints what the device answers by that number.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static int number;
static _Atomic int asker;

static void must(int condition, const char *what)
{
	if (!condition) {
		perror(what);
		exit(2);
	}
}

static void *ask(void *unused)
{
	int cookie = 1;

	asker = gettid();
	ioctl(number, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
	return unused;
}

/* Whether the thread sleeps in connect (proc_pid_syscall(5)). */
static int connects(void)
{
	char path[64];
	long call = -1;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", asker);
	file = fopen(path, "r");
	if (file != NULL) {
		if (fscanf(file, "%ld", &call) != 1)
			call = -1;
		fclose(file);
	}
	return call == SYS_connect;
}

int main(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK), ends[2], listener, first, events;
	struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + 4096, 1, 0, 0 };
	struct ummunotify_event event[2];
	struct stat pipe_stat;
	pthread_t thread;
	socklen_t length;

	must(device >= 0, "open /dev/ummunotify");
	must(pipe(ends) == 0 && fstat(ends[0], &pipe_stat) == 0, "a pipe");
	number = ends[0];
	length = offsetof(struct sockaddr_un, sun_path) + 1 +
		 sprintf(address.sun_path + 1, "ummunotify-ctx-%016lx", (unsigned long)pipe_stat.st_ino);
	listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	must(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 0) == 0, "a listener");
	/* The only place in its queue. */
	first = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	must(connect(first, (struct sockaddr *)&address, length) == 0, "connect");
	must(pthread_create(&thread, NULL, ask, NULL) == 0, "pthread_create");
	while (!connects())
		usleep(1000);
	must(dup2(device, number) == number, "dup2");
	/* Nobody listens any more: the pipe that the thread has seen is no device. */
	close(listener);
	must(pthread_join(thread, NULL) == 0, "pthread_join");
	printf("register: %s\n", ioctl(number, UMMUNOTIFY_REGISTER_REGION, &region) ? strerrorname_np(errno) : "ok");
	must(munmap(page, 4096) == 0, "munmap");
	events = (int)(read(number, event, sizeof(event)) / (ssize_t)sizeof(event[0]));
	printf("read: %d events\n", events);
	return 0;
}
