/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The runner and the reporting of checks. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern const struct test *const __start_test_list[], *const __stop_test_list[];
extern const struct helper *const __start_helper_list[], *const __stop_helper_list[];

/* Shared with all children of the runner, through this descriptor also with those that exec. */
struct score {
    unsigned ok, failed, skipped;
};
enum { SCORE_FD = 200 };
static struct score *score;
static const char *test_name = "?";
static const char *prefix;

enum { EXIT_GAVE_UP = 99 };

static void line(const char *kind, const char *what, const char *rest)
{
    char text[1024];
    int n = snprintf(text, sizeof text, "%s %s.%s%s%s%s\n", kind, test_name, prefix ? prefix : "",
                     prefix ? "." : "", what, rest);
    if (n >= (int)sizeof text)
        n = sizeof text - 1;
    /* One write a line: lines of several processes don't mix. */
    if (write(STDOUT_FILENO, text, (size_t)n) != n)
        _exit(98);
}

void variant(const char *p)
{
    prefix = p;
}

bool check(bool good, const char *what, const char *expected, const char *got, ...)
{
    if (good) {
        __atomic_fetch_add(&score->ok, 1, __ATOMIC_RELAXED);
        line("ok", what, "");
        return true;
    }
    char value[512], rest[800];
    va_list arguments;
    va_start(arguments, got);
    vsnprintf(value, sizeof value, got, arguments);
    va_end(arguments);
    snprintf(rest, sizeof rest, ": expected %s, got %s", expected, value);
    __atomic_fetch_add(&score->failed, 1, __ATOMIC_RELAXED);
    line("FAIL", what, rest);
    return false;
}

bool is(const char *what, long long got, long long want)
{
    char expected[32];
    snprintf(expected, sizeof expected, "%lld", want);
    return check(got == want, what, expected, "%lld", got);
}

bool is_hex(const char *what, uint64_t got, uint64_t want)
{
    char expected[32];
    snprintf(expected, sizeof expected, "%#lx", want);
    return check(got == want, what, expected, "%#lx", got);
}

bool at_least(const char *what, long long got, long long want)
{
    char expected[48];
    snprintf(expected, sizeof expected, "at least %lld", want);
    return check(got >= want, what, expected, "%lld", got);
}

static const char *error_name(int error)
{
    const char *name = strerrorname_np(error);
    return name ? name : "an unknown errno";
}

bool fails(const char *what, long long result, int want_errno)
{
    int error = errno;
    char expected[64];
    snprintf(expected, sizeof expected, "-1 %s", error_name(want_errno));
    if (result != -1)
        return check(false, what, expected, "%lld", result);
    return check(error == want_errno, what, expected, "-1 %s", error_name(error));
}

bool works(const char *what, long long result)
{
    int error = errno;
    return check(result != -1, what, "success", "-1 %s", error_name(error));
}

void skip(const char *what, const char *reason, ...)
{
    char rest[512] = ": ";
    va_list arguments;
    va_start(arguments, reason);
    vsnprintf(rest + 2, sizeof rest - 2, reason, arguments);
    va_end(arguments);
    __atomic_fetch_add(&score->skipped, 1, __ATOMIC_RELAXED);
    line("skip", what, rest);
}

void give_up(const char *what)
{
    int error = errno;
    check(false, what, "success", "%s; the rest of this test is left out", error_name(error));
    _exit(EXIT_GAVE_UP);
}

void child_end(void)
{
    _exit(0);
}

/* Runs one test in a child and says how it ended, where that wasn't by returning. */
static void run_test(const struct test *test)
{
    test_name = test->name;
    pid_t pid = fork();
    if (pid < 0) {
        perror("fork");
        exit(2);
    }
    if (pid == 0) {
        /* A group of its own, so that whatever it leaves can be ended with it. */
        setpgid(0, 0);
        setenv("TEST_NAME", test->name, 1);
        test->run();
        _exit(0);
    }
    setpgid(pid, pid);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    double end = now() + test->seconds;
    int status;
    pid_t done;
    while ((done = waitpid(pid, &status, WNOHANG)) == 0) {
        double left = end - now();
        if (left <= 0)
            break;
        struct timespec wait = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
        sigtimedwait(&child, NULL, &wait);
    }
    if (done == 0) {
        check(false, "time", "an end", "none within %u s", test->seconds);
        kill(-pid, SIGKILL);
        waitpid(pid, &status, 0);
        return;
    }
    kill(-pid, SIGKILL); /* what the test left behind, if anything */
    if (WIFSIGNALED(status))
        check(false, "end", "a normal end", "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != EXIT_GAVE_UP)
        check(false, "end", "a normal end", "exit code %d", WEXITSTATUS(status));
}

static const char *without;

static int numbers;

int numbered(int n)
{
    return numbers ? numbers + n % 60 : n;
}

static bool selected(const char *name, int n, char **prefixes)
{
    if (without && strncmp(name, without, strlen(without)) == 0)
        return false;
    for (int i = 0; i < n; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    return n == 0;
}

static bool map_score(void)
{
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, SCORE_FD, 0);
    if (page == MAP_FAILED)
        return false;
    score = page;
    return true;
}

static bool make_score(void)
{
    int fd = memfd_create("score", 0);
    return fd >= 0 && ftruncate(fd, PAGE) == 0 && dup2(fd, SCORE_FD) == SCORE_FD && close(fd) == 0 &&
           map_score();
}

static int run_helper(int argc, char **argv)
{
    if (!map_score()) {
        perror("the score");
        return 2;
    }
    test_name = getenv("TEST_NAME");
    for (const struct helper *const *h = __start_helper_list; h < __stop_helper_list; h++)
        if (argc > 0 && strcmp((*h)->name, argv[0]) == 0)
            return (*h)->run(argc, argv);
    fprintf(stderr, "no such helper\n");
    return 2;
}

static int usage(const char *program)
{
    fprintf(stderr,
            "usage: %s [OPTIONS] [NAME...]\n"
            "Runs the tests whose names begin with one of NAME, or all.\n"
            "--emulated      also those that hold for an emulated device alone\n"
            "--without NAME  but those\n"
            "--numbers N     copies of the device at numbers from N on\n"
            "--here          in this very process, one after the other, for a debugger\n"
            "--list          only print the names\n",
            program);
    return 2;
}

int main(int argc, char **argv)
{
    bool emulated = false, here = false, list = false;
    int first = 1;
    if (argc > 1 && strcmp(argv[1], "--helper") == 0)
        return run_helper(argc - 2, argv + 2);
    for (; first < argc && argv[first][0] == '-'; first++) {
        if (strcmp(argv[first], "--emulated") == 0)
            emulated = true;
        else if (strcmp(argv[first], "--here") == 0)
            here = true;
        else if (strcmp(argv[first], "--list") == 0)
            list = true;
        else if (strcmp(argv[first], "--without") == 0 && first + 1 < argc)
            without = argv[++first];
        else if (strcmp(argv[first], "--numbers") == 0 && first + 1 < argc)
            numbers = atoi(argv[++first]);
        else
            return usage(argv[0]);
    }
    if (!make_score()) {
        perror("the score");
        return 2;
    }
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    unsigned tests = 0;
    for (const struct test *const *t = __start_test_list; t < __stop_test_list; t++) {
        if (((*t)->emulated && !emulated) || !selected((*t)->name, argc - first, argv + first))
            continue;
        tests++;
        test_name = (*t)->name;
        if (list) {
            puts(test_name);
        } else if (here) {
            (*t)->run();
        } else {
            /* Blocked in the runner alone, which waits for it with sigtimedwait. */
            sigprocmask(SIG_BLOCK, &child, &before);
            run_test(*t);
            sigprocmask(SIG_SETMASK, &before, NULL);
        }
    }
    if (list)
        return 0;
    printf("total %u tests: %u ok, %u FAIL, %u skip\n", tests, score->ok, score->failed, score->skipped);
    return score->failed || !score->ok;
}
