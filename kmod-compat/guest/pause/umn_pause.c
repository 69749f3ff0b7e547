// SPDX-License-Identifier: GPL-2.0-only
/*
 * For tests alone: holds an invalidation between its start and its end, so that
 * what happens when somebody acts in between needs no luck to be seen.
 *
 * Notifiers are called newest first: open this before /dev/ummunotify, and an
 * invalidation is stopped after ummunotify heard of its start.
 */
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "umn_pause.h"

/* A test that forgets to release must not hang the kernel. */
#define LIMIT (10 * HZ)

struct pause {
	struct mmu_notifier notifier;
	struct mm_struct *mm;
	spinlock_t lock;
	struct umn_pause_range range;
	bool armed;
	unsigned int stopped;
	wait_queue_head_t wait;
};

static bool enter(struct pause *pause, const struct mmu_notifier_range *range)
{
	bool stops;

	spin_lock(&pause->lock);
	stops = pause->armed && range->start < pause->range.end &&
		pause->range.start < range->end;
	if (stops)
		pause->stopped++;
	spin_unlock(&pause->lock);
	return stops;
}

static int pause_range_start(struct mmu_notifier *notifier,
			     const struct mmu_notifier_range *range)
{
	struct pause *pause = container_of(notifier, struct pause, notifier);

	if (!mmu_notifier_range_blockable(range) || !enter(pause, range))
		return 0;
	wake_up(&pause->wait);
	wait_event_timeout(pause->wait, !READ_ONCE(pause->armed), LIMIT);
	spin_lock(&pause->lock);
	pause->stopped--;
	spin_unlock(&pause->lock);
	return 0;
}

static const struct mmu_notifier_ops pause_ops = {
	.invalidate_range_start = pause_range_start,
};

static int pause_open(struct inode *inode, struct file *file)
{
	struct pause *pause = kzalloc(sizeof(*pause), GFP_KERNEL);
	int err;

	if (!pause)
		return -ENOMEM;
	spin_lock_init(&pause->lock);
	init_waitqueue_head(&pause->wait);
	pause->mm = current->mm;
	pause->notifier.ops = &pause_ops;
	err = mmu_notifier_register(&pause->notifier, pause->mm);
	if (err) {
		kfree(pause);
		return err;
	}
	file->private_data = pause;
	return 0;
}

static void release_all(struct pause *pause)
{
	spin_lock(&pause->lock);
	pause->armed = false;
	spin_unlock(&pause->lock);
	wake_up(&pause->wait);
}

static int pause_release(struct inode *inode, struct file *file)
{
	struct pause *pause = file->private_data;

	release_all(pause);
	mmu_notifier_unregister(&pause->notifier, pause->mm);
	kfree(pause);
	return 0;
}

static long pause_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct pause *pause = file->private_data;
	struct umn_pause_range range;
	u32 count;
	long left;

	switch (cmd) {
	case UMN_PAUSE_ARM:
		if (copy_from_user(&range, (void __user *)arg, sizeof(range)))
			return -EFAULT;
		spin_lock(&pause->lock);
		pause->range = range;
		pause->armed = true;
		spin_unlock(&pause->lock);
		return 0;
	case UMN_PAUSE_AWAIT:
		if (get_user(count, (u32 __user *)arg))
			return -EFAULT;
		left = wait_event_interruptible_timeout(pause->wait,
				READ_ONCE(pause->stopped) >= count, LIMIT);
		return left > 0 ? 0 : left ? left : -ETIMEDOUT;
	case UMN_PAUSE_RELEASE:
		release_all(pause);
		return 0;
	default:
		return -ENOTTY;
	}
}

static const struct file_operations pause_fops = {
	.owner = THIS_MODULE,
	.open = pause_open,
	.release = pause_release,
	.unlocked_ioctl = pause_ioctl,
};

static struct miscdevice pause_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "umn_pause",
	.fops = &pause_fops,
	.mode = 0600,
};

module_misc_device(pause_misc);

MODULE_DESCRIPTION("Stops invalidations half-way, for the tests of ummunotify");
MODULE_AUTHOR("The ummunotify project");
MODULE_LICENSE("GPL");
