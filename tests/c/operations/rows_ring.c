/*
 * Rows: io_uring. The kernel performs the requests in worker threads, which count as threads of the process and
 * stay a while: so these rows come last.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <linux/falloc.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)

/* Submits one request on a ring of its own and waits for its result. */
static enum verdict ring_submit(struct io_uring_sqe *request)
{
	struct io_uring_params parameters = { 0 };
	int fd = (int)syscall(SYS_io_uring_setup, 1, &parameters);
	size_t size;
	unsigned *array, *tail, *head;
	struct io_uring_cqe *results;
	char *ring;
	void *entries;
	int result;

	if (fd < 0)
		return skip("io_uring_setup: %s", strerror(errno));
	keep_fd(fd);
	size = parameters.sq_off.array + sizeof(unsigned) * parameters.sq_entries;
	if (size < parameters.cq_off.cqes + sizeof(*results) * parameters.cq_entries)
		size = parameters.cq_off.cqes + sizeof(*results) * parameters.cq_entries;
	ring = mmap(NULL, size, RW, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQ_RING);
	entries = mmap(NULL, PAGE, RW, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQES);
	must(ring != MAP_FAILED && entries != MAP_FAILED);
	memcpy(entries, request, sizeof(*request));
	array = (unsigned *)(ring + parameters.sq_off.array);
	tail = (unsigned *)(ring + parameters.sq_off.tail);
	head = (unsigned *)(ring + parameters.cq_off.head);
	results = (struct io_uring_cqe *)(ring + parameters.cq_off.cqes);
	array[0] = 0;
	__atomic_store_n(tail, 1, __ATOMIC_RELEASE);
	must(syscall(SYS_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
	result = results[*head & (parameters.cq_entries - 1)].res;
	munmap(ring, size);
	munmap(entries, PAGE);
	if (result == -EINVAL)
		return lacking("this request of io_uring");
	want(result >= 0);
	return RAN;
}

static enum verdict ring_madvise(void)
{
	struct io_uring_sqe request = {
		.opcode = IORING_OP_MADVISE,
		.addr = (uintptr_t)written(0, 0, 4),
		.len = 4 * PAGE,
		.fadvise_advice = MADV_DONTNEED,
	};

	watch(0, 4);
	return ring_submit(&request);
}

static enum verdict ring_fallocate(void)
{
	int fd = file_of(8);
	struct io_uring_sqe request = {
		.opcode = IORING_OP_FALLOCATE,
		.fd = fd,
		.off = 2 * PAGE,
		.addr = 2 * PAGE,
		.len = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
	};

	write_pages(map(0, 0, 8, RW, MAP_SHARED, fd, 0), 8);
	watch(0, 8);
	return ring_submit(&request);
}

static enum verdict ring_ftruncate(void)
{
	int fd = file_of(8);
	/* IORING_OP_FTRUNCATE (6.9) is younger than the headers. */
	struct io_uring_sqe request = { .opcode = 55, .fd = fd, .off = 4 * PAGE };

	write_pages(map(0, 0, 8, RW, MAP_SHARED, fd, 0), 8);
	watch(0, 8);
	return ring_submit(&request);
}

static const struct row rows[] = {
	{ .name = "io_uring MADVISE DONTNEED", .key = "io-uring-madvise", .class = GAP, .run = ring_madvise, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "io_uring FALLOCATE PUNCH_HOLE", .key = "io-uring", .class = GAP, .run = ring_fallocate, .expect = EVERYWHERE(EVENTS(1, A(2, 4))), .derived = 1 },
	{ .name = "io_uring FTRUNCATE", .key = "io-uring", .class = GAP, .run = ring_ftruncate, .expect = EVERYWHERE(EVENTS(2, A(4, 8), A(4, 8))), .derived = 1 },
};

TABLE(table_ring, "io_uring", rows);
