/*
 * Rows: calls by other entries of the kernel than the usual one. They count as the calls that they stand for, so
 * nothing is recorded of them.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)
#define X32 0x40000000L

static int interrupt_80(int number, unsigned long a, unsigned long b, unsigned long c)
{
	int result;

	__asm__ volatile("int $0x80"
			 : "=a"(result)
			 : "a"(number), "b"(a), "c"(b), "d"(c)
			 : "memory", "r8", "r9", "r10", "r11");
	return result;
}

static int has_entry_32, has_x32;

/* Where the entry is switched off, the instruction is a fault: a child finds out before the device is opened. */
void entry_probe(void)
{
	pid_t pid = fork();
	int status;

	must(pid >= 0);
	if (pid == 0)
		_exit(interrupt_80(20, 0, 0, 0) > 0 ? 0 : 1);
	must(waitpid(pid, &status, 0) == pid);
	has_entry_32 = status == 0;
	has_x32 = syscall(X32 | SYS_getpid) == getpid();
}

/* Memory that 32 bits can name, at an address of its own each time. */
static char *low_memory(void)
{
	static uintptr_t next = 0x30000000;
	void *wanted = (void *)(next += 0x1000000);
	char *a = mmap(wanted, 4 * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	must(a == wanted);
	write_pages(a, 4);
	watch_at(0, a, 4);
	return a;
}

static enum verdict entry_32(int number, unsigned long c)
{
	char *a;
	int result;

	if (!has_entry_32)
		return skip("the kernel has no 32-bit entry");
	a = low_memory();
	result = interrupt_80(number, (uintptr_t)a, 4 * PAGE, c);
	want(result == 0);
	return RAN;
}

static enum verdict entry_32_munmap(void) { return entry_32(91, 0); }
static enum verdict entry_32_madvise(void) { return entry_32(219, MADV_DONTNEED); }

/* ---- x32 numbers ---- */

static enum verdict by_x32(int two, long number, long c)
{
	char *a = written(0, 0, 4);

	if (!has_x32)
		return skip("the kernel takes no x32 numbers");
	watch(0, 4);
	want(syscall(X32 | number, a + (two ? PAGE : 0), (two ? 2 : 4) * PAGE, c) == 0);
	return RAN;
}

static enum verdict x32_munmap(void) { return by_x32(0, SYS_munmap, 0); }
static enum verdict x32_madvise(void) { return by_x32(1, SYS_madvise, MADV_DONTNEED); }
static enum verdict x32_mprotect(void) { return by_x32(1, SYS_mprotect, PROT_READ); }

static const struct row rows[] = {
	{ .name = "32-bit entry: munmap 4p", .key = "foreign-entry", .class = COVERED, .run = entry_32_munmap, .once = 1, .derived = 1, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "32-bit entry: madvise DONTNEED 4p", .key = "foreign-entry", .class = COVERED, .run = entry_32_madvise, .once = 1, .derived = 1, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "x32 number: munmap 4p", .key = "x32", .class = EXACT, .run = x32_munmap, .once = 1, .derived = 1, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "x32 number: madvise DONTNEED 2p of 4p", .key = "x32", .class = EXACT, .run = x32_madvise, .once = 1, .derived = 1, .expect = EVERYWHERE(EVENTS(1, A(1, 3))) },
	{ .name = "x32 number: mprotect RW -> R 2p of 4p", .key = "x32", .class = EXACT, .run = x32_mprotect, .once = 1, .derived = 1, .expect = EVERYWHERE(EVENTS(1, A(1, 3))) },
};

TABLE(table_entry, "other entries of the kernel", rows);
