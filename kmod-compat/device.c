// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/ummunotify: tells a process which of the address ranges it registered
 * were unmapped, remapped or otherwise lost their pages, so that what it cached
 * about them (RDMA registrations, above all) can be thrown away in time.
 *
 * The calls of the device file. The interface is that of the ummunotify driver
 * posted in 2010, with the departures that README.md lists.
 */
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>
#include <linux/uio.h>

#include "compat.h"
#include "context.h"

static int ummunotify_open(struct inode *inode, struct file *file)
{
	struct umn_context *ctx;
	int err;

	if ((file->f_flags & O_ACCMODE) != O_RDONLY)
		return -EINVAL;

	ctx = kzalloc(sizeof(*ctx), GFP_KERNEL_ACCOUNT);
	if (!ctx)
		return -ENOMEM;
	spin_lock_init(&ctx->lock);
	ctx->ranges = RB_ROOT_CACHED;
	ctx->cookies = RB_ROOT;
	INIT_LIST_HEAD(&ctx->queue);
	ctx->epoch = 1;
	init_waitqueue_head(&ctx->wait);

	err = umn_counter_init(ctx);
	if (err)
		goto free;
	/* Last: from here on the context is used. */
	err = umn_watch(ctx);
	if (err)
		goto put_counter;

	file->private_data = ctx;
	/* No seeking, but pread works and ignores the offset. */
	file->f_mode &= ~FMODE_LSEEK;
	return 0;

put_counter:
	umn_counter_exit(ctx);
free:
	kfree(ctx);
	return err;
}

static int ummunotify_release(struct inode *inode, struct file *file)
{
	struct umn_context *ctx = file->private_data;

	umn_unwatch(ctx);
	umn_free_regions(ctx);
	umn_counter_exit(ctx);
	kfree(ctx);
	return 0;
}

/*
 * Copies what is queued, up to `room` records, and only then takes it off the
 * queue: all under the lock, so that a read is one step to everybody else, and
 * none at all if the buffer is bad. Page faults are off meanwhile; if one was
 * needed, -EFAULT comes back and *wanted says how many bytes have to be there.
 */
static ssize_t deliver(struct umn_context *ctx, struct iov_iter *to, size_t room,
		       size_t *wanted)
{
	struct umn_region *region, *next;
	struct ummunotify_event event;
	size_t copied = 0, bytes = 0, records = 0;
	bool last = false;
	u64 counter = 0;
	ssize_t ret;

	spin_lock(&ctx->lock);
	if (!umn_readable_locked(ctx)) {
		ret = -EAGAIN;
		goto unlock;
	}

	pagefault_disable();
	list_for_each_entry(region, &ctx->queue, queued) {
		if (records == room)
			break;
		umn_fill_event(&event, region);
		bytes += sizeof(event);
		copied += copy_to_iter(&event, sizeof(event), to);
		if (copied != bytes)
			break;
		records++;
	}
	/* The loop ran through: the queue is seen empty. */
	if (&region->queued == &ctx->queue && records < room) {
		last = true;
		counter = atomic64_read(ctx->counter);
		memset(&event, 0, sizeof(event));
		event.type = UMMUNOTIFY_EVENT_TYPE_LAST;
		event.user_cookie_counter = counter;
		bytes += sizeof(event);
		copied += copy_to_iter(&event, sizeof(event), to);
	}
	pagefault_enable();

	if (copied != bytes) {
		iov_iter_revert(to, copied);
		*wanted = bytes;
		ret = -EFAULT;
		goto unlock;
	}
	list_for_each_entry_safe(region, next, &ctx->queue, queued) {
		if (records-- == 0)
			break;
		umn_dequeue(ctx, region);
	}
	if (last)
		ctx->reported = counter;
	ret = bytes;
unlock:
	spin_unlock(&ctx->lock);
	return ret;
}

/*
 * A page that was there a moment ago can be gone again under memory pressure, or
 * another thread plays with the buffer. Somewhere it has to end.
 */
#define MAX_FAULTS 64

static ssize_t ummunotify_read_iter(struct kiocb *iocb, struct iov_iter *to)
{
	struct umn_context *ctx = iocb->ki_filp->private_data;
	size_t room = min_t(size_t, iov_iter_count(to), PAGE_SIZE) /
		      sizeof(struct ummunotify_event);
	unsigned int faults = 0;
	size_t wanted = 0;
	ssize_t ret;

	set_bit(UMN_USED, &ctx->flags);
	for (;;) {
		if (!umn_readable(ctx)) {
			if ((iocb->ki_filp->f_flags & O_NONBLOCK) ||
			    (iocb->ki_flags & IOCB_NOWAIT))
				return -EAGAIN;
			ret = wait_event_interruptible(ctx->wait, umn_readable(ctx));
			if (ret)
				return ret;
		}
		if (room == 0)
			return 0;

		ret = deliver(ctx, to, room, &wanted);
		if (ret == -EAGAIN)
			continue;	/* another reader was faster */
		if (ret != -EFAULT)
			return ret;
		if (++faults > MAX_FAULTS || !umn_fault_in(to, wanted))
			return -EFAULT;
	}
}

static __poll_t ummunotify_poll(struct file *file, poll_table *table)
{
	struct umn_context *ctx = file->private_data;

	poll_wait(file, &ctx->wait, table);
	return umn_readable(ctx) ? EPOLLIN | EPOLLRDNORM : 0;
}

static int ummunotify_fasync(int fd, struct file *file, int on)
{
	struct umn_context *ctx = file->private_data;

	return fasync_helper(fd, file, on, &ctx->fasync);
}

static long exchange_features(struct umn_context *ctx, u32 __user *word)
{
	if (test_and_set_bit(UMN_USED, &ctx->flags))
		return -EINVAL;
	/* There are none, whatever the caller left in its word. */
	return put_user(0, word);
}

static long register_region(struct umn_context *ctx,
			    const struct ummunotify_register_ioctl __user *user)
{
	struct ummunotify_register_ioctl arg;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	set_bit(UMN_USED, &ctx->flags);
	return umn_register(ctx, &arg);
}

static long unregister_region(struct umn_context *ctx, const u64 __user *user)
{
	u64 cookie;

	if (copy_from_user(&cookie, user, sizeof(cookie)))
		return -EFAULT;
	return umn_unregister(ctx, cookie);
}

static long adopt_counter(struct umn_context *ctx, const s32 __user *user)
{
	s32 fd;

	if (get_user(fd, user))
		return -EFAULT;
	return umn_counter_adopt(ctx, fd);
}

static long ummunotify_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct umn_context *ctx = file->private_data;
	void __user *user = (void __user *)arg;

	switch (cmd) {
	case UMMUNOTIFY_EXCHANGE_FEATURES:
		return exchange_features(ctx, user);
	case UMMUNOTIFY_REGISTER_REGION:
		return register_region(ctx, user);
	case UMMUNOTIFY_UNREGISTER_REGION:
		return unregister_region(ctx, user);
	case UMMUNOTIFY_ADOPT_COUNTER:
		return adopt_counter(ctx, user);
	default:
		return -ENOTTY;
	}
}

/* /proc/PID/fdinfo: for people who wonder what a descriptor watches. */
static void ummunotify_show_fdinfo(struct seq_file *seq, struct file *file)
{
	struct umn_context *ctx = file->private_data;
	u64 counter, overflows, everything;
	unsigned long regions;

	spin_lock(&ctx->lock);
	regions = ctx->nr_regions;
	counter = atomic64_read(ctx->counter);
	overflows = ctx->nr_overflows;
	everything = ctx->nr_everything;
	spin_unlock(&ctx->lock);
	seq_printf(seq, "ummunotify-regions:\t%lu\n", regions);
	seq_printf(seq, "ummunotify-counter:\t%llu\n", counter);
	seq_printf(seq, "ummunotify-inflight-overflows:\t%llu\n", overflows);
	seq_printf(seq, "ummunotify-everything-invalid:\t%llu\n", everything);
}

/* The owner field keeps the module while a descriptor or a counter mapping lives. */
static const struct file_operations ummunotify_fops = {
	.owner = THIS_MODULE,
	.open = ummunotify_open,
	.release = ummunotify_release,
	.read_iter = ummunotify_read_iter,
	.poll = ummunotify_poll,
	.fasync = ummunotify_fasync,
	.mmap = umn_counter_mmap,
	.unlocked_ioctl = ummunotify_ioctl,
	/* The records have one layout for 32-bit and 64-bit callers. */
	.compat_ioctl = compat_ptr_ioctl,
	.show_fdinfo = ummunotify_show_fdinfo,
};

static struct miscdevice ummunotify_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "ummunotify",
	.fops = &ummunotify_fops,
	.mode = 0666,
};

static int __init ummunotify_init(void)
{
	int err;

	BUILD_BUG_ON(sizeof(struct ummunotify_event) != 32);
	BUILD_BUG_ON(sizeof(struct ummunotify_register_ioctl) != 32);

	err = umn_regions_init();
	if (err)
		return err;
	err = misc_register(&ummunotify_misc);
	if (err)
		umn_regions_exit();
	return err;
}

static void __exit ummunotify_exit(void)
{
	misc_deregister(&ummunotify_misc);
	umn_regions_exit();
}

module_init(ummunotify_init);
module_exit(ummunotify_exit);

MODULE_DESCRIPTION("Reports invalidations of registered address ranges to user space");
MODULE_AUTHOR("The ummunotify project");
MODULE_LICENSE("GPL");
