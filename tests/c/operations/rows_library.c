/*
 * Rows: mapping calls that libraries make by themselves. No wrapper around libc's symbols sees them; a filter
 * in the kernel does. The ranges follow from what glibc does, so each row covers the registered memory alone.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <gnu/lib-names.h>
#include <malloc.h>
#endif

#define MIB (1024L * 1024)

static int (*early_munmap)(void *, size_t);

/* Before the device is opened: the address of libc's own munmap, past every preloaded library. */
static void __attribute__((constructor)) take_early(void)
{
#ifdef __GLIBC__
	void *libc = dlopen(LIBC_SO, RTLD_NOW | RTLD_NOLOAD);

	if (libc != NULL)
		*(void **)&early_munmap = dlsym(libc, "munmap");
	/* Blocks of 1 MiB get mappings of their own, and free gives them back at once. */
	mallopt(M_MMAP_THRESHOLD, 512 * 1024);
	mallopt(M_TRIM_THRESHOLD, 64 * 1024 * 1024);
#endif
}

static enum verdict by_pointer(void)
{
	char *a = written(0, 0, 4);

	if (early_munmap == NULL)
		return skip("libc isn't a library of its own here");
	watch(0, 4);
	want(early_munmap(a, 4 * PAGE) == 0);
	return RAN;
}

static enum verdict free_block(void)
{
	void *block = NULL;

	must(posix_memalign(&block, PAGE, MIB) == 0);
	memset(block, 1, MIB);
	watch_only(0, block, MIB);
	free(block);
	return RAN;
}

static enum verdict free_malloc(void)
{
	char *block = malloc(MIB);

	must(block != NULL);
	memset(block, 1, MIB);
	watch_only(0, block, MIB);
	free(block);
	return RAN;
}

static enum verdict realloc_moves(void)
{
	char *block = malloc(MIB), *moved;

	must(block != NULL);
	memset(block, 1, MIB);
	watch_only(0, block, MIB);
	moved = realloc(block, 512 * MIB);
	want(moved != NULL);
	if (moved == block) {
		free(moved);
		return skip("realloc grew the block in place");
	}
	want(moved[MIB - 1] == 1);
	free(moved);
	return RAN;
}

static enum verdict trim(void)
{
#ifndef __GLIBC__
	return skip("this libc has no malloc_trim");
#else
	enum { BLOCKS = 64, SIZE = 64 * 1024 };
	static char *blocks[BLOCKS];
	char *middle;

	for (int i = 0; i < BLOCKS; i++) {
		blocks[i] = malloc(SIZE);
		must(blocks[i] != NULL);
		memset(blocks[i], 1, SIZE);
	}
	/* One that lies on the heap with others above it. */
	middle = blocks[BLOCKS / 2];
	for (int i = 0; i < BLOCKS; i++)
		free(blocks[i]);
	watch_only(0, middle, SIZE);
	want(malloc_trim(0) == 1);
	return RAN;
#endif
}

static enum verdict close_library(void)
{
	void *library;
	char *data;

	library = dlopen("walk-plugin.so", RTLD_NOW);
	if (library == NULL)
		return skip("%s", dlerror());
	data = dlsym(library, "walk_plugin_data");
	must(data != NULL);
	write_pages(data, 4);
	watch_only(0, data, 4 * PAGE);
	want(dlclose(library) == 0);
	return RAN;
}

static char *thread_stack_low;
static pthread_barrier_t barrier;

static void *thread_main(void *unused)
{
	pthread_attr_t attributes;
	void *stack;
	size_t size;

	must(pthread_getattr_np(pthread_self(), &attributes) == 0);
	must(pthread_attr_getstack(&attributes, &stack, &size) == 0);
	pthread_attr_destroy(&attributes);
	/* Far below what the thread's own frames use. */
	thread_stack_low = (char *)(((uintptr_t)stack + size / 2) & ~(uintptr_t)(PAGE - 1));
	write_pages(thread_stack_low, 4);
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	return unused;
}

/* A thread that ends gives the used part of its stack back, and libc keeps the mapping for the next one. */
static enum verdict stack_reuse(void)
{
	pthread_t thread;

	must(pthread_barrier_init(&barrier, NULL, 2) == 0);
	must(pthread_create(&thread, NULL, thread_main, NULL) == 0);
	pthread_barrier_wait(&barrier);
	watch_only(0, thread_stack_low, 4 * PAGE);
	pthread_barrier_wait(&barrier);
	must(pthread_join(thread, NULL) == 0);
	must(pthread_barrier_destroy(&barrier) == 0);
	return RAN;
}

static void *thread_idle(void *unused)
{
	return unused;
}

static enum verdict thread_comes_and_goes(void)
{
	pthread_t thread;

	written(0, 0, 4);
	watch(0, 4);
	must(pthread_create(&thread, NULL, thread_idle, NULL) == 0);
	must(pthread_join(thread, NULL) == 0);
	return RAN;
}

static enum verdict run_command(void)
{
	written(0, 0, 4);
	watch(0, 4);
	/* posix_spawn underneath. */
	want(system("exit 3") == 3 << 8);
	return RAN;
}

static enum verdict read_pipe(void)
{
	char line[16] = "";
	FILE *from;

	written(0, 0, 4);
	watch(0, 4);
	from = popen("echo walked", "r");
	want(from != NULL && fgets(line, sizeof(line), from) != NULL && strcmp(line, "walked\n") == 0);
	want(pclose(from) == 0);
	return RAN;
}

static const struct row rows[] = {
	{ .name = "munmap through a pointer taken before the open", .key = "munmap", .class = EXACT, .run = by_pointer, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "free of a posix_memalign block of 1 MiB", .key = "munmap", .class = COVERED, .run = free_block, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 256))) },
	/* malloc's header shifts the block, which therefore ends in page 256. */
	{ .name = "free of a malloc block of 1 MiB", .key = "munmap", .class = COVERED, .run = free_malloc, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 257))) },
	{ .name = "realloc from 1 MiB to 512 MiB", .key = "mremap-grow", .class = COVERED, .run = realloc_moves, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 257))) },
	{ .name = "malloc_trim of freed blocks", .key = "brk", .class = COVERED, .run = trim, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 17))) },
	{ .name = "dlclose of a library with registered data", .key = "munmap", .class = COVERED, .run = close_library, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "stack of a thread that ends", .key = "madvise-drop", .class = COVERED, .run = stack_reuse, .once = 1, .derived = 1,
	  .expect = EVERYWHERE(EVENTS(1, A(0, 4))) },
	{ .name = "a thread comes and goes", .key = "nothing", .class = EXACT, .run = thread_comes_and_goes, .once = 1, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "system(3)", .key = "nothing", .class = EXACT, .run = run_command, .once = 1, .expect = EVERYWHERE(NOTHING), .derived = 1 },
	{ .name = "popen and pclose", .key = "nothing", .class = EXACT, .run = read_pipe, .once = 1, .expect = EVERYWHERE(NOTHING), .derived = 1 },
};

TABLE(table_library, "calls that libraries make", rows);
