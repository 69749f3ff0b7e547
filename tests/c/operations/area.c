/* Memory, files and children of a row. */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/*
 * Every row gets addresses that no row before it used, far from where the kernel places mappings by itself, so
 * that neighbours never merge with them and no page table is left over from another row. A and C begin at
 * multiples of 1 GiB.
 */
#define FIRST_SLOT 0x100000000000UL
#define SLOT_SIZE 0x800000000UL
#define MEMORY_DISTANCE 0x400000000UL
#define MEMORY_START 0x40000000UL

static uintptr_t slot = FIRST_SLOT - SLOT_SIZE;

static int fds[16];
static int fd_count;
static pid_t child;
static int use_disk;
static char path_of_file[64];

/* To and from the other process. */
static int other_ask[2], other_answer[2];

struct punch {
	int fd;
	off_t offset, length;
};

void area_next_slot(void)
{
	slot += SLOT_SIZE;
}

char *at(int memory, long page)
{
	return (char *)(slot + MEMORY_START + (uintptr_t)memory * MEMORY_DISTANCE) + page * PAGE;
}

char *map(int memory, long page, long pages, int prot, int flags, int fd, off_t offset)
{
	char *wanted = at(memory, page);
	char *got = mmap(wanted, (size_t)(pages * PAGE), prot, flags | MAP_FIXED_NOREPLACE, fd, offset);

	must(got == wanted);
	return got;
}

char *untouched(int memory, long page, long pages)
{
	return map(memory, page, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

char *written(int memory, long page, long pages)
{
	char *start = untouched(memory, page, pages);

	write_pages(start, pages);
	return start;
}

void write_pages(void *start, long pages)
{
	volatile char *p = start;

	for (long i = 0; i < pages; i++)
		p[i * PAGE] = (char)(i + 1);
}

void read_pages(void *start, long pages)
{
	volatile char *p = start;

	for (long i = 0; i < pages; i++)
		(void)p[i * PAGE];
}

int keep_fd(int fd)
{
	must(fd >= 0 && fd_count < (int)(sizeof(fds) / sizeof(fds[0])));
	fds[fd_count++] = fd;
	return fd;
}

pid_t keep_child(pid_t pid)
{
	must(pid > 0 && child == 0);
	child = pid;
	return pid;
}

void end_child(void)
{
	if (child == 0)
		return;
	kill(child, SIGKILL);
	while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
		;
	child = 0;
}

void area_release(void)
{
	end_child();
	/* Sealed memory stays where it is: nobody comes back to a slot. */
	munmap((void *)slot, SLOT_SIZE);
	while (fd_count > 0)
		close(fds[--fd_count]);
	if (path_of_file[0] != 0)
		unlink(path_of_file);
	path_of_file[0] = 0;
}

void file_use_disk(int disk)
{
	use_disk = disk;
}

int file_is_disk(void)
{
	return use_disk;
}

const char *file_path(void)
{
	return path_of_file;
}

static void fill(int fd, long pages)
{
	char page[PAGE];

	keep_fd(fd);
	memset(page, 7, sizeof(page));
	for (long i = 0; i < pages; i++)
		must(write(fd, page, sizeof(page)) == (ssize_t)sizeof(page));
	if (use_disk)
		must(fsync(fd) == 0);
}

int file_with_path(long pages)
{
	static int number;
	int fd;

	must(fd_count == 0);
	snprintf(path_of_file, sizeof(path_of_file), "%swalk-%d-%d", use_disk ? "" : "/dev/shm/", getpid(), number++);
	fd = open(path_of_file, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	fill(fd, pages);
	return fd;
}

int file_of(long pages)
{
	int fd;

	if (use_disk)
		return file_with_path(pages);
	must(fd_count == 0);
	fd = memfd_create("walk", MFD_CLOEXEC);
	fill(fd, pages);
	return fd;
}

/* Serves requests until the walk ends, which closes the pipe. */
static void other_serve(pid_t walk)
{
	struct punch request;
	char path[64];

	while (read(other_ask[0], &request, sizeof(request)) == (ssize_t)sizeof(request)) {
		int fd, result;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", walk, request.fd);
		fd = open(path, O_RDWR | O_CLOEXEC);
		result = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, request.offset, request.length);
		close(fd);
		if (write(other_answer[1], &result, sizeof(result)) != (ssize_t)sizeof(result))
			break;
	}
	_exit(0);
}

void other_start(void)
{
	pid_t walk = getpid();
	pid_t pid;

	must(pipe2(other_ask, O_CLOEXEC) == 0 && pipe2(other_answer, O_CLOEXEC) == 0);
	pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		close(other_ask[1]);
		other_serve(walk);
	}
	close(other_ask[0]);
	close(other_answer[1]);
}

void other_punch(int fd, off_t offset, off_t length)
{
	struct punch request = { fd, offset, length };
	int result;

	must(write(other_ask[1], &request, sizeof(request)) == (ssize_t)sizeof(request));
	must(read(other_answer[0], &result, sizeof(result)) == (ssize_t)sizeof(result) && result == 0);
}
