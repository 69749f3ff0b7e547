/*
 * Many processes, one after the other, that close the device while its counter is still mapped and end in the
 * next moment: whoever looks whether the counter is mapped meets them in the middle of their end.
 */
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static char page[4096] __attribute__((aligned(4096)));

static int leave(int number)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)page,
		.end = (uintptr_t)page + sizeof(page),
		.user_cookie = 1,
	};
	int device = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC);

	if (device < 0 || mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0) == MAP_FAILED ||
	    ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		return 1;
	close(device);
	/* Longer and longer, so that some length meets the look. */
	for (volatile int i = 0; i < number * 500; i++)
		;
	return 0;
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1;

	for (int i = 0; i < count; i++) {
		int status;
		pid_t pid = fork();

		if (pid == 0)
			_exit(leave(i));
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
			return 1;
	}
	printf("left %d times\n", count);
	return 0;
}
