/*
 * Says nonsense to its supervisor: at the addresses of the supervisor and of the context, connection after
 * connection, packets of every length, with descriptors that mean nothing. Then it connects and says nothing, more often than
 * there are threads to listen, and keeps it so. The device must work as before, other opens included.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ummunotify.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* WIRE_VERSION: what the other version says is refused before it is looked at. */
#define VERSION 3UL
#define LONGEST 200

static int reached;

static void send_packet(int socket, const void *bytes, size_t length, int descriptor)
{
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { (void *)bytes, length };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

	if (descriptor >= 0) {
		struct cmsghdr *head;

		message.msg_control = control;
		message.msg_controllen = sizeof(control);
		head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(head), &descriptor, sizeof(int));
	}
	sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* A connection to one of the abstract addresses of emulator/abi/src/wire.rs, which begin with a zero byte; -1. */
static int connect_to(const char *prefix, unsigned long number)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	size_t length = 1 + sprintf(address.sun_path + 1, "ummunotify-%s-%016lx", prefix, number);
	int socket_fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	if (socket_fd < 0)
		return -1;
	if (connect(socket_fd, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + length) != 0) {
		close(socket_fd);
		return -1;
	}
	return socket_fd;
}

static void shout(const char *prefix, unsigned long number)
{
	for (unsigned round = 0; round < 64; round++) {
		uint32_t words[LONGEST / 4];
		int socket_fd = connect_to(prefix, number);

		if (socket_fd < 0)
			continue;
		reached++;
		for (size_t i = 0; i < LONGEST / 4; i++)
			words[i] = (uint32_t)random();
		/* Every other packet has the right magic, version and a number near those of the operations. */
		words[0] = round % 2 ? 0x4d4d5531 : words[0];
		words[1] = round % 2 ? (uint32_t)VERSION : words[1];
		words[2] = round % 2 ? round / 2 % 20 : words[2];
		send_packet(socket_fd, words, round % 4 == 1 || round % 4 == 3 ? 64 : random() % LONGEST,
			    (int)(round % 3) - 1);
		close(socket_fd);
	}
}

/* Says nothing, on more connections than 64 that are served at once. They stay. */
static int fall_silent(const char *prefix, unsigned long number)
{
	int silent = 0;

	for (int i = 0; i < 80; i++)
		silent += connect_to(prefix, number) >= 0;
	return silent;
}

int main(void)
{
	int device = open("/dev/ummunotify", O_RDONLY | O_NONBLOCK);
	char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ummunotify_register_ioctl region = { (uintptr_t)page, (uintptr_t)page + 4096, 7, 0, 0 };
	struct ummunotify_event events[4];
	struct stat status;
	/* The call by which a library asks for its supervisor (HELLO_PRCTL and the version of the protocol). */
	long token = device < 0 ? 0 : syscall(SYS_prctl, 0x554d4d55UL, VERSION, 0UL, 0UL, 0UL);

	if (device < 0 || page == MAP_FAILED || fstat(device, &status) != 0 || token <= 0 || ioctl(device, UMMUNOTIFY_REGISTER_REGION, &region))
		return perror("start"), 2;
	shout("sup", token);
	shout("ctx", status.st_ino);
	munmap(page, 4096);
	if (read(device, events, sizeof(events)) != 2 * sizeof(*events) || events[0].user_cookie_counter != 7)
		return fprintf(stderr, "the device doesn't work any more\n"), 1;
	int silent = fall_silent("sup", token) + fall_silent("ctx", status.st_ino);
	int other = open("/dev/ummunotify", O_RDONLY);

	if (other < 0 || close(other) != 0)
		return perror("open beside silent connections"), 1;
	printf("connections=%d silent=%d\n", reached, silent);
	return reached == 0 || silent != 160;
}
