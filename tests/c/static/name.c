/* A static program that says who it is, and whether it has the device. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int device = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC);

	printf("%d %s %d", getpid(), argc > 0 ? argv[0] : "-", argc);
	for (int i = 1; i < argc; i++)
		printf(" %s", argv[i]);
	printf(" %s\n", device >= 0 ? "device" : "none");
	return 0;
}
