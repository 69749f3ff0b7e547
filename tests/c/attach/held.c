// SPDX-License-Identifier: MIT OR Apache-2.0
/* Does to the device what standard input says, a word a line, and says what came of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul

static int device = -1, step;
static const volatile uint64_t *counter;
static char *pages;

static void say(const char *what, long result)
{
	printf("%d %s: %s\n", step, what, result < 0 ? strerrorname_np(errno) : "ok");
}

static void say_read(const char *what, int fd)
{
	struct ummunotify_event events[16];
	ssize_t bytes = read(fd, events, sizeof(events));

	if (bytes < 0) {
		say(what, -1);
		return;
	}
	printf("%d %s:", step, what);
	for (ssize_t i = 0; i < bytes / (ssize_t)sizeof(events[0]); i++)
		if (events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
			printf(" LAST");
		else
			printf(" %lu%s", (unsigned long)events[i].user_cookie_counter, events[i].flags ? "h" : "");
	printf("\n");
}

static void *reader(void *unused)
{
	(void)unused;
	fcntl(device, F_SETFL, 0);
	say_read("blocking", device);
	fcntl(device, F_SETFL, O_NONBLOCK);
	return NULL;
}

static long add(uint64_t cookie)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)pages + cookie * PAGE,
		.end = (uintptr_t)pages + (cookie + 1) * PAGE,
		.user_cookie = cookie,
	};

	return ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region);
}

int main(void)
{
	char line[64];
	uint64_t cookie = 1, last = 0;
	uint32_t features = 0;
	pthread_t thread;

	setvbuf(stdout, NULL, _IOLBF, 0);
	pages = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(pages, 1, 16 * PAGE);
	printf("ready\n");
	for (; fgets(line, sizeof(line), stdin); step++) {
		line[strcspn(line, "\n")] = 0;
		if (strcmp(line, "open") == 0) {
			say(line, device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK));
		} else if (strcmp(line, "map") == 0) {
			void *at = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);

			say(line, at == MAP_FAILED ? -1 : 0);
			if (at != MAP_FAILED)
				counter = at;
		} else if (strcmp(line, "register") == 0) {
			long result = add(1);

			say(line, result ? result : add(2));
		} else if (strcmp(line, "unregister") == 0) {
			say(line, ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie));
		} else if (strcmp(line, "features") == 0) {
			say(line, ioctl(device, UMMUNOTIFY_EXCHANGE_FEATURES, &features));
		} else if (strcmp(line, "unmap") == 0) {
			/* What changes nothing invalidates nothing. */
			static int protection = PROT_READ | PROT_WRITE;

			protection ^= PROT_WRITE;
			say(line, mprotect(pages + PAGE, PAGE, protection));
		} else if (strcmp(line, "read") == 0) {
			say_read(line, device);
		} else if (strcmp(line, "block") == 0) {
			say(line, -pthread_create(&thread, NULL, reader, NULL));
		} else if (strcmp(line, "joined") == 0) {
			say(line, -pthread_join(thread, NULL));
		} else if (strcmp(line, "poll") == 0) {
			struct pollfd fd = { .fd = device, .events = POLLIN };

			printf("%d poll: %d\n", step, poll(&fd, 1, 0));
		} else if (strcmp(line, "counter") == 0) {
			printf("%d counter: %s\n", step, *counter == last ? "same" : "moved");
			last = *counter;
		} else if (strcmp(line, "copy") == 0) {
			say(line, dup(device));
		} else if (strcmp(line, "close") == 0) {
			say(line, close(device));
		}
	}
	return 0;
}
