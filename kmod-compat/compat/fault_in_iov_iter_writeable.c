// SPDX-License-Identifier: GPL-2.0-only
/* Since 5.16. */
#include <linux/uio.h>

size_t probe(struct iov_iter *iter);
size_t probe(struct iov_iter *iter)
{
	return fault_in_iov_iter_writeable(iter, 32);
}
