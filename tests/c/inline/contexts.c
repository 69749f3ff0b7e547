/*
 * Contexts come and go: more of them than the fast path looks at, closed ones whose counter is still mapped, copies
 * that nobody told the library of, a forked child's own. No munmap of a region fails to move each counter.
 *
 *   contexts
 */
#define _GNU_SOURCE
#include "inline.h"
#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define MOST 11

static int failures;

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			printf("line %d: not (%s)\n", __LINE__, #condition); \
			failures++; \
		} \
	} while (0)

struct context {
	int device;
	volatile uint64_t *counter;
};

static struct context contexts[MOST];

static void add(int n)
{
	contexts[n].device = open_device(&contexts[n].counter);
}

/* Other threads open and close contexts: who can't tell which of them were there all the time says it twice. */
static int others;

/* A page that all the first `n` contexts watch is unmapped: each counter moves by exactly one. */
static void hit_all(int n)
{
	char *p = pages_at(NULL, 1);
	uint64_t was[MOST];

	for (int i = 0; i < n; i++) {
		register_pages(contexts[i].device, p, 1, 1);
		was[i] = *contexts[i].counter;
	}
	munmap(p, PAGE);
	for (int i = 0; i < n; i++) {
		uint64_t moved = *contexts[i].counter - was[i];

		if (moved != 1 && !(others && moved == 2)) {
			printf("context %d of %d: %lu instead of 1\n", i, n, (unsigned long)moved);
			failures++;
		}
		unregister_pages(contexts[i].device, 1);
	}
}

/* By an instruction that the library can't see. */
static void close_quietly(int fd)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "0"(SYS_close), "D"((long)fd) : "rcx", "r11", "memory");
}

static int dup_quietly(int fd)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "0"(SYS_dup), "D"((long)fd) : "rcx", "r11", "memory");
	return (int)result;
}

static void *open_another(void *unused)
{
	(void)unused;
	for (int i = 0; i < 20; i++) {
		volatile uint64_t *counter;
		int device = open_device(&counter);

		usleep(500);
		munmap((void *)counter, PAGE);
		close(device);
	}
	return NULL;
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int n = 0; n < MOST; n++) {
		add(n);
		hit_all(n + 1);
	}
	/* Down to one; their counters stay mapped for a while. */
	for (int n = MOST - 1; n > 0; n--) {
		close(contexts[n].device);
		hit_all(n);
		hit_all(n);
		munmap((void *)contexts[n].counter, PAGE);
		hit_all(n);
	}

	/* A closed context goes on counting as long as its counter is mapped. */
	add(1);
	char *p = pages_at(NULL, 2);

	register_pages(contexts[1].device, p, 2, 1);
	register_pages(contexts[0].device, p, 2, 2);
	close(contexts[1].device);
	usleep(20000);
	uint64_t was = *contexts[1].counter, other = *contexts[0].counter;

	munmap(p, PAGE);
	CHECK(*contexts[1].counter == was + 1 && *contexts[0].counter == other + 1);
	munmap((void *)contexts[1].counter, PAGE);
	munmap(p + PAGE, PAGE);
	CHECK(*contexts[0].counter == other + 2);
	unregister_pages(contexts[0].device, 2);

	/* A copy that the library wasn't told of, of a descriptor that it saw closed. */
	add(1);
	int copy = dup_quietly(contexts[1].device);

	p = pages_at(NULL, 1);
	register_pages(contexts[1].device, p, 1, 1);
	was = *contexts[1].counter;
	close(contexts[1].device);
	munmap(p, PAGE);
	CHECK(*contexts[1].counter == was + 1);
	contexts[1].device = copy;
	unregister_pages(copy, 1);
	hit_all(2);
	close_quietly(copy);
	munmap((void *)contexts[1].counter, PAGE);
	hit_all(1);

	/* Another thread opens and closes meanwhile. */
	pthread_t thread;

	others = 1;
	must(pthread_create(&thread, NULL, open_another, NULL) == 0, "pthread_create");
	for (int i = 0; i < 300; i++)
		hit_all(1);
	pthread_join(thread, NULL);
	others = 0;
	hit_all(1);

	/* A forked child: what it unmaps is nobody's business but that of its own context. */
	p = pages_at(NULL, 1);
	register_pages(contexts[0].device, p, 1, 3);
	pid_t child = fork();

	if (child == 0) {
		was = *contexts[0].counter;
		munmap(p, PAGE);
		CHECK(*contexts[0].counter == was);
		add(0);
		for (int i = 0; i < 20; i++)
			hit_all(1);
		printf("child: %d failures\n", failures);
		_exit(failures != 0);
	}
	int status;

	must(waitpid(child, &status, 0) == child, "waitpid");
	CHECK(status == 0);
	was = *contexts[0].counter;
	munmap(p, PAGE);
	CHECK(*contexts[0].counter == was + 1);
	unregister_pages(contexts[0].device, 3);
	hit_all(1);
	printf("%s, %d failures\n", patched((void *)munmap).stub ? "patched" : "not patched", failures);
	return failures != 0;
}
