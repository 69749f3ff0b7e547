/*
 * signals ROUNDS LEAST calls|forks|raw
 *
 * Threads that register and unregister without pause are interrupted by queued signals of two kinds. The handlers use the
 * device themselves, leave by siglongjmp, or (with `forks`) fork a child that comes back from the handler and uses the
 * device in its turn. The second kind interrupts the handlers of the first, uses the device every other time, and returns.
 * One thread's handlers run on a stack of their own. Each signal must be handled once, in the order of its kind, with its
 * value; each call must do what it is for, and but for forks the counter must not move: it does where a lock was found left
 * behind.
 *
 * Goes on until LEAST signals came in the midst of a call of the device and were held back until its end. With `raw` there
 * is one kind, whose handlers were installed behind libc's back, so that nothing can hold them back, and use the device:
 * until the counter has moved LEAST times, because the engine found its lock held by the very caller.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "../bout.h"

#define THREADS 2
#define KINDS 2
#define AHEAD 4

/* emulator/abi/src/direct.rs. */
#define NOT_HERE INTPTR_MIN
static const struct {
	intptr_t (*lease)(int, uint64_t *);
	void (*release)(uint64_t *);
	intptr_t (*register_region)(const uint64_t *, int, uint64_t, uint64_t, uint64_t);
	intptr_t (*unregister)(const uint64_t *, int, uint64_t);
	intptr_t (*read)(const uint64_t *, int, struct ummunotify_event *, size_t, _Bool);
	intptr_t (*settle)(const uint64_t *, int);
} *direct;
static uint64_t lease[16];

static int device;
static pid_t parent;
static bool raw, forks;
static const volatile uint64_t *counter;
static struct bout bout;
static uintptr_t library_start, library_end;
static _Atomic uint64_t held;
static _Atomic bool begun;

static struct worker {
	pthread_t thread;
	unsigned id;
	sigjmp_buf home;
	_Atomic uint64_t sent[KINDS], handled[KINDS];
	_Atomic bool ready, done, over;
	char stack[65536] __attribute__((aligned(64)));
} workers[THREADS];
static __thread struct worker *me;

static void fail(const char *what, int error)
{
	dprintf(2, "%s: %s\n", what, strerror(error));
	_exit(1);
}

static int by_ioctl(int add, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = { 0x1000, 0x2000, cookie, 0, 0 };

	if (add ? ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) : ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie))
		return errno;
	return 0;
}

static int directly(int add, uint64_t cookie)
{
	intptr_t result = add ? direct->register_region(lease, device, 0x1000, 0x2000, cookie) :
				direct->unregister(lease, device, cookie);

	return result == NOT_HERE ? by_ioctl(add, cookie) : (int)-result;
}

/* Both ways in turns; a cookie of its own for each thread, and another one for its handlers. */
static void use(uint64_t cookie, uint64_t turn)
{
	int (*call)(int, uint64_t) = turn % 2 ? directly : by_ioctl;
	int error = call(1, cookie);

	/* A call whose lock was taken over by a handler may fail so, and then it may have been done. */
	if (error && !(raw && (error == EIO || error == EINVAL)))
		fail("register", error);
	error = call(0, cookie);
	if (error && !(raw && (error == EIO || error == EINVAL)))
		fail("unregister", error);
}

/* Whether the signal came to the end of a call of the device: the instruction before is a call, in the library. */
static bool was_held(const ucontext_t *context)
{
	uintptr_t at = context->uc_mcontext.gregs[REG_RIP];
	const unsigned char *code = (const unsigned char *)at;

	return at >= library_start && at < library_end && (code[-5] == 0xe8 || (code[-6] == 0xff && code[-5] == 0x15));
}

static void handle(int signal, siginfo_t *information, void *context)
{
	uint64_t value = information->si_value.sival_int;
	int before = errno, kind = signal - SIGRTMIN;

	if (kind < 0 || kind >= KINDS || information->si_code != SI_QUEUE || information->si_pid != parent ||
	    value != (me->handled[kind] & 0x3fffffff))
		fail("a signal isn't the next one", 0);
	held += was_held(context);
	me->handled[kind]++;
	if (kind == 1) {
		if (value % 2)
			use(2000 + me->id, value / 4);
		errno = before;
		return;
	}
	if (raw || value % 4 == 1)
		use(1000 + me->id, value / 4);
	if (!raw && value % 4 == 2)
		siglongjmp(me->home, 1);
	if (forks && value % 64 == 3) {
		pid_t child = fork();
		int status = 0;

		/* The child goes on where the signal came, in the loop below. */
		if (child > 0) {
			while (waitpid(child, &status, 0) != child)
				if (errno != EINTR)
					fail("waitpid", errno);
			if (status)
				fail("the child", 0);
		} else if (child < 0) {
			fail("fork", errno);
		}
	}
	errno = before;
}

static void install(void)
{
	struct sigaction action = { .sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK };
	struct sigaction old;

	if (sigaction(SIGRTMIN, &action, NULL))
		fail("sigaction", errno);
	/* The second isn't interrupted by the first, which would leave it by siglongjmp. */
	sigaddset(&action.sa_mask, SIGRTMIN);
	if (sigaction(SIGRTMIN + 1, &action, NULL))
		fail("sigaction", errno);
	if (raw) {
		/* As libc does it, with the handler itself. */
		struct { void *handler; unsigned long flags; void (*restorer)(void); uint64_t mask; } kernel;

		if (syscall(SYS_rt_sigaction, SIGRTMIN, NULL, &kernel, 8))
			fail("rt_sigaction", errno);
		kernel.handler = handle;
		if (syscall(SYS_rt_sigaction, SIGRTMIN, &kernel, NULL, 8))
			fail("rt_sigaction", errno);
	}
	if (sigaction(SIGRTMIN, NULL, &old) || old.sa_sigaction != handle)
		fail("sigaction doesn't tell the handler", 0);
}

static void *work(void *argument)
{
	volatile uint64_t turn = 0;
	uint64_t cookie;

	me = argument;
	cookie = 1 + me->id;
	if (me->id == 0) {
		stack_t other = { .ss_sp = me->stack, .ss_size = sizeof(me->stack) };

		if (sigaltstack(&other, NULL))
			fail("sigaltstack", errno);
	}
	/* Its mask is taken back here: siglongjmp would do it on the handler's stack, which ever more handlers would fill. */
	if (sigsetjmp(me->home, 0)) {
		sigset_t mine;

		sigemptyset(&mine);
		sigaddset(&mine, SIGRTMIN);
		/* The call that was left had come to its end. */
		by_ioctl(0, cookie);
		by_ioctl(0, 1000 + me->id);
		pthread_sigmask(SIG_UNBLOCK, &mine, NULL);
	}
	while (!begun)
		sched_yield();
	me->ready = true;
	while (!me->over) {
		use(cookie, turn);
		turn++;
		if (getpid() != parent)
			_exit(0);
	}
	return NULL;
}

static void *send(void *argument)
{
	struct worker *to = argument;

	for (uint64_t round = 1; bout_goes_on(&bout, round, raw ? *counter : held); round++) {
		for (int kind = 0; kind < (raw ? 1 : KINDS); kind++) {
			union sigval value = { .sival_int = to->sent[kind] & 0x3fffffff };

			while (!to->ready || to->sent[kind] - to->handled[kind] >= AHEAD)
				sched_yield();
			to->sent[kind]++;
			if (pthread_sigqueue(to->thread, SIGRTMIN + kind, value))
				fail("pthread_sigqueue", errno);
		}
	}
	for (int kind = 0; kind < KINDS; kind++)
		while (to->handled[kind] != to->sent[kind])
			sched_yield();
	to->done = true;
	while (!to->over)
		sched_yield();
	return NULL;
}

static int find_library(struct dl_phdr_info *info, size_t size, void *unused)
{
	(void)size, (void)unused;
	if (strstr(info->dlpi_name, "ummunotify"))
		for (int i = 0; i < info->dlpi_phnum; i++)
			if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X) {
				library_start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
				library_end = library_start + info->dlpi_phdr[i].p_memsz;
			}
	return 0;
}

int main(int count, char **args)
{
	pthread_t senders[THREADS];
	uint64_t sent = 0, moved;

	if (count != 4)
		return 2;
	bout_begin(&bout, args[1], args[2]);
	raw = !strcmp(args[3], "raw");
	forks = !strcmp(args[3], "forks");
	parent = getpid();
	direct = dlsym(RTLD_DEFAULT, "ummunotify_direct_1");
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	dl_iterate_phdr(find_library, NULL);
	if (!direct || device < 0 || counter == MAP_FAILED || !library_start || direct->lease(device, lease))
		return perror("start"), 2;
	install();
	for (unsigned i = 0; i < THREADS; i++) {
		workers[i].id = i;
		if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) ||
		    pthread_create(&senders[i], NULL, send, &workers[i]))
			return perror("threads"), 2;
	}
	/* Neither before nor after: a thread that begins or ends changes mappings, and if another is stopped in the midst of a
	 * registration just then, everything is invalid. */
	begun = true;
	for (unsigned i = 0; i < THREADS; i++)
		while (!workers[i].done)
			sched_yield();
	moved = *counter;
	for (unsigned i = 0; i < THREADS; i++) {
		workers[i].over = true;
		pthread_join(senders[i], NULL);
		pthread_join(workers[i].thread, NULL);
		sent += workers[i].sent[0] + workers[i].sent[1];
	}
	direct->release(lease);
	printf("signals=%lu held=%lu counter=%lu\n", sent, held, moved);
	return 0;
}
