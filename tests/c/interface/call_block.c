/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A read that sleeps: what wakes it, what a signal does to it. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* One reading call in a thread of its own. */
struct reader {
    struct task task;
    int fd;
    enum { READ, READV, PREAD, SYSCALL_READ } call;
    size_t count;
    struct ummunotify_event records[8];
    ssize_t result;
    int error;
    volatile bool done;
    /* What poll says of the descriptor afterwards. */
    int left;
};

static void *read_once(void *reader_)
{
    struct reader *r = reader_;
    struct iovec v[2] = {{r->records, 8}, {(char *)r->records + 8, r->count - 8}};
    errno = 0;
    switch (r->call) {
    case READ:
        r->result = read(r->fd, r->records, r->count);
        break;
    case READV:
        r->result = readv(r->fd, v, 2);
        break;
    case PREAD:
        r->result = pread(r->fd, r->records, r->count, 12345);
        break;
    case SYSCALL_READ:
        r->result = syscall(SYS_read, r->fd, r->records, r->count);
        break;
    }
    r->error = errno;
    r->done = true;
    return NULL;
}

static void start_reader(struct reader *r, int fd, int call)
{
    *r = (struct reader){.fd = fd, .call = call, .count = sizeof r->records};
    start(&r->task, read_once, r);
    asleep("sleeps", r->task.tid);
}

static volatile sig_atomic_t signals;

static void count_signal(int number)
{
    (void)number;
    signals++;
}

static void handle(int number, int flags)
{
    struct sigaction action = {.sa_handler = count_signal, .sa_flags = flags};
    sigaction(number, &action, NULL);
}

static void interrupt(struct reader *r, int number)
{
    signals = 0;
    pthread_kill((pthread_t)r->task.thread, number);
    for (int i = 0; i < 1000 && !signals; i++)
        nap(1);
    is("handler_ran", signals, 1);
}

TEST(call_read_sleeps_until_a_hit)
{
    static const char *const names[] = {"read", "readv", "pread", "syscall"};
    for (int call = READ; call <= SYSCALL_READ; call++) {
        variant(names[call]);
        int fd = open_device(O_RDONLY);
        char *a = area(2), *other = area(1);
        reg(fd, 1, a, a + 2 * PAGE);
        static struct reader r[4];
        start_reader(&r[call], fd, call);
        discard(other, 1);
        nap(30);
        is("sleeps_on_without_a_hit", r[call].done, false);
        discard(a, 1);
        if (ends("wakes", &r[call].task))
            GOT("records", r[call].records, r[call].result, HINTED(1, a, a + PAGE), LAST(1));
        close(fd);
    }
    variant(NULL);
}

TEST(call_read_blocking_but_readable)
{
    int fd = open_device(O_RDONLY);
    char *a = area(2);
    reg(fd, 1, a, a + PAGE);
    reg(fd, 2, a + PAGE, a + 2 * PAGE);
    discard(a, 2);
    READS("first", fd, 32, HINTED(1, a, a + PAGE));
    READS("second", fd, 32, HINTED(2, a + PAGE, a + 2 * PAGE));
    READS("last", fd, 32, LAST(1));
    discard(a, 1);
    unreg(fd, 1);
    READS("last_alone", fd, 4096, LAST(2));
    char buffer[32];
    discard(a + PAGE, 1);
    is("count_31", read(fd, buffer, 31), 0);
    fails("bad_buffer", read(fd, hole(1), 4096), EFAULT);
    READS("still_there", fd, 4096, HINTED(2, a + PAGE, a + 2 * PAGE), LAST(3));
}

TEST(call_read_sleeps_before_it_looks_at_the_size)
{
    int fd = open_device(O_RDONLY);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    static struct reader r;
    r = (struct reader){.fd = fd, .call = READ, .count = 8};
    start(&r.task, read_once, &r);
    asleep("sleeps", r.task.tid);
    is("sleeps_still", r.done, false);
    discard(a, 1);
    if (ends("wakes", &r.task))
        is("result", r.result, 0);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    READS("nothing_consumed", fd, 4096, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_read_signal_is_eintr)
{
    handle(SIGUSR1, 0);
    for (int call = READ; call <= SYSCALL_READ; call++) {
        static const char *const names[] = {"read", "readv", "pread", "syscall"};
        variant(names[call]);
        int fd = open_device(O_RDONLY);
        char *a = area(1);
        reg(fd, 1, a, a + PAGE);
        static struct reader r[4];
        start_reader(&r[call], fd, call);
        interrupt(&r[call], SIGUSR1);
        if (ends("wakes", &r[call].task)) {
            errno = r[call].error;
            fails("result", r[call].result, EINTR);
        }
        discard(a, 1);
        READS("context_as_before", fd, 4096, HINTED(1, a, a + PAGE), LAST(1));
        close(fd);
    }
    variant(NULL);
}

TEST(call_read_sa_restart_restarts)
{
    handle(SIGUSR2, SA_RESTART);
    for (int call = READ; call <= SYSCALL_READ; call++) {
        static const char *const names[] = {"read", "readv", "pread", "syscall"};
        variant(names[call]);
        int fd = open_device(O_RDONLY);
        char *a = area(1);
        reg(fd, 1, a, a + PAGE);
        static struct reader r[4];
        start_reader(&r[call], fd, call);
        interrupt(&r[call], SIGUSR2);
        asleep("sleeps_again", r[call].task.tid);
        interrupt(&r[call], SIGUSR2);
        asleep("sleeps_once_more", r[call].task.tid);
        is("not_done", r[call].done, false);
        discard(a, 1);
        if (ends("wakes", &r[call].task))
            GOT("records", r[call].records, r[call].result, HINTED(1, a, a + PAGE), LAST(1));
        close(fd);
    }
    variant(NULL);
}

TEST(call_read_ignored_signal_doesnt_wake)
{
    int fd = open_device(O_RDONLY);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    static struct reader r;
    start_reader(&r, fd, READ);
    pthread_kill((pthread_t)r.task.thread, SIGURG);
    asleep("sleeps_on", r.task.tid);
    is("not_done", r.done, false);
    discard(a, 1);
    if (ends("wakes", &r.task))
        GOT("records", r.records, r.result, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_read_sleeper_and_o_nonblock)
{
    int fd = open_device(O_RDONLY);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    static struct reader r;
    start_reader(&r, fd, READ);
    /* Tested at each call, not while one sleeps. */
    ioctl(fd, FIONBIO, &(int){1});
    nothing("others_dont_block", fd);
    asleep("it_sleeps_on", r.task.tid);
    is("not_done", r.done, false);
    discard(a, 1);
    if (ends("wakes", &r.task))
        GOT("records", r.records, r.result, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_read_several_sleepers)
{
    enum { N = 3 };
    int fd = open_device(O_RDONLY);
    char *a = area(N);
    for (uint64_t i = 0; i < N; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    static struct reader r[N];
    for (int i = 0; i < N; i++)
        start_reader(&r[i], fd, READ);
    for (int i = 0; i < N; i++) {
        discard(a + i * PAGE, 1);
        /* At least one for each hit: who reads before the hit's end is told of it once more at its end. */
        int done = 0;
        for (int t = 0; t < 5000 && done < i + 1; t++) {
            nap(1);
            done = r[0].done + r[1].done + r[2].done;
        }
        at_least("readers_that_are_done", done, i + 1);
    }
    for (int i = 0; i < N; i++) {
        ends("wakes", &r[i].task);
        is("type", r[i].records[0].type, UMMUNOTIFY_EVENT_TYPE_INVAL);
        uint64_t cookie = r[i].records[0].user_cookie_counter;
        check(cookie < N && r[i].records[0].hint_start == (uintptr_t)(a + cookie * PAGE), "record",
              "a region that was hit", "cookie %llu", (unsigned long long)cookie);
        is("last", r[i].records[r[i].result / 32 - 1].type, UMMUNOTIFY_EVENT_TYPE_LAST);
    }
}

static void *read_then_poll(void *reader_)
{
    struct reader *r = reader_;
    r->result = read(r->fd, r->records, r->count);
    struct pollfd p = {.fd = r->fd, .events = POLLIN};
    r->left = poll(&p, 1, 0);
    r->done = true;
    return NULL;
}

TEST(call_read_a_sleeper_that_leaves_something_finds_it_readable)
{
    enum { N = 3, ROUNDS = 10 };
    int fd = open_device(O_RDONLY), short_ones = 0;
    char *a = area(N);
    for (uint64_t i = 0; i < N; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    for (int i = 0; i < ROUNDS; i++) {
        /* Room for one record. */
        static struct reader r;
        r = (struct reader){.fd = fd, .count = 32};
        start(&r.task, read_then_poll, &r);
        asleep("sleeps", r.task.tid);
        discard(a, N);
        if (!ends("wakes", &r.task))
            return;
        is("type", r.records[0].type, UMMUNOTIFY_EVENT_TYPE_INVAL);
        short_ones += r.left != 1;
        fcntl(fd, F_SETFL, O_NONBLOCK);
        struct ummunotify_event events[N + 1];
        while (read(fd, events, sizeof events) > 0)
            ;
        fcntl(fd, F_SETFL, 0);
    }
    is("not_readable_after_it", short_ones, 0);
}

struct follower {
    struct task task;
    int fd, left;
    ssize_t result;
    volatile uint64_t *counter;
    struct ummunotify_event record;
};

/* Reads one record as soon as the counter moves. */
static void *follow_the_counter(void *follower_)
{
    struct follower *f = follower_;
    struct pollfd p = {.fd = f->fd, .events = POLLIN};
    for (uint64_t before = *f->counter; *f->counter == before;)
        ;
    f->result = read(f->fd, &f->record, sizeof f->record);
    f->left = poll(&p, 1, 0);
    return NULL;
}

TEST(call_read_beside_a_sleeper_that_leaves_something_finds_it_readable)
{
    enum { N = 4, ROUNDS = 30 };
    int fd = open_device(O_RDONLY), short_ones = 0;
    char *a = area(N);
    for (uint64_t i = 0; i < N; i++)
        reg(fd, i, a + i * PAGE, a + (i + 1) * PAGE);
    for (int i = 0; i < ROUNDS; i++) {
        static struct reader r;
        static struct follower f;
        r = (struct reader){.fd = fd, .count = 32};
        f = (struct follower){.fd = fd, .counter = counter_of(fd)};
        start(&r.task, read_then_poll, &r);
        asleep("sleeps", r.task.tid);
        start(&f.task, follow_the_counter, &f);
        nap(1);
        discard(a, N);
        if (!ends("wakes", &r.task) || !ends("reads", &f.task))
            return;
        is("record", f.result, 32);
        short_ones += f.left != 1;
        munmap((void *)f.counter, PAGE);
        fcntl(fd, F_SETFL, O_NONBLOCK);
        struct ummunotify_event events[N + 1];
        while (read(fd, events, sizeof events) > 0)
            ;
        fcntl(fd, F_SETFL, 0);
    }
    is("not_readable_after_it", short_ones, 0);
}

TEST(call_read_register_and_unregister_dont_wake)
{
    int fd = open_device(O_RDONLY);
    char *a = area(2);
    static struct reader r;
    start_reader(&r, fd, READ);
    is("register_meanwhile", reg(fd, 1, a, a + PAGE), 0);
    is("another", reg(fd, 2, a + PAGE, a + 2 * PAGE), 0);
    is("unregister_meanwhile", unreg(fd, 2), 0);
    discard(a + PAGE, 1);
    asleep("sleeps_on", r.task.tid);
    is("not_done", r.done, false);
    discard(a, 1);
    if (ends("wakes", &r.task))
        GOT("records", r.records, r.result, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_close_while_another_thread_sleeps_in_read)
{
    int fd = open_device(O_RDONLY);
    char *a = area(1);
    reg(fd, 1, a, a + PAGE);
    static struct reader r;
    start_reader(&r, fd, READ);
    is("close", close(fd), 0);
    fails("number_is_free", fcntl(fd, F_GETFD), EBADF);
    /* The call holds a reference of its own, so the context lives until it returns. */
    asleep("sleeps_on", r.task.tid);
    discard(a, 1);
    if (ends("wakes", &r.task))
        GOT("records", r.records, r.result, HINTED(1, a, a + PAGE), LAST(1));
}

TEST(call_read_on_other_files_sleeps_as_ever)
{
    int pipes[2];
    if (pipe(pipes) != 0)
        give_up("pipe");
    device();
    handle(SIGUSR1, 0);
    static struct reader r;
    r = (struct reader){.fd = pipes[0], .call = READ, .count = 64};
    start(&r.task, read_once, &r);
    asleep("sleeps", r.task.tid);
    is("write", write(pipes[1], "abc", 3), 3);
    if (ends("wakes", &r.task))
        is("bytes", r.result, 3);
    static struct reader again;
    again = (struct reader){.fd = pipes[0], .call = READ, .count = 64};
    start(&again.task, read_once, &again);
    asleep("sleeps_again", again.task.tid);
    interrupt(&again, SIGUSR1);
    if (ends("wakes_again", &again.task)) {
        errno = again.error;
        fails("interrupted", again.result, EINTR);
    }
}
