// SPDX-License-Identifier: MIT OR Apache-2.0

// A client of the device in Go, whose runtime makes its system calls itself: it copies paths before it passes them,
// runs on many threads, and interrupts them with signals.
package main

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const (
	register = 0x40205502
	page     = 4096
)

type region struct {
	start, end, cookie uint64
	flags, reserved    uint32
}

type event struct {
	kind, flags              uint32
	hintStart, hintEnd, word uint64
}

func must(good bool, what string, err error) {
	if !good {
		fmt.Printf("FAIL %s: %v\n", what, err)
		os.Exit(1)
	}
}

func open(flags int) int {
	fd, err := syscall.Open("/dev/ummunotify", syscall.O_RDONLY|flags, 0)
	must(err == nil, "open", err)
	return fd
}

func counterOf(fd int) *uint64 {
	memory, err := syscall.Mmap(fd, 0, 8, syscall.PROT_READ, syscall.MAP_SHARED)
	must(err == nil, "mmap", err)
	return (*uint64)(unsafe.Pointer(&memory[0]))
}

func pages(n uintptr) uintptr {
	p, _, errno := syscall.Syscall6(syscall.SYS_MMAP, 0, n*page, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON, ^uintptr(0), 0)
	must(errno == 0, "mmap of memory", errno)
	return p
}

func watch(fd int, p, n uintptr, cookie uint64) {
	r := region{start: uint64(p), end: uint64(p + n*page), cookie: cookie}
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), register, uintptr(unsafe.Pointer(&r)))
	must(errno == 0, "REGISTER_REGION", errno)
}

func unmap(p, n uintptr) {
	_, _, errno := syscall.Syscall(syscall.SYS_MUNMAP, p, n*page, 0)
	must(errno == 0, "munmap", errno)
}

func read(fd int) []event {
	events := make([]event, 128)
	n, _, errno := syscall.Syscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), 128*32)
	runtime.KeepAlive(events)
	must(errno == 0, "read", errno)
	return events[:n/32]
}

func main() {
	fd := open(syscall.O_NONBLOCK)
	counter := counterOf(fd)
	before := atomic.LoadUint64(counter)
	p := pages(3)
	watch(fd, p, 3, 42)
	unmap(p+page, 1)
	must(atomic.LoadUint64(counter) == before+1, "counter", nil)
	events := read(fd)
	must(len(events) == 2 && events[0].word == 42 && events[0].hintStart == uint64(p+page) &&
		events[1].kind == 1 && events[1].word == before+1, fmt.Sprint("events ", events), nil)

	// A blocking read on a thread of its own, while the runtime collects garbage and sends its signals.
	blocking := open(0)
	got := make(chan []event)
	go func() { got <- read(blocking) }()
	stop := make(chan bool)
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
				garbage := make([]byte, 1<<20)
				garbage[len(garbage)-1] = 1
				runtime.GC()
			}
		}
	}()
	q := pages(1)
	watch(blocking, q, 1, 7)
	time.Sleep(50 * time.Millisecond)
	unmap(q, 1)
	select {
	case events = <-got:
		must(len(events) == 2 && events[0].word == 7, fmt.Sprint("blocking read ", events), nil)
	case <-time.After(10 * time.Second):
		must(false, "a blocking read that wakes", nil)
	}
	close(stop)
	fmt.Println("ok")
}
