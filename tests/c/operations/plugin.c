/* A library with data that the walk registers and then closes. */
#include <stddef.h>

extern char walk_plugin_data[16 * 4096];
char walk_plugin_data[16 * 4096] __attribute__((aligned(4096))) = { 1 };
