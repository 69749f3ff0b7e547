/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Preloaded, makes a program one whose mapping calls UCX's memory hooks (libucm) intercept, as a program's do that uses
 * UCX: by patching libc ("bistro") unless UCX_MEM_MMAP_HOOK_MODE says otherwise. The handler only counts.
 *
 *   cc -shared -fPIC ucx.c -o ucx.so
 *   ummunotify bench --peer ucx=ucx.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* ucm/api/ucm.h of UCX 1.13 */
enum { UCM_EVENT_VM_UNMAPPED = 1 << 17 };
typedef void handler(int type, void *event, void *argument);
typedef int set_event_handler(int events, int priority, handler *handler, void *argument);

static unsigned long unmapped;

static void count(int type, void *event, void *argument)
{
	(void)type, (void)event, (void)argument;
	__atomic_fetch_add(&unmapped, 1, __ATOMIC_RELAXED);
}

static void __attribute__((constructor)) begin(void)
{
	/* It brings libucm, which needs its symbols. */
	void *library = dlopen("libucs.so.0", RTLD_NOW | RTLD_GLOBAL);
	set_event_handler *set;
	void *volatile memory;

	if (library == NULL || (set = (set_event_handler *)dlsym(library, "ucm_set_event_handler")) == NULL) {
		fprintf(stderr, "peers/ucx: %s; install libucx0\n", dlerror());
		exit(2);
	}
	if (set(UCM_EVENT_VM_UNMAPPED, 0, count, NULL) != 0) {
		fprintf(stderr, "peers/ucx: ucm_set_event_handler failed\n");
		exit(2);
	}
	/* malloc maps a block of this size, and free gives it back: a hook that isn't there would be native's figures. */
	memory = malloc(64 << 20);
	free(memory);
	if (__atomic_load_n(&unmapped, __ATOMIC_RELAXED) == 0) {
		fprintf(stderr, "peers/ucx: the hooks don't see a munmap\n");
		exit(2);
	}
}
