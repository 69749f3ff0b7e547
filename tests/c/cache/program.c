/* Sends from a temporary block 100 times, and receives into one that stays. Exit code 1 if a call isn't passed on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* Looked up when it runs: no MPI library is here to link with. */
static int (*MPI_Send)(const void *, int, void *, int, int, void *);
static int (*MPI_Recv)(void *, int, void *, int, int, void *, void *);

int main(void)
{
	*(void **)&MPI_Send = dlsym(RTLD_DEFAULT, "MPI_Send");
	*(void **)&MPI_Recv = dlsym(RTLD_DEFAULT, "MPI_Recv");
	if (MPI_Send == NULL || MPI_Recv == NULL)
		return 2;

	const int count = 100000;
	double *kept = calloc((size_t)count, sizeof(double));
	int bad = 0;

	for (int i = 0; i < 100; i++) {
		double *sent = malloc((size_t)count * sizeof(double));

		memset(sent, i, (size_t)count * sizeof(double));
		bad |= MPI_Send(sent, count, (void *)sizeof(double), 1, 7, NULL) != 7;
		bad |= MPI_Send(sent, 3, (void *)sizeof(double), 1, 7, NULL) != 7;
		free(sent);
		bad |= MPI_Recv(kept, count, (void *)sizeof(double), 1, 8, NULL, NULL) != 8;
	}
	free(kept);
	return bad;
}
