/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A client with seccomp filters of its own.
 *
 *   own_filter tracer   one that wants a tracer for getppid: natively there is none, and the call fails with ENOSYS
 *   own_filter thread   one in a thread that exists when the device is opened: no filter can be put on all threads
 *
 * Each call of the other thread and of this one is reported all the same.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096UL
#define ROUNDS 200

static int device;
static const volatile uint64_t *counter;
static _Atomic int filtered, opened;

static void must(int condition, const char *what)
{
	if (!condition) {
		printf("%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static void filter(unsigned action)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_getppid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, action),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(code[0]), code };

	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
	must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0, "seccomp");
}

static void each_is_reported(void)
{
	for (int i = 0; i < ROUNDS; i++) {
		char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + PAGE, 1, 0, 0 };
		uint64_t cookie = 1, before;

		must(page != MAP_FAILED, "mmap");
		must(ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region) == 0, "REGISTER_REGION");
		before = *counter;
		must(munmap(page, PAGE) == 0, "munmap");
		must(*counter == before + 1, "the counter moves by one");
		must(ioctl(device, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0, "UNREGISTER_REGION");
	}
}

static void *thread_main(void *unused)
{
	filter(SECCOMP_RET_ERRNO | EBADMSG);
	atomic_store(&filtered, 1);
	while (!atomic_load(&opened))
		usleep(1000);
	each_is_reported();
	must(syscall(SYS_getppid) == -1 && errno == EBADMSG, "the thread's filter");
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int in_thread = argc == 2 && strcmp(argv[1], "thread") == 0;

	if (in_thread) {
		must(pthread_create(&thread, NULL, thread_main, NULL) == 0, "pthread_create");
		while (!atomic_load(&filtered))
			usleep(1000);
	} else {
		filter(SECCOMP_RET_TRACE | 1);
		must(syscall(SYS_getppid) == -1 && errno == ENOSYS, "no tracer");
	}
	device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	must(device >= 0, "open /dev/ummunotify");
	counter = mmap(NULL, 8, PROT_READ, MAP_SHARED, device, 0);
	must(counter != MAP_FAILED, "mmap of the counter");
	atomic_store(&opened, 1);
	if (in_thread) {
		pthread_join(thread, NULL);
		must(syscall(SYS_getppid) > 0, "getppid");
	} else {
		must(syscall(SYS_getppid) == -1 && errno == ENOSYS, "no tracer of ours");
	}
	each_is_reported();
	printf("well\n");
	return 0;
}
