/*
 * Two tasks that share one thread's storage (a raw clone without CLONE_SETTLS) register and unregister at the same time. No
 * call may fail, and the counter must not move: it does where one takes the other's lock for its own.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUNDS 50000
#define STACK (1 << 20)

static int device;

/* Calls that failed. */
static unsigned long work(uint64_t base)
{
	unsigned long failed = 0;

	for (unsigned i = 0; i < ROUNDS; i++) {
		uint64_t cookie = base + i % 50;
		struct ummunotify_register_ioctl region = { 0x1000, 0x2000, cookie, 0, 0 };

		failed += ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0;
		failed += ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) != 0;
	}
	return failed;
}

static int twin(void *unused)
{
	(void)unused;
	_exit(work(2000) != 0);
}

int main(void)
{
	const volatile uint64_t *counter;
	char *stack = malloc(STACK);
	unsigned long failed;
	int status, child;

	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	if (device < 0 || counter == MAP_FAILED || !stack)
		return perror("start"), 2;
	/* By now this thread's id is known. */
	failed = work(1000);
	child = clone(twin, stack + STACK, CLONE_VM | CLONE_FILES | CLONE_FS | SIGCHLD, NULL);
	if (child < 0)
		return perror("clone"), 2;
	failed += work(1000);
	if (waitpid(child, &status, 0) != child)
		return perror("waitpid"), 2;
	printf("failed=%lu twin=%d counter=%lu\n", failed, status, *counter);
	return failed != 0 || status != 0 || *counter != 0;
}
