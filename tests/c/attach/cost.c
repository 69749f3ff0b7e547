// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Says what some calls cost, in nanoseconds, for each line of standard input; at "untrapped" makes only those that no
 * filter of ours may trap.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

#define TIME(name, times, what) \
	do { \
		uint64_t start = now(); \
		for (int i = 0; i < (times); i++) \
			what; \
		printf(" %s %.1f", name, (double)(now() - start) / (times)); \
	} while (0)

int main(void)
{
	char line[64];
	int zero = open("/dev/zero", O_RDONLY);

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("ready\n");
	for (int round = 0; fgets(line, sizeof(line), stdin); round++) {
		if (strcmp(line, "untrapped\n") == 0) {
			for (int i = 0; i < 100; i++) {
				getppid();
				if (read(zero, line, 8) != 8)
					return 3;
			}
			printf("untrapped\n");
			round--;
			continue;
		}
		printf("%d", round);
		TIME("getppid", 5000, getppid());
		TIME("read", 5000, if (read(zero, line, 8) != 8) return 3);
		TIME("open+close", 300, if (close(open("/dev/null", O_RDONLY)) != 0) return 3);
		TIME("mmap+munmap", 300, {
			char *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			*p = 1;
			if (munmap(p, 4096) != 0)
				return 3;
		});
		printf("\n");
	}
	return 0;
}
