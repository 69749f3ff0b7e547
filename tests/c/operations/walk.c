/*
 * The walk itself: every row of every table, in three passes that make the calls in different ways.
 *
 *   walk [--module] [--records] [--table TEXT] [--only TEXT]...
 *
 * --module: the real module answers and judges: it reports also what no system call causes, and covered rows
 * are held to the recorded value. --records: a line more for each row, with n and all records, for a comparison
 * of backends: "exact" where they must be the same, "free" where they needn't. --table and --only: tables and rows whose name holds the text, rows by several texts if need be. Exit code 0: every row as it must be; 1: some not; 3: no device.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

int judging;
static int print_records;

static enum kernel kernel;
static int moves_several;
static int wanted_failures;
static char reason[200];

static const char *const way_names[] = { "libc", "syscall(3)", "instruction" };
static const char *const class_names[] = { "exact", "covered", "unreached", "beyond", "split" };
static const char *const kernel_names[] = { "5.10", "6.1", "6.12", "7.3" };

enum verdict skip(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(reason, sizeof(reason), format, arguments);
	va_end(arguments);
	return SKIPPED;
}

enum verdict lacking(const char *what)
{
	snprintf(reason, sizeof(reason), "this kernel lacks %s", what);
	return LACKING;
}

int want_(int condition, const char *text)
{
	int error = errno;

	if (!condition) {
		printf("     the operation itself: not (%s), errno %d %s\n", text, error, strerror(error));
		wanted_failures++;
	}
	return condition;
}

void must_(int condition, const char *text, const char *file, int line)
{
	if (!condition) {
		printf("%s:%d: not (%s): %s\n", file, line, text, strerror(errno));
		exit(2);
	}
}

/* Which recording the running kernel acts like: found by trying, for vendors move features between versions. */
static void probe_kernel(void)
{
	char *a, *to;

	area_next_slot();
	a = written(0, 0, 2);
	written(0, 3, 3);
	to = mremap(a, 6 * PAGE, 6 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at(1, 0));
	moves_several = to != MAP_FAILED;
	area_release();
	area_next_slot();
	a = written(0, 0, 4);
	/* mseal came with 6.10, and with it what tells 6.12 from 6.1; MADV_POPULATE_WRITE with 5.14. */
	if (moves_several || madvise(a, PAGE, ADVICE_GUARD_INSTALL) == 0)
		kernel = LIKE_7_3;
	else if (syscall(CALL_MSEAL, a, 0, 0) == 0 || errno != ENOSYS)
		kernel = LIKE_6_12;
	else if (madvise(a, PAGE, MADV_POPULATE_WRITE) == 0)
		kernel = LIKE_6_1;
	else
		kernel = LIKE_5_10;
	area_release();
	printf("this kernel acts like %s%s\n", kernel_names[kernel],
	       kernel == LIKE_7_3 && !moves_several ? ", but mremap doesn't move several mappings" : "");
}

/* What the row must report here, and whether exactly that. */
static const struct expect *expected(const struct row *row, enum verdict verdict, int *exactly)
{
	static const struct expect nothing_expected;
	enum kernel column = row->moves_several && !moves_several && kernel == LIKE_7_3 ? LIKE_6_12 : kernel;
	const struct expect *expect = &row->expect[column];

	if (verdict == LACKING) {
		/* Nothing happened. Whoever records before the call can't know that the kernel will refuse. */
		*exactly = judging;
		return &nothing_expected;
	}
	*exactly = 1;
	switch (row->class) {
	case EXACT:
		if (row->refusal_covered && expect->n == 0)
			*exactly = judging;
		return expect;
	case COVERED:
		*exactly = judging && !row->derived;
		return expect;
	case UNREACHED:
		*exactly = judging && !row->derived;
		return expect;
	case BEYOND:
		return judging ? expect : &nothing_expected;
	case SPLIT:
		return judging ? expect : &row->own;
	}
	return expect;
}

/* Whether every backend must report the very same. */
static int same_everywhere(const struct row *row, enum verdict verdict, int unreached, const struct expect *expect)
{
	return row->class == EXACT && verdict == RAN && !unreached && !(row->refusal_covered && expect->n == 0);
}

struct tally {
	int ok, failed, skipped, unreached;
};

static void run_row(const struct row *row, int unreached, struct tally *tally)
{
	const struct expect *expect;
	struct report report;
	enum verdict verdict;
	const char *mark;
	int exactly, informal = (unreached || row->class == UNREACHED) && !judging;

	area_next_slot();
	wanted_failures = 0;
	reason[0] = 0;
	verdict = row->run();
	expect = expected(row, verdict, &exactly);
	if (verdict == SKIPPED) {
		printf("skip %-9s %-55s %s\n", class_names[row->class], row->name, reason);
		tally->skipped++;
	} else {
		if (informal)
			exactly = 0;
		report = device_compare(expect, exactly, row->unordered);
		if (informal) {
			mark = "----";
			tally->unreached++;
		} else if (report.ok && wanted_failures == 0) {
			mark = "ok  ";
			tally->ok++;
		} else {
			mark = "FAIL";
			tally->failed++;
		}
		printf("%s %-9s %-55s n=%lu%s%s%s%s\n", mark, class_names[row->class], row->name, (unsigned long)report.n,
		       report.text, reason[0] ? "  " : "", reason,
		       informal ? (report.ok && report.n > 0 ? "  (unreached, but seen)" : "  (unreached, not seen)") : "");
		if (print_records) {
			printf("records %s n=%lu", same_everywhere(row, verdict, unreached, expect) ? "exact" : "free",
			       (unsigned long)report.n);
			device_print_records();
			printf("\n");
		}
	}
	device_forget_regions();
	area_release();
	fflush(stdout);
}

enum folder { IN_MEMORY, ON_DISK, STACKED };

static enum folder folder_kind(void)
{
	struct statfs about;

	must(statfs(".", &about) == 0);
	switch (about.f_type) {
	case 0x01021994: /* tmpfs */
	case 0x858458f6: /* ramfs */
		return IN_MEMORY;
	case 0x794c7630: /* overlayfs */
		return STACKED;
	default:
		return ON_DISK;
	}
}

/* Texts of --only. */
static const char *only[8];
static int only_count;

static int chosen(const struct row *row)
{
	for (int i = 0; i < only_count; i++) {
		if (strstr(row->name, only[i]) != NULL)
			return 1;
	}
	return only_count == 0;
}

static void run_table(const struct table *table, const char *only_table, struct tally *tally)
{
	enum folder folder = folder_kind();
	int disk = table == &table_disk;

	if (only_table != NULL && strstr(table->name, only_table) == NULL)
		return;
	printf("== %s\n", table->name);
	if (disk && folder == IN_MEMORY) {
		printf("skip the whole table: the current folder isn't on a disk file system\n");
		tally->skipped += (int)table->count;
		return;
	}
	file_use_disk(disk);
	for (size_t i = 0; i < table->count; i++) {
		const struct row *row = &table->rows[i];

		if (chosen(row) && !(row->once && way != BY_LIBC))
			run_row(row, disk && folder == STACKED, tally);
	}
	file_use_disk(0);
}

int main(int argc, char **argv)
{
	static const struct table *const tables[] = {
		&table_map, &table_remap, &table_protect, &table_advise, &table_file,
		&table_disk, &table_process, &table_library, &table_rare,
	};
	static char output[1 << 16];
	struct tally tally = { 0 };
	const char *only_table = NULL;

	setvbuf(stdout, output, _IOFBF, sizeof(output));
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--module") == 0)
			judging = 1;
		else if (strcmp(argv[i], "--records") == 0)
			print_records = 1;
		else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc && only_count < 8)
			only[only_count++] = argv[++i];
		else if (strcmp(argv[i], "--table") == 0 && i + 1 < argc)
			only_table = argv[++i];
		else
			return fprintf(stderr, "usage: walk [--module] [--records] [--table TEXT] [--only TEXT]...\n"), 2;
	}
	must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	probe_kernel();
	rare_probe();
	other_start();
	device_open();
	for (way = BY_LIBC; way < WAYS; way++) {
		printf("======== by %s\n", way_names[way]);
		for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++)
			run_table(tables[i], only_table, &tally);
	}
	/* What brings company to the address space: afterwards nobody can swear that it is alone. */
	for (way = BY_LIBC; way < WAYS; way++) {
		printf("======== by %s\n", way_names[way]);
		run_table(&table_sharing, only_table, &tally);
		run_table(&table_ring, only_table, &tally);
	}
	printf("%d rows ok, %d failed, %d skipped, %d unreached\n", tally.ok, tally.failed, tally.skipped, tally.unreached);
	return tally.failed == 0 ? 0 : 1;
}
