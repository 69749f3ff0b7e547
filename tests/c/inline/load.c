/*
 * The device is opened for the first time, and libc patched, while eight threads map and unmap: none of them
 * crashes, and what they do to their memory is what they did.
 *
 *   load
 */
#define _GNU_SOURCE
#include "inline.h"
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#define THREADS 8

static atomic_int over, wrong;
static atomic_ulong rounds;

/* Says which check failed, and goes on. */
#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			printf("not (%s): %s\n", #condition, strerror(errno)); \
			wrong++; \
		} \
	} while (0)

static void *work(void *unused)
{
	(void)unused;
	while (!over) {
		char *p = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED) {
			wrong++;
			break;
		}
		memset(p, 7, 4 * PAGE);
		CHECK(madvise(p, PAGE, MADV_DONTNEED) == 0 && p[0] == 0 && p[PAGE] == 7);
		CHECK(mprotect(p + PAGE, PAGE, PROT_READ) == 0 && p[PAGE] == 7);
		char *q = mremap(p + 2 * PAGE, PAGE, 2 * PAGE, MREMAP_MAYMOVE);

		CHECK(q != MAP_FAILED && q[0] == 7 && q[PAGE] == 0);
		/* Not the page that was moved away: others may have mapped there meanwhile. */
		CHECK(munmap(q, 2 * PAGE) == 0 && munmap(p, 2 * PAGE) == 0 && munmap(p + 3 * PAGE, PAGE) == 0);
		free(malloc(200000));
		rounds++;
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	volatile uint64_t *counter;

	for (int i = 0; i < THREADS; i++)
		must(pthread_create(&threads[i], NULL, work, NULL) == 0, "pthread_create");
	while (rounds < THREADS)
		usleep(100);
	int device = open_device(&counter);
	char *p = pages_at(NULL, 2);
	uint64_t was;

	register_pages(device, p, 2, 1);
	usleep(2000);
	was = *counter;
	munmap(p, 2 * PAGE);
	CHECK(*counter != was);
	over = 1;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("%s %lu rounds, %d wrong\n", patched((void *)munmap).stub ? "patched" : "not patched", rounds, wrong);
	return wrong != 0;
}
