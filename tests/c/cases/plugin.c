/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A library that is loaded once the device is open: with data to register, and with calls of its own. */
#include <sys/mman.h>

char plugin_data[3 * 4096] = { 1 };

int add(int a, int b);
int plugin_unmap(void *start, unsigned long bytes);

int add(int a, int b)
{
	return a + b;
}

int plugin_unmap(void *start, unsigned long bytes)
{
	return munmap(start, bytes);
}
