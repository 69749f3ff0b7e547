/*
 * More contexts at once than the fast path looks at, and then all but one are closed: from then on libc's calls are made
 * in the process again. The filter's statistics tell.
 *
 *   crowd MUNMAPS
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int open_device(void)
{
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);

	if (device < 0) {
		perror("/dev/ummunotify");
		exit(1);
	}
	return device;
}

int main(int argc, char **argv)
{
	int others[7];

	open_device();
	for (int n = 0; n < 7; n++)
		others[n] = open_device();
	for (int n = 0; n < 7; n++)
		close(others[n]);
	for (long n = argc > 1 ? atol(argv[1]) : 0; n > 0; n--) {
		char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (page == MAP_FAILED || munmap(page, 4096) != 0) {
			perror("mmap, munmap");
			return 1;
		}
	}
	return 0;
}
