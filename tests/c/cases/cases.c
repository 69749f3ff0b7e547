/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include "cases.h"

#include <fcntl.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int device = -1;
volatile uint64_t *counter;

void fail(const char *file, int line, const char *format, ...)
{
	int error = errno;
	va_list arguments;

	printf("FAIL %s:%d: ", strrchr(file, '/') ? strrchr(file, '/') + 1 : file, line);
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf(" (errno %d)\n", error);
	fflush(stdout);
	_exit(1);
}

void lacking(const char *why)
{
	printf("LACKING %s\n", why);
	exit(77);
}

void device_open(void)
{
	NEED((device = open(DEVICE, O_RDONLY | O_NONBLOCK)) >= 0);
	counter = mmap(NULL, sizeof(*counter), PROT_READ, MAP_SHARED, device, 0);
	NEED(counter != MAP_FAILED);
}

int register_region(const volatile void *start, size_t bytes, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = { (uintptr_t)start, (uintptr_t)start + bytes, cookie, 0, 0 };

	return ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region);
}

int unregister_region(uint64_t cookie)
{
	return ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie);
}

void watch(const volatile void *start, size_t bytes, uint64_t cookie)
{
	NEED(register_region(start, bytes, cookie) == 0);
}

void unwatch(uint64_t cookie)
{
	NEED(unregister_region(cookie) == 0);
}

bool reported(uint64_t cookie, void (*seen)(const struct ummunotify_event *))
{
	struct ummunotify_event records[128];
	bool found = false;

	for (;;) {
		ssize_t bytes = read(device, records, sizeof(records));

		if (bytes < 0 && errno == EAGAIN)
			return found;
		NEED(bytes > 0 && bytes % (ssize_t)sizeof(*records) == 0);
		for (ssize_t i = 0; i < bytes / (ssize_t)sizeof(*records); i++) {
			if (records[i].type == UMMUNOTIFY_EVENT_TYPE_LAST)
				return found;
			found |= records[i].user_cookie_counter == cookie;
			if (seen)
				seen(&records[i]);
		}
	}
}

char *map(size_t bytes)
{
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	NEED(memory != MAP_FAILED);
	memset(memory, 1, bytes);
	return memory;
}

long status_kib(const char *name)
{
	FILE *file = fopen("/proc/self/status", "re");
	char line[256];
	long value = -1;

	NEED(file);
	while (value < 0 && fgets(line, sizeof(line), file))
		if (strncmp(line, name, strlen(name)) == 0)
			value = strtol(line + strlen(name) + 1, NULL, 10);
	fclose(file);
	NEED(value >= 0);
	return value;
}

uint64_t random_number(uint64_t *state)
{
	*state = *state * 6364136223846793005UL + 1442695040888963407UL;
	return *state >> 33;
}

double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	const struct named_case *tables[] = { crash_cases, deadlock_cases, stale_cases, growth_cases };

	for (size_t t = 0; argc > 1 && t < sizeof(tables) / sizeof(*tables); t++)
		for (const struct named_case *c = tables[t]; c->name; c++)
			if (strcmp(c->name, argv[1]) == 0) {
				c->run(argc - 2, argv + 2);
				printf("ok %s\n", c->name);
				return 0;
			}
	fprintf(stderr, "usage: cases NAME ARGS; no case is called %s\n", argc > 1 ? argv[1] : "that");
	return 2;
}
