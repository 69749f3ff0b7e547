"""What memory the device costs, in the process that has it open and beside it. To be run by `ummunotify run`; root sees more.

Prints lines of a name and a number of bytes: memory-context (what a context with 10 regions has touched), memory-resident
(library and supervisor), memory-region (each of 1,000,000, registered in random order).
"""

import fcntl
import os
import random
import struct

REGISTER = 0x40205502
REGIONS = 1_000_000


def register(device, n):
    start = 0x100000 + n * 8192
    fcntl.ioctl(device, REGISTER, struct.pack("QQQII", start, start + 4096, n, 0, 0))


def mappings(words):
    """Ranges and names of this process's mappings whose name holds one of the words, with resident bytes."""
    found = []
    for line in open("/proc/self/smaps"):
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            name = line[73:].strip() or fields[-1]
            found.append([fields[0], name, 0])
        elif fields[0] == "Rss:":
            found[-1][2] = int(fields[1]) * 1024
    return [entry for entry in found if any(word in entry[1] for word in words)]


def touched():
    """Bytes of the shared memory that are there, whichever process touched them."""
    total = 0
    for place, _, resident in mappings(["memfd:ummunotify"]):
        first, last = (part.lstrip("0") or "0" for part in place.split("-"))
        try:
            total += os.stat(f"/proc/self/map_files/{first}-{last}").st_blocks * 512
        except PermissionError:
            total += resident
    return total


def supervisor():
    """The process number of the one that holds our shared memory."""
    place, _, _ = mappings(["memfd:ummunotify-arena"])[0]
    inode = next(line.split()[4] for line in open("/proc/self/maps") if line.startswith(place))
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{number}/comm").read().strip() != "ummunotify-sup":
                continue
            for descriptor in os.scandir(f"/proc/{number}/fd"):
                if "ummunotify-arena" in os.readlink(descriptor.path) and str(os.stat(descriptor.path).st_ino) == inode:
                    return number
        except OSError:
            continue
    raise SystemExit("memory.py: no supervisor holds this process's arena")


def resident(number):
    """Resident bytes of a process, without shared memory."""
    fields = dict(line.split(":", 1) for line in open(f"/proc/{number}/status") if line.startswith("Rss"))
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


device = os.open("/dev/ummunotify", os.O_RDONLY | os.O_NONBLOCK)
order = list(range(REGIONS))
random.Random(1).shuffle(order)
for n in order[:10]:
    register(device, n)
context = touched()
print("memory-context", context)
print("memory-resident", sum(entry[2] for entry in mappings(["libummunotify_shim"])) + resident(supervisor()))
for n in order[10:]:
    register(device, n)
print("memory-region", (touched() - context) / (REGIONS - 10))
