// SPDX-License-Identifier: GPL-2.0-only
/* Since 6.5. */
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>

struct page *probe(struct address_space *mapping);
struct page *probe(struct address_space *mapping)
{
	struct folio *folio = shmem_read_folio(mapping, 0);

	return IS_ERR(folio) ? NULL : folio_file_page(folio, 0);
}
