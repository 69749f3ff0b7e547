// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Hostile and careless use of the device: each call fails as the interface says,
 * nothing is lost by a failed one, and (looked at by the caller of this program)
 * the kernel's log stays clean.
 *
 * UMN_REGIONS sets how many regions "a million" is.
 */
#include "test.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

static unsigned long setting(const char *name, unsigned long otherwise)
{
	const char *value = getenv(name);

	return value ? strtoul(value, NULL, 0) : otherwise;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* ---- pointers ---- */

static void bad_pointers_for_every_call(void)
{
	char *area = pages(3), *watched = pages(1);
	uint32_t word = 1;
	int fd = open_device();

	CHECK(mprotect(area, PAGE, PROT_NONE) == 0);
	unmap(area + 2 * PAGE, 1);
	/* Null, low, unreadable, running into a hole, the gap between the halves, the kernel's, the last. */
	const volatile uintptr_t bad[] = { 0, 8, (uintptr_t)area, (uintptr_t)area + 2 * PAGE - 2,
		(uintptr_t)area + 2 * PAGE, 0x0000800000000000, 0x00007fffffffffff, 0x8000000000000000,
		0xffff888000000000, 0xffffffff81000000, ~0UL - 31, ~0UL };
	const unsigned long calls[] = { UMMUNOTIFY_REGISTER_REGION, UMMUNOTIFY_UNREGISTER_REGION,
		UMMUNOTIFY_ADOPT_COUNTER };

	CHECK(register_range(fd, (uintptr_t)watched, (uintptr_t)watched + PAGE, 1) == 0);
	discard(watched, 1);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		int fresh = open_device();

		for (size_t call = 0; call < sizeof(calls) / sizeof(calls[0]); call++)
			CHECK_FAILS(ioctl(fresh, calls[call], bad[i]), EFAULT);
		/* None of them counts as a use, but this one does. */
		CHECK_FAILS(ioctl(fresh, UMMUNOTIFY_EXCHANGE_FEATURES, bad[i]), EFAULT);
		CHECK_FAILS(ioctl(fresh, UMMUNOTIFY_EXCHANGE_FEATURES, &word), EINVAL);
		CHECK_FAILS(ioctl(fresh, UMMUNOTIFY_EXCHANGE_FEATURES, bad[i]), EINVAL);
		CHECK_FAILS(syscall(SYS_read, fd, bad[i], 64), EFAULT);
		CHECK_FAILS(syscall(SYS_read, fd, bad[i], 1UL << 40), EFAULT);
		CHECK(close(fresh) == 0);
	}
	EXPECT_READ(fd, 8, HIT(1, watched, watched + PAGE), COUNTER(1));
}

static void every_ioctl_number(void)
{
	int fd = open_device();
	char buffer[PAGE] = { 0 };
	unsigned int known = 0;

	/* All directions and sizes of the device's letter; ours are excepted by number. */
	for (unsigned int direction = 0; direction < 4; direction++) {
		for (unsigned int size = 0; size < 64; size++) {
			for (unsigned int nr = 0; nr < 256; nr++) {
				unsigned long call = _IOC(direction, UMMUNOTIFY_MAGIC, nr, size);

				if (call == UMMUNOTIFY_EXCHANGE_FEATURES ||
				    call == UMMUNOTIFY_REGISTER_REGION ||
				    call == UMMUNOTIFY_UNREGISTER_REGION ||
				    call == UMMUNOTIFY_ADOPT_COUNTER) {
					known++;
					continue;
				}
				CHECK_FAILS(ioctl(fd, call, buffer), ENOTTY);
			}
		}
	}
	CHECK_EQ(known, 4);
}

static volatile bool stop;

static void *flip(void *page)
{
	while (!stop) {
		mprotect(page, PAGE, PROT_NONE);
		mprotect(page, PAGE, PROT_READ | PROT_WRITE);
		madvise(page, PAGE, MADV_DONTNEED);
	}
	return NULL;
}

/* Another thread takes the buffer away and gives it back all the time. */
static void a_buffer_that_comes_and_goes_loses_no_event(void)
{
	int fd = open_device();
	char *watched = pages(1), *area = pages(2);
	struct ummunotify_event *events = (void *)(area + PAGE - 32);
	unsigned int faults = 0;
	pthread_t thread;

	CHECK(register_range(fd, (uintptr_t)watched, (uintptr_t)watched + PAGE, 1) == 0);
	CHECK(pthread_create(&thread, NULL, flip, area + PAGE) == 0);
	for (uint64_t i = 1; i <= 2000; i++) {
		ssize_t got;

		discard(watched, 1);
		while ((got = read(fd, events, 64)) < 0) {
			CHECK_EQ(errno, EFAULT);
			faults++;
		}
		/* Never the first record without the second: both or none. */
		CHECK_EQ(got, 64);
		CHECK_EQ(events[0].user_cookie_counter, 1);
		CHECK_FAILS(read(fd, events, 64), EAGAIN);
	}
	stop = true;
	CHECK(pthread_join(thread, NULL) == 0);
	printf("    %u reads of 2000 met a page that was gone\n", faults);
}

/* ---- regions ---- */

static void huge_and_inverted_ranges(void)
{
	const uint64_t ends[] = { 0, 1, PAGE - 1, PAGE, 1ULL << 32, 1ULL << 47, (1ULL << 47) - 1,
		1ULL << 63, (1ULL << 63) - 1, ~0ULL - PAGE, ~0ULL - 1, ~0ULL };
	const size_t count = sizeof(ends) / sizeof(ends[0]);
	int fd = open_device();
	char *base = pages(1);
	uint64_t a = (uintptr_t)base, cookie = 0, hit = 0, seen = 0;
	struct ummunotify_event events[128];
	ssize_t got;

	for (size_t i = 0; i < count; i++) {
		for (size_t j = 0; j < count; j++) {
			bool wanted = ends[i] < a + PAGE && a < ends[j];

			CHECK(register_range(fd, ends[i], ends[j], cookie++ << 1 | wanted) == 0);
			hit += wanted;
		}
	}
	discard(base, 1);
	do {
		got = read(fd, events, sizeof(events));
		CHECK(got > 0);
		for (int i = 0; i < got / 32; i++) {
			if (events[i].type == LAST)
				continue;
			CHECK(events[i].user_cookie_counter & 1);
			CHECK_EQ(events[i].hint_start, a);
			CHECK_EQ(events[i].hint_end, a + PAGE);
			seen++;
		}
	} while (events[got / 32 - 1].type != LAST);
	CHECK_EQ(seen, hit);
	/* fork asks about every range there is. */
	CHECK_EQ(wait_for(fork() ?: (_exit(0), 0)), 0);
}

static void a_million_regions(void)
{
	unsigned long count = setting("UMN_REGIONS", 1000000), in_queue = 0;
	static struct ummunotify_event events[128];
	int fd = open_device();
	char *area = pages(4);
	double start, registered, hit, missed, taken;
	volatile uint64_t *counter = map_counter(fd);

	/* Most lie in one page, some around it; equal starts among them. */
	start = now();
	for (uint64_t cookie = 0; cookie < count; cookie++) {
		uint64_t from = (uintptr_t)area + PAGE + (cookie * 2654435761u) % PAGE;

		CHECK(register_range(fd, from, from + 1 + cookie % 64, cookie) == 0);
	}
	registered = now();
	CHECK_FAILS(register_range(fd, 0, 0, count / 2), EINVAL);
	/* A miss among a million costs next to nothing. */
	for (int i = 0; i < 1000; i++)
		discard(area, 1);
	CHECK_EQ(*counter, 0);
	missed = now();
	discard(area + PAGE, 1);
	hit = now();
	CHECK_EQ(*counter, 1);
	for (;;) {
		ssize_t got = read(fd, events, sizeof(events));

		CHECK(got >= 32);
		in_queue += got / 32;
		if (events[got / 32 - 1].type == LAST)
			break;
	}
	taken = now();
	CHECK_EQ(in_queue, count + 1);
	for (uint64_t cookie = 0; cookie < count; cookie += 3)
		CHECK(unregister(fd, cookie) == 0);
	CHECK_FAILS(unregister(fd, 0), EINVAL);
	discard(area + PAGE, 1);
	CHECK_EQ(*counter, 2);
	printf("    %lu regions: register %.2f us each, a miss %.2f us, one hit of all %.0f ms, read %.2f us each\n",
	       count, (registered - start) * 1e6 / count, (missed - registered) * 1e3,
	       (hit - missed) * 1e3, (taken - hit) * 1e6 / count);
	/* Closed with two thirds of them registered and queued. */
	start = now();
	CHECK(munmap((void *)counter, PAGE) == 0 && close(fd) == 0);
	printf("    close %.0f ms\n", (now() - start) * 1e3);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	CHECK(fd >= 0);
	CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

static void regions_until_memory_runs_out(void)
{
	const char *group = "/sys/fs/cgroup/ummunotify-test", *procs = "/sys/fs/cgroup/cgroup.procs";
	char path[128], text[32];
	pid_t pid;

	if (access("/sys/fs/cgroup/cgroup.controllers", R_OK) != 0)
		skip("no cgroup v2 here");
	write_file("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
	CHECK(mkdir(group, 0755) == 0 || errno == EEXIST);
	snprintf(path, sizeof(path), "%s/memory.max", group);
	write_file(path, "16777216");
	pid = fork();
	if (pid == 0) {
		unsigned long count = 0;
		int fd;

		snprintf(path, sizeof(path), "%s/cgroup.procs", group);
		snprintf(text, sizeof(text), "%d", getpid());
		write_file(path, text);
		fd = open_device();
		while (register_range(fd, count, count + 1, count) == 0) {
			count++;
			CHECK(count < 10000000);
		}
		/* Told, not killed. */
		CHECK_EQ(errno, ENOMEM);
		CHECK(count > 10000);
		CHECK_FAILS(register_range(fd, 0, 1, count), ENOMEM);
		/* What was given back can be had again. */
		for (uint64_t cookie = 0; cookie < count / 2; cookie++)
			CHECK(unregister(fd, cookie) == 0);
		for (uint64_t cookie = 0; cookie < count / 4; cookie++)
			CHECK(register_range(fd, cookie, cookie + 1, cookie) == 0);
		printf("    %lu regions fitted into 16 MiB\n", count);
		fflush(stdout);
		_exit(0);
	}
	CHECK_EQ(wait_for(pid), 0);
	(void)procs;
	/* Its memory went with it. */
	CHECK(rmdir(group) == 0);
}

static void many_contexts_at_once(void)
{
	struct rlimit limit = { 4096, 4096 };
	static int fds[1000];
	char *area = pages(1);
	double start, opened;
	pid_t pid;

	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	start = now();
	for (int i = 0; i < 1000; i++) {
		fds[i] = open_device();
		CHECK(register_range(fds[i], (uintptr_t)area, (uintptr_t)area + PAGE, i) == 0);
	}
	opened = now();
	discard(area, 1);
	for (int i = 0; i < 1000; i++)
		EXPECT_READ(fds[i], 8, HIT(i, area, area + PAGE), COUNTER(1));
	/* A child that dies with all of them. */
	pid = fork();
	if (pid == 0)
		_exit(0);
	CHECK_EQ(wait_for(pid), 0);
	printf("    open %.0f us each", (opened - start) * 1e3);
	start = now();
	for (int i = 0; i < 20; i++)
		CHECK(close(fds[i]) == 0);
	printf(", close %.0f us each\n", (now() - start) * 1e6 / 20);
	/* The rest is closed by the exit. */
}

/* ---- holders that outlive the opener ---- */

static void the_opener_is_killed_while_others_read(void)
{
	struct ummunotify_event events[16];
	int sockets[2], fd;
	char *area = pages(4);
	pid_t pid;

	for (int round = 0; round < 20; round++) {
		CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
		pid = fork();
		if (pid == 0) {
			fd = open_device();
			for (uint64_t i = 0; i < 4; i++)
				CHECK(register_range(fd, (uintptr_t)area + i * PAGE,
						     (uintptr_t)area + (i + 1) * PAGE, i) == 0);
			send_fd(sockets[0], fd);
			for (;;)
				discard(area, 4);
		}
		fd = receive_fd(sockets[1]);
		volatile uint64_t *counter = map_counter(fd);

		for (int i = 0; i < 50; i++) {
			read(fd, events, sizeof(events));
			unregister(fd, i % 4);
			register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, i % 4);
		}
		kill(pid, SIGKILL);
		CHECK_EQ(wait_for(pid), 128 + SIGKILL);
		/* The last LAST and the counter agree, and it stands still. */
		ssize_t got;
		uint64_t last = 0;

		while ((got = read(fd, events, sizeof(events))) > 0)
			if (events[got / 32 - 1].type == LAST)
				last = events[got / 32 - 1].user_cookie_counter;
		CHECK_EQ(errno, EAGAIN);
		if (last)
			CHECK_EQ(last, *counter);
		uint64_t before = *counter;

		CHECK(register_range(fd, 0, ~0ULL, 99) == 0);
		usleep(1000);
		CHECK_EQ(*counter, before);
		CHECK(munmap((void *)counter, PAGE) == 0);
		CHECK(close(fd) == 0);
		close(sockets[0]), close(sockets[1]);
	}
}

/* ---- ADOPT_COUNTER ---- */

static int adopt(int fd, int32_t memfd)
{
	return ioctl(fd, UMMUNOTIFY_ADOPT_COUNTER, &memfd);
}

static int sealed_memfd(off_t size, int seals)
{
	int memfd = memfd_create("counter", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK(memfd >= 0);
	CHECK(ftruncate(memfd, size) == 0);
	CHECK(fcntl(memfd, F_ADD_SEALS, seals) == 0);
	return memfd;
}

static int reopen(int fd, int flags)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, flags | O_CLOEXEC);
}

static void an_adopted_page_is_counted_into(void)
{
	int fd = open_device(), memfd = sealed_memfd(PAGE, F_SEAL_SHRINK | F_SEAL_GROW);
	volatile uint64_t *page;
	char *area = pages(1);
	uint32_t word = 5;

	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	CHECK(page != MAP_FAILED);
	page[0] = 41;
	page[1] = 7;
	CHECK(adopt(fd, memfd) == 0);
	/* What is found counts as reported, and the call doesn't count as a use. */
	CHECK(!readable(fd));
	CHECK(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word) == 0);
	/* The descriptor isn't needed any more. */
	CHECK(close(memfd) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	CHECK_EQ(page[0], 42);
	CHECK_EQ(page[1], 7);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(42));
	CHECK(!readable(fd));
	/* Others count there too: that makes it readable, and LAST carries the sum. */
	__atomic_fetch_add((uint64_t *)page, 8, __ATOMIC_SEQ_CST);
	CHECK(readable(fd));
	EXPECT_READ(fd, 8, COUNTER(50));
	discard(area, 1);
	CHECK_EQ(page[0], 51);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, F_SEAL_SHRINK | F_SEAL_GROW)), EBUSY);
	CHECK_FAILS(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0), EBUSY);
	CHECK(close(fd) == 0);
	CHECK_EQ(page[0], 51);
}

static void adopt_refuses_what_it_cant_use(void)
{
	const int both = F_SEAL_SHRINK | F_SEAL_GROW;
	int fd = open_device(), memfd, other, pipes[2], sockets[2];
	volatile uint64_t *counter;
	char name[] = "/dev/shm/adopt-XXXXXX", disk[] = "/tmp/disk/adopt-XXXXXX";

	/* No descriptor. */
	CHECK_FAILS(adopt(fd, -1), EBADF);
	CHECK_FAILS(adopt(fd, 1000), EBADF);
	CHECK_FAILS(adopt(fd, INT32_MAX), EBADF);
	CHECK_FAILS(adopt(fd, INT32_MIN), EBADF);
	memfd = sealed_memfd(PAGE, both);
	CHECK_FAILS(adopt(fd, reopen(memfd, O_PATH)), EBADF);

	/* Not a memfd: each of these is open for writing where that can be. */
	CHECK_FAILS(adopt(fd, fd), EINVAL);
	CHECK(pipe(pipes) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
	CHECK_FAILS(adopt(fd, pipes[1]), EINVAL);
	CHECK_FAILS(adopt(fd, sockets[0]), EINVAL);
	CHECK_FAILS(adopt(fd, eventfd(0, 0)), EINVAL);
	CHECK_FAILS(adopt(fd, epoll_create1(0)), EINVAL);
	CHECK_FAILS(adopt(fd, open("/dev/null", O_RDWR)), EINVAL);
	CHECK_FAILS(adopt(fd, open("/dev/zero", O_RDWR)), EINVAL);
	CHECK_FAILS(adopt(fd, open("/dev/shm", O_RDONLY | O_DIRECTORY)), EINVAL);
	CHECK_FAILS(adopt(fd, open("/proc/self/mem", O_RDWR)), EINVAL);
	other = mkstemp(name);
	CHECK(other >= 0 && ftruncate(other, PAGE) == 0);
	CHECK_FAILS(adopt(fd, other), EINVAL);
	CHECK_FAILS(fcntl(other, F_ADD_SEALS, both), EPERM);
	other = open("/dev/shm", O_RDWR | O_TMPFILE, 0600);
	CHECK(other >= 0 && ftruncate(other, PAGE) == 0);
	CHECK_FAILS(adopt(fd, other), EINVAL);
	other = mkstemp(disk);
	if (other >= 0) {
		CHECK(ftruncate(other, PAGE) == 0);
		CHECK_FAILS(adopt(fd, other), EINVAL);
	}
	other = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
	if (other >= 0) {
		CHECK(ftruncate(other, 2 << 20) == 0);
		CHECK(fcntl(other, F_ADD_SEALS, both) == 0);
		CHECK_FAILS(adopt(fd, other), EINVAL);
	}
	other = syscall(447, 0); /* memfd_secret, where there is one */
	if (other >= 0 && ftruncate(other, PAGE) == 0)
		CHECK_FAILS(adopt(fd, other), EINVAL);

	/* Not one page, or not sealed as it must be. */
	CHECK_FAILS(adopt(fd, sealed_memfd(0, both)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE - 1, both)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE + 1, both)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(2 * PAGE, both)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(1L << 40, both)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, 0)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, F_SEAL_SHRINK)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, F_SEAL_GROW)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, F_SEAL_SEAL)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, both | F_SEAL_WRITE)), EINVAL);
	CHECK_FAILS(adopt(fd, sealed_memfd(PAGE, both | F_SEAL_FUTURE_WRITE)), EINVAL);
	CHECK_FAILS(adopt(fd, memfd_create("unsealable", MFD_CLOEXEC)), EINVAL);

	/* Not open for writing. */
	CHECK_FAILS(adopt(fd, reopen(memfd, O_RDONLY)), EACCES);

	/* In use. */
	CHECK(register_range(fd, 1, 2, 1) == 0);
	CHECK_FAILS(adopt(fd, memfd), EBUSY);
	CHECK(unregister(fd, 1) == 0);
	counter = map_counter(fd);
	CHECK_FAILS(adopt(fd, memfd), EBUSY);
	CHECK(munmap((void *)counter, PAGE) == 0);
	/* And after all that, it still works. */
	CHECK(adopt(fd, reopen(memfd, O_WRONLY)) == 0);
	CHECK_FAILS(adopt(fd, memfd), EBUSY);
	/* With the seal against sealing too. */
	CHECK(adopt(open_device(), sealed_memfd(PAGE, both | F_SEAL_SEAL)) == 0);
	unlink(name);
	unlink(disk);
}

static void a_childs_counter_mapping_keeps_adoption_away(void)
{
	int fd = open_device(), memfd = sealed_memfd(PAGE, F_SEAL_SHRINK | F_SEAL_GROW), sync[2];
	volatile uint64_t *counter = map_counter(fd);
	pid_t pid;
	char byte;

	CHECK(pipe(sync) == 0);
	pid = fork();
	if (pid == 0) {
		close(sync[1]);
		_exit(read(sync[0], &byte, 1));
	}
	CHECK(munmap((void *)counter, PAGE) == 0);
	CHECK_FAILS(adopt(fd, memfd), EBUSY);
	close(sync[1]);
	CHECK_EQ(wait_for(pid), 0);
	CHECK(adopt(fd, memfd) == 0);
}

/* Truncating is sealed off; what isn't, harms nobody but its author. */
static void an_adopted_memfd_is_mistreated_afterwards(void)
{
	int fd = open_device(), memfd = sealed_memfd(PAGE, F_SEAL_SHRINK | F_SEAL_GROW);
	volatile uint64_t *page;
	char *area = pages(1);

	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	CHECK(page != MAP_FAILED);
	CHECK(adopt(fd, memfd) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK_FAILS(ftruncate(memfd, 0), EPERM);
	CHECK_FAILS(ftruncate(memfd, 2 * PAGE), EPERM);
	/* The module's own reference keeps it writable. */
	CHECK(munmap((void *)page, PAGE) == 0);
	CHECK_FAILS(fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE), EBUSY);
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	CHECK(page != MAP_FAILED);
	discard(area, 1);
	CHECK_EQ(*page, 1);
	CHECK(madvise((void *)page, PAGE, MADV_DONTNEED) == 0);
	CHECK_EQ(*page, 1);
	madvise((void *)page, PAGE, 21 /* MADV_PAGEOUT */);
	discard(area, 1);
	CHECK_EQ(*page, 2);
	/* The counter can be set at will: it is just a number. */
	*page = ~0ULL;
	discard(area, 1);
	CHECK_EQ(*page, 0);
	CHECK(readable(fd));
	EXPECT_READ(fd, 8, HIT_PLAIN(1, area, area + PAGE), COUNTER(0));
	*page = 1ULL << 63;
	CHECK(readable(fd));
	EXPECT_READ(fd, 8, COUNTER(1ULL << 63));
	/* A hole leaves the module with a page of its own. */
	CHECK(fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE) == 0);
	CHECK_EQ(*page, 0);
	discard(area, 1);
	CHECK_EQ(*page, 0);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER((1ULL << 63) + 1));
	CHECK(close(memfd) == 0);
	CHECK(munmap((void *)page, PAGE) == 0);
	discard(area, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER((1ULL << 63) + 2));
}

static void one_memfd_serves_several_contexts(void)
{
	int one = open_device(), two = open_device();
	int memfd = sealed_memfd(PAGE, F_SEAL_SHRINK | F_SEAL_GROW);
	volatile uint64_t *page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, memfd, 0);
	char *area = pages(1);

	CHECK(page != MAP_FAILED);
	CHECK(adopt(one, memfd) == 0 && adopt(two, memfd) == 0);
	CHECK(register_range(one, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(two, (uintptr_t)area, (uintptr_t)area + PAGE, 2) == 0);
	discard(area, 1);
	CHECK_EQ(*page, 2);
	EXPECT_READ(one, 8, HIT(1, area, area + PAGE), COUNTER(2));
	CHECK(close(one) == 0);
	discard(area, 1);
	CHECK_EQ(*page, 3);
}

static void *keep_adopting(void *argument)
{
	int *fds = argument;

	while (!stop)
		adopt(fds[0], fds[1]);
	return NULL;
}

/* Adoption, registration and mapping at the same time: one of them wins each time. */
static void adopt_races_with_use(void)
{
	for (int round = 0; round < 200; round++) {
		int fds[2] = { open_device(), sealed_memfd(PAGE, F_SEAL_SHRINK | F_SEAL_GROW) };
		pthread_t thread;
		char *area = pages(1);
		void *page;

		stop = false;
		CHECK(pthread_create(&thread, NULL, keep_adopting, fds) == 0);
		page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fds[0], 0);
		CHECK(page != MAP_FAILED || errno == EBUSY);
		CHECK(register_range(fds[0], (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
		discard(area, 1);
		stop = true;
		CHECK(pthread_join(thread, NULL) == 0);
		if (page != MAP_FAILED) {
			CHECK_EQ(*(volatile uint64_t *)page, 1);
			unmap(page, 1);
		}
		EXPECT_READ(fds[0], 8, HIT(1, area, area + PAGE), COUNTER(1));
		unmap(area, 1);
		close(fds[0]), close(fds[1]);
	}
}

static const struct test tests[] = {
#define TEST(name) { #name, name }
	TEST(bad_pointers_for_every_call),
	TEST(every_ioctl_number),
	TEST(a_buffer_that_comes_and_goes_loses_no_event),
	TEST(huge_and_inverted_ranges),
	TEST(a_million_regions),
	TEST(regions_until_memory_runs_out),
	TEST(many_contexts_at_once),
	TEST(the_opener_is_killed_while_others_read),
	TEST(an_adopted_page_is_counted_into),
	TEST(adopt_refuses_what_it_cant_use),
	TEST(a_childs_counter_mapping_keeps_adoption_away),
	TEST(an_adopted_memfd_is_mistreated_afterwards),
	TEST(one_memfd_serves_several_contexts),
	TEST(adopt_races_with_use),
};

int main(int argc, char **argv)
{
	return RUN_TESTS(tests, argc, argv, 300);
}
