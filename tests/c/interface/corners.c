/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The rules of the other files in awkward places: signal handlers, cancelled threads, small stacks, forks beside
 * calls, numbers that change hands while a call sleeps, descriptors that no call of ours brought.
 */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* The context works, whatever was done to it. */
static void works_on(int fd)
{
    char *a = area(1);
    uint64_t cookie = (uintptr_t)a, before = *counter_of(fd);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    is("works.register", reg(fd, cookie, a, a + PAGE), 0);
    discard(a, 1);
    is("works.readable", readable(fd), 1);
    READS("works.read", fd, 256, HINTED(cookie, a, a + PAGE), LAST(before + 1));
    nothing("works.drained", fd);
    is("works.unregister", unreg(fd, cookie), 0);
}

/* A blocking read into a buffer of its own. */
struct sleeper {
    int fd;
    ssize_t result;
    char buffer[256];
};

static void *sleep_in_read(void *sleeper_)
{
    struct sleeper *s = sleeper_;
    s->result = read(s->fd, s->buffer, sizeof s->buffer);
    return NULL;
}

TEST(call_close_number_used_again_while_a_thread_sleeps_in_read)
{
    static struct sleeper s;
    int pipes[2];
    if (pipe2(pipes, O_NONBLOCK) != 0)
        give_up("pipe2");
    s.fd = open_device(O_RDONLY);
    char *a = area(1);
    reg(s.fd, 1, a, a + PAGE);
    struct task task;
    start(&task, sleep_in_read, &s);
    asleep("sleeps", task.tid);
    is("write", write(pipes[1], "hello", 5), 5);
    is("dup2", dup2(pipes[0], s.fd), s.fd);
    discard(a, 1);
    ends("wakes", &task);
    char five[8];
    is("the_other_file_lost_nothing", read(pipes[0], five, sizeof five), 5);
}

TEST(call_read_cancelled_thread)
{
    static struct sleeper s;
    s.fd = open_device(O_RDONLY);
    struct task task;
    for (int i = 0; i < 3; i++) {
        start(&task, sleep_in_read, &s);
        asleep("sleeps", task.tid);
        is("cancel", pthread_cancel((pthread_t)task.thread), 0);
        ends("ends", &task);
    }
    works_on(s.fd);
}

static sigjmp_buf out;

static void jump_out(int number)
{
    siglongjmp(out, number);
}

TEST(call_read_left_by_siglongjmp)
{
    int fd = open_device(O_RDONLY);
    struct sigaction action = {.sa_handler = jump_out, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    for (volatile int i = 0; i < 5; i++) {
        if (sigsetjmp(out, 1) == 0) {
            struct itimerval soon = {.it_value = {0, 20000}};
            setitimer(ITIMER_REAL, &soon, NULL);
            struct ummunotify_event e[4];
            ssize_t n = read(fd, e, sizeof e);
            is("read_returned", n, -2); /* it never does */
        }
    }
    works_on(fd);
}

static int handler_fd;
static char *handler_area;
static volatile sig_atomic_t handler_runs, handler_faults;

/* Everything here may be called in a handler. */
static void call_in_handler(int number)
{
    (void)number;
    int error = errno;
    struct ummunotify_event e[4];
    uint64_t cookie = 999;
    handler_faults += reg(handler_fd, cookie, handler_area, handler_area + PAGE) != 0;
    handler_faults += madvise(handler_area, PAGE, MADV_DONTNEED) != 0;
    handler_faults += read(handler_fd, e, sizeof e) < 32;
    handler_faults += unreg(handler_fd, cookie) != 0;
    handler_runs++;
    errno = error;
}

TEST_SLOW(order_calls_in_signal_handlers, 60)
{
    handler_fd = device();
    handler_area = area(1);
    char *a = area(1);
    struct sigaction action = {.sa_handler = call_in_handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 1500}, {0, 1500}};
    setitimer(ITIMER_REAL, &often, NULL);
    long failed = 0, rounds = 0;
    for (double end = now() + 1; rounds < 10 || handler_runs < 10 || now() < end; rounds++) {
        struct ummunotify_event e[4];
        failed += reg(handler_fd, 1, a, a + PAGE) != 0;
        failed += madvise(a, PAGE, MADV_DONTNEED) != 0;
        ssize_t n = read(handler_fd, e, sizeof e); /* unless the handler read it away */
        failed += n < 0 && errno != EAGAIN;
        failed += unreg(handler_fd, 1) != 0;
    }
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
    is("calls_that_failed", failed, 0);
    is("calls_that_failed_in_the_handler", handler_faults, 0);
    at_least("rounds", rounds, 10);
    at_least("handler_ran", handler_runs, 10);
    drain(handler_fd);
    works_on(handler_fd);
}

struct registrar {
    int fd;
    char *a;
    volatile bool stop;
    long failed, rounds;
};

static void *register_all_the_time(void *registrar_)
{
    struct registrar *r = registrar_;
    for (; !r->stop; r->rounds++) {
        r->failed += reg(r->fd, 1, r->a, r->a + PAGE) != 0;
        r->failed += unreg(r->fd, 1) != 0;
    }
    return NULL;
}

TEST_SLOW(proc_fork_beside_calls, 60)
{
    static struct registrar r[2];
    struct task tasks[2];
    char *a = area(2);
    int fd = device(), other = device();
    for (int i = 0; i < 2; i++) {
        r[i] = (struct registrar){.fd = i ? other : fd, .a = a + (size_t)i * PAGE};
        start(&tasks[i], register_all_the_time, &r[i]);
    }
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            /* Whatever the threads held at that moment, the child must not wait for it. */
            if (reg(fd, 1000, a, a + 1) != 0 || unreg(fd, 1000) != 0 || reg(other, 1000, a, a + 1) != 0 ||
                unreg(other, 1000) != 0)
                _exit(1);
            drain(fd);
            _exit(close(fd));
        }
        if (!ended_well("child", child))
            break;
    }
    for (int i = 0; i < 2; i++) {
        r[i].stop = true;
        ends("thread", &tasks[i]);
        is("calls_that_failed", r[i].failed, 0);
        at_least("rounds", r[i].rounds, 10);
    }
}

static void *all_on_a_small_stack(void *fd_)
{
    int fd = *(int *)fd_;
    struct ummunotify_event e[4];
    char *a = area(1);
    uint64_t cookie = (uintptr_t)a;
    bool good = reg(fd, cookie, a, a + PAGE) == 0 && madvise(a, PAGE, MADV_DONTNEED) == 0 &&
                read(fd, e, sizeof e) > 0 && unreg(fd, cookie) == 0 &&
                mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED;
    int own = open(DEVICE, O_RDONLY);
    good = good && own >= 0 && close(own) == 0;
    return good ? fd_ : NULL;
}

static void *calls_of_a_child_on_a_small_stack(void *fd_)
{
    int fd = *(int *)fd_;
    struct ummunotify_event e[4];
    bool good = reg(fd, 77, (void *)1, (void *)2) == 0 && unreg(fd, 77) == 0 && read(fd, e, sizeof e) < 0 &&
                mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED;
    return good ? fd_ : NULL;
}

static void on_small_stack(const char *what, void *(*run)(void *), int *fd)
{
    pthread_attr_t attributes;
    pthread_t thread;
    void *result = NULL;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t)PTHREAD_STACK_MIN + PTHREAD_STACK_MIN / 2);
    errno = pthread_create(&thread, &attributes, run, fd);
    if (errno)
        give_up("pthread_create");
    pthread_join(thread, &result);
    check(result == fd, what, "every call to succeed", "a failure");
}

TEST(proc_thread_with_a_small_stack)
{
    int fd = device();
    on_small_stack("owner", all_on_a_small_stack, &fd);
    pid_t child = fork();
    if (child == 0) {
        on_small_stack("child", calls_of_a_child_on_a_small_stack, &fd);
        child_end();
    }
    ended_well("child_ends", child);
}

/* All threads make the first open of the process at the same moment. */
struct opener {
    struct task task;
    pthread_barrier_t *barrier;
    int fd;
};

static void *open_together(void *opener_)
{
    struct opener *o = opener_;
    pthread_barrier_wait(o->barrier);
    o->fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
    return NULL;
}

TEST(call_open_first_by_several_threads_at_once)
{
    enum { N = 8 };
    static struct opener openers[N];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, N);
    for (int i = 0; i < N; i++) {
        openers[i].barrier = &barrier;
        start(&openers[i].task, open_together, &openers[i]);
    }
    for (int i = 0; i < N; i++)
        ends("opened", &openers[i].task);
    for (int i = 0; i < N; i++)
        if (works("open", openers[i].fd))
            works_on(openers[i].fd);
}

struct busy {
    struct task task;
    char *a;
    volatile uint64_t *volatile counter; /* set once the page is registered */
    volatile bool stop;
    long before, after, unmoved;
    double slowest;
};

static void *discard_all_the_time(void *busy_)
{
    struct busy *b = busy_;
    while (!b->stop) {
        volatile uint64_t *counter = b->counter;
        uint64_t was = counter ? *counter : 0;
        double begin = now();
        madvise(b->a, PAGE, MADV_DONTNEED);
        double took = now() - begin;
        b->slowest = took > b->slowest ? took : b->slowest;
        if (counter) {
            b->unmoved += *counter == was;
            b->after++;
        } else {
            b->before++;
        }
    }
    return NULL;
}

TEST_SLOW(order_first_open_while_threads_unmap, 60)
{
    enum { N = 3 };
    static struct busy b[N];
    for (int i = 0; i < N; i++) {
        b[i].a = area(1);
        start(&b[i].task, discard_all_the_time, &b[i]);
    }
    nap(20);
    int fd = device();
    volatile uint64_t *counter = counter_of(fd);
    for (uint64_t i = 0; i < N; i++)
        reg(fd, i, b[i].a, b[i].a + PAGE);
    for (int i = 0; i < N; i++)
        b[i].counter = counter;
    for (double end = now() + 10; now() < end && (b[0].after < 50 || b[1].after < 50 || b[2].after < 50);)
        nap(5);
    long all = 0;
    for (int i = 0; i < N; i++) {
        b[i].stop = true;
        ends("thread", &b[i].task);
        is("calls_that_didnt_count", b[i].unmoved, 0);
        at_least("calls_before", b[i].before, 1);
        at_least("calls_after", b[i].after, 50);
        check(b[i].slowest < 2, "slowest_call", "no thread held up by the open", "%.1f s", b[i].slowest);
        all += b[i].after;
    }
    at_least("counter", (long long)*counter, all);
}

/* stdin_program: the device is descriptor 0, and no call of this image brought it there. */
HELPER(stdin_program)
{
    (void)argc, (void)argv;
    nothing("program.nothing_yet", 0);
    is("program.not_readable", readable(0), 0);
    is("program.register", reg(0, 5, (void *)1, (void *)2), 0);
    fails("program.register_again", reg(0, 5, (void *)1, (void *)2), EINVAL);
    fails("program.fionread", ioctl(0, FIONREAD, &(int){0}), ENOTTY);
    is("program.counter", (long long)*counter_of(0), 0);
    is("program.dup", reg(dup(0), 6, (void *)1, (void *)2), 0);
    return 0;
}

TEST(proc_spawned_program_has_it_as_standard_input)
{
    int fd = device();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 0);
    char *argv[] = {"suite", "--helper", "stdin_program", NULL};
    pid_t child;
    errno = posix_spawn(&child, "/proc/self/exe", &actions, NULL, argv, environ);
    if (errno)
        give_up("posix_spawn");
    ended_well("program", child);
    is("its_region", unreg(fd, 5), 0);
    is("its_other_region", unreg(fd, 6), 0);
    works_on(fd);
}

/* Stops and continues a process until it ends; false if it didn't end well. */
static bool ended_well_while_stopped_often(const char *what, pid_t child)
{
    int status = 0;
    for (double end = now() + 10; now() < end;) {
        kill(child, SIGSTOP);
        nap(1);
        kill(child, SIGCONT);
        if (waitpid(child, &status, WNOHANG) == child)
            return check(WIFEXITED(status) && WEXITSTATUS(status) == 0, what, "exit code 0", "status %#x",
                         (unsigned)status);
        nap(1);
    }
    return ended_well(what, child);
}

TEST_SLOW(proc_stopped_and_continued_in_the_middle_of_calls, 60)
{
    /* Nothing of this takes notice of a stop: no call that is restarted natively answers EINTR. */
    int fd = device();
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            int own = open(DEVICE, O_RDONLY | O_NONBLOCK);
            works("open", own);
            for (int k = 0; k < 20; k++) {
                if (reg(fd, 1, (void *)1, (void *)2) != 0 || unreg(fd, 1) != 0)
                    works("calls_of_another_holder", -1);
                if (reg(own, 1, (void *)1, (void *)2) != 0 || unreg(own, 1) != 0)
                    works("calls_of_the_owner", -1);
                counter_of(fd);
            }
            child_end();
        }
        if (!ended_well_while_stopped_often("child", child))
            break;
    }
}
