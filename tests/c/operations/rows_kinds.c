/*
 * Every operation on every kind of memory. An area has four units: pages, or huge pages. What a cell must report is
 * what the specification says of the operation in general (operations.md, operations-*.txt); where it says nothing
 * of that kind of memory, the cell is unrecorded, and the module alone judges it.
 *
 * Not here: what only one kind of memory has (brk, shmdt), and what depends on pages' history (write faults).
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <linux/falloc.h>
#include <linux/mempolicy.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define UNITS 4
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

enum trait {
	SHARED = 1,
	/* A file behind it, whose descriptor is `file`. */
	FILED = 2,
	DISK = 4,
	HUGETLB = 8,
	TRANSPARENT = 16,
	UNTOUCHED = 32,
	/* Read only, so far: a write makes a copy. */
	READ = 64,
	SYSV = 128,
	/* Part of a mapping that goes on beside it. */
	INSIDE = 256,
	ANY = ~0,
};

static char *base;
static int file;
/* Pages of a unit. */
static long unit;

static size_t bytes(long units)
{
	return (size_t)(units * unit * PAGE);
}

static char *unit_at(long number)
{
	return base + bytes(number);
}

/* ---- kinds of memory: each puts an area at `base` ---- */

static void touch(void)
{
	for (long i = 0; i < UNITS; i++)
		write_pages(unit_at(i), unit == HUGE_PAGES ? 1 : unit);
}

static enum verdict place(int flags, int fd)
{
	base = mmap(at(0, 0), bytes(UNITS), RW, flags | MAP_FIXED_NOREPLACE, fd, 0);
	return base == at(0, 0) ? RAN : skip("mmap: %s", strerror(errno));
}

static enum verdict place_and_touch(int flags, int fd)
{
	enum verdict verdict = place(flags, fd);

	if (verdict == RAN)
		touch();
	return verdict;
}

static enum verdict make_untouched(void) { return place(ANON, -1); }
static enum verdict make_written(void) { return place_and_touch(ANON, -1); }
static enum verdict make_shared(void) { return place_and_touch(MAP_SHARED | MAP_ANONYMOUS, -1); }

static enum verdict make_heap(void)
{
	/* Never given back: the addresses are as fresh as a slot's. */
	base = (char *)(((uintptr_t)sbrk(0) + 3 * PAGE) & ~(uintptr_t)(PAGE - 1));
	must(set_brk(base + bytes(UNITS)) == 0);
	touch();
	return RAN;
}

/* Pages that the stack has grown to, far below what anybody uses; deeper each time. */
static enum verdict make_stack(void)
{
	static uintptr_t next;
	char here;

	if (next == 0)
		next = ((uintptr_t)&here & ~(uintptr_t)(PAGE - 1)) - 256 * PAGE;
	next -= 16 * PAGE;
	base = (char *)next;
	for (long i = UNITS + 4; i >= -2; i--)
		write_pages(base + i * PAGE, 1);
	return RAN;
}

/* The stack must have no hole. */
static void restore_stack(void)
{
	must(mmap(base, bytes(UNITS), RW, ANON | MAP_FIXED | MAP_GROWSDOWN | MAP_STACK, -1, 0) == base);
}

static enum verdict make_file_shared(void)
{
	enum verdict verdict;

	file = file_of(UNITS);
	verdict = place_and_touch(MAP_SHARED, file);
	/* Nothing is left to be written back. */
	if (verdict == RAN && file_is_disk())
		must(msync(base, bytes(UNITS), MS_SYNC) == 0);
	return verdict;
}

static enum verdict make_file_private(void)
{
	file = file_of(UNITS);
	return place_and_touch(MAP_PRIVATE, file);
}

static enum verdict make_file_private_read(void)
{
	enum verdict verdict;

	file = file_of(UNITS);
	verdict = place(MAP_PRIVATE, file);
	if (verdict == RAN)
		read_pages(base, UNITS);
	return verdict;
}

static enum verdict make_sysv(void)
{
	int id = shmget(IPC_PRIVATE, bytes(UNITS), IPC_CREAT | 0600);

	must(id >= 0);
	base = shmat(id, at(0, 0), 0);
	must(base == at(0, 0) && shmctl(id, IPC_RMID, NULL) == 0);
	touch();
	return RAN;
}

static enum verdict make_hugetlb(void)
{
	if (place(ANON | MAP_HUGETLB, -1) != RAN)
		return skip("4 huge pages can't be had (vm.nr_hugepages)");
	touch();
	return RAN;
}

static enum verdict make_hugetlb_file(void)
{
	file = memfd_create("walk-huge", MFD_CLOEXEC | MFD_HUGETLB);
	if (file < 0)
		return skip("memfd_create MFD_HUGETLB: %s", strerror(errno));
	keep_fd(file);
	if (ftruncate(file, (off_t)bytes(UNITS)) != 0 || place(MAP_SHARED, file) != RAN)
		return skip("4 huge pages can't be had (vm.nr_hugepages)");
	touch();
	return RAN;
}

static enum verdict make_transparent(void)
{
	char line[128];
	long kib = 0;
	FILE *maps;

	must(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0 && place(ANON, -1) == RAN);
	if (madvise(base, bytes(UNITS), MADV_HUGEPAGE) == 0)
		touch();
	must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	maps = fopen("/proc/self/smaps_rollup", "re");
	while (maps != NULL && fgets(line, sizeof(line), maps) != NULL)
		sscanf(line, "AnonHugePages: %ld kB", &kib);
	if (maps != NULL)
		fclose(maps);
	return kib * 1024 >= (long)bytes(UNITS) ? RAN : skip("4 transparent huge pages can't be had");
}

static const struct kind {
	const char *name;
	int traits;
	enum verdict (*make)(void);
	void (*restore)(void);
} kinds[] = {
	{ "anonymous", 0, make_written, NULL },
	{ "anonymous, untouched", UNTOUCHED, make_untouched, NULL },
	{ "anonymous, shared", SHARED, make_shared, NULL },
	{ "heap", INSIDE, make_heap, NULL },
	{ "stack", INSIDE, make_stack, restore_stack },
	{ "memfd, shared", SHARED | FILED, make_file_shared, NULL },
	{ "memfd, private, written", FILED, make_file_private, NULL },
	{ "memfd, private, read", FILED | READ, make_file_private_read, NULL },
	{ "file, shared", SHARED | FILED | DISK, make_file_shared, NULL },
	{ "file, private, written", FILED | DISK, make_file_private, NULL },
	{ "file, private, read", FILED | DISK | READ, make_file_private_read, NULL },
	{ "SysV", SHARED | SYSV, make_sysv, NULL },
	{ "hugetlb", HUGETLB, make_hugetlb, NULL },
	{ "hugetlb memfd, shared", SHARED | FILED | HUGETLB, make_hugetlb_file, NULL },
	{ "huge page (THP)", TRANSPARENT, make_transparent, NULL },
};

/* ---- operations: each returns 0 or -1 with errno ---- */

static int status(const void *result) { return result == MAP_FAILED ? -1 : 0; }

static int op_munmap(void) { return do_munmap(base, bytes(UNITS)); }
static int op_munmap_unit(void) { return do_munmap(unit_at(1), bytes(1)); }
static int op_map_fixed(void) { return status(do_mmap(base, bytes(UNITS), RW, ANON | MAP_FIXED, -1, 0)); }

static int op_move(void)
{
	return status(do_mremap(base, bytes(UNITS), bytes(UNITS), MREMAP_MAYMOVE | MREMAP_FIXED, at(1, 0)));
}

static int op_move_dontunmap(void)
{
	int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;

	return status(do_mremap(base, bytes(UNITS), bytes(UNITS), flags, at(1, 0)));
}

static int op_shrink(void) { return status(do_mremap(base, bytes(UNITS), bytes(2), 0, NULL)); }
static int op_mprotect(void) { return do_mprotect(base, bytes(UNITS), PROT_READ); }
static int op_mprotect_unit(void) { return do_mprotect(unit_at(1), bytes(1), PROT_READ); }
static int op_dontneed(void) { return do_madvise(base, bytes(UNITS), MADV_DONTNEED); }
static int op_dontneed_unit(void) { return do_madvise(unit_at(1), bytes(1), MADV_DONTNEED); }
static int op_dontneed_locked(void) { return do_madvise(base, bytes(UNITS), MADV_DONTNEED_LOCKED); }
static int op_free(void) { return do_madvise(base, bytes(UNITS), MADV_FREE); }
static int op_remove(void) { return do_madvise(base, bytes(UNITS), MADV_REMOVE); }
static int op_pageout(void) { return do_madvise(base, bytes(UNITS), MADV_PAGEOUT); }
static int op_guard(void) { return do_madvise(base, bytes(UNITS), ADVICE_GUARD_INSTALL); }
static int op_cold(void) { return do_madvise(base, bytes(UNITS), MADV_COLD); }
static int op_mlock(void) { return do_mlock(base, bytes(UNITS)); }
static int op_msync(void) { return do_msync(base, bytes(UNITS), MS_SYNC); }

static int op_punch(void)
{
	return do_fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)bytes(1), (off_t)bytes(2));
}

static int op_truncate(void) { return do_ftruncate(file, (off_t)bytes(2)); }

static int op_bind(void)
{
	unsigned long mask = 2;

	return (int)kernel_call(SYS_mbind, (long)base, (long)bytes(UNITS), MPOL_BIND, (long)&mask, 64, MPOL_MF_MOVE);
}

static int op_fork(void)
{
	pid_t pid = do_fork();

	if (pid == 0) {
		for (;;)
			kernel_call(SYS_pause, 0, 0, 0, 0, 0, 0);
	}
	if (pid > 0)
		keep_child(pid);
	return pid > 0 ? 0 : -1;
}

#define ALL_UNITS EVERYWHERE(EVENTS(1, A(0, 4)))
#define UNIT_1 EVERYWHERE(EVENTS(1, A(1, 2)))
/* Up to 6.1 the kernel announces that twice for hugetlb memory. */
#define TWICE_TO_6_1(s, e) BY_KERNEL(EVENTS(2, A(s, e), A(s, e)), EVENTS(2, A(s, e), A(s, e)), EVENTS(1, A(s, e)), EVENTS(1, A(s, e)))

static const struct operation {
	const char *name, *key;
	enum class class;
	int (*act)(void);
	/* Traits of which the memory must have all; what it is to have, for people. */
	int needs;
	const char *lack;
	/* Kinds of which nothing is recorded: those with one of these traits. */
	int unrecorded;
	/* In units. */
	struct expect expect[KERNELS];
	/* The same for hugetlb memory, where that is another. */
	struct expect hugetlb[KERNELS];
} operations[] = {
	{ "munmap", "munmap", EXACT, op_munmap, 0, NULL, 0, ALL_UNITS, TWICE_TO_6_1(0, 4) },
	{ "munmap of one unit", "munmap", EXACT, op_munmap_unit, 0, NULL, 0, UNIT_1, TWICE_TO_6_1(1, 2) },
	{ "MAP_FIXED over it", "map-fixed", EXACT, op_map_fixed, 0, NULL, 0, ALL_UNITS, TWICE_TO_6_1(0, 4) },
	{ "mremap that moves", "mremap", EXACT, op_move, 0, NULL, HUGETLB, EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))), { NOTHING } },
	{ "mremap DONTUNMAP", "mremap", EXACT, op_move_dontunmap, 0, NULL, HUGETLB, ALL_UNITS, { NOTHING } },
	{ "mremap that shrinks", "mremap", EXACT, op_shrink, 0, NULL, HUGETLB, EVERYWHERE(EVENTS(1, A(2, 4))), { NOTHING } },
	{ "mprotect", "mprotect", EXACT, op_mprotect, 0, NULL, 0, ALL_UNITS, ALL_UNITS },
	{ "mprotect of one unit", "mprotect", EXACT, op_mprotect_unit, 0, NULL, 0, UNIT_1, UNIT_1 },
	{ "MADV_DONTNEED", "madvise-drop", EXACT, op_dontneed, 0, NULL, 0, ALL_UNITS, TWICE_TO_6_1(0, 4) },
	{ "MADV_DONTNEED of one unit", "madvise-drop", EXACT, op_dontneed_unit, 0, NULL, 0, UNIT_1, TWICE_TO_6_1(1, 2) },
	{ "MADV_DONTNEED_LOCKED", "madvise-drop", EXACT, op_dontneed_locked, 0, NULL, HUGETLB, ALL_UNITS, { NOTHING } },
	{ "MADV_FREE", "madvise-drop", EXACT, op_free, 0, NULL, 0, ALL_UNITS, { NOTHING } },
	{ "MADV_REMOVE", "remove", EXACT, op_remove, SHARED, "a shared mapping", HUGETLB, ALL_UNITS, { NOTHING } },
	{ "PUNCH_HOLE", "remove", EXACT, op_punch, FILED, "a file", HUGETLB, EVERYWHERE(EVENTS(1, A(1, 3))), { NOTHING } },
	{ "ftruncate", "truncate", EXACT, op_truncate, FILED, "a file", 0, EVERYWHERE(EVENTS(2, A(2, 4), A(2, 4))),
	  EVERYWHERE(EVENTS(1, A(2, 4))) },
	{ "fork", "fork", COVERED, op_fork, 0, NULL, HUGETLB, ALL_UNITS, { NOTHING } },
	{ "MADV_PAGEOUT", "pageout", COVERED, op_pageout, 0, NULL, ANY, { NOTHING }, { NOTHING } },
	{ "MADV_GUARD_INSTALL", "guard", COVERED, op_guard, 0, NULL, ANY, { NOTHING }, { NOTHING } },
	{ "mbind MOVE to the other node", "numa", COVERED, op_bind, 0, NULL, ANY, { NOTHING }, { NOTHING } },
	{ "MADV_COLD", "nothing", EXACT, op_cold, 0, NULL, HUGETLB, EVERYWHERE(NOTHING), { NOTHING } },
	{ "mlock", "nothing", EXACT, op_mlock, 0, NULL, 0, EVERYWHERE(NOTHING), EVERYWHERE(NOTHING) },
	{ "msync", "nothing", EXACT, op_msync, SHARED, "a shared mapping", HUGETLB, EVERYWHERE(NOTHING), { NOTHING } },
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- the cells ---- */

static const struct kind *kind;
static const struct operation *operation;
/* What the cell left to be repaired. */
static int made;

static enum verdict cell(void)
{
	enum verdict verdict;

	unit = kind->traits & (HUGETLB | TRANSPARENT) ? HUGE_PAGES : 1;
	file = -1;
	if ((kind->traits & operation->needs) != operation->needs && !(operation->act == op_remove && kind->traits & SYSV))
		return skip("it takes %s", operation->lack), IMPOSSIBLE;
	if (kind->traits & DISK && folder_is_in_memory())
		return skip("the current folder isn't on a disk file system");
	verdict = kind->make();
	if (verdict != RAN)
		return verdict;
	made = 1;
	watch_cells_at(0, base, UNITS * unit, unit);
	if (operation->act == op_move || operation->act == op_move_dontunmap)
		watch_cells(1, UNITS * unit, unit);
	if (operation->act() == 0)
		return RAN;
	skip("refused: %s", strerror(errno));
	return REFUSED;
}

static void expect_everywhere(struct row *row, struct expect expect)
{
	for (int i = 0; i < KERNELS; i++)
		row->expect[i] = expect;
}

/* Where the general rule has an exception. */
static void refine(struct row *row)
{
	int traits = kind->traits;

	if (traits & DISK && strcmp(row->key, "remove") == 0) {
		row->key = "remove-disk";
		row->class = COVERED;
		row->derived = 1;
	}
	/* Without any page table for its GiB the kernel says nothing, and who asks from outside can't know. */
	if (traits & UNTOUCHED && strcmp(row->key, "mprotect") == 0) {
		row->key = "mprotect-wide";
		row->class = COVERED;
		expect_everywhere(row, (struct expect)NOTHING);
	}
	/* Locking makes the copies that a write would. */
	if (traits & READ && operation->act == op_mlock) {
		row->key = "cow";
		row->class = BEYOND;
		expect_everywhere(row, (struct expect)EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)));
	}
	if (operation->act != op_fork)
		return;
	if (traits & SHARED) {
		row->key = "fork-spared";
		row->class = EXACT;
	}
	if (traits & (SHARED | UNTOUCHED | READ))
		expect_everywhere(row, (struct expect)NOTHING);
	/* The whole mapping, which is larger. */
	if (traits & INSIDE)
		row->derived = 1;
}

static void walk_cell(void (*each)(const struct row *row))
{
	char name[80];
	int huge = kind->traits & HUGETLB;
	struct row row = {
		.name = name,
		.key = operation->key,
		.class = operation->class,
		.run = cell,
		.once = 1,
		.unrecorded = operation->unrecorded == ANY || (operation->unrecorded & kind->traits) != 0,
	};
	long scale = kind->traits & (HUGETLB | TRANSPARENT) ? HUGE_PAGES : 1;

	snprintf(name, sizeof(name), "%s | %s", operation->name, kind->name);
	for (int i = 0; i < KERNELS; i++) {
		row.expect[i] = huge && !row.unrecorded ? operation->hugetlb[i] : operation->expect[i];
		for (int k = 0; k < row.expect[i].n; k++) {
			row.expect[i].spans[k].start *= scale;
			row.expect[i].spans[k].end *= scale;
		}
	}
	refine(&row);
	file_use_disk((kind->traits & DISK) != 0);
	made = 0;
	each(&row);
	if (made && kind->restore != NULL)
		kind->restore();
	file_use_disk(0);
}

void kinds_walk(void (*each)(const struct row *row))
{
	if (way != 0)
		return;
	for (size_t k = 0; k < COUNT(kinds); k++) {
		kind = &kinds[k];
		for (size_t i = 0; i < COUNT(operations); i++) {
			operation = &operations[i];
			walk_cell(each);
		}
	}
}

const struct table table_kinds = { "kinds of memory", NULL, 0 };
