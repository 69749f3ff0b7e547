/*
 * Rows: pages that the kernel moves by its own decision, or takes away: swap, KSM, memory failure. They change the
 * machine, so they are for a guest. Values: operations-*.txt ("swap", "KSM", "madvise").
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RW (PROT_READ | PROT_WRITE)
#define NOT_HERE skip("it would change this machine (it is done in a guest)")

/* ---- swap ---- */

static int has_swap(void)
{
	char line[256];
	FILE *swaps = fopen("/proc/swaps", "re");
	int lines = 0;

	while (swaps != NULL && fgets(line, sizeof(line), swaps) != NULL)
		lines++;
	if (swaps != NULL)
		fclose(swaps);
	return lines > 1;
}

#define NO_SWAP skip("it takes swap space")

/* 4 pages that lie in swap space; NULL if the kernel kept them. */
static char *swapped_out(void)
{
	unsigned char present[4];
	char *a = written(0, 0, 4);

	must(madvise(a, 4 * PAGE, MADV_PAGEOUT) == 0 && mincore(a, 4 * PAGE, present) == 0);
	watch(0, 4);
	return a;
}

static enum verdict swap_in(void)
{
	if (!has_swap())
		return NO_SWAP;
	read_pages(swapped_out(), 4);
	return RAN;
}

static enum verdict swap_in_and_write(void)
{
	if (!has_swap())
		return NO_SWAP;
	write_pages(swapped_out(), 4);
	return RAN;
}

static enum verdict munmap_swapped(void)
{
	if (!has_swap())
		return NO_SWAP;
	want(do_munmap(swapped_out(), 4 * PAGE) == 0);
	return RAN;
}

/* ---- KSM ---- */

#define KSM "/sys/kernel/mm/ksm/"

static int set(const char *name, const char *value)
{
	char path[64];
	int fd, done;

	snprintf(path, sizeof(path), KSM "%s", name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	done = fd >= 0 && write(fd, value, strlen(value)) == (ssize_t)strlen(value);
	if (fd >= 0)
		close(fd);
	return done;
}

static long get(const char *name)
{
	char path[64];
	long value = -1;
	FILE *file;

	snprintf(path, sizeof(path), KSM "%s", name);
	file = fopen(path, "re");
	if (file == NULL || fscanf(file, "%ld", &value) != 1)
		value = -1;
	if (file != NULL)
		fclose(file);
	return value;
}

/* Waits until the 8 equal pages at A are one; KSM stands still afterwards. */
static enum verdict merge(char *a)
{
	int left = 3000;

	/* 2: forgets what it merged for others. */
	if (!set("run", "2") || !set("pages_to_scan", "10000") || !set("sleep_millisecs", "10"))
		return skip("KSM can't be set up");
	if (madvise(a, 8 * PAGE, MADV_MERGEABLE) != 0)
		return lacking("KSM");
	must(set("run", "1"));
	while (get("pages_sharing") < 7 && --left > 0)
		usleep(10000);
	must(set("run", "0"));
	return left > 0 ? RAN : skip("KSM shares %ld pages after 30 s", get("pages_sharing"));
}

static char *equal_pages(void)
{
	char *a = untouched(0, 0, 8);

	memset(a, 0x5a, 8 * PAGE);
	return a;
}

static enum verdict ksm_merges(void)
{
	char *a;

	if (!expendable())
		return NOT_HERE;
	a = equal_pages();
	watch(0, 8);
	return merge(a);
}

static enum verdict ksm_write(void)
{
	enum verdict verdict;
	char *a;

	if (!expendable())
		return NOT_HERE;
	a = equal_pages();
	verdict = merge(a);
	watch(0, 8);
	write_pages(a, 1);
	return verdict;
}

static enum verdict ksm_unmerge(void)
{
	enum verdict verdict;
	char *a;

	if (!expendable())
		return NOT_HERE;
	a = equal_pages();
	verdict = merge(a);
	watch(0, 8);
	want(do_madvise(a, 8 * PAGE, MADV_UNMERGEABLE) == 0);
	return verdict;
}

/* ---- memory failure ---- */

static enum verdict poison(char *page, int advice, const char *name)
{
	if (do_madvise(page, PAGE, advice) != 0)
		return errno == EINVAL || errno == EOPNOTSUPP ? lacking(name) : skip("%s: %s", name, strerror(errno));
	return RAN;
}

static enum verdict soft_offline(void)
{
	char *a;

	if (!expendable())
		return NOT_HERE;
	a = written(0, 0, 4);
	watch(0, 4);
	return poison(a, 101, "MADV_SOFT_OFFLINE");
}

/* The kernel tells whoever has the page in use that it is lost. */
static void lost(int signal)
{
	(void)signal;
}

static enum verdict hardware_poison(void)
{
	struct sigaction action = { .sa_handler = lost }, before;
	enum verdict verdict;
	char *a;

	if (!expendable())
		return NOT_HERE;
	a = written(0, 0, 4);
	watch(0, 4);
	must(sigaction(SIGBUS, &action, &before) == 0);
	verdict = poison(a, MADV_HWPOISON, "MADV_HWPOISON");
	must(sigaction(SIGBUS, &before, NULL) == 0);
	return verdict;
}

#define EIGHT_PAGES EVENTS(8, A(0, 1), A(1, 2), A(2, 3), A(3, 4), A(4, 5), A(5, 6), A(6, 7), A(7, 8))

static const struct row rows[] = {
	{ .name = "swap-in by read", .key = "nothing", .class = EXACT, .run = swap_in, .once = 1, .expect = EVERYWHERE(NOTHING) },
	{ .name = "swap-in by write", .key = "nothing", .class = EXACT, .run = swap_in_and_write, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(NOTHING) },
	{ .name = "munmap swapped-out 4p", .key = "munmap", .class = EXACT, .run = munmap_swapped, .once = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "KSM merges 8 equal pages", .key = "kernel", .class = BEYOND, .run = ksm_merges, .once = 1, .loose = 1,
	  .expect = EVERYWHERE(EIGHT_PAGES) },
	{ .name = "write to a page that KSM merged", .key = "cow", .class = BEYOND, .run = ksm_write, .once = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 1))) },
	{ .name = "MADV_UNMERGEABLE of 8 merged pages", .key = "single-page-advice", .class = COVERED, .run = ksm_unmerge, .once = 1,
	  .derived = 1, .expect = EVERYWHERE(EIGHT_PAGES) },
	/* 5.10's recording lacks it; the module reports it there as well. */
	{ .name = "MADV_SOFT_OFFLINE 1p", .key = "single-page-advice", .class = COVERED, .run = soft_offline, .expect = EVERYWHERE(EVENTS(1, A(0, 1))) },
	{ .name = "MADV_HWPOISON 1p", .key = "single-page-advice", .class = COVERED, .run = hardware_poison, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 1))) },
};

TABLE(table_moved, "pages that the kernel moves", rows);
