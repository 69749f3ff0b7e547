/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The device by the 32-bit entry of the kernel, from a static 64-bit program: a named gap. What that entry does to
 * mappings is seen all the same (the walk's rows "32-bit entry").
 *
 * Exit code: 0 if the gap is as it is described, 1 if not, 3 if the kernel has no such entry.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include <linux/ummunotify.h>

enum { READ = 3, OPEN = 5, GETPID = 20, IOCTL = 54 };

static long entry(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory", "r8", "r9", "r10", "r11");
	return result;
}

int main(void)
{
	static const char path[] = UMMUNOTIFY_PATH;
	static struct ummunotify_register_ioctl region = { 4096, 8192, .user_cookie = 1 };
	static char byte;
	int fd = open(path, O_RDONLY | O_NONBLOCK);
	long opened = entry(OPEN, (long)path, O_RDONLY | O_NONBLOCK, 0);
	long registered = entry(IOCTL, fd, UMMUNOTIFY_REGISTER_REGION, (long)&region);
	long got = entry(READ, fd, (long)&byte, 1);

	if (entry(GETPID, 0, 0, 0) == -ENOSYS)
		return 3;
	printf("open %ld, ioctl %ld, read %ld\n", opened, registered, got);
	return fd >= 0 && opened == -ENOENT && registered == -ENOTTY && got == -EAGAIN ? 0 : 1;
}
