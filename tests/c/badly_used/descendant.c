/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * descendant HOW: opens the device, forks, and dies: by `exit`, by `kill` (SIGKILL), or after `exec` of another
 * program. Its child, under the filter that it inherited, does what an ordinary program does, opens the device
 * anew, and executes programs. Prints `descendant: well` or what went wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
    printf("descendant: %s: %s\n", what, strerrorname_np(errno));
    fflush(stdout);
    _exit(1);
}

static void *unmap_some(void *unused)
{
    for (int i = 0; i < 200; i++) {
        char *p = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p, 4096, PROT_READ) != 0 || munmap(p, 1 << 16) != 0)
            die("mapping and unmapping");
    }
    return unused;
}

static void use_device(void)
{
    char *p = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct ummunotify_register_ioctl r = {(uintptr_t)p, (uintptr_t)p + 8192, 7, 0, 0};
    struct ummunotify_event e[4];
    if (fd < 0 || ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
        die("a device of its own");
    if (munmap(p, 8192) != 0 || read(fd, e, sizeof e) != 64 || e[0].user_cookie_counter != 7)
        die("events of its own");
    close(fd);
}

static void run_program(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/sh", "sh", "-c", "true; /bin/true && exit 5", NULL);
        _exit(1);
    }
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 5)
        die("a program");
}

static void descendant(int parent_is_gone)
{
    char byte;
    if (read(parent_is_gone, &byte, 1) != 0)
        die("the parent's end");
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        if ((errno = pthread_create(&threads[i], NULL, unmap_some, NULL)) != 0)
            die("a thread");
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 100; i++)
        free(memset(malloc((size_t)i * 10000 + 1), 1, 1));
    use_device();
    run_program();
    use_device();
    printf("descendant: well\n");
    fflush(stdout);
    _exit(0);
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "";
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC) != 0)
        die("pipe2");
    int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        die("open");
    pid_t child = fork();
    if (child == 0) {
        close(pipes[1]);
        close(fd);
        descendant(pipes[0]);
    }
    struct ummunotify_register_ioctl r = {0, UINT64_MAX, 1, 0, 0};
    ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r);
    if (strcmp(how, "kill") == 0)
        raise(SIGKILL);
    if (strcmp(how, "exec") == 0)
        execl("/bin/true", "true", NULL);
    _exit(0);
}
