/*
 * What comes between the two halves of a process's first open: the supervisor has made its context, and the process has
 * yet to map the page by which its address space is known, or has mapped it, and forks still inherit it.
 *
 *   amid fork          a thread forks there; the copy then opens the device itself
 *   amid open          a thread opens the device there, by a call that no library sees; started by a static program
 *   amid forks LEAST   the first is left to chance, until LEAST copies have inherited the page; for a static program
 *
 * In the first two ways a tracer stops the opener there. Whoever has opened the device registers a page and unmaps it:
 * its counter must move.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define DEVICE "/dev/ummunotify"
/* Copies that one opener makes at most. */
#define COPIES 40
/* Seconds that anything may take. */
#define PATIENCE 20

/* What a process reports of itself. */
enum outcome { MISSING, RECORDED, MISSED, FAILED };

static struct {
	atomic_int seized, opening, stopped, acted, opened, opener, other;
	atomic_int inherited, missed, failed;
} *common;

static bool forks_there;

static bool await(atomic_int *word)
{
	for (int i = 0; i < PATIENCE * 5000; i++) {
		if (*word)
			return true;
		usleep(200);
	}
	return false;
}

/* Made here, where no library takes its place. */
static long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long fourth __asm__("r10") = d, fifth __asm__("r8") = e, sixth __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall" : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
			 : "rcx", "r11", "memory");
	return result;
}

/* Whether an invalidation of our own is seen at an open device. */
static enum outcome see(int device, bool plainly)
{
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + PAGE, 1, 0, 0 };
	const volatile uint64_t *counter;
	uint64_t before;
	long failed;

	if (plainly) {
		counter = (void *)raw(SYS_mmap, 0, PAGE, PROT_READ, MAP_SHARED, device, 0);
		failed = raw(SYS_ioctl, device, UMMUNOTIFY_REGISTER_REGION, (long)&region, 0, 0, 0);
	} else {
		counter = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, device, 0);
		failed = ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region);
	}
	if (device < 0 || page == MAP_FAILED || (uintptr_t)counter >= -PAGE || failed)
		return FAILED;
	before = *counter;
	if (raw(SYS_munmap, (long)page, PAGE, 0, 0, 0, 0))
		return FAILED;
	return *counter == before ? MISSED : RECORDED;
}

static void *other_thread(void *unused)
{
	(void)unused;
	if (!await(&common->stopped))
		return NULL;
	if (!forks_there) {
		long device = raw(SYS_openat, AT_FDCWD, (long)DEVICE, O_RDONLY | O_NONBLOCK, 0, 0, 0);

		common->acted = 1;
		/* The first one's place in the process is known then. */
		await(&common->opened);
		common->other = see(device, true);
		return NULL;
	}
	pid_t copy = fork();

	if (copy == 0) {
		if (await(&common->opened))
			common->other = see(open(DEVICE, O_RDONLY | O_NONBLOCK), false);
		_exit(0);
	}
	common->acted = 1;
	waitpid(copy, NULL, 0);
	return NULL;
}

/* This thread alone asks its tracer before the second half of an open. */
static bool filter(void)
{
	struct sock_filter fork[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_DONTFORK, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_filter open[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 5),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PAGE, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MAP_SHARED, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof open / sizeof *open, open };

	if (forks_there)
		program = (struct sock_fprog){ sizeof fork / sizeof *fork, fork };
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0;
}

static int opener(void)
{
	pthread_t other;
	int device;

	if (!await(&common->seized) || pthread_create(&other, NULL, other_thread, NULL) || !filter())
		return 2;
	common->opening = 1;
	device = open(DEVICE, O_RDONLY | O_NONBLOCK);
	common->opened = 1;
	common->opener = see(device, false);
	pthread_join(other, NULL);
	return 0;
}

static int stopped_there(void)
{
	pid_t pid;
	int status;

	/* Who opens it below is under the filter of the supervisor that this one starts. */
	if (open(DEVICE, O_RDONLY | O_CLOEXEC) < 0)
		return 2;
	pid = fork();
	if (pid == 0)
		_exit(opener());
	if (ptrace(PTRACE_SEIZE, pid, NULL, PTRACE_O_TRACESECCOMP | PTRACE_O_EXITKILL) != 0) {
		perror("ptrace");
		return 1;
	}
	common->seized = 1;
	while (waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status)) {
		bool asks = status >> 8 == (SIGTRAP | PTRACE_EVENT_SECCOMP << 8);

		if (asks && common->opening && !common->stopped) {
			common->stopped = 1;
			await(&common->acted);
		}
		ptrace(PTRACE_CONT, pid, NULL, status >> 16 ? 0 : WSTOPSIG(status));
	}
	printf("stopped=%d acted=%d opener=%d other=%d\n", common->stopped, common->acted, common->opener, common->other);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/* Whether a space of somebody else's is known by a page that we have. */
static bool has_page(void)
{
	static char text[1 << 16];
	int file = open("/proc/self/maps", O_RDONLY);
	ssize_t length = 0, part;

	while (file >= 0 && (part = read(file, text + length, sizeof text - 1 - length)) > 0)
		length += part;
	text[length] = 0;
	close(file);
	return strstr(text, "ummunotify-space") != NULL;
}

static void copy(void)
{
	if (!has_page() || !await(&common->opened))
		return;
	switch (see(open(DEVICE, O_RDONLY | O_NONBLOCK), false)) {
	case RECORDED:
		break;
	case MISSED:
		common->missed++;
		break;
	default:
		common->failed++;
	}
	common->inherited++;
}

static void *forker(void *unused)
{
	pid_t copies[COPIES];
	int made = 0;

	(void)unused;
	common->acted = 1;
	while (made < COPIES && !common->opened) {
		copies[made] = fork();
		if (copies[made] == 0) {
			copy();
			_exit(0);
		}
		made++;
	}
	await(&common->opened);
	while (made-- > 0)
		waitpid(copies[made], NULL, 0);
	return NULL;
}

/* Opens the device for the first time while another thread forks. */
static void open_amid_forks(void)
{
	pthread_t other;

	if (pthread_create(&other, NULL, forker, NULL))
		return;
	await(&common->acted);
	int device = open(DEVICE, O_RDONLY | O_NONBLOCK);

	common->opened = 1;
	if (see(device, false) != RECORDED)
		common->failed++;
	pthread_join(other, NULL);
}

static int left_to_chance(int least)
{
	time_t begin = time(NULL);
	int openers = 0;

	while (common->inherited < least && time(NULL) - begin < 60) {
		pid_t pid;

		common->acted = common->opened = 0;
		pid = fork();
		if (pid == 0) {
			open_amid_forks();
			_exit(0);
		}
		waitpid(pid, NULL, 0);
		openers++;
	}
	printf("openers=%d inherited=%d missed=%d failed=%d\n", openers, common->inherited, common->missed, common->failed);
	return 0;
}

int main(int argc, char **argv)
{
	const char *way = argc > 1 ? argv[1] : "";

	common = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (common == MAP_FAILED)
		return 1;
	if (strcmp(way, "forks") == 0)
		return left_to_chance(argc > 2 ? atoi(argv[2]) : 1);
	forks_there = strcmp(way, "fork") == 0;
	return forks_there || strcmp(way, "open") == 0 ? stopped_there() : 2;
}
