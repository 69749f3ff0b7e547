/* SPDX-License-Identifier: (GPL-2.0-only WITH Linux-syscall-note) OR MIT */
/*
 * The binary interface of /dev/ummunotify: the one C text of it, for the
 * kernel module and for every client, whichever backend answers.
 *
 * A client opens the device O_RDONLY, registers ranges of its own address
 * space under 64-bit cookies, maps one page (the u64 at byte 0 counts the
 * invalidations that hit a registered range) and reads struct ummunotify_event
 * records from the descriptor.  The names and the layout are those of the 2010
 * driver, so that a client written for it compiles and runs unchanged.
 */
#ifndef _LINUX_UMMUNOTIFY_H
#define _LINUX_UMMUNOTIFY_H

#include <linux/types.h>
#include <linux/ioctl.h>

/*
 * Argument of UMMUNOTIFY_REGISTER_REGION.  A region is the bytes from start
 * (inclusive) to end (exclusive).  Nothing but the cookie is checked: the
 * range may be unaligned, empty, unmapped or overlap another one.
 */
struct ummunotify_register_ioctl {
	__u64 start;
	__u64 end;
	__u64 user_cookie;	/* the caller's name for it; unique among live regions */
	__u32 flags;		/* ignored: clients leave it uninitialised */
	__u32 reserved;		/* ignored, likewise */
};

#define UMMUNOTIFY_MAGIC		'U'

/*
 * Sets the caller's word to the features in use: none exist, so it becomes 0
 * whatever it held.  Only before the first other use of the descriptor.
 */
#define UMMUNOTIFY_EXCHANGE_FEATURES	_IOWR(UMMUNOTIFY_MAGIC, 1, __u32)

/* Watches a range; an invalidation that starts after this returned is reported. */
#define UMMUNOTIFY_REGISTER_REGION	_IOW(UMMUNOTIFY_MAGIC, 2, \
					     struct ummunotify_register_ioctl)

/* Takes a pointer to the cookie; afterwards nothing of that region is reported. */
#define UMMUNOTIFY_UNREGISTER_REGION	_IOW(UMMUNOTIFY_MAGIC, 3, __u64)

/*
 * This project's own addition, in the kernel module alone and not offered
 * through EXCHANGE_FEATURES: takes a pointer to the descriptor of a memfd of
 * one page, open for writing and sealed against SHRINK and GROW but not against
 * WRITE.  From then on the module counts into that page, by atomic addition
 * only.  It serves to move a live context between backends.
 */
#define UMMUNOTIFY_ADOPT_COUNTER	_IOW(UMMUNOTIFY_MAGIC, 0x20, __s32)

/* Values of ummunotify_event.type. */
enum {
	/* A region was hit.  user_cookie_counter is its cookie. */
	UMMUNOTIFY_EVENT_TYPE_INVAL	= 0,
	/*
	 * The queue was seen empty.  user_cookie_counter is the counter's value
	 * at that moment; the other fields are 0.
	 */
	UMMUNOTIFY_EVENT_TYPE_LAST	= 1,
};

/* Values of ummunotify_event.flags. */
enum {
	/*
	 * Exactly one invalidation hit the region since it was last reported,
	 * and hint_start to hint_end is what that one touched.  Without the
	 * flag the hints are the region's own bounds.
	 */
	UMMUNOTIFY_EVENT_FLAG_HINT	= 1 << 0,
};

/* One record of read(2). */
struct ummunotify_event {
	__u32 type;
	__u32 flags;
	__u64 hint_start;
	__u64 hint_end;
	__u64 user_cookie_counter;
};

#endif /* _LINUX_UMMUNOTIFY_H */
