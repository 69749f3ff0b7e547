/*
 * A library that opens the device in whatever program it is preloaded into, watches a page and keeps the
 * descriptor, as a communication library would. ACTIVATOR_PATH names the file to open: with another file than
 * the device the same is done as far as it goes, so that the two runs can be compared.
 *
 * Each process appends a line to the file ACTIVATOR_LOG. A device that doesn't work ends the program with 97.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096

static void fail(const char *what)
{
	dprintf(2, "activator: %s: %s\n", what, strerror(errno));
	_exit(97);
}

static void use_device(int device, char *pages)
{
	struct ummunotify_register_ioctl region = { .user_cookie = 1 };
	struct ummunotify_event events[2];
	const volatile uint64_t *counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);

	if (counter == MAP_FAILED)
		fail("mmap of the counter");
	for (int i = 0; i < 2; i++) {
		region.start = (uintptr_t)pages + (uintptr_t)i * PAGE;
		region.end = region.start + PAGE;
		region.user_cookie++;
		if (ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) != 0)
			fail("REGISTER_REGION");
	}
	munmap(pages + PAGE, PAGE);
	if (*counter != 1)
		fail("the counter didn't move by one");
	if (read(device, events, sizeof(events)) != sizeof(events) || events[0].user_cookie_counter != 3 ||
	    events[1].user_cookie_counter != 1)
		fail("read");
}

static void __attribute__((constructor)) activate(void)
{
	const char *path = getenv("ACTIVATOR_PATH");
	const char *log = getenv("ACTIVATOR_LOG");
	int device, file;
	char *pages;

	/* `ummunotify run` hands the device on; it has none itself. */
	if (path == NULL || log == NULL || strcmp(program_invocation_short_name, "ummunotify") == 0)
		return;
	pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pages == MAP_FAILED)
		fail("mmap");
	memset(pages, 1, 2 * PAGE);
	device = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (device < 0)
		fail(path);
	if (strcmp(path, "/dev/ummunotify") == 0)
		use_device(device, pages);
	else
		munmap(pages + PAGE, PAGE);
	file = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
	if (file < 0)
		fail(log);
	dprintf(file, "%s at %d\n", path, device);
	close(file);
}
