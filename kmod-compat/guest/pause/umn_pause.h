/* SPDX-License-Identifier: GPL-2.0-only */
/* What the tests ask of /dev/umn_pause. */
#ifndef UMN_PAUSE_H
#define UMN_PAUSE_H

#include <linux/ioctl.h>
#include <linux/types.h>

struct umn_pause_range {
	__u64 start;
	__u64 end;
};

/* From now on invalidations of the opener's that overlap the range stop at their start. */
#define UMN_PAUSE_ARM _IOW('P', 1, struct umn_pause_range)
/* Waits until that many are stopped; ETIMEDOUT after ten seconds. */
#define UMN_PAUSE_AWAIT _IOW('P', 2, __u32)
/* Lets all of them go on, and stops no more. */
#define UMN_PAUSE_RELEASE _IO('P', 3)

#endif
