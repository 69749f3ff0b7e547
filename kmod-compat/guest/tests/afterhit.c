// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * The after-hit: what was registered, or left the queue, between the start and
 * the end of an invalidation is hit again at its end, and nothing else is. A
 * second module holds invalidations half-way, so that no luck is needed.
 *
 * With the module's inflight_slots=1 or 0 it must still miss nothing: what it
 * can't tell apart then becomes "everything is invalid".
 */
#include "test.h"

#include <pthread.h>
#include <semaphore.h>

#include "../pause/umn_pause.h"

static unsigned int slots;
static int pause_fd;

/* Opened in this order, the device hears of an invalidation before it stops. */
static int open_with_pause(void)
{
	pause_fd = open("/dev/umn_pause", O_RDWR | O_CLOEXEC);
	CHECK(pause_fd >= 0);
	return open_device();
}

struct work {
	char *start;
	size_t count;
	bool unmap;
	sem_t go;
	pthread_t thread;
};

static void *work(void *argument)
{
	struct work *job = argument;

	while (sem_wait(&job->go) != 0)
		;
	if (job->unmap)
		unmap(job->start, job->count);
	else
		discard(job->start, job->count);
	return NULL;
}

/*
 * Half-way through an invalidation a lock of the address space is held, so that
 * no thread can be made then (its stack is mapped): they are made beforehand.
 */
static void prepare(struct work *job, bool unmaps)
{
	job->unmap = unmaps;
	CHECK(sem_init(&job->go, 0, 0) == 0);
	CHECK(pthread_create(&job->thread, NULL, work, job) == 0);
}

/* Returns when the invalidation is half-way, as the so-many-th. */
static void begin(struct work *job, char *start, size_t count, unsigned int stopped)
{
	struct umn_pause_range range = { (uintptr_t)start, (uintptr_t)start + count * PAGE };

	job->start = start;
	job->count = count;
	CHECK(ioctl(pause_fd, UMN_PAUSE_ARM, &range) == 0);
	CHECK(sem_post(&job->go) == 0);
	CHECK(ioctl(pause_fd, UMN_PAUSE_AWAIT, &stopped) == 0);
}

static void release(void)
{
	CHECK(ioctl(pause_fd, UMN_PAUSE_RELEASE) == 0);
}

static void finish(struct work *job)
{
	release();
	CHECK(pthread_join(job->thread, NULL) == 0);
}

/* What one context counted as overflows of its slots. */
static unsigned long long fdinfo(int fd, const char *key)
{
	char name[64], text[512], *found;
	ssize_t got;
	int info;

	snprintf(name, sizeof(name), "/proc/self/fdinfo/%d", fd);
	info = open(name, O_RDONLY);
	CHECK(info >= 0);
	got = read(info, text, sizeof(text) - 1);
	CHECK(got > 0);
	text[got] = 0;
	close(info);
	found = strstr(text, key);
	CHECK(found);
	return strtoull(found + strlen(key) + 1, NULL, 10);
}

static void need_slots(void)
{
	if (slots < 2)
		skip("exact only with slots for the invalidations under way");
}

static void a_region_read_in_between_is_hit_again(void)
{
	int fd = open_with_pause();
	char *area = pages(4);
	struct work job;

	need_slots();
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 3 * PAGE, 1) == 0);
	prepare(&job, false);
	begin(&job, area + PAGE, 1, 1);
	EXPECT_READ(fd, 8, HIT(1, area + PAGE, area + 2 * PAGE), COUNTER(1));
	CHECK(!readable(fd));
	finish(&job);
	/* An invalidation of its own: same range, one up, with a hint. */
	EXPECT_READ(fd, 8, HIT(1, area + PAGE, area + 2 * PAGE), COUNTER(2));
	CHECK(!readable(fd));
}

static void a_region_registered_in_between_is_hit(void)
{
	int fd = open_with_pause();
	char *area = pages(4);
	struct work job;

	need_slots();
	prepare(&job, false);
	begin(&job, area, 2, 1);
	CHECK(register_range(fd, (uintptr_t)area + PAGE, (uintptr_t)area + 4 * PAGE, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)area + 2 * PAGE, (uintptr_t)area + 4 * PAGE, 2) == 0);
	CHECK(!readable(fd));
	finish(&job);
	EXPECT_READ(fd, 8, HIT(1, area + PAGE, area + 2 * PAGE), COUNTER(1));
}

static void a_region_registered_anew_under_its_cookie_is_hit(void)
{
	int fd = open_with_pause();
	char *area = pages(4);
	struct work job;

	need_slots();
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	prepare(&job, false);
	begin(&job, area, 1, 1);
	EXPECT_READ(fd, 1, HIT(1, area, area + PAGE));
	CHECK(unregister(fd, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	finish(&job);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(2));
}

static void a_region_still_queued_is_not_hit_again(void)
{
	int fd = open_with_pause();
	char *area = pages(4);
	struct work job;

	need_slots();
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)area + PAGE, (uintptr_t)area + 2 * PAGE, 2) == 0);
	prepare(&job, false);
	begin(&job, area, 2, 1);
	/* One of the two leaves the queue, one stays: only the first is hit again. */
	EXPECT_READ(fd, 1, HIT(1, area, area + PAGE));
	finish(&job);
	EXPECT_READ(fd, 8, HIT(2, area + PAGE, area + 2 * PAGE), HIT(1, area, area + PAGE),
		    COUNTER(2));
}

static void without_a_race_there_is_no_extra_event(void)
{
	int fd = open_with_pause();
	volatile uint64_t *counter = map_counter(fd);
	char *area = pages(4);
	struct work job;

	need_slots();
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	prepare(&job, false);
	begin(&job, area, 1, 1);
	finish(&job);
	CHECK_EQ(*counter, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(1));
	/* Registered and read before it began, or elsewhere. */
	prepare(&job, false);
	begin(&job, area + PAGE, 1, 1);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 2) == 0);
	discard(area, 1);
	EXPECT_READ(fd, 8, HIT(2, area, area + PAGE), HIT(1, area, area + PAGE), COUNTER(2));
	finish(&job);
	CHECK_EQ(*counter, 2);
	CHECK(!readable(fd));
	/* Gone in between. */
	prepare(&job, false);
	begin(&job, area, 1, 1);
	EXPECT_READ(fd, 8, HIT(2, area, area + PAGE), HIT(1, area, area + PAGE), COUNTER(3));
	CHECK(unregister(fd, 1) == 0 && unregister(fd, 2) == 0);
	finish(&job);
	CHECK_EQ(*counter, 3);
}

static void an_after_hit_on_a_queued_region_clears_its_hint(void)
{
	int fd = open_with_pause();
	char *area = pages(4);
	struct work job;

	need_slots();
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 2 * PAGE, 1) == 0);
	prepare(&job, false);
	begin(&job, area, 1, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(1));
	/* Another invalidation, of a page that isn't held up, queues it again. */
	discard(area + PAGE, 1);
	finish(&job);
	EXPECT_READ(fd, 8, HIT_PLAIN(1, area, area + 2 * PAGE), COUNTER(3));
}

static void invalidations_end_in_any_order(void)
{
	int fd = open_with_pause(), second_pause = -1, first_pause;
	char *area = pages(4);
	struct work one, two;

	need_slots();
	first_pause = pause_fd;
	pause_fd = second_pause = open("/dev/umn_pause", O_RDWR | O_CLOEXEC);
	CHECK(second_pause >= 0);
	/* The newest is called first, and that has to be the device. */
	close(fd);
	fd = open_device();
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)area + PAGE, (uintptr_t)area + 2 * PAGE, 2) == 0);
	prepare(&one, false);
	prepare(&two, false);
	pause_fd = first_pause;
	begin(&one, area, 1, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(1));
	pause_fd = second_pause;
	begin(&two, area + PAGE, 1, 1);
	pause_fd = first_pause;
	finish(&one);
	EXPECT_READ(fd, 8, HIT(2, area + PAGE, area + 2 * PAGE), HIT(1, area, area + PAGE),
		    COUNTER(3));
	pause_fd = second_pause;
	finish(&two);
	EXPECT_READ(fd, 8, HIT(2, area + PAGE, area + 2 * PAGE), COUNTER(4));
}

static void a_munmap_is_hit_again_too(void)
{
	int fd = open_with_pause();
	struct ummunotify_event events[4];
	char *area = pages(4);
	struct work job;

	need_slots();
	/* munmap keeps every page fault waiting: what is needed meanwhile has to be there. */
	CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 4 * PAGE, 1) == 0);
	memset(events, 0, sizeof(events));
	prepare(&job, true);
	begin(&job, area, 4, 1);
	CHECK_EQ(read(fd, events, sizeof(events)), 64);
	CHECK_EQ(events[1].user_cookie_counter, 1);
	finish(&job);
	EXPECT_READ(fd, 8, HIT(1, area, area + 4 * PAGE), COUNTER(2));
}

static sem_t may_close;

static void *close_when_told(void *fd)
{
	while (sem_wait(&may_close) != 0)
		;
	CHECK(close(*(int *)fd) == 0);
	return NULL;
}

static void closing_in_between_waits_and_is_harmless(void)
{
	int fd = open_with_pause(), other = open_device();
	volatile uint64_t *counter = map_counter(other);
	char *area = pages(4);
	pthread_t closer;
	struct work job;

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(other, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(sem_init(&may_close, 0, 0) == 0);
	prepare(&job, false);
	CHECK(pthread_create(&closer, NULL, close_when_told, &fd) == 0);
	begin(&job, area, 1, 1);
	EXPECT_READ(other, 8, HIT(1, area, area + PAGE), COUNTER(1));
	CHECK(sem_post(&may_close) == 0);
	usleep(50000);
	finish(&job);
	CHECK(pthread_join(closer, NULL) == 0);
	CHECK_EQ(*counter, 2);
	discard(area, 1);
	CHECK_EQ(*counter, 3);
}

/* Whatever the number of slots, nothing is missed. */
static void nothing_is_missed_when_slots_run_out(void)
{
	enum { JOBS = 3 };
	int fd = open_with_pause();
	volatile uint64_t *counter = map_counter(fd);
	struct work jobs[JOBS];
	char *area = pages(JOBS + 1);
	struct umn_pause_range range = { (uintptr_t)area, (uintptr_t)area + JOBS * PAGE };
	struct ummunotify_event events[16];
	unsigned int again = 0, seen = 0;
	uint64_t before;
	ssize_t got;

	for (unsigned int i = 0; i < JOBS; i++)
		prepare(&jobs[i], false);
	for (uint64_t i = 0; i <= JOBS; i++)
		CHECK(register_range(fd, (uintptr_t)area + i * PAGE, (uintptr_t)area + (i + 1) * PAGE,
				     i) == 0);
	for (unsigned int i = 0; i < JOBS; i++) {
		begin(&jobs[i], area + i * PAGE, 1, i + 1);
		CHECK(ioctl(pause_fd, UMN_PAUSE_ARM, &range) == 0);
	}
	CHECK_EQ(*counter, JOBS);
	CHECK_EQ(read(fd, events, sizeof(events)), (JOBS + 1) * 32);
	before = *counter;
	release();
	for (unsigned int i = 0; i < JOBS; i++)
		CHECK(pthread_join(jobs[i].thread, NULL) == 0);
	CHECK(*counter > before);
	got = read(fd, events, sizeof(events));
	CHECK(got >= 32);
	for (int i = 0; i < got / 32 - 1; i++) {
		CHECK_EQ(events[i].type, INVAL);
		again++;
		seen |= 1u << events[i].user_cookie_counter;
	}
	CHECK_EQ(seen & 7, 7);
	CHECK_EQ(events[got / 32 - 1].type, LAST);
	CHECK_EQ(events[got / 32 - 1].user_cookie_counter, *counter);
	if (slots >= JOBS) {
		CHECK_EQ(again, JOBS);
		CHECK_EQ(*counter, before + JOBS);
		CHECK_EQ(fdinfo(fd, "ummunotify-inflight-overflows:"), 0);
	} else {
		/* The fourth region was touched by nobody, and is invalid all the same. */
		CHECK_EQ(again, JOBS + 1);
		for (int i = 0; i < got / 32 - 1; i++)
			CHECK_EQ(events[i].flags, 0);
		CHECK(fdinfo(fd, "ummunotify-inflight-overflows:") >= JOBS - slots);
		CHECK(fdinfo(fd, "ummunotify-everything-invalid:") >= 1);
	}
}

/* Overflow alone costs nothing as long as nobody races. */
static void running_out_of_slots_alone_is_no_event(void)
{
	int fd = open_with_pause();
	char *area = pages(2);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	discard(area + PAGE, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(1));
	discard(area, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(2));
	CHECK_EQ(fdinfo(fd, "ummunotify-everything-invalid:"), 0);
}

static const struct test tests[] = {
#define TEST(name) { #name, name }
	TEST(a_region_read_in_between_is_hit_again),
	TEST(a_region_registered_in_between_is_hit),
	TEST(a_region_registered_anew_under_its_cookie_is_hit),
	TEST(a_region_still_queued_is_not_hit_again),
	TEST(without_a_race_there_is_no_extra_event),
	TEST(an_after_hit_on_a_queued_region_clears_its_hint),
	TEST(invalidations_end_in_any_order),
	TEST(a_munmap_is_hit_again_too),
	TEST(closing_in_between_waits_and_is_harmless),
	TEST(nothing_is_missed_when_slots_run_out),
	TEST(running_out_of_slots_alone_is_no_event),
};

int main(int argc, char **argv)
{
	FILE *file = fopen("/sys/module/ummunotify/parameters/inflight_slots", "r");

	if (!file || fscanf(file, "%u", &slots) != 1) {
		printf("the module ummunotify isn't loaded\n");
		return 1;
	}
	fclose(file);
	return RUN_TESTS(tests, argc, argv, 60);
}
