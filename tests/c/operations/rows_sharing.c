/*
 * Rows: children that share the memory (vfork, clone with CLONE_VM) are its owner, too. From here on the process
 * was seen to have company on its address space, so these rows come last.
 * Values: corners-*.txt, operations-*.txt ("PUNCH_HOLE by a vfork child").
 */
#define _GNU_SOURCE
#include "walk.h"
#include <linux/falloc.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static char stack[64 * 1024] __attribute__((aligned(16)));
static char *area;
static int file;

static int child_munmap(void *unused)
{
	(void)unused;
	_exit(do_munmap(area, 4 * PAGE) == 0 ? 0 : 1);
}

static int child_dontneed(void *unused)
{
	(void)unused;
	_exit(do_madvise(area, 4 * PAGE, MADV_DONTNEED) == 0 ? 0 : 1);
}

static int child_punch(void *unused)
{
	(void)unused;
	_exit(do_fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4 * PAGE, 2 * PAGE) == 0 ? 0 : 1);
}

/* The parent waits for the child in the call itself (what vfork does, on a stack of its own) or afterwards. */
static enum verdict by_child(int (*what)(void *), int flags)
{
	int status;
	pid_t pid = clone(what, stack + sizeof(stack), CLONE_VM | flags | SIGCHLD, NULL);

	want(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
	return RAN;
}

static enum verdict on_anonymous(int (*what)(void *), int flags)
{
	area = written(0, 0, 4);
	watch(0, 4);
	return by_child(what, flags);
}

static int child_nothing(void *unused)
{
	(void)unused;
	_exit(0);
}

static enum verdict clone_exit(void) { return on_anonymous(child_nothing, 0); }
static enum verdict clone_munmap(void) { return on_anonymous(child_munmap, 0); }
static enum verdict clone_dontneed(void) { return on_anonymous(child_dontneed, 0); }
static enum verdict vfork_munmap(void) { return on_anonymous(child_munmap, CLONE_VFORK); }
static enum verdict vfork_dontneed(void) { return on_anonymous(child_dontneed, CLONE_VFORK); }

/* Another task may take the gap between the look and the act. */
static enum verdict grow_in_company(void)
{
	char *a = written(0, 0, 2);

	watch(0, 4);
	want(do_mremap(a, 2 * PAGE, 4 * PAGE, MREMAP_MAYMOVE, NULL) == a);
	return RAN;
}

static enum verdict vfork_punch(void)
{
	file = file_of(8);
	write_pages(map(0, 0, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0), 8);
	watch(0, 8);
	return by_child(child_punch, CLONE_VFORK);
}

static const struct row rows[] = {
	{ .name = "PUNCH_HOLE by a vfork child", .key = "remove", .class = EXACT, .run = vfork_punch, .expect = EVERYWHERE(EVENTS(1, A(4, 6))) },
	{ .name = "munmap by a vfork child", .key = "munmap", .class = EXACT, .run = vfork_munmap, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "MADV_DONTNEED by a vfork child", .key = "madvise-drop", .class = EXACT, .run = vfork_dontneed, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "clone CLONE_VM and exit", .key = "nothing", .class = EXACT, .run = clone_exit, .expect = EVERYWHERE(NOTHING) },
	{ .name = "munmap by a clone CLONE_VM child", .key = "crowd", .class = COVERED, .run = clone_munmap, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "mremap MAYMOVE 2p -> 4p after company was seen", .key = "crowd", .class = COVERED, .run = grow_in_company, .derived = 1,
	  .expect = EVERYWHERE(NOTHING) },
	{ .name = "MADV_DONTNEED by a clone CLONE_VM child", .key = "crowd", .class = COVERED, .run = clone_dontneed, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
};

TABLE(table_sharing, "children that share the memory", rows);
