//! Tests of what stands above the single operations: when nothing may be concluded, which file is which, and
//! what happens when nothing can be read.

use super::fake::*;
use super::*;
use crate::target::maps::VmFlags;
use crate::target::{Device, FileIdentity, PathTarget};
use crate::trap::operation::{ADDRESS_END, Operation as Op};

fn pieces(op: Op, target: &mut Fake) -> Vec<PageRange> {
    match effect(&op, target) {
        Effect::Pieces(pieces) => pieces,
        Effect::All(reason) => panic!("everything: {reason:?}"),
    }
}

fn threads(maps: &[Mapping]) -> Fake {
    Fake { alone: false, ..Fake::new("7.3", maps) }
}

/// Rule 1: another thread may map something between the look and the act.
#[test]
fn with_threads_a_hole_is_not_nothing() {
    let four = recorded("[A+0,A+4)");
    assert_eq!(pieces(Op::Munmap { start: A, len: 4 * P }, &mut threads(&[])), four);
    let fixed = Op::MmapFixed { start: A, len: 4 * P, flags: 0x32, fd: -1, offset: 0 };
    assert_eq!(pieces(fixed, &mut threads(&[])), four);
    let holey = [anonymous(A, 1, RW), anonymous(A + 3 * P, 1, RW)];
    let advice = Op::Madvise { start: A, len: 4 * P, advice: 4 };
    assert_eq!(pieces(advice, &mut threads(&holey)), recorded("[A+0,A+1) [A+1,A+3) [A+3,A+4)"));
    let protect = Op::Mprotect { start: A, len: 4 * P, prot: RW.into(), pkey: None };
    assert_eq!(pieces(protect, &mut threads(&holey)), recorded("[A+0,A+1) [A+1,A+3) [A+3,A+4)"));
    let grow = Op::Mremap { start: A, old_len: P, new_len: 2 * P, flags: 1, destination: 0 };
    assert_eq!(pieces(grow, &mut threads(&holey)), recorded("[A+0,A+1)x2"));
    let shmat = Op::ShmatRemap { id: 1, start: A };
    assert!(pieces(shmat, &mut threads(&[])).iter().any(|r| r.start == A && r.end == ADDRESS_END));
}

/// With threads a fork reports the gaps too, each mapping still by itself.
#[test]
fn with_threads_fork_reports_gaps() {
    let got = pieces(Op::Fork, &mut threads(&[anonymous(A, 1, RW), memfd(A + P, 1, 7, 0)]));
    assert!(got.contains(&PageRange::new(A, A + P)));
    assert!(!got.contains(&PageRange::new(A + P, A + 2 * P)), "shared memory isn't copied");
    assert_eq!(got.first().unwrap().start, 0);
    assert_eq!(got.last().unwrap().end, u64::MAX);
}

/// With threads a growing file isn't known to grow, and a path isn't known to stay.
#[test]
fn with_threads_files_are_taken_as_shrinking() {
    let maps = [memfd(A, 4, 7, 0), memfd(C, 4, 8, 0)];
    let mut target = threads(&maps).open(3, SHM, 7, 2 * P, FileKind::Tmpfs);
    let resize = |pages: u64| Op::Ftruncate { fd: 3, len: pages * P };
    assert_eq!(pieces(resize(2), &mut target), recorded("[A+2,A+4)x2"));
    assert_eq!(pieces(resize(8), &mut target), []);
    let file = FileIdentity { device: SHM, inode: 7, size: 0, kind: FileKind::Tmpfs };
    target.paths.insert(9, PathTarget::File(file));
    let open = Op::OpenTruncate { directory: -100, path: 9 };
    assert_eq!(pieces(open, &mut target), recorded("[C+0,C+4) [A+0,A+4) [C+0,C+4) [A+0,A+4)"));
}

/// A lock that another thread may take off stops nothing.
#[test]
fn with_threads_a_lock_stops_nothing() {
    let mut locked = anonymous(A, 1, RW);
    locked.flags = Some(VmFlags { locked: true, ..VmFlags::default() });
    let maps = [locked, anonymous(A + P, 1, RW)];
    let advice = Op::Madvise { start: A, len: 2 * P, advice: 4 };
    assert_eq!(pieces(advice, &mut threads(&maps)), recorded("[A+0,A+1) [A+1,A+2)"));
}

/// Files on stacked file systems are never told apart by device alone.
#[test]
fn files_count_as_equal_when_in_doubt() {
    let on = |device, inode| [Mapping { device, ..memfd(A, 4, inode, 0) }];
    let hits = |device, kind, maps: &[Mapping]| {
        let mut target = Fake::new("6.12", maps).open(3, device, 7, 4 * P, kind);
        !pieces(Op::Ftruncate { fd: 3, len: 0 }, &mut target).is_empty()
    };
    let other_disk = Device { major: 8, minor: 2 };
    assert!(hits(DISK, FileKind::Disk, &on(DISK, 7)), "the file itself");
    assert!(!hits(DISK, FileKind::Disk, &on(DISK, 8)), "another file of that disk");
    assert!(hits(other_disk, FileKind::Disk, &on(DISK, 7)), "equal inodes alone");
    assert!(hits(DISK, FileKind::Disk, &on(OVERLAY, 8)), "a mapping on an overlay");
    assert!(hits(OVERLAY, FileKind::Stacked, &on(DISK, 8)), "a file on an overlay");
    assert!(!hits(OVERLAY, FileKind::Stacked, &on(SHM, 8)), "no overlay shows a memfd");
    assert!(!hits(SHM, FileKind::Tmpfs, &on(OVERLAY, 7)), "a memfd is on no overlay");
    assert!(!hits(OVERLAY, FileKind::Stacked, &[anonymous(A, 4, RW)]), "anonymous memory is no file");
}

/// Reads that fail make everything invalid and say why, but for calls whose registers tell all.
#[test]
fn unreadable_is_everything() {
    let ops = [
        Op::Munmap { start: A, len: P },
        Op::MmapFixed { start: A, len: P, flags: 0x32, fd: -1, offset: 0 },
        Op::Mremap { start: A, old_len: P, new_len: P, flags: 3, destination: C },
        Op::Mprotect { start: A, len: P, prot: 1, pkey: None },
        Op::Madvise { start: A, len: P, advice: 4 },
        Op::ProcessMadvise { pidfd: 3, vector: 0, count: 1, advice: 4 },
        Op::Brk { end: A },
        Op::Shmdt { start: A },
        Op::ShmatRemap { id: 1, start: A },
        Op::Fallocate { fd: 3, mode: 3, offset: 0, len: P },
        Op::SpaceIoctl { fd: 3, mode: 3, argument: 0 },
        Op::Ftruncate { fd: 3, len: 0 },
        Op::Truncate { path: 0, len: 0 },
        Op::OpenTruncate { directory: -100, path: 0 },
        Op::Openat2 { directory: -100, path: 0, how: 0, size: 24 },
        Op::RemapFilePages { start: A, len: P },
        Op::Fork,
        Op::Clone3 { arguments: 0, size: 88 },
        Op::Mbind { start: A, len: P },
        Op::PagemapScan { argument: 0 },
        Op::UffdRange { argument: 0 },
        Op::UffdMove { argument: 0 },
        Op::Foreign { arch: 0, nr: 0 },
    ];
    for op in ops {
        let mut target = Fake { opaque: true, ..Fake::new("7.3", &[anonymous(A, 4, RW)]) };
        assert!(matches!(effect(&op, &mut target), Effect::All(_)), "{op:?}");
    }
    let names: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(names.len(), Reason::ALL.len());
}

/// smaps costs milliseconds in large processes: it is read only where a flag decides.
#[test]
fn flags_are_read_only_where_they_decide() {
    let looks = |op: Op, maps: &[Mapping]| {
        let mut target = Fake::new("7.3", maps);
        effect(&op, &mut target);
        target.looked_at_flags
    };
    let plain = [anonymous(A, 4, RW)];
    let mut locked = plain;
    locked[0].flags = Some(VmFlags { locked: true, ..VmFlags::default() });
    let advice = |advice| Op::Madvise { start: A, len: P, advice };
    assert!(!looks(advice(4), &plain));
    assert!(looks(advice(4), &locked));
    assert!(!looks(advice(24), &locked));
    assert!(!looks(Op::Munmap { start: A, len: P }, &locked));
    assert!(looks(Op::Fork, &plain));
    assert!(!looks(Op::Fork, &[memfd(A, 4, 7, 0)]), "nothing private");
}

/// The calls of a process that lies or errs: no panic, no endless work.
#[test]
fn odd_values_are_survived() {
    let odd = [0, 1, P - 1, P, A, A + P, 1 << 47, ADDRESS_END, 1 << 63, u64::MAX - P, u64::MAX];
    for kernel in KERNELS {
        for alone in [true, false] {
            for a in odd {
                for b in odd {
                    let maps = [
                        anonymous(A, 4, RW),
                        Mapping { device: HUGE, offset: u64::MAX - P, ..memfd(A + (2 << 20), 512, 7, 0) },
                        Mapping {
                            range: PageRange::new(u64::MAX - 2 * P, u64::MAX - P),
                            ..memfd(A, 1, 7, 0)
                        },
                    ];
                    let mut target = Fake {
                        alone,
                        ..Fake::new(kernel, &maps).open(3, HUGE, 7, b, FileKind::Hugetlb(2 << 20))
                    }
                    .words(0, &[a, b, a, b]);
                    for op in [
                        Op::Munmap { start: a, len: b },
                        Op::MmapFixed { start: a, len: b, flags: 0x4_0032 | a << 26, fd: 3, offset: 0 },
                        Op::MmapFixed { start: a, len: b, flags: 0x12, fd: 3, offset: 0 },
                        Op::Mremap { start: a, old_len: b, new_len: a, flags: 3, destination: b },
                        Op::Mremap { start: a, old_len: b, new_len: P, flags: 0, destination: b },
                        Op::Mremap { start: a, old_len: P, new_len: b, flags: 1, destination: 0 },
                        Op::Mprotect { start: a, len: b, prot: 0x0100_0001, pkey: None },
                        Op::Madvise { start: a, len: b, advice: 4 },
                        Op::Madvise { start: a, len: b, advice: 9 },
                        Op::Madvise { start: a, len: b, advice: 25 },
                        Op::ProcessMadvise { pidfd: 3, vector: 0, count: 2, advice: 4 },
                        Op::Brk { end: a },
                        Op::Shmdt { start: a },
                        Op::ShmatRemap { id: 3, start: a },
                        Op::Fallocate { fd: 3, mode: 3, offset: a, len: b },
                        Op::Fallocate { fd: 3, mode: 8, offset: a, len: b },
                        Op::SpaceIoctl { fd: 3, mode: 3, argument: 0 },
                        Op::Ftruncate { fd: 3, len: a },
                        Op::RemapFilePages { start: a, len: b },
                        Op::Mbind { start: a, len: b },
                        Op::MovePages { pid: 0, count: 4, pages: 0 },
                        Op::MovePages { pid: 0, count: b, pages: a },
                        Op::PagemapScan { argument: 0 },
                        Op::UffdRange { argument: 0 },
                        Op::UffdMove { argument: 0 },
                    ] {
                        if let Effect::Pieces(pieces) = effect(&op, &mut target) {
                            assert!(pieces.iter().all(|range| !range.is_empty()), "{op:x?}: {pieces:x?}");
                        }
                    }
                }
            }
        }
    }
}
