/* A process whose first thread has ended goes on as the owner: it opens a second context, and closes one whose
 * counter stays mapped. Says how often each counter moved. */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/ummunotify.h>

static int open_device(const volatile uint64_t **counter)
{
	int fd = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	void *page = fd < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);

	if (page == MAP_FAILED) {
		perror("device");
		exit(1);
	}
	*counter = page;
	return fd;
}

static char *watched_page(int fd, uint64_t cookie)
{
	char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ummunotify_register_ioctl region = {
		.start = (uintptr_t)page, .end = (uintptr_t)page + 4096, .user_cookie = cookie,
	};

	if (page == MAP_FAILED || ioctl(fd, UMMUNOTIFY_REGISTER_REGION, &region)) {
		perror("region");
		exit(1);
	}
	return page;
}

static void *rest(void *first_thread)
{
	const volatile uint64_t *first, *second;
	char *pages[3];
	int fd;

	pthread_join(*(pthread_t *)first_thread, NULL);
	/* The join can be over before the kernel has taken the thread's memory away. */
	usleep(100000);
	fd = open_device(&first);
	pages[0] = watched_page(fd, 1);
	pages[1] = watched_page(fd, 2);
	pages[2] = watched_page(open_device(&second), 1);
	munmap(pages[0], 4096);
	munmap(pages[2], 4096);
	printf("first %d second %d\n", (int)*first, (int)*second);
	close(fd);
	usleep(300000);
	munmap(pages[1], 4096);
	printf("first after close %d\n", (int)*first);
	fflush(stdout);
	exit(0);
}

int main(void)
{
	static pthread_t self, other;

	self = pthread_self();
	if (pthread_create(&other, NULL, rest, &self))
		return 1;
	pthread_exit(NULL);
}
