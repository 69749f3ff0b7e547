// SPDX-License-Identifier: GPL-2.0-only
/*
 * The counter: its page, the mappings of it, and the adoption of another one.
 *
 * A mapping holds the file as every mapping of a file does, and so the context
 * with its page: the counter goes on counting after the descriptor was closed,
 * until the last mapping is gone too.
 */
#include <linux/file.h>
#include <linux/magic.h>
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>
#include <uapi/linux/fcntl.h>

#include "compat.h"
#include "context.h"

int umn_counter_init(struct umn_context *ctx)
{
	/*
	 * Not charged to a memory cgroup: up to 5.10 a charged page can't be
	 * mapped, its mark and its map count share a word.
	 */
	ctx->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!ctx->page)
		return -ENOMEM;
	ctx->counter = page_address(ctx->page);
	return 0;
}

void umn_counter_exit(struct umn_context *ctx)
{
	if (ctx->adopted) {
		/*
		 * It may have been written to swap since it was adopted, and would
		 * come back from there without what was added after that.
		 */
		umn_mark_dirty(ctx->adopted);
		put_page(ctx->adopted);
	}
	put_page(ctx->page);
}

static vm_fault_t counter_fault(struct vm_fault *vmf)
{
	struct umn_context *ctx = vmf->vma->vm_file->private_data;

	if (vmf->pgoff != 0)
		return VM_FAULT_SIGBUS;
	get_page(ctx->page);
	vmf->page = ctx->page;
	return 0;
}

static void count_mapping(struct vm_area_struct *vma, int change)
{
	struct umn_context *ctx = vma->vm_file->private_data;

	spin_lock(&ctx->lock);
	ctx->nr_mappings += change;
	spin_unlock(&ctx->lock);
}

static void counter_vma_open(struct vm_area_struct *vma)
{
	count_mapping(vma, 1);
}

static void counter_vma_close(struct vm_area_struct *vma)
{
	count_mapping(vma, -1);
}

static const struct vm_operations_struct counter_vm_ops = {
	.open = counter_vma_open,
	.close = counter_vma_close,
	.fault = counter_fault,
};

/*
 * The descriptor was opened for reading alone, so the kernel itself refuses a
 * shared writable mapping and a later mprotect that would make it one.
 */
int umn_counter_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct umn_context *ctx = file->private_data;
	bool adopted;

	if (vma->vm_pgoff != 0 || vma->vm_end - vma->vm_start != PAGE_SIZE)
		return -EINVAL;

	spin_lock(&ctx->lock);
	adopted = ctx->adopted;
	if (!adopted)
		ctx->nr_mappings++;
	spin_unlock(&ctx->lock);
	/*
	 * An adopted page belongs to its memfd, which must be able to find and
	 * unmap every mapping of it; whoever had it adopted can map it there.
	 */
	if (adopted)
		return -EBUSY;

	umn_vm_flags_set(vma, VM_DONTEXPAND);
	vma->vm_ops = &counter_vm_ops;
	return 0;
}

/*
 * The page of a memfd that nobody can take from under its mappings: one page,
 * sealed against resizing, not against writing. The reference taken here also
 * makes a later write seal fail with EBUSY.
 */
static struct page *memfd_page(struct file *file)
{
	const unsigned int needed = F_SEAL_SHRINK | F_SEAL_GROW;
	const unsigned int forbidden = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;
	struct inode *inode = file_inode(file);
	unsigned int seals;
	struct page *page;

	/*
	 * Files of a tmpfs proper and System V segments are born sealed against
	 * sealing, so what bears the two seals is a memfd.
	 */
	if (!S_ISREG(inode->i_mode) || inode->i_sb->s_magic != TMPFS_MAGIC)
		return ERR_PTR(-EINVAL);

	inode_lock(inode);
	seals = SHMEM_I(inode)->seals;
	if ((seals & needed) != needed || (seals & forbidden) ||
	    i_size_read(inode) != PAGE_SIZE)
		page = ERR_PTR(-EINVAL);
	else if (!(file->f_mode & FMODE_WRITE))
		page = ERR_PTR(-EACCES);
	else
		page = umn_shmem_page(file->f_mapping);
	inode_unlock(inode);
	return page;
}

int umn_counter_adopt(struct umn_context *ctx, int fd)
{
	struct file *file = fget(fd);
	struct page *page;
	int err = 0;

	if (!file)
		return -EBADF;
	page = memfd_page(file);
	if (IS_ERR(page)) {
		err = PTR_ERR(page);
		goto out;
	}

	spin_lock(&ctx->lock);
	if (ctx->nr_regions || ctx->nr_mappings || ctx->adopted) {
		err = -EBUSY;
	} else {
		ctx->adopted = page;
		ctx->counter = page_address(page);
		ctx->reported = atomic64_read(ctx->counter);
	}
	spin_unlock(&ctx->lock);
	if (err)
		put_page(page);
out:
	fput(file);
	return err;
}
