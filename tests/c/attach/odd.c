// SPDX-License-Identifier: MIT OR Apache-2.0
/* Processes that can't be attached to, or only just: the argument says which. It says the process to try, and waits. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_barrier_t both;

/* Lets all calls go but one, which it answers with `answer`. */
static int filter(unsigned int number, unsigned int answer, unsigned int flags)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, answer),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { 4, code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		return -1;
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

static int waits(void *unused)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;)
		pause();
	return unused != NULL;
}

static void *own_filter(void *unused)
{
	(void)unused;
	if (filter(SYS_acct, SECCOMP_RET_ERRNO | EPERM, 0) != 0)
		exit(3);
	pthread_barrier_wait(&both);
	waits(NULL);
	return NULL;
}

static void *vforks(void *unused)
{
	static char stack[65536];

	(void)unused;
	pthread_barrier_wait(&both);
	clone(waits, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
	return NULL;
}

static void *pauses(void *unused)
{
	waits(unused);
	return NULL;
}

int main(int argc, char **argv)
{
	const char *kind = argc > 1 ? argv[1] : "";
	pid_t shown = getpid();
	pthread_t thread;
	char byte;

	setvbuf(stdout, NULL, _IOLBF, 0);
	pthread_barrier_init(&both, NULL, 2);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (strcmp(kind, "filter") == 0) {
		if (filter(SYS_acct, SECCOMP_RET_ERRNO | EPERM, 0) != 0)
			return 3;
	} else if (strcmp(kind, "deadly") == 0) {
		/* Kills for what attaching asks first. */
		if (filter(SYS_prctl, SECCOMP_RET_KILL_PROCESS, 0) != 0)
			return 3;
	} else if (strcmp(kind, "listener") == 0) {
		if (filter(SYS_acct, SECCOMP_RET_USER_NOTIF, SECCOMP_FILTER_FLAG_NEW_LISTENER) < 0)
			return 3;
	} else if (strcmp(kind, "divided") == 0) {
		pthread_create(&thread, NULL, own_filter, NULL);
		pthread_barrier_wait(&both);
	} else if (strcmp(kind, "undumpable") == 0) {
		prctl(PR_SET_DUMPABLE, 0);
	} else if (strcmp(kind, "thread") == 0) {
		pthread_create(&thread, NULL, pauses, NULL);
	} else if (strcmp(kind, "vfork") == 0) {
		pthread_create(&thread, NULL, vforks, NULL);
		pthread_barrier_wait(&both);
		usleep(50000);
	} else if (strcmp(kind, "leaderless") == 0) {
		/* The first thread ends, another goes on. */
		pthread_create(&thread, NULL, pauses, NULL);
		printf("process %d\n", shown);
		pthread_exit(NULL);
	} else if (strcmp(kind, "zombie") == 0) {
		siginfo_t info;

		if ((shown = fork()) == 0)
			_exit(0);
		waitid(P_PID, (id_t)shown, &info, WEXITED | WNOWAIT);
	} else if (strcmp(kind, "traced") == 0) {
		if ((shown = fork()) == 0)
			waits(NULL);
		if (ptrace(PTRACE_SEIZE, shown, 0, 0) != 0)
			return 3;
	}
	printf("process %d\n", shown);
	if (strcmp(kind, "strict") == 0)
		prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0);
	while (read(0, &byte, 1) > 0)
		;
	/* In strict mode it may not end all threads at once. */
	if (strcmp(kind, "strict") == 0)
		syscall(SYS_exit, 0);
	return 0;
}
