/* What the programs of this folder share: the device, and a look at libc's patched sites. */
#ifndef INLINE_H
#define INLINE_H

#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096UL

static inline void must(int condition, const char *what)
{
	if (!condition) {
		perror(what);
		exit(2);
	}
}

static inline int open_device(volatile uint64_t **counter)
{
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);

	must(device >= 0, "open /dev/ummunotify");
	*counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must((void *)*counter != MAP_FAILED, "mmap of the counter");
	return device;
}

static inline void register_pages(int device, const void *start, size_t pages, uint64_t cookie)
{
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)start,
		.end = (uintptr_t)start + pages * PAGE,
		.user_cookie = cookie,
	};

	must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
}

static inline void unregister_pages(int device, uint64_t cookie)
{
	must(ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0, "UNREGISTER_REGION");
}

static inline char *pages_at(void *hint, size_t pages)
{
	char *p = mmap(hint, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(p != MAP_FAILED, "mmap");
	memset(p, 1, pages * PAGE);
	return p;
}

/* A patched site: where its stub is and where that leads to; NULL if the function isn't patched. */
struct patched {
	const uint8_t *stub;
	uint64_t entry;
};

static inline struct patched patched(const void *function)
{
	const uint8_t *code = function, *at;
	struct patched found = { NULL, 0 };
	int32_t distance;

	/* In the first instructions, behind an endbr64 and argument checks. */
	for (at = code; at < code + 64; at++) {
		if (at[0] != 0xe9 || at[5] != 0x0f || at[6] != 0x05)
			continue;
		memcpy(&distance, at + 1, 4);
		/* mov $number,%eax; lea ...(%rip),%r11; movabs $entry,%rcx; another hooker's jump leads elsewhere. */
		if (at[5 + distance] != 0xb8 || memcmp(at + 5 + distance + 5, "\x4c\x8d\x1d", 3) != 0)
			continue;
		found.stub = at + 5 + distance;
		memcpy(&found.entry, found.stub + 14, 8);
		return found;
	}
	return found;
}

#endif
