/*
 * A thread with the smallest stack that there is does all that a client does, while signals come: few regions and many are
 * registered, hit, read of and unregistered.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 1000
#define MANY 200
#define PAGE 4096

static int device;
static const volatile uint64_t *counter;
static _Atomic bool over;
static volatile sig_atomic_t handled;
static unsigned long failed;
static struct ummunotify_event events[2 * MANY];

static void handle(int signal)
{
	(void)signal;
	handled++;
}

/* Whether it went as it should. */
static bool round_of(unsigned regions)
{
	char *at = mmap(NULL, regions * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t before = *counter;
	unsigned told = 0;
	bool well = at != MAP_FAILED;

	for (uint64_t i = 0; i < regions; i++) {
		uint64_t page = (uintptr_t)at + i * PAGE;
		struct ummunotify_register_ioctl region = { page, page + PAGE, i, 0, 0 };

		well &= ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0;
	}
	munmap(at, regions * PAGE);
	well &= *counter != before;
	for (bool last = false; !last;) {
		ssize_t got = read(device, events, sizeof(events));

		if (got <= 0)
			return false;
		for (size_t i = 0; i < got / sizeof(*events); i++) {
			last |= events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST;
			told += events[i].type == UMMUNOTIFY_EVENT_TYPE_INVAL;
		}
	}
	for (uint64_t i = 0; i < regions; i++)
		well &= ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &i) == 0;
	return well && told == regions;
}

static void *work(void *unused)
{
	(void)unused;
	for (int i = 0; i < ROUNDS; i++)
		failed += !round_of(i % 10 ? 1 : MANY);
	over = true;
	return NULL;
}

int main(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	long least = sysconf(_SC_THREAD_STACK_MIN);

	signal(SIGUSR1, handle);
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	if (device < 0 || counter == MAP_FAILED || pthread_attr_init(&attributes) ||
	    pthread_attr_setstacksize(&attributes, least) || pthread_create(&thread, &attributes, work, NULL))
		return perror("start"), 2;
	while (!over) {
		struct timespec pause = { 0, 20000 };

		pthread_kill(thread, SIGUSR1);
		nanosleep(&pause, NULL);
	}
	pthread_join(thread, NULL);
	printf("failed=%lu stack=%ld signals=%d\n", failed, least, (int)handled);
	return failed != 0;
}
