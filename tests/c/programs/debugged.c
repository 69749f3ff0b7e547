/* A client to be looked at by a debugger. */
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

volatile int answer = 41;

__attribute__((noinline)) static void reached(int value)
{
	answer += value;
}

int main(void)
{
	char *page;

	reached(1);
	for (int i = 0; i < 100; i++) {
		page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		*(volatile char *)page = 1;
		munmap(page, 4096);
	}
	printf("answer %d\n", answer);
	return 5;
}
