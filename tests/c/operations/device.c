/*
 * Regions over a row's memory, and the comparison of what the device reports with a model of it.
 *
 * One region per page, one per pair of neighbouring pages and one over everything tell ranges apart exactly:
 * a region that was hit once carries the range as its hint, one that was hit twice carries none, and a pair of
 * pages that two ranges meet in was hit twice.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define MARGIN 2
#define MAX_REGIONS 8192
#define FIRST_COOKIE 1000

struct region {
	uint64_t start, end;
	/* The model: */
	int queued, hinted;
	uint64_t hint_start, hint_end;
};

static int device = -1;
static const volatile uint64_t *counter;
static uint64_t counter_before;

static struct region regions[MAX_REGIONS];
static int region_count;
static uint64_t memory_base[2];
/* Size of the regions that cover the window one by one. */
static uint64_t cell_bytes;

static struct ummunotify_event got[MAX_REGIONS + 1], wanted[MAX_REGIONS + 1];
static int got_count, wanted_count;
static int fifo[MAX_REGIONS];
static int fifo_count;

void device_open(void)
{
	uint32_t features = 0xdeadbeef;

	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (device < 0) {
		printf("open /dev/ummunotify: %s\n", strerror(errno));
		exit(3);
	}
	must(ioctl(device, UMMUNOTIFY_EXCHANGE_FEATURES, &features) == 0 && features == 0);
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED && *counter == 0);
}

static void add_region(uint64_t start, uint64_t end)
{
	struct ummunotify_register_ioctl argument = {
		.start = start,
		.end = end,
		.user_cookie = FIRST_COOKIE + (uint64_t)region_count,
	};

	must(region_count < MAX_REGIONS);
	must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &argument) == 0);
	regions[region_count++] = (struct region){ .start = start, .end = end };
}

static void watch_base(int memory, uint64_t base, long pages, long cell)
{
	uint64_t first = base - (uint64_t)(MARGIN * cell * PAGE);
	uint64_t step = (uint64_t)(cell * PAGE);
	long cells = pages / cell + 2 * MARGIN;

	memory_base[memory] = base;
	cell_bytes = step;
	add_region(first, first + (uint64_t)cells * step);
	for (long i = 0; i < cells; i++)
		add_region(first + (uint64_t)i * step, first + (uint64_t)(i + 1) * step);
	for (long i = 0; i + 1 < cells; i++)
		add_region(first + (uint64_t)i * step, first + (uint64_t)(i + 2) * step);
	counter_before = *counter;
}

void watch(int memory, long pages)
{
	watch_base(memory, (uint64_t)at(memory, 0), pages, 1);
}

void watch_cells(int memory, long pages, long cell)
{
	watch_base(memory, (uint64_t)at(memory, 0), pages, cell);
}

void watch_cells_at(int memory, void *base, long pages, long cell)
{
	watch_base(memory, (uint64_t)base, pages, cell);
}

void watch_at(int memory, void *base, long pages)
{
	watch_base(memory, (uint64_t)base, pages, 1);
}

void watch_only(int memory, void *base, size_t bytes)
{
	memory_base[memory] = (uint64_t)base & ~(uint64_t)(PAGE - 1);
	cell_bytes = bytes;
	add_region((uint64_t)base, (uint64_t)base + bytes);
	counter_before = *counter;
}

void device_forget_regions(void)
{
	for (int i = 0; i < region_count; i++) {
		uint64_t cookie = FIRST_COOKIE + (uint64_t)i;

		must(ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0);
	}
	region_count = 0;
	memory_base[0] = memory_base[1] = 0;
}

/* Ascending start; among equal starts the later registered first. */
static int by_start(const void *left, const void *right)
{
	int l = *(const int *)left, r = *(const int *)right;

	if (regions[l].start != regions[r].start)
		return regions[l].start < regions[r].start ? -1 : 1;
	return r - l;
}

/* One invalidation, by the rules of the interface; returns whether it hit anything. */
static int model_invalidate(uint64_t start, uint64_t end)
{
	static int hit[MAX_REGIONS];
	int hits = 0;

	for (int i = 0; i < region_count; i++) {
		if (regions[i].start < end && start < regions[i].end)
			hit[hits++] = i;
	}
	qsort(hit, (size_t)hits, sizeof(hit[0]), by_start);
	for (int i = 0; i < hits; i++) {
		struct region *r = &regions[hit[i]];

		if (r->queued) {
			r->hinted = 0;
			continue;
		}
		r->queued = r->hinted = 1;
		r->hint_start = start > r->start ? start : r->start;
		r->hint_end = end < r->end ? end : r->end;
		fifo[fifo_count++] = hit[i];
	}
	return hits > 0;
}

static uint64_t span_start(const struct span *s)
{
	return memory_base[s->memory] + (uint64_t)(s->start * PAGE);
}

static uint64_t span_end(const struct span *s)
{
	return memory_base[s->memory] + (uint64_t)(s->end * PAGE);
}

/* Fills `wanted` with what the device must report; returns n. */
static uint64_t model_run(const struct expect *expect)
{
	uint64_t n = 0;

	fifo_count = wanted_count = 0;
	for (int i = 0; i < region_count; i++)
		regions[i].queued = regions[i].hinted = 0;
	for (int i = 0; i < expect->n; i++)
		n += (uint64_t)model_invalidate(span_start(&expect->spans[i]), span_end(&expect->spans[i]));
	for (int i = 0; i < fifo_count; i++) {
		const struct region *r = &regions[fifo[i]];

		wanted[wanted_count++] = (struct ummunotify_event){
			.type = UMMUNOTIFY_EVENT_TYPE_INVAL,
			.flags = r->hinted ? UMMUNOTIFY_EVENT_FLAG_HINT : 0,
			.hint_start = r->hinted ? r->hint_start : r->start,
			.hint_end = r->hinted ? r->hint_end : r->end,
			.user_cookie_counter = FIRST_COOKIE + (uint64_t)fifo[i],
		};
	}
	return n;
}

/* Reads INVALs into `got` until LAST; with nothing to report the read must say EAGAIN. */
static int read_all(uint64_t *last)
{
	static struct ummunotify_event buffer[128];

	got_count = 0;
	for (;;) {
		ssize_t bytes = read(device, buffer, sizeof(buffer));

		if (bytes < 0 && errno == EAGAIN && got_count == 0) {
			*last = counter_before;
			return 1;
		}
		if (bytes <= 0 || bytes % (ssize_t)sizeof(buffer[0]) != 0) {
			printf("     read: %zd, %s\n", bytes, bytes < 0 ? strerror(errno) : "not whole records");
			return 0;
		}
		for (ssize_t i = 0; i < bytes / (ssize_t)sizeof(buffer[0]); i++) {
			if (buffer[i].type == UMMUNOTIFY_EVENT_TYPE_LAST) {
				*last = buffer[i].user_cookie_counter;
				return 1;
			}
			if (got_count > MAX_REGIONS) {
				printf("     more records than regions\n");
				return 0;
			}
			if (buffer[i].user_cookie_counter - FIRST_COOKIE >= (uint64_t)region_count) {
				printf("     a record with cookie %lu, which nobody registered\n",
				       (unsigned long)buffer[i].user_cookie_counter);
				return 0;
			}
			got[got_count++] = buffer[i];
		}
	}
}

/* An address as the tables write it. */
static const char *name_of(uint64_t address)
{
	static char names[4][40];
	static int turn;
	char *name = names[turn++ & 3];

	for (int memory = 1; memory >= 0; memory--) {
		int64_t distance = (int64_t)(address - memory_base[memory]);

		if (memory_base[memory] != 0 && distance >= -(1L << 22) && distance <= (1L << 33)) {
			snprintf(name, 40, "%c%+ld%s", memory ? 'C' : 'A', (long)(distance / PAGE),
				 distance % PAGE ? "~" : "");
			return name;
		}
	}
	snprintf(name, 40, "0x%lx", (unsigned long)address);
	return name;
}

/* The pages that were reported, neighbours joined; a star where the hint was lost. */
static void describe(struct report *report)
{
	size_t used = 0;
	uint64_t start = 0, end = 0;
	unsigned hinted = 0;

	report->text[0] = 0;
	for (int i = 0; i <= got_count; i++) {
		const struct ummunotify_event *e = &got[i];
		const struct region *r = i < got_count ? &regions[e->user_cookie_counter - FIRST_COOKIE] : NULL;
		int page = r != NULL && r->end - r->start == cell_bytes;

		if (page && end == e->hint_start && hinted == e->flags) {
			end = e->hint_end;
			continue;
		}
		if (!page && i < got_count)
			continue;
		if (end != 0 && used + 60 < sizeof(report->text))
			used += (size_t)snprintf(report->text + used, sizeof(report->text) - used, " [%s,%s)%s",
						 name_of(start), name_of(end), hinted ? "" : "*");
		start = e->hint_start;
		end = e->hint_end;
		hinted = e->flags;
	}
}

static int by_cookie(const void *left, const void *right)
{
	const struct ummunotify_event *l = left, *r = right;

	return l->user_cookie_counter < r->user_cookie_counter ? -1 : l->user_cookie_counter > r->user_cookie_counter;
}

static void print_side(const char *side, const struct ummunotify_event *events, int count)
{
	printf("     %s %d records:", side, count);
	for (int i = 0; i < count && i < 24; i++) {
		int region = (int)(events[i].user_cookie_counter - FIRST_COOKIE);

		printf(" #%d[%s,%s)%s", region, name_of(events[i].hint_start), name_of(events[i].hint_end),
		       events[i].flags & UMMUNOTIFY_EVENT_FLAG_HINT ? "" : "*");
	}
	printf("%s\n", count > 24 ? " ..." : "");
}

static int compare_exactly(const struct report *report, uint64_t n, int unordered)
{
	if (unordered) {
		qsort(got, (size_t)got_count, sizeof(got[0]), by_cookie);
		qsort(wanted, (size_t)wanted_count, sizeof(wanted[0]), by_cookie);
	}
	if (report->n == n && got_count == wanted_count &&
	    memcmp(got, wanted, (size_t)got_count * sizeof(got[0])) == 0)
		return 1;
	printf("     n: wanted %lu, got %lu\n", (unsigned long)n, (unsigned long)report->n);
	print_side("wanted", wanted, wanted_count);
	print_side("got   ", got, got_count);
	return 0;
}

/* Every region that had to be hit was reported, and its hint covers what had to be covered. */
static int compare_covering(const struct report *report, uint64_t n)
{
	if (n > 0 && report->n == 0) {
		printf("     the counter did not move\n");
		return 0;
	}
	for (int i = 0; i < wanted_count; i++) {
		const struct ummunotify_event *w = &wanted[i], *g = NULL;

		for (int k = 0; k < got_count && g == NULL; k++) {
			if (got[k].user_cookie_counter == w->user_cookie_counter)
				g = &got[k];
		}
		/* A wanted record without a hint may have lost it to ranges that a wider one covers. */
		if (g == NULL || ((w->flags & UMMUNOTIFY_EVENT_FLAG_HINT) &&
				  (g->hint_start > w->hint_start || g->hint_end < w->hint_end))) {
			printf("     not covered: [%s,%s)\n", name_of(w->hint_start), name_of(w->hint_end));
			print_side("wanted", wanted, wanted_count);
			print_side("got   ", got, got_count);
			return 0;
		}
	}
	return 1;
}

struct report device_compare(const struct expect *expect, int exactly, int unordered)
{
	struct report report = { 0 };
	uint64_t n = model_run(expect), last = 0;

	if (!read_all(&last))
		return report;
	report.n = last - counter_before;
	if (*counter != last) {
		printf("     LAST said %lu, the counter page says %lu\n", (unsigned long)last, (unsigned long)*counter);
		return report;
	}
	describe(&report);
	report.ok = exactly ? compare_exactly(&report, n, unordered) : compare_covering(&report, n);
	return report;
}

void device_print_records(void)
{
	for (int i = 0; i < got_count; i++)
		printf(" #%d[%s,%s)%s", (int)(got[i].user_cookie_counter - FIRST_COOKIE), name_of(got[i].hint_start),
		       name_of(got[i].hint_end), got[i].flags & UMMUNOTIFY_EVENT_FLAG_HINT ? "" : "*");
}
