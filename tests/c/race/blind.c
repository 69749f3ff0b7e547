/*
 * A device that never reports anything. Preloaded into the race it shows that the race tells: every address that
 * is given to somebody else is then a stale entry.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int open(const char *path, int flags, ...)
{
	int fd;

	(void)flags;
	if (strcmp(path, "/dev/ummunotify") != 0) {
		errno = ENOENT;
		return -1;
	}
	/* A page that can be mapped and holds zeroes. */
	fd = (int)syscall(SYS_memfd_create, "blind", 0);
	return fd >= 0 && ftruncate(fd, 4096) == 0 ? fd : -1;
}

int ioctl(int fd, unsigned long request, ...)
{
	(void)fd;
	(void)request;
	return 0;
}

ssize_t read(int fd, void *buffer, size_t size)
{
	(void)fd;
	(void)buffer;
	(void)size;
	errno = EAGAIN;
	return -1;
}
