/*
 * Rows: files. The same functions serve two tables: memory files (tmpfs), and files of a disk file system,
 * where punching may add the write-back of dirty pages and is therefore only covered.
 * Values: operations-*.txt ("memfd / file", "dirty-tracking file system"), corners-*.txt.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)
#define PUNCH (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)

static char *shared(int memory, long page, long pages, int fd, long file_page)
{
	char *start = map(memory, page, pages, RW, MAP_SHARED, fd, file_page * PAGE);

	write_pages(start, pages);
	/* Clean pages, where there is a disk: nothing is left to be written back in the middle of a row. */
	if (file_is_disk())
		must(msync(start, (size_t)(pages * PAGE), MS_SYNC) == 0);
	return start;
}

static enum verdict shrink(long mapped, off_t to)
{
	int fd = file_of(mapped);

	shared(0, 0, mapped, fd, 0);
	watch(0, mapped);
	want(do_ftruncate(fd, to) == 0);
	return RAN;
}

static enum verdict shrink_8_to_4(void) { return shrink(8, 4 * PAGE); }
static enum verdict shrink_to_0(void) { return shrink(4, 0); }
static enum verdict same_size(void) { return shrink(4, 4 * PAGE); }
static enum verdict inside_page(void) { return shrink(2, 2 * PAGE - 100); }
static enum verdict shrink_unrounded(void) { return shrink(4, 2 * PAGE + 100); }

static enum verdict grow(void)
{
	int fd = file_of(4);

	map(0, 0, 8, RW, MAP_SHARED, fd, 0);
	write_pages(at(0, 0), 4);
	watch(0, 8);
	want(do_ftruncate(fd, 8 * PAGE) == 0);
	return RAN;
}

static enum verdict shrink_untouched(void)
{
	int fd = file_of(8);

	map(0, 0, 8, RW, MAP_SHARED, fd, 0);
	write_pages(at(0, 0), 4);
	watch(0, 8);
	want(do_ftruncate(fd, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict shrink_mapped_from_middle(void)
{
	int fd = file_of(8);

	shared(0, 0, 6, fd, 2);
	watch(0, 6);
	want(do_ftruncate(fd, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict shrink_mapped_twice(void)
{
	int fd = file_of(4);

	shared(0, 0, 4, fd, 0);
	shared(1, 0, 4, fd, 0);
	watch(0, 4);
	watch(1, 4);
	want(do_ftruncate(fd, 2 * PAGE) == 0);
	return RAN;
}

static enum verdict shrink_private(void)
{
	int fd = file_of(4);
	char *a = map(0, 0, 4, RW, MAP_PRIVATE, fd, 0);

	read_pages(a, 4);
	write_pages(a, 4);
	watch(0, 4);
	want(do_ftruncate(fd, 0) == 0);
	return RAN;
}

static enum verdict truncate_by_path(void)
{
	int fd = file_with_path(4);

	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(do_truncate(file_path(), 2 * PAGE) == 0);
	return RAN;
}

/* A path that means another file to whoever looks at it from outside. */
static enum verdict truncate_by_own_descriptor(void)
{
	int fd = file_of(4);
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(do_truncate(path, 2 * PAGE) == 0);
	return RAN;
}

static enum verdict truncate_refused(void)
{
	int fd = file_of(4);

	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(do_ftruncate(fd, -1) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict open_truncating(long pages, int twice, int by)
{
	int fd = file_with_path(pages), again;
	struct open_how how = { .flags = O_RDWR | O_TRUNC };

	if (pages > 0)
		shared(0, 0, pages, fd, 0);
	else
		map(0, 0, 4, RW, MAP_SHARED, fd, 0);
	if (twice)
		shared(1, 0, pages, fd, 0);
	watch(0, 4);
	if (twice)
		watch(1, 4);
	if (by == SYS_openat2)
		again = (int)kernel_call(SYS_openat2, AT_FDCWD, (long)file_path(), (long)&how, sizeof(how), 0, 0);
	else if (by == SYS_openat)
		again = (int)kernel_call(SYS_openat, AT_FDCWD, (long)file_path(), O_RDWR | O_TRUNC, 0, 0, 0);
	else if (by == SYS_creat)
		again = way == BY_LIBC ? creat(file_path(), 0600) : (int)kernel_call(SYS_creat, (long)file_path(), 0600, 0, 0, 0, 0);
	else
		again = do_open(file_path(), O_RDWR | O_TRUNC);
	want(again >= 0);
	if (again >= 0)
		keep_fd(again);
	return RAN;
}

static enum verdict open_empty_ext4(void)
{
	struct statfs about;

	must(statfs(".", &about) == 0);
	return about.f_type == 0xef53 ? open_truncating(0, 0, SYS_open) : skip("only ext4 was looked at");
}

static enum verdict open_twice_mapped(void) { return open_truncating(4, 1, SYS_open); }
static enum verdict open_mapped(void) { return open_truncating(4, 0, SYS_open); }
static enum verdict open_empty(void) { return open_truncating(0, 0, SYS_open); }
static enum verdict openat_mapped(void) { return open_truncating(4, 0, SYS_openat); }
static enum verdict openat2_mapped(void) { return open_truncating(4, 0, SYS_openat2); }
static enum verdict creat_mapped(void) { return open_truncating(4, 0, SYS_creat); }

static enum verdict open_read_only(void)
{
	int fd = file_with_path(4);

	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	keep_fd(do_open(file_path(), O_RDONLY));
	return RAN;
}

static enum verdict allocate(int mode, off_t offset, off_t length)
{
	int fd = file_of(8);

	shared(0, 0, 8, fd, 0);
	watch(0, 8);
	if (do_fallocate(fd, mode, offset, length) != 0)
		return errno == EOPNOTSUPP ? skip("this file system doesn't do that") : (want(!"fallocate failed"), RAN);
	return RAN;
}

static enum verdict punch(void) { return allocate(PUNCH, 2 * PAGE, 2 * PAGE); }
static enum verdict punch_unaligned(void) { return allocate(PUNCH, 2 * PAGE + 2048, 2 * PAGE); }
static enum verdict punch_within_page(void) { return allocate(PUNCH, 2 * PAGE + 100, 100); }
static enum verdict allocate_plain(void) { return allocate(0, 0, 8 * PAGE); }
static enum verdict allocate_keep_size(void) { return allocate(FALLOC_FL_KEEP_SIZE, 0, 16 * PAGE); }
static enum verdict zero_range(void) { return allocate(FALLOC_FL_ZERO_RANGE, 2 * PAGE, 2 * PAGE); }
static enum verdict collapse_range(void) { return allocate(FALLOC_FL_COLLAPSE_RANGE, 2 * PAGE, 2 * PAGE); }
static enum verdict insert_range(void) { return allocate(FALLOC_FL_INSERT_RANGE, 2 * PAGE, 2 * PAGE); }

static enum verdict punch_empty(void)
{
	int fd = file_of(8);

	shared(0, 0, 8, fd, 0);
	must(fallocate(fd, PUNCH, 2 * PAGE, 2 * PAGE) == 0);
	watch(0, 8);
	want(do_fallocate(fd, PUNCH, 2 * PAGE, 2 * PAGE) == 0);
	return RAN;
}

static enum verdict punch_bad_descriptor(void)
{
	shared(0, 0, 8, file_of(8), 0);
	watch(0, 8);
	want(do_fallocate(999, PUNCH, 2 * PAGE, 2 * PAGE) == -1 && errno == EBADF);
	return RAN;
}

static enum verdict punch_twice_mapped(void)
{
	int fd = file_of(4);

	shared(0, 0, 4, fd, 0);
	shared(1, 0, 4, fd, 0);
	watch(0, 4);
	watch(1, 4);
	want(do_fallocate(fd, PUNCH, 0, 2 * PAGE) == 0);
	return RAN;
}

static enum verdict punch_three(void)
{
	int fd = file_of(6);
	char *a = shared(0, 0, 6, fd, 0);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, PROT_READ) == 0);
	watch(0, 6);
	want(do_fallocate(fd, PUNCH, 0, 6 * PAGE) == 0);
	return RAN;
}

static enum verdict punch_other_file(void)
{
	int other = memfd_create("other", MFD_CLOEXEC);
	int fd = file_of(4);

	keep_fd(other);
	must(ftruncate(other, 4 * PAGE) == 0);
	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(do_fallocate(other, PUNCH, 0, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict punch_by_other_process(void)
{
	int fd = file_of(8);

	shared(0, 0, 8, fd, 0);
	watch(0, 8);
	other_punch(fd, 4 * PAGE, 2 * PAGE);
	return RAN;
}

static enum verdict remove_shared(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_REMOVE) == 0);
	return RAN;
}

static enum verdict remove_empty(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	must(madvise(a, 4 * PAGE, MADV_REMOVE) == 0);
	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_REMOVE) == 0);
	return RAN;
}

static enum verdict remove_three(void)
{
	char *a = shared(0, 0, 6, file_of(6), 0);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, PROT_READ) == 0);
	watch(0, 6);
	/* 5.10 refuses the read-only part, and has acted on what comes before it. */
	want(do_madvise(a, 6 * PAGE, MADV_REMOVE) == 0 || errno == EACCES);
	return RAN;
}

static enum verdict remove_second_private(void)
{
	int fd = file_of(4);
	char *a = shared(0, 0, 4, fd, 0);

	read_pages(map(1, 0, 4, RW, MAP_PRIVATE, fd, 0), 4);
	watch(0, 4);
	watch(1, 4);
	want(do_madvise(a, 2 * PAGE, MADV_REMOVE) == 0);
	return RAN;
}

static enum verdict dontneed_shared(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_DONTNEED) == 0);
	return RAN;
}

static enum verdict dontneed_private(void)
{
	char *a = map(0, 0, 4, RW, MAP_PRIVATE, file_of(4), 0);

	read_pages(a, 4);
	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_DONTNEED) == 0);
	return RAN;
}

static enum verdict munmap_shared(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict mprotect_shared(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(do_mprotect(a, 4 * PAGE, PROT_READ) == 0);
	return RAN;
}

static enum verdict write_call(void)
{
	int fd = file_of(4);

	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(pwrite(fd, "x", 1, PAGE) == 1);
	return RAN;
}

static enum verdict sync_memory(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(do_msync(a, 4 * PAGE, MS_SYNC) == 0);
	return RAN;
}

static enum verdict private_read_fault(void)
{
	char *a = map(0, 0, 4, RW, MAP_PRIVATE, file_of(4), 0);

	watch(0, 4);
	read_pages(a, 4);
	return RAN;
}

static enum verdict private_write_after_read(void)
{
	char *a = map(0, 0, 4, RW, MAP_PRIVATE, file_of(4), 0);

	read_pages(a, 4);
	watch(0, 4);
	write_pages(a, 1);
	return RAN;
}

/* The read of page 0 maps its neighbours as well (fault-around), so the write finds a page to copy. */
static enum verdict private_write_beside_read(void)
{
	char *a = map(0, 0, 4, RW, MAP_PRIVATE, file_of(4), 0);

	read_pages(a, 1);
	watch(0, 4);
	write_pages(a + 2 * PAGE, 1);
	return RAN;
}

static enum verdict private_first_write(void)
{
	char *a = map(0, 0, 4, RW, MAP_PRIVATE, file_of(4), 0);

	watch(0, 4);
	write_pages(a + 2 * PAGE, 1);
	return RAN;
}

static enum verdict remap_pages(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(kernel_call(SYS_remap_file_pages, (long)a, 2 * PAGE, 0, 2, 0, 0) == 0);
	return RAN;
}

static enum verdict remap_pages_anonymous(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(kernel_call(SYS_remap_file_pages, (long)a, 2 * PAGE, 0, 2, 0, 0) == -1 && errno == EINVAL);
	return RAN;
}

/* Pages of a disk file that are written and not yet written back. */
static char *dirty(int fd)
{
	char *a = map(0, 0, 4, RW, MAP_SHARED, fd, 0);

	write_pages(a, 4);
	watch(0, 4);
	return a;
}

static enum verdict disk_write_fault(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	write_pages(a, 4);
	return RAN;
}

static enum verdict disk_msync(void)
{
	want(do_msync(dirty(file_of(4)), 4 * PAGE, MS_SYNC) == 0);
	return RAN;
}

static enum verdict disk_fsync(void)
{
	int fd = file_of(4);

	dirty(fd);
	want(fsync(fd) == 0);
	return RAN;
}

static enum verdict disk_sync(void)
{
	dirty(file_of(4));
	sync();
	return RAN;
}

/* Takes the page out of the page cache, which a write to the disk would make stale. */
static enum verdict disk_direct_write(void)
{
	static char page[PAGE] __attribute__((aligned(PAGE)));
	int fd = file_of(4);

	if (fcntl(fd, F_SETFL, O_DIRECT) != 0)
		return skip("O_DIRECT: %s", strerror(errno));
	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(pwrite(fd, page, PAGE, 0) == PAGE);
	return RAN;
}

static enum verdict disk_fadvise(void)
{
	int fd = file_of(4);

	shared(0, 0, 4, fd, 0);
	watch(0, 4);
	want(posix_fadvise(fd, 0, 4 * PAGE, POSIX_FADV_DONTNEED) == 0);
	return RAN;
}

static enum verdict disk_pageout(void)
{
	char *a = shared(0, 0, 4, file_of(4), 0);

	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_PAGEOUT) == 0);
	return RAN;
}

#define FOUR_PAGES EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))

/* Rows that are the same on both kinds of file. */
#define COMMON_ROWS                                                                                                    \
	{ .name = "ftruncate 8p -> 4p", .key = "truncate", .class = EXACT, .run = shrink_8_to_4, .expect = EVERYWHERE(EVENTS(2, A(4, 8), A(4, 8))) },      \
	{ .name = "ftruncate 8p -> 4p, tail not populated", .key = "truncate", .class = EXACT, .run = shrink_untouched,                   \
	  .expect = EVERYWHERE(EVENTS(2, A(4, 8), A(4, 8))) },                                                         \
	{ .name = "ftruncate 4p -> 0", .key = "truncate", .class = EXACT, .run = shrink_to_0, .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))) },         \
	{ .name = "ftruncate 4p -> 2p and 100 bytes", .key = "truncate", .class = EXACT, .run = shrink_unrounded, .derived = 1,            \
	  .expect = EVERYWHERE(EVENTS(2, A(3, 4), A(3, 4))) },                                                         \
	{ .name = "ftruncate 8p -> 4p, mapped from page 2 on", .key = "truncate", .class = EXACT, .run = shrink_mapped_from_middle, .derived = 1, \
	  .expect = EVERYWHERE(EVENTS(2, A(2, 6), A(2, 6))) },                                                         \
	{ .name = "ftruncate 4p -> 8p (grows)", .key = "truncate", .class = EXACT, .run = grow, .expect = EVERYWHERE(NOTHING) },           \
	{ .name = "ftruncate to the same size", .key = "truncate", .class = EXACT, .run = same_size, .expect = EVERYWHERE(NOTHING) },      \
	{ .name = "ftruncate inside the last page", .key = "truncate", .class = EXACT, .run = inside_page, .expect = EVERYWHERE(NOTHING) }, \
	{ .name = "ftruncate to a negative size (EINVAL)", .key = "truncate", .class = EXACT, .run = truncate_refused, .derived = 1, .expect = EVERYWHERE(NOTHING) }, \
	{ .name = "ftruncate 4p -> 2p, mapped twice", .key = "truncate", .class = EXACT, .run = shrink_mapped_twice, .unordered = 1,       \
	  .expect = EVERYWHERE(EVENTS(4, A(2, 4), C(2, 4), A(2, 4), C(2, 4))) },                                       \
	{ .name = "ftruncate to 0 under a private mapping", .key = "truncate", .class = EXACT, .run = shrink_private,                      \
	  .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))) },                                                         \
	{ .name = "truncate(path) 4p -> 2p", .key = "truncate", .class = EXACT, .run = truncate_by_path, .derived = 1,                     \
	  .expect = EVERYWHERE(EVENTS(2, A(2, 4), A(2, 4))) },                                                         \
	{ .name = "truncate(/proc/self/fd/N) 4p -> 2p", .key = "path", .class = COVERED, .run = truncate_by_own_descriptor, .derived = 1, \
	  .expect = EVERYWHERE(EVENTS(2, A(2, 4), A(2, 4))) },                                                         \
	{ .name = "open O_TRUNC", .key = "truncate", .class = EXACT, .run = open_mapped, .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))), .derived = 1 }, \
	{ .name = "open O_TRUNC, mapped twice", .key = "truncate", .class = EXACT, .run = open_twice_mapped, .unordered = 1,               \
	  .expect = EVERYWHERE(EVENTS(4, A(0, 4), C(0, 4), A(0, 4), C(0, 4))) },                                       \
	{ .name = "openat O_TRUNC", .key = "truncate", .class = EXACT, .run = openat_mapped, .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))), .derived = 1 }, \
	{ .name = "openat2 O_TRUNC", .key = "truncate", .class = EXACT, .run = openat2_mapped, .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))), .derived = 1 }, \
	{ .name = "creat", .key = "truncate", .class = EXACT, .run = creat_mapped, .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))), .derived = 1 }, \
	{ .name = "open O_RDONLY", .key = "nothing", .class = EXACT, .run = open_read_only, .expect = EVERYWHERE(NOTHING), .derived = 1 }, \
	{ .name = "fallocate plain", .key = "nothing", .class = EXACT, .run = allocate_plain, .expect = EVERYWHERE(NOTHING), .derived = 1 }, \
	{ .name = "fallocate KEEP_SIZE", .key = "nothing", .class = EXACT, .run = allocate_keep_size, .expect = EVERYWHERE(NOTHING), .derived = 1 }, \
	{ .name = "fallocate PUNCH_HOLE, bad descriptor (EBADF)", .key = "nothing", .class = EXACT, .run = punch_bad_descriptor, .derived = 1, .expect = EVERYWHERE(NOTHING) }, \
	{ .name = "fallocate ZERO_RANGE 2p", .key = "fallocate", .class = COVERED, .run = zero_range, .expect = EVERYWHERE(EVENTS(1, A(2, 4))), .derived = 1 }, \
	{ .name = "fallocate COLLAPSE_RANGE 2p", .key = "fallocate", .class = COVERED, .run = collapse_range, .expect = EVERYWHERE(EVENTS(1, A(2, 8))), .derived = 1 }, \
	{ .name = "fallocate INSERT_RANGE 2p", .key = "fallocate", .class = COVERED, .run = insert_range, .expect = EVERYWHERE(EVENTS(1, A(2, 8))), .derived = 1 }, \
	{ .name = "MADV_DONTNEED of a shared mapping", .key = "madvise-drop", .class = EXACT, .run = dontneed_shared, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) }, \
	{ .name = "MADV_DONTNEED of a private mapping", .key = "madvise-drop", .class = EXACT, .run = dontneed_private, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) }, \
	{ .name = "munmap of a shared mapping", .key = "munmap", .class = EXACT, .run = munmap_shared, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 }, \
	{ .name = "mprotect RW -> R of a shared mapping", .key = "mprotect", .class = EXACT, .run = mprotect_shared, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 }, \
	{ .name = "write(2) to a mapped page", .key = "nothing", .class = EXACT, .run = write_call, .expect = EVERYWHERE(NOTHING) },      \
	{ .name = "read fault of a private mapping", .key = "nothing", .class = EXACT, .run = private_read_fault, .expect = EVERYWHERE(NOTHING) }, \
	{ .name = "private mapping: write after read", .key = "cow", .class = BEYOND, .run = private_write_after_read, .expect = EVERYWHERE(EVENTS(1, A(0, 1))) }, \
	{ .name = "private mapping: write beside a page that was read", .key = "cow", .class = BEYOND, .run = private_write_beside_read, \
	  .expect = EVERYWHERE(EVENTS(1, A(2, 3))) },                                                                  \
	{ .name = "private mapping: write first", .key = "cow", .class = BEYOND, .run = private_first_write, .expect = EVERYWHERE(NOTHING), .derived = 1 }, \
	{ .name = "PUNCH_HOLE by another process", .key = "foreign-file", .class = BEYOND, .run = punch_by_other_process, .expect = EVERYWHERE(EVENTS(1, A(4, 6))) }

/* Rows whose class differs: a disk file system may write dirty pages back first. */
#define PUNCH_ROWS(holes, kind, may_add)                                                                                              \
	{ .name = "PUNCH_HOLE 2p populated", .key = holes, .class = kind, .derived = may_add, .run = punch, .expect = EVERYWHERE(EVENTS(1, A(2, 4))) },   \
	{ .name = "PUNCH_HOLE 2p already empty", .key = holes, .class = kind, .derived = may_add, .run = punch_empty, .expect = EVERYWHERE(EVENTS(1, A(2, 4))) }, \
	{ .name = "PUNCH_HOLE unaligned (1 page and 2 partial ones)", .key = holes, .class = kind, .derived = may_add, .run = punch_unaligned, .expect = EVERYWHERE(EVENTS(1, A(3, 4))) }, \
	{ .name = "PUNCH_HOLE within a page", .key = holes, .class = kind, .derived = may_add, .run = punch_within_page, .expect = EVERYWHERE(NOTHING) }, \
	{ .name = "PUNCH_HOLE 2p, mapped twice", .key = holes, .class = kind, .derived = may_add, .run = punch_twice_mapped, .unordered = 1,              \
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), C(0, 2))) },                                                         \
	{ .name = "PUNCH_HOLE 6p over 3 VMAs of one file", .key = holes, .class = kind, .derived = may_add, .run = punch_three, .unordered = 1,           \
	  .expect = EVERYWHERE(EVENTS(3, A(0, 2), A(2, 4), A(4, 6))) },                                                \
	{ .name = "PUNCH_HOLE of another file", .key = holes, .class = kind, .derived = may_add, .run = punch_other_file, .expect = EVERYWHERE(NOTHING) }, \
	{ .name = "MADV_REMOVE populated", .key = holes, .class = kind, .derived = may_add, .run = remove_shared, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) }, \
	{ .name = "MADV_REMOVE already empty", .key = holes, .class = kind, .derived = may_add, .run = remove_empty, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) }, \
	{ .name = "MADV_REMOVE 6p over 3 VMAs (middle R only)", .key = holes, .class = kind, .derived = may_add, .run = remove_three,                     \
	  .expect = BY_KERNEL(EVENTS(1, A(0, 2)), EVENTS(3, A(0, 2), A(2, 4), A(4, 6)), EVENTS(3, A(0, 2), A(2, 4), A(4, 6)), EVENTS(3, A(0, 2), A(2, 4), A(4, 6))) },                                                \
	{ .name = "MADV_REMOVE with a second, private mapping", .key = holes, .class = kind, .derived = may_add, .run = remove_second_private, .unordered = 1, \
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), C(0, 2))) }

static const struct row memory_rows[] = {
	COMMON_ROWS,
	PUNCH_ROWS("remove", EXACT, 0),
	{ .name = "open O_TRUNC of an empty file", .key = "truncate", .class = EXACT, .run = open_empty, .expect = EVERYWHERE(NOTHING) },
	{ .name = "msync MS_SYNC", .key = "nothing", .class = EXACT, .run = sync_memory, .expect = EVERYWHERE(NOTHING) },
	{ .name = "remap_file_pages 2p of a shared mapping", .key = "remap-file-pages", .class = COVERED, .run = remap_pages, .expect = EVERYWHERE(EVENTS(1, A(0, 2))), .derived = 1 },
	{ .name = "remap_file_pages of anonymous memory (EINVAL)", .key = "refused", .class = COVERED, .run = remap_pages_anonymous, .expect = EVERYWHERE(NOTHING) },
};

static const struct row disk_rows[] = {
	COMMON_ROWS,
	PUNCH_ROWS("remove-disk", COVERED, 1),
	/* ext4 unmaps everything behind the end whenever a size is set, be it the same: the module confirms it. */
	{ .name = "open O_TRUNC of an empty file", .key = "truncate", .class = EXACT, .run = open_empty_ext4, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))) },
	{ .name = "write fault after write-back 4p", .key = "nothing", .class = EXACT, .run = disk_write_fault, .expect = EVERYWHERE(NOTHING) },
	{ .name = "MADV_PAGEOUT clean 4p", .key = "pageout", .class = COVERED, .run = disk_pageout, .expect = EVERYWHERE(FOUR_PAGES) },
	{ .name = "posix_fadvise DONTNEED", .key = "nothing", .class = EXACT, .run = disk_fadvise, .expect = EVERYWHERE(NOTHING) },
	{ .name = "msync MS_SYNC of dirty pages", .key = "write-back", .class = GAP, .run = disk_msync, .expect = EVERYWHERE(FOUR_PAGES) },
	{ .name = "sync of dirty pages", .key = "write-back", .class = GAP, .run = disk_sync, .expect = EVERYWHERE(FOUR_PAGES) },
	{ .name = "O_DIRECT write to a mapped page", .key = "write-back", .class = GAP, .run = disk_direct_write, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 1))) },
	{ .name = "fsync of dirty pages", .key = "write-back", .class = GAP, .run = disk_fsync, .expect = EVERYWHERE(FOUR_PAGES), .derived = 1 },
};

TABLE(table_file, "files in memory (tmpfs)", memory_rows);
TABLE(table_disk, "files on a disk file system", disk_rows);
