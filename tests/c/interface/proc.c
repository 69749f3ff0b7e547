/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* "Processes": who is the owner, and what fork, exec and exit do. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* What a thread or a CLONE_VM child does: discards page 1 of `a`, registers page 3 as region 3. */
struct deed {
    int fd;
    char *a;
    int discarded, registered;
};

static void do_deed(struct deed *d)
{
    d->discarded = madvise(d->a + PAGE, PAGE, MADV_DONTNEED);
    d->registered = reg(d->fd, 3, d->a + 3 * PAGE, d->a + 4 * PAGE);
}

static void check_deed(struct deed *d, volatile uint64_t *counter)
{
    is("madvise", d->discarded, 0);
    is("register", d->registered, 0);
    is("counter", (long long)*counter, 1);
    READS("read", d->fd, 256, HINTED(1, d->a + PAGE, d->a + 2 * PAGE), LAST(1));
    discard(d->a + 3 * PAGE, 1);
    READS("its_region", d->fd, 256, HINTED(3, d->a + 3 * PAGE, d->a + 4 * PAGE), LAST(2));
}

static struct deed prepare(volatile uint64_t **counter)
{
    struct deed d = {.fd = device(), .a = area(4)};
    *counter = counter_of(d.fd);
    reg(d.fd, 1, d.a, d.a + 2 * PAGE);
    return d;
}

static void *deed_thread(void *d)
{
    do_deed(d);
    return NULL;
}

TEST(proc_thread_is_the_owner)
{
    volatile uint64_t *counter;
    struct deed d = prepare(&counter);
    struct task task;
    start(&task, deed_thread, &d);
    if (ends("thread", &task))
        check_deed(&d, counter);
}

static void *open_thread(void *fd)
{
    *(int *)fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
    return NULL;
}

static void *idle_thread(void *stop)
{
    while (!*(volatile bool *)stop)
        nap(1);
    return NULL;
}

TEST(proc_opened_by_a_thread_that_ended)
{
    static volatile bool stop;
    int fd = -1;
    struct task idle, opener;
    start(&idle, idle_thread, (void *)&stop);
    start(&opener, open_thread, &fd);
    ends("opener", &opener);
    if (!works("open", fd))
        return;
    char *a = area(2);
    volatile uint64_t *counter = counter_of(fd);
    reg(fd, 1, a, a + 2 * PAGE);
    discard(a, 1);
    is("counter", (long long)*counter, 1);
    READS("read", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
    stop = true;
    ends("thread_that_was_there_before", &idle);
}

/* A thread from before the open unmaps after it. */
struct early {
    volatile bool go;
    char *a;
};

static void *early_thread(void *early_)
{
    struct early *e = early_;
    while (!e->go)
        nap(1);
    munmap(e->a, PAGE);
    return NULL;
}

TEST(proc_thread_older_than_the_context_is_seen)
{
    struct early e = {false, area(1)};
    struct task task;
    start(&task, early_thread, &e);
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    reg(fd, 1, e.a, e.a + PAGE);
    e.go = true;
    ends("thread", &task);
    is("counter", (long long)*counter, 1);
    READS("read", fd, 256, HINTED(1, e.a, e.a + PAGE), LAST(1));
}

static int deed_child(void *d)
{
    do_deed(d);
    return 0;
}

static void clone_row(const char *name, int flags)
{
    variant(name);
    volatile uint64_t *counter;
    struct deed d = prepare(&counter);
    char *stack = area(64);
    pid_t child = clone(deed_child, stack + 64 * PAGE, flags | SIGCHLD, &d);
    if (works("clone", child) && ended_well("child", child))
        check_deed(&d, counter);
    variant(NULL);
}

TEST(proc_clone_vm_child_is_the_owner)
{
    clone_row("vm", CLONE_VM);
    clone_row("vm_files", CLONE_VM | CLONE_FILES);
    clone_row("vm_files_fs", CLONE_VM | CLONE_FILES | CLONE_FS);
    clone_row("vm_vfork", CLONE_VM | CLONE_VFORK);
}

TEST(proc_vfork_child_is_the_owner)
{
    volatile uint64_t *counter;
    struct deed d = prepare(&counter);
    pid_t child = vfork();
    if (child == 0) {
        do_deed(&d);
        _exit(0);
    }
    if (works("vfork", child) && ended_well("child", child))
        check_deed(&d, counter);
}

TEST(proc_vfork_and_posix_spawn_are_no_invalidations)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4);
    reg(fd, 1, a, a + 4 * PAGE);
    pid_t child = vfork();
    if (child == 0)
        _exit(0);
    ended_well("vfork.child", child);
    is("vfork", (long long)*counter, 0);
    child = vfork();
    if (child == 0) {
        execl("/bin/true", "true", NULL);
        _exit(1);
    }
    ended_well("vfork_exec.child", child);
    is("vfork_exec", (long long)*counter, 0);
    child = vfork();
    if (child == 0) {
        execl("/there/is/no/such/program", "x", NULL);
        _exit(0);
    }
    ended_well("vfork_failed_exec.child", child);
    is("vfork_failed_exec", (long long)*counter, 0);
    char *argv[] = {"true", NULL};
    is("posix_spawn.call", posix_spawn(&child, "/bin/true", NULL, NULL, argv, environ), 0);
    ended_well("posix_spawn.child", child);
    is("posix_spawn", (long long)*counter, 0);
    nothing("nothing_reported", fd);
}

TEST(proc_fork_is_an_invalidation_in_the_parent)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(4);
    reg(fd, 7, a, a + 4 * PAGE);
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    uint64_t after = *counter;
    at_least("counter", (long long)after, 1);
    struct ummunotify_event e[4];
    is("bytes", read(fd, e, sizeof e), 64);
    is("type", e[0].type, UMMUNOTIFY_EVENT_TYPE_INVAL);
    is("cookie", (long long)e[0].user_cookie_counter, 7);
    check(e[0].hint_start <= (uintptr_t)a && e[0].hint_end >= (uintptr_t)(a + 4 * PAGE), "range",
          "the whole region", "%#llx-%#llx", (unsigned long long)e[0].hint_start,
          (unsigned long long)e[0].hint_end);
    is("last", (long long)e[1].user_cookie_counter, (long long)after);
    ended_well("child", child);
}

TEST(proc_forked_child_never_fires)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(8);
    reg(fd, 1, a, a + 8 * PAGE);
    struct turns turns;
    turns_init(&turns);
    pid_t child = fork();
    if (child == 0) {
        wait_parent(&turns);
        is("child.madvise", madvise(a, PAGE, MADV_DONTNEED), 0);
        is("child.munmap", munmap(a, PAGE), 0);
        is("child.mprotect", mprotect(a + PAGE, PAGE, PROT_READ), 0);
        void *p = mmap(a + 2 * PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        check(p == a + 2 * PAGE, "child.map_fixed", "the address asked for", "%p", p);
        p = mremap(a + 3 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, hole(1));
        check(p != MAP_FAILED, "child.mremap", "an address", "%s", strerrorname_np(errno));
        pid_t grandchild = fork();
        if (grandchild == 0) {
            munmap(a + 4 * PAGE, PAGE);
            _exit(0);
        }
        ended_well("grandchild", grandchild);
        child_end();
    }
    drain(fd); /* the fork itself */
    uint64_t before = *counter;
    tell_child(&turns);
    ended_well("child", child);
    is("counter", (long long)*counter, (long long)before);
    is("not_readable", readable(fd), 0);
    nothing("nothing_reported", fd);
    discard(a, 1);
    READS("the_parents_own_is", fd, 256, HINTED(1, a, a + PAGE), LAST(before + 1));
}

TEST(proc_forked_child_sees_the_counter)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    struct turns turns;
    turns_init(&turns);
    pid_t child = fork();
    if (child == 0) {
        wait_parent(&turns);
        is("inherited_mapping", (long long)*counter, 3);
        is("own_mapping", (long long)*counter_of(fd), 3);
        close(fd);
        tell_parent(&turns);
        wait_parent(&turns);
        is("inherited_mapping_goes_on", (long long)*counter, 4);
        child_end();
    }
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    for (int i = 0; i < 3; i++)
        discard(a, 1);
    tell_child(&turns);
    wait_child(&turns);
    discard(a, 1);
    tell_child(&turns);
    ended_well("child", child);
    READS("read", fd, 256, BARE(1, a, a + PAGE), LAST(4));
}

TEST(proc_forked_child_dies_parent_goes_on)
{
    int fd = device();
    for (int i = 0; i < 3; i++) {
        struct turns turns;
        turns_init(&turns);
        pid_t child = fork();
        if (child == 0) {
            reg(fd, (uint64_t)i + 100, (void *)1, (void *)2);
            drain(fd);
            tell_parent(&turns);
            wait_parent(&turns);
            child_end();
        }
        wait_child(&turns);
        kill(child, i % 2 ? SIGKILL : SIGTERM);
        waitpid(child, NULL, 0);
    }
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    READS("read", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
    is("childs_region_stays", unreg(fd, 100), 0);
}

TEST(proc_forked_child_may_open_its_own)
{
    int fd = device();
    char *a = area(2);
    struct turns turns;
    turns_init(&turns);
    pid_t child = fork();
    if (child == 0) {
        int own = device();
        reg(own, 1, a, a + 2 * PAGE);
        discard(a + PAGE, 1);
        READS("childs_own", own, 256, HINTED(1, a + PAGE, a + 2 * PAGE), LAST(1));
        nothing("inherited_isnt_hit", fd);
        tell_parent(&turns);
        wait_parent(&turns);
        nothing("parents_unmap_doesnt_fire_the_childs", own);
        child_end();
    }
    wait_child(&turns);
    reg(fd, 1, a, a + 2 * PAGE);
    discard(a, 1);
    READS("parents", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
    tell_child(&turns);
    ended_well("child", child);
}

TEST(proc_opener_dies_child_has_the_descriptor)
{
    struct turns turns;
    turns_init(&turns);
    pid_t opener = fork();
    if (opener == 0) {
        int fd = device();
        pid_t child = fork();
        char *a = area(2);
        if (child == 0) {
            wait_parent(&turns); /* the opener was reaped */
            READS("pending_events", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
            nothing("drained", fd);
            is("register", reg(fd, 2, a, a + PAGE), 0);
            fails("cookie_taken", reg(fd, 1, a, a + PAGE), EINVAL);
            is("unregister", unreg(fd, 1), 0);
            is("counter", (long long)*counter_of(fd), 1);
            is("not_readable", readable(fd), 0);
            void *p = mmap(a, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            check(p == a, "mmap", "the address asked for", "%p", p);
            unmap(a, 2);
            nothing("never_fires_again", fd);
            tell_parent(&turns);
            child_end();
        }
        reg(fd, 1, a, a + 2 * PAGE);
        discard(a, 1);
        _exit(0);
    }
    ended_well("opener", opener);
    tell_child(&turns);
    wait_child(&turns);
}

/* exec_program FD ADDRESS COUNTER: what is left of a context after exec. */
HELPER(exec_program)
{
    if (argc != 4)
        return 2;
    int fd = atoi(argv[1]);
    char *a = (char *)strtoul(argv[2], NULL, 16);
    uint64_t count = strtoul(argv[3], NULL, 10);
    volatile uint64_t *counter = counter_of(fd);
    is("exec_is_no_invalidation", (long long)*counter, (long long)count);
    is("readable", readable(fd), 1);
    READS("pending_event", fd, 256, HINTED(1, a, a + PAGE), LAST(count));
    nothing("drained", fd);
    fails("cookie_taken", reg(fd, 1, a, a + PAGE), EINVAL);
    is("register", reg(fd, 2, (void *)0, (void *)-1), 0);
    fails("exchange", ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &(uint32_t){0}), EINVAL);
    void *p = mmap(a, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (check(p == a, "mmap", "the address asked for", "%p", p)) {
        memset(a, 1, 2 * PAGE);
        discard(a, 1);
        unmap(a, 2);
    }
    is("never_fires_again", (long long)*counter, (long long)count);
    is("not_readable", readable(fd), 0);
    nothing("nothing_to_read", fd);
    is("unregister", unreg(fd, 1), 0);
    /* A context of the new image's own is another matter. */
    int own = device();
    char *b = area(1);
    reg(own, 1, b, b + PAGE);
    discard(b, 1);
    READS("own_context", own, 256, HINTED(1, b, b + PAGE), LAST(1));
    is("own_context_alone", (long long)*counter, (long long)count);
    is("close", close(fd), 0);
    return 0;
}

TEST(proc_exec_inherited_descriptor)
{
    pid_t child = fork();
    if (child == 0) {
        int fd = open_device(O_RDONLY | O_NONBLOCK);
        char *a = area(2), number[16], address[32];
        /* Everything: whatever the new image maps and unmaps would hit it. */
        reg_raw(fd, 9, 0, UINT64_MAX);
        unreg(fd, 9);
        reg(fd, 1, a, a + 2 * PAGE);
        discard(a, 1);
        snprintf(number, sizeof number, "%d", fd);
        snprintf(address, sizeof address, "%lx", (unsigned long)(uintptr_t)a);
        exec_helper((char *[]){"exec_program", number, address, "1", NULL});
    }
    ended_well("program", child);
}

/* exec_everything FD: nothing that exec itself does fires, even for a region over all addresses. */
HELPER(exec_everything)
{
    if (argc != 2)
        return 2;
    int fd = atoi(argv[1]);
    is("counter", (long long)*counter_of(fd), 0);
    nothing("nothing_to_read", fd);
    return 0;
}

TEST(proc_exec_is_no_invalidation)
{
    pid_t child = fork();
    if (child == 0) {
        int fd = open_device(O_RDONLY | O_NONBLOCK);
        char number[16];
        snprintf(number, sizeof number, "%d", fd);
        reg_raw(fd, 1, 0, UINT64_MAX);
        char *argv[] = {"suite", "--helper", "exec_everything", number, NULL};
        execv("/proc/self/exe", argv);
        give_up("execv");
    }
    ended_well("program", child);
}

TEST(proc_exec_closes_a_cloexec_descriptor)
{
    pid_t child = fork();
    if (child == 0) {
        int fd = device();
        char number[32];
        snprintf(number, sizeof number, "/proc/self/fd/%d", fd);
        execl("/usr/bin/test", "test", "!", "-e", number, NULL);
        give_up("execl");
    }
    ended_well("program", child);
}

TEST(proc_failed_exec_changes_nothing)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    fails("exec", execl("/there/is/no/such/program", "x", NULL), ENOENT);
    is("counter", (long long)*counter, 0);
    discard(a, 1);
    is("still_counts", (long long)*counter, 1);
    READS("still_reports", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
}

static void *ending_thread(void *unused)
{
    return unused;
}

TEST(proc_exit_of_a_thread_is_none)
{
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    for (int i = 0; i < 10; i++) {
        struct task task;
        start(&task, ending_thread, NULL);
        ends("thread", &task);
    }
    is("counter", (long long)*counter, 0);
    nothing("nothing_to_read", fd);
}

TEST(proc_exit_of_the_opener_is_none)
{
    struct turns turns;
    turns_init(&turns);
    pid_t opener = fork();
    if (opener == 0) {
        int fd = device();
        pid_t child = fork();
        if (child == 0) {
            wait_parent(&turns);
            is("counter", (long long)*counter_of(fd), 0);
            nothing("nothing_to_read", fd);
            tell_parent(&turns);
            child_end();
        }
        reg_raw(fd, 1, 0, UINT64_MAX);
        syscall(SYS_exit_group, 0);
    }
    ended_well("opener", opener);
    tell_child(&turns);
    wait_child(&turns);
}

TEST(proc_no_child_of_ours_is_to_be_seen)
{
    device();
    fails("wait", waitpid(-1, NULL, WNOHANG), ECHILD);
    pid_t child = fork();
    if (child == 0)
        _exit(7);
    int status = 0;
    is("wait_for_any", wait(&status), child);
    is("exit_code", WEXITSTATUS(status), 7);
    fails("wait_again", wait(&status), ECHILD);
}
