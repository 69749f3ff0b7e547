/*
 * What userfaultfd does for a client of the device, and what it must not do to it.
 *
 *   watched SCENARIO...
 *
 * Each scenario runs in this process, in the order given. One that isn't as it must be is said, and ends it with 1.
 * 77: what a scenario needs isn't to be had here, and why is said.
 */
#define _GNU_SOURCE
#include "ring.h"
#include <dirent.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)

static int device = -1;
static const volatile uint64_t *counter;
static uint64_t next_cookie = 1;

#define must(condition) must_(!!(condition), #condition, __LINE__)
static void must_(int condition, const char *text, int line)
{
	if (!condition) {
		printf("line %d: not (%s): errno %s\n", line, text, strerror(errno));
		exit(1);
	}
}

static void open_into(int *fd, const volatile uint64_t **at)
{
	*fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	must(*fd >= 0);
	*at = mmap(NULL, 8, PROT_READ, MAP_SHARED, *fd, 0);
	must(*at != MAP_FAILED);
}

static uint64_t add(int fd, char *start, char *end)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)start,
		.end = (uintptr_t)end,
		.user_cookie = __atomic_fetch_add(&next_cookie, 1, __ATOMIC_RELAXED),
	};

	must(ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region) == 0);
	return region.user_cookie;
}

static void drop(int fd, uint64_t cookie)
{
	must(ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0);
}

static char *map(size_t pages)
{
	char *at = mmap(NULL, pages * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(at != MAP_FAILED);
	memset(at, 1, pages * PAGE);
	return at;
}

/* Whether a userfaultfd in write-protect mode watches the page, by the flag `uw` of smaps. */
static int is_watched(const char *page)
{
	FILE *file = fopen("/proc/self/smaps", "r");
	char line[512];
	unsigned long start = 0, end = 0;
	int answer = -1;

	must(file != NULL);
	while (answer < 0 && fgets(line, sizeof(line), file) != NULL) {
		unsigned long s, e;

		if (sscanf(line, "%lx-%lx ", &s, &e) == 2 && strchr(line, '-') != NULL && line[0] >= '0' && line[0] <= 'f' &&
		    strstr(line, " kB") == NULL)
			start = s, end = e;
		else if (strncmp(line, "VmFlags:", 8) == 0 && (uintptr_t)page >= start && (uintptr_t)page < end)
			answer = strstr(line, " uw") != NULL;
	}
	fclose(file);
	return answer > 0;
}

/* Reads to LAST; the number of INVALs, and the first of them. */
static int drain(int fd, struct ummunotify_event *first)
{
	struct ummunotify_event events[128];
	int count = 0;
	ssize_t bytes;

	while ((bytes = read(fd, events, sizeof(events))) > 0) {
		for (size_t i = 0; i < (size_t)bytes / sizeof(events[0]); i++) {
			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
				return must(events[i].user_cookie_counter <= *counter), count;
			if (count++ == 0 && first != NULL)
				*first = events[i];
		}
	}
	must(bytes < 0 && errno == EAGAIN);
	return count;
}

/* No descriptor of anything of ours: neither userfaultfd nor socket. */
static void nothing_hidden(void)
{
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;

	must(folder != NULL);
	while ((entry = readdir(folder)) != NULL) {
		char name[256] = "";
		ssize_t length = readlinkat(dirfd(folder), entry->d_name, name, sizeof(name) - 1);

		if (length > 0 && (strstr(name, "userfaultfd") != NULL || strncmp(name, "socket:", 7) == 0)) {
			printf("descriptor %s is %s\n", entry->d_name, name);
			exit(1);
		}
	}
	closedir(folder);
}

static void no_ring(int error)
{
	printf("io_uring_setup: %s\n", strerror(-error));
	exit(77);
}

/* A request drops a page: it was reported, as that page. */
static void drop_by_ring(struct ring *ring, char *page)
{
	struct ummunotify_event event;
	uint64_t before = *counter;

	must(ring_madvise(ring, page, PAGE, MADV_DONTNEED) == 0);
	must(*page == 0);
	if (*counter != before + 1) {
		printf("the counter moved by %lu\n", (unsigned long)(*counter - before));
		exit(1);
	}
	must(drain(device, &event) == 1);
	must(event.hint_start == (uintptr_t)page && event.hint_end == (uintptr_t)page + PAGE);
	memset(page, 1, PAGE);
}

/* ---- rings, before and after everything else ---- */

static void ring_before(void)
{
	static struct ring ring;
	int error = ring_open(&ring);
	char *a;

	if (error != 0)
		no_ring(error);
	open_into(&device, &counter);
	nothing_hidden();
	a = map(4);
	add(device, a, a + 4 * PAGE);
	must(is_watched(a));
	drop_by_ring(&ring, a + PAGE);
}

static void ring_after(void)
{
	static struct ring ring;
	const char *layers = getenv("UMMUNOTIFY_TRAP");
	char *a = map(4), *b;
	int error;

	open_into(&device, &counter);
	add(device, a, a + 2 * PAGE);
	/* Without a ring nothing is watched, unless it was asked for. */
	must(is_watched(a) == (layers != NULL && strstr(layers, "fault") != NULL));
	error = ring_open(&ring);
	if (error != 0)
		no_ring(error);
	must(is_watched(a) && !is_watched(a + 2 * PAGE));
	drop_by_ring(&ring, a);
	b = map(2);
	add(device, b, b + PAGE);
	must(is_watched(b) && !is_watched(b + PAGE));
	drop_by_ring(&ring, b);
	nothing_hidden();
}

/* The descriptor is closed, the ring isn't: its memory is mapped. */
static void ring_without_descriptor(void)
{
	static struct ring ring;
	int error = ring_open(&ring);
	char *a = map(1);

	if (error != 0)
		no_ring(error);
	close(ring.fd);
	open_into(&device, &counter);
	add(device, a, a + PAGE);
	must(is_watched(a));
}

static void denied(void)
{
	struct ring ring = { 0 };

	open_into(&device, &counter);
	must(ring_open(&ring) == -EPERM);
	/* What isn't there harms nobody. */
	char *a = map(2);
	add(device, a, a + 2 * PAGE);
	must(!is_watched(a));
	must(munmap(a, PAGE) == 0 && *counter == 1 && drain(device, NULL) == 1);
}

/* Before there is a filter of the device's. */
static void denied_before(void)
{
	struct ring ring = { 0 };

	must(ring_open(&ring) == -EPERM);
	pid_t child = fork();
	if (child == 0)
		_exit(ring_open(&ring) != -EPERM);
	int status = -1;
	must(waitpid(child, &status, 0) == child && status == 0);
}

/* ---- what is watched, and for how long ---- */

static void only_registered(void)
{
	char *a = map(12);
	const volatile uint64_t *other_counter;
	int other;
	uint64_t cookies[3];

	open_into(&device, &counter);
	nothing_hidden();
	cookies[0] = add(device, a + 2 * PAGE, a + 8 * PAGE);
	cookies[1] = add(device, a + 4 * PAGE, a + 5 * PAGE);
	must(!is_watched(a) && is_watched(a + 2 * PAGE) && is_watched(a + 7 * PAGE) && !is_watched(a + 8 * PAGE));
	drop(device, cookies[0]);
	must(!is_watched(a + 3 * PAGE) && is_watched(a + 4 * PAGE) && !is_watched(a + 5 * PAGE));
	open_into(&other, &other_counter);
	cookies[2] = add(other, a + 4 * PAGE + 1, a + 6 * PAGE - 1);
	must(is_watched(a + 5 * PAGE));
	drop(device, cookies[1]);
	must(is_watched(a + 4 * PAGE) && is_watched(a + 5 * PAGE));
	add(device, a + 9 * PAGE, a + 10 * PAGE);
	must(is_watched(a + 9 * PAGE));
	/* The other's own goes with it, and nothing else. */
	must(munmap((void *)other_counter, PAGE) == 0 && close(other) == 0);
	for (int i = 0; is_watched(a + 4 * PAGE); i++) {
		must(i < 5000);
		usleep(1000);
	}
	must(is_watched(a + 9 * PAGE));
	must(munmap((void *)counter, PAGE) == 0 && close(device) == 0);
	for (int i = 0; is_watched(a + 9 * PAGE); i++) {
		must(i < 5000);
		usleep(1000);
	}
	nothing_hidden();
	/* And it comes back. */
	open_into(&device, &counter);
	add(device, a, a + PAGE);
	must(is_watched(a) && !is_watched(a + PAGE));
	must(munmap(a, PAGE) == 0 && *counter == 1);
}

/* A mapping of which a part is watched still grows, moves and collapses as one. */
static void parted_mappings(void)
{
	char *a = map(16), *b, *huge;
	struct ummunotify_event event;
	uint64_t before;

	open_into(&device, &counter);
	must(munmap(a + 10 * PAGE, 6 * PAGE) == 0);
	add(device, a + 4 * PAGE, a + 6 * PAGE);
	must(is_watched(a + 4 * PAGE));
	/* In place, and without leave to move. */
	must(mremap(a, 10 * PAGE, 12 * PAGE, 0) == a);
	must(*counter == 0);
	for (int i = 0; !is_watched(a + 4 * PAGE); i++) {
		must(i < 5000);
		usleep(1000);
	}
	must(!is_watched(a) && !is_watched(a + 6 * PAGE));
	/* To another place. */
	b = mmap(NULL, 12 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(b != MAP_FAILED);
	must(mremap(a, 12 * PAGE, 12 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, b) == b);
	must(*counter == 2 && drain(device, &event) == 1 && !(event.flags & UMMUNOTIFY_EVENT_FLAG_HINT));
	must(b[5 * PAGE] == 1);
	/* One mapping is one invalidation, however many the watch makes of it. */
	add(device, b + 3 * PAGE, b + 5 * PAGE);
	add(device, b + 8 * PAGE, b + 9 * PAGE);
	must(is_watched(b + 3 * PAGE) && !is_watched(b + 5 * PAGE));
	before = *counter;
	must(madvise(b, 12 * PAGE, MADV_DONTNEED) == 0);
	must(*counter == before + 1 && drain(device, NULL) == 2);
	must(mprotect(b, 12 * PAGE, PROT_READ) == 0);
	must(drain(device, NULL) == 2);
	/* Collapsing pages into a huge one fails on watched memory (EINVAL); here it does what it does anywhere. */
	huge = mmap(NULL, 4UL << 20, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(huge != MAP_FAILED);
	huge = (char *)(((uintptr_t)huge + (2UL << 20) - 1) & ~((2UL << 20) - 1));
	memset(huge, 1, 2UL << 20);
	add(device, huge + PAGE, huge + 2 * PAGE);
	must(is_watched(huge + PAGE));
	if (madvise(huge, 2UL << 20, 25 /* MADV_COLLAPSE */) != 0)
		must(errno != EINVAL || !"is there a kernel that knows it");
	for (int i = 0; !is_watched(huge + PAGE); i++) {
		must(i < 5000);
		usleep(1000);
	}
}

static void *grow_and_shrink(void *unused)
{
	char *a = map(8);

	for (int i = 0; i < 100; i++) {
		uint64_t cookie = add(device, a + 2 * PAGE, a + 3 * PAGE);

		a = mremap(a, 8 * PAGE, 12 * PAGE, MREMAP_MAYMOVE);
		must(a != MAP_FAILED);
		must(mremap(a, 12 * PAGE, 8 * PAGE, 0) == a);
		drop(device, cookie);
	}
	return unused;
}

/* As many threads at once: none is in another's way. */
static void parted_by_many(void)
{
	pthread_t threads[3];

	open_into(&device, &counter);
	for (int i = 0; i < 3; i++)
		must(pthread_create(&threads[i], NULL, grow_and_shrink, NULL) == 0);
	for (int i = 0; i < 3; i++)
		must(pthread_join(threads[i], NULL) == 0);
}

/* A child has its own memory, which nobody watches. */
static void forks(void)
{
	char *a = map(8);
	struct ring ring = { 0 };
	int status, error;

	open_into(&device, &counter);
	add(device, a, a + 8 * PAGE);
	must(is_watched(a));
	for (int i = 0; i < 20; i++) {
		pid_t child = fork();

		if (child == 0) {
			if (is_watched(a) || munmap(a, 4 * PAGE) != 0 || madvise(a + 4 * PAGE, PAGE, MADV_DONTNEED) != 0)
				_exit(1);
			/* Its ring is its own. */
			error = ring_open(&ring);
			_exit(error == 0 && ring_madvise(&ring, a + 5 * PAGE, PAGE, MADV_DONTNEED) != 0 ? 2 : 0);
		}
		must(child > 0 && waitpid(child, &status, 0) == child);
		must(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	must(is_watched(a));
	drain(device, NULL);
	must(munmap(a, PAGE) == 0 && drain(device, NULL) == 1);
}

/* ---- a userfaultfd of the application's own ---- */

struct faults {
	int fd;
	char *start;
	uint64_t served;
};

static void *serve_faults(void *argument)
{
	struct faults *faults = argument;
	static char source[PAGE];
	struct uffd_msg message;

	memset(source, 7, sizeof(source));
	for (int left = 4; left > 0; left--) {
		struct pollfd ready = { .fd = faults->fd, .events = POLLIN };
		struct uffdio_copy copy = { .src = (uintptr_t)source, .len = PAGE };

		if (poll(&ready, 1, 10000) != 1 || read(faults->fd, &message, sizeof(message)) != sizeof(message))
			return (void *)1;
		copy.dst = message.arg.pagefault.address & ~(PAGE - 1);
		if (ioctl(faults->fd, UFFDIO_COPY, &copy) != 0)
			return (void *)2;
		faults->served++;
	}
	return NULL;
}

static void own_userfaultfd(void)
{
	char *a = mmap(NULL, 8 * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct faults faults = { .start = a };
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = { .range = { (uintptr_t)a, 4 * PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	pthread_t thread;
	void *result;
	uint64_t before;

	must(a != MAP_FAILED);
	open_into(&device, &counter);
	add(device, a, a + 8 * PAGE);
	must(is_watched(a) && is_watched(a + 4 * PAGE));
	faults.fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
	must(faults.fd >= 0 && ioctl(faults.fd, UFFDIO_API, &api) == 0);
	must(ioctl(faults.fd, UFFDIO_REGISTER, &range) == 0);
	must(!is_watched(a) && is_watched(a + 4 * PAGE));
	must(pthread_create(&thread, NULL, serve_faults, &faults) == 0);
	for (int i = 0; i < 4; i++)
		must(a[(size_t)i * PAGE] == 7);
	must(pthread_join(thread, &result) == 0 && result == NULL && faults.served == 4);
	/* Calls are trapped as ever. */
	before = *counter;
	must(madvise(a, 2 * PAGE, MADV_DONTNEED) == 0 && *counter > before);
	must(ioctl(faults.fd, UFFDIO_UNREGISTER, &range.range) == 0);
	close(faults.fd);
	/* From the next registration on it is watched again. */
	add(device, a, a + PAGE);
	must(is_watched(a));
	must(munmap(a, 8 * PAGE) == 0);
}

static const struct {
	const char *name;
	void (*run)(void);
} scenarios[] = {
	{ "ring-before", ring_before },
	{ "ring-after", ring_after },
	{ "ring-without-descriptor", ring_without_descriptor },
	{ "denied", denied },
	{ "denied-before", denied_before },
	{ "only-registered", only_registered },
	{ "parted-mappings", parted_mappings },
	{ "parted-by-many", parted_by_many },
	{ "forks", forks },
	{ "own-userfaultfd", own_userfaultfd },
};

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(50);
	for (int i = 1; i < argc; i++) {
		size_t k = 0;

		while (k < sizeof(scenarios) / sizeof(scenarios[0]) && strcmp(scenarios[k].name, argv[i]) != 0)
			k++;
		if (k == sizeof(scenarios) / sizeof(scenarios[0]))
			return fprintf(stderr, "watched: no scenario %s\n", argv[i]), 2;
		scenarios[k].run();
	}
	printf("as it must be\n");
	return 0;
}
