// SPDX-License-Identifier: GPL-2.0-only
/* Must compile everywhere: if it doesn't, the others' failures mean nothing. */
#include <linux/mm.h>
#include <linux/mmu_notifier.h>

int probe(struct mmu_notifier *notifier, struct mm_struct *mm);
int probe(struct mmu_notifier *notifier, struct mm_struct *mm)
{
	return mmu_notifier_register(notifier, mm);
}
