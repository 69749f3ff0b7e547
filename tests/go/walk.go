// SPDX-License-Identifier: MIT OR Apache-2.0

// The operations walk (tests/c/operations) in a program in Go: every call that a row makes is made by the system call
// instruction of Go's runtime, among that one's threads.
package main

// #include <stdlib.h>
// extern int walk_main(int argc, char **argv);
import "C"

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

//export go_call
func go_call(number, a, b, c, d, e, f C.long, failure *C.int) C.long {
	result, _, errno := syscall.RawSyscall6(uintptr(number), uintptr(a), uintptr(b), uintptr(c), uintptr(d), uintptr(e),
		uintptr(f))
	*failure = C.int(errno)
	return C.long(result)
}

func main() {
	runtime.LockOSThread()
	arguments := make([]*C.char, len(os.Args)+1)
	for i, argument := range os.Args {
		arguments[i] = C.CString(argument)
	}
	vector := (**C.char)(C.calloc(C.size_t(len(arguments)), C.size_t(unsafe.Sizeof(arguments[0]))))
	copy(unsafe.Slice(vector, len(arguments)), arguments)
	os.Exit(int(C.walk_main(C.int(len(os.Args)), vector)))
}
