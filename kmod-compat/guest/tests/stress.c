// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * stress SECONDS [SEED]: eight threads that unmap, remap, register, read, fork,
 * exec, pass descriptors on, exit and get killed, in process after process.
 *
 * Each thread also has a page that nobody else touches, registered: when it
 * discards that, the counter must have moved before the call returned. What the
 * kernel says about it all, the caller of this program looks up.
 */
#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>

#define THREADS 8
#define SHARED_PAGES 64
#define SHARED_AT ((void *)0x200000000000)
#define CONTEXTS 4

static char *shared;
static int contexts[CONTEXTS];
static volatile uint64_t *counters[CONTEXTS];
static int sockets[2];
static uint64_t deadline;

/* Outlives the processes: what they did, and whether one saw a hit missing. */
static struct totals {
	uint64_t operations;
	uint64_t missed;
	uint64_t processes;
} *totals;

static uint64_t milliseconds(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000ULL + time.tv_nsec / 1000000;
}

static uint64_t next(uint64_t *random)
{
	*random ^= *random << 13;
	*random ^= *random >> 7;
	*random ^= *random << 17;
	return *random;
}

static int adopt(int fd)
{
	int32_t memfd = memfd_create("counter", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int result;

	if (memfd < 0 || ftruncate(memfd, PAGE) != 0)
		return -1;
	fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
	result = ioctl(fd, UMMUNOTIFY_ADOPT_COUNTER, &memfd);
	close(memfd);
	return result;
}

/* A context that lives for a few calls, closed with whatever is in it. */
static void short_context(uint64_t *random, char *own)
{
	int fd = open(DEVICE, O_RDONLY | O_NONBLOCK | O_CLOEXEC), copy;
	struct ummunotify_event events[8];
	void *page = MAP_FAILED;

	if (fd < 0)
		return;
	if (next(random) % 2)
		page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
	else
		adopt(fd);
	for (uint64_t i = 0; i < next(random) % 20; i++)
		register_range(fd, (uintptr_t)own, (uintptr_t)own + PAGE, i);
	madvise(own, PAGE, MADV_DONTNEED);
	if (next(random) % 2)
		read(fd, events, sizeof(events));
	copy = dup(fd);
	close(fd);
	if (next(random) % 2)
		madvise(own, PAGE, MADV_DONTNEED);
	close(copy);
	if (page != MAP_FAILED)
		munmap(page, PAGE);
}

static void child(uint64_t random)
{
	struct ummunotify_event events[8];
	uint64_t cookie = next(&random) % 256;

	/* The parent's queue, and mappings that are its own. */
	read(contexts[0], events, sizeof(events));
	register_range(contexts[1], (uintptr_t)shared, (uintptr_t)shared + PAGE, 1000 + cookie);
	ioctl(contexts[1], UMMUNOTIFY_UNREGISTER_REGION, &cookie);
	munmap(shared, SHARED_PAGES / 2 * PAGE);
	switch (next(&random) % 4) {
	case 0:
		execl("/proc/self/exe", "stress", "--nothing", NULL);
		break;
	case 1:
		raise(SIGKILL);
		break;
	case 2:
		short_context(&random, shared + (SHARED_PAGES - 1) * PAGE);
		break;
	}
	_exit(0);
}

/* Sends a context away and takes one that somebody sent, perhaps a dead one's. */
static void swap_descriptors(int fd)
{
	char byte = 0, space[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space,
			      .msg_controllen = sizeof(space) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
	struct ummunotify_event events[8];
	int got;

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &fd, sizeof(int));
	sendmsg(sockets[0], &msg, MSG_DONTWAIT);
	msg.msg_controllen = sizeof(space);
	if (recvmsg(sockets[1], &msg, MSG_DONTWAIT) != 1 || !CMSG_FIRSTHDR(&msg))
		return;
	memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(int));
	read(got, events, sizeof(events));
	register_range(got, (uintptr_t)shared, (uintptr_t)shared + PAGE, 77);
	close(got);
}

static void *worker(void *argument)
{
	uint64_t random = (uintptr_t)argument, done = 0;
	char *own = pages(1);
	struct ummunotify_event events[16];
	struct iovec iov[2] = { { events, 48 }, { (char *)events + 48, 80 } };

	if (register_range(contexts[2], (uintptr_t)own, (uintptr_t)own + PAGE, (uintptr_t)own) != 0)
		_exit(3);
	while (milliseconds() < deadline) {
		uint64_t choice = next(&random), cookie = choice >> 8 & 0xff;
		size_t first = choice >> 16 & (SHARED_PAGES - 1);
		size_t count = 1 + (choice >> 24) % (SHARED_PAGES - first);
		int fd = contexts[choice >> 40 & 1];
		char *at = shared + first * PAGE;
		struct pollfd pollfd = { .fd = fd, .events = POLLIN };
		uint64_t before;
		pid_t pid;

		if (++done % 64 == 0)
			__atomic_fetch_add(&totals->operations, 64, __ATOMIC_RELAXED);
		switch (choice % 20) {
		case 0:
			munmap(at, count * PAGE);
			break;
		case 1:
		case 2:
			mmap(at, count * PAGE, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE, -1, 0);
			break;
		case 3:
			mprotect(at, count * PAGE, choice >> 50 & 1 ? PROT_READ : PROT_READ | PROT_WRITE);
			break;
		case 4:
			madvise(at, count * PAGE, MADV_DONTNEED);
			break;
		case 5:
			mremap(at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
			       shared + (choice >> 50 & (SHARED_PAGES - 1)) * PAGE);
			break;
		case 6:
		case 7:
		case 8:
			register_range(fd, (uintptr_t)at, (uintptr_t)at + count * PAGE, cookie);
			break;
		case 9:
		case 10:
			ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
			break;
		case 11:
			read(fd, events, sizeof(events));
			break;
		case 12:
			readv(fd, iov, 2);
			break;
		case 13:
			/* Into memory that the others pull away. */
			read(fd, at + PAGE - 40, 96);
			break;
		case 14:
			poll(&pollfd, 1, choice >> 50 & 1);
			break;
		case 15:
			if (choice >> 50 & 15)
				break;
			pid = fork();
			if (pid == 0)
				child(random);
			if (pid > 0)
				waitpid(pid, NULL, 0);
			break;
		case 16:
			/* Closing waits for the kernel's readers: not too often. */
			if (choice >> 50 & 7)
				break;
			short_context(&random, own);
			break;
		case 17:
			swap_descriptors(contexts[3]);
			break;
		case 18:
			sched_yield();
			break;
		default:
			*own = 1;
			before = __atomic_load_n(counters[2], __ATOMIC_ACQUIRE);
			madvise(own, PAGE, MADV_DONTNEED);
			if (__atomic_load_n(counters[2], __ATOMIC_ACQUIRE) == before)
				__atomic_fetch_add(&totals->missed, 1, __ATOMIC_RELAXED);
			read(contexts[2], events, sizeof(events));
		}
	}
	return NULL;
}

/* One process of eight threads; ends by itself, unless it was killed before. */
static void process(uint64_t random, unsigned int lifetime)
{
	pthread_t threads[THREADS];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	deadline = milliseconds() + lifetime;
	for (int i = 0; i < CONTEXTS; i++) {
		contexts[i] = open_device();
		counters[i] = map_counter(contexts[i]);
	}
	/*
	 * Far from where the kernel puts what is mapped anywhere: its holes must stay
	 * holes, for what lies in one is pulled away.
	 */
	shared = mmap(SHARED_AT, SHARED_PAGES * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE, -1, 0);
	CHECK(shared == SHARED_AT);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, worker, (void *)(next(&random) | 1)) == 0);
	if (next(&random) % 3 == 0) {
		/* The main thread goes, the others live on. */
		syscall(SYS_exit, 0);
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	/* Some leave without closing anything. */
	if (next(&random) % 2) {
		for (int i = 0; i < CONTEXTS; i++)
			close(contexts[i]);
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	uint64_t random = argc > 2 ? strtoull(argv[2], NULL, 0) : 1, end;
	double seconds;
	int status;

	if (argc > 1 && !strcmp(argv[1], "--nothing"))
		return 0;
	if (argc < 2 || (seconds = atof(argv[1])) <= 0) {
		fprintf(stderr, "usage: stress SECONDS [SEED]\n");
		return 2;
	}
	random = random * 0x9e3779b97f4a7c15ULL | 1;
	totals = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(totals != MAP_FAILED);
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
	/* Orphans of killed processes come to us. */
	CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
	end = milliseconds() + seconds * 1000;
	while (milliseconds() < end) {
		unsigned int lifetime = 50 + next(&random) % 400;
		bool kills = next(&random) % 2;
		pid_t pid = fork();

		CHECK(pid >= 0);
		if (pid == 0)
			process(next(&random), lifetime);
		totals->processes++;
		if (kills) {
			usleep(1000 * (next(&random) % lifetime));
			kill(pid, SIGKILL);
		}
		waitpid(pid, &status, 0);
		if (!WIFEXITED(status) ? !kills || WTERMSIG(status) != SIGKILL : WEXITSTATUS(status)) {
			printf("stress: a process ended with status 0x%x\n", status);
			return 1;
		}
	}
	/* Nobody is left when this returns, so that the module can go. */
	while (waitpid(-1, NULL, 0) > 0)
		;
	printf("stress: %llu processes of %d threads, %llu operations, %llu hits missed\n",
	       (unsigned long long)totals->processes, THREADS,
	       (unsigned long long)totals->operations, (unsigned long long)totals->missed);
	return totals->missed ? 1 : 0;
}
