/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A client without any library: the device by system call instructions alone. Its exit code is 0, or the number of
 * the step that went wrong.
 */
#include <asm/unistd.h>
#define O_RDONLY_NONBLOCK 0x800
#define PAGE 4096

	.intel_syntax noprefix
	.section .rodata
path:	.asciz "/dev/ummunotify"

	.bss
	.balign 16
records: .skip 4096
region:	.skip 32
polled:	.skip 8

	.text
	.globl _start
_start:
	mov r15d, 1			# open
	mov eax, __NR_open
	lea rdi, [rip + path]
	mov esi, O_RDONLY_NONBLOCK
	xor edx, edx
	syscall
	test rax, rax
	js failed
	mov ebx, eax

	mov r15d, 2			# the counter's page
	mov eax, __NR_mmap
	xor edi, edi
	mov esi, 8
	mov edx, 1
	mov r10d, 1
	mov r8d, ebx
	xor r9d, r9d
	syscall
	cmp rax, -4095
	jae failed
	mov r12, rax
	cmp qword ptr [r12], 0
	jne failed

	mov r15d, 3			# three pages, written to
	mov eax, __NR_mmap
	xor edi, edi
	mov esi, 3 * PAGE
	mov edx, 3
	mov r10d, 0x22
	mov r8, -1
	xor r9d, r9d
	syscall
	cmp rax, -4095
	jae failed
	mov r13, rax
	mov byte ptr [r13], 1
	mov byte ptr [r13 + PAGE], 1
	mov byte ptr [r13 + 2 * PAGE], 1

	mov r15d, 4			# REGISTER_REGION
	lea rdx, [rip + region]
	mov [rdx], r13
	lea rax, [r13 + 3 * PAGE]
	mov [rdx + 8], rax
	mov qword ptr [rdx + 16], 42
	mov eax, __NR_ioctl
	mov edi, ebx
	mov esi, 0x40205502
	syscall
	test rax, rax
	jnz failed

	mov r15d, 5			# not readable
	call poll
	jnz failed

	mov r15d, 6			# munmap of the middle one: before it returns the counter is 1
	mov eax, __NR_munmap
	lea rdi, [r13 + PAGE]
	mov esi, PAGE
	syscall
	test rax, rax
	jnz failed
	cmp qword ptr [r12], 1
	jne failed

	mov r15d, 7			# readable
	call poll
	cmp eax, 1
	jne failed

	mov r15d, 8			# INVAL with a hint, and LAST
	mov eax, __NR_read
	mov edi, ebx
	lea rsi, [rip + records]
	mov edx, 4096
	mov r14, rsi
	syscall
	cmp rax, 64
	jne failed
	cmp dword ptr [r14], 0
	jne failed
	cmp dword ptr [r14 + 4], 1
	jne failed
	lea rax, [r13 + PAGE]
	cmp [r14 + 8], rax
	jne failed
	lea rax, [r13 + 2 * PAGE]
	cmp [r14 + 16], rax
	jne failed
	cmp qword ptr [r14 + 24], 42
	jne failed
	cmp dword ptr [r14 + 32], 1
	jne failed
	cmp qword ptr [r14 + 56], 1
	jne failed

	mov r15d, 9			# registers that a call must not change
	cmp edi, ebx
	jne failed
	cmp edx, 4096
	jne failed

	mov r15d, 10			# nothing more: EAGAIN
	call poll
	jnz failed
	mov eax, __NR_read
	mov edi, ebx
	lea rsi, [rip + records]
	mov edx, 4096
	syscall
	cmp rax, -11
	jne failed

	mov r15d, 11			# the counter's page can't be made writable: EACCES
	mov eax, __NR_mprotect
	mov rdi, r12
	mov esi, PAGE
	mov edx, 3
	syscall
	cmp rax, -13
	jne failed

	xor r15d, r15d
failed:
	mov eax, __NR_exit_group
	mov edi, r15d
	syscall

/* poll of the device, at once: eax and the flags say how many are readable. */
poll:
	lea rdi, [rip + polled]
	mov [rdi], ebx
	mov dword ptr [rdi + 4], 1
	mov eax, __NR_poll
	mov esi, 1
	xor edx, edx
	syscall
	test eax, eax
	ret

	.section .note.GNU-stack, "", @progbits
