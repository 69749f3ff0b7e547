/* A client that is killed while its child, a shell under the inherited filter, goes on. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

static char page[4096] __attribute__((aligned(4096)));

int main(void)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)page,
		.end = (uintptr_t)page + sizeof(page),
		.user_cookie = 1,
	};
	int device = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC);
	pid_t pid;

	if (device < 0 || ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
		return 3;
	pid = fork();
	if (pid == 0) {
		/* Waits until the parent is gone, then does what makes trapped calls, and says so in a file. */
		execl("/bin/sh", "sh", "-c",
		      "while [ -e /proc/$0/exe ]; do sleep 0.05; done; "
		      "seq 100000 | sort -r | tail -1 > result.new && mv result.new result",
		      ({ static char number[16]; snprintf(number, sizeof(number), "%d", getppid()); number; }), (char *)NULL);
		_exit(127);
	}
	printf("ready\n");
	fflush(stdout);
	pause();
	return 0;
}
