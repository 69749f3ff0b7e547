/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* poll, select, epoll and SIGIO. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <unistd.h>

int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t room);
int __ppoll_chk(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask, size_t room);

enum { ALL = POLLIN | POLLRDNORM | POLLPRI | POLLOUT | POLLWRNORM | POLLRDBAND | POLLRDHUP };

/* revents of a poll for everything, at once. */
static int poll_now(int fd)
{
    struct pollfd p = {.fd = fd, .events = ALL};
    return poll(&p, 1, 0) < 0 ? -1 : p.revents;
}

/* Whether select reports it for reading (1) and as exceptional (2), at once. */
static int select_now(int fd)
{
    fd_set in, except;
    FD_ZERO(&in);
    FD_ZERO(&except);
    FD_SET(fd, &in);
    FD_SET(fd, &except);
    struct timeval zero = {0, 0};
    if (select(fd + 1, &in, NULL, &except, &zero) < 0)
        return -1;
    return (FD_ISSET(fd, &in) ? 1 : 0) | (FD_ISSET(fd, &except) ? 2 : 0);
}

TEST(call_poll_iff_readable)
{
    const int in = POLLIN | POLLRDNORM;
    int fd = device();
    char *a = area(4);
    is_hex("fresh", poll_now(fd), 0);
    is_hex("fresh.select", select_now(fd), 0);
    reg(fd, 1, a, a + PAGE);
    reg(fd, 2, a + PAGE, a + 2 * PAGE);
    is_hex("registered", poll_now(fd), 0);
    discard(a + 2 * PAGE, 2);
    is_hex("no_region_hit", poll_now(fd), 0);
    discard(a, 2);
    for (int i = 0; i < 3; i++) {
        is_hex("hit", poll_now(fd), in);
        is_hex("hit.select", select_now(fd), 1);
    }
    READS("one", fd, 32, HINTED(1, a, a + PAGE));
    is_hex("one_read", poll_now(fd), in);
    READS("two", fd, 32, HINTED(2, a + PAGE, a + 2 * PAGE));
    is_hex("full_read_leaves_last", poll_now(fd), in);
    is_hex("full_read_leaves_last.select", select_now(fd), 1);
    READS("last", fd, 32, LAST(1));
    is_hex("drained", poll_now(fd), 0);
    is_hex("drained.select", select_now(fd), 0);
    discard(a, 1);
    is_hex("hit_again", poll_now(fd), in);
    unreg(fd, 1);
    is_hex("unregistered_before_it_was_read", poll_now(fd), in);
    READS("last_alone", fd, 64, LAST(2));
    is_hex("reported", poll_now(fd), 0);
}

TEST(call_poll_entry_points)
{
    int fd = device();
    char *a = area(1);
    struct timespec zero = {0, 0}, short_while = {0, 20000000};
    for (int hit = 0; hit <= 1; hit++) {
        variant(hit ? "hit" : "fresh");
        int want = hit ? POLLIN : 0;
        struct pollfd p = {.fd = fd, .events = POLLIN};
        is("poll", poll(&p, 1, 0), hit);
        is("poll.revents", p.revents, want);
        is("poll_20_ms", poll(&p, 1, 20), hit);
        p.revents = 77;
        is("ppoll", ppoll(&p, 1, &zero, NULL), hit);
        is("ppoll.revents", p.revents, want);
        is("poll_chk", __poll_chk(&p, 1, 0, sizeof p), hit);
        is("ppoll_chk", __ppoll_chk(&p, 1, &short_while, NULL, sizeof p), hit);
        is("syscall_poll", syscall(SYS_poll, &p, 1, 0), hit);
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        is("pselect", pselect(fd + 1, &set, NULL, NULL, &zero, NULL), hit);
        is("pselect.set", !!FD_ISSET(fd, &set), hit);
        FD_ZERO(&set);
        FD_SET(fd, &set);
        struct timeval tenth = {0, 100000};
        is("select", select(fd + 1, &set, NULL, NULL, &tenth), hit);
        /* Asked for nothing, nothing is reported: never POLLERR, never POLLHUP. */
        p.events = 0;
        is("poll_for_nothing", poll(&p, 1, 0), 0);
        p.events = POLLOUT | POLLWRNORM;
        is("poll_for_writing", poll(&p, 1, 0), 0);
        p.events = POLLRDNORM;
        is("poll_for_rdnorm", poll(&p, 1, 0), hit);
        if (!hit) {
            reg(fd, 1, a, a + PAGE);
            discard(a, 1);
        }
    }
    variant(NULL);
}

TEST(call_poll_several_descriptors)
{
    int one = device(), two = device(), pipes[2];
    if (pipe(pipes) != 0)
        give_up("pipe");
    char *a = area(2);
    reg(one, 1, a, a + PAGE);
    reg(two, 2, a + PAGE, a + 2 * PAGE);
    struct pollfd p[4] = {{one, POLLIN, 0}, {two, POLLIN, 0}, {pipes[0], POLLIN, 0}, {-1, POLLIN, 0}};
    is("none", poll(p, 4, 0), 0);
    discard(a + PAGE, 1);
    is("two", poll(p, 4, 0), 1);
    check(!p[0].revents && p[1].revents == POLLIN && !p[2].revents, "two.revents", "0 1 0", "%d %d %d",
          p[0].revents, p[1].revents, p[2].revents);
    is("write", write(pipes[1], "x", 1), 1);
    discard(a, 1);
    is("all", poll(p, 4, 0), 3);
    READS("one.read", one, 256, HINTED(1, a, a + PAGE), LAST(1));
    is("all_but_one", poll(p, 4, 0), 2);
}

/* A thread that waits in one way; without limit but for the test's own. */
struct waiter {
    struct task task;
    int fd, epoll;
    enum { POLL, PPOLL, SELECT, PSELECT, EPOLL_WAIT, EPOLL_PWAIT, EPOLL_EDGE, WAYS } way;
    volatile bool done;
    int result, events;
};
static const char *const way_names[] = {"poll",       "ppoll",       "select",    "pselect",
                                        "epoll_wait", "epoll_pwait", "epoll_edge"};

static void *wait_once(void *waiter_)
{
    struct waiter *w = waiter_;
    struct pollfd p = {.fd = w->fd, .events = ALL};
    struct epoll_event e = {0};
    struct timespec limit = {15, 0};
    struct timeval limit_us = {15, 0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(w->fd, &set);
    switch (w->way) {
    case POLL:
        w->result = poll(&p, 1, 15000);
        w->events = p.revents;
        break;
    case PPOLL:
        w->result = ppoll(&p, 1, &limit, NULL);
        w->events = p.revents;
        break;
    case SELECT:
        w->result = select(w->fd + 1, &set, NULL, NULL, &limit_us);
        w->events = FD_ISSET(w->fd, &set) ? POLLIN | POLLRDNORM : 0;
        break;
    case PSELECT:
        w->result = pselect(w->fd + 1, &set, NULL, NULL, &limit, NULL);
        w->events = FD_ISSET(w->fd, &set) ? POLLIN | POLLRDNORM : 0;
        break;
    case EPOLL_WAIT:
    case EPOLL_EDGE:
        w->result = epoll_wait(w->epoll, &e, 1, 15000);
        w->events = (int)e.events;
        break;
    case EPOLL_PWAIT:
    case WAYS:
        w->result = epoll_pwait(w->epoll, &e, 1, 15000, NULL);
        w->events = (int)e.events;
        break;
    }
    w->done = true;
    return NULL;
}

static void start_waiter(struct waiter *w, int fd, int way)
{
    *w = (struct waiter){.fd = fd, .epoll = -1, .way = way};
    if (way >= EPOLL_WAIT) {
        struct epoll_event e = {.events = EPOLLIN | EPOLLRDNORM | EPOLLOUT | EPOLLRDHUP |
                                          (way == EPOLL_EDGE ? (uint32_t)EPOLLET : 0)};
        w->epoll = epoll_create1(EPOLL_CLOEXEC);
        if (epoll_ctl(w->epoll, EPOLL_CTL_ADD, fd, &e) != 0)
            give_up("epoll_ctl");
    }
    start(&w->task, wait_once, w);
    asleep("sleeps", w->task.tid);
}

static void woken(struct waiter *w)
{
    if (ends("wakes", &w->task)) {
        is("result", w->result, 1);
        is_hex("events", w->events, POLLIN | POLLRDNORM);
    }
}

TEST(call_poll_sleeping_waiter_wakes)
{
    for (int way = POLL; way < WAYS; way++) {
        variant(way_names[way]);
        static struct waiter w[WAYS];
        int fd = device();
        char *a = area(1), *other = area(1);
        reg(fd, 1, a, a + PAGE);
        start_waiter(&w[way], fd, way);
        discard(other, 1);
        nap(20);
        is("sleeps_on_without_a_hit", w[way].done, false);
        discard(a, 1);
        woken(&w[way]);
        READS("read", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
        close(fd);
    }
    variant(NULL);
}

TEST(call_poll_sleeping_waiter_wakes_after_a_drain)
{
    for (int way = POLL; way < WAYS; way++) {
        variant(way_names[way]);
        static struct waiter w[WAYS];
        int fd = device();
        char *a = area(1);
        reg(fd, 1, a, a + PAGE);
        /* Hits that were read away leave nothing that would wake it, nor take anything away. */
        for (int i = 0; i < 5; i++) {
            discard(a, 1);
            discard(a, 1);
            drain(fd);
        }
        start_waiter(&w[way], fd, way);
        nap(20);
        is("sleeps", w[way].done, false);
        discard(a, 1);
        woken(&w[way]);
        READS("read", fd, 256, HINTED(1, a, a + PAGE), LAST(11));
        close(fd);
    }
    variant(NULL);
}

TEST(call_poll_registered_after_the_waiter_slept)
{
    for (int way = POLL; way < WAYS; way++) {
        variant(way_names[way]);
        static struct waiter w[WAYS];
        int fd = device();
        char *a = area(1);
        start_waiter(&w[way], fd, way);
        reg(fd, 1, a, a + PAGE);
        nap(10);
        is("register_doesnt_wake", w[way].done, false);
        discard(a, 1);
        woken(&w[way]);
        close(fd);
    }
    variant(NULL);
}

TEST(call_poll_all_waiters_wake)
{
    static struct waiter w[2 * WAYS];
    int fd = device();
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    for (int i = 0; i < 2 * WAYS; i++)
        start_waiter(&w[i], fd, i % WAYS);
    discard(a, 1);
    for (int i = 0; i < 2 * WAYS; i++) {
        variant(way_names[i % WAYS]);
        woken(&w[i]);
    }
    variant(NULL);
    READS("one_event_for_all", fd, 256, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_poll_timeouts_hold)
{
    int fd = device();
    struct pollfd p = {.fd = fd, .events = POLLIN};
    double begin = clock_now();
    is("poll", poll(&p, 1, 100), 0);
    check(clock_now() - begin >= 0.095, "poll.time", "0.1 s", "%f s", clock_now() - begin);
    int epoll = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e);
    begin = clock_now();
    is("epoll", epoll_wait(epoll, &e, 1, 100), 0);
    check(clock_now() - begin >= 0.095, "epoll.time", "0.1 s", "%f s", clock_now() - begin);
}

/* One epoll_wait at once: the events, 0 for none; the data must be right. */
static unsigned epoll_now(int epoll, uint64_t data)
{
    struct epoll_event e = {.data.u64 = ~data};
    int n = epoll_wait(epoll, &e, 1, 0);
    if (n == 1 && e.data.u64 != data)
        is_hex("epoll.data", e.data.u64, data);
    return n == 1 ? e.events : 0;
}

static int epoll_on(int fd, uint32_t events, uint64_t data)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = events, .data.u64 = data};
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) != 0)
        give_up("epoll_ctl");
    return epoll;
}

TEST(call_epoll_level)
{
    int fd = device();
    char *a = area(2);
    int epoll = epoll_on(fd, EPOLLIN | EPOLLOUT | EPOLLPRI | EPOLLRDHUP, 0x123456789abcdef0);
    is_hex("fresh", epoll_now(epoll, 0x123456789abcdef0), 0);
    reg(fd, 1, a, a + PAGE);
    reg(fd, 2, a + PAGE, a + 2 * PAGE);
    discard(a, 2);
    for (int i = 0; i < 3; i++)
        is_hex("hit", epoll_now(epoll, 0x123456789abcdef0), EPOLLIN);
    READS("one", fd, 32, HINTED(1, a, a + PAGE));
    is_hex("one_left", epoll_now(epoll, 0x123456789abcdef0), EPOLLIN);
    READS("two", fd, 32, HINTED(2, a + PAGE, a + 2 * PAGE));
    is_hex("last_left", epoll_now(epoll, 0x123456789abcdef0), EPOLLIN);
    READS("last", fd, 32, LAST(1));
    is_hex("drained", epoll_now(epoll, 0x123456789abcdef0), 0);
    discard(a, 1);
    is_hex("added_when_readable", epoll_now(epoll_on(fd, EPOLLIN, 5), 5), EPOLLIN);
    int outer = epoll_on(epoll, EPOLLIN, 9);
    is_hex("nested", epoll_now(outer, 9), EPOLLIN);
    is("poll_of_the_epoll", readable(epoll), 1);
    drain(fd);
    is_hex("nested_drained", epoll_now(outer, 9), 0);
    is("epoll_ctl_del", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL), 0);
    discard(a, 1);
    is_hex("deleted", epoll_now(epoll, 0), 0);
}

TEST(call_epoll_edge)
{
    int fd = device();
    char *a = area(2);
    int epoll = epoll_on(fd, EPOLLIN | EPOLLET, 3);
    reg(fd, 1, a, a + PAGE);
    reg(fd, 2, a + PAGE, a + 2 * PAGE);
    is_hex("fresh", epoll_now(epoll, 3), 0);
    discard(a, 1);
    is_hex("hit", epoll_now(epoll, 3), EPOLLIN);
    is_hex("no_edge_without_a_hit", epoll_now(epoll, 3), 0);
    discard(a + PAGE, 1);
    is_hex("hit_of_another_region_unread", epoll_now(epoll, 3), EPOLLIN);
    discard(a, 2);
    is_hex("hit_of_queued_regions", epoll_now(epoll, 3), EPOLLIN);
    is_hex("no_edge_without_a_hit_2", epoll_now(epoll, 3), 0);
    READS("read", fd, 256, BARE(1, a, a + PAGE), BARE(2, a + PAGE, a + 2 * PAGE), LAST(3));
    is_hex("drained", epoll_now(epoll, 3), 0);
    discard(a, 1);
    is_hex("hit_after_the_drain", epoll_now(epoll, 3), EPOLLIN);
    /* Read away before it was waited for: the edge is gone with it. */
    discard(a, 1);
    drain(fd);
    is_hex("read_away", epoll_now(epoll, 3), 0);
    for (uint64_t i = 0; i < 200; i++) {
        discard(a, 1);
        if (epoll_now(epoll, 3) != EPOLLIN) {
            is("hits_with_an_edge", (long long)i, 200);
            break;
        }
    }
}

TEST(call_epoll_edge_added_when_readable)
{
    int fd = device();
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    int epoll = epoll_on(fd, EPOLLIN | EPOLLET, 3);
    is_hex("at_once", epoll_now(epoll, 3), EPOLLIN);
    is_hex("once", epoll_now(epoll, 3), 0);
    discard(a, 1);
    is_hex("next_hit", epoll_now(epoll, 3), EPOLLIN);
}

TEST(call_epoll_oneshot)
{
    int fd = device();
    char *a = area(1);
    int epoll = epoll_on(fd, EPOLLIN | EPOLLONESHOT, 3);
    reg(fd, 1, a, a + PAGE);
    discard(a, 1);
    is_hex("hit", epoll_now(epoll, 3), EPOLLIN);
    discard(a, 1);
    is_hex("disabled", epoll_now(epoll, 3), 0);
    struct epoll_event e = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 4};
    is("epoll_ctl_mod", epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &e), 0);
    is_hex("armed_again", epoll_now(epoll, 4), EPOLLIN);
}

static int signal_of(int number, siginfo_t *info, unsigned milliseconds)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    struct timespec limit = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    int n;
    while ((n = sigtimedwait(&set, info, &limit)) < 0 && errno == EINTR)
        ;
    return n;
}

static void block(int number)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

TEST(call_sigio)
{
    int fd = device();
    char *a = area(1), *other = area(1);
    reg(fd, 1, a, a + PAGE);
    block(SIGIO);
    is("f_setown", fcntl(fd, F_SETOWN, getpid()), 0);
    is("f_getown", fcntl(fd, F_GETOWN), getpid());
    is("o_async", fcntl(fd, F_SETFL, O_NONBLOCK | O_ASYNC), 0);
    siginfo_t info;
    fails("none_by_itself", signal_of(SIGIO, &info, 20), EAGAIN);
    discard(other, 1);
    fails("none_without_a_hit", signal_of(SIGIO, &info, 20), EAGAIN);
    discard(a, 1);
    is("hit", signal_of(SIGIO, &info, 2000), SIGIO);
    fails("one_for_one_hit", signal_of(SIGIO, &info, 20), EAGAIN);
    discard(a, 1);
    is("hit_of_a_queued_region", signal_of(SIGIO, &info, 2000), SIGIO);
    READS("read", fd, 256, BARE(1, a, a + PAGE), LAST(2));
    fails("none_for_reading", signal_of(SIGIO, &info, 20), EAGAIN);
    discard(a, 1);
    is("hit_after_reading", signal_of(SIGIO, &info, 2000), SIGIO);
    is("o_async_off", fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    discard(a, 1);
    fails("none_when_off", signal_of(SIGIO, &info, 20), EAGAIN);
    is("fioasync", ioctl(fd, FIOASYNC, &(int){1}), 0);
    discard(a, 1);
    is("fioasync.hit", signal_of(SIGIO, &info, 2000), SIGIO);
    READS("read_all", fd, 256, BARE(1, a, a + PAGE), LAST(5));
}

TEST(call_sigio_chosen_signal_for_every_hit)
{
    int fd = device(), number = SIGRTMIN + 3;
    char *a = area(3);
    for (uint64_t i = 0; i < 3; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    block(number);
    struct f_owner_ex owner = {F_OWNER_TID, (pid_t)syscall(SYS_gettid)};
    is("f_setown_ex", fcntl(fd, F_SETOWN_EX, &owner), 0);
    is("f_setsig", fcntl(fd, F_SETSIG, number), 0);
    is("o_async", fcntl(fd, F_SETFL, O_NONBLOCK | O_ASYNC), 0);
    siginfo_t info;
    fails("none_by_itself", signal_of(number, &info, 20), EAGAIN);
    /* Real-time signals queue: one for each invalidation, however many regions it hits. */
    for (int i = 0; i < 20; i++)
        discard(a, 1 + (size_t)(i % 3));
    for (int i = 0; i < 20; i++) {
        if (!is("signal", signal_of(number, &info, 2000), number))
            break;
        is("code", info.si_code, POLL_IN);
        is("fd", info.si_fd, fd);
        is_hex("band", (uint64_t)info.si_band, POLLIN | POLLRDNORM);
    }
    fails("no_more_than_hits", signal_of(number, &info, 50), EAGAIN);
    is("f_getsig", fcntl(fd, F_GETSIG), number);
}

static volatile sig_atomic_t handled;
static int handler_fd;
static char *handler_area;

static void on_sigio(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    struct ummunotify_event e[4];
    ssize_t n = read(handler_fd, e, sizeof e);
    handled += n == 64 && e[0].hint_start == (uintptr_t)handler_area;
}

TEST(call_sigio_handler_may_read)
{
    handler_fd = device();
    handler_area = area(1);
    reg(handler_fd, 1, handler_area, handler_area + PAGE);
    struct sigaction action = {.sa_sigaction = on_sigio, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGIO, &action, NULL);
    fcntl(handler_fd, F_SETOWN, getpid());
    fcntl(handler_fd, F_SETFL, O_NONBLOCK | O_ASYNC);
    for (int i = 1; i <= 50; i++) {
        discard(handler_area, 1);
        for (int t = 0; t < 2000 && handled < i; t++)
            nap(1);
        if (handled != i)
            break;
    }
    is("events_read_in_the_handler", handled, 50);
}
