/*
 * Reads of the device while the supervisor can open nothing more: it waits for a line on standard input, at which that
 * begins. A read that may not block says so, one that blocks gets whole records, and what it left is there to be
 * polled for.
 */
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
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define REGIONS 3

static int device;
static struct ummunotify_event events[8];

struct reader {
	size_t room;
	ssize_t got;
	int left;
};

static void *reader(void *reader_)
{
	struct reader *r = reader_;
	struct pollfd p = { .fd = device, .events = POLLIN };

	r->got = read(device, events, r->room);
	r->left = poll(&p, 1, 0);
	return NULL;
}

static ssize_t try_to_read(void)
{
	ssize_t got;

	fcntl(device, F_SETFL, O_NONBLOCK);
	got = read(device, events, sizeof(events));
	fcntl(device, F_SETFL, 0);
	return got;
}

int main(void)
{
	char line[16], *a;

	device = open("/dev/ummunotify", O_RDONLY);
	a = mmap(NULL, REGIONS * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (device < 0 || a == MAP_FAILED)
		return 2;
	for (uint64_t i = 0; i < REGIONS; i++) {
		struct ummunotify_register_ioctl region = {
			.start = (uintptr_t)a + i * PAGE,
			.end = (uintptr_t)a + (i + 1) * PAGE,
			.user_cookie = i,
		};

		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
			return 2;
	}
	puts("ready");
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		return 2;
	if (try_to_read() != -1 || errno != EAGAIN)
		return puts("a read that doesn't block finds something"), 1;
	for (int i = 0; i < 4; i++) {
		struct reader r = { .room = i % 2 ? sizeof(events[0]) : sizeof(events) };
		pthread_t thread;

		memset(a, 1, REGIONS * PAGE);
		pthread_create(&thread, NULL, reader, &r);
		nanosleep(&(struct timespec){ 0, 100000000 }, NULL);
		madvise(a, REGIONS * PAGE, MADV_DONTNEED);
		pthread_join(thread, NULL);
		if (r.got <= 0 || r.got % sizeof(events[0]) != 0)
			return printf("read %d returns %zd\n", i, r.got), 1;
		if (events[0].type != UMMUNOTIFY_EVENT_TYPE_INVAL)
			return printf("read %d gives %u first\n", i, events[0].type), 1;
		if (i % 2 && r.left != 1)
			return printf("read %d leaves what poll doesn't find\n", i), 1;
		while (try_to_read() > 0)
			;
	}
	return 0;
}
