/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Preloaded, makes a program one that one of libfabric's memory monitors watches: with MONITOR "memhooks" by functions of
 * libc that are patched, with "userfaultfd" by a userfaultfd and a thread that reads it.
 *
 *   cc -O2 -shared -fPIC -DMONITOR='"memhooks"' libfabric.c -l:libfabric.a -Wl,--version-script=libfabric.map -ldl -o memhooks.so
 *   ummunotify bench --peer memhooks=memhooks.so
 *
 * libfabric starts a monitor for the registration cache of a domain, and of Debian's providers verbs and efa alone have one:
 * both want an adapter. So the cache is made here, out of the objects of libfabric.a (package libfabric-dev) that it is
 * made of there; what they need besides is at the end of this file. No region is registered in it: what is measured is
 * memory that nobody watches.
 *
 * One hook is missing, that of brk: it writes a variable of libc that a library can't be linked to from those objects.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <rdma/fi_domain.h>
#include <rdma/providers/fi_log.h>
#include <rdma/providers/fi_prov.h>

#ifndef MONITOR
#define MONITOR "memhooks"
#endif

/* include/ofi_mr.h of libfabric 1.17: what the cache is given and counts. */
enum { INTERFACES = 6, NOTIFIED = 0x160, CACHE_SIZE = 0x180, DOMAIN_SIZE = 0x400, BRK_PATCH = 16 };
extern void *default_monitor;
extern void ofi_mem_init(void);
extern void ofi_monitors_init(void);
extern int ofi_mr_cache_init(void *domain, void **monitors, void *cache);

static _Alignas(16) char cache[CACHE_SIZE], domain[DOMAIN_SIZE];

static void die(const char *what)
{
	fprintf(stderr, "peers/libfabric: %s\n", what);
	exit(2);
}

/* How often the monitor told the cache of memory that goes. */
uint64_t peer_notified(void)
{
	uint64_t notified;

	memcpy(&notified, cache + NOTIFIED, sizeof notified);
	return notified;
}

static void __attribute__((constructor)) begin(void)
{
	void *monitors[INTERFACES] = { NULL }, *volatile memory;
	char saved[BRK_PATCH], *entry = dlsym(RTLD_DEFAULT, "brk");
	char *page = (char *)((uintptr_t)entry & ~(uintptr_t)4095);

	if (entry == NULL)
		die("libc has no brk");
	memcpy(saved, entry, sizeof saved);
	ofi_mem_init();
	ofi_monitors_init();
	monitors[FI_HMEM_SYSTEM] = default_monitor;
	if (default_monitor == NULL || ofi_mr_cache_init(domain, monitors, cache) != 0)
		die("the monitor " MONITOR " doesn't start");
	if (memcmp(saved, entry, sizeof saved) != 0) {
		if (mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
			die("brk can't be given back");
		memcpy(entry, saved, sizeof saved);
		mprotect(page, 8192, PROT_READ | PROT_EXEC);
	}
	/* Hooks that aren't there would be native's figures. */
	memory = malloc(64 << 20);
	free(memory);
	if (strcmp(MONITOR, "memhooks") == 0 && peer_notified() == 0)
		die("the hooks don't see a munmap");
}

/* What those objects use of the rest of the library: a log, settings, and what was found of the machine. */
struct fi_provider core_prov = { .name = "core", .fi_version = FI_VERSION(1, 17) };
void *__curbrk;

void fi_log(const struct fi_provider *provider, enum fi_log_level level, enum fi_log_subsys subsystem, const char *function,
	    int line, const char *format, ...)
{
	va_list arguments;

	(void)provider, (void)level, (void)subsystem, (void)line;
	fprintf(stderr, "peers/libfabric: %s: ", function);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
}

/* 0 is that of warnings. */
int fi_log_enabled(const struct fi_provider *provider, enum fi_log_level level, enum fi_log_subsys subsystem)
{
	(void)provider, (void)subsystem;
	return (int)level == 0;
}

int fi_param_define(const struct fi_provider *provider, const char *name, enum fi_param_type type, const char *help, ...)
{
	(void)provider, (void)name, (void)type, (void)help;
	return 0;
}

int fi_param_get(struct fi_provider *provider, const char *name, void *value)
{
	static char monitor[] = MONITOR;

	(void)provider;
	if (strcmp(name, "mr_cache_monitor") != 0)
		return -ENODATA;
	*(char **)value = monitor;
	return 0;
}

const char *fi_strerror(int number) { return strerror(number); }

char *fi_tostr(const void *data, enum fi_type type)
{
	(void)data, (void)type;
	return "";
}

_Bool ofi_hmem_is_initialized(enum fi_hmem_iface interface) { return interface == FI_HMEM_SYSTEM; }
uint64_t ofi_gettime_ms(void) { return 0; }
int ofi_cpu_supports(unsigned int leaf, unsigned int reg, unsigned int bit) { return (void)leaf, (void)reg, (void)bit, 0; }
int ofi_pollfds_grow(void *descriptors, int most) { return (void)descriptors, (void)most, -ENOMEM; }
