/*
 * How long a race goes on: ROUNDS rounds, and from there until LEAST of them have shown what they are to show. How
 * many do is the scheduler's doing, and a race in which none did proves nothing. It gives up a minute after its
 * rounds; who started it sees by its figures what is lacking.
 */
#ifndef BOUT_H
#define BOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define BOUT_PATIENCE 60

struct bout {
	uint64_t rounds, least;
	/* When it gives up, in seconds of the monotonic clock; 0 while it makes its rounds. */
	_Atomic int64_t due;
};

static inline void bout_begin(struct bout *bout, const char *rounds, const char *least)
{
	bout->rounds = strtoull(rounds, NULL, 10);
	bout->least = strtoull(least, NULL, 10);
}

/* Whether round number `round`, from 1, is to be made, when `shown` have shown something. For any number of threads. */
static inline bool bout_goes_on(struct bout *bout, uint64_t round, uint64_t shown)
{
	struct timespec now;
	int64_t due = 0;

	if (round <= bout->rounds)
		return true;
	if (shown >= bout->least)
		return false;
	clock_gettime(CLOCK_MONOTONIC, &now);
	if (atomic_compare_exchange_strong(&bout->due, &due, now.tv_sec + BOUT_PATIENCE))
		return true;
	return now.tv_sec < due;
}

#endif
