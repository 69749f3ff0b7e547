/*
 * The walk itself: every row of every table, in three passes that make the calls in different ways.
 *
 *   walk {--module | --coverage FILE [--partial]} [--records] [--table TEXT] [--only TEXT]...
 *
 * --module: the real module answers and judges: it reports also what no system call causes, and covered rows
 * are held to the recorded value. --coverage: the emulator's table of what it sees, printed by
 * `ummunotify doctor --coverage`; a row that it calls unseen must not be reported. --partial: the table is that of
 * a layer that isn't the whole emulator; what it doesn't claim is performed and not judged. --records: a line more for each
 * row, with n and all records, for a comparison of backends: "exact" where they must be the same, "covered" where
 * the module's must be covered, else "free". --table and --only: tables and rows whose name holds the text, rows by
 * several texts if need be. Exit code 0: every row as it must be; 1: some not; 2: the walk failed; 3: no device.
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
static int partial;

static enum kernel kernel;
static int moves_several;
static int wanted_failures;
static char reason[200];

#ifdef WALK_IN_GO
static const char *const way_names[] = { "Go's runtime" };
#else
static const char *const way_names[] = { "libc", "syscall(3)", "instruction" };
#endif
static const char *const class_names[] = { "exact", "covered", "gap", "beyond", "split" };
static const char *const kernel_names[] = { "5.10", "6.1", "6.12", "7.3" };

enum verdict skip(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(reason, sizeof(reason), format, arguments);
	va_end(arguments);
	return SKIPPED;
}

int expendable(void)
{
	return getenv("UMN_GUEST") != NULL;
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

/* How a row is judged here. */
struct measure {
	const struct expect *expect;
	/* What the module reports of it. */
	const struct expect *of_module;
	int exactly;
	/* Whether two backends must report the very same, or one at least what the module does, or neither. */
	const char *between;
};

static const struct expect nothing_expected;

/* Whether the emulated device is to report rows that are seen so. */
static int is_seen(enum sight sight)
{
	return sight <= SEEN_COVERED;
}

static struct measure measure(const struct row *row, enum verdict verdict, enum sight sight)
{
	enum kernel column = row->moves_several && !moves_several && kernel == LIKE_7_3 ? LIKE_6_12 : kernel;
	struct measure m = { .expect = &row->expect[column], .between = "free" };
	int may_have_acted = row->refusal_covered && m.expect->n == 0;

	if (verdict == LACKING || verdict == REFUSED || row->unrecorded)
		m.expect = &nothing_expected;
	m.of_module = m.expect;
	if (!judging && !is_seen(sight)) {
		m.expect = &nothing_expected;
		m.exactly = 1;
		return m;
	}
	if (verdict == LACKING || verdict == REFUSED) {
		/* Whoever records before the call can't know that the kernel will refuse. */
		m.exactly = judging && verdict == LACKING;
		m.between = "covered";
		return m;
	}
	switch (row->class) {
	case EXACT:
		m.exactly = !row->unrecorded && (judging || (sight == SEEN_EXACTLY && !may_have_acted));
		m.between = may_have_acted ? "covered" : "exact";
		break;
	case COVERED:
		m.between = "covered";
		/* fall through */
	case GAP:
		m.exactly = judging && !row->derived && !row->unrecorded;
		break;
	case BEYOND:
		m.exactly = judging && !row->loose && !row->unrecorded;
		break;
	case SPLIT:
		m.exactly = 1;
		if (!judging)
			m.expect = &row->own;
		break;
	}
	return m;
}

/* The specification asks for this much; a table that promises less would loosen the walk. */
static int promises_too_little(const struct row *row, enum sight sight)
{
	switch (row->class) {
	case EXACT:
	case SPLIT:
		return sight != SEEN_EXACTLY;
	case COVERED:
		return !is_seen(sight);
	default:
		return 0;
	}
}

struct tally {
	int ok, failed, skipped, unseen, unjudged;
};

static struct tally tally;

static void run_row(const struct row *row)
{
	enum sight sight = judging ? SEEN_EXACTLY : coverage_of(row->key);
	struct measure m;
	struct report report;
	enum verdict verdict;
	const char *mark;

	area_next_slot();
	wanted_failures = 0;
	reason[0] = 0;
	verdict = row->run();
	if (verdict == IMPOSSIBLE) {
		printf("none %-9s %-55s %s\n", class_names[row->class], row->name, reason);
	} else if (verdict == SKIPPED) {
		printf("skip %-9s %-55s %s\n", class_names[row->class], row->name, reason);
		tally.skipped++;
		if (!judging)
			coverage_skip(row->key, reason);
	} else {
		m = measure(row, verdict, sight);
		report = device_compare(m.expect, m.exactly, row->unordered);
		if (!judging && !partial && !is_seen(sight) && report.n > 0) {
			printf("     reported, although the coverage table calls %s %s\n", row->key, sight_name(sight));
			report.ok = 0;
		}
		if (!judging && !partial && promises_too_little(row, sight)) {
			printf("     the coverage table calls %s %s; the specification asks for %s\n", row->key,
			       sight_name(sight), row->class == COVERED ? "covered" : "exact");
			report.ok = 0;
		}
		if (partial && !is_seen(sight)) {
			mark = "----";
			tally.unjudged++;
		} else if (!report.ok || wanted_failures > 0) {
			mark = "FAIL";
			tally.failed++;
		} else if (!judging && !is_seen(sight) && row->class == GAP) {
			mark = "gap ";
			tally.unseen++;
		} else if (row->unrecorded) {
			mark = "----";
			tally.unjudged++;
		} else {
			mark = "ok  ";
			tally.ok++;
		}
		printf("%s %-9s %-55s n=%lu%s%s%s\n", mark, class_names[row->class], row->name, (unsigned long)report.n,
		       report.text, reason[0] ? "  " : "", reason);
		if (print_records) {
			printf("records %s n=%lu", m.between, (unsigned long)report.n);
			device_print_records();
			printf("\n");
		}
		if (!judging && verdict == LACKING)
			coverage_skip(row->key, reason);
		else if (!judging && verdict == RAN) {
			coverage_performed(row->key, m.exactly && report.ok, report.n > 0, m.of_module->n > 0);
			/* The split itself is the kernel's own doing. */
			if (row->class == SPLIT)
				coverage_performed("kernel", 0, !report.ok, 1);
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

int folder_is_in_memory(void)
{
	return folder_kind() == IN_MEMORY;
}

/* Whether which mappings are hit depends on the file that the call names. */
static int is_identified_by_file(const char *key)
{
	static const char *const keys[] = { "remove", "remove-disk", "fallocate", "truncate", "path" };

	for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
		if (strcmp(key, keys[i]) == 0)
			return 1;
	}
	return 0;
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

static void run_if_chosen(const struct row *row)
{
	struct row elsewhere = *row;

	if (!chosen(row) || (row->once && way != 0))
		return;
#ifdef WALK_IN_GO
	/* Its runtime's threads are company from the start: no 0 that is deduced from the mapping table is used. */
	if (row->class == EXACT) {
		elsewhere.key = "crowd";
		elsewhere.class = COVERED;
	}
#endif
	/* What a file operation hits isn't known there as exactly, and nobody recorded it. */
	if (file_is_disk() && folder_kind() == STACKED && is_identified_by_file(row->key)) {
		if (!judging)
			coverage_skip(row->key, "the current folder is on a stacked file system");
		elsewhere.key = "stacked-files";
		elsewhere.class = COVERED;
		elsewhere.derived = 1;
	}
	run_row(&elsewhere);
}

static void run_table(const struct table *table, const char *only_table)
{
	int disk = table == &table_disk;

	if (only_table != NULL && strstr(table->name, only_table) == NULL)
		return;
	printf("== %s\n", table->name);
	if (table == &table_kinds)
		kinds_walk(run_if_chosen);
	if (disk && folder_is_in_memory()) {
		printf("skip the whole table: the current folder isn't on a disk file system\n");
		tally.skipped += (int)table->count;
		for (size_t i = 0; !judging && i < table->count; i++)
			coverage_skip(table->rows[i].key, "the current folder isn't on a disk file system");
		return;
	}
	if (disk && folder_kind() != STACKED && !judging)
		coverage_skip("stacked-files", "the current folder isn't on a stacked file system");
	file_use_disk(disk);
	for (size_t i = 0; i < table->count; i++)
		run_if_chosen(&table->rows[i]);
	file_use_disk(0);
}

static int usage(void)
{
	fprintf(stderr, "usage: walk {--module | --coverage FILE [--partial]} [--records] [--table TEXT] [--only TEXT]...\n");
	return 2;
}

int main(int argc, char **argv)
{
	static const struct table *const tables[] = {
		&table_map, &table_remap, &table_protect, &table_advise, &table_file,
		&table_disk, &table_process, &table_library, &table_rare, &table_entry, &table_moved, &table_kinds,
	};
	static char output[1 << 16];
	const char *only_table = NULL, *coverage = NULL;

	setvbuf(stdout, output, _IOFBF, sizeof(output));
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--module") == 0)
			judging = 1;
		else if (strcmp(argv[i], "--partial") == 0)
			partial = 1;
		else if (strcmp(argv[i], "--records") == 0)
			print_records = 1;
		else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc && only_count < 8)
			only[only_count++] = argv[++i];
		else if (strcmp(argv[i], "--table") == 0 && i + 1 < argc)
			only_table = argv[++i];
		else if (strcmp(argv[i], "--coverage") == 0 && i + 1 < argc)
			coverage = argv[++i];
		else
			return usage();
	}
	if (judging == (coverage != NULL))
		return usage();
	if (!judging)
		coverage_read(coverage);
	must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	probe_kernel();
	entry_probe();
	other_start();
	device_open();
	for (way = 0; way < WAYS; way++) {
		printf("======== by %s\n", way_names[way]);
		for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++)
			run_table(tables[i], only_table);
	}
	/* What brings company to the address space: afterwards nobody can swear that it is alone. */
	for (way = 0; way < WAYS; way++) {
		printf("======== by %s\n", way_names[way]);
		run_table(&table_sharing, only_table);
	}
	/* And after a ring nobody can swear that a change of memory is a call's. */
	for (way = BY_LIBC; way < WAYS; way++) {
		printf("======== by %s\n", way_names[way]);
		run_table(&table_ring, only_table);
	}
#ifndef WALK_IN_GO
	if (!judging && !partial && only_table == NULL && only_count == 0)
		tally.failed += coverage_finish();
#endif
	printf("%d rows ok, %d failed, %d skipped, %d unseen, %d unjudged\n", tally.ok, tally.failed, tally.skipped,
	       tally.unseen, tally.unjudged);
	fflush(stdout);
	return tally.failed == 0 ? 0 : 1;
}
