/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * One open file description of /dev/ummunotify, and what it watches.
 *
 * Locking: ctx->lock covers all of a context but what is marked otherwise. It is
 * a plain spinlock: no interrupt handler takes it, and nothing that takes it
 * holds a lock that one could want. Invalidations take it in contexts that must
 * neither sleep nor allocate (the OOM reaper's, reclaim's), so under it nobody
 * allocates, sleeps or takes a page fault. Waiters are woken after it was
 * released: a wake-up runs callbacks of other subsystems.
 */
#ifndef UMN_CONTEXT_H
#define UMN_CONTEXT_H

#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/fs.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/rbtree.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/ummunotify.h>
#include <linux/wait.h>

/*
 * The counter is one u64 on a page that user space maps: its address has to be
 * valid in the kernel for good, and its load has to be a single one.
 */
#ifndef CONFIG_64BIT
#error "ummunotify needs a 64-bit kernel"
#endif

/* Invalidations that may be under way at once before exactness is given up. */
#define UMN_INFLIGHT_MAX 128

struct umn_region {
	/* The interval tree: what an invalidation looks at comes first. */
	struct rb_node by_range;
	u64 start;
	u64 end;
	u64 subtree_end;

	/* The context's epoch when this was registered or last left the queue. */
	u64 epoch;

	/* In the queue of what is to be reported, or empty. */
	struct list_head queued;
	/* Valid while queued: the only invalidation so far, if hint is set. */
	u64 hint_start;
	u64 hint_end;
	u64 hint : 1;
	/* The so-many-th that was registered: among equal starts the newest is first. */
	u64 number : 63;

	u64 cookie;
	struct rb_node by_cookie;
};

/* An invalidation between its start and its end. */
struct umn_inflight {
	/* The kernel passes the same one to both; it lives on the caller's stack. */
	const struct mmu_notifier_range *range;
	/* The context's epoch at the start. */
	u64 epoch;
};

struct umn_context {
	struct mmu_notifier notifier;
	struct mm_struct *mm;

	spinlock_t lock;
	struct rb_root_cached ranges;
	struct rb_root cookies;
	struct list_head queue;
	unsigned long nr_regions;
	u64 nr_registered;

	/* Counts registrations and departures from the queue; starts at 1. */
	u64 epoch;
	DECLARE_BITMAP(inflight_used, UMN_INFLIGHT_MAX);
	struct umn_inflight inflight[UMN_INFLIGHT_MAX];
	/* Those for which no slot was left, and the epoch when the first began. */
	unsigned int overflowing;
	u64 overflow_epoch;

	/* Where this context counts: on its own page, or on an adopted one. */
	atomic64_t *counter;
	struct page *page;
	struct page *adopted;
	unsigned int nr_mappings;
	/* The counter's value in the LAST that was returned last. */
	u64 reported;

	/* Shown in fdinfo. */
	u64 nr_overflows;
	u64 nr_everything;

	/* These two have locks of their own. */
	wait_queue_head_t wait;
	struct fasync_struct *fasync;

	/* Atomic bits. */
	unsigned long flags;
};

/* Bits of umn_context.flags: EXCHANGE_FEATURES comes too late. */
#define UMN_USED 0

/* regions.c */
int umn_regions_init(void);
void umn_regions_exit(void);
int umn_register(struct umn_context *ctx, const struct ummunotify_register_ioctl *arg);
int umn_unregister(struct umn_context *ctx, u64 cookie);
void umn_free_regions(struct umn_context *ctx);
bool umn_hit(struct umn_context *ctx, const struct mmu_notifier_range *range, u64 since);
void umn_hit_everything(struct umn_context *ctx, bool may_sleep);
void umn_fill_event(struct ummunotify_event *event, const struct umn_region *region);
void umn_dequeue(struct umn_context *ctx, struct umn_region *region);

/* notifier.c */
int umn_watch(struct umn_context *ctx);
void umn_unwatch(struct umn_context *ctx);

/* counter.c */
int umn_counter_init(struct umn_context *ctx);
void umn_counter_exit(struct umn_context *ctx);
int umn_counter_mmap(struct file *file, struct vm_area_struct *vma);
int umn_counter_adopt(struct umn_context *ctx, int fd);

/* Rule 10 of the interface: a counter that moved is always reported by some LAST. */
static inline bool umn_readable_locked(const struct umn_context *ctx)
{
	return !list_empty(&ctx->queue) ||
	       (u64)atomic64_read(ctx->counter) != ctx->reported;
}

static inline bool umn_readable(struct umn_context *ctx)
{
	bool readable;

	spin_lock(&ctx->lock);
	readable = umn_readable_locked(ctx);
	spin_unlock(&ctx->lock);
	return readable;
}

#endif /* UMN_CONTEXT_H */
