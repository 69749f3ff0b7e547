/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Descriptors of one context, in one process and in several; the end of a context. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* Both numbers name one context: each sees what the other did. */
static void one_context(const char *name, int one, int two)
{
    variant(name);
    if (works("call", two)) {
        char *a = area(2);
        drain(one);
        uint64_t cookie = (uintptr_t)a, before = *counter_of(one);
        is("register_by_the_second", reg(two, cookie, a, a + 2 * PAGE), 0);
        fails("cookie_taken_for_the_first", reg(one, cookie, a, a + PAGE), EINVAL);
        discard(a, 1);
        is("first_readable", readable(one), 1);
        is("second_readable", readable(two), 1);
        is("counter_of_the_second", (long long)*counter_of(two), (long long)before + 1);
        READS("second_reads", two, 32, HINTED(cookie, a, a + PAGE));
        READS("first_reads_on", one, 256, LAST(before + 1));
        is("second_drained", readable(two), 0);
        nothing("second_drained.read", two);
        is("unregister_by_the_first", unreg(one, cookie), 0);
        fails("unregistered_for_the_second", unreg(two, cookie), EINVAL);
    }
    variant(NULL);
}

TEST(call_dup_shares_the_context)
{
    int fd = device();
    one_context("dup", fd, dup(fd));
    int target = open("/dev/null", O_RDONLY);
    is("dup2.number", dup2(fd, target), target);
    one_context("dup2", fd, target);
    is("dup2_onto_itself", dup2(fd, fd), fd);
    one_context("dup2_onto_itself", fd, fd);
    is("dup3.number", dup3(fd, 150, O_CLOEXEC), 150);
    is("dup3.cloexec", fcntl(150, F_GETFD), FD_CLOEXEC);
    one_context("dup3", fd, 150);
    int up = fcntl(fd, F_DUPFD, 100);
    at_least("f_dupfd.number", up, 100);
    is("f_dupfd.cloexec", fcntl(up, F_GETFD), 0);
    one_context("f_dupfd", fd, up);
    up = fcntl(fd, F_DUPFD_CLOEXEC, 160);
    at_least("f_dupfd_cloexec.number", up, 160);
    is("f_dupfd_cloexec.cloexec", fcntl(up, F_GETFD), FD_CLOEXEC);
    one_context("f_dupfd_cloexec", fd, up);
    one_context("syscall_dup", fd, (int)syscall(SYS_dup, fd));
    one_context("syscall_dup2", fd, (int)syscall(SYS_dup2, fd, 170));
    one_context("syscall_fcntl", fd, (int)syscall(SYS_fcntl, fd, F_DUPFD, 180));
}

TEST(call_dup_status_flags_are_shared)
{
    int fd = device(), other = dup(fd);
    is("dup_has_no_cloexec", fcntl(other, F_GETFD), 0);
    is("nonblock", fcntl(other, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    fcntl(other, F_SETFL, 0);
    is("cleared_for_both", fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    ioctl(fd, FIONBIO, &(int){1});
    nothing("set_for_both", other);
}

TEST(call_dup_outlives_the_first)
{
    int fd = device(), other = dup(fd);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    close(fd);
    discard(a, 1);
    is("readable", readable(other), 1);
    READS("read", other, 256, BARE(1, a, a + PAGE), LAST(2));
    is("register", reg(other, 2, a, a + PAGE), 0);
    discard(a, 1);
    READS("reads_on", other, 256, HINTED(2, a, a + PAGE), HINTED(1, a, a + PAGE), LAST(3));
}

TEST(call_dup2_over_a_context_closes_it)
{
    int one = device(), two = device();
    volatile uint64_t *counter_two = counter_of(two);
    char *a = area(2);
    reg(one, 1, a, a + PAGE);
    reg(two, 1, a + PAGE, a + 2 * PAGE);
    is("dup2", dup2(one, two), two);
    discard(a, 2);
    READS("number_names_the_first", two, 256, HINTED(1, a, a + PAGE), LAST(1));
    is("mapping_of_the_second_counts", (long long)*counter_two, 1);
    nothing("first_drained", one);
}

/* A number that was ours names another file now: nothing of the device may show on it. */
static void ordinary_file(const char *name, int fd)
{
    variant(name);
    int zero = open("/dev/zero", O_RDONLY);
    if (zero == fd || is("dup2", dup2(zero, fd), fd)) {
        char buffer[64];
        memset(buffer, 1, sizeof buffer);
        is("read", read(fd, buffer, sizeof buffer), sizeof buffer);
        is("content", buffer[63], 0);
        fails("register", reg_raw(fd, 1, 0, 1), ENOTTY);
        void *p = mmap(NULL, 2 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
        check(p != MAP_FAILED, "mmap", "a mapping", "%s", strerrorname_np(errno));
    }
    variant(NULL);
}

TEST(call_close_number_used_again)
{
    int keep = device(), fd = device();
    is("close", close(fd), 0);
    int file = open("/dev/null", O_RDONLY);
    is("lowest_number", file, fd);
    ordinary_file("closed_and_opened", file);

    fd = device();
    ordinary_file("dup2_over_it", fd);
    fd = device();
    is("syscall_close", syscall(SYS_close, fd), 0);
    int pipes[2];
    if (pipe(pipes) != 0)
        give_up("pipe");
    is("pipe.number", pipes[0], fd);
    is("pipe.write", write(pipes[1], "hello", 5), 5);
    char buffer[256];
    is("pipe.read", read(pipes[0], buffer, sizeof buffer), 5);
    fd = device();
    is("close_range", close_range((unsigned)fd, (unsigned)fd, 0), 0);
    fails("close_range.gone", fcntl(fd, F_GETFD), EBADF);
    fails("close_range.register", reg_raw(fd, 1, 0, 1), EBADF);
    is("close_range.number", open("/dev/null", O_RDONLY), fd);
    ordinary_file("close_range", fd);
    /* The other way round: a file's number becomes the device's. */
    is("device_over_a_file", dup2(keep, file), file);
    one_context("device_over_a_file", keep, file);
}

TEST(call_close_twice_is_ebadf)
{
    int fd = device();
    is("first", close(fd), 0);
    fails("second", close(fd), EBADF);
    fails("ioctl", reg_raw(fd, 1, 0, 1), EBADF);
    fails("read", read(fd, &(struct ummunotify_event){0}, 32), EBADF);
    fails("mmap", mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0, EBADF);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    is("poll", poll(&p, 1, 0), 1);
    is("poll.nval", p.revents, POLLNVAL);
}

TEST(call_close_of_the_last_reference_frees_everything)
{
    char *a = area(4);
    for (int i = 0; i < 3; i++) {
        int fd = device();
        volatile uint64_t *counter = counter_of(fd);
        is("cookie_is_free", reg(fd, 1, a, a + 4 * PAGE), 0);
        is_hex("counter_is_new", *counter, 0);
        is("nothing_queued", readable(fd), 0);
        discard(a, 4);
        discard(a, 1);
        is("counts", (long long)*counter, 2);
        munmap((void *)counter, PAGE);
        close(fd); /* with an event in the queue */
    }
    discard(a, 4);
    int fd = device();
    nothing("vanished", fd);
}

TEST(call_close_range_of_everything)
{
    int fd = device();
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    int spare = fcntl(STDOUT_FILENO, F_DUPFD, 3);
    (void)spare;
    is("close_range", close_range(3, ~0u, 0), 0);
    fails("gone", fcntl(fd, F_GETFD), EBADF);
    discard(a, 1);
    fd = device();
    is("number", fd, 3);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    is("readable", readable(fd), 1);
    READS("works_anew", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_close_range_cloexec_keeps_it)
{
    int fd = device();
    fcntl(fd, F_SETFD, 0);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    if (close_range(300, 300, CLOSE_RANGE_CLOEXEC) != 0 && errno == EINVAL) {
        skip("call", "this kernel has no CLOSE_RANGE_CLOEXEC (Linux 5.11)");
        return;
    }
    is("call", close_range(3, ~0u, CLOSE_RANGE_CLOEXEC), 0);
    is("cloexec", fcntl(fd, F_GETFD), FD_CLOEXEC);
    discard(a, 1);
    is("readable", readable(fd), 1);
    READS("works", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
}

/* Sends descriptors in one message. */
static void send_fds(int socket, const int *fds, int n)
{
    char byte = 'x', control[CMSG_SPACE(8 * sizeof(int))] = {0};
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control,
                       .msg_controllen = CMSG_SPACE((size_t)n * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof(int));
    if (sendmsg(socket, &m, 0) != 1)
        give_up("sendmsg");
}

enum receive { RECVMSG, RECVMMSG, RECVMSG_BY_SYSCALL };

/* Receives one message with descriptors; returns the last of them. */
static int receive_fd(int socket, enum receive how, int flags)
{
    char byte, control[CMSG_SPACE(8 * sizeof(int))];
    struct iovec v = {&byte, 1};
    struct mmsghdr mm = {
        .msg_hdr = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control}};
    long n = how == RECVMSG    ? recvmsg(socket, &mm.msg_hdr, flags)
             : how == RECVMMSG ? recvmmsg(socket, &mm, 1, flags, NULL)
                               : syscall(SYS_recvmsg, socket, &mm.msg_hdr, flags);
    struct cmsghdr *c = n == 1 ? CMSG_FIRSTHDR(&mm.msg_hdr) : NULL;
    if (!c || c->cmsg_type != SCM_RIGHTS)
        give_up("recvmsg");
    size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    int fd;
    memcpy(&fd, CMSG_DATA(c) + (count - 1) * sizeof(int), sizeof fd);
    return fd;
}

TEST(call_scm_rights_to_oneself)
{
    int fd = device(), sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        give_up("socketpair");
    static const char *const names[] = {"recvmsg", "recvmmsg", "syscall"};
    for (int how = RECVMSG; how <= RECVMSG_BY_SYSCALL; how++) {
        send_fds(sockets[0], &fd, 1);
        int other = receive_fd(sockets[1], (enum receive)how, MSG_CMSG_CLOEXEC);
        is("cloexec", fcntl(other, F_GETFD), FD_CLOEXEC);
        one_context(names[how], fd, other);
    }
    int three[3] = {STDOUT_FILENO, fd, fd};
    send_fds(sockets[0], three, 3);
    one_context("last_of_three", fd, receive_fd(sockets[1], RECVMSG, 0));
}

TEST(call_scm_rights_in_flight_is_a_reference)
{
    int fd = device(), sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        give_up("socketpair");
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    send_fds(sockets[0], &fd, 1);
    close(fd);
    discard(a, 1);
    fd = receive_fd(sockets[1], RECVMSG, 0);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    READS("read", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
    discard(a, 1);
    READS("reads_on", fd, 256, HINTED(1, a, a + PAGE), LAST(2));
}

/*
 * What another holder of the descriptor does, told over a socket by the owner: the addresses first, then one
 * letter a step. It answers each step with one byte.
 */
struct orders {
    char *a; /* four pages of the owner */
    uint64_t cookie;
};

static void holder(int socket, int fd)
{
    struct orders o;
    if (recv(socket, &o, sizeof o, MSG_WAITALL) != sizeof o)
        give_up("the orders");
    volatile uint64_t *counter = counter_of(fd);
    char step;
    while (recv(socket, &step, 1, 0) == 1) {
        switch (step) {
        case 'n': /* nothing to be had */
            nothing("holder.nothing", fd);
            is("holder.not_readable", readable(fd), 0);
            break;
        case 'r': /* names the owner's addresses, mapped here or not */
            is("holder.register", reg(fd, o.cookie, o.a, o.a + 2 * PAGE), 0);
            fails("holder.register_again", reg(fd, o.cookie, o.a, o.a + PAGE), EINVAL);
            break;
        case 'm': { /* its own mappings never fire */
            void *p = mmap(o.a, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            check(p == o.a, "holder.mmap", "the owner's address", "%p", p);
            memset(o.a, 1, 4 * PAGE);
            uint64_t before = *counter;
            is("holder.madvise", madvise(o.a, 4 * PAGE, MADV_DONTNEED), 0);
            is("holder.munmap", munmap(o.a, 4 * PAGE), 0);
            is("holder.own_unmap_doesnt_count", (long long)(*counter - before), 0);
            is("holder.own_unmap_isnt_readable", readable(fd), 0);
            break;
        }
        case 'e': /* takes the event of page 1 away */
            is("holder.readable", readable(fd), 1);
            READS("holder.read", fd, 256, HINTED(o.cookie, o.a + PAGE, o.a + 2 * PAGE), LAST(1));
            is("holder.counter", (long long)*counter, 1);
            break;
        case 'p': { /* takes one record of two */
            READS("holder.read_inval", fd, 32, HINTED(o.cookie, o.a, o.a + PAGE));
            is("holder.still_readable", readable(fd), 1);
            break;
        }
        case 'u':
            is("holder.unregister", unreg(fd, o.cookie), 0);
            fails("holder.unregister_again", unreg(fd, o.cookie), EINVAL);
            break;
        case 'b': /* what fails for the owner fails here */
            fails("holder.register_efault", ioctl(fd, UMMUNOTIFY_REGISTER_REGION, (void *)8), EFAULT);
            fails("holder.unregister_efault", ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, (void *)8), EFAULT);
            fails("holder.unregister_unknown", unreg(fd, 987654321), EINVAL);
            fails("holder.exchange", ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &(uint32_t){1}), EINVAL);
            fails("holder.fionread", ioctl(fd, FIONREAD, &(int){1}), ENOTTY);
            fails("holder.two_pages", mmap(NULL, 2 * PAGE, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0,
                  EINVAL);
            fails("holder.writable",
                  mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0, EACCES);
            fails("holder.mprotect", mprotect((void *)counter, PAGE, PROT_READ | PROT_WRITE), EACCES);
            fails("holder.lseek", lseek(fd, 0, SEEK_SET), ESPIPE);
            fails("holder.write", write(fd, "x", 1), EBADF);
            break;
        case 'f': /* a read that fails consumes nothing; 'p' follows */
            fails("holder.read_efault", syscall(SYS_read, fd, (void *)8, 256ul), EFAULT);
            is("holder.read_31", read(fd, &(char[64]){0}, 31), 0);
            break;
        default:
            give_up("a known step");
        }
        if (send(socket, "k", 1, 0) != 1)
            give_up("the answer");
    }
}

/* Lets the holder do a step and waits for its end. */
static void step(int socket, char letter)
{
    char answer;
    struct pollfd p = {.fd = socket, .events = POLLIN};
    if (send(socket, &letter, 1, 0) != 1 || poll(&p, 1, 15000) != 1 || recv(socket, &answer, 1, 0) != 1)
        give_up("the other holder's step");
}

/* The owner's side: the other holder is connected by `socket` and has the descriptor. */
static void owner(int socket, int fd)
{
    volatile uint64_t *counter = counter_of(fd);
    struct orders o = {area(4), 0xc00c1e};
    if (send(socket, &o, sizeof o, 0) != sizeof o)
        give_up("send");
    step(socket, 'n');
    step(socket, 'r');
    fails("cookie_taken_by_the_other", reg(fd, o.cookie, o.a, o.a + PAGE), EINVAL);
    step(socket, 'm');
    is("others_mappings_never_fire", (long long)*counter, 0);
    nothing("others_mappings_never_fire.read", fd);
    discard(o.a + PAGE, 1);
    is("others_region_is_here", (long long)*counter, 1);
    is("readable", readable(fd), 1);
    step(socket, 'e');
    nothing("event_was_taken_away", fd);
    is("not_readable", readable(fd), 0);
    step(socket, 'n');
    discard(o.a, 1);
    step(socket, 'f');
    step(socket, 'p');
    READS("last_left_by_the_other", fd, 256, LAST(2));
    step(socket, 'n');
    step(socket, 'b');
    discard(o.a + PAGE, 1);
    step(socket, 'u');
    READS("unregistered_by_the_other", fd, 256, LAST(3));
    discard(o.a, 2);
    is("not_watched_any_more", (long long)*counter, 3);
    is("cookie_is_free", reg(fd, o.cookie, o.a, o.a + PAGE), 0);
}

TEST(call_scm_rights_to_a_child)
{
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        give_up("socketpair");
    /* Forked before the device was opened: only the message gives it the descriptor. */
    pid_t child = fork();
    if (child == 0) {
        close(sockets[0]);
        holder(sockets[1], receive_fd(sockets[1], RECVMSG, 0));
        child_end();
    }
    close(sockets[1]);
    int fd = device();
    send_fds(sockets[0], &fd, 1);
    owner(sockets[0], fd);
    close(sockets[0]);
    ended_well("child_ends", child);
}

HELPER(holder_program)
{
    /* holder_program NAME: connects to the abstract address NAME. */
    if (argc != 2)
        return 2;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path + 1, argv[1], sizeof address.sun_path - 2);
    int socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(socket_, (void *)&address, (socklen_t)(sizeof(sa_family_t) + 1 + strlen(argv[1]))) != 0)
        give_up("connect");
    holder(socket_, receive_fd(socket_, RECVMMSG, MSG_CMSG_CLOEXEC));
    return 0;
}

TEST(call_scm_rights_to_another_program)
{
    char name[64];
    snprintf(name, sizeof name, "suite-%d", getpid());
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path + 1, name);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (void *)&address, (socklen_t)(sizeof(sa_family_t) + 1 + strlen(name))) != 0 ||
        listen(listener, 1) != 0)
        give_up("listen");
    pid_t child = spawn_helper((char *[]){"holder_program", name, NULL});
    struct pollfd p = {.fd = listener, .events = POLLIN};
    if (poll(&p, 1, 10000) != 1)
        give_up("the other program");
    int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    int fd = device();
    send_fds(connection, &fd, 1);
    owner(connection, fd);
    close(connection);
    ended_well("program_ends", child);
}

TEST(call_fork_shares_the_context)
{
    int sockets[2], fd = device();
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        give_up("socketpair");
    pid_t child = fork();
    if (child == 0) {
        close(sockets[0]);
        holder(sockets[1], fd);
        child_end();
    }
    close(sockets[1]);
    owner(sockets[0], fd);
    close(sockets[0]);
    ended_well("child_ends", child);
}

TEST(call_fork_sleeping_child_wakes)
{
    int fd = open_device(O_RDONLY);
    struct turns turns;
    turns_init(&turns);
    pid_t child = fork();
    char *a = area(1); /* after the fork: the same addresses, but only the parent's count */
    if (child == 0) {
        wait_parent(&turns);
        tell_parent(&turns);
        READS("child_read", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
        child_end();
    }
    reg(fd, 1, a, a + PAGE);
    tell_child(&turns);
    wait_child(&turns);
    asleep("child_sleeps_in_read", child);
    discard(a, 1);
    ended_well("child_ends", child);
    /* Read before the hit's end, the region is hit again at its end; else everything was taken away. */
    fcntl(fd, F_SETFL, O_NONBLOCK);
    volatile uint64_t *counter = counter_of(fd);
    if (*counter == 1)
        nothing("taken_away", fd);
    else {
        /* A hit while the child's records are on their way to it clears the hint. */
        struct ummunotify_event e[2] = {0};
        is("hit_again_at_the_end", read(fd, e, sizeof e), sizeof e);
        struct ummunotify_event hit = HINTED(1, a, a + PAGE);
        hit.flags = e[0].flags & UMMUNOTIFY_EVENT_FLAG_HINT;
        GOT("as_hit", e, sizeof e, hit, LAST(2));
    }
}

TEST(call_fork_sleeping_child_polls)
{
    int fd = device();
    struct turns turns;
    turns_init(&turns);
    pid_t child = fork();
    char *a = area(1);
    if (child == 0) {
        wait_parent(&turns);
        tell_parent(&turns);
        struct pollfd p = {.fd = fd, .events = POLLIN};
        is("child_poll", poll(&p, 1, 10000), 1);
        READS("child_read", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
        child_end();
    }
    reg(fd, 1, a, a + PAGE);
    tell_child(&turns);
    wait_child(&turns);
    asleep("child_sleeps_in_poll", child);
    discard(a, 1);
    ended_well("child_ends", child);
}
