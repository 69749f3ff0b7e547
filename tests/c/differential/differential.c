/*
 * Two contexts in one process, one on the kernel module and one emulated, with the same regions: random memory
 * operations by the only thread must move both counters by the same amount, and be read as the same records.
 *
 *   differential [STEPS [SEED]]     under `ummunotify run`, where the module is loaded
 *
 * All memory of the window is written after each step, never read; huge pages are off; nothing forks: these are
 * the conditions under which the emulation claims to be exact. In which order several mappings of one file are
 * hit is left open, so after an operation on a file the records up to the next read are compared as a set.
 * Exit code 0: no difference; 1: differences; 2: the test itself could not be done.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/ummunotify.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096L
#define RW (PROT_READ | PROT_WRITE)
#define WINDOW_PAGES 48
#define HEAP_PAGES 16
#define FILE_PAGES 24
#define REGIONS 24
#define MOST_DIFFERENCES 10

/*
 * The window lies inside 2 MiB whose first page is always mapped and written: the page table never goes away,
 * and mprotect reports a range from its beginning.
 */
static char *const table_keeper = (char *)0x200000000000;
static char *const window = (char *)0x200000000000 + 64 * PAGE;
static char *heap;

enum { MODULE, EMULATED, SIDES };
static const char *const side_names[SIDES] = { "module", "emulated" };
static int device[SIDES];
static const volatile uint64_t *counter[SIDES];
static struct ummunotify_event records[SIDES][REGIONS + 1];
static int record_count[SIDES];

static struct { int used; uint64_t cookie; } regions[REGIONS];
static uint64_t next_cookie = 1;
static int files[2];
/* An operation on a file since the last read. */
static int unordered;
static char operation[200];
static uint64_t state;

static void give_up(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	exit(2);
}

static unsigned below(unsigned limit)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (unsigned)((state >> 20) % limit);
}

static sigjmp_buf beyond;

static void stray(int signal)
{
	(void)signal;
	siglongjmp(beyond, 1);
}

/* Writes every page that can be written: holes, protected pages and those past a file's end can't. */
static void write_all(volatile char *start, long pages)
{
	volatile long page = 0;

	sigsetjmp(beyond, 0);
	while (page < pages) {
		long now = page++;

		start[now * PAGE] = 1;
	}
}

static void say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(operation, sizeof(operation), format, arguments);
	va_end(arguments);
}

static void open_side(int side, const char *backend)
{
	uint32_t features = 7;

	if (setenv("UMMUNOTIFY_BACKEND", backend, 1) != 0)
		give_up("setenv");
	device[side] = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (device[side] < 0)
		give_up(backend);
	if (ioctl(device[side], UMMUNOTIFY_EXCHANGE_FEATURES, &features) != 0)
		give_up("EXCHANGE_FEATURES");
	counter[side] = mmap(NULL, 8, PROT_READ, MAP_SHARED, device[side], 0);
	if (counter[side] == MAP_FAILED)
		give_up("mmap of the counter");
}

static void add_region(int slot)
{
	char *base = below(5) == 0 ? heap : window;
	unsigned pages = base == heap ? HEAP_PAGES : WINDOW_PAGES;
	unsigned first = below(pages), length = 1 + below(8);
	struct ummunotify_register_ioctl argument = { .user_cookie = next_cookie };

	if (first + length > pages)
		length = pages - first;
	argument.start = (uint64_t)(base + first * PAGE) + (below(4) ? 0 : below(PAGE));
	argument.end = (uint64_t)(base + (first + length) * PAGE) - (below(4) ? 0 : below(PAGE));
	say("register %lu: [%#lx, %#lx)", (unsigned long)next_cookie, (unsigned long)argument.start,
	    (unsigned long)argument.end);
	for (int side = 0; side < SIDES; side++) {
		if (ioctl(device[side], UMMUNOTIFY_REGISTER_REGION, &argument) != 0)
			give_up("REGISTER_REGION");
	}
	regions[slot].used = 1;
	regions[slot].cookie = next_cookie++;
}

static void remove_region(int slot)
{
	say("unregister %lu", (unsigned long)regions[slot].cookie);
	for (int side = 0; side < SIDES; side++) {
		if (ioctl(device[side], UMMUNOTIFY_UNREGISTER_REGION, &regions[slot].cookie) != 0)
			give_up("UNREGISTER_REGION");
	}
	regions[slot].used = 0;
}

static void do_map(char *at, size_t bytes)
{
	static const int prots[] = { RW, RW, RW, PROT_READ, PROT_NONE };
	int prot = prots[below(5)], replace = below(4) ? MAP_FIXED : MAP_FIXED_NOREPLACE;
	int fd = (int)below(3) - 1, flags = replace;
	long offset = 0;

	if (fd >= 0) {
		flags |= below(2) ? MAP_SHARED : MAP_PRIVATE;
		offset = (long)below(FILE_PAGES) * PAGE;
	} else {
		flags |= MAP_ANONYMOUS | (below(5) ? MAP_PRIVATE : MAP_SHARED);
	}
	say("mmap(%p, %ld pages, prot %d, flags %#x, file %d, page %ld)", at, bytes / PAGE, prot, flags, fd, offset / PAGE);
	mmap(at, bytes, prot, flags, fd < 0 ? -1 : files[fd], offset);
}

static void do_mremap(char *at, size_t bytes)
{
	size_t changed = (1 + below(8)) * PAGE;
	char *to = window + below(WINDOW_PAGES - 8) * PAGE, *got;
	int flags = MREMAP_MAYMOVE;

	switch (below(4)) {
	case 0:
		flags |= MREMAP_FIXED;
		changed = bytes;
		break;
	case 1:
		flags |= MREMAP_FIXED;
		break;
	case 2:
		flags = 0;
		break;
	}
	say("mremap(%p, %ld pages, %ld pages, flags %d, %p)", at, bytes / PAGE, changed / PAGE, flags, to);
	got = mremap(at, bytes, changed, flags, to);
	/* Where the kernel chose, nothing is registered. */
	if (got != MAP_FAILED && (got < window || got >= window + WINDOW_PAGES * PAGE))
		munmap(got, changed);
}

static void do_shm(char *at)
{
	int id;
	unsigned pages = 1 + below(6);

	if (below(2)) {
		say("shmdt(%p)", at);
		shmdt(at);
		return;
	}
	id = shmget(IPC_PRIVATE, pages * PAGE, IPC_CREAT | 0600);
	if (id < 0)
		give_up("shmget");
	say("shmat(%p, %u pages, SHM_REMAP)", at, pages);
	shmat(id, at, SHM_REMAP);
	shmctl(id, IPC_RMID, NULL);
}

static void do_file(void)
{
	int file = (int)below(2);
	long first = below(FILE_PAGES), pages = 1 + below(8), odd = below(3) ? 0 : below(PAGE);

	unordered = 1;
	if (below(2)) {
		say("fallocate(file %d, PUNCH_HOLE, %ld, %ld)", file, first * PAGE + odd, pages * PAGE);
		fallocate(files[file], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first * PAGE + odd, pages * PAGE);
	} else {
		say("ftruncate(file %d, %ld)", file, first * PAGE + odd);
		if (ftruncate(files[file], first * PAGE + odd) != 0)
			give_up("ftruncate");
	}
}

static void do_advise(char *at, size_t bytes)
{
	static const int advices[] = { MADV_DONTNEED, MADV_DONTNEED, MADV_FREE, MADV_REMOVE, MADV_WILLNEED,
				       MADV_RANDOM, MADV_DONTFORK, MADV_NORMAL };
	int advice = advices[below(sizeof(advices) / sizeof(advices[0]))];
	int result;

	if (advice == MADV_REMOVE)
		unordered = 1;
	result = madvise(at, bytes, advice);
	say("madvise(%p, %ld pages, %d): %d", at, bytes / PAGE, advice, result);
}

static void step(void)
{
	static const int prots[] = { PROT_NONE, PROT_READ, RW, RW, PROT_READ | PROT_EXEC };
	unsigned first = below(WINDOW_PAGES), pages = 1 + below(8);
	char *at = window + first * PAGE;
	unsigned slot = below(REGIONS);
	int prot;
	size_t bytes;

	if (first + pages > WINDOW_PAGES)
		pages = WINDOW_PAGES - first;
	bytes = pages * PAGE;
	switch (below(16)) {
	case 0: case 1:
		say("munmap(%p, %u pages)", at, pages);
		munmap(at, bytes);
		break;
	case 2: case 3: case 4: case 5:
		do_map(at, bytes);
		break;
	case 6: case 7:
		do_mremap(at, bytes);
		break;
	case 8:
		prot = prots[below(5)];
		say("mprotect(%p, %u pages, %d)", at, pages, prot);
		mprotect(at, bytes, prot);
		break;
	case 9: case 10:
		do_advise(at, bytes);
		break;
	case 11:
		first = below(HEAP_PAGES + 1);
		say("brk(heap + %u pages)", first);
		if (brk(heap + first * PAGE) != 0)
			give_up("brk");
		break;
	case 12:
		do_shm(at);
		break;
	case 13:
		do_file();
		break;
	default:
		if (regions[slot].used)
			remove_region((int)slot);
		else
			add_region((int)slot);
	}
}

static int by_cookie(const void *left, const void *right)
{
	const struct ummunotify_event *l = left, *r = right;

	if (l->type != r->type)
		return l->type < r->type ? -1 : 1;
	return l->user_cookie_counter < r->user_cookie_counter ? -1 : l->user_cookie_counter > r->user_cookie_counter;
}

static void read_side(int side)
{
	ssize_t bytes = read(device[side], records[side], sizeof(records[side]));

	if (bytes < 0 && errno != EAGAIN)
		give_up("read");
	record_count[side] = bytes < 0 ? 0 : (int)(bytes / (ssize_t)sizeof(records[side][0]));
}

static int same_records(void)
{
	if (unordered) {
		for (int side = 0; side < SIDES; side++)
			qsort(records[side], (size_t)record_count[side], sizeof(records[0][0]), by_cookie);
	}
	return record_count[MODULE] == record_count[EMULATED] &&
	       memcmp(records[MODULE], records[EMULATED], (size_t)record_count[MODULE] * sizeof(records[0][0])) == 0;
}

static void print_cell(int side, int i)
{
	const struct ummunotify_event *e = &records[side][i];
	char text[80] = "";

	if (i < record_count[side])
		snprintf(text, sizeof(text), e->type == UMMUNOTIFY_EVENT_TYPE_LAST ? "LAST %lu" : "#%lu [%#lx,%#lx)%s",
			 (unsigned long)e->user_cookie_counter, (unsigned long)e->hint_start,
			 (unsigned long)e->hint_end, e->flags & UMMUNOTIFY_EVENT_FLAG_HINT ? "" : "*");
	printf("%-52s", text);
}

static void print_difference(long number, const uint64_t *moved, int read_already)
{
	char text[8192];
	ssize_t length;
	int maps;

	printf("DIFFERENCE in step %ld: %s: module +%lu, emulated +%lu\n", number, operation,
	       (unsigned long)moved[MODULE], (unsigned long)moved[EMULATED]);
	for (int side = 0; side < SIDES; side++) {
		if (!read_already)
			read_side(side);
		printf("  %-50s", side_names[side]);
	}
	printf("\n");
	for (int i = 0; i < record_count[MODULE] || i < record_count[EMULATED]; i++) {
		printf("  ");
		print_cell(MODULE, i);
		print_cell(EMULATED, i);
		printf("\n");
	}
	printf("  mapped afterwards:\n");
	maps = open("/proc/self/maps", O_RDONLY);
	while ((length = read(maps, text, sizeof(text) - 1)) > 0) {
		text[length] = 0;
		for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
			if (strncmp(line, "2000000", 7) == 0)
				printf("    %s\n", line);
		}
	}
	close(maps);
	unordered = 0;
}

int main(int argc, char **argv)
{
	static char output[1 << 16];
	struct sigaction action = { .sa_handler = stray, .sa_flags = SA_NODEFER };
	long steps = argc > 1 ? atol(argv[1]) : 5000, events = 0, compared = 0;
	unsigned long seed = argc > 2 ? strtoul(argv[2], NULL, 0) : (unsigned long)time(NULL);
	int differences = 0;
	uint64_t before[SIDES], moved[SIDES];

	setvbuf(stdout, output, _IOFBF, sizeof(output));
	printf("differential: %ld steps, seed %lu\n", steps, seed);
	fflush(stdout);
	state = seed * 0x9e3779b97f4a7c15 + 1;
	if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0)
		give_up("prctl");
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	if (mmap(table_keeper, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != table_keeper)
		give_up("mmap");
	*table_keeper = 1;
	for (int i = 0; i < 2; i++) {
		files[i] = memfd_create("differential", MFD_CLOEXEC);
		if (files[i] < 0 || ftruncate(files[i], FILE_PAGES * PAGE) != 0)
			give_up("memfd");
	}
	open_side(MODULE, "kmod");
	open_side(EMULATED, "emulated");
	/* A page of its own at the heap's old end: nobody else allocates from here on. */
	heap = (char *)(((uintptr_t)sbrk(0) + 2 * PAGE - 1) & ~(uintptr_t)(PAGE - 1));
	if (brk(heap + HEAP_PAGES * PAGE) != 0)
		give_up("brk");
	for (int i = 0; i < REGIONS / 2; i++)
		add_region(i);
	for (long number = 1; number <= steps; number++) {
		int read_now = below(4) == 0, same;

		write_all(window, WINDOW_PAGES);
		write_all(heap, ((char *)sbrk(0) - heap) / PAGE);
		for (int side = 0; side < SIDES; side++)
			before[side] = *counter[side];
		step();
		for (int side = 0; side < SIDES; side++)
			moved[side] = *counter[side] - before[side];
		events += (long)moved[MODULE];
		same = moved[MODULE] == moved[EMULATED];
		if (same && read_now) {
			for (int side = 0; side < SIDES; side++)
				read_side(side);
			/* LAST holds the counter, which may differ since an earlier difference alone. */
			for (int side = 0; differences > 0 && side < SIDES; side++) {
				struct ummunotify_event *end = &records[side][record_count[side] - 1];

				if (record_count[side] > 0 && end->type == UMMUNOTIFY_EVENT_TYPE_LAST)
					end->user_cookie_counter = 0;
			}
			compared += record_count[MODULE];
			same = same_records();
			if (same)
				unordered = 0;
		}
		if (same)
			continue;
		print_difference(number, moved, moved[MODULE] == moved[EMULATED]);
		fflush(stdout);
		if (++differences == MOST_DIFFERENCES)
			break;
	}
	printf("differential: %d differences, %ld invalidations, %ld records compared, seed %lu\n", differences, events,
	       compared, seed);
	return differences ? 1 : 0;
}
