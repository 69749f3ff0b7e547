/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What the guest's test programs share: a table of named tests, each run in a
 * process of its own under a time limit, and short names for the device's calls.
 */
#ifndef TEST_H
#define TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEVICE "/dev/ummunotify"
#define PAGE 4096UL
#define SKIPPED 77
#define INVAL UMMUNOTIFY_EVENT_TYPE_INVAL
#define LAST UMMUNOTIFY_EVENT_TYPE_LAST
#define HINT UMMUNOTIFY_EVENT_FLAG_HINT

struct test {
	const char *name;
	void (*run)(void);
};

static inline void failed(const char *file, int line, const char *format, ...)
{
	va_list args;

	printf("    %s:%d: ", file, line);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	_exit(1);
}

#define CHECK(condition) \
	do { \
		if (!(condition)) \
			failed(__FILE__, __LINE__, "not so: %s (errno %d %s)", #condition, errno, \
			       strerror(errno)); \
	} while (0)

#define CHECK_EQ(got, wanted) \
	do { \
		unsigned long long got_ = (unsigned long long)(got); \
		unsigned long long wanted_ = (unsigned long long)(wanted); \
		if (got_ != wanted_) \
			failed(__FILE__, __LINE__, "%s is %llu (0x%llx), should be %llu (0x%llx)", #got, \
			       got_, got_, wanted_, wanted_); \
	} while (0)

/* The call fails, with this errno. */
#define CHECK_FAILS(call, error) \
	do { \
		errno = 0; \
		long long result_ = (long long)(intptr_t)(call); \
		int errno_ = errno; \
		if (result_ != -1 || errno_ != (error)) \
			failed(__FILE__, __LINE__, "%s returned %lld, errno %d %s; should fail with %s", \
			       #call, result_, errno_, strerror(errno_), #error); \
	} while (0)

static inline void skip(const char *reason)
{
	printf("    skipped: %s\n", reason);
	fflush(stdout);
	_exit(SKIPPED);
}

/* ---- the device's calls ---- */

static inline int open_flags(int flags)
{
	return open(DEVICE, flags);
}

static inline int open_device(void)
{
	int fd = open(DEVICE, O_RDONLY | O_NONBLOCK | O_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

static inline int register_range(int fd, uint64_t start, uint64_t end, uint64_t cookie)
{
	struct ummunotify_register_ioctl arg = {
		.start = start, .end = end, .user_cookie = cookie,
		/* Clients leave these uninitialised. */
		.flags = 0xdeadbeef, .reserved = 0xfeedface,
	};

	return ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &arg);
}

static inline int unregister(int fd, uint64_t cookie)
{
	return ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
}

static inline volatile uint64_t *map_counter(int fd)
{
	void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);

	CHECK(page != MAP_FAILED);
	return page;
}

static inline bool readable(int fd)
{
	struct pollfd pollfd = { .fd = fd, .events = POLLIN | POLLRDNORM };
	int ready = poll(&pollfd, 1, 0);

	CHECK(ready >= 0);
	CHECK(!(pollfd.revents & (POLLERR | POLLHUP | POLLNVAL)));
	CHECK(!ready || pollfd.revents == (POLLIN | POLLRDNORM));
	return ready;
}

/* The next read returns exactly this. */
struct expected {
	uint32_t type;
	uint32_t flags;
	uint64_t start;
	uint64_t end;
	uint64_t value;
};

static inline void expect_read_at(const char *file, int line, int fd, size_t room,
				  const struct expected *wanted, size_t count)
{
	struct ummunotify_event events[256];
	ssize_t got;

	memset(events, 0xa5, sizeof(events));
	got = read(fd, events, room * sizeof(events[0]));
	if (got != (ssize_t)(count * sizeof(events[0]))) {
		int error = errno;

		for (ssize_t i = 0; i < got / 32; i++)
			printf("    %zd: type %u flags %u hint 0x%llx 0x%llx value 0x%llx\n", i,
			       events[i].type, events[i].flags, (unsigned long long)events[i].hint_start,
			       (unsigned long long)events[i].hint_end,
			       (unsigned long long)events[i].user_cookie_counter);
		failed(file, line, "read returned %zd (errno %d), not %zu records", got, error, count);
	}
	for (size_t i = 0; i < count; i++) {
		if (events[i].type != wanted[i].type || events[i].flags != wanted[i].flags ||
		    events[i].hint_start != wanted[i].start || events[i].hint_end != wanted[i].end ||
		    events[i].user_cookie_counter != wanted[i].value)
			failed(file, line,
			       "record %zu is type %u flags %u hint 0x%llx 0x%llx value 0x%llx, should be %u %u 0x%llx 0x%llx 0x%llx",
			       i, events[i].type, events[i].flags,
			       (unsigned long long)events[i].hint_start,
			       (unsigned long long)events[i].hint_end,
			       (unsigned long long)events[i].user_cookie_counter, wanted[i].type,
			       wanted[i].flags, (unsigned long long)wanted[i].start,
			       (unsigned long long)wanted[i].end, (unsigned long long)wanted[i].value);
	}
	for (size_t i = count * sizeof(events[0]); i < sizeof(events); i++)
		if (((unsigned char *)events)[i] != 0xa5)
			failed(file, line, "byte %zu past the records was written", i);
}

#define EXPECT_READ(fd, room, ...) \
	do { \
		struct expected wanted_[] = { __VA_ARGS__ }; \
		expect_read_at(__FILE__, __LINE__, fd, room, wanted_, \
			       sizeof(wanted_) / sizeof(wanted_[0])); \
	} while (0)
#define HIT(cookie, start, end) { INVAL, HINT, (uint64_t)(start), (uint64_t)(end), cookie }
#define HIT_PLAIN(cookie, start, end) { INVAL, 0, (uint64_t)(start), (uint64_t)(end), cookie }
#define COUNTER(value) { LAST, 0, 0, 0, value }

/* ---- memory ---- */

/* Pages of anonymous private memory, written to, with a hole on both sides. */
static inline char *pages(size_t count)
{
	char *area = mmap(NULL, (count + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(area != MAP_FAILED);
	CHECK(mmap(area + PAGE, count * PAGE, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == area + PAGE);
	memset(area + PAGE, 1, count * PAGE);
	return area + PAGE;
}

static inline void unmap(void *start, size_t count)
{
	CHECK(munmap(start, count * PAGE) == 0);
}

/* One invalidation of exactly these pages, which stay mapped: needs no mapping anew. */
static inline void discard(void *start, size_t count)
{
	CHECK(madvise(start, count * PAGE, MADV_DONTNEED) == 0);
}

/* ---- other processes ---- */

static inline int wait_for(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid);
	if (WIFSIGNALED(status))
		return 128 + WTERMSIG(status);
	return WEXITSTATUS(status);
}

static inline void send_fd(int socket, int fd)
{
	char byte = 0, space[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space,
			      .msg_controllen = sizeof(space) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&msg);

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &fd, sizeof(int));
	CHECK(sendmsg(socket, &msg, 0) == 1);
}

static inline int receive_fd(int socket)
{
	char byte, space[CMSG_SPACE(sizeof(int))];
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space,
			      .msg_controllen = sizeof(space) };
	int fd;

	CHECK(recvmsg(socket, &msg, 0) == 1);
	CHECK(CMSG_FIRSTHDR(&msg));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(int));
	return fd;
}

/* ---- running them ---- */

/* Runs all tests, or those whose name contains a word of the command line. */
static inline int run_tests(const struct test *tests, size_t count, int argc, char **argv,
			    unsigned int seconds)
{
	unsigned int passed = 0, skipped = 0, bad = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t i = 0; i < count; i++) {
		bool wanted = argc < 2;
		int result;
		pid_t pid;

		for (int word = 1; word < argc; word++)
			wanted |= strstr(tests[i].name, argv[word]) != NULL;
		if (!wanted)
			continue;
		fflush(stdout);
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0) {
			setpgid(0, 0);
			alarm(seconds);
			tests[i].run();
			fflush(stdout);
			_exit(0);
		}
		result = wait_for(pid);
		kill(-pid, SIGKILL);
		if (result == 0) {
			passed++;
			continue;
		}
		if (result == SKIPPED) {
			skipped++;
			printf("  skipped: %s\n", tests[i].name);
			continue;
		}
		bad++;
		printf("  FAILED: %s (%s %d)\n", tests[i].name, result > 128 ? "signal" : "exit",
		       result > 128 ? result - 128 : result);
	}
	printf("%s: %u passed, %u failed, %u skipped\n", program_invocation_short_name, passed, bad,
	       skipped);
	return bad ? 1 : 0;
}

#define RUN_TESTS(tests, argc, argv, seconds) \
	run_tests(tests, sizeof(tests) / sizeof((tests)[0]), argc, argv, seconds)

#endif /* TEST_H */
