/* Rows: adding mappings, munmap, MAP_FIXED. Values: operations-*.txt ("additions", "munmap", "mmap MAP_FIXED"). */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

static enum verdict nothing(void)
{
	written(0, 0, 4);
	watch(0, 4);
	return RAN;
}

static enum verdict add(int flags)
{
	watch(0, 4);
	want(do_mmap(at(0, 0), 4 * PAGE, RW, ANON | flags, -1, 0) == at(0, 0));
	return RAN;
}

static enum verdict mmap_plain(void) { return add(0); }
static enum verdict mmap_populate(void) { return add(MAP_POPULATE); }
static enum verdict mmap_noreplace_hole(void) { return add(MAP_FIXED_NOREPLACE); }
static enum verdict mmap_fixed_hole(void) { return add(MAP_FIXED); }
static enum verdict mmap_fixed_populate_hole(void) { return add(MAP_FIXED | MAP_POPULATE); }

static enum verdict mmap_beside(void)
{
	written(0, 0, 2);
	watch(0, 4);
	want(do_mmap(at(0, 2), 2 * PAGE, RW, ANON, -1, 0) == at(0, 2));
	return RAN;
}

static enum verdict fault_write(void)
{
	char *a = untouched(0, 0, 4);

	watch(0, 4);
	write_pages(a, 4);
	return RAN;
}

static enum verdict fault_read(void)
{
	char *a = untouched(0, 0, 4);

	watch(0, 4);
	read_pages(a, 4);
	return RAN;
}

static enum verdict fault_write_over_zero_page(void)
{
	char *a = untouched(0, 0, 4);

	read_pages(a, 4);
	watch(0, 4);
	write_pages(a, 4);
	return RAN;
}

static enum verdict populate_write(void)
{
	char *a = untouched(0, 0, 4);
	int result;

	watch(0, 4);
	result = do_madvise(a, 4 * PAGE, MADV_POPULATE_WRITE);
	if (result != 0 && errno == EINVAL)
		return lacking("MADV_POPULATE_WRITE");
	want(result == 0);
	return RAN;
}

static void __attribute__((noinline)) deep(void)
{
	volatile char frame[320 * 1024];

	for (size_t i = 0; i < sizeof(frame); i += 512)
		frame[i] = 1;
}

static enum verdict stack_growth(void)
{
	char here;
	/* Far below what other rows and children touched. */
	char *base = (char *)((uintptr_t)&here & ~(uintptr_t)(PAGE - 1)) - 72 * PAGE;

	watch_at(0, base, 16);
	deep();
	return RAN;
}

static enum verdict munmap_populated(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_untouched(void)
{
	char *a = untouched(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_hole(void)
{
	watch(0, 4);
	want(do_munmap(at(0, 0), 4 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_middle(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a + PAGE, PAGE) == 0);
	return RAN;
}

static enum verdict munmap_unrounded(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a, 2 * PAGE + 1) == 0);
	return RAN;
}

static enum verdict munmap_three(void)
{
	char *a = written(0, 0, 6);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, PROT_READ) == 0);
	watch(0, 6);
	want(do_munmap(a, 6 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_over_hole(void)
{
	char *a = written(0, 0, 2);

	written(0, 4, 2);
	watch(0, 6);
	want(do_munmap(a, 6 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_in_holes(void)
{
	written(0, 2, 2);
	watch(0, 6);
	want(do_munmap(at(0, 0), 6 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_reserve(void)
{
	char *a = map(0, 0, 4, PROT_NONE, ANON, -1, 0);

	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_locked(void)
{
	char *a = written(0, 0, 4);

	must(mlock(a, 4 * PAGE) == 0);
	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_locked_and_plain(void)
{
	char *a = written(0, 0, 4);

	must(mlock(a, 2 * PAGE) == 0);
	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict munmap_unaligned(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a + 1, PAGE) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict munmap_empty(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a, 0) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict munmap_overflow(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_munmap(a, (size_t)-PAGE) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict fixed_populated(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a, 4 * PAGE, RW, ANON | MAP_FIXED, -1, 0) == a);
	return RAN;
}

static enum verdict fixed_untouched(void)
{
	char *a = untouched(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a, 4 * PAGE, RW, ANON | MAP_FIXED, -1, 0) == a);
	return RAN;
}

static enum verdict fixed_middle(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a + PAGE, PAGE, RW, ANON | MAP_FIXED, -1, 0) == a + PAGE);
	return RAN;
}

static enum verdict fixed_file(void)
{
	int fd = file_of(4);
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a, 4 * PAGE, RW, MAP_SHARED | MAP_FIXED, fd, 0) == a);
	return RAN;
}

static enum verdict noreplace_populated(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a, 4 * PAGE, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
	return RAN;
}

static enum verdict fixed_and_noreplace_populated(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a, 4 * PAGE, RW, ANON | MAP_FIXED | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED &&
	     errno == EEXIST);
	return RAN;
}

static enum verdict fixed_bad_descriptor(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a, 4 * PAGE, RW, MAP_PRIVATE | MAP_FIXED, 999, 0) == MAP_FAILED && errno == EBADF);
	return RAN;
}

static enum verdict fixed_unaligned(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mmap(a + 1, PAGE, RW, ANON | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EINVAL);
	return RAN;
}

static enum verdict fixed_hint_only(void)
{
	char *a = written(0, 0, 4);
	void *other;

	watch(0, 4);
	other = do_mmap(a, PAGE, RW, ANON, -1, 0);
	want(other != MAP_FAILED && other != a);
	return RAN;
}

static enum verdict fixed_refused_by_packet_socket(void)
{
	int fd = socket(AF_PACKET, SOCK_RAW, 0);
	char *a;

	if (fd < 0)
		return skip("a packet socket can't be had (%s)", errno == EPERM ? "not privileged" : "no such family");
	keep_fd(fd);
	a = written(0, 0, 2);
	watch(0, 2);
	want(do_mmap(a, 2 * PAGE, RW, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED);
	return RAN;
}

static enum verdict fixed_refused_by_unix_socket(void)
{
	int fd = keep_fd(socket(AF_UNIX, SOCK_STREAM, 0));
	char *a = written(0, 0, 2);

	watch(0, 2);
	want(do_mmap(a, 2 * PAGE, RW, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED);
	return RAN;
}

static const struct row rows[] = {
	{ .name = "nothing", .key = "nothing", .class = EXACT, .run = nothing, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mmap 4p elsewhere", .key = "nothing", .class = EXACT, .run = mmap_plain, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mmap 4p MAP_POPULATE", .key = "nothing", .class = EXACT, .run = mmap_populate, .expect = EVERYWHERE(NOTHING) },
	{ .name = "mmap 2p beside populated 2p", .key = "nothing", .class = EXACT, .run = mmap_beside, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "first write fault 4p", .key = "nothing", .class = EXACT, .run = fault_write, .expect = EVERYWHERE(NOTHING) },
	{ .name = "first read fault 4p", .key = "nothing", .class = EXACT, .run = fault_read, .expect = EVERYWHERE(NOTHING) },
	{ .name = "write fault over the zero page 4p", .key = "cow", .class = BEYOND, .run = fault_write_over_zero_page,
	  .expect = EVERYWHERE(EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))) },
	{ .name = "madvise POPULATE_WRITE absent 4p", .key = "nothing", .class = EXACT, .run = populate_write, .expect = EVERYWHERE(NOTHING) },
	{ .name = "stack growth 64 KiB", .key = "nothing", .class = EXACT, .run = stack_growth, .expect = EVERYWHERE(NOTHING) },

	{ .name = "munmap populated 4p", .key = "munmap", .class = EXACT, .run = munmap_populated, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "munmap never touched 4p", .key = "munmap", .class = EXACT, .run = munmap_untouched, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "munmap hole 4p", .key = "munmap", .class = EXACT, .run = munmap_hole, .expect = EVERYWHERE(NOTHING) },
	{ .name = "munmap 1p in the middle of 4p", .key = "munmap", .class = EXACT, .run = munmap_middle, .expect = EVERYWHERE(EVENTS(1, A(1, 2))) },
	{ .name = "munmap 2p and a byte of 4p", .key = "munmap", .class = EXACT, .run = munmap_unrounded, .expect = EVERYWHERE(EVENTS(1, A(0, 3))), .derived = 1 },
	{ .name = "munmap 6p over 3 VMAs (rw,r,rw)", .key = "munmap", .class = EXACT, .run = munmap_three, .expect = EVERYWHERE(EVENTS(1, A(0, 6))) },
	{ .name = "munmap 6p over VMA, hole, VMA", .key = "munmap", .class = EXACT, .run = munmap_over_hole, .expect = EVERYWHERE(EVENTS(1, A(0, 6))) },
	{ .name = "munmap 6p: hole, 2p VMA, hole", .key = "munmap", .class = EXACT, .run = munmap_in_holes, .expect = EVERYWHERE(EVENTS(1, A(0, 6))) },
	{ .name = "munmap PROT_NONE reservation 4p", .key = "munmap", .class = EXACT, .run = munmap_reserve, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "munmap locked 4p", .key = "munmap", .class = EXACT, .run = munmap_locked, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "munmap across locked and plain", .key = "munmap", .class = EXACT, .run = munmap_locked_and_plain, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "munmap unaligned (EINVAL)", .key = "munmap", .class = EXACT, .run = munmap_unaligned, .expect = EVERYWHERE(NOTHING) },
	{ .name = "munmap of length 0 (EINVAL)", .key = "munmap", .class = EXACT, .run = munmap_empty, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "munmap that overflows (EINVAL)", .key = "munmap", .class = EXACT, .run = munmap_overflow, .expect = EVERYWHERE(NOTHING), .derived = 1 },

	{ .name = "MAP_FIXED over populated 4p", .key = "map-fixed", .class = EXACT, .run = fixed_populated, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "MAP_FIXED over never touched 4p", .key = "map-fixed", .class = EXACT, .run = fixed_untouched, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "MAP_FIXED 1p over the middle of 4p", .key = "map-fixed", .class = EXACT, .run = fixed_middle, .expect = EVERYWHERE(EVENTS(1, A(1, 2))) },
	{ .name = "MAP_FIXED of a file over populated 4p", .key = "map-fixed", .class = EXACT, .run = fixed_file, .expect = EVERYWHERE(EVENTS(1, A(0, 4))), .derived = 1 },
	{ .name = "MAP_FIXED into a hole", .key = "map-fixed", .class = EXACT, .run = mmap_fixed_hole, .expect = EVERYWHERE(NOTHING) },
	{ .name = "MAP_FIXED and MAP_POPULATE into a hole", .key = "map-fixed", .class = EXACT, .run = mmap_fixed_populate_hole, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "MAP_FIXED_NOREPLACE into a hole", .key = "map-fixed", .class = EXACT, .run = mmap_noreplace_hole, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "MAP_FIXED_NOREPLACE over populated (EEXIST)", .key = "map-fixed", .class = EXACT, .run = noreplace_populated, .expect = EVERYWHERE(NOTHING) },
	{ .name = "MAP_FIXED and _NOREPLACE over populated (EEXIST)", .key = "map-fixed", .class = EXACT, .run = fixed_and_noreplace_populated, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "MAP_FIXED with a bad descriptor (EBADF)", .key = "map-fixed", .class = EXACT, .run = fixed_bad_descriptor, .expect = EVERYWHERE(NOTHING) },
	{ .name = "MAP_FIXED unaligned (EINVAL)", .key = "map-fixed", .class = EXACT, .run = fixed_unaligned, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "mmap with a hint at populated memory", .key = "nothing", .class = EXACT, .run = fixed_hint_only, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "MAP_FIXED refused by a driver (packet socket)", .key = "refused", .class = COVERED, .run = fixed_refused_by_packet_socket,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), A(0, 2))) },
	{ .name = "MAP_FIXED refused by a driver (unix socket)", .key = "refused", .class = COVERED, .run = fixed_refused_by_unix_socket,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), A(0, 2))), .derived = 1 },
};

TABLE(table_map, "mapping and unmapping", rows);
