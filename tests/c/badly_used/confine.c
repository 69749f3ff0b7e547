/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * confine HOW COMMAND ARGS: executes the command in surroundings that don't suit the emulator.
 *
 *   eperm, enosys    seccomp(2) answers that, as under a container's profile and in a kernel without seccomp
 *   einval           installing a listener answers EINVAL, as in a kernel without user notification
 *   listener         a notification listener of somebody else is installed, and open
 *   unasked          mapping tables don't answer questions, as before Linux 6.11
 *   docker, podman   the filter and the capabilities of a container's default, as far as they matter here
 *   deny=CALL        the system call answers EPERM; several are separated by commas
 *   nofile=N         no descriptor from N on
 *   nproc=0          no further process of this user
 *   fsize=N          no file longer than N bytes
 *   as=N             no more than N bytes of addresses
 *   closed           no standard descriptor but the output
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

/* PROCMAP_QUERY of linux/fs.h is none that procfs knows. */
static void dont_answer(void)
{
    struct sock_filter code[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_ioctl, 0, 3),
        LOAD(args[1]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0xc0686611, 0, 1),
        RETURN(SECCOMP_RET_ERRNO | ENOTTY),
        RETURN(SECCOMP_RET_ALLOW),
    };
    filter(code, sizeof code / sizeof code[0], 0);
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

struct denial {
    const char *name;
    int number;
};

#define CALL(name) {#name, __NR_##name}

/* What both profiles keep from processes without the capability for it. */
static const struct denial denials[] = {
    CALL(userfaultfd),   CALL(kcmp),           CALL(process_madvise),  CALL(move_pages),    CALL(migrate_pages),
    CALL(mbind),         CALL(get_mempolicy),  CALL(set_mempolicy),    CALL(io_uring_setup), CALL(io_uring_enter),
    CALL(io_uring_register), CALL(perf_event_open), CALL(bpf),         CALL(open_by_handle_at), CALL(lookup_dcookie),
    CALL(fanotify_init), CALL(swapon),         CALL(swapoff),          CALL(add_key),       CALL(request_key),
    CALL(acct),          CALL(iopl),           CALL(ioperm),           CALL(settimeofday),  CALL(clock_settime),
    /* From here on they differ, or neither denies it. */
    CALL(mount),         CALL(unshare),        CALL(setns),            CALL(pidfd_getfd),   CALL(keyctl),
    CALL(umount2),       CALL(pivot_root),     CALL(ptrace),           CALL(process_vm_readv),
    CALL(process_vm_writev), CALL(membarrier), CALL(vmsplice),         CALL(memfd_secret),
    CALL(landlock_create_ruleset), CALL(seccomp), CALL(pidfd_open),    CALL(memfd_create),
};

enum { COMMON = 25, CALLS = sizeof denials / sizeof denials[0] };

static int number_of(const char *name)
{
    for (int i = 0; i < CALLS; i++)
        if (strcmp(denials[i].name, name) == 0)
            return denials[i].number;
    fprintf(stderr, "confine: the call %s isn't in its list\n", name);
    exit(99);
}

static struct sock_filter denying[200];
static size_t denying_length;

static void deny(int number, int error)
{
    denying[denying_length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1);
    denying[denying_length++] = (struct sock_filter)RETURN(SECCOMP_RET_ERRNO | (unsigned)error);
}

/* The filter that a container runtime installs on its own account: without no_new_privs where it may. */
static void install_denials(void)
{
    denying[denying_length++] = (struct sock_filter)RETURN(SECCOMP_RET_ALLOW);
    struct sock_fprog program = {(unsigned short)denying_length, denying};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0)
        filter(denying, denying_length, 0);
}

static void deny_named(char *names)
{
    denying[denying_length++] = (struct sock_filter)LOAD(nr);
    for (char *name = strtok(names, ","); name; name = strtok(NULL, ","))
        deny(number_of(name), EPERM);
    install_denials();
}

/*
 * The defaults of Docker and Podman for x86-64 (moby's and containers-common's seccomp profiles of 2023 and later).
 * Docker knows what it allows, everything else is EPERM, but clone3 ENOSYS. Podman answers ENOSYS to what it doesn't
 * know, and EPERM to ptrace and to other processes' memory.
 */
static void contain(int podman)
{
    static const char *const only_docker[] = {"mount", "unshare", "setns", "pidfd_getfd", "keyctl", "umount2",
                                              "pivot_root"};
    static const char *const only_podman[] = {"ptrace", "process_vm_readv", "process_vm_writev", "membarrier",
                                              "vmsplice"};
    static const char *const unknown_to_podman[] = {"memfd_secret", "landlock_create_ruleset"};
    /* CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT,
     * MKNOD, AUDIT_WRITE, SETFCAP */
    const unsigned long kept = 0xa80425fb;
    enum { NEW_NAMESPACES = 0x7e020000 };

    denying[denying_length++] = (struct sock_filter)LOAD(nr);
    for (int i = 0; i < COMMON; i++)
        deny(denials[i].number, podman && strncmp(denials[i].name, "io_uring", 8) == 0 ? ENOSYS : EPERM);
    if (podman) {
        for (size_t i = 0; i < sizeof only_podman / sizeof only_podman[0]; i++)
            deny(number_of(only_podman[i]), EPERM);
        for (size_t i = 0; i < sizeof unknown_to_podman / sizeof unknown_to_podman[0]; i++)
            deny(number_of(unknown_to_podman[i]), ENOSYS);
    } else {
        for (size_t i = 0; i < sizeof only_docker / sizeof only_docker[0]; i++)
            deny(number_of(only_docker[i]), EPERM);
        deny(__NR_clone3, ENOSYS);
        const struct sock_filter clone_[] = {
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 3),
            LOAD(args[0]),
            BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NEW_NAMESPACES, 0, 1),
            RETURN(SECCOMP_RET_ERRNO | EPERM),
        };
        memcpy(denying + denying_length, clone_, sizeof clone_);
        denying_length += sizeof clone_ / sizeof clone_[0];
    }
    install_denials();
    /* What isn't in the bounding set isn't had after exec. */
    for (unsigned long capability = 0; capability < 64; capability++)
        if (!(kept >> capability & 1))
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
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
    else if (strcmp(how, "unasked") == 0)
        dont_answer();
    else if (strcmp(how, "docker") == 0 || strcmp(how, "podman") == 0)
        contain(strcmp(how, "podman") == 0);
    else if (strncmp(how, "deny=", 5) == 0)
        deny_named(argv[1] + 5);
    else if (strncmp(how, "nofile=", 7) == 0)
        limit(RLIMIT_NOFILE, how + 7);
    else if (strncmp(how, "nproc=", 6) == 0)
        limit(RLIMIT_NPROC, how + 6);
    else if (strncmp(how, "fsize=", 6) == 0)
        limit(RLIMIT_FSIZE, how + 6);
    else if (strncmp(how, "as=", 3) == 0)
        limit(RLIMIT_AS, how + 3);
    else if (strcmp(how, "closed") == 0) {
        /* From which on the lowest free numbers are those. */
        close(0);
        close(2);
    }
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
