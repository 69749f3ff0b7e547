// SPDX-License-Identifier: GPL-2.0-only
/*
 * The regions of a context: by range in an interval tree, by cookie in a plain
 * one, and those that were hit in a queue. Each operation costs O(log n), and a
 * hit O(log n) and a step per region that it hits.
 */
#include <linux/interval_tree_generic.h>
#include <linux/sched.h>

#include "context.h"

static struct kmem_cache *region_cache;

/*
 * [start, end) is hit by [s, e) iff start < e and s < end, whatever the four
 * are: empty and inverted regions follow the same formula. The kernel's tree
 * compares closed ranges, start <= last and first <= end, each by itself, and
 * never asks that a range be the right way round; so regions are stored as they
 * are and the question is asked as first = s + 1, last = e - 1. That holds at
 * both ends of the address space: an invalidation is never empty, so s can't be
 * the largest number nor e the smallest.
 */
#define REGION_START(region) ((region)->start)
#define REGION_END(region) ((region)->end)

INTERVAL_TREE_DEFINE(struct umn_region, by_range, u64, subtree_end, REGION_START,
		     REGION_END, static inline __maybe_unused, range_tree)

/*
 * As the generated insertion, but among equal starts a new region comes first:
 * that is the order in which one invalidation queues them.
 */
static void insert_by_range(struct umn_region *region, struct rb_root_cached *root)
{
	struct rb_node **link = &root->rb_root.rb_node, *parent = NULL;
	bool leftmost = true;

	while (*link) {
		struct umn_region *other = rb_entry(*link, struct umn_region, by_range);

		parent = *link;
		if (other->subtree_end < region->end)
			other->subtree_end = region->end;
		if (region->start <= other->start) {
			link = &parent->rb_left;
		} else {
			link = &parent->rb_right;
			leftmost = false;
		}
	}
	region->subtree_end = region->end;
	rb_link_node(&region->by_range, parent, link);
	rb_insert_augmented_cached(&region->by_range, root, leftmost, &range_tree_augment);
}

static bool insert_by_cookie(struct umn_region *region, struct rb_root *root)
{
	struct rb_node **link = &root->rb_node, *parent = NULL;

	while (*link) {
		struct umn_region *other = rb_entry(*link, struct umn_region, by_cookie);

		parent = *link;
		if (region->cookie < other->cookie)
			link = &parent->rb_left;
		else if (region->cookie > other->cookie)
			link = &parent->rb_right;
		else
			return false;
	}
	rb_link_node(&region->by_cookie, parent, link);
	rb_insert_color(&region->by_cookie, root);
	return true;
}

static struct umn_region *find_cookie(const struct rb_root *root, u64 cookie)
{
	struct rb_node *node = root->rb_node;

	while (node) {
		struct umn_region *region = rb_entry(node, struct umn_region, by_cookie);

		if (cookie < region->cookie)
			node = node->rb_left;
		else if (cookie > region->cookie)
			node = node->rb_right;
		else
			return region;
	}
	return NULL;
}

int umn_register(struct umn_context *ctx, const struct ummunotify_register_ioctl *arg)
{
	struct umn_region *region;
	bool inserted;

	/*
	 * Charged to the caller's memory cgroup. At its limit the caller is told;
	 * without RETRY_MAYFAIL somebody in the group would be killed instead.
	 */
	region = kmem_cache_alloc(region_cache,
				  GFP_KERNEL_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_NOWARN);
	if (!region)
		return -ENOMEM;
	region->start = arg->start;
	region->end = arg->end;
	region->cookie = arg->user_cookie;
	region->hint = 0;
	INIT_LIST_HEAD(&region->queued);

	spin_lock(&ctx->lock);
	inserted = insert_by_cookie(region, &ctx->cookies);
	if (inserted) {
		region->epoch = ++ctx->epoch;
		region->number = ++ctx->nr_registered;
		insert_by_range(region, &ctx->ranges);
		ctx->nr_regions++;
	}
	spin_unlock(&ctx->lock);

	if (!inserted) {
		kmem_cache_free(region_cache, region);
		return -EINVAL;
	}
	return 0;
}

int umn_unregister(struct umn_context *ctx, u64 cookie)
{
	struct umn_region *region;

	spin_lock(&ctx->lock);
	region = find_cookie(&ctx->cookies, cookie);
	if (region) {
		rb_erase(&region->by_cookie, &ctx->cookies);
		range_tree_remove(region, &ctx->ranges);
		list_del(&region->queued);
		ctx->nr_regions--;
	}
	spin_unlock(&ctx->lock);

	if (!region)
		return -EINVAL;
	kmem_cache_free(region_cache, region);
	return 0;
}

/* Nobody else may know of the context any more. */
void umn_free_regions(struct umn_context *ctx)
{
	struct umn_region *region, *next;
	unsigned int freed = 0;

	rbtree_postorder_for_each_entry_safe(region, next, &ctx->cookies, by_cookie) {
		kmem_cache_free(region_cache, region);
		if (++freed % 1024 == 0)
			cond_resched();
	}
}

/*
 * One invalidation can hit any number of regions; after so many the lock is given
 * up for a moment where sleeping is allowed. A read may then see some of the hits
 * before the counter has moved; what follows makes the descriptor readable again.
 */
#define BATCH 16384

/* The region that follows this place in the order of hits, whoever is there now. */
static struct umn_region *region_after(struct umn_context *ctx, u64 start, u64 number)
{
	struct rb_node *node = ctx->ranges.rb_root.rb_node;
	struct umn_region *after = NULL;

	while (node) {
		struct umn_region *region = rb_entry(node, struct umn_region, by_range);

		if (region->start < start ||
		    (region->start == start && region->number >= number)) {
			node = node->rb_right;
		} else {
			after = region;
			node = node->rb_left;
		}
	}
	return after;
}

/* As region_after(region), letting others have the lock and the processor first. */
static struct umn_region *pause_after(struct umn_context *ctx, const struct umn_region *region)
{
	u64 start = region->start, number = region->number;

	spin_unlock(&ctx->lock);
	cond_resched();
	spin_lock(&ctx->lock);
	return region_after(ctx, start, number);
}

/*
 * An invalidation as far as it concerns regions that were registered or left the
 * queue after the epoch `since` (0: all of them). The hits are queued, then the
 * counter moves, once. Returns whether it moved.
 */
bool umn_hit(struct umn_context *ctx, const struct mmu_notifier_range *range, u64 since)
{
	u64 first = (u64)range->start + 1, last = (u64)range->end - 1;
	bool may_sleep = mmu_notifier_range_blockable(range);
	struct umn_region *region;
	unsigned int visited = 0;
	bool hit = false;

	lockdep_assert_held(&ctx->lock);
	region = range_tree_iter_first(&ctx->ranges, first, last);
	while (region) {
		if (region->epoch <= since) {
			/* Neither registered nor read meanwhile. */
		} else if (list_empty(&region->queued)) {
			hit = true;
			region->hint = 1;
			region->hint_start = range->start;
			region->hint_end = range->end;
			list_add_tail(&region->queued, &ctx->queue);
		} else {
			/* Hit twice before it was reported: which range, can't be told. */
			hit = true;
			region->hint = 0;
		}

		if (++visited % BATCH == 0 && may_sleep) {
			region = pause_after(ctx, region);
			if (!region || region->start > last)
				break;
			if (region->end >= first)
				continue;
		}
		region = range_tree_iter_next(region, first, last);
	}
	if (hit)
		atomic64_inc(ctx->counter);
	return hit;
}

/* What can't be known exactly becomes: everything is invalid, the counter moved. */
void umn_hit_everything(struct umn_context *ctx, bool may_sleep)
{
	struct rb_node *node = rb_first_cached(&ctx->ranges);
	unsigned int visited = 0;

	lockdep_assert_held(&ctx->lock);
	while (node) {
		struct umn_region *region = rb_entry(node, struct umn_region, by_range);

		region->hint = 0;
		if (list_empty(&region->queued))
			list_add_tail(&region->queued, &ctx->queue);
		if (++visited % BATCH == 0 && may_sleep) {
			region = pause_after(ctx, region);
			node = region ? &region->by_range : NULL;
		} else {
			node = rb_next(node);
		}
	}
	atomic64_inc(ctx->counter);
	ctx->nr_everything++;
}

void umn_fill_event(struct ummunotify_event *event, const struct umn_region *region)
{
	event->type = UMMUNOTIFY_EVENT_TYPE_INVAL;
	event->user_cookie_counter = region->cookie;
	if (region->hint) {
		event->flags = UMMUNOTIFY_EVENT_FLAG_HINT;
		event->hint_start = max(region->start, region->hint_start);
		event->hint_end = min(region->end, region->hint_end);
	} else {
		event->flags = 0;
		event->hint_start = region->start;
		event->hint_end = region->end;
	}
}

/* The region was reported; the next hit queues it again. */
void umn_dequeue(struct umn_context *ctx, struct umn_region *region)
{
	lockdep_assert_held(&ctx->lock);
	list_del_init(&region->queued);
	region->epoch = ++ctx->epoch;
}

int __init umn_regions_init(void)
{
	region_cache = KMEM_CACHE(umn_region, SLAB_ACCOUNT);
	return region_cache ? 0 : -ENOMEM;
}

void umn_regions_exit(void)
{
	kmem_cache_destroy(region_cache);
}
