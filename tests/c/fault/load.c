/*
 * Unmaps, moves and drops registered memory in several threads at once, as fast as it can, until a line comes in;
 * whatever the calls answer. What it must never do is hang.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define THREADS 4
/* A thread keeps its memory where it can't give it back any more. */
#define MOST 200000

static int device;
static _Atomic int stop;
static _Atomic uint64_t next_cookie = 1, done, refused;

static void *work(void *unused)
{
	for (int i = 0; i < MOST && !atomic_load(&stop); i++) {
		uint64_t cookie = atomic_fetch_add(&next_cookie, 1);
		char *a = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ummunotify_register_ioctl region = { (uintptr_t)a, (uintptr_t)a + 4 * PAGE, cookie, 0, 0 };
		struct ummunotify_event events[16];

		if (a == MAP_FAILED)
			break;
		memset(a, 1, 4 * PAGE);
		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
			atomic_fetch_add(&refused, 1);
		madvise(a, PAGE, MADV_DONTNEED);
		munmap(a + 3 * PAGE, PAGE);
		a = mremap(a, 3 * PAGE, 5 * PAGE, MREMAP_MAYMOVE);
		if (a != MAP_FAILED && munmap(a, 5 * PAGE) != 0) {
			struct timespec pause = { 0, 100000 };

			nanosleep(&pause, NULL);
		}
		ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
		while (read(device, events, sizeof(events)) == (ssize_t)sizeof(events))
			;
		atomic_fetch_add(&done, 1);
	}
	return unused;
}

int main(void)
{
	pthread_t threads[THREADS];
	char line[64];

	setvbuf(stdout, NULL, _IOLBF, 0);
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (device < 0)
		return perror("open /dev/ummunotify"), 2;
	for (int i = 0; i < THREADS; i++) {
		if (pthread_create(&threads[i], NULL, work, NULL) != 0)
			return 2;
	}
	while (atomic_load(&done) < 40)
		usleep(1000);
	puts("ready");
	if (fgets(line, sizeof(line), stdin) == NULL)
		return 2;
	atomic_store(&stop, 1);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("done %lu refused %lu\n", (unsigned long)done, (unsigned long)refused);
	/* Not by exit(): unmapping may not be possible any more. */
	_exit(0);
}
