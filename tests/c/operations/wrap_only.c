/*
 * What a library that merely wraps libc's mapping calls makes of the device: a whole emulation in the process,
 * without a filter. Preloaded into the walk it shows that the walk tells such a build from one that sees
 * everything: calls that don't go through libc's symbols pass it by.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_REGIONS 8192
#define PAGE 4096UL

static struct region {
	uint64_t start, end, cookie, hint_start, hint_end;
	int used, queued, hinted;
	uint64_t ticket;
} regions[MAX_REGIONS];

static int device = -1, counter_fd = -1;
static volatile uint64_t *counter;
static uint64_t reported, tickets;

static void invalidate(const void *address, size_t length)
{
	uint64_t start = (uint64_t)address, end = (start + length + PAGE - 1) & ~(PAGE - 1);
	int hits = 0;

	if (counter == NULL || start >= end)
		return;
	for (int i = 0; i < MAX_REGIONS; i++) {
		struct region *r = &regions[i];

		if (!r->used || r->start >= end || start >= r->end)
			continue;
		hits = 1;
		if (r->queued) {
			r->hinted = 0;
			continue;
		}
		r->queued = r->hinted = 1;
		r->hint_start = start > r->start ? start : r->start;
		r->hint_end = end < r->end ? end : r->end;
		r->ticket = tickets;
	}
	tickets++;
	*counter += (uint64_t)hits;
}

static int open_device(int flags)
{
	int pair[2];

	if (device >= 0 || pipe2(pair, O_CLOEXEC) != 0)
		return -1;
	(void)flags;
	device = pair[0];
	counter_fd = memfd_create("counter", MFD_CLOEXEC);
	if (ftruncate(counter_fd, (off_t)PAGE) != 0)
		return -1;
	counter = (void *)syscall(SYS_mmap, NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, counter_fd, 0);
	return device;
}

int open(const char *path, int flags, ...)
{
	va_list rest;
	int mode;

	va_start(rest, flags);
	mode = va_arg(rest, int);
	va_end(rest);
	if (strcmp(path, "/dev/ummunotify") == 0)
		return open_device(flags);
	return (int)syscall(SYS_open, path, flags, mode);
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list rest;
	void *argument;

	va_start(rest, request);
	argument = va_arg(rest, void *);
	va_end(rest);
	if (fd != device || fd < 0)
		return (int)syscall(SYS_ioctl, fd, request, argument);
	if (request == UMMUNOTIFY_EXCHANGE_FEATURES) {
		*(uint32_t *)argument = 0;
		return 0;
	}
	for (int i = 0; i < MAX_REGIONS; i++) {
		struct region *r = &regions[i];

		if (request == UMMUNOTIFY_REGISTER_REGION && !r->used) {
			const struct ummunotify_register_ioctl *wanted = argument;

			*r = (struct region){ .start = wanted->start, .end = wanted->end, .cookie = wanted->user_cookie, .used = 1 };
			return 0;
		}
		if (request == UMMUNOTIFY_UNREGISTER_REGION && r->used && r->cookie == *(uint64_t *)argument) {
			r->used = r->queued = 0;
			return 0;
		}
	}
	errno = EINVAL;
	return -1;
}

/* The earliest queued region; within one invalidation by start, the later registered first. */
static struct region *next_queued(void)
{
	struct region *best = NULL;

	for (int i = MAX_REGIONS - 1; i >= 0; i--) {
		struct region *r = &regions[i];

		if (r->used && r->queued && (best == NULL || r->ticket < best->ticket || (r->ticket == best->ticket && r->start < best->start)))
			best = r;
	}
	return best;
}

ssize_t read(int fd, void *buffer, size_t size)
{
	struct ummunotify_event *events = buffer;
	size_t count = 0;
	struct region *r;

	if (fd != device || fd < 0)
		return syscall(SYS_read, fd, buffer, size);
	if (next_queued() == NULL && *counter == reported) {
		errno = EAGAIN;
		return -1;
	}
	while (count < size / sizeof(*events) && (r = next_queued()) != NULL) {
		events[count++] = (struct ummunotify_event){
			.flags = (uint32_t)r->hinted,
			.hint_start = r->hinted ? r->hint_start : r->start,
			.hint_end = r->hinted ? r->hint_end : r->end,
			.user_cookie_counter = r->cookie,
		};
		r->queued = 0;
	}
	if (count < size / sizeof(*events)) {
		reported = *counter;
		events[count++] = (struct ummunotify_event){ .type = UMMUNOTIFY_EVENT_TYPE_LAST, .user_cookie_counter = reported };
	}
	return (ssize_t)(count * sizeof(*events));
}

void *mmap(void *start, size_t length, int prot, int flags, int fd, off_t offset)
{
	if (fd == device && fd >= 0)
		fd = counter_fd;
	if ((flags & MAP_FIXED) && !(flags & MAP_FIXED_NOREPLACE) && ((uintptr_t)start & (PAGE - 1)) == 0)
		invalidate(start, length);
	return (void *)syscall(SYS_mmap, start, length, prot, flags, fd, offset);
}

int munmap(void *start, size_t length)
{
	if (((uintptr_t)start & (PAGE - 1)) == 0 && length < (1UL << 47))
		invalidate(start, length);
	return (int)syscall(SYS_munmap, start, length);
}

void *mremap(void *start, size_t old, size_t new, int flags, ...)
{
	va_list rest;
	void *to;

	va_start(rest, flags);
	to = va_arg(rest, void *);
	va_end(rest);
	if (flags & MREMAP_FIXED) {
		invalidate(to, new);
		invalidate(start, old);
		invalidate(start, old);
	} else if (new < old) {
		invalidate((char *)start + new, old - new);
	}
	return (void *)syscall(SYS_mremap, start, old, new, flags, to);
}

int mprotect(void *start, size_t length, int prot)
{
	if (((uintptr_t)start & (PAGE - 1)) == 0)
		invalidate(start, length);
	return (int)syscall(SYS_mprotect, start, length, prot);
}

int madvise(void *start, size_t length, int advice)
{
	if ((advice == MADV_DONTNEED || advice == MADV_FREE) && ((uintptr_t)start & (PAGE - 1)) == 0)
		invalidate(start, length);
	return (int)syscall(SYS_madvise, start, length, advice);
}
