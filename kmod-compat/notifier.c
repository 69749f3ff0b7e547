// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the kernel tells about the owner's address space.
 *
 * An invalidation has a start, before the translations change, and an end, after
 * they did. At the start the regions in its range are hit. In between a client
 * may have read the event and registered and pinned again, and then holds the
 * old pages; so at the end, what was registered or left the queue meanwhile is
 * hit once more. A client that doesn't race sees nothing of that.
 *
 * Whether anything happened meanwhile is told by the context's epoch: an
 * invalidation notes it at its start, in one of a fixed number of slots, since
 * nothing may be allocated here.
 */
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/sched/mm.h>

#include "context.h"

static unsigned int inflight_slots = UMN_INFLIGHT_MAX;
module_param(inflight_slots, uint, 0444);
MODULE_PARM_DESC(inflight_slots,
		 "invalidations per context that are told apart while under way (0 to 128; for tests)");

static void note_start(struct umn_context *ctx, const struct mmu_notifier_range *range)
{
	unsigned int limit = min_t(unsigned int, inflight_slots, UMN_INFLIGHT_MAX);
	unsigned int slot = find_first_zero_bit(ctx->inflight_used, limit);

	if (slot < limit) {
		__set_bit(slot, ctx->inflight_used);
		ctx->inflight[slot].range = range;
		ctx->inflight[slot].epoch = ctx->epoch;
		return;
	}
	if (ctx->overflowing++ == 0)
		ctx->overflow_epoch = ctx->epoch;
	ctx->nr_overflows++;
}

/*
 * Kernels before 5.12 don't call the end of a non-blockable start that another
 * notifier refused. Only the OOM reaper makes those; what such a start leaves
 * behind in the dying owner's context is an old epoch, which can cause spurious
 * hits but no missed one.
 */
static bool note_end(struct umn_context *ctx, const struct mmu_notifier_range *range)
{
	unsigned int slot;

	for_each_set_bit(slot, ctx->inflight_used, UMN_INFLIGHT_MAX) {
		u64 epoch = ctx->inflight[slot].epoch;

		if (ctx->inflight[slot].range != range)
			continue;
		__clear_bit(slot, ctx->inflight_used);
		if (epoch == ctx->epoch)
			return false;
		return umn_hit(ctx, range, epoch);
	}

	/*
	 * No slot was left at the start of this one, so when it began isn't known,
	 * but not before the first of those.
	 */
	if (ctx->overflowing)
		ctx->overflowing--;
	if (ctx->overflow_epoch == ctx->epoch || !ctx->nr_regions)
		return false;
	/* All are queued then; the others under way care for what leaves after this. */
	ctx->overflow_epoch = ctx->epoch;
	umn_hit_everything(ctx, mmu_notifier_range_blockable(range));
	return true;
}

static void wake(struct umn_context *ctx)
{
	wake_up_interruptible_poll(&ctx->wait, EPOLLIN | EPOLLRDNORM);
	kill_fasync(&ctx->fasync, SIGIO, POLL_IN);
}

/* Never refuses, and sleeps only between batches of hits, where that is allowed. */
static int invalidate_range_start(struct mmu_notifier *notifier,
				  const struct mmu_notifier_range *range)
{
	struct umn_context *ctx = container_of(notifier, struct umn_context, notifier);
	bool hit;

	spin_lock(&ctx->lock);
	note_start(ctx, range);
	hit = umn_hit(ctx, range, 0);
	spin_unlock(&ctx->lock);
	if (hit)
		wake(ctx);
	return 0;
}

static void invalidate_range_end(struct mmu_notifier *notifier,
				 const struct mmu_notifier_range *range)
{
	struct umn_context *ctx = container_of(notifier, struct umn_context, notifier);
	bool hit;

	spin_lock(&ctx->lock);
	hit = note_end(ctx, range);
	spin_unlock(&ctx->lock);
	if (hit)
		wake(ctx);
}

/* No release: the death of the address space changes nothing for other holders. */
static const struct mmu_notifier_ops notifier_ops = {
	.invalidate_range_start = invalidate_range_start,
	.invalidate_range_end = invalidate_range_end,
};

/*
 * The owner is the address space of the caller. It is kept from being freed, not
 * from ending: a counter mapping keeps the file, the file must not keep the
 * mapping's own address space alive.
 */
int umn_watch(struct umn_context *ctx)
{
	int err;

	/* A kernel thread has none. */
	if (!current->mm)
		return -EINVAL;
	ctx->mm = current->mm;
	ctx->notifier.ops = &notifier_ops;
	err = mmu_notifier_register(&ctx->notifier, ctx->mm);
	/* It stops at once for a pending signal; the open just starts over. */
	return err == -EINTR ? -ERESTARTNOINTR : err;
}

/* Waits for invalidations under way: afterwards nobody knows of the context. */
void umn_unwatch(struct umn_context *ctx)
{
	mmu_notifier_unregister(&ctx->notifier, ctx->mm);
}
