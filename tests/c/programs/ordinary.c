/*
 * Makes many kinds of calls that the preloaded library wraps, and never opens the device. With an argument it does
 * nothing of that.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static void calls(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct timeval soon = { 0, 0 };
	struct iovec piece;
	struct pollfd waiting;
	struct stat about;
	char buffer[64];
	int fd = open("/etc/passwd", O_RDONLY), again, pair[2], epoll, bytes;
	fd_set set;
	void *page;

	again = openat(AT_FDCWD, "/etc/passwd", O_RDONLY | O_CLOEXEC);
	piece = (struct iovec){ buffer, sizeof(buffer) };
	if (read(fd, buffer, sizeof(buffer)) < 0 || pread(fd, buffer, 8, 0) < 0 || readv(fd, &piece, 1) < 0)
		abort();
	ioctl(fd, FIONREAD, &bytes);
	fcntl(fd, F_GETFL);
	close(dup(fd));
	close(dup2(fd, 40));
	close(fcntl(fd, F_DUPFD, 50));
	if (fstat(fd, &about) != 0 || stat("/etc/passwd", &about) != 0 || access("/etc/passwd", R_OK) != 0)
		abort();
	page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
	mprotect(page, 4096, PROT_NONE);
	madvise(page, 4096, MADV_DONTNEED);
	munmap(page, 4096);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0 || write(pair[0], "x", 1) != 1)
		abort();
	waiting = (struct pollfd){ .fd = pair[1], .events = POLLIN };
	poll(&waiting, 1, 0);
	FD_ZERO(&set);
	FD_SET(pair[1], &set);
	select(pair[1] + 1, &set, NULL, NULL, &soon);
	epoll = epoll_create1(0);
	epoll_ctl(epoll, EPOLL_CTL_ADD, pair[1], &event);
	if (recv(pair[1], buffer, 1, 0) != 1)
		abort();
	syscall(SYS_getppid);
	close(epoll);
	close(pair[0]);
	close(pair[1]);
	close(again);
	close(fd);
}

int main(int argc, char **argv)
{
	pid_t pid;
	int status;

	(void)argv;
	if (argc > 1) {
		printf("done\n");
		return 0;
	}
	for (int i = 0; i < 10; i++)
		calls();
	pid = fork();
	if (pid == 0) {
		calls();
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status != 0)
		return 1;
	printf("done\n");
	return 0;
}
