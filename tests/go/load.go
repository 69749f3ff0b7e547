// SPDX-License-Identifier: MIT OR Apache-2.0

// A Go program under load that is attached to and detached from while it runs, and checks all that it does. Its runtime
// makes its system calls itself, moves its goroutines between threads, and interrupts them with signals.
//
// Of the device it says "device N;" when it found it for the Nth time, and "lost N;" when it was gone again. SIGTERM
// ends it: "ok ..." and 0 if nothing was wrong.
package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
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

var (
	stop     atomic.Bool
	failures atomic.Int64
	rounds   atomic.Int64
)

func fail(format string, values ...any) {
	failures.Add(1)
	fmt.Printf("FAIL "+format+"\n", values...)
}

func digest() string {
	sum := sha256.Sum256([]byte("x"))
	for i := 0; i < 500; i++ {
		sum = sha256.Sum256(sum[:])
	}
	return fmt.Sprintf("%x", sum)
}

func objects() {
	made := map[int][]byte{}
	for i := 0; i < 500; i++ {
		made[i] = make([]byte, 1000+i)
		made[i][i] = byte(i)
	}
	for i, bytes := range made {
		if len(bytes) != 1000+i || bytes[i] != byte(i) {
			fail("an object has changed: %d", i)
		}
	}
}

func sleeps() {
	start := time.Now()
	time.Sleep(5 * time.Millisecond)
	if time.Since(start) < 5*time.Millisecond {
		fail("a sleep was cut short")
	}
}

func files() {
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil || len(text) < 20 {
		fail("a file: %v", err)
	}
}

func pipes(from, to int) {
	for want := byte(0); want < 50; want++ {
		got := []byte{0}
		if _, err := syscall.Write(to, []byte{want}); err != nil {
			fail("write: %v", err)
		}
		for {
			n, err := syscall.Read(from, got)
			if err == syscall.EINTR {
				continue
			}
			if n != 1 || got[0] != want {
				fail("read %d, %d instead of %d: %v", n, got[0], want, err)
			}
			break
		}
	}
}

func useDevice(cookie uint64) bool {
	fd, err := syscall.Open("/dev/ummunotify", syscall.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if err != syscall.ENOENT {
			fail("open: %v", err)
		}
		return false
	}
	defer syscall.Close(fd)
	memory, err := syscall.Mmap(fd, 0, 8, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		if err != syscall.ENODEV {
			fail("mmap of the device: %v", err)
		}
		return false
	}
	defer syscall.Munmap(memory)
	counter := (*uint64)(unsafe.Pointer(&memory[0]))
	p, _, errno := syscall.Syscall6(syscall.SYS_MMAP, 0, 4*page, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON, ^uintptr(0), 0)
	if errno != 0 {
		fail("mmap: %v", errno)
		return false
	}
	defer syscall.Syscall(syscall.SYS_MUNMAP, p, 4*page, 0)
	before := atomic.LoadUint64(counter)
	r := region{start: uint64(p), end: uint64(p) + 2*page, cookie: cookie}
	_, _, errno = syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), register, uintptr(unsafe.Pointer(&r)))
	if errno != 0 {
		if errno != syscall.ENODEV {
			fail("REGISTER_REGION: %v", errno)
		}
		return false
	}
	if _, _, errno = syscall.Syscall(syscall.SYS_MUNMAP, p+page, page, 0); errno != 0 {
		fail("munmap: %v", errno)
	}
	if atomic.LoadUint64(counter) == before {
		fail("MISSED: the counter didn't move")
	}
	found := false
	for {
		events := make([]event, 16)
		n, _, errno := syscall.Syscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), 16*32)
		runtime.KeepAlive(events)
		switch {
		case errno == syscall.EINTR:
			continue
		case errno == syscall.ENODEV && found:
			return false
		case errno != 0:
			fail("read: %v, found %v", errno, found)
			return false
		}
		for _, e := range events[:n/32] {
			found = found || e.kind == 0 && e.word == cookie
			if e.kind == 1 {
				if !found {
					fail("MISSED: LAST without a record")
				}
				return true
			}
		}
	}
}

func main() {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	want := digest()
	var all sync.WaitGroup
	work := func(do func()) {
		all.Add(1)
		go func() {
			defer all.Done()
			for !stop.Load() {
				do()
				rounds.Add(1)
				time.Sleep(500 * time.Microsecond)
			}
		}()
	}
	work(func() {
		if digest() != want {
			fail("a digest has changed")
		}
	})
	work(objects)
	work(sleeps)
	work(files)
	work(func() {
		runtime.GC()
		time.Sleep(20 * time.Millisecond)
	})
	var ends [2]int
	if err := syscall.Pipe(ends[:]); err != nil {
		fail("pipe: %v", err)
	}
	work(func() { pipes(ends[0], ends[1]) })
	here, was, cookie := 0, false, uint64(0)
	work(func() {
		cookie++
		is := useDevice(cookie)
		if is && !was {
			here++
			fmt.Printf("device %d;\n", here)
		}
		if was && !is {
			fmt.Printf("lost %d;\n", here)
		}
		was = is
	})
	fmt.Println("ready")
	<-term
	stop.Store(true)
	all.Wait()
	fmt.Printf("ok %d; %d failures\n", rounds.Load(), failures.Load())
	if failures.Load() != 0 {
		os.Exit(1)
	}
}
