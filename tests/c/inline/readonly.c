/*
 * Calls of libc that hit no region write to no memory that threads share: what the library has and what came with the
 * open is read-only meanwhile, and a write to it would be the end.
 *
 *   readonly MISSES       makes so many, and then shows that a hit is still reported
 *   readonly MISSES hit   makes a hit among them, which writes: it dies by SIGSEGV
 */
#define _GNU_SOURCE
#include "inline.h"
#include <stdint.h>
#include <sys/syscall.h>

#define REGIONS 64
/* Where the library lies (README). */
#define IMAGE 0x550000000000UL
#define IMAGE_END (IMAGE + (1UL << 24))

struct span {
	uintptr_t start, end;
};
#define SPANS 512

/* What is writable, and what of it is to be read-only. */
static struct span before[SPANS], shared[SPANS];
static size_t before_count, shared_count;
/* What must be among it. */
static int arenas, counters, segments, anonymous;

/* By an instruction that the library can't see. */
static long raw(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return result;
}

static void add(struct span *spans, size_t *count, uintptr_t start, uintptr_t end)
{
	must(*count < SPANS, "room for the mappings");
	spans[(*count)++] = (struct span){ start, end };
}

/* Adds what of a span wasn't writable before. */
static void add_new(uintptr_t start, uintptr_t end)
{
	for (size_t i = 0; i < before_count && start < end; i++) {
		if (before[i].end <= start || before[i].start >= end)
			continue;
		if (before[i].start > start)
			add(shared, &shared_count, start, before[i].start);
		start = before[i].end;
	}
	if (start < end)
		add(shared, &shared_count, start, end);
}

/* Reads the mappings without allocating. */
static void look(int opened)
{
	static char text[1 << 18];
	int maps = open("/proc/self/maps", O_RDONLY);
	size_t length = 0;
	ssize_t got;

	must(maps >= 0, "/proc/self/maps");
	while ((got = read(maps, text + length, sizeof(text) - 1 - length)) > 0)
		length += got;
	must(got == 0 && length < sizeof(text) - 1, "/proc/self/maps");
	text[length] = 0;
	close(maps);
	for (char *line = text, *next; *line != 0; line = next + 1) {
		unsigned long start, end;
		char rights[5];
		int path = 0;

		next = strchr(line, '\n');
		*next = 0;
		must(sscanf(line, "%lx-%lx %4s %*x %*s %*u %n", &start, &end, rights, &path) == 3, "a mapping");
		if (rights[1] != 'w')
			continue;
		/* They grow by themselves. */
		if (strcmp(line + path, "[stack]") == 0 || strcmp(line + path, "[heap]") == 0)
			continue;
		if (!opened) {
			add(before, &before_count, start, end);
		} else if (start >= IMAGE && end <= IMAGE_END) {
			add(shared, &shared_count, start, end);
			*(line[path] == 0 ? &anonymous : &segments) += 1;
		} else {
			arenas += strstr(line + path, "ummunotify-arena") != NULL;
			counters += strstr(line + path, "ummunotify-counter") != NULL;
			add_new(start, end);
		}
	}
}

static void allow(int rights)
{
	for (size_t i = 0; i < shared_count; i++) {
		size_t length = shared[i].end - shared[i].start;

		must(raw(SYS_mprotect, (long)shared[i].start, (long)length, rights) == 0, "mprotect");
	}
}

/* Each is one call of libc at the least that hits nothing. */
static void miss(char *discarded)
{
	char *p = pages_at(NULL, 2);
	char *volatile block;

	must(munmap(p, PAGE) == 0, "munmap");
	must(madvise(discarded, PAGE, MADV_DONTNEED) == 0, "madvise");
	must(*discarded == 0, "the page was discarded");
	must(munmap(p + PAGE, PAGE) == 0, "munmap");
	block = malloc(64 << 20);
	must(block != NULL, "malloc");
	*block = 1;
	free(block);
}

int main(int argc, char **argv)
{
	unsigned long misses = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
	int hit = argc > 2 && strcmp(argv[2], "hit") == 0;
	/* Every other page is registered: what is discarded has regions on both sides. */
	char *pages = pages_at(NULL, 2 * REGIONS);
	volatile uint64_t *counter;

	look(0);
	int device = open_device(&counter);

	for (size_t i = 0; i < REGIONS; i++)
		register_pages(device, pages + 2 * i * PAGE, 1, i);
	miss(pages + PAGE);
	look(1);
	must(patched((void *)munmap).stub != NULL, "munmap is patched");
	must(arenas == 1 && counters == 1 && segments > 0 && anonymous > 0, "all of it was found");
	allow(PROT_READ);
	for (unsigned long i = 0; i < misses; i += 4) {
		miss(pages + (1 + 2 * (i % (REGIONS - 1))) * PAGE);
		if (hit && i >= misses / 2)
			munmap(pages, PAGE);
	}
	allow(PROT_READ | PROT_WRITE);
	must(*counter == 0, "a miss isn't counted");
	must(munmap(pages, PAGE) == 0, "munmap");
	must(*counter == 1, "a hit is counted");
	struct ummunotify_event events[2];

	must(read(device, events, sizeof(events)) == sizeof(events), "two events");
	must(events[0].type == UMMUNOTIFY_EVENT_TYPE_INVAL && events[0].user_cookie_counter == 0, "the region");
	printf("%zu spans were read-only during %lu misses\n", shared_count, misses);
	return 0;
}
