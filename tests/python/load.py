# SPDX-License-Identifier: MIT OR Apache-2.0
"""A Python program under load that is attached to and detached from while it runs, and checks all that it does.

Of the device it says "device N;" when it found it for the Nth time, and "lost N;" when it was gone again. SIGTERM ends
it: "ok ..." and 0 if nothing was wrong.
"""
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import queue
import signal
import struct
import sys
import threading
import time

PAGE = 4096
REGISTER = 0x40205502
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

stop = threading.Event()
failures = []
rounds = {}


def fail(text):
    failures.append(text)
    print("FAIL", text, flush=True)


def worker(work):
    def run():
        while not stop.is_set():
            try:
                work()
            except Exception as e:  # whatever it is, it is wrong
                fail(f"{work.__name__}: {e!r}")
            rounds[work.__name__] = rounds.get(work.__name__, 0) + 1
            time.sleep(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def digest():
    value = b"x"
    for _ in range(200):
        value = hashlib.sha256(value).digest()
    if value.hex()[:16] != DIGEST:
        fail(f"a digest is {value.hex()[:16]}")


def objects():
    data = {str(i): [i, float(i), "é" * (i % 50)] for i in range(500)}
    if json.loads(json.dumps(data)) != data:
        fail("objects have changed")
    big = bytearray(3_000_000)
    big[-1] = 7
    if sum(big) != 7:
        fail("memory has changed")


def files():
    with open("/proc/self/stat") as f:
        if f.read().split()[0] != str(os.getpid()):
            fail("a file has changed")


numbers = queue.Queue(4)


def takes():
    got = [numbers.get() for _ in range(10)]
    if [b - a for a, b in zip(got, got[1:])] != [1] * 9:
        fail(f"a queue is out of order: {got}")


def gives():
    for i in range(10):
        numbers.put(i)


def sleeps():
    start = time.monotonic()
    time.sleep(0.005)
    if time.monotonic() - start < 0.005:
        fail("a sleep was cut short")


def forks():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 7:
        fail("a child ended wrongly")


def use_device(cookie):
    """True if the device was there and told everything."""
    try:
        fd = os.open("/dev/ummunotify", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        counter = mmap.mmap(fd, 8, mmap.MAP_SHARED, mmap.PROT_READ)
        count = lambda: struct.unpack("Q", counter[:8])[0]
        at = libc.mmap(None, 4 * PAGE, 3, 0x22, -1, 0)
        ctypes.memset(at, 1, 4 * PAGE)
        before = count()
        fcntl.ioctl(fd, REGISTER, struct.pack("QQQII", at, at + 2 * PAGE, cookie, 0, 0))
        if libc.munmap(at + PAGE, PAGE) != 0:
            fail("munmap")
        if count() == before:
            fail("MISSED: the counter didn't move")
        found = False
        while True:
            try:
                data = os.read(fd, 4096)
            except OSError as e:
                if e.errno == errno.ENODEV and found:
                    return False
                raise
            for kind, _, _, _, value in struct.iter_unpack("IIQQQ", data):
                found |= kind == 0 and value == cookie
                if kind == 1:
                    if not found:
                        fail("MISSED: LAST without a record")
                    libc.munmap(at, 4 * PAGE)
                    return True
    except OSError as e:
        if e.errno != errno.ENODEV:
            fail(f"the device: {e}")
        return False
    finally:
        os.close(fd)


here, was = 0, False


def device():
    global here, was
    now = use_device(rounds.get("device", 0))
    if now and not was:
        here += 1
        print(f"device {here};", flush=True)
    if was and not now:
        print(f"lost {here};", flush=True)
    was = now


value = b"x"
for _ in range(200):
    value = hashlib.sha256(value).digest()
DIGEST = value.hex()[:16]

signal.signal(signal.SIGTERM, lambda *_: stop.set())
threads = [worker(work) for work in (digest, objects, files, takes, gives, sleeps, device)]
print("ready", flush=True)
while not stop.is_set():
    forks()
    time.sleep(0.02)
for thread in threads[:3] + threads[5:]:
    thread.join()
# The two ends of the queue may wait for each other.
print("ok", " ".join(f"{k} {v}" for k, v in sorted(rounds.items())), f"; {len(failures)} failures", flush=True)
os._exit(1 if failures else 0)
