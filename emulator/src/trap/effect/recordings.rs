//! Rows of recordings of the mmu notifier on Linux 5.10, 6.1, 6.12 and 7.3, each under the name that it bears
//! there, with the ranges as they were recorded. A row without a figure for 5.10 wasn't recorded there and is
//! left out.
//!
//! Exact rows give the same ranges in the same order; covered ones give at least the recorded pages.

use super::fake::*;
use super::*;
use crate::target::maps::{Name, VmFlags};
use crate::target::{Descriptor, FileIdentity, PathTarget};
use crate::trap::operation::{MREMAP_DONTUNMAP, MREMAP_FIXED, MREMAP_MAYMOVE, Operation as Op};

/// What a row asks for.
#[derive(Clone, Copy, Debug)]
enum Want {
    /// These ranges on every kernel.
    Same(&'static str),
    /// On 5.10, 6.1, 6.12 and 7.3.
    Each([&'static str; 4]),
    /// At least these.
    Covers(&'static str),
}
use Want::{Covers, Each, Same};

#[track_caller]
fn row(name: &str, maps: &[Mapping], op: Op, want: Want) {
    row_with(name, maps, op, want, |fake| fake);
}

#[track_caller]
fn row_with(name: &str, maps: &[Mapping], op: Op, want: Want, prepare: impl Fn(Fake) -> Fake) {
    for (i, kernel) in KERNELS.iter().enumerate() {
        let mut target = prepare(Fake::new(kernel, maps));
        let got = match effect(&op, &mut target) {
            Effect::Pieces(pieces) => pieces,
            Effect::All(reason) => panic!("{name} on {kernel}: everything, because of {reason:?}"),
        };
        let within = |range: &PageRange| operation_reaches(&op, range);
        assert!(got.iter().all(within), "{name} on {kernel}: {got:x?} is beyond {:x?}", op.reach());
        match want {
            Same(text) => assert_eq!(got, recorded(text), "{name} on {kernel}"),
            Each(texts) => assert_eq!(got, recorded(texts[i]), "{name} on {kernel}"),
            Covers(text) => {
                for range in recorded(text) {
                    let covered = got.iter().any(|g| g.start <= range.start && g.end >= range.end);
                    assert!(covered, "{name} on {kernel}: {range:x?} isn't in {got:x?}");
                }
            }
        }
        // With other tasks, at least the same is reported, in whatever pieces.
        let mut target = prepare(Fake::new(kernel, maps));
        target.alone = false;
        if let Effect::Pieces(more) = effect(&op, &mut target) {
            for range in &got {
                let covered = more.iter().any(|m| m.start <= range.start && m.end >= range.end);
                assert!(covered, "{name} on {kernel} with threads: {range:x?} isn't in {more:x?}");
            }
        }
        // Nothing readable: everything, or the ranges that the registers tell.
        let mut target = prepare(Fake::new(kernel, maps));
        target.opaque = true;
        if let Effect::Pieces(blind) = effect(&op, &mut target) {
            assert!(got.iter().all(|g| blind.contains(g)), "{name} on {kernel} unseen: {blind:x?}");
        }
    }
}

fn operation_reaches(op: &Op, range: &PageRange) -> bool {
    op.reach().ranges().any(|r| r.start <= range.start && range.end <= r.end)
}

fn munmap(start: u64, pages: u64) -> Op {
    Op::Munmap { start, len: pages * P }
}

fn fixed(start: u64, pages: u64, fd: i32) -> Op {
    let flags = if fd < 0 { 0x32 } else { 0x12 };
    Op::MmapFixed { start, len: pages * P, flags, fd, offset: 0 }
}

fn mremap(start: u64, old: u64, new: u64, flags: u64, destination: u64) -> Op {
    Op::Mremap { start, old_len: old * P, new_len: new * P, flags, destination }
}

fn mprotect(start: u64, pages: u64, prot: u8) -> Op {
    Op::Mprotect { start, len: pages * P, prot: prot.into(), pkey: None }
}

fn madvise(start: u64, pages: u64, advice: i32) -> Op {
    Op::Madvise { start, len: pages * P, advice }
}

const MOVE: u64 = MREMAP_MAYMOVE | MREMAP_FIXED;
const DONTNEED: i32 = 4;
const FREE: i32 = 8;
const REMOVE: i32 = 9;
const FD: i32 = 5;
const INO: u64 = 77;

/// Four pages of anonymous memory: the usual area.
fn four() -> Vec<Mapping> {
    vec![anonymous(A, 4, RW)]
}

/// Three mappings of two pages.
fn three(prots: [u8; 3]) -> Vec<Mapping> {
    prots.iter().enumerate().map(|(i, prot)| anonymous(A + 2 * i as u64 * P, 2, *prot)).collect()
}

fn locked(mut m: Mapping) -> Mapping {
    m.flags = Some(VmFlags { locked: true, ..VmFlags::default() });
    m
}

fn with_file(size: u64) -> impl Fn(Fake) -> Fake {
    move |fake| fake.open(FD, SHM, INO, size * P, FileKind::Tmpfs)
}

#[test]
fn unmapping() {
    row("munmap populated 4p", &four(), munmap(A, 4), Same("[A+0,A+4)UNMAP"));
    row("munmap hole (no VMA) 4p", &[anonymous(A + 4 * P, 4, RW)], munmap(A, 4), Same(""));
    row("munmap 1p in middle of populated 4p", &four(), munmap(A + P, 1), Same("[A+1,A+2)UNMAP"));
    row("munmap 6p over 3 VMAs (rw,r,rw)", &three([RW, R, RW]), munmap(A, 6), Same("[A+0,A+6)UNMAP"));
    let holey = [anonymous(A, 2, RW), anonymous(A + 3 * P, 3, RW)];
    row("munmap 6p over VMA,hole,VMA", &holey, munmap(A, 6), Same("[A+0,A+6)UNMAP"));
    let inner = [anonymous(A + 2 * P, 2, RW)];
    row("munmap 6p: hole,2p VMA,hole", &inner, munmap(A, 6), Same("[A+0,A+6)UNMAP"));
    row("munmap PROT_NONE reserve 4p", &[anonymous(A, 4, NONE)], munmap(A, 4), Same("[A+0,A+4)UNMAP"));
    row("munmap EINVAL (unaligned)", &four(), Op::Munmap { start: A + 1, len: 4 * P }, Same(""));
    row("munmap of length 0", &four(), Op::Munmap { start: A, len: 0 }, Same(""));
    row("munmap mlocked", &[locked(anonymous(A, 4, RW))], munmap(A, 4), Same("[A+0,A+4)UNMAP"));
    let mixed = [locked(anonymous(A, 2, RW)), anonymous(A + 2 * P, 2, RW)];
    row("munmap across mlocked+plain", &mixed, munmap(A, 4), Same("[A+0,A+4)UNMAP"));
}

#[test]
fn mapping_over() {
    row("MAP_FIXED over populated 4p", &four(), fixed(A, 4, -1), Same("[A+0,A+4)UNMAP"));
    row("MAP_FIXED 1p over middle of populated", &four(), fixed(A + P, 1, -1), Same("[A+1,A+2)UNMAP"));
    row("MAP_FIXED into hole", &[], fixed(A, 4, -1), Same(""));
    row("MAP_FIXED failing (bad fd) over populated", &four(), fixed(A, 4, 99), Same(""));
    let packet = |fake: Fake| {
        let mut fake = fake;
        fake.descriptors.insert(8, Descriptor { file: None, readable: true, writable: true });
        fake
    };
    let driver = "[A+0,A+2)UNMAPx2";
    row_with(
        "MAP_FIXED failing in the driver (packet socket)",
        &[anonymous(A, 2, RW)],
        fixed(A, 2, 8),
        Covers(driver),
        packet,
    );
}

#[test]
fn remapping() {
    let to_hole = "[A+0,A+4)UNMAPx2";
    row("mremap move FIXED populated 4p -> hole", &four(), mremap(A, 4, 4, MOVE, C), Same(to_hole));
    let both = [anonymous(A, 4, RW), anonymous(C, 4, RW)];
    row(
        "mremap move FIXED populated -> populated",
        &both,
        mremap(A, 4, 4, MOVE, C),
        Same("[C+0,C+4)UNMAP [A+0,A+4)UNMAPx2"),
    );
    row(
        "mremap move FIXED DONTUNMAP populated 4p -> hole",
        &four(),
        mremap(A, 4, 4, MOVE | MREMAP_DONTUNMAP, C),
        Same("[A+0,A+4)UNMAP"),
    );
    row(
        "mremap move DONTUNMAP anywhere",
        &four(),
        mremap(A, 4, 4, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0),
        Same("[A+0,A+4)UNMAP"),
    );
    row("mremap shrink 4p -> 2p", &four(), mremap(A, 4, 2, 0, 0), Same("[A+2,A+4)UNMAP"));
    let two = [anonymous(A, 2, RW)];
    row("mremap grow in place 2p -> 4p", &two, mremap(A, 2, 4, 0, 0), Same(""));
    row("mremap grow MAYMOVE, gap free (in place)", &two, mremap(A, 2, 4, MREMAP_MAYMOVE, 0), Same(""));
    let blocked = [anonymous(A, 2, RW), anonymous(A + 2 * P, 1, R)];
    row(
        "mremap grow MAYMOVE 2p -> 4p (blocked: moves)",
        &blocked,
        mremap(A, 2, 4, MREMAP_MAYMOVE, 0),
        Same("[A+0,A+2)UNMAPx2"),
    );
    row(
        "mremap FIXED shrinking 6p->3p into hole",
        &[anonymous(A, 6, RW)],
        mremap(A, 6, 3, MOVE, C),
        Same("[A+3,A+6)UNMAP [A+0,A+3)UNMAP [A+0,A+3)UNMAP"),
    );
    let holey = [anonymous(A, 2, RW), anonymous(A + 3 * P, 3, RW)];
    let several = "[A+0,A+2)UNMAP [A+0,A+2)UNMAP [A+3,A+6)UNMAP [A+3,A+6)UNMAP";
    row("mremap FIXED 6p: VMA,hole,VMA", &holey, mremap(A, 6, 6, MOVE, C), Each(["", "", "", several]));
    let over = [holey[0], holey[1], anonymous(C, 6, RW)];
    let several = "[C+0,C+2)UNMAP [A+0,A+2)UNMAPx2 [C+3,C+6)UNMAP [A+3,A+6)UNMAPx2";
    row(
        "the same onto mappings: up to 6.12 the destination is gone when it fails",
        &over,
        mremap(A, 6, 6, MOVE, C),
        Each(["[C+0,C+6)UNMAP", "[C+0,C+6)UNMAP", "[C+0,C+6)UNMAP", several]),
    );
    let duplicate = mremap(A, 0, 4, MREMAP_MAYMOVE, 0);
    row("mremap old_size 0 (duplicate)", &[memfd(A, 4, INO, 0)], duplicate, Same(""));
    row(
        "the same onto mappings",
        &[memfd(A, 4, INO, 0), anonymous(C, 4, RW)],
        mremap(A, 0, 4, MOVE, C),
        Same("[C+0,C+4)UNMAP"),
    );
    row("mremap of nothing", &[], mremap(A, 4, 4, MOVE, C), Same(""));
    let late = [anonymous(A + P, 3, RW), anonymous(C, 4, RW)];
    row("mremap with a hole at the start", &late, mremap(A, 4, 4, MOVE, C), Same(""));
    row("mremap onto itself (EINVAL)", &four(), mremap(A, 4, 4, MOVE, A + P), Same(""));
}

#[test]
fn protecting() {
    row("mprotect RW->R populated", &four(), mprotect(A, 4, R), Same("[A+0,A+4)PROT_VMA"));
    row("mprotect R->R (no change)", &[anonymous(A, 4, R)], mprotect(A, 4, R), Same(""));
    row("mprotect R->RW populated", &[anonymous(A, 4, R)], mprotect(A, 4, RW), Same("[A+0,A+4)PROT_VMA"));
    row("mprotect RW->NONE populated", &four(), mprotect(A, 4, NONE), Same("[A+0,A+4)PROT_VMA"));
    let none = [anonymous(A, 4, NONE)];
    row("mprotect NONE->RW populated", &none, mprotect(A, 4, RW), Same("[A+0,A+4)PROT_VMA"));
    row("mprotect RW->R 1p middle", &four(), mprotect(A + P, 1, R), Same("[A+1,A+2)PROT_VMA"));
    row(
        "mprotect(R) over 3 VMAs (rw,none,rw)",
        &three([RW, NONE, RW]),
        mprotect(A, 6, R),
        Same("[A+0,A+2)PROT_VMA [A+2,A+4)PROT_VMA [A+4,A+6)PROT_VMA"),
    );
    row(
        "mprotect(R) over 3 VMAs (rw,R,rw): middle unchanged",
        &three([RW, R, RW]),
        mprotect(A, 6, R),
        Same("[A+0,A+2)PROT_VMA [A+4,A+6)PROT_VMA"),
    );
    let holey = [anonymous(A, 2, RW), anonymous(A + 3 * P, 3, RW)];
    row("mprotect(R) running into a hole", &holey, mprotect(A, 6, R), Same("[A+0,A+2)PROT_VMA"));
    let large = [anonymous(A, 2048, RW)];
    row(
        "mprotect RW->R never-touched 8 MiB, no page table",
        &large,
        mprotect(A, 2048, R),
        Covers("[A+0,A+2048)PROT_VMA"),
    );
    let huge = [anonymous(A, 1_048_576, RW)];
    row(
        "mprotect 4 GiB, touched in GiB 1 (+768) and GiB 3",
        &huge,
        mprotect(A, 1_048_576, R),
        Covers("[A+262656,A+524288)PROT_VMA [A+786432,A+1048576)PROT_VMA [A+262144,A+1048576)PROT_VMA"),
    );
    let pkey = |pkey| Op::Mprotect { start: A, len: 4 * P, prot: R.into(), pkey };
    row("pkey_mprotect(pkey -1) RW->R", &four(), pkey(None), Same("[A+0,A+4)PROT_VMA"));
    let read_only = [anonymous(A, 4, R)];
    row("pkey_mprotect with a key, rwx unchanged", &read_only, pkey(Some(1)), Covers("[A+0,A+4)"));
    row_with("R under READ_IMPLIES_EXEC", &read_only, mprotect(A, 4, R), Covers("[A+0,A+4)"), |fake| Fake {
        read_implies_exec: true,
        ..fake
    });
}

#[test]
fn advising() {
    row("MADV_DONTNEED populated", &four(), madvise(A, 4, DONTNEED), Same("[A+0,A+4)CLEAR"));
    row(
        "MADV_DONTNEED over 3 VMAs",
        &three([RW, R, RW]),
        madvise(A, 6, DONTNEED),
        Same("[A+0,A+2)CLEAR [A+2,A+4)CLEAR [A+4,A+6)CLEAR"),
    );
    let holey = [anonymous(A, 2, RW), anonymous(A + 3 * P, 3, RW)];
    row(
        "madvise DONTNEED over VMA,hole,VMA",
        &holey,
        madvise(A, 6, DONTNEED),
        Same("[A+0,A+2)CLEAR [A+3,A+6)CLEAR"),
    );
    let half_locked = [anonymous(A, 2, RW), locked(anonymous(A + 2 * P, 2, RW))];
    row(
        "madvise DONTNEED over VMA,locked VMA",
        &half_locked,
        madvise(A, 4, DONTNEED),
        Same("[A+0,A+2)CLEAR"),
    );
    row("MADV_FREE populated", &four(), madvise(A, 4, FREE), Same("[A+0,A+4)CLEAR"));
    let with_file = [anonymous(A, 2, RW), memfd(A + 2 * P, 2, INO, 0), anonymous(A + 4 * P, 2, RW)];
    row("MADV_FREE up to a file", &with_file, madvise(A, 6, FREE), Same("[A+0,A+2)CLEAR"));
    let shared = [memfd(A, 4, INO, 0)];
    row("MADV_REMOVE memfd shared populated", &shared, madvise(A, 4, REMOVE), Same("[A+0,A+4)CLEAR"));
    row("MADV_DONTNEED memfd shared populated", &shared, madvise(A, 4, DONTNEED), Same("[A+0,A+4)CLEAR"));
    row("MADV_REMOVE on anon private (EINVAL)", &four(), madvise(A, 4, REMOVE), Same(""));
    let parts = [memfd(A, 2, INO, 0), memfd(A + 2 * P, 2, INO, 2), memfd(A + 4 * P, 2, INO, 4)];
    row(
        "MADV_REMOVE 6p over 3 VMAs (middle R only)",
        &[parts[0], Mapping { prot: R, ..parts[1] }, parts[2]],
        madvise(A, 6, REMOVE),
        Same("[A+0,A+2)CLEAR [A+2,A+4)CLEAR [A+4,A+6)CLEAR"),
    );
    let twice = [memfd(A, 2, INO, 0), Mapping { shared: false, ..memfd(C, 2, INO, 0) }];
    row(
        "MADV_REMOVE with a second private mapping",
        &twice,
        madvise(A, 2, REMOVE),
        Same("[A+0,A+2)CLEAR [C+0,C+2)CLEAR"),
    );
    let pages = "[A+0,A+1)CLEAR [A+1,A+2)CLEAR [A+2,A+3)CLEAR [A+3,A+4)CLEAR";
    row("MADV_PAGEOUT anon (no swap)", &four(), madvise(A, 4, 21), Covers(pages));
    row(
        "MADV_DONTNEED_LOCKED (5.18)",
        &[locked(anonymous(A, 4, RW))],
        madvise(A, 4, 24),
        Each(["", "[A+0,A+4)CLEAR", "[A+0,A+4)CLEAR", "[A+0,A+4)CLEAR"]),
    );
    row("MADV_GUARD_INSTALL (6.13)", &four(), madvise(A, 4, 102), Each(["", "", "", "[A+0,A+4)CLEAR"]));
    row(
        "GUARD_INSTALL over 3 touched VMAs",
        &three([RW, RW, RW]),
        madvise(A, 6, 102),
        Each(["", "", "", "[A+0,A+2)CLEAR [A+2,A+4)CLEAR [A+4,A+6)CLEAR"]),
    );
    row("MADV_SOFT_OFFLINE 1p", &four(), madvise(A, 1, 101), {
        Each(["", "[A+0,A+1)CLEAR", "[A+0,A+1)CLEAR", "[A+0,A+1)CLEAR"])
    });
    let eight = [anonymous(A, 8, RW)];
    let merged = "[A+1,A+2)CLEAR [A+2,A+3)CLEAR [A+3,A+4)CLEAR [A+7,A+8)CLEAR";
    row("MADV_UNMERGEABLE 8p", &eight, madvise(A, 8, 13), Covers(merged));
    let collapsed = "[A+0,A+512)CLEAR";
    row("MADV_COLLAPSE 2 MiB (6.1)", &[anonymous(A, 512, RW)], madvise(A, 512, 25), {
        Each(["", collapsed, collapsed, collapsed])
    });
    let own = |fake: Fake| Fake { own_pidfd: Some(FD), ..fake.words(0x1000, &[A, 4 * P]) };
    let process = |pidfd| Op::ProcessMadvise { pidfd, vector: 0x1000, count: 1, advice: DONTNEED };
    let expected = Each(["", "", "", "[A+0,A+4)CLEAR"]);
    row_with("process_madvise(self, DONTNEED) (6.13)", &four(), process(FD), expected, own);
    row_with("process_madvise of another process", &four(), process(FD + 1), Same(""), |fake| Fake {
        own_pidfd: Some(FD),
        ..fake.words(0x1000, &[A, 4 * P])
    });
}

#[test]
fn the_heap() {
    let heap = |pages| [Mapping { name: Name::Heap, ..anonymous(A, pages, RW) }];
    let brk = |page: u64| Op::Brk { end: A + page * P };
    row("brk grow 4p", &heap(4), brk(8), Same(""));
    row("brk grow from nothing", &[], brk(4), Same(""));
    row("brk shrink 4p populated", &heap(4), brk(0), Same("[A+0,A+4)UNMAP"));
    row("brk shrink 4p -> 2p", &heap(4), brk(2), Same("[A+2,A+4)UNMAP"));
    let middle = Op::Brk { end: A + 2 * P - 100 };
    row("brk to the middle of a page", &heap(4), middle, Same("[A+2,A+4)UNMAP"));
    row_with("brk below the heap (refused)", &heap(4), Op::Brk { end: P }, Same(""), |fake| Fake {
        heap_floor: A,
        ..fake
    });
    // Another mapping was made over its end: brk unmaps that too.
    let over = [heap(2)[0], memfd(A + 2 * P, 2, INO, 0)];
    row("brk shrink over a file", &over, brk(1), Same("[A+1,A+4)UNMAP"));
}

#[test]
fn system_v_memory() {
    let part = |page: u64, pages| Mapping { name: Name::SysV, ..memfd(A + page * P, pages, 3, page) };
    let shmdt = Op::Shmdt { start: A };
    row("shmdt populated 4p", &[part(0, 4)], shmdt, Same("[A+0,A+4)UNMAP"));
    row(
        "shmdt after mprotect split it in 3",
        &[part(0, 2), Mapping { prot: R, ..part(2, 2) }, part(4, 2)],
        shmdt,
        Same("[A+0,A+2)UNMAP [A+2,A+4)UNMAP [A+4,A+6)UNMAP"),
    );
    let again = Mapping { name: Name::SysV, ..memfd(A + 4 * P, 4, 3, 0) };
    row("shmdt of one of two attachments", &[part(0, 4), again], shmdt, Same("[A+0,A+4)UNMAP"));
    row("shmdt of other memory (EINVAL)", &four(), shmdt, Same(""));
    let over = Op::ShmatRemap { id: 3, start: A };
    let segment = |fake: Fake| {
        let mut fake = fake;
        fake.segments.insert(3, 4 * P - 5);
        fake
    };
    let six = [anonymous(A, 6, RW)];
    row_with("shmat SHM_REMAP over populated anon", &six, over, Same("[A+0,A+4)UNMAP"), segment);
    row_with("shmat SHM_REMAP into a hole", &[], over, Same(""), segment);
    row("shmat SHM_REMAP of no segment", &six, over, Same(""));
}

#[test]
fn shrinking_files() {
    let truncate = |pages: u64| Op::Ftruncate { fd: FD, len: pages * P };
    let eight = [memfd(A, 8, INO, 0)];
    let tail = Same("[A+4,A+8)CLEARx2");
    row_with("ftruncate memfd 8p -> 4p (mapped 8p, populated)", &eight, truncate(4), tail, with_file(8));
    row_with("ftruncate memfd 4p -> 8p (grow)", &eight, truncate(8), Same(""), with_file(4));
    row_with(
        "ftruncate memfd to 0 under MAP_PRIVATE map",
        &[Mapping { shared: false, ..memfd(A, 4, INO, 0) }],
        truncate(0),
        Same("[A+0,A+4)CLEARx2"),
        with_file(4),
    );
    let twice = [memfd(A, 4, INO, 0), memfd(C, 4, INO, 0)];
    let passes = "[A+2,A+4)CLEAR [C+2,C+4)CLEAR [A+2,A+4)CLEAR [C+2,C+4)CLEAR";
    row_with("ftruncate 4p->2p, mapped twice", &twice, truncate(2), Same(passes), with_file(4));
    row_with("ftruncate to same size", &twice, truncate(4), Same(""), with_file(4));
    let inside = Op::Ftruncate { fd: FD, len: 2 * P - 100 };
    row_with("ftruncate 2p -> 2p-100 (inside the page)", &twice, inside, Same(""), with_file(2));
    row("ftruncate of a bad descriptor", &twice, truncate(0), Same(""));
    let read_only = |fake: Fake| {
        let mut fake = with_file(4)(fake);
        fake.descriptors.get_mut(&FD).unwrap().writable = false;
        fake
    };
    row_with("ftruncate of a read-only descriptor", &twice, truncate(0), Same(""), read_only);

    let open = Op::OpenTruncate { directory: -100, path: 0x2000 };
    let at = |size: u64| {
        move |fake: Fake| {
            let mut fake = fake;
            let file = FileIdentity { device: SHM, inode: INO, size: size * P, kind: FileKind::Tmpfs };
            fake.paths.insert(0x2000, PathTarget::File(file));
            fake
        }
    };
    let all = "[A+0,A+4)CLEAR [C+0,C+4)CLEAR [A+0,A+4)CLEAR [C+0,C+4)CLEAR";
    row_with("O_TRUNC reopen", &twice, open, Same(all), at(4));
    row_with("O_TRUNC reopen of an empty file", &twice, open, Same(""), at(0));
    row_with(
        "truncate 4p->2p by path",
        &twice,
        Op::Truncate { path: 0x2000, len: 2 * P },
        Same(passes),
        at(4),
    );
    let how = Op::Openat2 { directory: -100, path: 0x2000, how: 0x3000, size: 24 };
    row_with("openat2 O_TRUNC", &twice, how, Same(all), |fake| at(4)(fake.words(0x3000, &[0o1001, 0, 0])));
    row_with("openat2 without", &twice, how, Same(""), |fake| at(4)(fake.words(0x3000, &[0o1, 0, 0])));
    row("O_TRUNC of a path that can't be resolved: every file", &twice, open, Covers(all));

    let disk = [Mapping { device: DISK, ..memfd(A, 4, INO, 0) }];
    row_with("ftruncate ext4 4p -> 0", &disk, truncate(0), Same("[A+0,A+4)CLEARx2"), |fake| {
        fake.open(FD, DISK, INO, 4 * P, FileKind::Disk)
    });
}

#[test]
fn punching_holes() {
    let punch = |offset, len| Op::Fallocate { fd: FD, mode: 3, offset, len };
    let eight = [memfd(A, 8, INO, 0)];
    let two = punch(2 * P, 2 * P);
    row_with("fallocate PUNCH_HOLE 2p populated", &eight, two, Same("[A+2,A+4)CLEAR"), with_file(8));
    row_with(
        "PUNCH_HOLE unaligned (1 page + 2 partial)",
        &eight,
        punch(2 * P + 100, 2 * P),
        Same("[A+3,A+4)CLEAR"),
        with_file(8),
    );
    let twice = [memfd(A, 4, INO, 0), memfd(C, 4, INO, 0)];
    row_with(
        "PUNCH_HOLE 2p, file mapped twice",
        &twice,
        punch(0, 2 * P),
        Same("[A+0,A+2)CLEAR [C+0,C+2)CLEAR"),
        with_file(4),
    );
    let parts = [memfd(A, 2, INO, 0), memfd(A + 2 * P, 2, INO, 2), memfd(A + 4 * P, 2, INO, 4)];
    row_with(
        "PUNCH_HOLE 6p over 3 VMAs of one file",
        &parts,
        punch(0, 6 * P),
        Same("[A+0,A+2)CLEAR [A+2,A+4)CLEAR [A+4,A+6)CLEAR"),
        with_file(6),
    );
    let other = [memfd(A, 4, INO + 1, 0)];
    row_with("PUNCH_HOLE of another file", &other, punch(0, 4 * P), Same(""), with_file(4));
    // Not in the recordings; seen in the page table on 6.18.
    row_with("PUNCH_HOLE inside the first page", &eight, punch(0, 100), Same("[A+0,A+8)"), with_file(8));
    let late = punch(10, 100);
    row_with("PUNCH_HOLE inside the first page, later", &eight, late, Same("[A+1,A+8)"), with_file(8));
    row_with("PUNCH_HOLE inside the second page", &eight, punch(P, 100), Same(""), with_file(8));
    // Not in the recordings either; the module reported it on 6.12.
    let disk = [Mapping { device: DISK, ..memfd(A, 8, INO, 0) }];
    let unaligned = punch(2 * P + 100, 2 * P);
    row_with(
        "PUNCH_HOLE unaligned, ext4",
        &disk,
        unaligned,
        Covers("[A+2,A+3) [A+3,A+4) [A+4,A+5)"),
        |fake| fake.open(FD, DISK, INO, 8 * P, FileKind::Disk),
    );

    let zero = Op::Fallocate { fd: FD, mode: 0x10, offset: 2 * P + 1, len: P };
    row_with("ZERO_RANGE", &eight, zero, Covers("[A+2,A+4)"), with_file(8));
    let collapse = Op::Fallocate { fd: FD, mode: 8, offset: 2 * P, len: P };
    row_with("COLLAPSE_RANGE", &eight, collapse, Covers("[A+2,A+8)"), with_file(8));
    let ioctl = Op::SpaceIoctl { fd: FD, mode: 3, argument: 0x4000 };
    row_with("FS_IOC_UNRESVSP64", &eight, ioctl, Same("[A+2,A+4)"), |fake| {
        with_file(8)(fake.words(0x4000, &[0, 2 * P, 2 * P, 0, 0, 0]))
    });
}

#[test]
fn huge_pages() {
    let huge = |start, pages, inode| Mapping { device: HUGE, ..memfd(start, pages, inode, 0) };
    let private = |start, pages| Mapping { shared: false, ..huge(start, pages, 9) };
    let twice = "[A+0,A+1024)UNMAPx2";
    let once = "[A+0,A+1024)UNMAP";
    row("hugetlb munmap 4 MiB", &[private(A, 1024)], munmap(A, 1024), Each([twice, twice, once, once]));
    row(
        "hugetlb shared munmap 4 MiB",
        &[huge(A, 1024, 9)],
        munmap(A, 1024),
        Each([twice, twice, once, once]),
    );
    let first = madvise(A, 512, DONTNEED);
    row("hugetlb MADV_DONTNEED first 2 MiB", &[private(A, 1024)], first, {
        Each(["", "[A+0,A+512)CLEAR [A+0,A+512)UNMAP", "[A+0,A+512)CLEAR", "[A+0,A+512)CLEAR"])
    });
    row("hugetlb mprotect RW->R", &[private(A, 1024)], mprotect(A, 1024, R), Same("[A+0,A+1024)PROT_VMA"));
    let truncate = Op::Ftruncate { fd: FD, len: HUGE_SIZE };
    row_with("hugetlb shared ftruncate 4->2 MiB", &[huge(A, 1024, 9)], truncate, Same("[A+512,A+1024)"), {
        |fake| fake.open(FD, HUGE, 9, 2 * HUGE_SIZE, FileKind::Hugetlb(HUGE_SIZE))
    });
    let over = Op::MmapFixed { start: A, len: P, flags: 0x4_0032, fd: -1, offset: 0 };
    row("MAP_FIXED MAP_HUGETLB of less than a huge page", &[anonymous(A, 512, RW)], over, {
        Same("[A+0,A+512)")
    });
}

#[test]
fn new_tasks() {
    let dont_fork = VmFlags { dont_copy: true, ..VmFlags::default() };
    let wiped = VmFlags { wipe_on_fork: true, ..VmFlags::default() };
    let maps = [
        anonymous(A, 4, RW),
        Mapping { flags: Some(dont_fork), ..anonymous(A + 8 * P, 4, RW) },
        Mapping { flags: Some(wiped), ..anonymous(A + 12 * P, 4, RW) },
        memfd(A + 16 * P, 4, INO, 0),
        Mapping { prot: R, ..anonymous(A + 20 * P, 4, R) },
    ];
    row("fork (whole process; child alive)", &maps[..1], Op::Fork, Same("[A+0,A+4)PROT_PAGE"));
    row("MADV_DONTFORK area: 0 of 6 fork notifications touch it", &maps[1..2], Op::Fork, Same(""));
    row("MAP_SHARED area: 0 of 6 fork notifications touch it", &maps[3..4], Op::Fork, Same(""));
    let both = Same("[A+0,A+4)PROT_PAGE [A+20,A+24)PROT_PAGE");
    row("fork, written then made read-only private area", &maps, Op::Fork, both);
    let clone3 = Op::Clone3 { arguments: 0x5000, size: 88 };
    row_with("clone3(CLONE_VM): a thread", &maps, clone3, Same(""), |f| f.words(0x5000, &[0x3d_0f00]));
    row_with("clone3 without", &maps, clone3, both, |f| f.words(0x5000, &[0]));
    row("clone3 with unreadable arguments: fork", &maps, clone3, both);
}

#[test]
fn moving_pages() {
    let pages = "[A+0,A+1)CLEAR [A+1,A+2)CLEAR [A+2,A+3)CLEAR [A+3,A+4)CLEAR";
    let mbind = Op::Mbind { start: A, len: 4 * P };
    row("mbind(BIND node1, MPOL_MF_MOVE) populated on node0", &four(), mbind, Covers(pages));
    let list = Op::MovePages { pid: 0, count: 4, pages: 0x6000 };
    row_with("move_pages 4p node0->1", &four(), list, Covers(pages), |fake| {
        fake.words(0x6000, &[A, A + P, A + 2 * P, A + 3 * P])
    });
    let other = Op::MovePages { pid: 1, count: 4, pages: 0x6000 };
    row("move_pages of another process", &four(), other, Same(""));
    row_with(
        "UFFDIO_WRITEPROTECT on 4p",
        &four(),
        Op::UffdRange { argument: 0x7000 },
        Covers("[A+0,A+4)PROT_VMA"),
        |fake| fake.words(0x7000, &[A, 4 * P, 1]),
    );
    row_with("UFFDIO_MOVE", &four(), Op::UffdMove { argument: 0x7000 }, Covers("[A+0,A+4)CLEAR"), |fake| {
        fake.words(0x7000, &[C, A, 4 * P, 0, 0])
    });
    row_with(
        "PAGEMAP_SCAN with write-protection",
        &four(),
        Op::PagemapScan { argument: 0x7000 },
        Covers("[A+0,A+4)PROT_VMA"),
        |fake| fake.words(0x7000, &[96, 3, A, A + 4 * P, 0, 0]),
    );
    row_with("PAGEMAP_SCAN without", &four(), Op::PagemapScan { argument: 0x7000 }, Same(""), |fake| {
        fake.words(0x7000, &[96, 0, A, A + 4 * P, 0, 0])
    });
    let mut target = Fake::new("6.1", &four());
    assert_eq!(effect(&Op::MigratePages { pid: 0 }, &mut target), Effect::All(Reason::MigratePages));
    row("remap_file_pages", &[memfd(A, 4, INO, 0)], Op::RemapFilePages { start: A, len: 4 * P }, {
        Covers("[A+0,A+4)UNMAP")
    });
}
