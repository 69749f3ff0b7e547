// SPDX-License-Identifier: MIT OR Apache-2.0
// A 32-bit program without any library: says so, and waits for the end of its standard input.
	.globl _start
	.text
_start:
	mov $4, %eax
	mov $1, %ebx
	mov $text, %ecx
	mov $6, %edx
	int $0x80
	mov $3, %eax
	xor %ebx, %ebx
	mov $room, %ecx
	mov $1, %edx
	int $0x80
	mov $1, %eax
	xor %ebx, %ebx
	int $0x80
	.data
text:	.ascii "ready\n"
room:	.byte 0
	.section .note.GNU-stack,"",@progbits
