/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Preloaded, makes a program one whose munmap is trapped by a filter and let go by a supervisor that does nothing else: the
 * floor of every layer that rests on seccomp's notifications.
 *
 *   cc -shared -fPIC bare.c -o bare.so
 *   ummunotify bench --peer bare=bare.so
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* linux/seccomp.h of 5.19 */
#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5)
#endif

/* linux/seccomp.h of 6.6 */
#ifndef SECCOMP_IOCTL_NOTIF_SET_FLAGS
#define SECCOMP_IOCTL_NOTIF_SET_FLAGS SECCOMP_IOW(4, __u64)
#define SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP (1UL << 0)
#endif

static void die(const char *what)
{
	fprintf(stderr, "peers/bare: %s: %s\n", what, strerror(errno));
	_exit(2);
}

static void pass(int socket, int *descriptor, int send)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec data = { &byte, 1 };
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control,
	};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	if (send) {
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(header), descriptor, sizeof(int));
		if (sendmsg(socket, &message, 0) != 1)
			die("sendmsg");
	} else {
		if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1 || (header = CMSG_FIRSTHDR(&message)) == NULL)
			_exit(2);
		memcpy(descriptor, CMSG_DATA(header), sizeof(int));
	}
}

/* Until the last process under the filter has ended. */
static void supervise(int listener)
{
	struct seccomp_notif_sizes sizes;
	struct seccomp_notif *notification;
	struct seccomp_notif_resp *answer;

	if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes) != 0)
		die("SECCOMP_GET_NOTIF_SIZES");
	notification = calloc(1, sizes.seccomp_notif);
	answer = calloc(1, sizes.seccomp_notif_resp);
	if (notification == NULL || answer == NULL)
		die("calloc");
	/* Older kernels wake whom they wake anywhere. */
	ioctl(listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP);
	for (;;) {
		struct pollfd ready = { listener, POLLIN, 0 };

		/* On 6.1 RECV doesn't return when the last one ends. */
		if (poll(&ready, 1, -1) < 0 || (ready.revents & POLLHUP))
			_exit(0);
		memset(notification, 0, sizes.seccomp_notif);
		if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, notification) != 0)
			continue;
		memset(answer, 0, sizes.seccomp_notif_resp);
		answer->id = notification->id;
		answer->flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
		ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, answer);
	}
}

static void __attribute__((constructor)) begin(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munmap, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof code / sizeof code[0], code };
	int pair[2], listener;
	unsigned long flags = SECCOMP_FILTER_FLAG_NEW_LISTENER;
	pid_t child;

	/* What this program starts inherits the filter, and one process can't have two listeners. */
	unsetenv("LD_PRELOAD");
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
		die("socketpair");
	/* Twice, so that nobody waits for a child that he doesn't know. */
	child = fork();
	if (child < 0)
		die("fork");
	if (child == 0) {
		if (fork() != 0)
			_exit(0);
		/* Who waits for the end of the program's output must not wait for this process. */
		close(0), close(1);
		close(pair[0]);
		pass(pair[1], &listener, 0);
		close(pair[1]);
		supervise(listener);
	}
	waitpid(child, NULL, 0);
	close(pair[1]);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		die("PR_SET_NO_NEW_PRIVS");
	listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, &program);
	if (listener < 0)
		listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
	if (listener < 0)
		die("a filter with a listener");
	pass(pair[0], &listener, 1);
	close(pair[0]);
	close(listener);
	/* The first trapped call: a supervisor that isn't there would be an error here, not in a figure. */
	if (munmap(NULL, 0) != -1 || errno != EINVAL)
		die("munmap");
}
