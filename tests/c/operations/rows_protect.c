/* Rows: mprotect. Values: operations-*.txt ("mprotect", "mlock & co"), corners-*.txt ("mprotect"). */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)

/* 4 pages of that protection, all of them written. */
static char *area_with(int prot)
{
	char *a = written(0, 0, 4);

	if (prot != RW)
		must(mprotect(a, 4 * PAGE, prot) == 0);
	return a;
}

static enum verdict change(int from, int to)
{
	char *a = area_with(from);

	watch(0, 4);
	want(do_mprotect(a, 4 * PAGE, to) == 0);
	return RAN;
}

static enum verdict rw_to_r(void) { return change(RW, PROT_READ); }
static enum verdict r_to_r(void) { return change(PROT_READ, PROT_READ); }
static enum verdict rw_to_rw(void) { return change(RW, RW); }
static enum verdict r_to_rw(void) { return change(PROT_READ, RW); }
static enum verdict rw_to_none(void) { return change(RW, PROT_NONE); }
static enum verdict none_to_rw(void) { return change(PROT_NONE, RW); }

static enum verdict middle(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mprotect(a + PAGE, PAGE, PROT_READ) == 0);
	return RAN;
}

static enum verdict untouched_4p(void)
{
	char *a = untouched(0, 0, 4);

	/* A neighbour gives the range a page table. */
	written(0, 16, 1);
	watch(0, 4);
	want(do_mprotect(a, 4 * PAGE, PROT_READ) == 0);
	return RAN;
}

static enum verdict untouched_8mib(void)
{
	char *a = untouched(0, 0, 2048);

	/* Something else in the same GiB gives the range the table above the missing ones. */
	written(0, 8192, 1);
	watch_cells(0, 2048, 64);
	want(do_mprotect(a, 2048 * PAGE, PROT_READ) == 0);
	return RAN;
}

static enum verdict untouched_1gib(void)
{
	char *a = map(0, 0, GIB_PAGES, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	watch_cells(0, GIB_PAGES, HUGE_PAGES);
	want(do_mprotect(a, (size_t)(GIB_PAGES * PAGE), PROT_READ) == 0);
	return RAN;
}

static enum verdict touched_once_1gib(void)
{
	char *a = map(0, 0, GIB_PAGES, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	write_pages(a + 768 * PAGE, 1);
	watch_cells(0, GIB_PAGES, HUGE_PAGES);
	want(do_mprotect(a, (size_t)(GIB_PAGES * PAGE), PROT_READ) == 0);
	return RAN;
}

static enum verdict touched_twice_4gib(void)
{
	char *a = map(0, 0, 4 * GIB_PAGES, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	write_pages(a + (GIB_PAGES + 768) * PAGE, 1);
	write_pages(a + 3 * GIB_PAGES * PAGE, 1);
	watch_cells(0, 4 * GIB_PAGES, HUGE_PAGES);
	want(do_mprotect(a, (size_t)(4 * GIB_PAGES * PAGE), PROT_READ) == 0);
	return RAN;
}

static enum verdict three(int prot)
{
	char *a = written(0, 0, 6);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, prot) == 0);
	watch(0, 6);
	want(do_mprotect(a, 6 * PAGE, PROT_READ) == 0);
	return RAN;
}

static enum verdict three_changing(void) { return three(PROT_NONE); }
static enum verdict three_middle_unchanged(void) { return three(PROT_READ); }

static enum verdict into_hole(void)
{
	char *a = written(0, 0, 2);

	watch(0, 4);
	want(do_mprotect(a, 4 * PAGE, PROT_READ) == -1 && errno == ENOMEM);
	return RAN;
}

static enum verdict unaligned(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
#ifndef __GLIBC__
	if (way == BY_LIBC)
		return skip("this libc's mprotect rounds its arguments");
#endif
	want(do_mprotect(a + 1, PAGE, PROT_READ) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict length_0(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mprotect(a, 0, PROT_READ) == 0);
	return RAN;
}

static enum verdict pkey_none(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
#ifdef __GLIBC__
	if (way == BY_LIBC) {
		want(pkey_mprotect(a, 4 * PAGE, PROT_READ, -1) == 0);
		return RAN;
	}
#endif
	want(kernel_call(SYS_pkey_mprotect, (long)a, 4 * PAGE, PROT_READ, -1, 0, 0) == 0);
	return RAN;
}

static const struct row rows[] = {
	{ .name = "mprotect RW -> R populated", .key = "mprotect", .class = EXACT, .run = rw_to_r, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "mprotect R -> R (no change)", .key = "mprotect", .class = EXACT, .run = r_to_r, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mprotect RW -> RW (no change)", .key = "mprotect", .class = EXACT, .run = rw_to_rw, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "mprotect R -> RW populated", .key = "mprotect", .class = EXACT, .run = r_to_rw, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "mprotect RW -> NONE populated", .key = "mprotect", .class = EXACT, .run = rw_to_none, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "mprotect NONE -> RW populated", .key = "mprotect", .class = EXACT, .run = none_to_rw, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "mprotect RW -> R 1p in the middle", .key = "mprotect", .class = EXACT, .run = middle, .expect = EVERYWHERE(EVENTS(1, A(1, 2))) },
	{ .name = "mprotect RW -> R never touched 4p", .key = "mprotect-wide", .class = COVERED, .run = untouched_4p, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "mprotect RW -> R never touched 8 MiB, no page table", .key = "mprotect-wide", .class = COVERED, .run = untouched_8mib,
	  .expect = BY_KERNEL(NOTHING, NOTHING, EVENTS(1, A(0, 2048)), EVENTS(1, A(0, 2048))) },
	{ .name = "mprotect never touched 1 GiB, no table at all", .key = "mprotect-wide", .class = COVERED, .run = untouched_1gib, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mprotect 1 GiB, one page touched at +768", .key = "mprotect-wide", .class = COVERED, .run = touched_once_1gib,
	  .expect = BY_KERNEL(EVENTS(1, A(512, 262144)), EVENTS(1, A(512, 262144)), EVENTS(1, A(0, 262144)), EVENTS(1, A(0, 262144))) },
	{ .name = "mprotect 4 GiB, touched in GiB 1 (+768) and GiB 3", .key = "mprotect-wide", .class = COVERED, .run = touched_twice_4gib,
	  .expect = BY_KERNEL(EVENTS(2, A(262656, 524288), A(786432, 1048576)), EVENTS(2, A(262656, 524288), A(786432, 1048576)),
			      EVENTS(1, A(262144, 1048576)), EVENTS(1, A(262144, 1048576))) },
	{ .name = "mprotect over 3 VMAs (rw,none,rw)", .key = "mprotect", .class = EXACT, .run = three_changing,
	  .expect = EVERYWHERE(EVENTS(3, A(0, 2), A(2, 4), A(4, 6))) },
	{ .name = "mprotect over 3 VMAs, the middle unchanged", .key = "mprotect", .class = EXACT, .run = three_middle_unchanged,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), A(4, 6))) },
	{ .name = "mprotect into a hole (ENOMEM, acted)", .key = "mprotect", .class = EXACT, .run = into_hole, .expect = EVERYWHERE(EVENTS(1, A(0, 2))) },
	{ .name = "mprotect unaligned (EINVAL)", .key = "mprotect", .class = EXACT, .run = unaligned, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "mprotect of length 0", .key = "mprotect", .class = EXACT, .run = length_0, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "pkey_mprotect (key -1) RW -> R", .key = "mprotect", .class = EXACT, .run = pkey_none, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
};

TABLE(table_protect, "mprotect", rows);
