/*
 * Records what an MPI program does with the memory that it communicates from, as a trace for
 * `ummunotify-cache-bench replay` (benches/src/cache/trace.rs describes the lines).
 *
 *   cc -O2 -shared -fPIC benches/recorder/mpi.c -o mpi-recorder.so -ldl
 *   mpirun -n 4 env LD_PRELOAD=$PWD/mpi-recorder.so ./program
 *
 * Each process writes trace.PID, into the folder that TRACE_FOLDER names, else the current one. Seen are mmap and
 * munmap, the blocks that glibc's malloc maps (128 KiB or more, mostly), and MPI_Send, MPI_Recv, MPI_Isend, MPI_Irecv,
 * MPI_Put and MPI_Get. A transfer counts as done when its call returns, since requests aren't followed. Messages below
 * TRACE_BYTES (4096) are left out: MPI libraries copy those.
 *
 * No mpi.h is needed. What MPI calls a datatype, a communicator or a window is a pointer with Open MPI and an int with
 * MPICH; either is passed on in its register as it came.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int file = -1;
static size_t least = 4096;

/* A child that was forked writes nothing: its memory isn't what the trace is of. */
static pid_t owner;

__attribute__((constructor)) static void begin(void)
{
	const char *folder = getenv("TRACE_FOLDER"), *bytes = getenv("TRACE_BYTES");
	char path[4096];

	owner = getpid();
	least = bytes ? strtoul(bytes, NULL, 0) : 4096;
	snprintf(path, sizeof(path), "%s/trace.%d", folder ? folder : ".", (int)owner);
	file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_APPEND, 0644);
	if (file < 0)
		perror(path);
}

/* One write a line, so that those of several threads don't mix. Without malloc, which is being recorded. */
static void line(const char *format, ...)
{
	char text[128];
	va_list arguments;
	int length;

	if (file < 0 || getpid() != owner)
		return;
	va_start(arguments, format);
	length = vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (write(file, text, (size_t)length) != length)
		file = -1;
}

static void change(const char *what, const void *at, size_t bytes)
{
	if (bytes >= least)
		line("%s %#lx %lu\n", what, (unsigned long)(uintptr_t)at, (unsigned long)bytes);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	void *got = (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);

	if (got != MAP_FAILED && (flags & MAP_ANONYMOUS))
		change("map", got, bytes);
	return got;
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	return mmap(at, bytes, protection, flags, fd, offset);
}

int munmap(void *at, size_t bytes)
{
	change("unmap", at, bytes);
	return (int)syscall(SYS_munmap, at, bytes);
}

/*
 * glibc maps large blocks by calls of its own, which can't be wrapped. The word before a block holds its size, with
 * bit 1 set if it is a mapping; the word before that is what the block's start was moved by (glibc's malloc.c).
 */
static void block(const char *what, const void *at)
{
	const size_t *words = at;

	if (at != NULL && (words[-1] & 2))
		change(what, (const char *)at - 2 * sizeof(size_t) - words[-2], (words[-1] & ~(size_t)7) + words[-2]);
}

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

void *malloc(size_t bytes)
{
	void *got = __libc_malloc(bytes);

	block("map", got);
	return got;
}

void *calloc(size_t count, size_t bytes)
{
	void *got = __libc_calloc(count, bytes);

	block("map", got);
	return got;
}

void *realloc(void *at, size_t bytes)
{
	void *got;

	block("unmap", at);
	got = __libc_realloc(at, bytes);
	block("map", got != NULL || bytes == 0 ? got : at);
	return got;
}

void *memalign(size_t alignment, size_t bytes)
{
	void *got = __libc_memalign(alignment, bytes);

	block("map", got);
	return got;
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
	return memalign(alignment, bytes);
}

int posix_memalign(void **where, size_t alignment, size_t bytes)
{
	void *got;

	if (alignment % sizeof(void *) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0)
		return 22; /* EINVAL */
	got = memalign(alignment, bytes);
	if (got == NULL)
		return 12; /* ENOMEM */
	*where = got;
	return 0;
}

void free(void *at)
{
	block("unmap", at);
	__libc_free(at);
}

/* A datatype, a communicator, a window or a place for a request: an int or a pointer. */
typedef void *handle;

static void *following(const char *name)
{
	void *function = dlsym(RTLD_NEXT, name);

	if (function == NULL) {
		fprintf(stderr, "mpi-recorder: no %s behind this library\n", name);
		abort();
	}
	return function;
}

static size_t bytes_of(int count, handle type)
{
	static int (*size)(handle, int *);
	int bytes = 0;

	if (size == NULL)
		size = (int (*)(handle, int *))following("MPI_Type_size");
	return size(type, &bytes) == 0 && count > 0 && bytes > 0 ? (size_t)count * (size_t)bytes : 0;
}

static size_t begin_transfer(const void *buffer, int count, handle type, const char *rights)
{
	size_t bytes = bytes_of(count, type);

	if (bytes >= least)
		line("use %#lx %lu %s\n", (unsigned long)(uintptr_t)buffer, (unsigned long)bytes, rights);
	return bytes;
}

#define TRANSFER(name, rights, buffer, count, type, types, ...)                                                   \
	{                                                                                                         \
		static int(*real) types;                                                                          \
		size_t bytes = begin_transfer(buffer, count, type, rights);                                       \
		int result;                                                                                       \
														  \
		if (real == NULL)                                                                                 \
			real = (int(*) types)following(name);                                                     \
		result = real(__VA_ARGS__);                                                                       \
		change("done", buffer, bytes);                                                                    \
		return result;                                                                                    \
	}

int MPI_Send(const void *b, int n, handle t, int to, int tag, handle c)
TRANSFER("MPI_Send", "r", b, n, t, (const void *, int, handle, int, int, handle), b, n, t, to, tag, c)

int MPI_Recv(void *b, int n, handle t, int from, int tag, handle c, handle status)
TRANSFER("MPI_Recv", "rw", b, n, t, (void *, int, handle, int, int, handle, handle), b, n, t, from, tag, c, status)

int MPI_Isend(const void *b, int n, handle t, int to, int tag, handle c, handle request)
TRANSFER("MPI_Isend", "r", b, n, t, (const void *, int, handle, int, int, handle, handle), b, n, t, to, tag, c, request)

int MPI_Irecv(void *b, int n, handle t, int from, int tag, handle c, handle request)
TRANSFER("MPI_Irecv", "rw", b, n, t, (void *, int, handle, int, int, handle, handle), b, n, t, from, tag, c, request)

int MPI_Put(const void *b, int n, handle t, int to, long at, int tn, handle tt, handle w)
TRANSFER("MPI_Put", "r", b, n, t, (const void *, int, handle, int, long, int, handle, handle), b, n, t, to, at, tn, tt, w)

int MPI_Get(void *b, int n, handle t, int from, long at, int tn, handle tt, handle w)
TRANSFER("MPI_Get", "rw", b, n, t, (void *, int, handle, int, long, int, handle, handle), b, n, t, from, at, tn, tt, w)
