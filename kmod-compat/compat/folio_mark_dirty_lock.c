// SPDX-License-Identifier: GPL-2.0-only
/* Since 6.12 or so; set_page_dirty_lock is on its way out. */
#include <linux/mm.h>

void probe(struct page *page);
void probe(struct page *page)
{
	folio_mark_dirty_lock(page_folio(page));
}
