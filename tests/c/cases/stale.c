/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Silent corruption from a stale registration: ways to lose memory that some monitor didn't see. */
#define _GNU_SOURCE
#include "../fault/ring.h"
#include "cases.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

static uint64_t cookies, before;

/* Registers the range; what follows must be seen. */
static void begin(const void *start, size_t bytes)
{
	watch(start, bytes, ++cookies);
	before = *counter;
}

/* The counter has moved, and the region is reported; it is unregistered. */
static void end(const char *what)
{
	if (*counter <= before)
		FAIL("%s: the counter hasn't moved", what);
	if (!reported(cookies, NULL))
		FAIL("%s: not reported", what);
	unwatch(cookies);
	printf("%s: reported\n", what);
}

/* register, free, allocate until the address is back: the counter had moved before. */
static void address_returns(int argc, char **argv)
{
	unsigned long rounds = argc > 0 ? strtoul(argv[0], NULL, 10) : 500, returned = 0;

	device_open();
	for (unsigned long i = 0; i < rounds; i++) {
		size_t bytes = (33 + i % 5) * 8 * PAGE; /* above malloc's threshold for mappings at the start */
		char *block = malloc(bytes), *other[20] = { 0 };
		uintptr_t address = (uintptr_t)block;
		bool back = false;

		NEED(block);
		memset(block, 1, bytes);
		watch(block, bytes, i);
		before = *counter;
		free(block);
		for (int k = 0; k < 20 && !back; k++) {
			other[k] = malloc(bytes);
			back = (uintptr_t)other[k] == address;
			/* Only a block that came by a new mapping is other memory. */
			if (back && other[k][PAGE] == 0) {
				returned++;
				NEED(*counter > before && reported(i, NULL));
			}
		}
		for (int k = 0; k < 20; k++)
			free(other[k]);
		unwatch(i);
		reported(0, NULL);
	}
	for (unsigned long i = 0; i < rounds; i++) {
		char *memory = map(4 * PAGE), *again;

		begin(memory, 4 * PAGE);
		NEED(munmap(memory, 4 * PAGE) == 0);
		NEED(*counter > before);
		again = mmap(memory, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		returned += again == memory;
		NEED(again != MAP_FAILED && reported(cookies, NULL));
		unwatch(cookies);
		NEED(munmap(again, 4 * PAGE) == 0);
	}
	printf("%lu addresses came back\n", returned);
	NEED(returned > rounds / 2);
}

enum { MANY = 3000, AREA = 8192 };

static struct { size_t start, end; bool told; } many[MANY];

static void tell(const struct ummunotify_event *e)
{
	NEED(e->type == UMMUNOTIFY_EVENT_TYPE_INVAL && e->user_cookie_counter < MANY);
	NEED(!many[e->user_cookie_counter].told);
	many[e->user_cookie_counter].told = true;
}

/* Thousands of overlapping regions, ranges discarded across them: exactly those that were hit are reported. */
static void overlapping(int argc, char **argv)
{
	unsigned long rounds = argc > 0 ? strtoul(argv[0], NULL, 10) : 300, told = 0;
	char *area = map(AREA * PAGE);
	uint64_t state = 3;

	device_open();
	for (unsigned i = 0; i < MANY; i++) {
		many[i].start = random_number(&state) % AREA;
		many[i].end = many[i].start + 1 + random_number(&state) % (i % 10 ? 20 : 2000);
		watch(area + many[i].start * PAGE, (many[i].end - many[i].start) * PAGE, i);
	}
	for (unsigned long r = 0; r < rounds; r++) {
		size_t start = random_number(&state) % AREA, length = 1 + random_number(&state) % 64;
		size_t end = start + length < AREA ? start + length : AREA;

		if (r % 2) {
			NEED(munmap(area + start * PAGE, (end - start) * PAGE) == 0);
			NEED(mmap(area + start * PAGE, (end - start) * PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == area + start * PAGE);
		} else {
			NEED(madvise(area + start * PAGE, (end - start) * PAGE, MADV_DONTNEED) == 0);
		}
		reported(0, tell);
		for (unsigned i = 0; i < MANY; i++) {
			bool hit = many[i].start < end && start < many[i].end;

			if (many[i].told != hit)
				FAIL("round %lu: region %u: told %d, hit %d", r, i, many[i].told, hit);
			told += hit;
			many[i].told = false;
		}
	}
	printf("%lu reports\n", told);
}

static void blocks_and_libraries(int argc, char **argv)
{
	void *block, *handle;
	char *data;

	NEED(argc == 1);
	device_open();
	NEED(posix_memalign(&block, PAGE, 1 << 20) == 0);
	memset(block, 1, 1 << 20);
	begin(block, 1 << 20);
	free(block);
	end("free of a posix_memalign block");
	handle = dlopen(argv[0], RTLD_NOW);
	if (!handle)
		FAIL("dlopen: %s", dlerror());
	NEED((data = dlsym(handle, "plugin_data")));
	memset(data, 1, 3 * PAGE);
	begin(data, 3 * PAGE);
	NEED(dlclose(handle) == 0);
	end("dlclose");
}

/* Requests that no system call of this process carries out. */
static void requests_of_a_ring(int argc, char **argv)
{
	static struct ring ring;
	char *memory = map(4 * PAGE);
	int error;

	(void)argc, (void)argv;
	device_open();
	begin(memory, 2 * PAGE);
	if ((error = ring_open(&ring)) != 0)
		lacking(strerror(-error));
	NEED(ring_madvise(&ring, memory + PAGE, PAGE, MADV_DONTNEED) == 0);
	end("MADV_DONTNEED by a ring, registered before it");
	NEED(memory[PAGE] == 0);
	begin(memory + 2 * PAGE, 2 * PAGE);
	NEED(ring_madvise(&ring, memory, 4 * PAGE, MADV_DONTNEED) == 0);
	end("MADV_DONTNEED by a ring, registered after it");
	begin(memory, PAGE);
	NEED(ring_madvise(&ring, memory, PAGE, MADV_FREE) == 0);
	end("MADV_FREE by a ring");
}

static void taken_before(int argc, char **argv)
{
	int (*volatile own)(void *, size_t) = munmap;
	int (*next)(void *, size_t) = (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap");
	int (*libc)(void *, size_t) =
		(int (*)(void *, size_t))dlsym(dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD), "munmap");
	char *memory = map(3 * PAGE);

	(void)argc, (void)argv;
	NEED(next && libc);
	device_open();
	begin(memory, PAGE);
	NEED(own(memory, PAGE) == 0);
	end("a pointer");
	begin(memory + PAGE, PAGE);
	NEED(next(memory + PAGE, PAGE) == 0);
	end("dlsym(RTLD_NEXT)");
	begin(memory + 2 * PAGE, PAGE);
	NEED(libc(memory + 2 * PAGE, PAGE) == 0);
	end("dlsym in libc");
}

/* As a library that is linked statically would: an instruction of its own. */
static long raw(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return result;
}

static void raw_calls(int argc, char **argv)
{
	char *memory = map(4 * PAGE);

	(void)argc, (void)argv;
	device_open();
	begin(memory, PAGE);
	NEED(raw(SYS_munmap, (long)memory, PAGE, 0) == 0);
	end("munmap");
	begin(memory + PAGE, PAGE);
	NEED(raw(SYS_madvise, (long)memory + PAGE, PAGE, MADV_DONTNEED) == 0);
	end("madvise");
	begin(memory + 2 * PAGE, PAGE);
	NEED(raw(SYS_mprotect, (long)memory + 2 * PAGE, PAGE, PROT_READ) == 0);
	end("mprotect");
}

static void discarded(int argc, char **argv)
{
	volatile char *memory = map(PAGE);

	(void)argc, (void)argv;
	device_open();
	begin((void *)memory, PAGE);
	NEED(madvise((void *)memory, PAGE, MADV_DONTNEED) == 0 && memory[0] == 0);
	end("DONTNEED, and touched again");
}

static void heap_shrinks(int argc, char **argv)
{
	char *top = sbrk(16 * PAGE);

	(void)argc, (void)argv;
	NEED(top != (void *)-1);
	memset(top, 1, 16 * PAGE);
	device_open();
	top = (char *)(((uintptr_t)sbrk(0) - 8 * PAGE) & ~(PAGE - 1));
	begin(top, 8 * PAGE);
	NEED(brk(top + PAGE) == 0 && brk(top + 8 * PAGE) == 0 && top[4 * PAGE] == 0);
	end("brk that shrinks and grows");
}

static void replaced(int argc, char **argv)
{
	char *memory = map(4 * PAGE), *source = map(PAGE);
	int segment = shmget(IPC_PRIVATE, PAGE, 0600);

	(void)argc, (void)argv;
	NEED(segment >= 0);
	device_open();
	begin(memory, PAGE);
	NEED(shmat(segment, memory, SHM_REMAP) == memory);
	NEED(shmctl(segment, IPC_RMID, NULL) == 0);
	end("shmat SHM_REMAP");
	begin(memory, PAGE);
	NEED(shmdt(memory) == 0);
	end("shmdt");
	begin(memory + PAGE, PAGE);
	NEED(mmap(memory + PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory + PAGE);
	end("mmap MAP_FIXED");
	begin(memory + 2 * PAGE, PAGE);
	NEED(mremap(source, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, memory + 2 * PAGE) == memory + 2 * PAGE);
	end("mremap onto it");
}

static void loaded_later(int argc, char **argv)
{
	NEED(argc == 1);
	device_open();
	for (int own_namespace = 0; own_namespace < 2; own_namespace++) {
		void *handle = own_namespace ? dlmopen(LM_ID_NEWLM, argv[0], RTLD_NOW) : dlopen(argv[0], RTLD_NOW);
		int (*unmap)(void *, unsigned long);
		char *memory = map(PAGE);

		if (!handle)
			FAIL("dlopen: %s", dlerror());
		NEED((unmap = (int (*)(void *, unsigned long))dlsym(handle, "plugin_unmap")));
		begin(memory, PAGE);
		NEED(unmap(memory, PAGE) == 0);
		end(own_namespace ? "a library in a namespace of its own" : "a library loaded later");
	}
}

static void unseen_elsewhere(int argc, char **argv)
{
	char *memory = map(8 * PAGE), *shared;
	int file = memfd_create("file", MFD_CLOEXEC), self;
	struct iovec piece = { memory + 3 * PAGE, PAGE };

	(void)argc, (void)argv;
	NEED(file >= 0 && ftruncate(file, 8 * PAGE) == 0);
	shared = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	NEED(shared != MAP_FAILED);
	memset(shared, 1, 8 * PAGE);
	device_open();
	begin(shared + PAGE, PAGE);
	NEED(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, PAGE) == 0 && shared[PAGE] == 0);
	end("punch hole");
	begin(shared + 6 * PAGE, 2 * PAGE);
	NEED(ftruncate(file, 4 * PAGE) == 0);
	end("ftruncate");
	begin(memory, PAGE);
	if (madvise(memory, PAGE, MADV_DONTNEED_LOCKED) == 0)
		end("DONTNEED_LOCKED");
	else
		unwatch(cookies), printf("DONTNEED_LOCKED: not in this kernel\n");
	begin(memory + PAGE, PAGE);
	if (madvise(memory + PAGE, PAGE, MADV_GUARD_INSTALL) == 0)
		end("GUARD_INSTALL");
	else
		unwatch(cookies), printf("GUARD_INSTALL: not in this kernel\n");
	NEED((self = (int)syscall(SYS_pidfd_open, getpid(), 0)) >= 0);
	begin(memory + 3 * PAGE, PAGE);
	if (syscall(SYS_process_madvise, self, &piece, 1, MADV_DONTNEED, 0) == (long)PAGE)
		end("process_madvise on itself");
	else
		unwatch(cookies), printf("process_madvise DONTNEED: not in this kernel\n");
}

const struct named_case stale_cases[] = {
	{ "raw_calls", raw_calls },
	{ "address_returns", address_returns },
	{ "overlapping", overlapping },
	{ "blocks_and_libraries", blocks_and_libraries },
	{ "requests_of_a_ring", requests_of_a_ring },
	{ "taken_before", taken_before },
	{ "discarded", discarded },
	{ "heap_shrinks", heap_shrinks },
	{ "replaced", replaced },
	{ "loaded_later", loaded_later },
	{ "unseen_elsewhere", unseen_elsewhere },
	{ NULL, NULL },
};
