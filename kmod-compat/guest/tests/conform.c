// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * The interface, rule by rule and call by call, on the device of this host.
 * A test's name says what is broken if it fails; "rule N" and the names of calls
 * are those of the interface's description in README.md.
 */
#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/uio.h>

_Static_assert(sizeof(struct ummunotify_register_ioctl) == 32, "layout");
_Static_assert(sizeof(struct ummunotify_event) == 32, "layout");
_Static_assert(UMMUNOTIFY_EXCHANGE_FEATURES == 0xc0045501u, "number");
_Static_assert(UMMUNOTIFY_REGISTER_REGION == 0x40205502u, "number");
_Static_assert(UMMUNOTIFY_UNREGISTER_REGION == 0x40085503u, "number");

static void *bad_pointer(void)
{
	void *page = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(page != MAP_FAILED);
	return page;
}

/* ---- open ---- */

static void open_gives_an_empty_context(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);
	char buffer[64];

	CHECK_EQ(*counter, 0);
	CHECK(!readable(fd));
	CHECK_FAILS(read(fd, buffer, sizeof(buffer)), EAGAIN);
	for (size_t i = 1; i < PAGE / 8; i++)
		CHECK_EQ(counter[i], 0);
}

static void open_for_writing_is_refused(void)
{
	CHECK_FAILS(open_flags(O_WRONLY), EINVAL);
	CHECK_FAILS(open_flags(O_RDWR), EINVAL);
	CHECK_FAILS(open_flags(O_RDWR | O_NONBLOCK | O_CLOEXEC), EINVAL);
}

static void open_is_for_everybody(void)
{
	struct stat st;

	CHECK(stat(DEVICE, &st) == 0);
	CHECK(S_ISCHR(st.st_mode));
	CHECK_EQ(st.st_mode & 07777, 0666);
	CHECK(setgid(65534) == 0 && setuid(65534) == 0);
	open_device();
}

static void contexts_share_nothing(void)
{
	int one = open_device(), two = open_device();
	volatile uint64_t *counter_one = map_counter(one), *counter_two = map_counter(two);
	char *area = pages(2);

	CHECK(register_range(one, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(two, (uintptr_t)area + PAGE, (uintptr_t)area + 2 * PAGE, 1) == 0);
	discard(area, 1);
	CHECK_EQ(*counter_one, 1);
	CHECK_EQ(*counter_two, 0);
	CHECK(!readable(two));
	EXPECT_READ(one, 8, HIT(1, area, area + PAGE), COUNTER(1));
}

/* ---- EXCHANGE_FEATURES ---- */

static void exchange_writes_zero_over_garbage(void)
{
	int fd = open_device();
	uint32_t words[2] = { 0xdeadbeef, 0x12345678 };

	CHECK(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, words) == 0);
	CHECK_EQ(words[0], 0);
	CHECK_EQ(words[1], 0x12345678);
}

static void exchange_after_use_is_refused_before_the_pointer(void)
{
	uint32_t word = 7;
	uint64_t cookie = 9;
	int fd = open_device();

	CHECK(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word) == 0);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), EINVAL);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, bad_pointer()), EINVAL);

	fd = open_device();
	CHECK(register_range(fd, 0, 0, 0) == 0);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), EINVAL);

	/* A duplicate cookie is refused, but the call counts as a use. */
	fd = open_device();
	CHECK(register_range(fd, 0, 0, 0) == 0);
	CHECK_FAILS(register_range(fd, 0, 0, 0), EINVAL);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), EINVAL);

	/* A read that returned nothing too. */
	fd = open_device();
	CHECK_FAILS(read(fd, &cookie, sizeof(cookie)), EAGAIN);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), EINVAL);

	/* These don't. */
	fd = open_device();
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie), EINVAL);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_REGISTER_REGION, bad_pointer()), EFAULT);
	CHECK(!readable(fd));
	map_counter(fd);
	CHECK(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word) == 0);
}

static void exchange_with_a_bad_pointer_counts_as_use(void)
{
	uint32_t word = 7, *readonly;
	int fd = open_device();

	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, bad_pointer()), EFAULT);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word), EINVAL);
	CHECK_EQ(word, 7);

	fd = open_device();
	readonly = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, readonly), EFAULT);
}

/* ---- REGISTER_REGION, UNREGISTER_REGION, other ioctls ---- */

static void register_checks_nothing_but_the_cookie(void)
{
	int fd = open_device();

	CHECK(register_range(fd, 0, 0, 0) == 0);
	CHECK(register_range(fd, 0, ~0ULL, ~0ULL) == 0);
	CHECK(register_range(fd, ~0ULL, ~0ULL, 1) == 0);
	CHECK(register_range(fd, ~0ULL, 0, 2) == 0);
	CHECK(register_range(fd, 12345, 54321, 3) == 0);
	CHECK(register_range(fd, 54321, 12345, 4) == 0);
	CHECK(register_range(fd, 12345, 54321, 5) == 0);
	CHECK(register_range(fd, 1ULL << 63, (1ULL << 63) + 1, 6) == 0);
	for (uint64_t cookie = 0; cookie <= 6; cookie++)
		CHECK_FAILS(register_range(fd, 1, 2, cookie), EINVAL);
	CHECK_FAILS(register_range(fd, 1, 2, ~0ULL), EINVAL);
	/* A cookie is free again once its region is gone. */
	CHECK(unregister(fd, 3) == 0);
	CHECK(register_range(fd, 1, 2, 3) == 0);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_REGISTER_REGION, bad_pointer()), EFAULT);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_REGISTER_REGION, NULL), EFAULT);
}

static void unregister_takes_the_queued_event_along(void)
{
	int fd = open_device();
	char *area = pages(2);
	volatile uint64_t *counter = map_counter(fd);

	CHECK_FAILS(unregister(fd, 1), EINVAL);
	CHECK_FAILS(ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, bad_pointer()), EFAULT);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 2) == 0);
	discard(area, 2);
	CHECK(unregister(fd, 1) == 0);
	CHECK_FAILS(unregister(fd, 1), EINVAL);
	EXPECT_READ(fd, 8, HIT(2, area, area + PAGE), COUNTER(1));
	CHECK(unregister(fd, 2) == 0);
	unmap(area, 2);
	CHECK_EQ(*counter, 1);
	CHECK(!readable(fd));
}

static void a_moved_counter_is_reported_though_its_region_is_gone(void)
{
	int fd = open_device();
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	CHECK(unregister(fd, 1) == 0);
	CHECK(readable(fd));
	EXPECT_READ(fd, 8, COUNTER(1));
	CHECK(!readable(fd));
}

static void other_ioctls_are_unknown_or_the_kernels(void)
{
	int fd = open_device(), on = 0;
	char buffer[32];

	CHECK_FAILS(ioctl(fd, _IO(UMMUNOTIFY_MAGIC, 0), 0), ENOTTY);
	CHECK_FAILS(ioctl(fd, _IO(UMMUNOTIFY_MAGIC, 4), 0), ENOTTY);
	CHECK_FAILS(ioctl(fd, _IOW(UMMUNOTIFY_MAGIC, 2, uint64_t), buffer), ENOTTY);
	CHECK_FAILS(ioctl(fd, FIONREAD, &on), ENOTTY);
	CHECK(ioctl(fd, FIOCLEX) == 0);
	CHECK_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
	CHECK(ioctl(fd, FIONCLEX) == 0);
	CHECK_EQ(fcntl(fd, F_GETFD), 0);
	CHECK(ioctl(fd, FIONBIO, &on) == 0);
	CHECK(!(fcntl(fd, F_GETFL) & O_NONBLOCK));
	on = 1;
	CHECK(ioctl(fd, FIONBIO, &on) == 0);
	CHECK_FAILS(read(fd, buffer, sizeof(buffer)), EAGAIN);
	CHECK(ioctl(fd, FIOASYNC, &on) == 0);
	CHECK(fcntl(fd, F_GETFL) & O_ASYNC);
}

/* ---- rules 1 to 10 ---- */

static void rule_1_adding_mappings_is_no_invalidation(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);
	char *area = pages(8);

	unmap(area, 8);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 8 * PAGE, 1) == 0);
	CHECK(mmap(area, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
		   -1, 0) == area);
	memset(area, 1, 8 * PAGE);
	CHECK_EQ(*counter, 0);
	CHECK(!readable(fd));
}

static void rule_2_hits_are_half_open_and_unsigned(void)
{
	int fd = open_device();
	char *base = pages(8);
	uint64_t area = (uintptr_t)base;
	volatile uint64_t *counter = map_counter(fd);
	/* The invalidation is [area + 2 pages, area + 4 pages). */
	uint64_t s = area + 2 * PAGE, e = area + 4 * PAGE;
	const struct {
		uint64_t start, end;
		bool hit;
	} regions[] = {
		{ s, e, true }, { s - 1, s, false }, { s - 1, s + 1, true }, { e, e + 1, false },
		{ e - 1, e, true }, { s + 5, s + 6, true }, { area, area + 8 * PAGE, true },
		/* Empty: hit inside, not at the edges. */
		{ s, s, false }, { s + 1, s + 1, true }, { e - 1, e - 1, true }, { e, e, false },
		/* Inverted: start < e and s < end. */
		{ s + 2, s + 1, true }, { e - 1, s + 1, true }, { e, s + 1, false }, { e - 1, s, false },
		/* The ends of the address space. */
		{ 0, ~0ULL, true }, { 0, 0, false }, { ~0ULL, ~0ULL, false }, { ~0ULL, 0, false },
		{ 0, 1, false }, { 0, s, false }, { 0, s + 1, true }, { e - 1, ~0ULL, true },
		{ e, ~0ULL, false },
	};

	for (size_t i = 0; i < sizeof(regions) / sizeof(regions[0]); i++) {
		CHECK(register_range(fd, regions[i].start, regions[i].end, i) == 0);
		uint64_t before = *counter;

		discard((void *)s, 2);
		if (*counter - before != regions[i].hit)
			failed(__FILE__, __LINE__, "region %zu: counter went up by %llu", i,
			       (unsigned long long)(*counter - before));
		CHECK_EQ(readable(fd), regions[i].hit);
		if (regions[i].hit) {
			uint64_t start = regions[i].start, end = regions[i].end;

			EXPECT_READ(fd, 8,
				    HIT(i, start > s ? start : s, end < e ? end : e),
				    COUNTER(before + 1));
		}
		CHECK(unregister(fd, i) == 0);
	}
}

static void rule_2_all_at_once_finds_the_same(void)
{
	int fd = open_device();
	char *base = pages(8);
	uint64_t area = (uintptr_t)base, s = area + 3 * PAGE, e = area + 4 * PAGE;
	struct ummunotify_event event;
	unsigned int wanted = 0, got = 0;
	uint64_t random = 88172645463325252ULL;

	/* Regions of every shape in one tree: each found exactly if the formula says so. */
	for (uint64_t cookie = 0; cookie < 4000; cookie++) {
		uint64_t start, end;

		random ^= random << 13, random ^= random >> 7, random ^= random << 17;
		start = area + random % (8 * PAGE);
		random ^= random << 13, random ^= random >> 7, random ^= random << 17;
		end = area + random % (8 * PAGE);
		CHECK(register_range(fd, start, end, cookie << 1 | (start < e && s < end)) == 0);
		wanted += start < e && s < end;
		if (cookie % 3 == 2) {
			/* And some leave again. */
			CHECK(unregister(fd, cookie << 1 | (start < e && s < end)) == 0);
			wanted -= start < e && s < end;
		}
	}
	discard((void *)s, 1);
	while (read(fd, &event, sizeof(event)) == sizeof(event) && event.type == INVAL) {
		CHECK(event.user_cookie_counter & 1);
		got++;
	}
	CHECK_EQ(got, wanted);
	CHECK_EQ(event.user_cookie_counter, 1);
}

static void rule_3_a_second_hit_clears_the_hint(void)
{
	int fd = open_device();
	char *area = pages(4);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 4 * PAGE, 1) == 0);
	discard(area + PAGE, 1);
	discard(area + PAGE, 1);
	EXPECT_READ(fd, 8, HIT_PLAIN(1, area, area + 4 * PAGE), COUNTER(2));
	discard(area + PAGE, 1);
	discard(area + 2 * PAGE, 1);
	discard(area + 3 * PAGE, 1);
	EXPECT_READ(fd, 8, HIT_PLAIN(1, area, area + 4 * PAGE), COUNTER(5));
	/* Reported: the next one has its hint again. */
	discard(area + 3 * PAGE, 1);
	EXPECT_READ(fd, 8, HIT(1, area + 3 * PAGE, area + 4 * PAGE), COUNTER(6));
}

static void rule_4_order_is_by_start_then_newest_first(void)
{
	int fd = open_device();
	char *base = pages(4);
	uint64_t a = (uintptr_t)base;

	CHECK(register_range(fd, a + PAGE, a + 2 * PAGE, 1) == 0);
	CHECK(register_range(fd, a, a + PAGE, 2) == 0);
	CHECK(register_range(fd, a + PAGE, a + 3 * PAGE, 3) == 0);
	CHECK(register_range(fd, a, a + 4 * PAGE, 4) == 0);
	CHECK(register_range(fd, a + PAGE, a + PAGE + 1, 5) == 0);
	CHECK(register_range(fd, a + 100, a + 200, 6) == 0);
	discard(base, 4);
	EXPECT_READ(fd, 16, HIT(4, a, a + 4 * PAGE), HIT(2, a, a + PAGE), HIT(6, a + 100, a + 200),
		    HIT(5, a + PAGE, a + PAGE + 1), HIT(3, a + PAGE, a + 3 * PAGE),
		    HIT(1, a + PAGE, a + 2 * PAGE), COUNTER(1));
	/* The queue's order is that of the hits, not of the addresses. */
	discard(base + 2 * PAGE, 1);
	discard(base, 1);
	EXPECT_READ(fd, 16, HIT_PLAIN(4, a, a + 4 * PAGE), HIT(3, a + 2 * PAGE, a + 3 * PAGE),
		    HIT(2, a, a + PAGE), HIT(6, a + 100, a + 200), COUNTER(3));
}

static void rule_4_many_equal_starts(void)
{
	int fd = open_device();
	char *area = pages(1);
	struct ummunotify_event events[128];

	for (uint64_t cookie = 0; cookie < 100; cookie++)
		CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 1 + cookie * 7 % 100,
				     cookie) == 0);
	/* Some from the middle leave and come back: they are the newest now. */
	for (uint64_t cookie = 10; cookie < 100; cookie += 10) {
		CHECK(unregister(fd, cookie) == 0);
		CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 50, cookie) == 0);
	}
	discard(area, 1);
	CHECK_EQ(read(fd, events, sizeof(events)), 101 * 32);
	for (unsigned int i = 0; i < 9; i++)
		CHECK_EQ(events[i].user_cookie_counter, 90 - 10 * i);
	for (unsigned int i = 9, cookie = 99; i < 100; i++, cookie--) {
		while (cookie % 10 == 0 && cookie != 0)
			cookie--;
		CHECK_EQ(events[i].user_cookie_counter, cookie);
	}
}

static void rule_5_one_invalidation_counts_once(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);
	char *area = pages(4);

	for (uint64_t cookie = 0; cookie < 4; cookie++)
		CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 2 * PAGE, cookie) == 0);
	discard(area, 4);
	CHECK_EQ(*counter, 1);
	/* Already queued: it counts all the same. */
	discard(area, 1);
	CHECK_EQ(*counter, 2);
	/* It hits nothing. */
	discard(area + 2 * PAGE, 2);
	CHECK_EQ(*counter, 2);
}

static void rule_6_the_counter_moved_before_the_call_returns(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	for (uint64_t i = 1; i <= 10000; i++) {
		CHECK(madvise(area, PAGE, MADV_DONTNEED) == 0);
		CHECK_EQ(*counter, i);
	}
}

static void rule_7_a_reported_region_stays_registered(void)
{
	int fd = open_device();
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	for (uint64_t i = 1; i <= 5; i++) {
		discard(area, 1);
		EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(i));
	}
}

static void rule_8_the_hint_is_clipped_to_the_region(void)
{
	int fd = open_device();
	char *base = pages(4);
	uint64_t a = (uintptr_t)base;

	CHECK(register_range(fd, a + PAGE + 10, a + 3 * PAGE - 10, 1) == 0);
	discard(base + PAGE, 1);
	EXPECT_READ(fd, 8, HIT(1, a + PAGE + 10, a + 2 * PAGE), COUNTER(1));
	discard(base + 2 * PAGE, 2);
	EXPECT_READ(fd, 8, HIT(1, a + 2 * PAGE, a + 3 * PAGE - 10), COUNTER(2));
	discard(base, 4);
	EXPECT_READ(fd, 8, HIT(1, a + PAGE + 10, a + 3 * PAGE - 10), COUNTER(3));
}

static void rule_9_last_follows_when_the_queue_ran_empty(void)
{
	int fd = open_device();
	char *area = pages(4);

	for (uint64_t i = 0; i < 4; i++)
		CHECK(register_range(fd, (uintptr_t)area + i * PAGE, (uintptr_t)area + (i + 1) * PAGE,
				     i) == 0);
	discard(area, 4);
	EXPECT_READ(fd, 3, HIT(0, area, area + PAGE), HIT(1, area + PAGE, area + 2 * PAGE),
		    HIT(2, area + 2 * PAGE, area + 3 * PAGE));
	CHECK(readable(fd));
	EXPECT_READ(fd, 1, HIT(3, area + 3 * PAGE, area + 4 * PAGE));
	/* Filled exactly: LAST comes alone, with the next read. */
	CHECK(readable(fd));
	EXPECT_READ(fd, 1, COUNTER(1));
	CHECK(!readable(fd));
}

static void rule_10_readable_until_the_counter_was_reported(void)
{
	int fd = open_device();
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(!readable(fd));
	discard(area, 1);
	CHECK(readable(fd));
	EXPECT_READ(fd, 1, HIT(1, area, area + PAGE));
	CHECK(readable(fd));
	/* A hit between the INVAL and its LAST isn't lost in the LAST. */
	discard(area, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(2));
	CHECK(!readable(fd));
}

/* ---- read ---- */

static void read_looks_at_readability_before_the_size(void)
{
	int fd = open_device();
	char buffer[64], *area = pages(1);

	CHECK_FAILS(read(fd, buffer, 0), EAGAIN);
	CHECK_FAILS(read(fd, buffer, 31), EAGAIN);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	memset(buffer, 0xa5, sizeof(buffer));
	CHECK_EQ(read(fd, buffer, 0), 0);
	CHECK_EQ(read(fd, buffer, 31), 0);
	CHECK(readable(fd));
	for (size_t i = 0; i < sizeof(buffer); i++)
		CHECK_EQ((unsigned char)buffer[i], 0xa5);
	/* 63 bytes hold one record. */
	CHECK_EQ(read(fd, buffer, 63), 32);
	CHECK_EQ((unsigned char)buffer[32], 0xa5);
	CHECK_EQ(read(fd, buffer, 63), 32);
	CHECK_EQ(((struct ummunotify_event *)buffer)->type, LAST);
	CHECK_FAILS(read(fd, buffer, 63), EAGAIN);
}

static void read_returns_a_page_of_records_at_most(void)
{
	int fd = open_device();
	static struct ummunotify_event events[400];
	char *area = pages(1);

	for (uint64_t cookie = 0; cookie < 200; cookie++)
		CHECK(register_range(fd, (uintptr_t)area + cookie, (uintptr_t)area + PAGE, cookie) == 0);
	discard(area, 1);
	CHECK_EQ(read(fd, events, sizeof(events)), PAGE);
	CHECK_EQ(events[127].type, INVAL);
	CHECK_EQ(events[127].user_cookie_counter, 127);
	CHECK_EQ(read(fd, events, sizeof(events)), 73 * 32);
	CHECK_EQ(events[71].user_cookie_counter, 199);
	CHECK_EQ(events[72].type, LAST);
}

static void read_with_a_bad_buffer_consumes_nothing(void)
{
	/* Null, the last byte, and the kernel's half. */
	static const volatile uintptr_t nowhere[] = { 0, ~0UL, 0xffff888000000000UL };
	int fd = open_device();
	char *area = pages(4), *buffer = pages(2);

	unmap(buffer + PAGE, 1);
	for (uint64_t i = 0; i < 4; i++)
		CHECK(register_range(fd, (uintptr_t)area + i * PAGE, (uintptr_t)area + (i + 1) * PAGE,
				     i) == 0);
	discard(area, 4);
	CHECK_FAILS(read(fd, bad_pointer(), 256), EFAULT);
	for (size_t i = 0; i < sizeof(nowhere) / sizeof(nowhere[0]); i++)
		CHECK_FAILS(read(fd, (void *)nowhere[i], 256), EFAULT);
	/* The second record straddles into the hole, and the third begins in it. */
	CHECK_FAILS(read(fd, buffer + PAGE - 48, 256), EFAULT);
	CHECK_FAILS(read(fd, buffer + PAGE - 64, 256), EFAULT);
	CHECK(readable(fd));
	/* What isn't needed may be bad: four records and LAST are 160 bytes. */
	CHECK_EQ(read(fd, buffer + PAGE - 160, 4096), 160);
	CHECK_EQ(((struct ummunotify_event *)(buffer + PAGE - 160))[0].user_cookie_counter, 0);
	CHECK_EQ(((struct ummunotify_event *)(buffer + PAGE - 160))[3].user_cookie_counter, 3);
	CHECK_EQ(((struct ummunotify_event *)(buffer + PAGE - 160))[4].type, LAST);
	/* A failed LAST is still to come too. */
	discard(area, 1);
	CHECK_FAILS(read(fd, buffer + PAGE - 32, 64), EFAULT);
	CHECK_EQ(read(fd, buffer + PAGE - 32, 32), 32);
	CHECK_FAILS(read(fd, buffer + PAGE - 16, 32), EFAULT);
	EXPECT_READ(fd, 8, COUNTER(2));
}

static void read_into_pages_not_there_yet(void)
{
	int fd = open_device();
	char *area = pages(1), *fresh;
	struct ummunotify_event *events;

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	fresh = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(fresh != MAP_FAILED);
	events = (void *)(fresh + PAGE - 40);
	CHECK_EQ(read(fd, events, 64), 64);
	CHECK_EQ(events[0].user_cookie_counter, 1);
	CHECK_EQ(events[1].type, LAST);
}

static void read_whose_buffer_is_watched_itself(void)
{
	int fd = open_device();
	struct ummunotify_event *events;
	char *area = pages(1), *buffer;

	/* Shows the zero page: writing the records there is itself an invalidation. */
	buffer = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(buffer != MAP_FAILED);
	CHECK(register_range(fd, (uintptr_t)buffer, (uintptr_t)buffer + PAGE, 2) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK_EQ(*(volatile char *)buffer, 0);
	discard(area, 1);
	events = (void *)buffer;
	CHECK_EQ(read(fd, events, 128), 96);
	CHECK_EQ(events[0].user_cookie_counter, 1);
	CHECK_EQ(events[1].user_cookie_counter, 2);
	CHECK_EQ(events[2].type, LAST);
	CHECK_EQ(events[2].user_cookie_counter, 2);
}

static void readv_is_one_read_of_the_sum(void)
{
	int fd = open_device();
	char *area = pages(2);
	unsigned char parts[3][64];
	struct ummunotify_event whole[3];
	struct iovec iov[] = { { parts[0], 16 }, { parts[1], 0 }, { parts[1], 40 }, { parts[2], 60 } };

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)area + PAGE, (uintptr_t)area + 2 * PAGE, 2) == 0);
	discard(area, 2);
	memset(parts, 0xa5, sizeof(parts));
	CHECK_EQ(readv(fd, iov, 4), 96);
	memcpy((char *)whole, parts[0], 16);
	memcpy((char *)whole + 16, parts[1], 40);
	memcpy((char *)whole + 56, parts[2], 40);
	CHECK_EQ(whole[0].user_cookie_counter, 1);
	CHECK_EQ(whole[1].user_cookie_counter, 2);
	CHECK_EQ(whole[1].hint_end, (uintptr_t)area + 2 * PAGE);
	CHECK_EQ(whole[2].type, LAST);
	CHECK_EQ(parts[2][40], 0xa5);

	/* One bad segment spoils it all, and nothing is lost. */
	discard(area, 2);
	iov[3].iov_base = bad_pointer();
	CHECK_FAILS(readv(fd, iov, 4), EFAULT);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), HIT(2, area + PAGE, area + 2 * PAGE), COUNTER(2));

	/* It doesn't block in the second segment either. */
	CHECK(fcntl(fd, F_SETFL, 0) == 0);
	discard(area, 1);
	iov[3].iov_base = parts[2];
	CHECK_EQ(readv(fd, iov, 4), 64);
}

static void pread_ignores_the_offset(void)
{
	int fd = open_device();
	char *area = pages(1);
	struct ummunotify_event events[4];
	struct iovec iov = { events, sizeof(events) };

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	CHECK_EQ(pread(fd, events, sizeof(events), 1 << 20), 64);
	CHECK_EQ(events[0].user_cookie_counter, 1);
	discard(area, 1);
	CHECK_EQ(preadv(fd, &iov, 1, 12345), 64);
	CHECK_EQ(events[1].user_cookie_counter, 2);
	CHECK_FAILS(lseek(fd, 0, SEEK_SET), ESPIPE);
	CHECK_FAILS(lseek(fd, 0, SEEK_CUR), ESPIPE);
	CHECK_FAILS(lseek(fd, 0, SEEK_END), ESPIPE);
}

static void write_is_refused(void)
{
	CHECK_FAILS(write(open_device(), "x", 1), EBADF);
}

struct later {
	char *area;
	unsigned int microseconds;
};

static void *discard_later(void *argument)
{
	struct later *later = argument;

	usleep(later->microseconds);
	discard(later->area, 1);
	return NULL;
}

static void a_blocking_read_wakes_up(void)
{
	int fd = open_device();
	struct later later = { pages(1), 50000 };
	pthread_t thread;

	CHECK(fcntl(fd, F_SETFL, 0) == 0);
	CHECK(register_range(fd, (uintptr_t)later.area, (uintptr_t)later.area + PAGE, 1) == 0);
	for (uint64_t i = 1; i <= 3; i++) {
		CHECK(pthread_create(&thread, NULL, discard_later, &later) == 0);
		EXPECT_READ(fd, 8, HIT(1, later.area, later.area + PAGE), COUNTER(i));
		CHECK(pthread_join(thread, NULL) == 0);
	}
}

static void handle(int signal)
{
	(void)signal;
}

static void *signal_later(void *argument)
{
	usleep(50000);
	CHECK(pthread_kill(*(pthread_t *)argument, SIGUSR1) == 0);
	return NULL;
}

static void a_signal_ends_a_blocking_read(void)
{
	struct sigaction action = { .sa_handler = handle };
	pthread_t self = pthread_self(), thread;
	int fd = open_device();
	char buffer[64];

	CHECK(fcntl(fd, F_SETFL, 0) == 0);
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&thread, NULL, signal_later, &self) == 0);
	CHECK_FAILS(read(fd, buffer, sizeof(buffer)), EINTR);
	CHECK(pthread_join(thread, NULL) == 0);
	/* The size isn't looked at: it sleeps too. */
	CHECK(pthread_create(&thread, NULL, signal_later, &self) == 0);
	CHECK_FAILS(read(fd, buffer, 0), EINTR);
	CHECK(pthread_join(thread, NULL) == 0);
}

static void a_signal_restarts_a_blocking_read_under_sa_restart(void)
{
	struct sigaction action = { .sa_handler = handle, .sa_flags = SA_RESTART };
	struct later later = { pages(1), 200000 };
	pthread_t self = pthread_self(), one, two;
	int fd = open_device();

	CHECK(fcntl(fd, F_SETFL, 0) == 0);
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(register_range(fd, (uintptr_t)later.area, (uintptr_t)later.area + PAGE, 1) == 0);
	CHECK(pthread_create(&one, NULL, signal_later, &self) == 0);
	CHECK(pthread_create(&two, NULL, discard_later, &later) == 0);
	EXPECT_READ(fd, 8, HIT(1, later.area, later.area + PAGE), COUNTER(1));
	CHECK(pthread_join(one, NULL) == 0 && pthread_join(two, NULL) == 0);
}

static void *signal_often(void *argument)
{
	for (int i = 0; i < 2000; i++)
		pthread_kill(*(pthread_t *)argument, SIGUSR1);
	return NULL;
}

static void open_isnt_interrupted_by_signals(void)
{
	struct sigaction action = { .sa_handler = handle };
	pthread_t self = pthread_self(), thread;

	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&thread, NULL, signal_often, &self) == 0);
	for (int i = 0; i < 20; i++) {
		int fd = open_device();

		while (close(fd) != 0)
			CHECK(errno == EINTR);
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

/* ---- poll, select, epoll, SIGIO ---- */

static void select_and_epoll_are_level_triggered(void)
{
	int fd = open_device(), epoll = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN | EPOLLRDNORM };
	struct timeval now = { 0, 0 };
	char *area = pages(1);
	fd_set set;

	CHECK(epoll >= 0);
	CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK_EQ(epoll_wait(epoll, &event, 1, 0), 0);
	discard(area, 1);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(epoll_wait(epoll, &event, 1, 1000), 1);
		CHECK_EQ(event.events, EPOLLIN | EPOLLRDNORM);
		FD_ZERO(&set);
		FD_SET(fd, &set);
		now.tv_sec = now.tv_usec = 0;
		CHECK_EQ(select(fd + 1, &set, NULL, NULL, &now), 1);
	}
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(1));
	CHECK_EQ(epoll_wait(epoll, &event, 1, 0), 0);
	FD_ZERO(&set);
	FD_SET(fd, &set);
	CHECK_EQ(select(fd + 1, &set, NULL, NULL, &now), 0);
	/* Ready for nothing else. */
	struct pollfd pollfd = { .fd = fd, .events = POLLOUT | POLLPRI };

	CHECK_EQ(poll(&pollfd, 1, 0), 0);
}

static void every_hit_wakes_an_edge_triggered_waiter(void)
{
	int fd = open_device(), epoll = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN | EPOLLET };
	char *area = pages(1);

	CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	for (int i = 0; i < 3; i++) {
		/* Queued already the second time, and nothing was read. */
		discard(area, 1);
		CHECK_EQ(epoll_wait(epoll, &event, 1, 1000), 1);
		CHECK_EQ(epoll_wait(epoll, &event, 1, 0), 0);
	}
}

static void *poll_once(void *argument)
{
	struct pollfd pollfd = { .fd = *(int *)argument, .events = POLLIN };

	CHECK_EQ(poll(&pollfd, 1, 10000), 1);
	return NULL;
}

static void a_hit_wakes_every_poller(void)
{
	int fd = open_device();
	pthread_t threads[4];
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&threads[i], NULL, poll_once, &fd) == 0);
	usleep(50000);
	discard(area, 1);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

static void every_hit_sends_sigio(void)
{
	int fd = open_device(), number = SIGRTMIN;
	struct timespec limit = { 1, 0 };
	char *area = pages(1);
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, number);
	CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
	CHECK(fcntl(fd, F_SETOWN, getpid()) == 0);
	CHECK(fcntl(fd, F_SETSIG, number) == 0);
	CHECK(fcntl(fd, F_SETFL, O_NONBLOCK | O_ASYNC) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	for (int i = 0; i < 5; i++)
		discard(area, 1);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(sigtimedwait(&set, &info, &limit), number);
		CHECK_EQ(info.si_code, POLL_IN);
		CHECK_EQ(info.si_fd, fd);
	}
	limit.tv_sec = 0;
	CHECK_FAILS(sigtimedwait(&set, &info, &limit), EAGAIN);
	/* Off again. */
	CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	discard(area, 1);
	CHECK_FAILS(sigtimedwait(&set, &info, &limit), EAGAIN);
}

/* ---- mmap ---- */

static void mmap_is_one_read_only_page(void)
{
	int fd = open_device();
	char *page;

	CHECK_FAILS(mmap(NULL, PAGE + 1, PROT_READ, MAP_SHARED, fd, 0), EINVAL);
	CHECK_FAILS(mmap(NULL, 2 * PAGE, PROT_READ, MAP_SHARED, fd, 0), EINVAL);
	CHECK_FAILS(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, PAGE), EINVAL);
	CHECK_FAILS(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), EACCES);
	CHECK_FAILS(mmap(NULL, PAGE, PROT_WRITE, MAP_SHARED, fd, 0), EACCES);
	page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(page != MAP_FAILED);
	CHECK_FAILS(mprotect(page, PAGE, PROT_READ | PROT_WRITE), EACCES);
	CHECK(mremap(page, PAGE, 2 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED);
	CHECK(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED);
	CHECK(mmap(NULL, 1, PROT_READ, MAP_PRIVATE, fd, 0) != MAP_FAILED);
	/* Discarded, it comes back. */
	discard(page, 1);
	CHECK_EQ(*(volatile uint64_t *)page, 0);
}

static void a_private_mapping_may_be_written_and_changes_nothing(void)
{
	int fd = open_device();
	char *area = pages(1);
	volatile uint64_t *counter = map_counter(fd), *copy;

	copy = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(copy != MAP_FAILED);
	copy[0] = 99;
	copy[1] = 98;
	CHECK_EQ(counter[0], 0);
	CHECK_EQ(counter[1], 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	CHECK_EQ(counter[0], 1);
	CHECK_EQ(copy[0], 99);
}

static void a_counter_mapping_outlives_close_and_goes_on_counting(void)
{
	int fd = open_device();
	volatile uint64_t *one = map_counter(fd), *two = map_counter(fd);
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	CHECK(close(fd) == 0);
	discard(area, 1);
	CHECK_EQ(*one, 2);
	CHECK(munmap((void *)one, PAGE) == 0);
	discard(area, 1);
	CHECK_EQ(*two, 3);
}

/* A forked child's copy of the mapping holds the context too. */
static void a_childs_counter_mapping_holds_the_context(void)
{
	int fd = open_device(), sync[2], back[2];
	volatile uint64_t *counter = map_counter(fd);
	char *area = pages(1), byte;
	uint64_t base;
	pid_t pid;

	CHECK(pipe(sync) == 0 && pipe(back) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	pid = fork();
	if (pid == 0) {
		close(fd);
		CHECK(read(sync[0], &byte, 1) == 1);
		base = *counter;
		CHECK(write(back[1], "x", 1) == 1);
		CHECK(read(sync[0], &byte, 1) == 1);
		CHECK_EQ(*counter, base + 1);
		_exit(0);
	}
	CHECK(close(fd) == 0);
	CHECK(munmap((void *)counter, PAGE) == 0);
	CHECK(write(sync[1], "x", 1) == 1);
	CHECK(read(back[0], &byte, 1) == 1);
	discard(area, 1);
	CHECK(write(sync[1], "x", 1) == 1);
	CHECK_EQ(wait_for(pid), 0);
}

/* ---- sharing, processes ---- */

static void duplicates_share_the_context(void)
{
	int fd = open_device(), other = dup(fd), third = fcntl(fd, F_DUPFD_CLOEXEC, 100);
	char *area = pages(1);

	CHECK(other >= 0 && third >= 100);
	CHECK(register_range(other, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(close(fd) == 0);
	discard(area, 1);
	CHECK(readable(other) && readable(third));
	EXPECT_READ(third, 1, HIT(1, area, area + PAGE));
	EXPECT_READ(other, 8, COUNTER(1));
	CHECK(!readable(third));
}

static void close_of_the_last_reference_ends_all(void)
{
	int fd = open_device();
	char *area = pages(1);

	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	discard(area, 1);
	CHECK(close(fd) == 0);
	fd = open_device();
	CHECK(!readable(fd));
	CHECK_EQ(*map_counter(fd), 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
}

static void *discard_now(void *area)
{
	discard(area, 1);
	return NULL;
}

static int discard_in_clone(void *area)
{
	return madvise(area, PAGE, MADV_DONTNEED);
}

static void threads_and_sharers_of_the_memory_are_the_owner(void)
{
	int fd = open_device();
	char *area = pages(1), *stack = pages(16);
	volatile uint64_t *counter = map_counter(fd);
	pthread_t thread;
	pid_t pid;

	CHECK(pthread_create(&thread, NULL, discard_now, area) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
	CHECK(pthread_create(&thread, NULL, discard_now, area) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK_EQ(*counter, 1);
	pid = clone(discard_in_clone, stack + 16 * PAGE, CLONE_VM | SIGCHLD, area);
	CHECK(pid > 0);
	CHECK_EQ(wait_for(pid), 0);
	CHECK_EQ(*counter, 2);
	pid = clone(discard_in_clone, stack + 16 * PAGE, CLONE_VM | CLONE_VFORK | SIGCHLD, area);
	CHECK(pid > 0);
	CHECK_EQ(wait_for(pid), 0);
	CHECK_EQ(*counter, 3);
	/* vfork and its exec are none. */
	pid = vfork();
	if (pid == 0) {
		execl("/nonexistent", "x", NULL);
		_exit(5);
	}
	CHECK_EQ(wait_for(pid), 5);
	CHECK_EQ(*counter, 3);
}

static void fork_is_an_invalidation_of_written_private_memory(void)
{
	int fd = open_device();
	char *area = pages(4), *shared, *untouched;
	pid_t pid;

	shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	untouched = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED && untouched != MAP_FAILED);
	*shared = 1;
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 2 * PAGE, 1) == 0);
	CHECK(register_range(fd, (uintptr_t)shared, (uintptr_t)shared + PAGE, 2) == 0);
	pid = fork();
	if (pid == 0)
		_exit(0);
	CHECK_EQ(wait_for(pid), 0);
	EXPECT_READ(fd, 8, HIT(1, area, area + 2 * PAGE), COUNTER(1));
	CHECK(madvise(area, 4 * PAGE, MADV_DONTFORK) == 0);
	pid = fork();
	if (pid == 0)
		_exit(0);
	CHECK_EQ(wait_for(pid), 0);
	CHECK(!readable(fd));
}

static void a_forked_childs_own_mappings_cause_nothing(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);
	char *area = pages(2);
	uint64_t after_fork;
	int ready[2];
	pid_t pid;
	char byte;

	CHECK(pipe(ready) == 0);
	CHECK(register_range(fd, 0, ~0ULL, 7) == 0);
	pid = fork();
	if (pid == 0) {
		CHECK(read(ready[0], &byte, 1) == 1);
		discard(area, 1);
		unmap(area, 2);
		CHECK(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
		_exit(0);
	}
	/* What fork caused, and writing after it: touch all that waiting will touch. */
	CHECK(write(ready[1], "x", 1) == 1);
	CHECK_EQ(wait_for(pid), 0);
	CHECK(unregister(fd, 7) == 0);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + 2 * PAGE, 8) == 0);
	after_fork = *counter;
	pid = fork();
	if (pid == 0) {
		discard(area, 1);
		unmap(area, 2);
		_exit(0);
	}
	CHECK_EQ(wait_for(pid), 0);
	/* The fork itself, and nothing of what the child did. */
	CHECK_EQ(*counter, after_fork + 1);
}

static void a_forked_child_shares_the_queue(void)
{
	int fd = open_device(), to_child[2], to_parent[2];
	char *area = pages(2), byte;
	pid_t pid;

	CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
	CHECK(madvise(area, 2 * PAGE, MADV_DONTFORK) == 0);
	pid = fork();
	if (pid == 0) {
		/* Names the parent's addresses: here there's nothing. */
		CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
		CHECK(write(to_parent[1], "x", 1) == 1);
		CHECK(read(to_child[0], &byte, 1) == 1);
		CHECK(readable(fd));
		EXPECT_READ(fd, 1, HIT(1, area, area + PAGE));
		_exit(0);
	}
	CHECK(read(to_parent[0], &byte, 1) == 1);
	discard(area, 1);
	CHECK(write(to_child[1], "x", 1) == 1);
	CHECK_EQ(wait_for(pid), 0);
	/* The child took it. */
	EXPECT_READ(fd, 8, COUNTER(1));
	CHECK_FAILS(register_range(fd, 0, 0, 1), EINVAL);
}

static void after_exec_the_descriptor_works_but_never_fires(void)
{
	int fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
	char number[16], start[32];
	pid_t pid;

	CHECK(fd >= 0);
	close(fd);
	pid = fork();
	if (pid == 0) {
		fd = open(DEVICE, O_RDONLY | O_NONBLOCK);
		CHECK(fd >= 0);
		CHECK(register_range(fd, 0, ~0ULL, 1) == 0);
		snprintf(number, sizeof(number), "%d", fd);
		/* Whatever came until here (the stack, copied on write) is read off. */
		struct ummunotify_event events[4];

		while (read(fd, events, sizeof(events)) > 0)
			;
		snprintf(start, sizeof(start), "%llu", (unsigned long long)*map_counter(fd));
		execl("/proc/self/exe", "conform", "--after-exec", number, start, NULL);
		_exit(9);
	}
	CHECK_EQ(wait_for(pid), 0);
}

static int after_exec(int fd, uint64_t counter)
{
	volatile uint64_t *page = map_counter(fd);
	uint64_t at_start = *page;
	char *area = pages(2);

	/* Between the last look and the exec: the call's own stack page, at most. */
	CHECK(at_start - counter <= 1);
	unmap(area, 2);
	CHECK_EQ(*page, at_start);
	CHECK_FAILS(register_range(fd, 1, 2, 1), EINVAL);
	area = pages(2);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 2) == 0);
	unmap(area, 2);
	CHECK_EQ(*page, at_start);
	CHECK(unregister(fd, 1) == 0);
	return 0;
}

static void a_descriptor_outlives_its_opener(void)
{
	int sockets[2], fd;
	char *area = pages(2);
	volatile uint64_t *counter;
	pid_t pid;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
	pid = fork();
	if (pid == 0) {
		fd = open_device();
		CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 1) == 0);
		CHECK(register_range(fd, (uintptr_t)area + PAGE, (uintptr_t)area + 2 * PAGE, 2) == 0);
		discard(area, 1);
		send_fd(sockets[0], fd);
		_exit(0);
	}
	fd = receive_fd(sockets[1]);
	CHECK_EQ(wait_for(pid), 0);
	counter = map_counter(fd);
	/* Exit was no invalidation; what was queued is still there. */
	CHECK_EQ(*counter, 1);
	EXPECT_READ(fd, 8, HIT(1, area, area + PAGE), COUNTER(1));
	CHECK_FAILS(register_range(fd, 0, 0, 2), EINVAL);
	CHECK(register_range(fd, (uintptr_t)area, (uintptr_t)area + PAGE, 3) == 0);
	unmap(area, 2);
	CHECK_EQ(*counter, 1);
	CHECK(unregister(fd, 1) == 0 && unregister(fd, 2) == 0);
	CHECK(!readable(fd));
}

/* ---- what clients rely on ---- */

/* The test that came with the driver in 2010, call by call. */
static void the_drivers_own_test(void)
{
	int fd = open(DEVICE, O_RDONLY), word;
	char *t = mmap(NULL, 3 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ummunotify_register_ioctl region = { 0 };
	volatile uint64_t *counter;
	uint64_t cookie = 123;

	CHECK(fd >= 0 && t != MAP_FAILED);
	counter = mmap(NULL, sizeof(*counter), PROT_READ, MAP_SHARED, fd, 0);
	CHECK(counter != MAP_FAILED);
	CHECK_EQ(*counter, 0);
	memset(&word, 0x5a, sizeof(word));
	CHECK(ioctl(fd, UMMUNOTIFY_EXCHANGE_FEATURES, &word) == 0);
	CHECK_EQ(word, 0);
	region.start = (uintptr_t)t;
	region.end = (uintptr_t)t + 3 * PAGE;
	region.user_cookie = cookie;
	CHECK(ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region) == 0);
	unmap(t + PAGE, 1);
	CHECK_EQ(*counter, 1);
	EXPECT_READ(fd, 16, HIT(cookie, t + PAGE, t + 2 * PAGE), COUNTER(1));
	CHECK(ioctl(fd, UMMUNOTIFY_UNREGISTER_REGION, &cookie) == 0);
	unmap(t, 1);
	CHECK_EQ(*counter, 1);
}

/* A client that handles an event by unregistering, and reads again from inside. */
static void unregister_and_read_while_handling_an_event(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);
	struct ummunotify_event events[128];
	char *area = pages(8);
	unsigned int seen = 0;
	ssize_t got;

	for (uint64_t i = 0; i < 8; i++)
		CHECK(register_range(fd, (uintptr_t)area + i * PAGE, (uintptr_t)area + (i + 1) * PAGE,
				     (uintptr_t)area + i) == 0);
	unmap(area, 8);
	for (;;) {
		got = read(fd, events, sizeof(events[0]));
		CHECK_EQ(got, 32);
		if (events[0].type == LAST)
			break;
		seen++;
		CHECK(unregister(fd, events[0].user_cookie_counter) == 0);
	}
	CHECK_EQ(seen, 8);
	CHECK_EQ(events[0].user_cookie_counter, *counter);
	CHECK_FAILS(read(fd, events, sizeof(events)), EAGAIN);
}

/* A provider that passes the last byte as the end. */
static void regions_one_byte_short_still_hit(void)
{
	int fd = open_device();
	char *base = pages(1);
	uint64_t a = (uintptr_t)base;

	CHECK(register_range(fd, a, a + PAGE - 1, 1) == 0);
	unmap(base, 1);
	EXPECT_READ(fd, 8, HIT(1, a, a + PAGE - 1), COUNTER(1));
}

/* ---- the module ---- */

static void unload_is_refused_while_in_use(void)
{
	int fd = open_device();
	volatile uint64_t *counter = map_counter(fd);

	CHECK_FAILS(syscall(SYS_delete_module, "ummunotify", O_NONBLOCK), EAGAIN);
	CHECK(close(fd) == 0);
	/* The mapping holds it too. */
	CHECK_FAILS(syscall(SYS_delete_module, "ummunotify", O_NONBLOCK), EAGAIN);
	CHECK_EQ(*counter, 0);
}

static void fdinfo_tells_what_is_watched(void)
{
	int fd = open_device();
	char name[64], text[512];
	ssize_t got;
	int info;

	CHECK(register_range(fd, 1, 2, 1) == 0 && register_range(fd, 1, 2, 2) == 0);
	snprintf(name, sizeof(name), "/proc/self/fdinfo/%d", fd);
	info = open(name, O_RDONLY);
	got = read(info, text, sizeof(text) - 1);
	CHECK(got > 0);
	text[got] = 0;
	CHECK(strstr(text, "ummunotify-regions:\t2\n"));
	CHECK(strstr(text, "ummunotify-counter:\t0\n"));
}

static const struct test tests[] = {
#define TEST(name) { #name, name }
	TEST(open_gives_an_empty_context),
	TEST(open_for_writing_is_refused),
	TEST(open_is_for_everybody),
	TEST(open_isnt_interrupted_by_signals),
	TEST(contexts_share_nothing),
	TEST(exchange_writes_zero_over_garbage),
	TEST(exchange_after_use_is_refused_before_the_pointer),
	TEST(exchange_with_a_bad_pointer_counts_as_use),
	TEST(register_checks_nothing_but_the_cookie),
	TEST(unregister_takes_the_queued_event_along),
	TEST(a_moved_counter_is_reported_though_its_region_is_gone),
	TEST(other_ioctls_are_unknown_or_the_kernels),
	TEST(rule_1_adding_mappings_is_no_invalidation),
	TEST(rule_2_hits_are_half_open_and_unsigned),
	TEST(rule_2_all_at_once_finds_the_same),
	TEST(rule_3_a_second_hit_clears_the_hint),
	TEST(rule_4_order_is_by_start_then_newest_first),
	TEST(rule_4_many_equal_starts),
	TEST(rule_5_one_invalidation_counts_once),
	TEST(rule_6_the_counter_moved_before_the_call_returns),
	TEST(rule_7_a_reported_region_stays_registered),
	TEST(rule_8_the_hint_is_clipped_to_the_region),
	TEST(rule_9_last_follows_when_the_queue_ran_empty),
	TEST(rule_10_readable_until_the_counter_was_reported),
	TEST(read_looks_at_readability_before_the_size),
	TEST(read_returns_a_page_of_records_at_most),
	TEST(read_with_a_bad_buffer_consumes_nothing),
	TEST(read_into_pages_not_there_yet),
	TEST(read_whose_buffer_is_watched_itself),
	TEST(readv_is_one_read_of_the_sum),
	TEST(pread_ignores_the_offset),
	TEST(write_is_refused),
	TEST(a_blocking_read_wakes_up),
	TEST(a_signal_ends_a_blocking_read),
	TEST(a_signal_restarts_a_blocking_read_under_sa_restart),
	TEST(select_and_epoll_are_level_triggered),
	TEST(every_hit_wakes_an_edge_triggered_waiter),
	TEST(a_hit_wakes_every_poller),
	TEST(every_hit_sends_sigio),
	TEST(mmap_is_one_read_only_page),
	TEST(a_private_mapping_may_be_written_and_changes_nothing),
	TEST(a_counter_mapping_outlives_close_and_goes_on_counting),
	TEST(a_childs_counter_mapping_holds_the_context),
	TEST(duplicates_share_the_context),
	TEST(close_of_the_last_reference_ends_all),
	TEST(threads_and_sharers_of_the_memory_are_the_owner),
	TEST(fork_is_an_invalidation_of_written_private_memory),
	TEST(a_forked_childs_own_mappings_cause_nothing),
	TEST(a_forked_child_shares_the_queue),
	TEST(after_exec_the_descriptor_works_but_never_fires),
	TEST(a_descriptor_outlives_its_opener),
	TEST(the_drivers_own_test),
	TEST(unregister_and_read_while_handling_an_event),
	TEST(regions_one_byte_short_still_hit),
	TEST(unload_is_refused_while_in_use),
	TEST(fdinfo_tells_what_is_watched),
};

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "--after-exec"))
		return after_exec(atoi(argv[2]), strtoull(argv[3], NULL, 10));
	return RUN_TESTS(tests, argc, argv, 60);
}
