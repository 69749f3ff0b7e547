/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * As the test program that came with the 2010 driver: a blocking descriptor, eight bytes mapped, a features
 * word that was never set, three pages of which the middle one is unmapped.
 */
#define _GNU_SOURCE
#include "application.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

int main(void)
{
    int fd = open(DEVICE, O_RDONLY);
    if (fd < 0)
        die("open");
    volatile uint64_t *counter = mmap(NULL, sizeof *counter, PROT_READ, MAP_SHARED, fd, 0);
    if (counter == MAP_FAILED)
        die("mmap of the counter");
    expect(*counter == 0, "counter is 0 at first");
    uint32_t features;
    __asm__("" : "=m"(features)); /* whatever the stack held */
    if (ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &features) != 0)
        die("EXCHANGE_FEATURES");
    expect(features == 0, "no features");
    char *t = mmap(NULL, 3 * PAGE, PROT_READ, MAP_ANONYMOUS | MAP_PRIVATE, -1, 0);
    if (t == MAP_FAILED)
        die("mmap");
    struct ummunotify_register_ioctl r;
    r.start = (uintptr_t)t;
    r.end = (uintptr_t)t + 3 * PAGE;
    r.user_cookie = 123;
    r.flags = 0;
    if (ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &r) != 0)
        die("REGISTER_REGION");
    if (munmap(t + PAGE, PAGE) != 0)
        die("munmap");
    expect(*counter == 1, "counter is 1 after one munmap");
    struct ummunotify_event events[16];
    int invals = 0, lasts = 0;
    while (!lasts) {
        ssize_t n = read(fd, events, sizeof events);
        if (n <= 0)
            die("read");
        for (size_t i = 0; i < (size_t)n / sizeof events[0]; i++) {
            switch (events[i].type) {
            case UMMUNOTIFY_EVENT_TYPE_INVAL:
                invals++;
                expect(events[i].user_cookie_counter == 123, "the cookie");
                expect(events[i].flags & UMMUNOTIFY_EVENT_FLAG_HINT, "a hint");
                expect(events[i].hint_start == (uintptr_t)t + PAGE && events[i].hint_end == (uintptr_t)t + 2 * PAGE,
                       "the middle page");
                break;
            case UMMUNOTIFY_EVENT_TYPE_LAST:
                lasts++;
                expect(events[i].user_cookie_counter == 1, "LAST with the counter");
                break;
            default:
                expect(false, "a known type of event");
            }
        }
    }
    expect(invals == 1 && lasts == 1, "one INVAL and one LAST");
    if (ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &r.user_cookie) != 0)
        die("UNREGISTER_REGION");
    if (munmap(t, 3 * PAGE) != 0)
        die("munmap");
    expect(*counter == 1, "counter is still 1 after UNREGISTER and munmap");
    return exit_code();
}
