/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Preloaded, ends the program before it has begun. */
#include <stdlib.h>

static void __attribute__((constructor)) begin(void)
{
	_Exit(3);
}
