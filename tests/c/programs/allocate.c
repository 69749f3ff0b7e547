/* Allocates, grows and frees in several threads, checks what it wrote, and prints sums and descriptor numbers. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define BLOCKS 256
#define ROUNDS 2000

static void *work(void *argument)
{
	uint64_t state = (uintptr_t)argument + 1, sum = 0;
	unsigned char *blocks[BLOCKS] = { 0 };
	size_t sizes[BLOCKS] = { 0 };

	for (int round = 0; round < ROUNDS; round++) {
		int i;

		state = state * 6364136223846793005u + 1442695040888963407u;
		i = (int)(state >> 40) % BLOCKS;
		if (blocks[i] != NULL) {
			for (size_t k = 0; k < sizes[i]; k += 512)
				sum += blocks[i][k];
			if (state >> 63) {
				free(blocks[i]);
				blocks[i] = NULL;
				continue;
			}
		}
		sizes[i] = (size_t)(state >> 20) % (round % 50 == 0 ? 4u << 20 : 64u << 10) + 1;
		blocks[i] = realloc(blocks[i], sizes[i]);
		if (blocks[i] == NULL)
			abort();
		memset(blocks[i], i + 1, sizes[i]);
	}
	for (int i = 0; i < BLOCKS; i++)
		free(blocks[i]);
	return (void *)(uintptr_t)sum;
}

int main(void)
{
	pthread_t threads[THREADS];
	int pair[2];

	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, work, (void *)i);
	for (int i = 0; i < THREADS; i++) {
		void *sum;

		pthread_join(threads[i], &sum);
		printf("thread %d: %lu\n", i, (unsigned long)(uintptr_t)sum);
	}
	malloc_trim(0);
	if (pipe(pair) != 0)
		return 1;
	printf("descriptors: %d %d %d %d\n", open("/dev/null", O_RDONLY), dup(1), pair[0], pair[1]);
	return 42;
}
