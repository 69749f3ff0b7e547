/*
 * A call at a patched site changes what the call itself changes, and nothing else: all registers, the arithmetic
 * flags, vector and mask registers and the red zone are as they were. And at each single instruction on the way an
 * unwinder finds its way to the caller.
 *
 *   exact
 *
 * Exit code 3: libc isn't patched.
 */
#define _GNU_SOURCE
#include "inline.h"
#include <execinfo.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>

struct state {
	uint64_t rdi, rsi, rdx, r10, r8, r9; /* 0: arguments */
	uint64_t rbx, rbp, r12, r13, r14, r15; /* 48 */
	uint64_t flags, rax; /* 96, 104 */
	uint64_t red_zone[16]; /* 112 */
	uint64_t mask[8]; /* 240 */
	uint64_t unused[2];
	uint8_t vector[32][64] __attribute__((aligned(64))); /* 320 */
};

_Static_assert(offsetof(struct state, vector) == 320, "the assembly knows it");

struct state before, after;
uint64_t entry_address, saved_stack, wide;

/* A site of our own: it leads to the entry as a stub does. Loads `before`, makes the call, stores `after`. */
void make_call(void);
__asm__(
	".text\n.type make_call,@function\nmake_call:\n"
	"push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
	"mov %rsp, saved_stack(%rip)\n"
	"lea before(%rip), %rax\n"
	"cmpq $2, wide(%rip)\n"
	"jb 1f\n"
	".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
	"vmovdqu64 320+64*\\n(%rax), %zmm\\n\n.endr\n"
	".irp n,0,1,2,3,4,5,6,7\nkmovq 240+8*\\n(%rax), %k\\n\n.endr\n"
	"jmp 3f\n"
	"1: cmpq $1, wide(%rip)\n"
	"jb 2f\n"
	".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nvmovdqu 320+64*\\n(%rax), %ymm\\n\n.endr\n"
	"jmp 3f\n"
	"2:\n.irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nmovdqu 320+64*\\n(%rax), %xmm\\n\n.endr\n"
	"3: mov 0(%rax), %rdi; mov 8(%rax), %rsi; mov 16(%rax), %rdx; mov 24(%rax), %r10\n"
	"mov 32(%rax), %r8; mov 40(%rax), %r9; mov 48(%rax), %rbx; mov 56(%rax), %rbp\n"
	"mov 64(%rax), %r12; mov 72(%rax), %r13; mov 80(%rax), %r14; mov 88(%rax), %r15\n"
	"push 96(%rax); popfq\n"
	".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
	"mov 112+8*\\n(%rax), %rcx; mov %rcx, -8-8*\\n(%rsp)\n.endr\n"
	"mov 104(%rax), %eax\n"
	"mov entry_address(%rip), %rcx\n"
	"lea 4f(%rip), %r11\n"
	"jmp *%rcx\n"
	"syscall\n"
	"4: lea after(%rip), %rcx\n"
	"mov %rax, 104(%rcx)\n"
	".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
	"mov -8-8*\\n(%rsp), %rax; mov %rax, 112+8*\\n(%rcx)\n.endr\n"
	"pushfq; pop %rax; mov %rax, 96(%rcx)\n"
	"mov %rdi, 0(%rcx); mov %rsi, 8(%rcx); mov %rdx, 16(%rcx); mov %r10, 24(%rcx)\n"
	"mov %r8, 32(%rcx); mov %r9, 40(%rcx); mov %rbx, 48(%rcx); mov %rbp, 56(%rcx)\n"
	"mov %r12, 64(%rcx); mov %r13, 72(%rcx); mov %r14, 80(%rcx); mov %r15, 88(%rcx)\n"
	"cmpq $2, wide(%rip)\n"
	"jb 1f\n"
	".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
	"vmovdqu64 %zmm\\n, 320+64*\\n(%rcx)\n.endr\n"
	".irp n,0,1,2,3,4,5,6,7\nkmovq %k\\n, 240+8*\\n(%rcx)\n.endr\n"
	"vzeroupper\n"
	"jmp 3f\n"
	"1: cmpq $1, wide(%rip)\n"
	"jb 2f\n"
	".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nvmovdqu %ymm\\n, 320+64*\\n(%rcx)\n.endr\n"
	"vzeroupper\n"
	"jmp 3f\n"
	"2:\n.irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nmovdqu %xmm\\n, 320+64*\\n(%rcx)\n.endr\n"
	"3: mov saved_stack(%rip), %rax\n"
	"cmp %rsp, %rax\n"
	"je 5f\n"
	"ud2\n"
	"5: pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
	"ret\n.size make_call, . - make_call\n");

static int failures;
static unsigned long calls;

/* CF, PF, AF, ZF, SF, OF. */
#define FLAGS 0x8d5UL

static void random_bytes(void *to, size_t size)
{
	for (uint8_t *byte = to; size > 0; size--)
		*byte++ = (uint8_t)rand();
}

static long call(const char *what, long number, long a, long b, long c, long d, long e, long f)
{
	random_bytes(&before, sizeof(before));
	before.rdi = a, before.rsi = b, before.rdx = c, before.r10 = d, before.r8 = e, before.r9 = f;
	before.rax = number;
	memset(before.unused, 0, sizeof(before.unused));
	before.flags = 0x202 | ((uint64_t)rand() & FLAGS);
	memset(&after, 0, sizeof(after));
	make_call();
	calls++;
	struct state expected = before;

	expected.rax = after.rax;
	/* By it a new task would find its way back. */
	if (number == SYS_clone3)
		expected.r9 = after.r9;
	expected.flags = (expected.flags & FLAGS) | (after.flags & ~FLAGS);
	if (wide < 2) {
		size_t registers = 16, bytes = wide ? 32 : 16;

		memcpy(expected.mask, after.mask, sizeof(after.mask));
		for (size_t i = 0; i < 32; i++)
			for (size_t at = i < registers ? bytes : 0; at < 64; at++)
				expected.vector[i][at] = after.vector[i][at];
	}
	if (memcmp(&expected, &after, sizeof(after)) != 0) {
		size_t at = 0;

		while (((uint8_t *)&expected)[at] == ((uint8_t *)&after)[at])
			at++;
		printf("%s: changed byte %zu of the state: %02x instead of %02x, vectors of %d bytes\n", what, at,
		       ((uint8_t *)&after)[at], ((uint8_t *)&expected)[at], 16 << wide);
		failures++;
	}
	return (long)after.rax;
}

static void expect(const char *what, long got, long wanted)
{
	if (got != wanted) {
		printf("%s: %ld instead of %ld\n", what, got, wanted);
		failures++;
	}
}

static int device;
static volatile uint64_t *counter;
/* A thread that doesn't share signal handlers can't be: the call goes by the gate for tasks, and fails. */
static struct clone_args no_thread = { .flags = CLONE_VM | CLONE_THREAD };

/* Every way that a call can take. */
static void all_ways(void)
{
	uint64_t was = *counter;
	char *p = pages_at(NULL, 4);

	expect("miss", call("miss", SYS_munmap, (long)p, PAGE, 1, 2, 3, 4), 0);
	expect("miss counted", (long)(*counter - was), 0);
	register_pages(device, p + PAGE, 3, 1);
	expect("hit", call("hit", SYS_munmap, (long)(p + PAGE), PAGE, 1, 2, 3, 4), 0);
	expect("hit counted", (long)(*counter - was), 1);
	expect("second hit", call("second hit", SYS_munmap, (long)(p + 2 * PAGE), PAGE, 1, 2, 3, 4), 0);
	expect("second hit counted", (long)(*counter - was), 2);
	expect("hole", call("hole", SYS_munmap, (long)(p + 2 * PAGE), PAGE, 1, 2, 3, 4), 0);
	expect("hole counted", (long)(*counter - was), 2);
	expect("trapped", call("trapped", SYS_mprotect, (long)(p + 3 * PAGE), PAGE, PROT_READ, 2, 3, 4), 0);
	expect("trapped counted", (long)(*counter - was), 3);
	expect("left", call("left", SYS_madvise, (long)(p + 3 * PAGE), PAGE, MADV_WILLNEED, 2, 3, 4), 0);
	expect("refused", call("refused", SYS_munmap, (long)p + 1, PAGE, 1, 2, 3, 4), -22);
	expect("task", call("task", SYS_clone3, (long)&no_thread, sizeof(no_thread), 1, 2, 3, 4), -22);
	long mapped = call("mmap", SYS_mmap, 0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect("mmap", mapped > 0, 1);
	expect("unmapped", call("unmapped", SYS_munmap, mapped, PAGE, 1, 2, 3, 4), 0);
	unregister_pages(device, 1);
	munmap(p, 4 * PAGE);
	struct ummunotify_event events[8];

	while (read(device, events, sizeof(events)) > 0)
		;
}

/* ---- a stack that is discarded below its end ---- */

/* Calls madvise on the pages below the one that the stack's end lies in, with `left` bytes of that page in use. What
 * lies below the stack's end is nobody's: natively nothing can be lost. */
static __attribute__((noinline)) void discard_below(size_t left)
{
	uintptr_t here = (uintptr_t)__builtin_frame_address(0);
	uintptr_t page = (here & ~(PAGE - 1)) - PAGE;
	volatile char *room = __builtin_alloca(here - page - left);

	room[0] = 1;
	calls++;
	expect("madvise below the stack", madvise((void *)(page - 16 * PAGE), 16 * PAGE, MADV_DONTNEED), 0);
}

/* ---- unwinding at each instruction ---- */

static void *wanted_caller;
static const uint8_t *stub;
static volatile unsigned long steps, in_stub, lost;
static volatile uintptr_t last_pc;

/* The unwinder fell over what it was told at `last_pc`. */
static void crashed(int number, siginfo_t *info, void *context)
{
	(void)number, (void)context;
	printf("crash at address %p while unwinding from %#lx after %lu steps\n", info->si_addr,
	       (unsigned long)last_pc, steps);
	_exit(1);
}

static void step(int number, siginfo_t *info, void *context)
{
	uintptr_t pc = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
	void *frames[64];
	int depth, found = 0;

	last_pc = pc;
	depth = backtrace(frames, 64);

	(void)number, (void)info;
	steps++;
	for (int i = 0; i < depth; i++)
		found |= frames[i] == wanted_caller;
	if (found)
		return;
	if (pc - (uintptr_t)stub < 32) {
		/* Three instructions in libc's page that no table knows: the trace ends there. */
		in_stub++;
	} else if (lost++ < 20) {
		printf("no way from %#lx to the caller; %d frames\n", (unsigned long)pc, depth);
	}
}

#define TRAP_FLAG(operation) \
	__asm__ volatile("pushfq; " operation " (%%rsp); popfq" ::: "memory", "cc")

/* With a frame pointer: pushf moves the stack pointer where no table says so. */
static __attribute__((noinline, optimize("no-omit-frame-pointer"))) void stepped_munmap(void *p)
{
	wanted_caller = __builtin_return_address(0);
	TRAP_FLAG("orq $0x100,");
	munmap(p, PAGE);
	TRAP_FLAG("andq $~0x100,");
}

static __attribute__((noinline, optimize("no-omit-frame-pointer"))) long stepped_task(void)
{
	uint64_t entry = entry_address;
	long result = SYS_clone3;

	wanted_caller = __builtin_return_address(0);
	TRAP_FLAG("orq $0x100,");
	__asm__ volatile("lea 1f(%%rip), %%r11; jmp *%%rcx; syscall; 1:"
			 : "+a"(result), "+c"(entry)
			 : "D"(&no_thread), "S"(sizeof(no_thread))
			 : "r9", "r11", "memory", "cc");
	TRAP_FLAG("andq $~0x100,");
	return result;
}

static void unwinding(void)
{
	struct sigaction action = { .sa_sigaction = step, .sa_flags = SA_SIGINFO };
	void *frames[4];
	char *p = pages_at(NULL, 3);

	backtrace(frames, 4);
	must(sigaction(SIGTRAP, &action, NULL) == 0, "sigaction");
	action.sa_sigaction = crashed;
	must(sigaction(SIGSEGV, &action, NULL) == 0, "sigaction");
	stepped_munmap(p);
	unsigned long miss = steps;

	register_pages(device, p + PAGE, 2, 2);
	/* The first has a byte written into the pipe, with signals blocked: a step would be the end. */
	munmap(p + PAGE, PAGE);
	stepped_munmap(p + 2 * PAGE);
	unregister_pages(device, 2);
	printf("%lu steps, %lu of them of a miss; %lu in a stub, %lu lost\n", steps, miss, in_stub, lost);
	if (lost > 0 || miss < 50 || steps < 3 * miss || in_stub > 8)
		failures++;
	steps = 0;
	expect("task, stepped", stepped_task(), -22);
	printf("%lu steps of a task, %lu lost\n", steps, lost);
	if (lost > 0 || steps < 50)
		failures++;
}

int main(void)
{
	char *argument = NULL;

	setvbuf(stdout, argument, _IOLBF, 0);
	device = open_device(&counter);
	struct patched site = patched((void *)munmap);

	if (site.stub == NULL) {
		printf("libc's munmap isn't patched\n");
		return 3;
	}
	stub = site.stub;
	entry_address = site.entry;
	wide = __builtin_cpu_supports("avx512bw") ? 2 : __builtin_cpu_supports("avx") ? 1 : 0;
	for (int i = 0; i < 300; i++)
		all_ways();
	for (size_t left = 64; left < 3000; left += 16)
		discard_below(left);
	unwinding();
	printf("%lu calls, vectors of %d bytes, %d failures\n", calls, 16 << wide, failures);
	return failures > 0;
}
