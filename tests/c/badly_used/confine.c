/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * confine HOW COMMAND ARGS: executes the command in surroundings that don't suit the emulator.
 *
 *   eperm, enosys    seccomp(2) answers that, as under a container's profile and in a kernel without seccomp
 *   einval           installing a listener answers EINVAL, as in a kernel without user notification
 *   listener         a notification listener of somebody else is installed, and open
 *   nofile=N         no descriptor from N on
 *   nproc=0          no further process of this user
 *
 * The variable CONFINED_PRELOAD becomes LD_PRELOAD for the command, so that this program runs without it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static void die(const char *what)
{
    fprintf(stderr, "confine: %s: %s\n", what, strerror(errno));
    exit(99);
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(action) BPF_STMT(BPF_RET | BPF_K, action)

static int filter(struct sock_filter *code, size_t n, unsigned flags)
{
    struct sock_fprog program = {(unsigned short)n, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        die("no_new_privs");
    int fd = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
    if (fd < 0)
        die("seccomp");
    return fd;
}

/* seccomp(2) fails, or only a listener does. */
static void forbid(int error, int only_listeners)
{
    struct sock_filter all[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_seccomp, 0, 1),
        RETURN(SECCOMP_RET_ERRNO | (unsigned)error),
        RETURN(SECCOMP_RET_ALLOW),
    };
    struct sock_filter listeners[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_seccomp, 0, 3),
        LOAD(args[1]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, SECCOMP_FILTER_FLAG_NEW_LISTENER, 0, 1),
        RETURN(SECCOMP_RET_ERRNO | (unsigned)error),
        RETURN(SECCOMP_RET_ALLOW),
    };
    if (only_listeners)
        filter(listeners, sizeof listeners / sizeof listeners[0], 0);
    else
        filter(all, sizeof all / sizeof all[0], 0);
}

static void listen_first(void)
{
    /* A call that nobody makes is what it would be told of. */
    struct sock_filter code[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_acct, 0, 1),
        RETURN(SECCOMP_RET_USER_NOTIF),
        RETURN(SECCOMP_RET_ALLOW),
    };
    int fd = filter(code, sizeof code / sizeof code[0], SECCOMP_FILTER_FLAG_NEW_LISTENER);
    /* Open for as long as the command runs. */
    if (fcntl(fd, F_SETFD, 0) != 0)
        die("fcntl");
}

static void limit(__rlimit_resource_t resource, const char *number)
{
    struct rlimit r = {strtoul(number, NULL, 10), strtoul(number, NULL, 10)};
    if (setrlimit(resource, &r) != 0)
        die("setrlimit");
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: confine HOW COMMAND ARGS\n");
        return 99;
    }
    const char *how = argv[1];
    if (strcmp(how, "eperm") == 0)
        forbid(EPERM, 0);
    else if (strcmp(how, "enosys") == 0)
        forbid(ENOSYS, 0);
    else if (strcmp(how, "einval") == 0)
        forbid(EINVAL, 1);
    else if (strcmp(how, "listener") == 0)
        listen_first();
    else if (strncmp(how, "nofile=", 7) == 0)
        limit(RLIMIT_NOFILE, how + 7);
    else if (strncmp(how, "nproc=", 6) == 0)
        limit(RLIMIT_NPROC, how + 6);
    else if (strcmp(how, "nothing") != 0) {
        fprintf(stderr, "confine: what is %s?\n", how);
        return 99;
    }
    const char *preload = getenv("CONFINED_PRELOAD");
    if (preload)
        setenv("LD_PRELOAD", preload, 1);
    execvp(argv[2], argv + 2);
    die(argv[2]);
}
