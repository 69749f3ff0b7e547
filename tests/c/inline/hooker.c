/*
 * UCX's memory hooks, which patch libc's functions themselves, beside the patched sites: whoever comes first, both
 * hear of each munmap.
 *
 *   hooker LIBUCS before|after    UCX's hooks are installed before or after the device is opened
 *
 * Exit code 3: the library can't be loaded.
 */
#define _GNU_SOURCE
#include "inline.h"
#include <dlfcn.h>

/* From UCX's ucm/api/ucm.h. */
#define UCM_EVENT_VM_UNMAPPED (1 << 17)
struct unmapped {
	void *address;
	size_t size;
};
typedef void callback(int type, struct unmapped *event, void *argument);
typedef int set_event_handler(int events, int priority, callback *call, void *argument);

static void *expected;
static unsigned long heard;

static void on_unmapped(int type, struct unmapped *event, void *argument)
{
	(void)type, (void)argument;
	heard += event->address == expected;
}

static void install(set_event_handler *set)
{
	int status = set(UCM_EVENT_VM_UNMAPPED, 1000, on_unmapped, NULL);

	if (status != 0) {
		printf("ucm_set_event_handler: %d\n", status);
		exit(2);
	}
}

int main(int argc, char **argv)
{
	void *library = argc > 2 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : NULL;
	volatile uint64_t *counter;
	unsigned long missed = 0, rounds = 1000;

	if (library == NULL) {
		printf("%s\n", argc > 2 ? dlerror() : "usage: hooker LIBUCS before|after");
		return 3;
	}
	set_event_handler *set = (set_event_handler *)dlsym(library, "ucm_set_event_handler");
	int before = strcmp(argv[2], "before") == 0;

	must(set != NULL, "ucm_set_event_handler");
	if (before)
		install(set);
	int device = open_device(&counter);

	if (!before)
		install(set);
	for (unsigned long i = 0; i < rounds; i++) {
		char *p = pages_at(NULL, 1);
		uint64_t was = *counter;

		register_pages(device, p, 1, i);
		expected = p;
		must(munmap(p, PAGE) == 0, "munmap");
		missed += *counter != was + 1;
		unregister_pages(device, i);
		free(malloc(100000));
	}
	printf("munmap is %s; UCX heard %lu of %lu, the device missed %lu\n",
	       patched((void *)munmap).stub ? "ours" : "another's", heard, rounds, missed);
	return missed > 0 || heard < rounds;
}
