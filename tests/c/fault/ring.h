/*
 * A ring of io_uring by raw system calls, for one request at a time.
 */
#ifndef RING_H
#define RING_H

#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct ring {
	int fd;
	unsigned *tail, *head, *results_tail;
	unsigned mask, results_mask;
	struct io_uring_sqe *requests;
	struct io_uring_cqe *results;
	unsigned *array;
};

/* 0, or a negative errno. */
static inline int ring_open(struct ring *ring)
{
	struct io_uring_params p = { 0 };
	int rw = PROT_READ | PROT_WRITE;
	size_t size, results;
	char *memory;

	ring->fd = (int)syscall(SYS_io_uring_setup, 4, &p);
	if (ring->fd < 0)
		return -errno;
	size = p.sq_off.array + sizeof(unsigned) * p.sq_entries;
	results = p.cq_off.cqes + sizeof(struct io_uring_cqe) * p.cq_entries;
	if (size < results)
		size = results;
	memory = mmap(NULL, size, rw, MAP_SHARED | MAP_POPULATE, ring->fd, IORING_OFF_SQ_RING);
	ring->requests = mmap(NULL, p.sq_entries * sizeof(struct io_uring_sqe), rw, MAP_SHARED | MAP_POPULATE, ring->fd,
			      IORING_OFF_SQES);
	if (memory == MAP_FAILED || ring->requests == MAP_FAILED)
		return -errno;
	ring->array = (unsigned *)(memory + p.sq_off.array);
	ring->tail = (unsigned *)(memory + p.sq_off.tail);
	ring->mask = *(unsigned *)(memory + p.sq_off.ring_mask);
	ring->head = (unsigned *)(memory + p.cq_off.head);
	ring->results_tail = (unsigned *)(memory + p.cq_off.tail);
	ring->results_mask = *(unsigned *)(memory + p.cq_off.ring_mask);
	ring->results = (struct io_uring_cqe *)(memory + p.cq_off.cqes);
	return 0;
}

/* The request's result. */
static inline int ring_do(struct ring *ring, const struct io_uring_sqe *request)
{
	unsigned at = *ring->tail & ring->mask, head = *ring->head;
	int result;

	ring->requests[at] = *request;
	ring->array[at] = at;
	__atomic_store_n(ring->tail, *ring->tail + 1, __ATOMIC_RELEASE);
	do {
		result = (int)syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
	} while (result < 0 && errno == EINTR);
	if (result < 0)
		return -errno;
	result = ring->results[head & ring->results_mask].res;
	__atomic_store_n(ring->head, head + 1, __ATOMIC_RELEASE);
	return result;
}

static inline int ring_madvise(struct ring *ring, void *start, size_t length, int advice)
{
	struct io_uring_sqe request = {
		.opcode = IORING_OP_MADVISE,
		.addr = (uintptr_t)start,
		.len = (unsigned)length,
		.fadvise_advice = (unsigned)advice,
	};

	return ring_do(ring, &request);
}

#endif
