//! What each layer sees and misses: the one table that `doctor` prints, that the README repeats and that the
//! conformance tests check, both ways: what is called seen must be seen, and what isn't must not be.
//!
//! Only coverage stands here. How many invalidations an operation makes, over which ranges, is written in the
//! tests, which take it from recordings of real kernels and never from this table. Each row of the tests names
//! its row here by its key; they read the table from `ummunotify doctor --coverage`.

use core::fmt;

/// A layer that traps memory operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layer {
    /// libc's own calls, looked at in the process before they are made untrapped. It saves traps of
    /// [`Self::Notify`], on which everything rests, and sees nothing else.
    Inline,
    /// A seccomp filter and a supervisor.
    Notify,
    /// userfaultfd on registered ranges.
    Fault,
    /// ptrace by the supervisor: it stops the same calls and reads them by the same code.
    Trace,
}

impl Layer {
    /// Those that this version has.
    pub const ALL: &[Self] = &[Self::Inline, Self::Notify, Self::Fault, Self::Trace];

    /// The word that stands for it in `--trap`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Notify => "notify",
            Self::Fault => "fault",
            Self::Trace => "trace",
        }
    }
}

/// How faithfully a layer reports an operation; the better comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Sight {
    /// As the kernel module: the same number of invalidations over the same ranges.
    Exact,
    /// At least one invalidation over every page that the module would report; more or wider is allowed.
    Covered,
    /// Not seen: a named gap.
    Unseen,
    /// No system call of the process causes it, so no layer that traps system calls can see it.
    Beyond,
}

impl Sight {
    /// True if the layer reports the operation.
    pub const fn is_seen(self) -> bool {
        matches!(self, Self::Exact | Self::Covered)
    }

    /// The word that stands for it in the output for scripts.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Covered => "covered",
            Self::Unseen => "unseen",
            Self::Beyond => "beyond",
        }
    }
}

impl fmt::Display for Sight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exact => "exact",
            Self::Covered => "covered",
            Self::Unseen => "not seen",
            Self::Beyond => "beyond system calls",
        })
    }
}

/// One kind of memory operation.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Short name, unique in the table.
    pub key: &'static str,
    /// The operation, as a person would name it.
    pub operation: &'static str,
    /// The notify layer: a seccomp filter and a supervisor. The trace layer (ptrace) sees the same: it stops the
    /// same calls and reads them by the same code.
    pub notify: Sight,
    /// The fault layer, userfaultfd, by itself: it hears of an operation late, and stands in for notify only where
    /// that one sees nothing.
    pub fault: Sight,
    /// Why it isn't exact, or what the gap means; empty for exact rows.
    pub note: &'static str,
}

impl Row {
    /// How faithfully that layer reports it.
    pub const fn by(&self, layer: Layer) -> Sight {
        match layer {
            Layer::Inline => Sight::Unseen,
            Layer::Notify | Layer::Trace => self.notify,
            Layer::Fault => self.fault,
        }
    }

    /// How faithfully these layers together report it: as the best of them.
    pub fn by_all(&self, layers: &[Layer]) -> Sight {
        layers.iter().map(|layer| self.by(*layer)).min().unwrap_or(Sight::Unseen)
    }
}

/// Something that isn't an operation and that the emulator doesn't reach.
#[derive(Clone, Copy, Debug)]
pub struct Gap {
    /// Short name, unique in the table.
    pub key: &'static str,
    /// What isn't reached.
    pub what: &'static str,
    /// What that means for a client, and what helps.
    pub note: &'static str,
    /// The layer by which it isn't reached; `None`: by none.
    pub by: Option<Layer>,
}

impl Gap {
    /// Whether it is one where that layer traps.
    pub fn is_of(&self, layer: Layer) -> bool {
        self.by.is_none_or(|by| by == layer)
    }
}

const fn exact(key: &'static str, operation: &'static str) -> Row {
    Row { key, operation, notify: Sight::Exact, fault: Sight::Unseen, note: "" }
}

const fn covered(key: &'static str, operation: &'static str, note: &'static str) -> Row {
    Row { key, operation, notify: Sight::Covered, fault: Sight::Unseen, note }
}

const fn unseen(key: &'static str, operation: &'static str, note: &'static str) -> Row {
    Row { key, operation, notify: Sight::Unseen, fault: Sight::Unseen, note }
}

const fn beyond(key: &'static str, operation: &'static str, note: &'static str) -> Row {
    Row { key, operation, notify: Sight::Beyond, fault: Sight::Beyond, note }
}

/// The same row, which userfaultfd covers by itself.
const fn and_by_fault(row: Row) -> Row {
    Row { fault: Sight::Covered, ..row }
}

/// Every kind of operation, seen ones first. The kernel module reports all of them as the kernel does.
pub const ROWS: &[Row] = &[
    and_by_fault(exact("munmap", "munmap")),
    and_by_fault(exact("map-fixed", "mmap MAP_FIXED over mappings")),
    and_by_fault(exact("mremap", "mremap that moves, shrinks or leaves the old range (DONTUNMAP)")),
    exact("mremap-grow", "mremap MAYMOVE that grows, by the only task of its memory"),
    covered(
        "crowd",
        "mremap that grows and other calls next to holes, while several tasks share the memory",
        "another task may map something between the look and the act",
    ),
    exact("mprotect", "mprotect and pkey_mprotect of touched pages within 1 GiB"),
    covered(
        "mprotect-wide",
        "mprotect and pkey_mprotect of untouched pages or across 1 GiB",
        "where the range begins depends on page tables that can't be read",
    ),
    and_by_fault(exact(
        "madvise-drop",
        "madvise DONTNEED, DONTNEED_LOCKED, FREE, also by process_madvise on oneself",
    )),
    exact("remove", "madvise REMOVE and fallocate PUNCH_HOLE on tmpfs"),
    covered(
        "remove-disk",
        "madvise REMOVE and fallocate PUNCH_HOLE on disk file systems",
        "they may write dirty pages back first",
    ),
    covered(
        "fallocate",
        "fallocate in any other mode but plain allocation",
        "reported as a hole or a truncation",
    ),
    exact("truncate", "ftruncate, truncate and O_TRUNC that shrink a mapped file"),
    covered(
        "path",
        "truncate and O_TRUNC by a path that means something else outside (/proc/self)",
        "counts as each file mapping",
    ),
    covered("guard", "madvise GUARD_INSTALL", "which pages were touched can't be read in time"),
    covered("pageout", "madvise PAGEOUT, COLLAPSE", "the kernel reports page by page"),
    covered("pagemap-scan", "PAGEMAP_SCAN with write protection", "reported whole"),
    and_by_fault(exact("brk", "brk and sbrk that shrink")),
    exact("x32", "calls by x32 numbers, as the calls that they stand for"),
    exact("shm", "shmdt, and shmat SHM_REMAP over a mapping"),
    covered("remap-file-pages", "remap_file_pages", "an obsolete call, reported whole"),
    covered("fork", "fork and clone without CLONE_VM", "which private pages were ever written can't be read"),
    exact("fork-spared", "fork over MADV_DONTFORK and MAP_SHARED memory: not reported"),
    exact(
        "nothing",
        "calls that take nothing away, faults included, and what a forked child does: not reported",
    ),
    covered(
        "refused",
        "calls that the kernel refuses where that can't be foreseen",
        "reported as if they had acted, for some have",
    ),
    covered(
        "foreign-entry",
        "32-bit entry (int 0x80)",
        "reported as everything invalid: every region is queued, without a hint",
    ),
    covered(
        "own-uffd",
        "UFFDIO_WRITEPROTECT, UNREGISTER, MOVE on the application's own userfaultfd",
        "which pages were protected can't be read",
    ),
    covered("numa", "mbind MOVE, move_pages, migrate_pages", "where the pages are now isn't asked"),
    covered(
        "single-page-advice",
        "madvise SOFT_OFFLINE, HWPOISON, UNMERGEABLE",
        "the kernel reports page by page; the first two unmap the page wherever it is mapped",
    ),
    covered(
        "stacked-files",
        "holes and truncation of files on stacked file systems (overlayfs)",
        "the mapping table names another device there: each file mapping on such a file system counts",
    ),
    and_by_fault(unseen(
        "io-uring-madvise",
        "io_uring MADVISE",
        "io_uring bypasses seccomp; userfaultfd, once the process has a ring, tells it without the thread: where \
         trapped calls are on their way the counter moves once too often",
    )),
    unseen(
        "io-uring",
        "io_uring FALLOCATE, FTRUNCATE, OPENAT with O_TRUNC",
        "io_uring bypasses seccomp, and userfaultfd has no event for them; --io-uring=deny refuses rings",
    ),
    unseen(
        "write-back",
        "msync, fsync, sync, O_DIRECT writes, FICLONE that write back shared file pages",
        "not trapped; no data is lost by it, the pages stay",
    ),
    beyond(
        "cow",
        "write faults that copy: after fork, on the zero page, on private file pages",
        "happens in a fault",
    ),
    beyond(
        "foreign-file",
        "truncation or a punched hole of a shared file by another process",
        "the one harmful case: pins don't keep the pages in the file",
    ),
    beyond(
        "foreign-act",
        "soft-dirty clear, /proc/PID/mem, process_madvise from outside",
        "another process acts",
    ),
    beyond(
        "kernel",
        "compaction, NUMA balancing, KSM, khugepaged, reclaim, memory failure, splits of huge pages",
        "the kernel acts; a long-term pin, as RDMA takes it, keeps most of these away",
    ),
];

/// What the emulator doesn't reach, whatever the operation.
pub const GAPS: &[Gap] = &[
    Gap {
        key: "static-exec",
        what: "static executables that a dynamic program starts by execl, fexecve, execveat or a raw call, or under a \
               filter",
        note: "the shim has them started by `ummunotify run`, but for these; a second filter can't be had where the \
               program that starts them has opened the device",
        by: None,
    },
    Gap {
        key: "static-copies",
        what: "copies of the device in a static or attached program at numbers of its own choice (dup2), or received (SCM_RIGHTS)",
        note: "the filter knows the device by its number, from 960 to 1023: such a copy can be polled, passed on and \
               used with ioctl, but not read or mapped",
        by: None,
    },
    Gap {
        key: "static-foreign",
        what: "calls of the device by int 0x80 in a static or attached program",
        note: "what they do to mappings is seen, but open finds no device, and ioctl and read reach a bare pipe",
        by: None,
    },
    Gap {
        key: "static-path",
        what: "stat and access of the device's path in a static or attached program",
        note: "they say ENOENT; open works, with numbers that aren't the lowest free ones",
        by: None,
    },
    Gap {
        key: "static-debugged",
        what: "a static or attached program that is traced when it opens or maps the device",
        note: "it is made to map pages by ptrace, which a debugger has for itself: EPERM; attach it afterwards. So do \
               children of the command where Yama's ptrace_scope isn't 0",
        by: None,
    },
    Gap {
        key: "no-shim",
        what: "programs that were executed without the shim (environment cleared, set-user-ID)",
        note: "they find no device; an inherited device descriptor is a bare pipe there",
        by: None,
    },
    Gap {
        key: "clone-vm",
        what: "CLONE_VM tasks outside the thread group that predate the filter",
        note: "the filter reaches threads only; open the device before such tasks are made",
        by: None,
    },
    Gap {
        key: "foreign-listener",
        what: "by trace, calls that another program's seccomp listener is asked about",
        note: "SECCOMP_RET_USER_NOTIF outranks SECCOMP_RET_TRACE: the tracer isn't told; start the client without it",
        by: Some(Layer::Trace),
    },
    Gap {
        key: "static-trace",
        what: "by trace, static programs",
        note: "their calls of the device are answered through a listener: `run` refuses them where one can't be had, and \
               those that a traced program starts find no device",
        by: Some(Layer::Trace),
    },
    Gap {
        key: "untraced",
        what: "by trace, tasks made with CLONE_UNTRACED",
        note: "nobody traces them: under the filter their calls fail with ENOSYS, without one they go unseen",
        by: Some(Layer::Trace),
    },
    Gap {
        key: "foreign-ring",
        what: "io_uring rings that another process made and handed over",
        note: "no call of this process shows them, so by default userfaultfd doesn't watch; --trap notify,fault does, and may \
               tell the first of their changes late",
        by: None,
    },
    Gap {
        key: "mapped-later",
        what: "io_uring MADVISE on memory that was mapped into a region after its registration",
        note: "userfaultfd watches what is mapped there; the next registration of any region catches up",
        by: None,
    },
    Gap {
        key: "raw-open",
        what: "an open of the device by a raw system call instruction",
        note: "the shim replaces libc's functions, syscall(3) included; inline assembly goes past it",
        by: None,
    },
];

/// The row of that name.
pub fn row(key: &str) -> Option<&'static Row> {
    ROWS.iter().find(|r| r.key == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique() {
        let mut keys: Vec<_> = ROWS.iter().map(|r| r.key).chain(GAPS.iter().map(|g| g.key)).collect();
        keys.sort_unstable();
        let all = keys.len();
        keys.dedup();
        assert_eq!(keys.len(), all);
    }

    #[test]
    fn whatever_is_not_exact_says_why() {
        for r in ROWS {
            assert_eq!(r.note.is_empty(), r.notify == Sight::Exact, "{}", r.key);
            assert_eq!(row(r.key).map(|x| x.operation), Some(r.operation));
        }
        assert!(GAPS.iter().all(|g| !g.note.is_empty()));
    }

    #[test]
    fn layers_see_what_their_best_sees() {
        let row = row("munmap").expect("it is in the table");
        assert_eq!(row.by_all(&[Layer::Notify]), Sight::Exact);
        assert_eq!(row.by_all(&[]), Sight::Unseen);
        assert_eq!(row.by_all(&[Layer::Fault]), Sight::Covered);
        assert_eq!(row.by_all(Layer::ALL), Sight::Exact);
        assert!(Sight::Exact < Sight::Covered && Sight::Covered < Sight::Unseen);
    }

    #[test]
    fn readme_names_every_gap() {
        let readme = include_str!("../../README.md");
        for what in ROWS.iter().filter(|r| !r.by_all(Layer::ALL).is_seen()).map(|r| r.operation) {
            assert!(readme.contains(what), "README.md doesn't name this gap: {what}");
        }
        for gap in GAPS {
            assert!(readme.contains(gap.what), "README.md doesn't name this gap: {}", gap.what);
        }
    }
}
