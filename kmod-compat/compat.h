/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The few places where the kernels from 5.10 on differ. Which way is there is
 * found out by compiling the snippets in compat/ against the kernel at hand, not
 * by its version: vendors' kernels carry newer interfaces under old numbers.
 */
#ifndef UMN_COMPAT_H
#define UMN_COMPAT_H

#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>
#include <linux/uio.h>

#include "compat-config.h"

/* 6.3 made vm_flags read-only: changing them takes the lock of the VMA. */
static inline void umn_vm_flags_set(struct vm_area_struct *vma, unsigned long flags)
{
#ifdef HAVE_VM_FLAGS_SET
	vm_flags_set(vma, flags);
#else
	vma->vm_flags |= flags;
#endif
}

/* Makes the first bytes of the buffer present and writable. Sleeps. */
static inline bool umn_fault_in(struct iov_iter *to, size_t bytes)
{
#ifdef HAVE_FAULT_IN_IOV_ITER_WRITEABLE
	return fault_in_iov_iter_writeable(to, bytes) == 0;
#else
	struct iov_iter rest = *to;

	while (bytes) {
		struct page *page;
		size_t offset;
		ssize_t got = iov_iter_get_pages(&rest, &page, bytes, 1, &offset);

		if (got <= 0)
			return false;
		put_page(page);
		iov_iter_advance(&rest, got);
		bytes -= got;
	}
	return true;
#endif
}

/* The first page of a memfd, read or made, with a reference. */
static inline struct page *umn_shmem_page(struct address_space *mapping)
{
#ifdef HAVE_SHMEM_READ_FOLIO
	struct folio *folio = shmem_read_folio(mapping, 0);

	return IS_ERR(folio) ? ERR_CAST(folio) : folio_file_page(folio, 0);
#else
	return shmem_read_mapping_page(mapping, 0);
#endif
}

static inline void umn_mark_dirty(struct page *page)
{
#ifdef HAVE_FOLIO_MARK_DIRTY_LOCK
	folio_mark_dirty_lock(page_folio(page));
#else
	set_page_dirty_lock(page);
#endif
}

#endif /* UMN_COMPAT_H */
