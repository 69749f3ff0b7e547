/*
 * Others that patch libc's functions themselves, beside the patched sites: whoever comes first, both hear of each call.
 *
 *   hooker ucx|openmpi|libfabric LIBRARY before|after|alone
 *
 * The hooks are installed before or after the device is opened; "alone" opens none. Prints for each call how often the
 * others heard of it. Exit code 1: the device missed one; 3: the library can't be loaded.
 */
#define _GNU_SOURCE
#include "inline.h"
#include <dlfcn.h>
#include <stdbool.h>

static char *expected;
static unsigned long heard;

static void note(char *start, size_t size)
{
	heard += start <= expected && expected < start + size;
}

static void *symbol(void *library, const char *name)
{
	void *found = dlsym(library, name);

	if (found == NULL) {
		printf("%s\n", dlerror());
		exit(3);
	}
	return found;
}

static void must_be_0(const char *what, int status)
{
	if (status != 0) {
		printf("%s: %d\n", what, status);
		exit(2);
	}
}

/* ---- UCX: ucm/api/ucm.h of 1.13 ---- */

#define UCM_EVENT_VM_UNMAPPED (1 << 17)
struct unmapped {
	char *address;
	size_t size;
};
typedef void ucm_callback(int type, struct unmapped *event, void *argument);

static void on_unmapped(int type, struct unmapped *event, void *argument)
{
	(void)type, (void)argument;
	note(event->address, event->size);
}

static void install_ucx(void *library)
{
	int (*set)(int, int, ucm_callback *, void *) = symbol(library, "ucm_set_event_handler");

	must_be_0("ucm_set_event_handler", set(UCM_EVENT_VM_UNMAPPED, 1000, on_unmapped, NULL));
}

/* ---- Open MPI: opal/memoryhooks/memory.h of 4.1, and what its openib and ucx components do with it ---- */

static void on_release(void *start, size_t size, void *argument, bool from_malloc)
{
	(void)argument, (void)from_malloc;
	note(start, size);
}

static void install_openmpi(void *library)
{
	int (*begin)(int *, char ***) = symbol(library, "opal_init_util");
	int (*begin_hooks)(void) = symbol(library, "opal_mem_hooks_init");
	int (*open_framework)(void *, int) = symbol(library, "mca_base_framework_open");
	int (*add)(void (*)(void *, size_t, void *, bool), void *) = symbol(library, "opal_mem_hooks_register_release");

	must_be_0("opal_init_util", begin(NULL, NULL));
	must_be_0("opal_mem_hooks_init", begin_hooks());
	must_be_0("the framework memory", open_framework(symbol(library, "opal_memory_base_framework"), 0));
	must_be_0("opal_mem_hooks_register_release", add(on_release, NULL));
}

/* ---- libfabric: benches/peers/libfabric.c, which starts when it is loaded and counts by itself ---- */

static uint64_t (*notified)(void);

static void install_libfabric(void *library)
{
	notified = symbol(library, "peer_notified");
}

/* ---- the calls: what lies at `page` is taken away, and the page before it stays ---- */

static void call_munmap(char *page)
{
	must(munmap(page, PAGE) == 0, "munmap");
}

static void call_madvise(char *page)
{
	must(madvise(page, PAGE, MADV_DONTNEED) == 0, "madvise");
}

static void call_mmap(char *page)
{
	must(mmap(page, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page, "mmap");
}

/* To a fixed place UCX's hook doesn't pass on the place. */
static void call_mremap(char *page)
{
	must(mremap(page - PAGE, 2 * PAGE, PAGE, 0) == page - PAGE, "mremap");
}

static void call_mprotect(char *page)
{
	must(mprotect(page, PAGE, PROT_READ) == 0, "mprotect");
}

static const struct {
	const char *name;
	void (*call)(char *page);
} calls[] = {
	{ "munmap", call_munmap },
	{ "madvise", call_madvise },
	{ "mmap", call_mmap },
	{ "mremap", call_mremap },
	{ "mprotect", call_mprotect },
	/* Of a block so large that libc maps it by itself, however it tunes itself. */
	{ "free", NULL },
};

int main(int argc, char **argv)
{
	const char *who = argc > 3 ? argv[1] : "", *when = argc > 3 ? argv[3] : "";
	void (*install)(void *) = strcmp(who, "ucx") == 0	? install_ucx :
				  strcmp(who, "openmpi") == 0	? install_openmpi :
				  strcmp(who, "libfabric") == 0 ? install_libfabric :
								  NULL;
	volatile uint64_t *counter = NULL;
	unsigned long missed = 0, rounds = 200;
	int device = -1;

	must(install != NULL, "usage: hooker ucx|openmpi|libfabric LIBRARY before|after|alone");
	if (strcmp(when, "after") == 0)
		device = open_device(&counter);
	void *library = dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL);

	if (library == NULL) {
		printf("%s\n", dlerror());
		return 3;
	}
	install(library);
	if (strcmp(when, "before") == 0)
		device = open_device(&counter);
	for (size_t n = 0; n < sizeof(calls) / sizeof(calls[0]); n++) {
		unsigned long times = 0;

		for (unsigned long i = 0; i < rounds; i++) {
			char *block = calls[n].call == NULL ? malloc(64 << 20) : pages_at(NULL, 2);
			uint64_t was = counter != NULL ? *counter : 0;

			must(block != NULL, "malloc");
			expected = (char *)(((uintptr_t)block + PAGE) & ~(PAGE - 1));
			if (device >= 0)
				register_pages(device, expected, 1, i);
			uint64_t before = notified != NULL ? notified() : heard;

			if (calls[n].call == NULL)
				free(block);
			else
				calls[n].call(expected);
			times += (notified != NULL ? notified() : heard) != before;
			if (device >= 0) {
				missed += *counter != was + 1;
				unregister_pages(device, i);
			}
			if (calls[n].call != NULL)
				munmap(block, 2 * PAGE);
		}
		printf("%s %lu\n", calls[n].name, times);
	}
	if (missed > 0)
		printf("the device missed %lu\n", missed);
	return missed > 0;
}
