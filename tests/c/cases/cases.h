/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Failures that users of registration caches, of hooks and of memory monitors reported, each as a small program:
 * what must hold here. `cases NAME ARGS`; the last line is "ok NAME" and some figures. A case that this kernel or
 * user can't run says "LACKING" and why, and ends with 77.
 */
#ifndef CASES_H
#define CASES_H

#include <errno.h>
#include <linux/ummunotify.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096UL
#define DEVICE "/dev/ummunotify"

/* Ends the case as failed, with the place and errno. */
#define FAIL(...) fail(__FILE__, __LINE__, __VA_ARGS__)
#define NEED(condition) ((condition) ? (void)0 : FAIL("%s", #condition))
void fail(const char *file, int line, const char *format, ...) __attribute__((noreturn, format(printf, 3, 4)));
void lacking(const char *why) __attribute__((noreturn));

/* The device of the process, non-blocking; its counter is mapped. */
extern int device;
extern volatile uint64_t *counter;
void device_open(void);
int register_region(const volatile void *start, size_t bytes, uint64_t cookie);
int unregister_region(uint64_t cookie);
/* As above; failure ends the case. */
void watch(const volatile void *start, size_t bytes, uint64_t cookie);
void unwatch(uint64_t cookie);
/* Reads everything up to LAST. Calls `seen`, if there is one, with each record. True if `cookie` was reported. */
bool reported(uint64_t cookie, void (*seen)(const struct ummunotify_event *));

/* Touched memory of its own. */
char *map(size_t bytes);
/* A number of /proc/self/status in KiB. */
long status_kib(const char *name);
uint64_t random_number(uint64_t *state);
double now(void);

struct named_case {
	const char *name;
	void (*run)(int argc, char **argv);
};

extern const struct named_case crash_cases[], deadlock_cases[], stale_cases[], growth_cases[];

#endif
