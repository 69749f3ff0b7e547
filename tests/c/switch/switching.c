/*
 * A program that must not notice that its contexts move between the emulator and the kernel module.
 *
 *   switching load [COMMAND...]      four threads map, register, look up and unmap; a miss is an entry of the
 *                                    cache that is found valid after its memory was unmapped
 *   switching waiters [COMMAND...]   a context each for epoll (level and edge), SIGIO, a blocking read, and the
 *                                    counter alone; each invalidation must reach its client
 *   switching quiet                  calls nothing on its context until a line comes on standard input
 *
 *   switching obedient               takes orders from standard input: `hang` stays inside a call that truncates,
 *                                    `release` ends that, `compute` makes a trapped call and then none, `rest` ends
 *                                    that, `orphan` expects that the supervisor is dead
 *
 * COMMAND is run without the shim, PID in it replaced by this process's; the program goes on until it has ended,
 * and fails if that did. Without COMMAND it goes on until SIGTERM. A line `round` comes after every so many
 * invalidations; the last line sums up.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORKERS 4
/* Entries of the cache that a worker has at once. */
#define ENTRIES 8
#define BATCH 128
/* A client that hasn't heard of an invalidation for so long hangs. */
#define HANG_SECONDS 20

static _Atomic int stop, clients_stop;
static _Atomic uint64_t failures;

__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
	va_list arguments;

	/* The first few tell enough. */
	if (atomic_fetch_add(&failures, 1) < 20) {
		va_start(arguments, format);
		printf("FAIL ");
		vprintf(format, arguments);
		printf("\n");
		fflush(stdout);
		va_end(arguments);
	}
}

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("FAIL %s: %s\n", what, strerror(errno));
		exit(2);
	}
}

static void count_round(void)
{
	printf("round\n");
	fflush(stdout);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static char *map_pages(unsigned pages)
{
	char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(at != MAP_FAILED, "mmap");
	return at;
}

static int open_device(int flags, const volatile uint64_t **counter)
{
	int fd = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC | flags);

	must(fd >= 0, "open /dev/ummunotify");
	*counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
	must(*counter != MAP_FAILED, "mmap of the counter");
	return fd;
}

static void register_region(int fd, const char *at, unsigned pages, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)at,
		.end = (uintptr_t)at + pages * PAGE,
		.user_cookie = cookie,
	};

	if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region))
		fail("REGISTER_REGION of %llu: %s", (unsigned long long)cookie, strerror(errno));
}

/* ------------------------------------------------------------------------------------------------ load */

struct entry {
	char *at;
	unsigned pages;
	uint64_t cookie;
	/* Under the cache's lock. */
	int valid;
};

static struct {
	pthread_mutex_t lock;
	int fd;
	const volatile uint64_t *counter;
	/* The counter up to which every event was read. */
	uint64_t seen;
	struct entry entries[WORKERS][ENTRIES];
	uint64_t events, hinted, reads;
} cache = { .lock = PTHREAD_MUTEX_INITIALIZER };

static _Atomic uint64_t unmapped, missed, revalidated;

/* Cookies: number, worker, entry. */
static uint64_t make_cookie(uint64_t number, unsigned worker, unsigned entry)
{
	return number << 16 | worker << 8 | entry;
}

static void invalidate(const struct ummunotify_event *event)
{
	uint64_t cookie = event->user_cookie_counter;
	unsigned worker = cookie >> 8 & 255, number = cookie & 255;
	struct entry *entry = &cache.entries[worker % WORKERS][number % ENTRIES];

	cache.events++;
	if (worker >= WORKERS || number >= ENTRIES || entry->cookie != cookie) {
		fail("an event of region %llu, which isn't registered", (unsigned long long)cookie);
		return;
	}
	if (event->flags & UMMUNOTIFY_EVENT_FLAG_HINT)
		cache.hinted++;
	if (event->hint_start < (uintptr_t)entry->at || event->hint_end > (uintptr_t)entry->at + entry->pages * PAGE)
		fail("a hint outside of its region");
	entry->valid = 0;
}

/* Reads events until LAST. Under the lock. */
static void drain(void)
{
	struct ummunotify_event events[BATCH];
	uint64_t counter = *cache.counter;

	for (;;) {
		ssize_t got = read(cache.fd, events, sizeof(events));

		cache.reads++;
		if (got < 0) {
			/* The counter differs from the last LAST: there is something to report. */
			fail("read: %s, with the counter at %llu after LAST %llu", strerror(errno),
			     (unsigned long long)counter, (unsigned long long)cache.seen);
			return;
		}
		for (ssize_t i = 0; i < got / (ssize_t)sizeof(*events); i++) {
			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_INVAL) {
				invalidate(&events[i]);
				continue;
			}
			if (events[i].user_cookie_counter < counter)
				fail("LAST %llu after the counter was %llu",
				     (unsigned long long)events[i].user_cookie_counter, (unsigned long long)counter);
			if (events[i].user_cookie_counter > *cache.counter)
				fail("LAST is ahead of the counter");
			cache.seen = events[i].user_cookie_counter;
			return;
		}
	}
}

/* What a registration cache does before each use: whether the entry may be used. */
static int look_up(const struct entry *entry)
{
	int valid;

	pthread_mutex_lock(&cache.lock);
	if (*cache.counter != cache.seen)
		drain();
	valid = entry->valid;
	pthread_mutex_unlock(&cache.lock);
	return valid;
}

static void set(struct entry *entry, char *at, unsigned pages, uint64_t cookie, int valid)
{
	pthread_mutex_lock(&cache.lock);
	*entry = (struct entry){ at, pages, cookie, valid };
	pthread_mutex_unlock(&cache.lock);
}

static void *worker_main(void *argument)
{
	unsigned worker = (unsigned)(uintptr_t)argument, seed = worker + 1;
	uint64_t number = 0, last_counter = 0;

	while (!stop) {
		unsigned i = (unsigned)rand_r(&seed) % ENTRIES;
		struct entry *entry = &cache.entries[worker][i];
		uint64_t counter = *cache.counter;
		char *at = entry->at;
		unsigned pages = entry->pages;

		if (counter < last_counter)
			fail("the counter went back from %llu to %llu", (unsigned long long)last_counter,
			     (unsigned long long)counter);
		last_counter = counter;
		if (!at) {
			pages = 1 + (unsigned)rand_r(&seed) % 4;
			at = map_pages(pages);
			memset(at, 1, pages * PAGE);
			set(entry, at, pages, make_cookie(++number, worker, i), 0);
			register_region(cache.fd, at, pages, entry->cookie);
			/* Registered, so it may be pinned. What is queued already came before that. */
			look_up(entry);
			set(entry, at, pages, entry->cookie, 1);
			continue;
		}
		if (!look_up(entry)) {
			/* Reported for no reason of ours: pinned anew, and used on. */
			atomic_fetch_add(&revalidated, 1);
			set(entry, at, pages, entry->cookie, 1);
		}
		switch (rand_r(&seed) % 4) {
		case 0:
			must(madvise(at, PAGE, MADV_DONTNEED) == 0, "madvise");
			break;
		case 1:
			must(mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at,
			     "mmap MAP_FIXED");
			break;
		default:
			must(munmap(at, pages * PAGE) == 0, "munmap");
			at = NULL;
		}
		if ((atomic_fetch_add(&unmapped, 1) + 1) % 25 == 0)
			count_round();
		if (look_up(entry)) {
			atomic_fetch_add(&missed, 1);
			fail("region %llu is valid after its memory was unmapped", (unsigned long long)entry->cookie);
		}
		if (!at) {
			uint64_t cookie = entry->cookie;

			if (ioctl(cache.fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie))
				fail("UNREGISTER_REGION of %llu: %s", (unsigned long long)cookie, strerror(errno));
			/* An event that was read before that may still be handled; none comes after the lock. */
			set(entry, NULL, 0, 0, 0);
		} else {
			memset(at, 1, PAGE);
			set(entry, at, pages, entry->cookie, 1);
		}
	}
	return NULL;
}

/* --------------------------------------------------------------------------------------------- waiters */

struct client {
	const char *name;
	int flags;
	void (*wait)(struct client *);
	int fd, epoll;
	const volatile uint64_t *counter;
	/* The value of the last LAST. */
	_Atomic uint64_t seen;
	/* Its region was invalidated up to this value of the counter. */
	_Atomic uint64_t wanted;
	uint64_t wakes, in_vain, invalidations;
	int inval_seen;
};

/* One read to LAST or EAGAIN. */
static void take(struct client *client)
{
	struct ummunotify_event events[4];

	for (;;) {
		ssize_t got = read(client->fd, events, sizeof(events));

		if (got < 0) {
			if (errno == EAGAIN && client->flags & O_NONBLOCK)
				client->in_vain++;
			else
				fail("%s: read: %s", client->name, strerror(errno));
			return;
		}
		for (ssize_t i = 0; i < got / (ssize_t)sizeof(*events); i++) {
			if (events[i].type == UMMUNOTIFY_EVENT_TYPE_INVAL) {
				if (events[i].user_cookie_counter != 77)
					fail("%s: a cookie that it doesn't have", client->name);
				client->inval_seen = 1;
				continue;
			}
			if (events[i].user_cookie_counter < client->seen)
				fail("%s: LAST went back", client->name);
			client->seen = events[i].user_cookie_counter;
			return;
		}
	}
}

static void wait_epoll(struct client *client)
{
	struct epoll_event event;
	int n = epoll_wait(client->epoll, &event, 1, 1000);

	if (n < 0)
		fail("%s: epoll_wait: %s", client->name, strerror(errno));
	if (n == 1 && event.events != EPOLLIN)
		fail("%s: events %x", client->name, event.events);
	if (n == 1)
		take(client);
}

static void wait_sigio(struct client *client)
{
	struct timespec second = { 1, 0 };
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGIO);
	if (sigtimedwait(&set, NULL, &second) == SIGIO)
		take(client);
	else if (errno != EAGAIN)
		fail("%s: sigtimedwait: %s", client->name, strerror(errno));
}

static void wait_read(struct client *client)
{
	take(client);
}

static void wait_counter(struct client *client)
{
	struct timespec pause = { 0, 200000 };

	/* As before each use of a cache. */
	if (*client->counter != client->seen)
		take(client);
	nanosleep(&pause, NULL);
}

static struct client clients[] = {
	{ .name = "epoll", .flags = O_NONBLOCK, .wait = wait_epoll },
	{ .name = "epoll, edge-triggered", .flags = O_NONBLOCK, .wait = wait_epoll },
	{ .name = "SIGIO", .flags = O_NONBLOCK, .wait = wait_sigio },
	{ .name = "blocking read", .flags = 0, .wait = wait_read },
	{ .name = "counter alone", .flags = O_NONBLOCK, .wait = wait_counter },
};
#define CLIENTS (sizeof(clients) / sizeof(*clients))

static void set_up(struct client *client)
{
	struct epoll_event event = { .events = EPOLLIN };

	client->fd = open_device(client->flags, &client->counter);
	if (client->wait == wait_epoll) {
		client->epoll = epoll_create1(EPOLL_CLOEXEC);
		if (strstr(client->name, "edge"))
			event.events |= EPOLLET;
		must(epoll_ctl(client->epoll, EPOLL_CTL_ADD, client->fd, &event) == 0, "epoll_ctl");
	}
	if (client->wait == wait_sigio) {
		must(fcntl(client->fd, F_SETOWN, getpid()) == 0, "F_SETOWN");
		must(fcntl(client->fd, F_SETFL, O_NONBLOCK | O_ASYNC) == 0, "O_ASYNC");
	}
}

static void *client_main(void *argument)
{
	struct client *client = argument;
	uint64_t last = 0;

	while (!clients_stop) {
		client->wait(client);
		client->wakes++;
		if (*client->counter < last)
			fail("%s: the counter went back", client->name);
		last = *client->counter;
	}
	return NULL;
}

/* Invalidates each client's region, in turns, and waits until the client has heard of it. */
static void *tickler_main(void *argument)
{
	char *regions[CLIENTS];

	(void)argument;
	for (unsigned i = 0; i < CLIENTS; i++) {
		regions[i] = map_pages(1);
		regions[i][0] = 1;
		register_region(clients[i].fd, regions[i], 1, 77);
	}
	for (int last = 0; !last; count_round()) {
		/* Once more after the end of the test: whoever sleeps in a read must come out. */
		last = stop;
		clients_stop = last;
		for (unsigned i = 0; i < CLIENTS; i++) {
			struct client *client = &clients[i];
			uint64_t before = *client->counter, after;
			double start = now();

			must(madvise(regions[i], PAGE, MADV_DONTNEED) == 0, "madvise");
			after = *client->counter;
			regions[i][0] = 1;
			client->invalidations++;
			if (after == before)
				fail("%s: the counter didn't move", client->name);
			while (!last && client->seen < after) {
				struct timespec pause = { 0, 100000 };

				nanosleep(&pause, NULL);
				if (now() - start > HANG_SECONDS) {
					fail("%s: hasn't heard of counter %llu, LAST is %llu, the counter %llu", client->name,
					     (unsigned long long)after, (unsigned long long)client->seen,
					     (unsigned long long)*client->counter);
					exit(1);
				}
			}
		}
	}
	return NULL;
}

/* ------------------------------------------------------------------------------------------------ quiet */

/* What happened meanwhile is one "everything is invalid"; the device works as ever. */
static void quiet(void)
{
	static struct client client = { .name = "quiet", .flags = O_NONBLOCK };
	char *region = map_pages(1), line[16];
	int descriptors = dup(0);

	region[0] = 1;
	client.fd = open_device(client.flags, &client.counter);
	register_region(client.fd, region, 1, 77);
	printf("quiet\n");
	fflush(stdout);
	must(fgets(line, sizeof(line), stdin) != NULL, "a line");
	printf("counter %llu\n", (unsigned long long)*client.counter);
	take(&client);
	if (!client.inval_seen || client.seen != *client.counter)
		fail("not everything was reported");
	client.inval_seen = 0;
	madvise(region, PAGE, MADV_DONTNEED);
	take(&client);
	if (!client.inval_seen || client.seen != *client.counter)
		fail("the next invalidation wasn't reported");
	close(descriptors);
	if (dup(0) != descriptors)
		fail("the process has another descriptor than before");
}

/* --------------------------------------------------------------------------------------------- obedient */

#define FIFO "hang"

/* Sleeps inside a trapped call until somebody opens the other end. */
static void *hanger_main(void *argument)
{
	(void)argument;
	must(open(FIFO, O_WRONLY | O_TRUNC) >= 0, "open of the FIFO");
	return NULL;
}

static atomic_int computes;

/* Its one call is recorded by whoever is asked then; afterwards nothing shows that it is in none. */
static void *computer_main(void *argument)
{
	(void)argument;
	must(munmap(map_pages(1), PAGE) == 0, "munmap");
	computes = 1;
	while (computes)
		__builtin_ia32_pause();
	return NULL;
}

/* Not libc's, which isn't trapped by every layer. */
static long raw_munmap(void *start, size_t length)
{
	long answer;

	__asm__ volatile("syscall" : "=a"(answer) : "0"((long)SYS_munmap), "D"(start), "S"(length)
			 : "rcx", "r11", "memory");
	return answer;
}

/* The death of the supervisor is the same on the module as elsewhere: everything is invalid, once; then EIO. */
static void expect_death(struct client *client)
{
	struct ummunotify_event events[4];
	ssize_t got;
	long answer = raw_munmap(map_pages(1), PAGE);

	if (answer != -ENOSYS)
		fail("munmap without a supervisor: %ld", answer);
	take(client);
	if (!client->inval_seen || client->seen != *client->counter)
		fail("not everything was reported");
	for (int i = 0; i < 2; i++) {
		got = read(client->fd, events, sizeof(events));
		if (got >= 0 || errno != EIO)
			fail("a read of what nobody records: %zd, %s", got, strerror(errno));
	}
}

static void obedient(void)
{
	static struct client client = { .name = "obedient", .flags = O_NONBLOCK };
	struct pollfd input = { .fd = 0, .events = POLLIN };
	char *region = map_pages(1), line[16];
	pthread_t hanger, computer;

	region[0] = 1;
	client.fd = open_device(client.flags, &client.counter);
	register_region(client.fd, region, 1, 77);
	printf("process %d\n", (int)getpid());
	fflush(stdout);
	for (;;) {
		/* Not a call that would read what is to be reported. */
		if (ioctl(client.fd, 0, NULL) == 0 || errno != ENOTTY)
			fail("an unknown ioctl: %s", strerror(errno));
		if (poll(&input, 1, 1) == 0)
			continue;
		if (!fgets(line, sizeof(line), stdin))
			return;
		if (!strcmp(line, "hang\n")) {
			unlink(FIFO);
			must(mkfifo(FIFO, 0600) == 0, "mkfifo");
			must(pthread_create(&hanger, NULL, hanger_main, NULL) == 0, "pthread_create");
		} else if (!strcmp(line, "release\n")) {
			must(open(FIFO, O_RDONLY) >= 0, "open of the FIFO");
			pthread_join(hanger, NULL);
		} else if (!strcmp(line, "compute\n")) {
			must(pthread_create(&computer, NULL, computer_main, NULL) == 0, "pthread_create");
			while (!computes)
				usleep(1000);
		} else if (!strcmp(line, "rest\n")) {
			computes = 0;
			pthread_join(computer, NULL);
		} else {
			expect_death(&client);
			return;
		}
		printf("done\n");
		fflush(stdout);
	}
}

/* ------------------------------------------------------------------------------------------------- main */

static pid_t start_command(char **arguments, int count)
{
	char *command[64], number[16];
	pid_t child;

	must(count < 60, "too many arguments");
	snprintf(number, sizeof(number), "%d", (int)getpid());
	for (int i = 0; i < count; i++)
		command[i] = strcmp(arguments[i], "PID") ? arguments[i] : number;
	command[count] = NULL;
	child = fork();
	must(child >= 0, "fork");
	if (child == 0) {
		sigset_t none;

		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		unsetenv("LD_PRELOAD");
		execvp(command[0], command);
		_exit(127);
	}
	return child;
}

int main(int count, char **arguments)
{
	int load = count > 1 && !strcmp(arguments[1], "load");
	pthread_t threads[WORKERS + CLIENTS + 1];
	unsigned started = 0;
	double start;
	sigset_t set;
	int status = 0;

	if (count == 2 && !strcmp(arguments[1], "quiet")) {
		quiet();
		goto sum;
	}
	if (count == 2 && !strcmp(arguments[1], "obedient")) {
		obedient();
		goto sum;
	}
	if (count < 2 || (!load && strcmp(arguments[1], "waiters"))) {
		fprintf(stderr, "usage: switching load|waiters|quiet|obedient [COMMAND...]; PID in it stands for this process\n");
		return 2;
	}
	/* No thread may be interrupted: what they call must not fail. */
	sigemptyset(&set);
	sigaddset(&set, SIGIO);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (load)
		cache.fd = open_device(O_NONBLOCK, &cache.counter);
	for (unsigned i = 0; !load && i < CLIENTS; i++)
		set_up(&clients[i]);
	printf("process %d\n", (int)getpid());
	fflush(stdout);

	start = now();
	for (uintptr_t i = 0; load && i < WORKERS; i++)
		must(pthread_create(&threads[started++], NULL, worker_main, (void *)i) == 0, "pthread_create");
	if (!load) {
		must(pthread_create(&threads[started++], NULL, tickler_main, NULL) == 0, "pthread_create");
		for (unsigned i = 0; i < CLIENTS; i++)
			must(pthread_create(&threads[started++], NULL, client_main, &clients[i]) == 0, "pthread_create");
	}
	if (count > 2) {
		pid_t child = start_command(arguments + 2, count - 2);

		must(waitpid(child, &status, 0) == child, "waitpid");
		if (status)
			fail("the command ended with status %#x", status);
	} else {
		int signal = 0;

		sigdelset(&set, SIGIO);
		sigwait(&set, &signal);
	}
	stop = 1;
	for (unsigned i = 0; i < started; i++)
		pthread_join(threads[i], NULL);

	if (load)
		printf("load: %.1f s, %llu invalidations, %llu missed, %llu events (%llu with hint), %llu entries reported "
		       "for no reason of theirs\n",
		       now() - start, (unsigned long long)unmapped, (unsigned long long)missed,
		       (unsigned long long)cache.events, (unsigned long long)cache.hinted, (unsigned long long)revalidated);
	for (unsigned i = 0; !load && i < CLIENTS; i++)
		printf("%s: %llu invalidations, %llu wakes, %llu reads in vain\n", clients[i].name,
		       (unsigned long long)clients[i].invalidations, (unsigned long long)clients[i].wakes,
		       (unsigned long long)clients[i].in_vain);
	/* A test that has seen nothing has shown nothing. */
	if (load ? unmapped < 100 : clients[0].invalidations < 2)
		fail("too little was done");
sum:
	printf("%s: %llu failures\n", failures ? "FAILED" : "ok", (unsigned long long)failures);
	return failures != 0;
}
