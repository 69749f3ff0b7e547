/*
 * The operations walk: performs memory operations one at a time, each on memory that is registered with
 * /dev/ummunotify, and compares what the device reports with what recordings of real kernels say.
 *
 * A row prepares memory, calls watch() over it, and then performs its one operation. The walk reads the
 * device afterwards. The tables of rows_*.c hold what must have been reported.
 */
#ifndef WALK_H
#define WALK_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define PAGE 4096L
#define MIB_PAGES 256L
#define GIB_PAGES (1024 * MIB_PAGES)
#define HUGE_PAGES 512L

/* ---- expected values ---- */

/* Pages [start, end) of memory number `memory` (0: A, the row's main area; 1: C, its second one). */
struct span {
	int memory;
	long start, end;
};

/* What the recordings say of one operation: its invalidations, in their order. */
struct expect {
	int n;
	struct span spans[8];
};

/* Kernels that differ somewhere, named after the one that was recorded. */
enum kernel { LIKE_5_10, LIKE_6_1, LIKE_6_12, LIKE_7_3, KERNELS };

#define A(s, e) { 0, (s), (e) }
#define C(s, e) { 1, (s), (e) }
#define EVENTS(count, ...) { (count), { __VA_ARGS__ } }
#define NOTHING { 0, { { 0, 0, 0 } } }
/* The same on every kernel. */
#define EVERYWHERE(...) { __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__ }
/* Differs by kernel: 5.10, 6.1, 6.12, 7.3. */
#define BY_KERNEL(a, b, c, d) { a, b, c, d }

enum class {
	/* The very invalidations of the recording. */
	EXACT,
	/* At least one invalidation over every page given; more and wider is allowed. */
	COVERED,
	/* May be a named gap: the coverage table says whether. */
	GAP,
	/* No system call of the process causes it: an emulated device reports nothing, the module does. */
	BEYOND,
	/* As EXACT, but the module adds what it does on its own (the split of a huge page). */
	SPLIT,
};

/* LACKING: the kernel doesn't know the call. REFUSED: it refused it for this kind of
 * memory, and nothing is known. IMPOSSIBLE: there is no such operation on this kind of memory. */
enum verdict { RAN, SKIPPED, LACKING, REFUSED, IMPOSSIBLE };

struct row {
	const char *name;
	/* Its row of the emulator's coverage table. */
	const char *key;
	enum class class;
	enum verdict (*run)(void);
	/* EXACT, COVERED, GAP: what is reported. BEYOND, SPLIT: what the module reports. */
	struct expect expect[KERNELS];
	/* SPLIT: what an emulated device reports. */
	struct expect own;
	/* The order among several mappings of one file isn't specified. */
	int unordered;
	/* Follows from the specification's text; no recording holds its exact value. */
	int derived;
	/* The operation is made by a library: the same in every pass, so it runs in the first alone. */
	int once;
	/* The recorded value holds where mremap moves several mappings at once; else that of 6.12. */
	int moves_several;
	/* How often can't be told, on the module neither. */
	int loose;
	/* Nobody recorded a value: the comparison of two backends alone judges. */
	int unrecorded;
	/* A kernel that refuses with this errno may have acted, or not: more is allowed. */
	int refusal_covered;
};

struct table {
	const char *name;
	const struct row *rows;
	size_t count;
};

extern const struct table table_map, table_remap, table_protect, table_advise, table_file, table_disk,
	table_process, table_library, table_rare, table_entry, table_moved, table_sharing, table_ring;

/* Finds out what the rows of other entries need to know of the kernel; before the device is opened. */
void entry_probe(void);

/* Calls `each` for every operation on every kind of memory (rows_kinds.c). */
extern const struct table table_kinds;
void kinds_walk(void (*each)(const struct row *row));

#define TABLE(symbol, title, array) \
	const struct table symbol = { title, array, sizeof(array) / sizeof((array)[0]) }

/* ---- what the emulator claims to see (coverage.c) ---- */

enum sight { SEEN_EXACTLY, SEEN_COVERED, UNSEEN, SEEN_NEVER, SIGHTS };

const char *sight_name(enum sight sight);
/* Reads the table; without it, a module is walked. */
void coverage_read(const char *path);
enum sight coverage_of(const char *key);
/* What became of a row of the walk: not performed, and why; or performed. */
void coverage_skip(const char *key, const char *reason);
void coverage_performed(const char *key, int exactly, int reported, int by_module);
/* After a whole walk: says which rows of the table weren't put to the test; returns how many should have been. */
int coverage_finish(void);

/* ---- the device (device.c) ---- */

void device_open(void);
/* Registers regions over `pages` pages of memory number `memory` and two pages on either side. */
void watch(int memory, long pages);
/* As watch, in cells of `cell` pages: for areas of many pages. */
void watch_cells(int memory, long pages, long cell);
void watch_cells_at(int memory, void *base, long pages, long cell);
/* As watch, at any page-aligned address. */
void watch_at(int memory, void *base, long pages);
/* Exactly one region of `bytes` bytes. */
void watch_only(int memory, void *base, size_t bytes);
void device_forget_regions(void);

struct report {
	int ok;
	uint64_t n;
	/* What was reported, for people. */
	char text[400];
};

/* Reads the device until LAST and compares with `expect`; says every difference on stdout. */
struct report device_compare(const struct expect *expect, int exactly, int unordered);
/* The records of the last comparison, as the tables write addresses. */
void device_print_records(void);

/* ---- memory (area.c) ---- */

void area_next_slot(void);
void area_release(void);
/* Address of page `page` of memory number `memory`. */
char *at(int memory, long page);
/* Maps pages [page, page + pages) of a memory, which must be free; not touched. */
char *map(int memory, long page, long pages, int prot, int flags, int fd, off_t offset);
/* Anonymous private memory, untouched or written. */
char *untouched(int memory, long page, long pages);
char *written(int memory, long page, long pages);
void write_pages(void *start, long pages);
void read_pages(void *start, long pages);
/* Descriptors that are closed, and processes that are killed, when the row is over. */
int keep_fd(int fd);
pid_t keep_child(pid_t child);
void end_child(void);
/* A memfd or (in the disk table) a file of a disk file system, of that many pages, every page written. */
int file_of(long pages);
/* As file_of, but in memory as well it is a file with a path, which file_path names. */
int file_with_path(long pages);
const char *file_path(void);
void file_use_disk(int disk);
int file_is_disk(void);
/* A process that was there before the device was opened: no filter of an emulator reaches it. */
void other_start(void);
void other_punch(int fd, off_t offset, off_t length);

/* ---- calls (calls.c): by libc, by syscall(3), or by the instruction itself; in a program in Go, by its runtime ---- */

#ifdef WALK_IN_GO
enum way { BY_GO, WAYS, BY_LIBC, BY_SYSCALL, BY_INSTRUCTION };
#else
enum way { BY_LIBC, BY_SYSCALL, BY_INSTRUCTION, WAYS };
#endif
extern enum way way;

long kernel_call(long number, long a, long b, long c, long d, long e, long f);
void *do_mmap(void *start, size_t length, int prot, int flags, int fd, off_t offset);
int do_munmap(void *start, size_t length);
void *do_mremap(void *start, size_t old, size_t new, int flags, void *to);
int do_mprotect(void *start, size_t length, int prot);
int do_madvise(void *start, size_t length, int advice);
int do_brk(void *end);
/* Always by libc, if that does it. */
int set_brk(void *end);
int do_ftruncate(int fd, off_t length);
int do_truncate(const char *path, off_t length);
int do_fallocate(int fd, int mode, off_t offset, off_t length);
int do_open(const char *path, int flags);
void *do_shmat(int id, const void *start, int flags);
int do_shmdt(const void *start);
int do_mlock(const void *start, size_t length);
int do_munlock(const void *start, size_t length);
int do_msync(void *start, size_t length, int flags);
pid_t do_fork(void);

/* ---- the walk (walk.c) ---- */

enum verdict skip(const char *format, ...) __attribute__((format(printf, 1, 2)));
enum verdict lacking(const char *what);
/* The operation itself must have ended like this; says so and fails the row otherwise. */
#define want(condition) want_((condition), #condition)
int want_(int condition, const char *text);
/* Preparation must work: ends the walk otherwise. */
#define must(condition) must_((condition), #condition, __FILE__, __LINE__)
void must_(int condition, const char *text, const char *file, int line);
/* True where the judge runs: the real module. */
extern int judging;
/* Whether the current folder's files are never written back. */
int folder_is_in_memory(void);
/* True in a guest, whose memory may be poisoned and whose settings may be changed. */
int expendable(void);

/* Advice and calls that are younger than the headers. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define ADVICE_GUARD_INSTALL 102
#define ADVICE_GUARD_REMOVE 103
#define CALL_MSEAL 462

#endif
