/*
 * What becomes of a waiter where something is missing.
 *
 *   deprived descriptors   the lock was left by a thread that is dead, and there is no descriptor to write a byte by
 *   deprived exec          an executed program that has the device reads from it, but can't ask the supervisor
 *   deprived kill          the supervisor is killed while it holds the lock, for a reader that says nothing
 *
 * Prints what came of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
/* Of struct Header in emulator/abi/src/arena.rs. */
#define LOCK 192

static void must(int condition, const char *what)
{
	if (!condition) {
		perror(what);
		exit(2);
	}
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int watch(int device, char *start, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = { (uintptr_t)start, (uintptr_t)start + PAGE, cookie, 0, 0 };

	return ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region);
}

static int forget(int device, uint64_t cookie)
{
	return ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
}

static int readable(int device)
{
	struct pollfd p = { .fd = device, .events = POLLIN };

	return poll(&p, 1, 0);
}

static void no_more_descriptors(void)
{
	struct rlimit none;

	must(getrlimit(RLIMIT_NOFILE, &none) == 0, "getrlimit");
	/* poll takes no more descriptors than the limit allows. */
	none.rlim_cur = 1;
	must(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
}

static char *arena(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long start = 0;

	while (maps != NULL && start == 0 && fgets(line, sizeof(line), maps) != NULL)
		if (strstr(line, "memfd:ummunotify-arena") != NULL)
			start = strtoul(line, NULL, 16);
	must(start != 0, "the arena in /proc/self/maps");
	fclose(maps);
	return (char *)start;
}

static void descriptors(int device, char *pages)
{
	uint32_t *lock = (uint32_t *)(arena() + LOCK);
	pid_t dead = fork();

	if (dead == 0)
		_exit(0);
	must(waitpid(dead, NULL, 0) == dead, "waitpid");
	must(watch(device, pages, 1) == 0 && watch(device, pages + PAGE, 2) == 0, "register");
	no_more_descriptors();
	*lock = (uint32_t)dead;
	must(forget(device, 1) == 0, "unregister");
	printf("poll: %d\n", readable(device));
}

static void executed(int device)
{
	struct ummunotify_event event[4];
	ssize_t bytes;

	no_more_descriptors();
	bytes = read(device, event, sizeof(event));
	if (bytes < 0)
		printf("read: %s\n", strerrorname_np(errno));
	else
		printf("read: %zd bytes\n", bytes);
	fflush(stdout);
	_exit(0);
}

static void exec(int device, char *pages, char *program)
{
	char number[16];
	pid_t child;

	must(watch(device, pages, 1) == 0 && watch(device, pages + PAGE, 2) == 0, "register");
	must(munmap(pages, PAGE) == 0, "munmap");
	child = fork();
	if (child == 0) {
		snprintf(number, sizeof(number), "%d", device);
		execl(program, program, "executed", number, NULL);
		_exit(1);
	}
	must(waitpid(child, NULL, 0) == child, "waitpid");
	must(munmap(pages + PAGE, PAGE) == 0, "munmap");
	printf("poll: %d\n", readable(device));
}

/* Op::Read of emulator/abi/src/wire.rs. */
static void read_without_commit(int device)
{
	struct {
		uint32_t magic, version, op, reserved;
		uint64_t args[6];
	} request = { 0x4d4d5531, 3, 9, 0, { 8 } };
	char control[CMSG_SPACE(sizeof(int))] = { 0 }, answer[4096];
	struct iovec part = { &request, sizeof(request) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, sizeof(control) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct ucred supervisor;
	socklen_t length = sizeof(supervisor);
	struct stat pipe_stat;
	size_t name;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	must(fstat(device, &pipe_stat) == 0, "fstat");
	name = offsetof(struct sockaddr_un, sun_path) + 1 +
	       (size_t)sprintf(address.sun_path + 1, "ummunotify-ctx-%016lx", (unsigned long)pipe_stat.st_ino);
	must(connect(fd, (struct sockaddr *)&address, (socklen_t)name) == 0, "connect");
	must(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &supervisor, &length) == 0, "SO_PEERCRED");
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &device, sizeof(int));
	must(sendmsg(fd, &message, 0) == sizeof(request), "sendmsg");
	/* The records have come: it waits, with the lock, to be told that they have arrived. */
	must(recv(fd, answer, sizeof(answer), 0) > 64, "records");
	must(kill(supervisor.pid, SIGKILL) == 0, "kill");
	must(recv(fd, answer, sizeof(answer), 0) <= 0, "the supervisor's end");
}

static void killed(int device, char *pages)
{
	struct ummunotify_event event[8];
	double start;
	pid_t child;
	int status;

	must(watch(device, pages, 1) == 0 && watch(device, pages + PAGE, 2) == 0, "register");
	must(munmap(pages, PAGE) == 0, "munmap");
	child = fork();
	if (child == 0) {
		read_without_commit(device);
		_exit(0);
	}
	must(waitpid(child, &status, 0) == child && status == 0, "the reader");
	start = now();
	printf("register: %s\n", watch(device, pages, 3) == 0 ? "ok" : strerrorname_np(errno));
	printf("unregister: %s\n", forget(device, 2) == 0 ? "ok" : strerrorname_np(errno));
	printf("poll: %d\n", readable(device));
	printf("read: %s\n", read(device, event, sizeof(event)) > 0 ? "records" : strerrorname_np(errno));
	printf("took: %s\n", now() - start < 5 ? "no time" : "long");
	/* Whatever frees memory fails now. */
	fflush(stdout);
	_exit(0);
}

int main(int argc, char **argv)
{
	static char buffer[BUFSIZ];
	const char *way = argc > 1 ? argv[1] : "";
	char *pages;
	int device;

	setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
	if (strcmp(way, "executed") == 0)
		executed(atoi(argv[2]));
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	must(device >= 0, "open /dev/ummunotify");
	pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(pages != MAP_FAILED, "mmap");
	memset(pages, 1, 2 * PAGE);
	if (strcmp(way, "descriptors") == 0)
		descriptors(device, pages);
	else if (strcmp(way, "exec") == 0)
		exec(device, pages, argv[0]);
	else
		killed(device, pages);
	return 0;
}
