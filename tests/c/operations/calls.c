/*
 * Each call in three ways: through libc's function, through syscall(3), and by the instruction itself. Linked into a
 * program in Go, in one: by the instruction of that language's own runtime.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

enum way way;

static long instruction(long number, long a, long b, long c, long d, long e, long f)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	if (result < 0 && result > -4096) {
		errno = (int)-result;
		return -1;
	}
	return result;
}

#ifdef WALK_IN_GO
/* walk.go */
extern long go_call(long number, long a, long b, long c, long d, long e, long f, int *error);
#endif

long kernel_call(long number, long a, long b, long c, long d, long e, long f)
{
#ifdef WALK_IN_GO
	static pid_t main_thread;

	if (main_thread == 0)
		main_thread = gettid();
	/* That runtime can't be entered from a task that it didn't make, nor left by one. */
	if (gettid() != main_thread || number == SYS_fork || number == SYS_vfork || number == SYS_clone ||
	    number == SYS_clone3)
		return instruction(number, a, b, c, d, e, f);
	if (way == BY_GO) {
		int error = 0;
		long result = go_call(number, a, b, c, d, e, f, &error);

		if (error)
			errno = error;
		return result;
	}
#endif
	if (way == BY_INSTRUCTION)
		return instruction(number, a, b, c, d, e, f);
	return syscall(number, a, b, c, d, e, f);
}

void *do_mmap(void *start, size_t length, int prot, int flags, int fd, off_t offset)
{
	if (way == BY_LIBC)
		return mmap(start, length, prot, flags, fd, offset);
	return (void *)kernel_call(SYS_mmap, (long)start, (long)length, prot, flags, fd, offset);
}

int do_munmap(void *start, size_t length)
{
	if (way == BY_LIBC)
		return munmap(start, length);
	return (int)kernel_call(SYS_munmap, (long)start, (long)length, 0, 0, 0, 0);
}

void *do_mremap(void *start, size_t old, size_t new, int flags, void *to)
{
	if (way == BY_LIBC)
		return mremap(start, old, new, flags, to);
	return (void *)kernel_call(SYS_mremap, (long)start, (long)old, (long)new, flags, (long)to, 0);
}

int do_mprotect(void *start, size_t length, int prot)
{
	if (way == BY_LIBC)
		return mprotect(start, length, prot);
	return (int)kernel_call(SYS_mprotect, (long)start, (long)length, prot, 0, 0, 0);
}

int do_madvise(void *start, size_t length, int advice)
{
	if (way == BY_LIBC)
		return madvise(start, length, advice);
	return (int)kernel_call(SYS_madvise, (long)start, (long)length, advice, 0, 0, 0);
}

/* musl refuses to move the break. */
#ifdef __GLIBC__
int set_brk(void *end)
{
	return brk(end);
}
#else
int set_brk(void *end)
{
	return syscall(SYS_brk, end) == (long)end ? 0 : -1;
}
#endif

int do_brk(void *end)
{
	int result;

	if (way == BY_LIBC)
		return set_brk(end);
	result = kernel_call(SYS_brk, (long)end, 0, 0, 0, 0, 0) == (long)end ? 0 : -1;
	/* libc keeps a copy of the break, which is to agree again. */
	return set_brk(end) == 0 ? result : -1;
}

int do_ftruncate(int fd, off_t length)
{
	if (way == BY_LIBC)
		return ftruncate(fd, length);
	return (int)kernel_call(SYS_ftruncate, fd, length, 0, 0, 0, 0);
}

int do_truncate(const char *path, off_t length)
{
	if (way == BY_LIBC)
		return truncate(path, length);
	return (int)kernel_call(SYS_truncate, (long)path, length, 0, 0, 0, 0);
}

int do_fallocate(int fd, int mode, off_t offset, off_t length)
{
	if (way == BY_LIBC)
		return fallocate(fd, mode, offset, length);
	return (int)kernel_call(SYS_fallocate, fd, mode, offset, length, 0, 0);
}

int do_open(const char *path, int flags)
{
	if (way == BY_LIBC)
		return open(path, flags, 0600);
	return (int)kernel_call(SYS_open, (long)path, flags, 0600, 0, 0, 0);
}

void *do_shmat(int id, const void *start, int flags)
{
	if (way == BY_LIBC)
		return shmat(id, start, flags);
	return (void *)kernel_call(SYS_shmat, id, (long)start, flags, 0, 0, 0);
}

int do_shmdt(const void *start)
{
	if (way == BY_LIBC)
		return shmdt(start);
	return (int)kernel_call(SYS_shmdt, (long)start, 0, 0, 0, 0, 0);
}

int do_mlock(const void *start, size_t length)
{
	if (way == BY_LIBC)
		return mlock(start, length);
	return (int)kernel_call(SYS_mlock, (long)start, (long)length, 0, 0, 0, 0);
}

int do_munlock(const void *start, size_t length)
{
	if (way == BY_LIBC)
		return munlock(start, length);
	return (int)kernel_call(SYS_munlock, (long)start, (long)length, 0, 0, 0, 0);
}

int do_msync(void *start, size_t length, int flags)
{
	if (way == BY_LIBC)
		return msync(start, length, flags);
	return (int)kernel_call(SYS_msync, (long)start, (long)length, flags, 0, 0, 0);
}

pid_t do_fork(void)
{
	if (way == BY_LIBC)
		return fork();
	/* The child of a bare fork may do no more than make system calls; the rows know. */
	return (pid_t)kernel_call(SYS_fork, 0, 0, 0, 0, 0, 0);
}
