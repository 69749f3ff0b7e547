// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A program under load that is attached to and detached from while it runs, and checks all that it does. The first
 * argument names its threads, a letter each:
 *
 *   c computes                     m malloc and free, contents checked     v maps, unmaps, protects
 *   r reads from a pipe            e epoll_wait                            f mutex and condition
 *   n sleeps, measured             p poll with a timeout, measured         s sends signals to the process
 *   t makes threads                k forks and waits                       w waits for a signal (sigtimedwait)
 *   d opens the device, whenever it is there, and insists on every invalidation
 *
 * SIGTERM ends it: "ok ..." and 0 if nothing was wrong. Of the device it says "device N;" when it found it for the Nth
 * time, and "lost N;" when it was gone again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul

static atomic_int stop, failures;
static atomic_ulong rounds[128];
static atomic_ulong signals;

#define FAIL(...) \
	do { \
		printf("FAIL " __VA_ARGS__); \
		printf(" (%s)\n", strerror(errno)); \
		fflush(stdout); \
		atomic_fetch_add(&failures, 1); \
	} while (0)

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdul;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ul;
	return x ^ x >> 33;
}

/* Leaves the machine something: now and then a thread sleeps. */
static void rest(unsigned long round, unsigned long often)
{
	if (round % often == 0)
		usleep(500);
}

static void *compute(void *unused)
{
	double first_sum = 0;
	uint64_t first = 0;

	(void)unused;
	while (!stop) {
		uint64_t x = 1;
		double sum = 0;

		for (int i = 1; i < 20000; i++) {
			x = mix(x + (uint64_t)i);
			sum += 1.0 / i * (double)(x & 0xff);
		}
		if (first == 0)
			first = x, first_sum = sum;
		if (x != first || sum != first_sum)
			FAIL("compute");
		rest(rounds['c']++, 4);
	}
	return NULL;
}

static void *allocate(void *unused)
{
	struct { unsigned char *p; size_t n; unsigned char is; } held[64] = { { 0 } };
	uint64_t x = (uintptr_t)&held;

	(void)unused;
	while (!stop) {
		int i = (int)((x = mix(x + 1)) % 64);

		if (held[i].p) {
			for (size_t at = 0; at < held[i].n; at += 97)
				if (held[i].p[at] != held[i].is)
					FAIL("memory has changed");
			free(held[i].p);
		}
		held[i].n = x % 7 == 0 ? 300000 + x % 200000 : 16 + x % 5000;
		held[i].is = (unsigned char)x;
		held[i].p = malloc(held[i].n);
		if (held[i].p == NULL) {
			FAIL("malloc");
			return NULL;
		}
		memset(held[i].p, held[i].is, held[i].n);
		rest(rounds['m']++, 64);
	}
	return NULL;
}

static void *maps(void *unused)
{
	(void)unused;
	while (!stop) {
		char *p = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED) {
			FAIL("mmap");
			return NULL;
		}
		memset(p, 7, 4 * PAGE);
		if (mprotect(p, PAGE, PROT_READ) != 0)
			FAIL("mprotect");
		if (madvise(p + 2 * PAGE, PAGE, MADV_DONTNEED) != 0 || p[2 * PAGE] != 0 || p[3 * PAGE] != 7 || p[0] != 7)
			FAIL("madvise");
		if (mmap(p + PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != p + PAGE)
			FAIL("mmap fixed");
		if (p[PAGE] != 0)
			FAIL("a fixed mapping isn't new");
		if (munmap(p, 4 * PAGE) != 0)
			FAIL("munmap");
		rest(rounds['v']++, 8);
	}
	return NULL;
}

static void *pipe_reader(void *arg)
{
	int fd = *(int *)arg;

	for (uint32_t want = 0;; want++) {
		uint32_t got;
		ssize_t n = read(fd, &got, sizeof(got));

		if (n == 0)
			return NULL;
		if (n != sizeof(got) || got != want) {
			FAIL("read %zd bytes, %u instead of %u", n, got, want);
			return NULL;
		}
		rounds['r']++;
	}
}

static void *pipe_writer(void *unused)
{
	int ends[2];
	pthread_t reader;

	(void)unused;
	if (pipe(ends) != 0 || pthread_create(&reader, NULL, pipe_reader, &ends[0]) != 0) {
		FAIL("pipe");
		return NULL;
	}
	for (uint32_t i = 0; !stop; i++) {
		if (write(ends[1], &i, sizeof(i)) != sizeof(i))
			FAIL("write");
		if (i % 8 == 0)
			usleep(500);
	}
	close(ends[1]);
	pthread_join(reader, NULL);
	return NULL;
}

static void *epoll_waiter(void *arg)
{
	int event = *(int *)arg, epoll = epoll_create1(0);
	struct epoll_event interest = { .events = EPOLLIN }, seen;

	if (epoll_ctl(epoll, EPOLL_CTL_ADD, event, &interest) != 0)
		FAIL("epoll_ctl");
	for (;;) {
		int n = epoll_wait(epoll, &seen, 1, 10000);
		uint64_t value;

		/* A stop may do that: signal(7). */
		if (n < 0 && errno == EINTR)
			continue;
		if (n != 1 || read(event, &value, sizeof(value)) != sizeof(value)) {
			FAIL("epoll_wait %d", n);
			return NULL;
		}
		rounds['e']++;
		if (value >= 1000000)
			return NULL;
	}
}

static void *epoll_waker(void *unused)
{
	int event = eventfd(0, 0);
	pthread_t waiter;
	uint64_t one = 1, last = 1000000;

	(void)unused;
	if (pthread_create(&waiter, NULL, epoll_waiter, &event) != 0)
		FAIL("pthread_create");
	while (!stop) {
		if (write(event, &one, sizeof(one)) != sizeof(one))
			FAIL("eventfd");
		usleep(700);
	}
	if (write(event, &last, sizeof(last)) != sizeof(last))
		FAIL("eventfd");
	pthread_join(waiter, NULL);
	return NULL;
}

static struct {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	int turn, over;
} pair = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0 };

static void *partner(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&pair.lock);
	while (!pair.over) {
		while (pair.turn == 0 && !pair.over)
			pthread_cond_wait(&pair.changed, &pair.lock);
		pair.turn = 0;
		pthread_cond_broadcast(&pair.changed);
	}
	pthread_mutex_unlock(&pair.lock);
	return NULL;
}

static void *futexes(void *unused)
{
	pthread_t other;

	(void)unused;
	if (pthread_create(&other, NULL, partner, NULL) != 0)
		FAIL("pthread_create");
	pthread_mutex_lock(&pair.lock);
	while (!stop) {
		pair.turn = 1;
		pthread_cond_broadcast(&pair.changed);
		while (pair.turn == 1)
			pthread_cond_wait(&pair.changed, &pair.lock);
		rest(rounds['f']++, 32);
	}
	pair.over = 1;
	pthread_cond_broadcast(&pair.changed);
	pthread_mutex_unlock(&pair.lock);
	pthread_join(other, NULL);
	return NULL;
}

static void *sleeper(void *unused)
{
	(void)unused;
	while (!stop) {
		struct timespec rest = { 0, 5000000 };
		uint64_t start = now();

		while (nanosleep(&rest, &rest) != 0)
			if (errno != EINTR || !atomic_load(&signals))
				FAIL("nanosleep");
		if (now() - start < 5000000)
			FAIL("slept %lu ns instead of 5 ms", (unsigned long)(now() - start));
		rounds['n']++;
	}
	return NULL;
}

static void *poller(void *unused)
{
	struct pollfd fd = { .fd = eventfd(0, 0), .events = POLLIN };

	(void)unused;
	while (!stop) {
		uint64_t start = now();
		int n = poll(&fd, 1, 5);

		if (n < 0 && errno == EINTR && atomic_load(&signals))
			continue;
		if (n != 0 || now() - start < 5000000)
			FAIL("poll %d after %lu ns", n, (unsigned long)(now() - start));
		rounds['p']++;
	}
	return NULL;
}

static void count(int number)
{
	(void)number;
	atomic_fetch_add(&signals, 1);
}

static void *signaller(void *unused)
{
	(void)unused;
	atomic_fetch_add(&signals, 1);
	while (!stop) {
		kill(getpid(), SIGUSR1);
		rounds['s']++;
		usleep(100);
	}
	return NULL;
}

static void *nothing(void *arg)
{
	return arg;
}

static void *maker(void *unused)
{
	(void)unused;
	while (!stop) {
		pthread_t made[4];
		int arguments[4], n = 0;

		while (n < 4 && pthread_create(&made[n], NULL, nothing, &arguments[n]) == 0)
			n++;
		if (n < 4)
			FAIL("pthread_create");
		for (int i = 0; i < n; i++) {
			void *result;

			if (pthread_join(made[i], &result) != 0 || result != &arguments[i])
				FAIL("pthread_join");
		}
		rest(rounds['t']++, 2);
	}
	return NULL;
}

static void *forker(void *unused)
{
	(void)unused;
	while (!stop) {
		int status, code = (int)(rounds['k'] & 63);
		pid_t pid = fork();

		if (pid == 0) {
			char *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (p == MAP_FAILED || munmap(p, PAGE) != 0)
				_exit(99);
			_exit(code);
		}
		while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
		if (pid < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != code)
			FAIL("fork: %d, status %#x", pid, status);
		rounds['k']++;
		usleep(200);
	}
	return NULL;
}

static void *signal_waiter(void *unused)
{
	sigset_t set;

	(void)unused;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	while (!stop) {
		struct timespec limit = { 0, 3000000 };
		siginfo_t info;

		if (sigtimedwait(&set, &info, &limit) >= 0 || (errno != EAGAIN && errno != EINTR))
			FAIL("sigtimedwait");
		rounds['w']++;
	}
	return NULL;
}

/* One look at the device: 1 if it was there and told everything, 0 if it isn't there (any more). */
static int use_device(uint64_t cookie)
{
	int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC), found = 0, ended = 0;
	const volatile uint64_t *counter;
	char *p;
	uint64_t before;
	struct ummunotify_register_ioctl region = { .user_cookie = cookie };

	if (fd < 0) {
		if (errno != ENOENT && errno != EINTR)
			FAIL("open");
		return 0;
	}
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
	if (counter == MAP_FAILED) {
		if (errno != ENODEV)
			FAIL("mmap of the device");
		close(fd);
		return 0;
	}
	p = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		FAIL("mmap");
	memset(p, 1, 4 * PAGE);
	region.start = (uintptr_t)p;
	region.end = region.start + 2 * PAGE;
	before = *counter;
	if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region) != 0) {
		if (errno != ENODEV)
			FAIL("REGISTER_REGION");
		ended = 1;
	}
	if (munmap(p + PAGE, PAGE) != 0)
		FAIL("munmap");
	if (!ended && *counter == before)
		FAIL("MISSED: the counter didn't move");
	while (!ended) {
		struct ummunotify_event events[16];
		ssize_t n = read(fd, events, sizeof(events));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == ENODEV) {
			if (!found)
				FAIL("MISSED: ended without a record");
			ended = 1;
			break;
		}
		if (n < 0) {
			FAIL("read, found %d", found);
			break;
		}
		for (ssize_t i = 0; i < n / (ssize_t)sizeof(events[0]); i++) {
			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_INVAL && events[i].user_cookie_counter == cookie)
				found = 1;
			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_LAST) {
				if (!found)
					FAIL("MISSED: LAST without a record");
				goto last;
			}
		}
	}
last:
	munmap(p, 4 * PAGE);
	munmap((void *)counter, 8);
	close(fd);
	return !ended;
}

static void *device_user(void *unused)
{
	unsigned long here = 0;
	int was = 0;

	(void)unused;
	for (uint64_t cookie = 1; !stop; cookie++) {
		int is = use_device(cookie);

		if (is && !was)
			printf("device %lu;\n", ++here);
		if (!is && was)
			printf("lost %lu;\n", here);
		was = is;
		if (is)
			rounds['d']++;
		else
			usleep(1000);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	static const struct { char name; void *(*work)(void *); } kinds[] = {
		{ 'c', compute }, { 'm', allocate }, { 'v', maps }, { 'r', pipe_writer }, { 'e', epoll_waker },
		{ 'f', futexes }, { 'n', sleeper }, { 'p', poller }, { 's', signaller }, { 't', maker },
		{ 'k', forker }, { 'w', signal_waiter }, { 'd', device_user },
	};
	struct sigaction action = { .sa_handler = count, .sa_flags = SA_RESTART };
	pthread_t threads[64];
	sigset_t end;
	int n = 0, number;

	setvbuf(stdout, NULL, _IOLBF, 0);
	sigemptyset(&end);
	sigaddset(&end, SIGTERM);
	sigaddset(&end, SIGUSR2);
	pthread_sigmask(SIG_BLOCK, &end, NULL);
	sigdelset(&end, SIGUSR2);
	sigaction(SIGUSR1, &action, NULL);
	for (const char *kind = argc > 1 ? argv[1] : "cmvrefnpwd"; *kind && n < 64; kind++)
		for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
			if (kinds[i].name == *kind && pthread_create(&threads[n++], NULL, kinds[i].work, NULL) != 0)
				return 3;
	printf("ready\n");
	while (sigwait(&end, &number) != 0)
		;
	stop = 1;
	for (int i = 0; i < n; i++)
		pthread_join(threads[i], NULL);
	printf("ok");
	for (int i = 'a'; i <= 'z'; i++)
		if (rounds[i])
			printf(" %c %lu", i, (unsigned long)rounds[i]);
	printf("; %d failures\n", failures);
	return failures != 0;
}
