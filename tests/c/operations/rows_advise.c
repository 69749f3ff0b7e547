/* Rows: madvise, process_madvise, locking. Values: operations-*.txt ("madvise", "mlock & co"), corners-*.txt. */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)

/* Advice that every kernel since 5.10 knows must succeed; younger advice may be lacking. */
static enum verdict advise(char *start, long pages, int advice, const char *young)
{
	int result = do_madvise(start, (size_t)(pages * PAGE), advice);

	if (result != 0 && errno == EINVAL && young != NULL)
		return lacking(young);
	if (result != 0)
		printf("     madvise: %s\n", strerror(errno));
	want(result == 0);
	return RAN;
}

static enum verdict written_4p(int advice, const char *young)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	return advise(a, 4, advice, young);
}

static enum verdict untouched_4p(int advice, const char *young)
{
	char *a = untouched(0, 0, 4);

	watch(0, 4);
	return advise(a, 4, advice, young);
}

static enum verdict dontneed(void) { return written_4p(MADV_DONTNEED, NULL); }
static enum verdict dontneed_untouched(void) { return untouched_4p(MADV_DONTNEED, NULL); }
static enum verdict free_pages(void) { return written_4p(MADV_FREE, NULL); }
static enum verdict free_untouched(void) { return untouched_4p(MADV_FREE, NULL); }
static enum verdict willneed(void) { return written_4p(MADV_WILLNEED, NULL); }
static enum verdict sequential(void) { return written_4p(MADV_SEQUENTIAL, NULL); }
static enum verdict random_access(void) { return written_4p(MADV_RANDOM, NULL); }
static enum verdict normal(void) { return written_4p(MADV_NORMAL, NULL); }
static enum verdict dontfork(void) { return written_4p(MADV_DONTFORK, NULL); }
static enum verdict wipeonfork(void) { return written_4p(MADV_WIPEONFORK, NULL); }
static enum verdict keeponfork(void) { return written_4p(MADV_KEEPONFORK, NULL); }
static enum verdict dontdump(void) { return written_4p(MADV_DONTDUMP, NULL); }
static enum verdict dodump(void) { return written_4p(MADV_DODUMP, NULL); }
static enum verdict cold(void) { return written_4p(MADV_COLD, NULL); }

/* Whether anything was paged out can't be told from outside, so an emulated device reports it in any case. */
static int can_page_out(void)
{
	char line[256];
	FILE *swaps = fopen("/proc/swaps", "re");
	int lines = 0;

	while (swaps != NULL && fgets(line, sizeof(line), swaps) != NULL)
		lines++;
	if (swaps != NULL)
		fclose(swaps);
	return !judging || lines > 1;
}

static enum verdict pageout(void)
{
	return can_page_out() ? written_4p(MADV_PAGEOUT, NULL) : skip("it takes swap space");
}

static enum verdict hugepage(void) { return written_4p(MADV_HUGEPAGE, "transparent huge pages"); }
static enum verdict nohugepage(void) { return written_4p(MADV_NOHUGEPAGE, "transparent huge pages"); }
static enum verdict unmergeable(void) { return written_4p(MADV_UNMERGEABLE, "KSM"); }
static enum verdict populate_read(void) { return written_4p(MADV_POPULATE_READ, "MADV_POPULATE_READ"); }
static enum verdict populate_write(void) { return written_4p(MADV_POPULATE_WRITE, "MADV_POPULATE_WRITE"); }
static enum verdict dontneed_locked(void) { return written_4p(MADV_DONTNEED_LOCKED, "MADV_DONTNEED_LOCKED"); }
static enum verdict guard_install(void) { return written_4p(ADVICE_GUARD_INSTALL, "MADV_GUARD_INSTALL"); }
static enum verdict guard_untouched(void) { return untouched_4p(ADVICE_GUARD_INSTALL, "MADV_GUARD_INSTALL"); }

static enum verdict dofork(void)
{
	char *a = written(0, 0, 4);

	must(madvise(a, 4 * PAGE, MADV_DONTFORK) == 0);
	watch(0, 4);
	return advise(a, 4, MADV_DOFORK, NULL);
}

static enum verdict mergeable(void)
{
	char *a = written(0, 0, 4);
	enum verdict verdict;

	watch(0, 4);
	verdict = advise(a, 4, MADV_MERGEABLE, "KSM");
	return verdict;
}

static enum verdict dontneed_again(void)
{
	char *a = written(0, 0, 4);

	must(madvise(a, 4 * PAGE, MADV_DONTNEED) == 0);
	watch(0, 4);
	return advise(a, 4, MADV_DONTNEED, NULL);
}

static enum verdict dontneed_middle(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	return advise(a + PAGE, 1, MADV_DONTNEED, NULL);
}

static enum verdict dontneed_three(void)
{
	char *a = written(0, 0, 6);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, PROT_READ) == 0);
	watch(0, 6);
	return advise(a, 6, MADV_DONTNEED, NULL);
}

static enum verdict dontneed_over_hole(void)
{
	char *a = written(0, 0, 2);

	written(0, 3, 3);
	watch(0, 6);
	want(do_madvise(a, 6 * PAGE, MADV_DONTNEED) == -1 && errno == ENOMEM);
	return RAN;
}

static enum verdict dontneed_into_locked(void)
{
	char *a = written(0, 0, 4);

	must(mlock(a + 2 * PAGE, 2 * PAGE) == 0);
	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict dontneed_locked_on_locked(void)
{
	char *a = written(0, 0, 4);

	must(mlock(a, 4 * PAGE) == 0);
	watch(0, 4);
	return advise(a, 4, MADV_DONTNEED_LOCKED, "MADV_DONTNEED_LOCKED");
}

static enum verdict dontneed_unaligned(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_madvise(a + 1, PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict dontneed_empty(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_madvise(a, 0, MADV_DONTNEED) == 0);
	return RAN;
}

static enum verdict unknown_advice(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, 12345) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict write_after_free(void)
{
	char *a = written(0, 0, 4);

	must(madvise(a, 4 * PAGE, MADV_FREE) == 0);
	watch(0, 4);
	write_pages(a, 4);
	return RAN;
}

static enum verdict remove_anonymous(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_madvise(a, 4 * PAGE, MADV_REMOVE) == -1 && errno == EINVAL);
	return RAN;
}

static enum verdict collapse(void)
{
	char *a = written(0, 0, HUGE_PAGES);
	enum verdict verdict;

	if (prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) != 0)
		return skip("transparent huge pages can't be allowed again: %s", strerror(errno));
	watch(0, HUGE_PAGES);
	verdict = do_madvise(a, HUGE_PAGES * PAGE, MADV_COLLAPSE) == 0 ? RAN
		: errno == EINVAL				      ? lacking("MADV_COLLAPSE")
								      : skip("no huge page: %s", strerror(errno));
	must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	return verdict;
}

static enum verdict guard_again(void)
{
	char *a = written(0, 0, 4);

	if (madvise(a, 4 * PAGE, ADVICE_GUARD_INSTALL) != 0)
		return lacking("MADV_GUARD_INSTALL");
	watch(0, 4);
	return advise(a, 4, ADVICE_GUARD_INSTALL, NULL);
}

static enum verdict guard_remove(void)
{
	char *a = written(0, 0, 4);

	if (madvise(a, 4 * PAGE, ADVICE_GUARD_INSTALL) != 0)
		return lacking("MADV_GUARD_INSTALL");
	watch(0, 4);
	return advise(a, 4, ADVICE_GUARD_REMOVE, NULL);
}

static enum verdict guard_three(void)
{
	char *a = written(0, 0, 6);

	must(mprotect(a + 2 * PAGE, 2 * PAGE, PROT_READ) == 0);
	watch(0, 6);
	return advise(a, 6, ADVICE_GUARD_INSTALL, "MADV_GUARD_INSTALL");
}

/* process_madvise on oneself, of one or two pieces. */
static enum verdict process_advise(int advice, int two, const char *young)
{
	char *a = written(0, 0, 4);
	struct iovec pieces[2] = { { a, (two ? 1 : 4) * PAGE }, { a + 2 * PAGE, 2 * PAGE } };
	long self = syscall(SYS_pidfd_open, getpid(), 0);
	long done;

	if (self < 0)
		return lacking("pidfd_open");
	keep_fd((int)self);
	watch(0, 4);
	done = kernel_call(SYS_process_madvise, self, (long)pieces, two ? 2 : 1, advice, 0, 0);
	if (done < 0 && errno == EPERM)
		return skip("process_madvise isn't permitted here");
	if (done < 0 && (errno == EINVAL || errno == ENOSYS))
		return lacking(young);
	want(done == (two ? 3 : 4) * PAGE);
	return RAN;
}

static enum verdict process_cold(void) { return process_advise(MADV_COLD, 0, "process_madvise"); }
static enum verdict process_willneed(void) { return process_advise(MADV_WILLNEED, 0, "process_madvise WILLNEED"); }
static enum verdict process_pageout(void)
{
	return can_page_out() ? process_advise(MADV_PAGEOUT, 0, "process_madvise") : skip("it takes swap space");
}

static enum verdict process_dontneed(void) { return process_advise(MADV_DONTNEED, 0, "process_madvise DONTNEED"); }
static enum verdict process_free(void) { return process_advise(MADV_FREE, 0, "process_madvise FREE"); }
static enum verdict process_dontneed_two(void) { return process_advise(MADV_DONTNEED, 1, "process_madvise DONTNEED"); }

static enum verdict lock_written(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(do_mlock(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict lock_untouched(void)
{
	char *a = untouched(0, 0, 4);

	watch(0, 4);
	want(do_mlock(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict unlock(void)
{
	char *a = written(0, 0, 4);

	must(mlock(a, 4 * PAGE) == 0);
	watch(0, 4);
	want(do_munlock(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict lock_all(void)
{
	written(0, 0, 4);
	watch(0, 4);
	if (mlockall(MCL_CURRENT) != 0)
		return skip("mlockall: %s (the limit on locked memory)", strerror(errno));
	must(munlockall() == 0);
	return RAN;
}

static enum verdict lock_zero_pages(void)
{
	char *a = untouched(0, 0, 4);

	read_pages(a, 4);
	watch(0, 4);
	want(do_mlock(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict populate_zero_pages(void)
{
	char *a = untouched(0, 0, 4);

	read_pages(a, 4);
	watch(0, 4);
	return advise(a, 4, MADV_POPULATE_WRITE, "MADV_POPULATE_WRITE");
}

static enum verdict in_core(void)
{
	unsigned char present[4];
	char *a = written(0, 0, 4);

	watch(0, 4);
	want(mincore(a, 4 * PAGE, present) == 0);
	return RAN;
}

static enum verdict seal(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	if (kernel_call(CALL_MSEAL, (long)a, 4 * PAGE, 0, 0, 0, 0) != 0)
		return errno == ENOSYS ? lacking("mseal") : skip("mseal: %s", strerror(errno));
	return RAN;
}

static enum verdict sealed_munmap(void)
{
	char *a = written(0, 0, 4);

	if (syscall(CALL_MSEAL, a, 4 * PAGE, 0) != 0)
		return errno == ENOSYS ? lacking("mseal") : skip("mseal: %s", strerror(errno));
	watch(0, 4);
	want(do_munmap(a, 4 * PAGE) == -1 && errno == EPERM);
	return RAN;
}

static enum verdict writev_self(void)
{
	char *a = written(0, 0, 4);
	char page[PAGE];
	struct iovec from = { page, PAGE }, to = { a, PAGE };

	memset(page, 3, sizeof(page));
	watch(0, 4);
	if (process_vm_writev(getpid(), &from, 1, &to, 1, 0) != PAGE)
		return skip("process_vm_writev: %s", strerror(errno));
	return RAN;
}

static enum verdict name_memory(void)
{
	char *a = written(0, 0, 4);

	watch(0, 4);
	if (prctl(0x53564d41, 0, a, 4 * PAGE, "walk") != 0)
		return errno == EINVAL ? lacking("names of anonymous memory") : skip("%s", strerror(errno));
	return RAN;
}

#define ZERO(title, function) { .name = title, .key = "nothing", .class = EXACT, .run = function, .expect = EVERYWHERE(NOTHING) }

static const struct row rows[] = {
	{ .name = "MADV_DONTNEED populated", .key = "madvise-drop", .class = EXACT, .run = dontneed, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "MADV_DONTNEED again (empty)", .key = "madvise-drop", .class = EXACT, .run = dontneed_again, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "MADV_DONTNEED never touched", .key = "madvise-drop", .class = EXACT, .run = dontneed_untouched, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "MADV_DONTNEED 1p in the middle", .key = "madvise-drop", .class = EXACT, .run = dontneed_middle, .expect = EVERYWHERE(EVENTS(1, A(1, 2))), .derived = 1 },
	{ .name = "MADV_DONTNEED over 3 VMAs", .key = "madvise-drop", .class = EXACT, .run = dontneed_three,
	  .expect = EVERYWHERE(EVENTS(3, A(0, 2), A(2, 4), A(4, 6))) },
	{ .name = "MADV_DONTNEED over VMA, hole, VMA (ENOMEM, acted)", .key = "madvise-drop", .class = EXACT, .run = dontneed_over_hole,
	  .expect = EVERYWHERE(EVENTS(2, A(0, 2), A(3, 6))) },
	{ .name = "MADV_DONTNEED over VMA, locked VMA (EINVAL, acted)", .key = "madvise-drop", .class = EXACT, .run = dontneed_into_locked,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 2))) },
	{ .name = "MADV_DONTNEED unaligned (EINVAL)", .key = "madvise-drop", .class = EXACT, .run = dontneed_unaligned, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "MADV_DONTNEED of length 0", .key = "madvise-drop", .class = EXACT, .run = dontneed_empty, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "madvise with unknown advice (EINVAL)", .key = "nothing", .class = EXACT, .run = unknown_advice, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "MADV_DONTNEED_LOCKED populated", .key = "madvise-drop", .class = EXACT, .run = dontneed_locked,
	  .expect = BY_KERNEL(NOTHING, EVENTS(1, A(0, 4)), EVENTS(1, A(0, 4)), EVENTS(1, A(0, 4))) },
	{ .name = "MADV_DONTNEED_LOCKED on locked memory", .key = "madvise-drop", .class = EXACT, .run = dontneed_locked_on_locked, .derived = 1,
	  .expect = BY_KERNEL(NOTHING, EVENTS(1, A(0, 4)), EVENTS(1, A(0, 4)), EVENTS(1, A(0, 4))) },
	{ .name = "MADV_FREE populated", .key = "madvise-drop", .class = EXACT, .run = free_pages, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "MADV_FREE never touched", .key = "madvise-drop", .class = EXACT, .run = free_untouched, .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	ZERO("write after MADV_FREE", write_after_free),
	ZERO("MADV_REMOVE on anonymous memory (EINVAL)", remove_anonymous),
	ZERO("MADV_WILLNEED", willneed),
	ZERO("MADV_COLD", cold),
	ZERO("MADV_SEQUENTIAL", sequential),
	ZERO("MADV_RANDOM", random_access),
	ZERO("MADV_NORMAL", normal),
	ZERO("MADV_HUGEPAGE", hugepage),
	ZERO("MADV_NOHUGEPAGE", nohugepage),
	ZERO("MADV_DONTFORK", dontfork),
	ZERO("MADV_DOFORK", dofork),
	ZERO("MADV_WIPEONFORK", wipeonfork),
	ZERO("MADV_KEEPONFORK", keeponfork),
	ZERO("MADV_DONTDUMP", dontdump),
	ZERO("MADV_DODUMP", dodump),
	ZERO("MADV_MERGEABLE", mergeable),
	ZERO("MADV_POPULATE_READ populated", populate_read),
	ZERO("MADV_POPULATE_WRITE populated", populate_write),
	{ .name = "MADV_PAGEOUT anonymous", .key = "pageout", .class = COVERED, .run = pageout,
	  .expect = BY_KERNEL(NOTHING, EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)), EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)),
			      EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))) },
	{ .name = "MADV_COLLAPSE 2 MiB", .key = "pageout", .class = COVERED, .run = collapse,
	  .expect = BY_KERNEL(NOTHING, EVENTS(1, A(0, 512)), EVENTS(1, A(0, 512)), EVENTS(1, A(0, 512))) },
	{ .name = "MADV_GUARD_INSTALL touched", .key = "guard", .class = COVERED, .run = guard_install,
	  .expect = BY_KERNEL(NOTHING, NOTHING, NOTHING, EVENTS(1, A(0, 4))) },
	{ .name = "MADV_GUARD_INSTALL never touched", .key = "guard", .class = COVERED, .run = guard_untouched, .expect = EVERYWHERE(NOTHING) },
	{ .name = "MADV_GUARD_INSTALL again", .key = "guard", .class = COVERED, .run = guard_again, .expect = EVERYWHERE(NOTHING) },
	{ .name = "MADV_GUARD_INSTALL over 3 touched VMAs", .key = "guard", .class = COVERED, .run = guard_three,
	  .expect = BY_KERNEL(NOTHING, NOTHING, NOTHING, EVENTS(3, A(0, 2), A(2, 4), A(4, 6))) },
	ZERO("MADV_GUARD_REMOVE", guard_remove),
	{ .name = "MADV_UNMERGEABLE, nothing merged", .key = "single-page-advice", .class = COVERED, .run = unmergeable, .expect = EVERYWHERE(NOTHING) },

	ZERO("process_madvise on oneself COLD", process_cold),
	{ .name = "process_madvise on oneself WILLNEED", .key = "nothing", .class = EXACT, .run = process_willneed, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "process_madvise on oneself PAGEOUT", .key = "pageout", .class = COVERED, .run = process_pageout, .derived = 1,
	  .expect = BY_KERNEL(NOTHING, EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)), EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)),
			      EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))) },
	{ .name = "process_madvise on oneself DONTNEED", .key = "madvise-drop", .class = EXACT, .run = process_dontneed,
	  .expect = BY_KERNEL(NOTHING, NOTHING, NOTHING, EVENTS(1, A(0, 4))) },
	{ .name = "process_madvise on oneself FREE", .key = "madvise-drop", .class = EXACT, .run = process_free, .derived = 1,
	  .expect = BY_KERNEL(NOTHING, NOTHING, NOTHING, EVENTS(1, A(0, 4))) },
	{ .name = "process_madvise on oneself DONTNEED, 2 pieces", .key = "madvise-drop", .class = EXACT, .run = process_dontneed_two, .derived = 1,
	  .expect = BY_KERNEL(NOTHING, NOTHING, NOTHING, EVENTS(2, A(0, 1), A(2, 4))) },

	ZERO("mlock populated", lock_written),
	ZERO("mlock never touched (populates)", lock_untouched),
	ZERO("munlock", unlock),
	ZERO("mlockall and munlockall", lock_all),
	ZERO("mincore", in_core),
	{ .name = "mseal", .key = "nothing", .class = EXACT, .run = seal, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "munmap of sealed memory (EPERM)", .key = "refused", .class = COVERED, .run = sealed_munmap, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	ZERO("process_vm_writev on oneself", writev_self),
	ZERO("prctl PR_SET_VMA_ANON_NAME", name_memory),
	{ .name = "mlock over zero pages 4p", .key = "cow", .class = BEYOND, .run = lock_zero_pages,
	  .expect = EVERYWHERE(EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))) },
	{ .name = "MADV_POPULATE_WRITE over zero pages 4p", .key = "cow", .class = BEYOND, .run = populate_zero_pages,
	  .expect = BY_KERNEL(NOTHING, EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)), EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4)),
			      EVENTS(4, A(0, 1), A(1, 2), A(2, 3), A(3, 4))) },
};

TABLE(table_advise, "madvise and locking", rows);
