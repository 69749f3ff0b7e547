/*
 * Rows: huge pages, memory nodes, an own userfaultfd, files of /proc. Values: operations-*.txt ("THP", "NUMA /
 * migration", "userfaultfd", "hugetlb", "mlock & co"), corners-*.txt.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)
#define HUGE_BYTES (HUGE_PAGES * PAGE)

/* ---- huge pages of the hugetlb kind ---- */

static char *hugetlb(long pages)
{
	char *a = mmap(at(0, 0), (size_t)(pages * PAGE), RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_FIXED_NOREPLACE, -1, 0);

	if (a == MAP_FAILED)
		return NULL;
	for (long i = 0; i < pages; i += HUGE_PAGES)
		write_pages(a + i * PAGE, 1);
	return a;
}

#define NO_HUGE_PAGES skip("no huge pages are set aside (vm.nr_hugepages)")

static enum verdict hugetlb_fault(void)
{
	char *a = mmap(at(0, 0), 2 * HUGE_BYTES, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_FIXED_NOREPLACE, -1, 0);

	if (a == MAP_FAILED)
		return NO_HUGE_PAGES;
	watch_cells(0, 2 * HUGE_PAGES, HUGE_PAGES);
	write_pages(a, 1);
	write_pages(a + HUGE_BYTES, 1);
	return RAN;
}

static enum verdict hugetlb_munmap(void)
{
	char *a = hugetlb(2 * HUGE_PAGES);

	if (a == NULL)
		return NO_HUGE_PAGES;
	watch_cells(0, 2 * HUGE_PAGES, HUGE_PAGES);
	want(do_munmap(a, 2 * HUGE_BYTES) == 0);
	return RAN;
}

static enum verdict hugetlb_munmap_one(void)
{
	char *a = hugetlb(HUGE_PAGES);

	if (a == NULL)
		return NO_HUGE_PAGES;
	watch_cells(0, HUGE_PAGES, HUGE_PAGES);
	want(do_munmap(a, HUGE_BYTES) == 0);
	return RAN;
}

static enum verdict hugetlb_dontneed(void)
{
	char *a = hugetlb(2 * HUGE_PAGES);

	if (a == NULL)
		return NO_HUGE_PAGES;
	watch_cells(0, 2 * HUGE_PAGES, HUGE_PAGES);
	if (do_madvise(a, HUGE_BYTES, MADV_DONTNEED) != 0)
		return lacking("MADV_DONTNEED of hugetlb memory");
	return RAN;
}

static enum verdict hugetlb_mprotect(void)
{
	char *a = hugetlb(2 * HUGE_PAGES);

	if (a == NULL)
		return NO_HUGE_PAGES;
	watch_cells(0, 2 * HUGE_PAGES, HUGE_PAGES);
	want(do_mprotect(a, 2 * HUGE_BYTES, PROT_READ) == 0);
	return RAN;
}

/* A shared mapping of a hugetlb memory file of 4 MiB. */
static char *hugetlb_file(int *fd)
{
	char *a;

	*fd = memfd_create("walk-huge", MFD_CLOEXEC | MFD_HUGETLB);
	if (*fd < 0)
		return NULL;
	keep_fd(*fd);
	if (ftruncate(*fd, 2 * HUGE_BYTES) != 0)
		return NULL;
	a = mmap(at(0, 0), 2 * HUGE_BYTES, RW, MAP_SHARED | MAP_FIXED_NOREPLACE, *fd, 0);
	if (a == MAP_FAILED)
		return NULL;
	write_pages(a, 1);
	write_pages(a + HUGE_BYTES, 1);
	return a;
}

static enum verdict hugetlb_file_truncate(void)
{
	int fd;

	if (hugetlb_file(&fd) == NULL)
		return NO_HUGE_PAGES;
	watch_cells(0, 2 * HUGE_PAGES, HUGE_PAGES);
	want(do_ftruncate(fd, HUGE_BYTES) == 0);
	return RAN;
}

static enum verdict hugetlb_file_munmap(void)
{
	int fd;
	char *a = hugetlb_file(&fd);

	if (a == NULL)
		return NO_HUGE_PAGES;
	watch_cells(0, 2 * HUGE_PAGES, HUGE_PAGES);
	want(do_munmap(a, 2 * HUGE_BYTES) == 0);
	return RAN;
}

/* ---- transparent huge pages ---- */

/* One transparent huge page at A; NULL where it can't be had. */
static char *transparent(void)
{
	char line[128];
	long kib = 0;
	FILE *maps;
	char *a;

	if (prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) != 0)
		return NULL;
	a = untouched(0, 0, HUGE_PAGES);
	if (madvise(a, HUGE_BYTES, MADV_HUGEPAGE) == 0)
		write_pages(a, HUGE_PAGES);
	must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	maps = fopen("/proc/self/smaps_rollup", "re");
	while (maps != NULL && fgets(line, sizeof(line), maps) != NULL)
		sscanf(line, "AnonHugePages: %ld kB", &kib);
	if (maps != NULL)
		fclose(maps);
	return kib > 0 ? a : NULL;
}

#define NO_TRANSPARENT skip("no transparent huge page came (see /sys/kernel/mm/transparent_hugepage/enabled)")

static enum verdict transparent_munmap(void)
{
	char *a = transparent();

	if (a == NULL)
		return NO_TRANSPARENT;
	watch(0, HUGE_PAGES);
	want(do_munmap(a, HUGE_BYTES) == 0);
	return RAN;
}

static enum verdict transparent_mprotect(void)
{
	char *a = transparent();

	if (a == NULL)
		return NO_TRANSPARENT;
	watch(0, HUGE_PAGES);
	want(do_mprotect(a, HUGE_BYTES, PROT_READ) == 0);
	return RAN;
}

static enum verdict transparent_munmap_page(void)
{
	char *a = transparent();

	if (a == NULL)
		return NO_TRANSPARENT;
	watch(0, HUGE_PAGES);
	want(do_munmap(a + PAGE, PAGE) == 0);
	return RAN;
}

static enum verdict transparent_mprotect_page(void)
{
	char *a = transparent();

	if (a == NULL)
		return NO_TRANSPARENT;
	watch(0, HUGE_PAGES);
	want(do_mprotect(a + PAGE, PAGE, PROT_READ) == 0);
	return RAN;
}

static enum verdict transparent_advise_page(int advice)
{
	char *a = transparent();

	if (a == NULL)
		return NO_TRANSPARENT;
	watch(0, HUGE_PAGES);
	want(do_madvise(a + PAGE, PAGE, advice) == 0);
	return RAN;
}

static enum verdict transparent_dontneed_page(void) { return transparent_advise_page(MADV_DONTNEED); }
static enum verdict transparent_free_page(void) { return transparent_advise_page(MADV_FREE); }

/* ---- NUMA ---- */

/* 4 written pages that lie on node 0. */
static char *on_node_0(void)
{
	char *a = written(0, 0, 4);
	void *pages[4] = { a, a + PAGE, a + 2 * PAGE, a + 3 * PAGE };
	int nodes[4] = { 0 }, status[4];

	/* Where there is but one node they lie there already. */
	syscall(SYS_move_pages, 0, 4, pages, nodes, status, MPOL_MF_MOVE);
	watch(0, 4);
	return a;
}

static enum verdict bind_to(unsigned long node, unsigned flags)
{
	unsigned long mask = 1UL << node;
	char *a = on_node_0();

	if (kernel_call(SYS_mbind, (long)a, 4 * PAGE, MPOL_BIND, (long)&mask, 64, flags) != 0)
		return skip("mbind to node %lu: %s (it takes two nodes)", node, strerror(errno));
	return RAN;
}

static enum verdict bind_plain(void) { return bind_to(1, 0); }
static enum verdict bind_move(void) { return bind_to(1, MPOL_MF_MOVE); }
static enum verdict bind_there(void) { return bind_to(0, MPOL_MF_MOVE); }

static enum verdict move_pages_to(int node)
{
	char *a = on_node_0();
	void *pages[4] = { a, a + PAGE, a + 2 * PAGE, a + 3 * PAGE };
	int nodes[4] = { node, node, node, node }, status[4] = { 0 };

	if (kernel_call(SYS_move_pages, 0, 4, (long)pages, node < 0 ? 0 : (long)nodes, (long)status, MPOL_MF_MOVE) < 0)
		return skip("move_pages: %s (it takes two nodes)", strerror(errno));
	if (node >= 0 && status[0] != node)
		return skip("move_pages to node %d: status %d", node, status[0]);
	return RAN;
}

/* All pages of the process, of which some may be held (EAGAIN); 4 are watched. */
static enum verdict migrate(void)
{
	unsigned long from = 1, to = 2;

	on_node_0();
	if (kernel_call(SYS_migrate_pages, 0, 64, (long)&from, (long)&to, 0, 0) < 0 && errno != EAGAIN)
		return skip("migrate_pages: %s (it takes two nodes)", strerror(errno));
	return RAN;
}

static enum verdict move_query(void) { return move_pages_to(-1); }
static enum verdict move_there(void) { return move_pages_to(0); }
static enum verdict move_away(void) { return move_pages_to(1); }

/* ---- userfaultfd of the application's own ---- */

static int fault_fd(unsigned long mode, long pages)
{
	struct uffdio_api api = { .api = UFFD_API, .features = 0 };
	struct uffdio_register range = { .range = { (uintptr_t)at(0, 0), (size_t)(pages * PAGE) }, .mode = mode };
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

	if (fd < 0)
		return -1;
	keep_fd(fd);
	if (ioctl(fd, UFFDIO_API, &api) != 0 || ioctl(fd, UFFDIO_REGISTER, &range) != 0)
		return -1;
	return fd;
}

#define NO_FAULT_FD skip("userfaultfd: %s", strerror(errno))

static enum verdict uffd_register(void)
{
	written(0, 0, 8);
	watch(0, 8);
	return fault_fd(UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP, 8) < 0 ? NO_FAULT_FD : RAN;
}

static enum verdict uffd_copy(void)
{
	char *a = untouched(0, 0, 8);
	char *from = written(1, 0, 4);
	struct uffdio_copy copy = { .dst = (uintptr_t)a, .src = (uintptr_t)from, .len = 4 * PAGE };
	int fd = fault_fd(UFFDIO_REGISTER_MODE_MISSING, 8);

	if (fd < 0)
		return NO_FAULT_FD;
	watch(0, 8);
	want(ioctl(fd, UFFDIO_COPY, &copy) == 0);
	return RAN;
}

static enum verdict uffd_zero(void)
{
	struct uffdio_zeropage zero = { .range = { (uintptr_t)untouched(0, 0, 8), 2 * PAGE } };
	int fd = fault_fd(UFFDIO_REGISTER_MODE_MISSING, 8);

	if (fd < 0)
		return NO_FAULT_FD;
	watch(0, 8);
	want(ioctl(fd, UFFDIO_ZEROPAGE, &zero) == 0);
	return RAN;
}

static enum verdict uffd_protect(void)
{
	struct uffdio_writeprotect protect = {
		.range = { (uintptr_t)written(0, 0, 8), 4 * PAGE },
		.mode = UFFDIO_WRITEPROTECT_MODE_WP,
	};
	int fd = fault_fd(UFFDIO_REGISTER_MODE_WP, 8);

	if (fd < 0)
		return NO_FAULT_FD;
	watch(0, 8);
	if (kernel_call(SYS_ioctl, fd, UFFDIO_WRITEPROTECT, (long)&protect, 0, 0, 0) != 0)
		return NO_FAULT_FD;
	return RAN;
}

/* struct uffdio_move, its ioctl and its feature (6.8) are younger than the headers. */
struct move {
	uint64_t dst, src, len, mode;
	int64_t moved;
};

static enum verdict uffd_move(void)
{
	struct uffdio_api api = { .api = UFFD_API, .features = 1UL << 16 };
	struct move move = { .dst = (uintptr_t)untouched(0, 0, 4), .src = (uintptr_t)written(1, 0, 4), .len = 4 * PAGE };
	struct uffdio_register range = { .range = { (uintptr_t)at(0, 0), 4 * PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

	if (fd < 0)
		return NO_FAULT_FD;
	keep_fd(fd);
	watch(0, 4);
	watch(1, 4);
	if (ioctl(fd, UFFDIO_API, &api) != 0)
		return lacking("UFFDIO_MOVE");
	/* EBUSY where the layer fault watches alone: nothing tells it to make room. */
	if (ioctl(fd, UFFDIO_REGISTER, &range) != 0)
		return NO_FAULT_FD;
	if (kernel_call(SYS_ioctl, fd, (long)_IOWR(0xaa, 5, struct move), (long)&move, 0, 0, 0) != 0)
		return NO_FAULT_FD;
	return RAN;
}

static enum verdict uffd_unregister(void)
{
	struct uffdio_range range = { (uintptr_t)written(0, 0, 8), 8 * PAGE };
	int fd = fault_fd(UFFDIO_REGISTER_MODE_WP, 8);

	if (fd < 0)
		return NO_FAULT_FD;
	watch(0, 8);
	want(kernel_call(SYS_ioctl, fd, UFFDIO_UNREGISTER, (long)&range, 0, 0, 0) == 0);
	return RAN;
}

/* ---- the rest ---- */

/* struct pm_scan_arg and its ioctl (6.7) are younger than the headers. */
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

static enum verdict pagemap_scan(void)
{
	char *a = written(0, 0, 4);
	struct scan scan = {
		.size = sizeof(scan),
		.flags = 1, /* PM_SCAN_WP_MATCHING */
		.start = (uintptr_t)a,
		.end = (uintptr_t)a + 4 * PAGE,
		.category_mask = 2, /* PAGE_IS_WRITTEN */
		.return_mask = 2,
	};
	int fd = keep_fd(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));

	watch(0, 4);
	if (kernel_call(SYS_ioctl, fd, (long)_IOWR('f', 16, struct scan), (long)&scan, 0, 0, 0) < 0)
		return errno == ENOTTY ? lacking("PAGEMAP_SCAN") : skip("PAGEMAP_SCAN: %s", strerror(errno));
	return RAN;
}

static enum verdict clear_references(const char *what)
{
	int fd = keep_fd(open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC));

	written(0, 0, 4);
	watch(0, 4);
	if (write(fd, what, 1) != 1)
		return skip("clear_refs: %s", strerror(errno));
	return RAN;
}

static enum verdict clear_soft_dirty(void)
{
	/* A kernel without soft-dirty bits accepts the write and does nothing. */
	if (!expendable())
		return skip("whether this kernel keeps soft-dirty bits can't be seen from here");
	return clear_references("4");
}

static enum verdict clear_referenced(void) { return clear_references("1"); }

static enum verdict write_through_proc(void)
{
	char *a = written(0, 0, 4);
	int fd = keep_fd(open("/proc/self/mem", O_RDWR | O_CLOEXEC));

	watch(0, 4);
	if (pwrite(fd, "x", 1, (off_t)(uintptr_t)a) != 1)
		return skip("/proc/self/mem: %s", strerror(errno));
	return RAN;
}

#define ZERO(title, function) { .name = title, .key = "nothing", .class = EXACT, .run = function, .expect = EVERYWHERE(NOTHING) }
#define FOUR_PAGES EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))

static const struct row rows[] = {
	ZERO("hugetlb fault 2x2 MiB", hugetlb_fault),
	{ .name = "hugetlb munmap 4 MiB", .key = "munmap", .class = EXACT, .run = hugetlb_munmap,
	  .expect = BY_KERNEL(EVENTS(2, A(0, 1024), A(0, 1024)), EVENTS(2, A(0, 1024), A(0, 1024)), EVENTS(1, A(0, 1024)), EVENTS(1, A(0, 1024))) },
	{ .name = "hugetlb munmap 2 MiB", .key = "munmap", .class = EXACT, .run = hugetlb_munmap_one,
	  .expect = BY_KERNEL(EVENTS(2, A(0, 512), A(0, 512)), EVENTS(2, A(0, 512), A(0, 512)), EVENTS(1, A(0, 512)), EVENTS(1, A(0, 512))) },
	{ .name = "hugetlb MADV_DONTNEED the first 2 MiB", .key = "madvise-drop", .class = EXACT, .run = hugetlb_dontneed,
	  .expect = BY_KERNEL(NOTHING, EVENTS(2, A(0, 512), A(0, 512)), EVENTS(1, A(0, 512)), EVENTS(1, A(0, 512))) },
	{ .name = "hugetlb mprotect RW -> R", .key = "mprotect", .class = EXACT, .run = hugetlb_mprotect, .expect = EVERYWHERE(EVENTS(1, A(0, 1024))) },
	{ .name = "hugetlb shared ftruncate 4 -> 2 MiB", .key = "truncate", .class = EXACT, .run = hugetlb_file_truncate, .expect = EVERYWHERE(EVENTS(1, A(512, 1024))) },
	{ .name = "hugetlb shared munmap 4 MiB", .key = "munmap", .class = EXACT, .run = hugetlb_file_munmap,
	  .expect = BY_KERNEL(EVENTS(2, A(0, 1024), A(0, 1024)), EVENTS(2, A(0, 1024), A(0, 1024)), EVENTS(1, A(0, 1024)), EVENTS(1, A(0, 1024))) },

	{ .name = "munmap of a whole huge page", .key = "munmap", .class = EXACT, .run = transparent_munmap, .expect = EVERYWHERE(EVENTS(1, A(0, 512))) },
	{ .name = "mprotect of a whole huge page", .key = "mprotect", .class = EXACT, .run = transparent_mprotect, .expect = EVERYWHERE(EVENTS(1, A(0, 512))) },
	{ .name = "munmap 1p inside a huge page", .key = "munmap", .class = SPLIT, .run = transparent_munmap_page,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 512), A(1, 2))), .own = EVENTS(1, A(1, 2)) },
	{ .name = "mprotect 1p inside a huge page", .key = "mprotect", .class = SPLIT, .run = transparent_mprotect_page,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 512), A(1, 2))), .own = EVENTS(1, A(1, 2)) },
	{ .name = "MADV_DONTNEED 1p inside a huge page", .key = "madvise-drop", .class = SPLIT, .run = transparent_dontneed_page,
	  .expect = EVERYWHERE(EVENTS(2, A(1, 2), A(0, 512))), .own = EVENTS(1, A(1, 2)) },
	{ .name = "MADV_FREE 1p inside a huge page", .key = "madvise-drop", .class = SPLIT, .run = transparent_free_page, .own = EVENTS(1, A(1, 2)),
	  .expect = BY_KERNEL(EVENTS(3, A(1, 2), A(0, 512), A(0, 512)), EVENTS(3, A(1, 2), A(0, 512), A(0, 512)),
			      EVENTS(3, A(1, 2), A(0, 512), A(0, 512)), EVENTS(2, A(1, 2), A(0, 512))) },

	{ .name = "mbind without MOVE", .key = "nothing", .class = EXACT, .run = bind_plain, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mbind MPOL_MF_MOVE to the other node", .key = "numa", .class = COVERED, .run = bind_move, .expect = EVERYWHERE(FOUR_PAGES) },
	{ .name = "mbind MPOL_MF_MOVE, already there", .key = "numa", .class = COVERED, .run = bind_there, .expect = EVERYWHERE(NOTHING) },
	ZERO("move_pages, query only", move_query),
	{ .name = "move_pages to the other node", .key = "numa", .class = COVERED, .run = move_away, .expect = EVERYWHERE(FOUR_PAGES) },
	{ .name = "migrate_pages to the other node", .key = "numa", .class = COVERED, .run = migrate, .unrecorded = 1, .expect = EVERYWHERE(FOUR_PAGES) },
	{ .name = "move_pages, already there", .key = "numa", .class = COVERED, .run = move_there, .expect = EVERYWHERE(NOTHING) },

	ZERO("UFFDIO_REGISTER", uffd_register),
	ZERO("UFFDIO_COPY 4p", uffd_copy),
	ZERO("UFFDIO_ZEROPAGE 2p", uffd_zero),
	{ .name = "UFFDIO_WRITEPROTECT 4p", .key = "own-uffd", .class = COVERED, .run = uffd_protect, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "UFFDIO_MOVE 4p", .key = "own-uffd", .class = COVERED, .run = uffd_move, .derived = 1,
	  .expect = BY_KERNEL(NOTHING, NOTHING, EVENTS(1, C(0, 4)), EVENTS(1, C(0, 4))) },
	{ .name = "UFFDIO_UNREGISTER of write-protect mode", .key = "own-uffd", .class = COVERED, .run = uffd_unregister,
	  .expect = BY_KERNEL(NOTHING, EVENTS(1, A(0, 8)), EVENTS(1, A(0, 8)), EVENTS(1, A(0, 8))) },


	{ .name = "PAGEMAP_SCAN with write-protection", .key = "pagemap-scan", .class = COVERED, .run = pagemap_scan, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "soft-dirty clear (clear_refs 4)", .key = "foreign-act", .class = BEYOND, .run = clear_soft_dirty, .expect = EVERYWHERE(EVENTS(1, A(-1048576, 1048576))) },
	ZERO("clear_refs 1", clear_referenced),
	ZERO("write through /proc/self/mem", write_through_proc),
};

TABLE(table_rare, "huge pages and rare calls", rows);
