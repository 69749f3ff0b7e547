/*
 * A client whose supervisor is killed: says what its calls do before and after. It waits on standard input in
 * between. With the argument "blocking" it sleeps in a read of the device when that happens.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096
#define REGIONS 3

static int device;

static void say_read(const char *when)
{
	struct ummunotify_event events[8];
	ssize_t bytes = read(device, events, sizeof(events));

	if (bytes < 0) {
		printf("%s: read %s\n", when, strerrorname_np(errno));
		return;
	}
	printf("%s: read", when);
	for (ssize_t i = 0; i < bytes / (ssize_t)sizeof(events[0]); i++) {
		if (events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
			printf(" LAST");
		else
			printf(" %lu%s", (unsigned long)events[i].user_cookie_counter, events[i].flags ? "h" : "");
	}
	printf("\n");
}

static void say_call(const char *what, long result)
{
	printf("%s: %s\n", what, result < 0 ? strerrorname_np(errno) : "ok");
}

int main(int argc, char **argv)
{
	int blocking = argc > 1 && strcmp(argv[1], "blocking") == 0;
	const volatile uint64_t *counter;
	uint64_t before, cookie = 1;
	struct pollfd poll_device;
	char line[16], *pages;

	setvbuf(stdout, NULL, _IOLBF, 0);
	device = open("/dev/ummunotify", O_RDONLY | (blocking ? 0 : O_NONBLOCK));
	if (device < 0)
		return 3;
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	pages = mmap(NULL, 2 * REGIONS * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(pages, 1, 2 * REGIONS * PAGE);
	for (int i = 0; i < REGIONS; i++) {
		struct ummunotify_register_ioctl region = {
			.start = (uintptr_t)pages + 2 * (uintptr_t)i * PAGE,
			.end = (uintptr_t)pages + (2 * (uintptr_t)i + 1) * PAGE,
			.user_cookie = (uint64_t)i + 1,
		};

		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
			return 3;
	}
	say_call("munmap before", munmap(pages + PAGE, PAGE));
	before = *counter;
	printf("ready\n");
	if (!blocking && read(0, line, sizeof(line)) <= 0)
		return 3;
	if (!blocking) {
		/* Nobody traces or decides any more: the kernel answers in the supervisor's place. */
		say_call("munmap after", munmap(pages + 3 * PAGE, PAGE));
		say_call("mprotect after", mprotect(pages, PAGE, PROT_READ));
		say_call("getppid after", getppid());
	}
	poll_device = (struct pollfd){ .fd = device, .events = POLLIN };
	if (!blocking)
		printf("poll: %d\n", poll(&poll_device, 1, 5000));
	say_read("first");
	printf("counter moved: %s\n", *counter > before ? "yes" : "no");
	say_read("second");
	say_read("third");
	say_call("UNREGISTER_REGION after", ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie));
	say_call("open after", open("/dev/ummunotify", O_RDONLY));
	return 0;
}
