/*
 * Tells which calls are trapped: the supervisor is killed, so that each of them fails with ENOSYS.
 *
 *   alone
 *
 * Prints "ready", waits for a line, and prints what became of each call.
 */
#define _GNU_SOURCE
#include "inline.h"
#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>

static void say(const char *what, int result)
{
	printf("%s: %s\n", what, result == 0 ? "ok" : errno == ENOSYS ? "ENOSYS" : strerror(errno));
}

static long by_instruction(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	if (result < 0) {
		errno = (int)-result;
		return -1;
	}
	return result;
}

int main(void)
{
	volatile uint64_t *counter;
	int device = open_device(&counter);
	char *p = pages_at(NULL, 16), line[8];
	uint64_t was;

	setvbuf(stdout, NULL, _IOLBF, 0);
	register_pages(device, p + 8 * PAGE, 2, 1);
	/* A byte lies in the pipe: the next hit needs no supervisor. */
	munmap(p + 8 * PAGE, PAGE);
	printf("ready\n");
	must(fgets(line, sizeof(line), stdin) != NULL, "standard input");
	say("madvise", madvise(p, PAGE, MADV_DONTNEED));
	say("mprotect", mprotect(p, PAGE, PROT_READ));
	say("mmap fixed", mmap(p, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p ? 0 : -1);
	say("mremap", mremap(p + PAGE, PAGE, 2 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0);
	say("munmap", munmap(p, PAGE));
	say("syscall(3)", (int)syscall(SYS_munmap, p + 2 * PAGE, PAGE));
	/* Blocks of that size are mappings of their own, however glibc tunes itself. */
	void *block = malloc(64 << 20);
	void *after;

	free(block);
	after = malloc(64 << 20);
	say("free", block != NULL && after == block ? 0 : -1);
	was = *counter;
	say("munmap of a region", munmap(p + 9 * PAGE, PAGE));
	printf("counted: %lu\n", (unsigned long)(*counter - was));
	say("instruction", (int)by_instruction(SYS_munmap, (long)(p + 3 * PAGE), PAGE, 0));
	say("posix_madvise", (errno = posix_madvise(p + 4 * PAGE, PAGE, POSIX_MADV_NORMAL)) ? -1 : 0);
	return 0;
}
