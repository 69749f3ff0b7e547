/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Preloaded, makes a program one some of whose calls are trapped by a filter and let go by a supervisor that does nothing
 * else: the floor of every layer that rests on seccomp's notifications. Trapped are
 *
 *   (nothing)  munmap
 *   -DFLAGS    mmap with MAP_FIXED: what it costs to look at an argument
 *   -DGATE     munmap and madvise, but not libc's own: what it costs to look where a call comes from
 *   -DEXEC     what the layers inline,notify trap of a program that is started without their library: of the table in
 *              emulator/src/trap/policy.rs the calls that a loader makes, and not what its parent's libc does
 *
 *   cc -shared -fPIC bare.c -o bare.so
 *   ummunotify bench --peer bare=bare.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
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

/* The word at so many bytes of a field of the call. */
#define LOAD(field, bytes) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field) + (bytes))
/* How many statements are passed over if it is this, and if not. */
#define IF(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, yes, no)
#define ANY(mask, yes, no) BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, mask, yes, no)
#define TRAP BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF)
#define PASS BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define TRAP_UNLESS_FROM(address) \
	LOAD(instruction_pointer, 0), IF((uint32_t)(address), 0, 2), \
	LOAD(instruction_pointer, 4), IF((uint32_t)((address) >> 32), 1, 0), TRAP, PASS

#if defined(GATE) || defined(EXEC)
/* Where libc's function of that name is when it calls the kernel: behind `mov $number, %eax; syscall`. */
static uint64_t site(const char *name, uint32_t number)
{
	const unsigned char code[] = { 0xb8, number & 0xff, number >> 8, 0, 0, 0x0f, 0x05 };
	char *function = dlsym(RTLD_DEFAULT, name), *found = function ? memmem(function, 32, code, sizeof code) : NULL;

	if (found == NULL) {
		errno = ENOTSUP;
		die(name);
	}
	return (uintptr_t)found + sizeof code;
}
#endif

static void __attribute__((constructor)) begin(void)
{
	struct sock_filter code[] = {
		LOAD(nr, 0),
#if defined(FLAGS)
		IF(SYS_mmap, 0, 4), LOAD(args, 3 * 8), ANY(MAP_FIXED, 0, 1), TRAP, PASS,
#elif defined(GATE)
		IF(SYS_munmap, 0, 6), TRAP_UNLESS_FROM(site("munmap", SYS_munmap)),
		IF(SYS_madvise, 0, 6), TRAP_UNLESS_FROM(site("madvise", SYS_madvise)),
#elif defined(EXEC)
		IF(SYS_mmap, 0, 5), LOAD(args, 3 * 8), ANY(MAP_FIXED, 0, 2), ANY(MAP_FIXED_NOREPLACE, 1, 0), TRAP, PASS,
		IF(SYS_mprotect, 0, 1), TRAP,
		IF(SYS_munmap, 0, 6), TRAP_UNLESS_FROM(site("munmap", SYS_munmap)),
		IF(SYS_brk, 0, 4), LOAD(args, 0), IF(0, 1, 0), TRAP, PASS,
		IF(SYS_clone, 0, 4), LOAD(args, 0), ANY(CLONE_VM, 1, 0), TRAP, PASS,
#else
		IF(SYS_munmap, 0, 1), TRAP,
#endif
		PASS,
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
#ifdef FLAGS
	if (syscall(SYS_mmap, NULL, 0, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != -1 || errno != EINVAL)
		die("mmap");
#else
	if (syscall(SYS_munmap, NULL, 0) != -1 || errno != EINVAL)
		die("munmap");
#endif
}
