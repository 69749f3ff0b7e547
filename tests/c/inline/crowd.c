/*
 * Opens contexts, closes all but a few, and unmaps: with no more of them than the fast path looks at, libc's calls are
 * made in the process. The filter's statistics tell.
 *
 *   crowd MUNMAPS OPENED KEPT
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
	int devices[64];

	if (argc != 4 || atoi(argv[2]) > 64)
		return 2;
	for (int n = 0; n < atoi(argv[2]); n++)
		devices[n] = open_device();
	for (int n = atoi(argv[3]); n < atoi(argv[2]); n++)
		close(devices[n]);
	for (long n = atol(argv[1]); n > 0; n--) {
		char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (page == MAP_FAILED || munmap(page, 4096) != 0) {
			perror("mmap, munmap");
			return 1;
		}
	}
	return 0;
}
