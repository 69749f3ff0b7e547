/* Rows: brk, processes, SysV shared memory. Values: operations-*.txt ("brk", "fork / COW", "SysV shm"), corners-*.txt. */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)

extern char **environ;

/* ---- brk ---- */

/* Grows the break by `pages` whole pages; returns the first. */
static char *heap(long pages)
{
	char *now = sbrk(0);
	char *start = (char *)(((uintptr_t)now + PAGE - 1) & ~(uintptr_t)(PAGE - 1));

	must(set_brk(start + pages * PAGE) == 0);
	return start;
}

static enum verdict brk_grow(void)
{
	char *start = heap(0);

	watch_at(0, start, 4);
	want(do_brk(start + 4 * PAGE) == 0);
	write_pages(start, 4);
	must(set_brk(start) == 0);
	return RAN;
}

static enum verdict brk_grow_only(void)
{
	char *start = heap(0);

	watch_at(0, start, 4);
	want(do_brk(start + 4 * PAGE) == 0);
	write_pages(start, 4);
	return RAN;
}

static enum verdict brk_shrink(long pages, int touch, long left)
{
	char *start = heap(pages);

	if (touch)
		write_pages(start, pages);
	watch_at(0, start, pages);
	want(do_brk(start + left * PAGE) == 0);
	return RAN;
}

static enum verdict brk_shrink_populated(void) { return brk_shrink(4, 1, 0); }
static enum verdict brk_shrink_untouched(void) { return brk_shrink(4, 0, 0); }
static enum verdict brk_shrink_half(void) { return brk_shrink(4, 1, 2); }

static enum verdict sbrk_shrink(void)
{
#ifndef __GLIBC__
	return skip("this libc's sbrk moves nothing");
#endif
	char *start = heap(4);

	write_pages(start, 4);
	watch_at(0, start, 4);
	want(sbrk(-4 * PAGE) == start + 4 * PAGE);
	return RAN;
}

static enum verdict brk_query(void)
{
	char *start = heap(4);

	write_pages(start, 4);
	watch_at(0, start, 4);
	want(kernel_call(SYS_brk, 0, 0, 0, 0, 0, 0) == (long)(start + 4 * PAGE));
	return RAN;
}

/* ---- fork ---- */

/* A child that stays until the row is over. */
static void fork_waiting(void)
{
	pid_t pid = do_fork();

	want(pid >= 0);
	if (pid == 0) {
		for (;;)
			kernel_call(SYS_pause, 0, 0, 0, 0, 0, 0);
	}
	keep_child(pid);
}

static enum verdict fork_written(void)
{
	written(0, 0, 4);
	watch(0, 4);
	fork_waiting();
	return RAN;
}

static enum verdict fork_exited(void)
{
	int status;
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	pid = do_fork();
	if (pid == 0)
		_exit(7);
	want(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 7);
	return RAN;
}

static enum verdict fork_by_clone(void)
{
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	pid = (pid_t)kernel_call(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
	if (pid == 0)
		_exit(0);
	want(pid > 0 && waitpid(pid, NULL, 0) == pid);
	return RAN;
}

static enum verdict fork_by_clone3(void)
{
	struct clone_args arguments = { .exit_signal = SIGCHLD };
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	pid = (pid_t)kernel_call(SYS_clone3, (long)&arguments, sizeof(arguments), 0, 0, 0, 0);
	if (pid == 0)
		_exit(0);
	if (pid < 0 && errno == ENOSYS)
		return lacking("clone3");
	want(pid > 0 && waitpid(pid, NULL, 0) == pid);
	return RAN;
}

static enum verdict fork_dontfork(void)
{
	char *a = written(0, 0, 4);

	must(madvise(a, 4 * PAGE, MADV_DONTFORK) == 0);
	watch(0, 4);
	fork_waiting();
	return RAN;
}

static enum verdict fork_dontfork_beside_written(void)
{
	char *a = written(0, 0, 4);

	/* Where the kernel splits the mapping, the parts must be told apart. */
	must(madvise(a + 2 * PAGE, 2 * PAGE, MADV_DONTFORK) == 0);
	watch(0, 4);
	fork_waiting();
	return RAN;
}

static enum verdict fork_shared(void)
{
	char *a = map(0, 0, 4, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	write_pages(a, 4);
	watch(0, 4);
	fork_waiting();
	return RAN;
}

static enum verdict fork_read_only(void)
{
	char *a = written(0, 0, 4);

	must(mprotect(a, 4 * PAGE, PROT_READ) == 0);
	watch(0, 4);
	fork_waiting();
	return RAN;
}

static enum verdict fork_never_written(void)
{
	untouched(0, 0, 4);
	watch(0, 4);
	fork_waiting();
	return RAN;
}

static enum verdict write_while_child_lives(void)
{
	char *a = written(0, 0, 4);

	fork_waiting();
	watch(0, 4);
	write_pages(a, 1);
	return RAN;
}

static enum verdict read_while_child_lives(void)
{
	char *a = written(0, 0, 4);

	fork_waiting();
	watch(0, 4);
	read_pages(a, 4);
	return RAN;
}

/* The child does that once the parent watches, and exits. */
static enum verdict child_does(int (*what)(char *))
{
	char *a = written(0, 0, 4);
	int go[2], status;
	char byte = 0;
	pid_t pid;

	must(pipe(go) == 0);
	pid = fork();
	must(pid >= 0);
	if (pid == 0)
		_exit(read(go[0], &byte, 1) == 1 ? what(a) : 1);
	watch(0, 4);
	must(write(go[1], &byte, 1) == 1);
	want(waitpid(pid, &status, 0) == pid && status == 0);
	close(go[0]);
	close(go[1]);
	return RAN;
}

static int in_child_munmap(char *a) { return do_munmap(a, 4 * PAGE); }
static int in_child_dontneed(char *a) { return do_madvise(a, 4 * PAGE, MADV_DONTNEED); }
static int in_child_mprotect(char *a) { return do_mprotect(a, 4 * PAGE, PROT_READ); }
static int in_child_exit(char *a) { (void)a; return 0; }

static int in_child_fork(char *a)
{
	pid_t pid = fork();

	(void)a;
	if (pid == 0)
		_exit(0);
	return pid > 0 && waitpid(pid, NULL, 0) == pid ? 0 : 1;
}

static enum verdict child_munmaps(void) { return child_does(in_child_munmap); }
static enum verdict child_discards(void) { return child_does(in_child_dontneed); }
static enum verdict child_protects(void) { return child_does(in_child_mprotect); }
static enum verdict child_exits(void) { return child_does(in_child_exit); }
static enum verdict child_forks(void) { return child_does(in_child_fork); }

static enum verdict write_after_child_exit(void)
{
	char *a = written(0, 0, 4);

	fork_waiting();
	end_child();
	watch(0, 4);
	write_pages(a + PAGE, 1);
	return RAN;
}

static enum verdict populate_after_child_exit(void)
{
	char *a = written(0, 0, 4);

	fork_waiting();
	end_child();
	watch(0, 4);
	if (do_madvise(a, 4 * PAGE, MADV_POPULATE_WRITE) != 0)
		return lacking("MADV_POPULATE_WRITE");
	return RAN;
}

static enum verdict vfork_exit(void)
{
	int status;
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	pid = vfork();
	if (pid == 0)
		_exit(3);
	want(pid > 0 && waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 3);
	return RAN;
}

static enum verdict vfork_failed_exec(void)
{
	int status;
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	pid = vfork();
	if (pid == 0) {
		execl("/nonexistent", "nonexistent", (char *)NULL);
		_exit(4);
	}
	want(pid > 0 && waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 4);
	return RAN;
}

static enum verdict vfork_exec(void)
{
	int status;
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	pid = vfork();
	if (pid == 0) {
		execl("/bin/true", "true", (char *)NULL);
		_exit(4);
	}
	want(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
	return RAN;
}

static enum verdict spawn(void)
{
	char *arguments[] = { "true", NULL };
	int status;
	pid_t pid;

	written(0, 0, 4);
	watch(0, 4);
	want(posix_spawn(&pid, "/bin/true", NULL, NULL, arguments, environ) == 0);
	want(waitpid(pid, &status, 0) == pid && status == 0);
	return RAN;
}

/* ---- SysV shared memory ---- */

static int segment(void)
{
	int id = shmget(IPC_PRIVATE, 8 * PAGE, IPC_CREAT | 0600);

	must(id >= 0);
	return id;
}

/* 6 pages at A; removed with its last detachment. */
static char *attached(int touch)
{
	int id = shmget(IPC_PRIVATE, 6 * PAGE, IPC_CREAT | 0600);
	char *a;

	must(id >= 0);
	a = shmat(id, at(0, 0), 0);
	must(a == at(0, 0));
	must(shmctl(id, IPC_RMID, NULL) == 0);
	if (touch)
		write_pages(a, 6);
	return a;
}

static enum verdict shm_attach(void)
{
	int id = segment();

	watch(0, 8);
	want(do_shmat(id, at(0, 0), 0) == at(0, 0));
	must(shmctl(id, IPC_RMID, NULL) == 0);
	return RAN;
}

static enum verdict shm_detach(int touch)
{
	char *a = attached(touch);

	watch(0, 6);
	want(do_shmdt(a) == 0);
	return RAN;
}

static enum verdict shm_detach_populated(void) { return shm_detach(1); }
static enum verdict shm_detach_untouched(void) { return shm_detach(0); }

static enum verdict shm_detach_split(void)
{
	char *a = attached(1);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, PROT_READ) == 0);
	watch(0, 6);
	want(do_shmdt(a) == 0);
	return RAN;
}

static enum verdict shm_detach_nothing(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_shmdt(a) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict shm_remap(void)
{
	int id = shmget(IPC_PRIVATE, 4 * PAGE, IPC_CREAT | 0600);
	char *a = written(0, 0, 4);

	must(id >= 0);
	watch(0, 4);
	want(do_shmat(id, a, SHM_REMAP) == a);
	must(shmctl(id, IPC_RMID, NULL) == 0);
	return RAN;
}

#define ZERO(title, function) { .name = title, .key = "nothing", .class = EXACT, .run = function, .expect = EVERYWHERE(NOTHING) }
#define ZERO_DERIVED(title, function) { .name = title, .key = "nothing", .class = EXACT, .run = function, .expect = EVERYWHERE(NOTHING), .derived = 1 }

static const struct row rows[] = {
	ZERO("brk grows by 4p", brk_grow_only),
	{ .name = "brk grows by 4p, is written and shrinks back", .key = "brk", .class = EXACT, .run = brk_grow, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "brk shrinks by 4p populated", .key = "brk", .class = EXACT, .run = brk_shrink_populated, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "brk shrinks by 4p never touched", .key = "brk", .class = EXACT, .run = brk_shrink_untouched, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "brk shrinks 4p -> 2p", .key = "brk", .class = EXACT, .run = brk_shrink_half, .expect = EVERYWHERE(EVENTS(1, A(2, 4))) },
	{ .name = "sbrk shrinks by 4p", .key = "brk", .class = EXACT, .run = sbrk_shrink, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .once = 1, .derived = 1 },
	ZERO_DERIVED("brk(0)", brk_query),

	{ .name = "fork, child alive", .key = "fork", .class = COVERED, .run = fork_written, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "fork, child exits", .key = "fork", .class = COVERED, .run = fork_exited, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "clone without CLONE_VM", .key = "fork", .class = COVERED, .run = fork_by_clone, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "clone3 without CLONE_VM", .key = "fork", .class = COVERED, .run = fork_by_clone3, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "fork, written memory made read-only", .key = "fork", .class = COVERED, .run = fork_read_only, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "fork, memory never written", .key = "fork", .class = COVERED, .run = fork_never_written, .expect = EVERYWHERE(NOTHING) },
	{ .name = "fork, MADV_DONTFORK memory", .key = "fork-spared", .class = EXACT, .run = fork_dontfork, .expect = EVERYWHERE(NOTHING) },
	{ .name = "fork, 2p written and 2p MADV_DONTFORK", .key = "fork", .class = COVERED, .run = fork_dontfork_beside_written, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 2))) },
	{ .name = "fork, MAP_SHARED memory", .key = "fork-spared", .class = EXACT, .run = fork_shared, .expect = EVERYWHERE(NOTHING) },
	{ .name = "write while a forked child lives", .key = "cow", .class = BEYOND, .run = write_while_child_lives, .expect = EVERYWHERE(EVENTS(1, A(0, 1))) },
	ZERO("read while a forked child lives", read_while_child_lives),
	ZERO("forked child munmaps its copy", child_munmaps),
	ZERO_DERIVED("forked child discards its copy", child_discards),
	ZERO_DERIVED("forked child protects its copy", child_protects),
	ZERO_DERIVED("forked child forks", child_forks),
	ZERO("forked child exits", child_exits),
	{ .name = "write after the forked child's exit", .key = "cow", .class = BEYOND, .run = write_after_child_exit,
	  .expect = BY_KERNEL(EVENTS(1, A(1, 2)), NOTHING, NOTHING, NOTHING) },
	{ .name = "MADV_POPULATE_WRITE after fork, child gone", .key = "cow", .class = BEYOND, .run = populate_after_child_exit, .expect = EVERYWHERE(NOTHING) },
	ZERO("vfork and _exit", vfork_exit),
	ZERO("vfork and failed exec", vfork_failed_exec),
	ZERO_DERIVED("vfork and exec", vfork_exec),
	ZERO_DERIVED("posix_spawn", spawn),

	ZERO("shmat", shm_attach),
	{ .name = "shmdt populated 6p", .key = "shm", .class = EXACT, .run = shm_detach_populated, .expect = EVERYWHERE(EVENTS(1, A(0, 6))) },
	{ .name = "shmdt never touched 6p", .key = "shm", .class = EXACT, .run = shm_detach_untouched, .expect = EVERYWHERE(EVENTS(1, A(0, 6))) },
	{ .name = "shmdt after mprotect split it in 3", .key = "shm", .class = EXACT, .run = shm_detach_split,
	  .expect = EVERYWHERE(EVENTS(3, A(0, 2), A(2, 4), A(4, 6))) },
	{ .name = "shmdt of memory that isn't attached (EINVAL)", .key = "refused", .class = COVERED, .run = shm_detach_nothing, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "shmat SHM_REMAP over populated 4p", .key = "shm", .class = EXACT, .run = shm_remap, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
};

TABLE(table_process, "brk, processes, shared memory", rows);
