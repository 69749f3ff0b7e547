/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A test is one function named after the rule that it checks. It runs in a process of its own, so that a
 * crash or a hang costs that test alone, and reports one line a check:
 *
 *     ok NAME.WHAT
 *     FAIL NAME.WHAT: expected ..., got ...
 *     skip NAME.WHAT: reason
 *
 * Nothing here knows what implements the device. Tests that only make sense for an emulated device are
 * declared with TEST_EMULATED and run only after --emulated.
 */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <linux/ummunotify.h>

#define PAGE 4096ul
#define DEVICE "/dev/ummunotify"

struct test {
    const char *name;
    void (*run)(void);
    unsigned seconds; /* the time after which it counts as hung */
    bool emulated;
};

#define TEST_ENTRY(fn, limit, emu)                                                                       \
    static void fn(void);                                                                                \
    static const struct test fn##_test = {#fn, fn, limit, emu};                                          \
    static const struct test *const fn##_entry __attribute__((section("test_list"), used)) = &fn##_test; \
    static void fn(void)
#define TEST(fn) TEST_ENTRY(fn, 20, false)
#define TEST_SLOW(fn, limit) TEST_ENTRY(fn, limit, false)
#define TEST_EMULATED(fn) TEST_ENTRY(fn, 20, true)

/* A mode in which the suite runs itself anew, as another program: `suite --helper NAME ARGS`. */
struct helper {
    const char *name;
    int (*run)(int argc, char **argv);
};
#define HELPER(fn)                                                                                             \
    static int fn(int argc, char **argv);                                                                      \
    static const struct helper fn##_helper = {#fn, fn};                                                        \
    static const struct helper *const fn##_entry __attribute__((section("helper_list"), used)) = &fn##_helper; \
    static int fn(int argc, char **argv)

/* Reports a check. `expected` is printed when it failed, and what follows it is what was got. */
bool check(bool good, const char *what, const char *expected, const char *got, ...)
    __attribute__((format(printf, 4, 5)));
bool is(const char *what, long long got, long long want);
bool is_hex(const char *what, uint64_t got, uint64_t want);
bool at_least(const char *what, long long got, long long want);
/* -1 with that errno; call it with the call itself as argument, errno is read at once. */
bool fails(const char *what, long long result, int want_errno);
/* Anything but -1; errno is printed otherwise. */
bool works(const char *what, long long result);
void skip(const char *what, const char *reason, ...) __attribute__((format(printf, 2, 3)));
/* Gives the test up: what comes later makes no sense without what just failed. */
_Noreturn void give_up(const char *what);
/* A descriptor number: n, or one that --numbers keeps for the device. */
int numbered(int n);
/* Prefixes what follows, for loops over variants; NULL ends it. */
void variant(const char *prefix);
/* A process that was forked by a test takes part in its count of checks and ends by this. */
_Noreturn void child_end(void);

/* Regions and mappings. */
int open_device(int flags);                   /* gives the test up if it can't */
int device(void);                             /* O_RDONLY | O_NONBLOCK | O_CLOEXEC */
volatile uint64_t *counter_of(int fd);        /* maps the counter; gives up if it can't */
int reg(int fd, uint64_t cookie, const volatile void *start, const volatile void *end);
int reg_raw(int fd, uint64_t cookie, uint64_t start, uint64_t end);
int unreg(int fd, uint64_t cookie);
/*
 * Private anonymous memory, written to, with unmapped pages on both sides, at addresses that nothing else
 * will ever be given: a region over it, even unmapped, is hit by nothing but the test's own calls.
 */
char *area(size_t pages);
/* The address that an area of that size would get, with nothing mapped. */
char *hole(size_t pages);
void unmap(const volatile void *start, size_t pages); /* munmap that gives the test up if it fails */
void discard(const volatile void *start, size_t pages); /* MADV_DONTNEED likewise: one invalidation a VMA */

/* Reading. */
#define HINTED(cookie, from, to)                                                                        \
    {UMMUNOTIFY_EVENT_TYPE_INVAL, UMMUNOTIFY_EVENT_FLAG_HINT, (uintptr_t)(from), (uintptr_t)(to), (cookie)}
#define BARE(cookie, from, to) {UMMUNOTIFY_EVENT_TYPE_INVAL, 0, (uintptr_t)(from), (uintptr_t)(to), (cookie)}
#define LAST(counter) {UMMUNOTIFY_EVENT_TYPE_LAST, 0, 0, 0, (counter)}
/* One read of `count` bytes gives exactly these records. */
#define READS(what, fd, count, ...)                                                    \
    reads(what, fd, count, (const struct ummunotify_event[]){__VA_ARGS__},             \
          sizeof((const struct ummunotify_event[]){__VA_ARGS__}) / sizeof(struct ummunotify_event))
bool reads(const char *what, int fd, size_t count, const struct ummunotify_event *want, size_t n);
/* Bytes that some reading call returned, against these records. */
#define GOT(what, buffer, bytes, ...)                                                         \
    got_records(what, buffer, bytes, (const struct ummunotify_event[]){__VA_ARGS__},          \
                sizeof((const struct ummunotify_event[]){__VA_ARGS__}) / sizeof(struct ummunotify_event))
bool got_records(const char *what, const void *buffer, ssize_t bytes, const struct ummunotify_event *want,
                 size_t n);
bool nothing(const char *what, int fd); /* a non-blocking read answers EAGAIN */
void drain(int fd);                     /* reads until EAGAIN */
bool readable(int fd);                  /* by poll, at once */

/* Threads and processes. */
struct task {
    unsigned long thread;
    void *(*run)(void *);
    void *argument;
    volatile pid_t tid;
};
void start(struct task *task, void *(*run)(void *), void *argument);
/* True once that thread of the process sleeps in a system call; false after five seconds. */
bool asleep(const char *what, pid_t tid);
bool ends(const char *what, struct task *task);  /* the thread ends within ten seconds */
bool ended_well(const char *what, pid_t child);  /* the process exits with 0 within ten seconds */
void nap(unsigned milliseconds);
double now(void); /* seconds, monotonic */
/* A pair of pipes by which a test and its child take turns. */
struct turns {
    int to_child[2], to_parent[2];
};
void turns_init(struct turns *turns);
void tell_child(struct turns *turns);
void wait_parent(struct turns *turns); /* in the child: until tell_child */
void tell_parent(struct turns *turns);
void wait_child(struct turns *turns);
/* argv that runs helper `name` of this very program; strings must live on. */
pid_t spawn_helper(char *const arguments[]);
_Noreturn void exec_helper(char *const arguments[]);

#endif
