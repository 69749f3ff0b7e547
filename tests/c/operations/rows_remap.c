/* Rows: mremap. Values: operations-*.txt ("mremap"), corners-*.txt ("mremap"). */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <sys/mman.h>

#define FIXED (MREMAP_MAYMOVE | MREMAP_FIXED)
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

static enum verdict move(char *from, long old, long new, int flags)
{
	watch(0, old);
	watch(1, old > new ? old : new);
	want(do_mremap(from, (size_t)(old * PAGE), (size_t)(new * PAGE), flags, at(1, 0)) == at(1, 0));
	return RAN;
}

static enum verdict move_populated(void) { return move(written(0, 0, 4), 4, 4, FIXED); }
static enum verdict move_untouched(void) { return move(untouched(0, 0, 4), 4, 4, FIXED); }

static enum verdict move_onto(void)
{
	char *a = written(0, 0, 4);

	written(1, 0, 4);
	return move(a, 4, 4, FIXED);
}

static enum verdict move_dontunmap(void)
{
	return move(written(0, 0, 4), 4, 4, FIXED | MREMAP_DONTUNMAP);
}

static enum verdict move_shrinking(void) { return move(written(0, 0, 6), 6, 3, FIXED); }

static enum verdict move_shrinking_onto(void)
{
	char *a = written(0, 0, 6);

	written(1, 0, 3);
	return move(a, 6, 3, FIXED);
}

static enum verdict move_growing(void) { return move(written(0, 0, 2), 2, 4, FIXED); }

static enum verdict move_several(void)
{
	char *a = written(0, 0, 2);
	void *moved;

	written(0, 3, 3);
	watch(0, 6);
	watch(1, 6);
	moved = do_mremap(a, 6 * PAGE, 6 * PAGE, FIXED, at(1, 0));
	want(moved == at(1, 0) || (moved == MAP_FAILED && errno == EFAULT));
	return RAN;
}

static enum verdict shrink(char *a)
{
	watch(0, 4);
	want(do_mremap(a, 4 * PAGE, 2 * PAGE, 0, NULL) == a);
	return RAN;
}

static enum verdict shrink_populated(void) { return shrink(written(0, 0, 4)); }
static enum verdict shrink_untouched(void) { return shrink(untouched(0, 0, 4)); }

static enum verdict grow_in_place(void)
{
	char *a = written(0, 0, 2);

	watch(0, 4);
	want(do_mremap(a, 2 * PAGE, 4 * PAGE, 0, NULL) == a);
	return RAN;
}

static enum verdict grow_maymove_in_place(void)
{
	char *a = written(0, 0, 2);

	watch(0, 4);
	want(do_mremap(a, 2 * PAGE, 4 * PAGE, MREMAP_MAYMOVE, NULL) == a);
	return RAN;
}

static enum verdict grow_blocked_moves(void)
{
	char *a = written(0, 0, 2);
	char *moved;

	map(0, 2, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	watch(0, 2);
	moved = do_mremap(a, 2 * PAGE, 4 * PAGE, MREMAP_MAYMOVE, NULL);
	want(moved != MAP_FAILED && moved != a);
	return RAN;
}

static enum verdict grow_blocked(void)
{
	char *a = written(0, 0, 2);

	map(0, 2, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	watch(0, 2);
	want(do_mremap(a, 2 * PAGE, 4 * PAGE, 0, NULL) == MAP_FAILED && errno == ENOMEM);
	return RAN;
}

static enum verdict same_size(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mremap(a, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE, NULL) == a);
	return RAN;
}

static enum verdict duplicate(void)
{
	int fd = file_of(4);
	char *a = map(0, 0, 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	write_pages(a, 4);
	watch(0, 4);
	watch(1, 4);
	want(do_mremap(a, 0, 4 * PAGE, FIXED, at(1, 0)) == at(1, 0));
	return RAN;
}

static enum verdict unaligned(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	watch(1, 4);
	want(do_mremap(a + 1, 2 * PAGE, 2 * PAGE, FIXED, at(1, 0)) == MAP_FAILED && errno == EINVAL);
	return RAN;
}

static enum verdict unknown_flags(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	watch(1, 4);
	want(do_mremap(a, 4 * PAGE, 4 * PAGE, FIXED | 0x1000, at(1, 0)) == MAP_FAILED && errno == EINVAL);
	return RAN;
}

static const struct row rows[] = {
	{ .name = "mremap FIXED populated 4p into a hole", .key = "mremap", .class = EXACT, .run = move_populated,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))) },
	{ .name = "mremap FIXED never touched 4p into a hole", .key = "mremap", .class = EXACT, .run = move_untouched,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 4), A(0, 4))) },
	{ .name = "mremap FIXED populated onto populated", .key = "mremap", .class = EXACT, .run = move_onto,
	  .expect = EVERYWHERE(EVENTS(3, C(0, 4), A(0, 4), A(0, 4))) },
	{ .name = "mremap FIXED DONTUNMAP populated into a hole", .key = "mremap", .class = EXACT, .run = move_dontunmap,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "mremap FIXED 6p -> 3p into a hole", .key = "mremap", .class = EXACT, .run = move_shrinking,
	  .expect = EVERYWHERE(EVENTS(3, A(3, 6), A(0, 3), A(0, 3))) },
	{ .name = "mremap FIXED 6p -> 3p onto populated", .key = "mremap", .class = EXACT, .run = move_shrinking_onto,
	  .expect = EVERYWHERE(EVENTS(4, C(0, 3), A(3, 6), A(0, 3), A(0, 3))), .derived = 1 },
	{ .name = "mremap FIXED 2p -> 4p into a hole", .key = "mremap", .class = EXACT, .run = move_growing,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), A(0, 2))), .derived = 1 },
	{ .name = "mremap FIXED 6p: VMA, hole, VMA", .key = "mremap", .class = EXACT, .run = move_several, .moves_several = 1, .refusal_covered = EFAULT,
	  .expect = BY_KERNEL(NOTHING, NOTHING, NOTHING, EVENTS(4, A(0, 2), A(0, 2), A(3, 6), A(3, 6))) },
	{ .name = "mremap 4p -> 2p", .key = "mremap", .class = EXACT, .run = shrink_populated, .expect = EVERYWHERE(EVENTS(1, A(2, 4))) },
	{ .name = "mremap 4p -> 2p never touched", .key = "mremap", .class = EXACT, .run = shrink_untouched, .expect = EVERYWHERE(EVENTS(1, A(2, 4))) },
	{ .name = "mremap 2p -> 4p in place", .key = "mremap-grow", .class = EXACT, .run = grow_in_place, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mremap MAYMOVE 2p -> 4p, gap free (in place)", .key = "mremap-grow", .class = EXACT, .run = grow_maymove_in_place, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mremap MAYMOVE 2p -> 4p, blocked (moves)", .key = "mremap-grow", .class = EXACT, .run = grow_blocked_moves,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), A(0, 2))) },
	{ .name = "mremap 2p -> 4p, blocked (ENOMEM)", .key = "refused", .class = COVERED, .run = grow_blocked, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "mremap to the same size", .key = "mremap", .class = COVERED, .run = same_size, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "mremap of old size 0 (duplicate)", .key = "mremap", .class = EXACT, .run = duplicate, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mremap unaligned (EINVAL)", .key = "mremap", .class = EXACT, .run = unaligned, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "mremap with unknown flags (EINVAL)", .key = "mremap", .class = EXACT, .run = unknown_flags, .expect = EVERYWHERE(NOTHING), .derived = 1 },
};

TABLE(table_remap, "mremap", rows);
