/*
 * The emulator's coverage table, as `ummunotify doctor --coverage` prints it, held against what was seen: each
 * row of the walk names its row there, and each row there must have been put to the test.
 */
#define _GNU_SOURCE
#include "walk.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct entry {
	char key[32];
	enum sight sight;
	/* Rows of the walk that name it; those that were performed. */
	int rows, performed;
	/* Performed rows that were held to the exact value; that were reported; that only the module reports. */
	int exact, reported, missed;
	char reason[200];
};

static struct entry entries[64];
static int entry_count;

static const char *const sight_names[] = { "exact", "covered", "unseen", "beyond" };

const char *sight_name(enum sight sight)
{
	return sight_names[sight];
}

void coverage_read(const char *path)
{
	FILE *file = fopen(path, "re");
	char line[512];

	if (file == NULL) {
		printf("%s: %s\n", path, strerror(errno));
		exit(2);
	}
	while (fgets(line, sizeof(line), file) != NULL) {
		struct entry *entry = &entries[entry_count];
		char word[16];

		must(entry_count < (int)(sizeof(entries) / sizeof(entries[0])));
		must(sscanf(line, "%31s %15s", entry->key, word) == 2);
		for (entry->sight = SIGHTS; entry->sight > 0; entry->sight--) {
			if (strcmp(sight_names[entry->sight - 1], word) == 0)
				break;
		}
		must(entry->sight-- > 0);
		entry_count++;
	}
	fclose(file);
	must(entry_count > 0);
}

static struct entry *find(const char *key)
{
	for (int i = 0; i < entry_count; i++) {
		if (strcmp(entries[i].key, key) == 0)
			return &entries[i];
	}
	printf("the coverage table has no row %s\n", key);
	exit(2);
}

enum sight coverage_of(const char *key)
{
	return find(key)->sight;
}

void coverage_skip(const char *key, const char *reason)
{
	struct entry *entry = find(key);

	entry->rows++;
	snprintf(entry->reason, sizeof(entry->reason), "%s", reason);
}

void coverage_performed(const char *key, int exactly, int reported, int by_module)
{
	struct entry *entry = find(key);

	entry->rows++;
	entry->performed++;
	entry->exact += exactly;
	entry->reported += reported;
	entry->missed += by_module && !reported;
}

int coverage_finish(void)
{
	int failures = 0;

	for (int i = 0; i < entry_count; i++) {
		const struct entry *e = &entries[i];
		const char *lack = NULL;

		if (e->sight == SEEN_EXACTLY && e->exact == 0)
			lack = "is called exact, and no row was held to that";
		else if (e->sight == SEEN_COVERED && e->reported == 0)
			lack = "is called covered, and no row was reported";
		else if (e->sight > SEEN_COVERED && e->missed == 0)
			lack = "is called unseen, and no row was performed that the module would report";
		if (lack == NULL)
			continue;
		if (e->rows > 0 && e->performed == 0) {
			printf("skip coverage  %-55s not performed: %s\n", e->key, e->reason);
			continue;
		}
		printf("     the coverage table's row %s %s\nFAIL coverage  %s\n", e->key, lack, e->key);
		failures++;
	}
	return failures;
}
