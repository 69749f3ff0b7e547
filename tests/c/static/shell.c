/*
 * A static program that opens the device and then starts dynamic ones, as a launcher would: they are under its
 * filter, and must find the device by the library that is preloaded into them.
 *
 *   shell PROGRAM [ARGUMENTS...]    runs it as a child, then becomes it
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int status, device = open("/dev/ummunotify", O_RDONLY | O_CLOEXEC);
	pid_t pid;

	if (argc < 2 || device < 0)
		return 2;
	pid = fork();
	if (pid == 0) {
		execv(argv[1], argv + 1);
		_exit(127);
	}
	if (waitpid(pid, &status, 0) != pid || status != 0) {
		printf("FAIL the child: %#x\n", status);
		return 1;
	}
	execv(argv[1], argv + 1);
	return 127;
}
