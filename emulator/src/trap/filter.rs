//! The seccomp program: [`crate::trap::policy`] as classic BPF.
//!
//! Number and architecture come first and alone decide for most calls. Since Linux 5.11 the kernel runs a new
//! filter once per number with nothing else known (`seccomp_cache_prepare`) and never again runs it for
//! numbers that are allowed all the same; loading any other field first would forfeit that (measured: 1.31
//! instead of 1.04 times the price of an unrelated call). Then come arguments, and last the instruction pointer, but for
//! the few calls that are made most often.

use std::collections::BTreeMap;

use nix::errno::Errno;
use ummunotify_abi::wire::{PRESENT, PRESENT_ERRNO};

use crate::trap::bpf::{Assembler, JUMP_ANY_BIT, JUMP_AT_LEAST, JUMP_EQUAL, Label, SockFilter};
use crate::trap::policy::{
    self, ARCH_I386, ARCH_X86_64, Band, DEVICE, I386, Policy, Rule, Test, X32_BIT, X32_OWN, X86_64,
};

/// `SECCOMP_RET_USER_NOTIF`.
pub const NOTIFY: u32 = 0x7fc0_0000;
/// `SECCOMP_RET_TRACE`, with [`TRACE_DATA`].
pub const TRACE: u32 = 0x7ff0_0000 | TRACE_DATA;
/// By this the tracer tells our filter's stops from those of another one ("UM").
pub const TRACE_DATA: u32 = 0x554d;
/// `SECCOMP_RET_ALLOW`.
pub const ALLOW: u32 = 0x7fff_0000;

/// `SECCOMP_RET_ERRNO`.
const FAIL: u32 = 0x0005_0000;

/// Offsets in `struct seccomp_data`.
const NR: u32 = 0;
const ARCH: u32 = 4;
const INSTRUCTION_POINTER: u32 = 8;
const ARGS: u32 = 16;

/// The filter.
#[derive(Debug)]
pub struct Filter;

impl Filter {
    /// The program that answers [`NOTIFY`] to what `policy` watches and [`ALLOW`] to everything else.
    pub fn build(policy: &Policy) -> Vec<SockFilter> {
        Self::answering(NOTIFY, policy)
    }

    /// The same with [`TRACE`].
    pub fn tracing(policy: &Policy) -> Vec<SockFilter> {
        Self::answering(TRACE, policy)
    }

    fn answering(watched: u32, policy: &Policy) -> Vec<SockFilter> {
        let mut b = Builder::new(policy.device);
        let (native, other, foreign, x32) = (b.asm.label(), b.asm.label(), b.asm.label(), b.asm.label());
        let own = policy.device.map_or(&[][..], |_| DEVICE);
        let rules = merged(X86_64, own);
        if rules.iter().any(|rule| rule.nr == policy::nr::MMAP && rule.test == policy::REPLACES) {
            b.plain_mmap();
        }
        b.asm.load(ARCH);
        b.asm.branch(JUMP_EQUAL, ARCH_X86_64, native, other);

        b.asm.bind(native);
        b.asm.load(NR);
        let (frequent, rest): (Vec<Rule>, Vec<Rule>) =
            rules.into_iter().partition(|rule| FREQUENT.contains(&rule.nr));
        for nr in FREQUENT {
            for rule in frequent.iter().filter(|rule| rule.nr == nr) {
                b.frequent(*rule, watched, policy.gate.map(|gate| gate.calls));
            }
        }
        let mut targets = b.targets(&rest, b.gate);
        targets.push((Key::From(X32_BIT), x32));
        b.tree(&targets);

        b.asm.bind(x32);
        b.asm.and(!X32_BIT);
        let mut targets = b.targets(X86_64, b.gate);
        targets.extend(b.targets(X32_OWN, b.gate));
        b.tree(&targets);

        b.asm.bind(other);
        // x86 has no third architecture; one that came would be asked about rather than missed.
        b.asm.branch(JUMP_EQUAL, ARCH_I386, foreign, b.notify);
        b.asm.bind(foreign);
        b.asm.load(NR);
        let targets = b.targets(I386, b.notify);
        b.tree(&targets);

        b.tests();
        b.end(watched, policy);
        b.asm.finish()
    }

    /// The program that answers EPERM to io_uring_setup, by whatever entry, and asks nobody.
    pub fn without_rings() -> Vec<SockFilter> {
        let mut asm = Assembler::new();
        let (setup, other) = (asm.label(), asm.label());
        asm.load(NR);
        // One number in both tables; x32 has it with a bit of its own.
        asm.and(!X32_BIT);
        asm.branch(JUMP_EQUAL, policy::nr::IO_URING_SETUP, setup, other);
        asm.bind(setup);
        asm.ret(FAIL | Errno::EPERM as u32);
        asm.bind(other);
        asm.ret(ALLOW);
        asm.finish()
    }

    /// The program as bytes, for the wire.
    pub fn bytes(program: &[SockFilter]) -> Vec<u8> {
        let mut out = Vec::with_capacity(size_of_val(program));
        for i in program {
            out.extend_from_slice(&i.code.to_ne_bytes());
            out.extend_from_slice(&[i.jt, i.jf]);
            out.extend_from_slice(&i.k.to_ne_bytes());
        }
        out
    }
}

/// What programs call most often of what is watched: asked for before all else, for what these may cost.
const FREQUENT: [u32; 3] = [policy::nr::MUNMAP, policy::nr::MADVISE, policy::nr::MMAP];

/// Both tables as one, by ascending number; `over` wins.
fn merged(table: &[Rule], over: &[Rule]) -> Vec<Rule> {
    let rules: BTreeMap<u32, Rule> = table.iter().chain(over).map(|rule| (rule.nr, *rule)).collect();
    rules.into_values().collect()
}

#[derive(Clone, Copy)]
enum Key {
    Is(u32),
    From(u32),
}

impl Key {
    fn lowest(self) -> u32 {
        match self {
            Self::Is(n) | Self::From(n) => n,
        }
    }
}

struct Builder {
    asm: Assembler,
    allow: Label,
    notify: Label,
    /// Looks at the instruction pointer before it notifies.
    gate: Label,
    /// The same for calls that make tasks.
    tasks: Label,
    /// Says that the filter is there.
    present: Label,
    band: Option<Band>,
    /// Argument tests to be written behind the trees, each once: test, where it begins, where it notifies.
    tests: Vec<(Test, Label, Label)>,
}

impl Builder {
    fn new(band: Option<Band>) -> Self {
        let mut asm = Assembler::new();
        let [allow, notify, gate, tasks, present] = std::array::from_fn(|_| asm.label());
        Self { asm, allow, notify, gate, tasks, present, band, tests: Vec::new() }
    }

    /// Where each number goes.
    fn targets(&mut self, rules: &[Rule], notify: Label) -> Vec<(Key, Label)> {
        rules
            .iter()
            .map(|rule| {
                let is_task = notify == self.gate && rule.nr == policy::nr::CLONE3;
                let notify = if is_task { self.tasks } else { notify };
                if rule.test == Test::Always {
                    return (Key::Is(rule.nr), notify);
                }
                let known = self.tests.iter().find(|(test, _, to)| *test == rule.test && *to == notify);
                let label = known.map(|(_, label, _)| *label).unwrap_or_else(|| {
                    let label = self.asm.label();
                    self.tests.push((rule.test, label, notify));
                    label
                });
                (Key::Is(rule.nr), label)
            })
            .collect()
    }

    /// A balanced search for the number, which is loaded.
    fn tree(&mut self, keys: &[(Key, Label)]) {
        match keys {
            [] => self.asm.goto(self.allow),
            [(Key::Is(n), to)] => self.asm.branch(JUMP_EQUAL, *n, *to, self.allow),
            [(Key::From(n), to)] => self.asm.branch(JUMP_AT_LEAST, *n, *to, self.allow),
            _ => {
                let (low, high) = keys.split_at(keys.len() / 2);
                let (at_least, below) = (self.asm.label(), self.asm.label());
                self.asm.branch(JUMP_AT_LEAST, high[0].0.lowest(), at_least, below);
                self.asm.bind(below);
                self.tree(low);
                self.asm.bind(at_least);
                self.tree(high);
            }
        }
    }

    /// Lets mmap without MAP_FIXED go before the architecture is known: i386 has link by that number, which isn't watched,
    /// and x32 has numbers of its own.
    fn plain_mmap(&mut self) {
        let [here, allow, next] = [(); 3].map(|()| self.asm.label());
        self.asm.load(NR);
        self.asm.branch(JUMP_EQUAL, policy::nr::MMAP, here, next);
        self.asm.bind(here);
        self.asm.load(low(3));
        self.asm.branch(JUMP_ANY_BIT, policy::MAP_FIXED, next, allow);
        self.asm.bind(allow);
        self.asm.ret(ALLOW);
        self.asm.bind(next);
    }

    /// Tests for one number, which is loaded, and answers at once: what goes another way jumps the least.
    fn frequent(&mut self, rule: Rule, watched: u32, gate: Option<u64>) {
        let [here, next, more, allow, notify] = [(); 5].map(|()| self.asm.label());
        self.asm.branch(JUMP_EQUAL, rule.nr, here, next);
        self.asm.bind(here);
        // A long list comes after the gate.
        let gate_first = matches!(rule.test, Test::Always | Test::OneOf(..));
        if gate_first {
            self.by_gate(gate, allow, more);
        } else {
            self.test(rule.test, more, allow);
        }
        self.asm.bind(allow);
        self.asm.ret(ALLOW);
        self.asm.bind(more);
        let allow = self.asm.label();
        if gate_first {
            self.test(rule.test, notify, allow);
        } else {
            self.by_gate(gate, allow, notify);
        }
        self.asm.bind(allow);
        self.asm.ret(ALLOW);
        self.asm.bind(notify);
        self.asm.ret(watched);
        self.asm.bind(next);
    }

    /// Goes to `yes` if the gate made the call.
    fn by_gate(&mut self, gate: Option<u64>, yes: Label, no: Label) {
        let Some(gate) = gate else { return self.asm.goto(no) };
        let high = self.asm.label();
        self.asm.load(INSTRUCTION_POINTER);
        self.asm.branch(JUMP_EQUAL, gate as u32, high, no);
        self.asm.bind(high);
        self.asm.load(INSTRUCTION_POINTER + 4);
        self.asm.branch(JUMP_EQUAL, (gate >> 32) as u32, yes, no);
    }

    fn tests(&mut self) {
        for (test, label, notify) in std::mem::take(&mut self.tests) {
            self.asm.bind(label);
            self.test(test, notify, self.allow);
        }
    }

    fn test(&mut self, test: Test, yes: Label, no: Label) {
        match test {
            Test::Always => self.asm.goto(yes),
            Test::AnyBit(arg, mask) => {
                self.asm.load(low(arg));
                self.asm.branch(JUMP_ANY_BIT, mask, yes, no);
            }
            Test::NoBit(arg, mask) => {
                self.asm.load(low(arg));
                self.asm.branch(JUMP_ANY_BIT, mask, no, yes);
            }
            Test::OneOf(arg, values) => self.one_of(arg, values, yes, no),
            Test::NoneOf(arg, values) => self.one_of(arg, values, no, yes),
            Test::NotZero(arg) => {
                let next = self.asm.label();
                self.asm.load(low(arg));
                self.asm.branch(JUMP_EQUAL, 0, next, yes);
                self.asm.bind(next);
                self.asm.load(low(arg) + 4);
                self.asm.branch(JUMP_EQUAL, 0, no, yes);
            }
            Test::InBand(arg) => match self.band {
                Some(band) => {
                    let next = self.asm.label();
                    self.asm.load(low(arg));
                    self.asm.branch(JUMP_AT_LEAST, band.first, next, no);
                    self.asm.bind(next);
                    self.asm.branch(JUMP_AT_LEAST, band.last + 1, no, yes);
                }
                None => self.asm.goto(no),
            },
            Test::NotPresence => {
                self.asm.load(low(1));
                self.asm.branch(JUMP_EQUAL, PRESENT as u32, self.present, yes);
            }
            Test::Each(tests) => self.chain(tests, |next| (next, no), yes, no),
            Test::Some(tests) => self.chain(tests, |next| (yes, next), yes, no),
        }
    }

    /// One test behind the other; `inner` says where all but the last go.
    fn chain(&mut self, tests: &[Test], inner: impl Fn(Label) -> (Label, Label), yes: Label, no: Label) {
        let Some((last, first)) = tests.split_last() else { return self.asm.goto(no) };
        for test in first {
            let next = self.asm.label();
            let (yes, no) = inner(next);
            self.test(*test, yes, no);
            self.asm.bind(next);
        }
        self.test(*last, yes, no);
    }

    fn one_of(&mut self, arg: u8, values: &[u32], yes: Label, no: Label) {
        self.asm.load(low(arg));
        for value in values {
            let next = self.asm.label();
            self.asm.branch(JUMP_EQUAL, *value, yes, next);
            self.asm.bind(next);
        }
        self.asm.goto(no);
    }

    fn end(&mut self, watched: u32, policy: &Policy) {
        self.asm.bind(self.tasks);
        self.by_gate(policy.gate.map(|gate| gate.tasks), self.allow, self.notify);
        self.asm.bind(self.gate);
        self.by_gate(policy.gate.map(|gate| gate.calls), self.allow, self.notify);
        self.asm.bind(self.notify);
        self.asm.ret(watched);
        self.asm.bind(self.present);
        self.asm.ret(FAIL | PRESENT_ERRNO as u32);
        self.asm.bind(self.allow);
        self.asm.ret(ALLOW);
    }
}

/// Offset of the low word of an argument (little-endian).
const fn low(arg: u8) -> u32 {
    ARGS + 8 * arg as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trap::bpf::{MAX_INSTRUCTIONS, interpreter};
    use crate::trap::policy::Gate;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    const GATE: Gate = Gate { calls: 0x7abc_0000_1007, tasks: 0x7abc_0000_10f3 };

    const BAND: Band = Band { first: 960, last: 1023 };
    const POLICIES: [Policy; 3] = [
        Policy { gate: None, device: None },
        Policy { gate: Some(GATE), device: None },
        Policy { gate: None, device: Some(BAND) },
    ];

    /// The policy once more, as plain as it can be said, with numbers from the system headers.
    fn watched(arch: u32, nr: u32, a: &[u64; 6], ip: u64, policy: &Policy) -> bool {
        let low = |i: usize| a[i] as u32;
        let advice = |i| matches!(low(i), 4 | 8 | 9 | 13 | 21 | 24 | 25 | 100 | 101 | 102);
        let compat = arch == 0x4000_0003 || nr & 0x4000_0000 != 0 && nr & 0x3fff_ffff == 514;
        let size = if compat { 0x2c_0000 } else { 0x30_0000 };
        let ioctl = matches!(low(1), 0xc060_6610 | 0xc018_aa06 | 0xc020_aa00 | 0x8010_aa01 | 0xc028_aa05)
            || [0x4000_5829, 0x4000_582b, 0x4000_5839].map(|n| n | size).contains(&low(1));
        let mmap = low(3) & libc::MAP_FIXED as u32 != 0 && low(3) & libc::MAP_FIXED_NOREPLACE as u32 == 0;
        let clone = {
            let has = |flag: i32| low(0) & flag as u32 != 0;
            !(has(libc::CLONE_VM) && (has(libc::CLONE_THREAD) || has(libc::CLONE_VFORK)))
        };
        let mode = low(1);
        let fallocate = !(mode == 0 || mode == 1 || mode == 0x40);
        if arch == 0x4000_0003 {
            return match nr {
                2 | 8 | 11 | 90 | 91 | 92 | 93 | 117 | 125 | 163 | 193 | 194 | 257 | 294 | 358 | 380
                | 398 | 425 | 435 | 437 => true,
                5 => low(1) & 0x200 != 0,
                45 => a[0] != 0,
                54 => ioctl,
                120 => clone,
                192 => mmap,
                219 => advice(2),
                274 => low(5) & 6 != 0,
                295 => low(2) & 0x200 != 0,
                317 => a[3] != 0,
                324 => fallocate,
                397 => low(2) & 0x4000 != 0,
                440 => advice(3),
                _ => false,
            };
        }
        if arch != 0xc000_003e {
            // There is none: that one call goes before the architecture is looked at.
            return policy.device.is_some() || nr != 9 || low(3) & libc::MAP_FIXED as u32 != 0;
        }
        let nr_of_64 = nr;
        let nr = match nr & !0x4000_0000 {
            514 if nr != 514 => 16,
            520 if nr != 520 => 59,
            533 if nr != 533 => 279,
            545 if nr != 545 => 322,
            common => common,
        };
        let band = |i: usize| policy.device.is_some_and(|band| (band.first..=band.last).contains(&low(i)));
        let own = policy.device.is_some() && !compat && nr_of_64 == nr;
        let hit = own
            && match i64::from(nr) {
                libc::SYS_read => band(0) && low(2) != ummunotify_abi::wire::WAIT_LENGTH as u32,
                libc::SYS_open | libc::SYS_openat => true,
                libc::SYS_mmap => band(4) && low(3) & libc::MAP_ANONYMOUS as u32 == 0,
                libc::SYS_ioctl => {
                    matches!(low(1), 0xc004_5501 | 0x4020_5502 | 0x4008_5503)
                        || band(0) && !matches!(low(1), 0x5450 | 0x5451 | 0x5421 | 0x5452)
                }
                libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_readv | libc::SYS_dup => band(0),
                libc::SYS_dup2 | libc::SYS_dup3 => band(0),
                libc::SYS_preadv | libc::SYS_pwritev | libc::SYS_preadv2 | libc::SYS_pwritev2 => band(0),
                libc::SYS_fcntl => band(0) && matches!(low(1), 0 | 1030 | 1031 | 1032),
                _ => false,
            };
        let hit = hit
            || match i64::from(nr) {
                libc::SYS_munmap | libc::SYS_mremap | libc::SYS_mprotect | libc::SYS_pkey_mprotect => true,
                libc::SYS_shmdt | libc::SYS_truncate | libc::SYS_ftruncate | libc::SYS_creat => true,
                libc::SYS_remap_file_pages | libc::SYS_fork | libc::SYS_clone3 | libc::SYS_openat2 => true,
                libc::SYS_execve | libc::SYS_execveat | libc::SYS_migrate_pages => true,
                libc::SYS_io_uring_setup => true,
                libc::SYS_mmap => mmap,
                libc::SYS_madvise => advice(2),
                libc::SYS_process_madvise => advice(3),
                libc::SYS_brk => a[0] != 0,
                libc::SYS_shmat => low(2) & libc::SHM_REMAP as u32 != 0,
                libc::SYS_fallocate => fallocate,
                libc::SYS_open => low(1) & libc::O_TRUNC as u32 != 0,
                libc::SYS_openat => low(2) & libc::O_TRUNC as u32 != 0,
                libc::SYS_clone => clone,
                libc::SYS_mbind => low(5) & 6 != 0,
                libc::SYS_move_pages => a[3] != 0,
                libc::SYS_ioctl => ioctl,
                libc::SYS_prctl => low(0) == 0x554d_4d55,
                _ => false,
            };
        let gate = |gate: Gate| if i64::from(nr) == libc::SYS_clone3 { gate.tasks } else { gate.calls };
        hit && policy.gate.map(gate) != Some(ip)
    }

    fn data(arch: u32, nr: u32, args: &[u64; 6], ip: u64) -> [u8; 64] {
        let mut data = [0; 64];
        data[0..4].copy_from_slice(&nr.to_le_bytes());
        data[4..8].copy_from_slice(&arch.to_le_bytes());
        data[8..16].copy_from_slice(&ip.to_le_bytes());
        for (i, arg) in args.iter().enumerate() {
            data[16 + 8 * i..24 + 8 * i].copy_from_slice(&arg.to_le_bytes());
        }
        data
    }

    fn check(program: &[SockFilter], policy: &Policy, arch: u32, nr: u32, args: &[u64; 6], ip: u64) {
        let hello = arch == ARCH_X86_64
            && i64::from(nr & !X32_BIT) == libc::SYS_prctl
            && args[0] as u32 == 0x554d_4d55;
        let expected = match watched(arch, nr, args, ip, policy) {
            // EISNAM.
            _ if hello && args[1] as u32 == 0 => 0x0005_0078,
            true => NOTIFY,
            false => ALLOW,
        };
        let (got, _) = interpreter::run(program, &data(arch, nr, args, ip));
        assert_eq!(got, expected, "arch {arch:#x} nr {nr:#x} args {args:x?} ip {ip:#x} {policy:x?}");
    }

    #[test]
    fn a_shim_that_says_hello_is_answered_by_the_filter() {
        let (nr, hello) = (libc::SYS_prctl as u32, ummunotify_abi::wire::HELLO_PRCTL);
        for policy in POLICIES {
            let program = Filter::build(&policy);
            for second in [ummunotify_abi::wire::WIRE_VERSION.into(), ummunotify_abi::wire::RING_PRCTL] {
                let call = data(ARCH_X86_64, nr, &[hello, second, 0, 0, 0, 0], 0);
                assert_eq!(interpreter::run(&program, &call).0, NOTIFY, "{policy:x?} {second:#x}");
            }
        }
    }

    #[test]
    fn a_ring_is_made_by_some_entry() {
        let program = Filter::without_rings();
        let entries = [(ARCH_X86_64, 425), (ARCH_X86_64, 425 | X32_BIT), (ARCH_I386, 425)];
        for (arch, nr) in entries {
            assert_eq!(
                interpreter::run(&program, &data(arch, nr, &[0; 6], 0)).0,
                0x0005_0001,
                "{arch:#x} {nr:#x}"
            );
            for other in [nr - 1, nr + 1, nr & X32_BIT] {
                assert_eq!(interpreter::run(&program, &data(arch, other, &[0; 6], 0)).0, ALLOW);
                assert!(interpreter::is_cached(&program, arch, other), "{other:#x}");
            }
        }
    }

    /// Words at which some test of some argument flips.
    fn edges() -> Vec<u64> {
        let mut words =
            vec![0, 1, 2, 6, u64::MAX, 1 << 32, (1 << 32) | 1, 0xffff_ffff, 0xffff_ffff_0000_0000];
        words.extend((0..64).map(|bit| 1 << bit));
        words.extend((3..=30).chain(98..106));
        words.extend([0x40, 0x41, 0x80, 0x3, 0x10, 0x11, 0x32, 0x12, 0x10_0010, 0x10_0012, 0x10_0032]);
        words.extend([0x100, 0x4100, 0x1_0100, 0x1_4100, 0x1_0000, 0x003d_0f00, 0x4111, 0x11]);
        words.extend([0x200, 0x241, 0x4000, 0x4001, 0x554d_4d55, 0xff_554d_4d55, 0x554d_4d54]);
        for request in
            [0xc060_6610_u64, 0xc018_aa06, 0xc020_aa00, 0x8010_aa01, 0xc028_aa05, 0x4030_5829, 0x4030_582b]
        {
            words.extend([request, request - 1, request + 1, request | 0xdead_beef << 32]);
        }
        words.extend([
            959,
            960,
            1000,
            1023,
            1024,
            1030,
            1031,
            1032,
            960 | 7 << 32,
            0x5421,
            0x5450,
            0x5451,
            0x5452,
        ]);
        words.extend([0xc004_5501, 0x4020_5502, 0x4008_5503, ummunotify_abi::wire::WAIT_LENGTH as u64]);
        words.extend([0x4030_5839, 0x5401, 0x402c_5829, 0x402c_582b, 0x402c_5839]);
        words
    }

    const ARCHES: [u32; 4] = [ARCH_X86_64, ARCH_I386, 0xc000_00b7, 0];

    /// Every number of every entry with every telling word in every argument.
    #[test]
    fn the_program_is_the_policy() {
        let edges = edges();
        for policy in POLICIES {
            let program = Filter::build(&policy);
            assert!(program.len() <= MAX_INSTRUCTIONS);
            for arch in ARCHES {
                let top = [0, X32_BIT, 0x8000_0000, 0xc000_0000];
                for nr in top.into_iter().flat_map(|top| (0..600).map(move |nr| top | nr)) {
                    // Numbers that no table names end before any argument: a few words will do there.
                    let named = [X86_64, X32_OWN, I386, DEVICE]
                        .into_iter()
                        .flatten()
                        .any(|rule| rule.nr == nr & 0xffff);
                    let words = if named { &edges[..] } else { &edges[..4] };
                    for arg in 0..6 {
                        for (i, word) in words.iter().enumerate() {
                            let mut args = [0; 6];
                            args[arg] = *word;
                            let ip = [GATE.calls, GATE.tasks, GATE.calls | 1 << 63, 0][i % 4];
                            check(&program, &policy, arch, nr, &args, ip);
                        }
                    }
                }
                for nr in [u32::MAX, u32::MAX - 1, 0x7fff_ffff, 0x3fff_ffff, 1 << 29] {
                    check(&program, &policy, arch, nr, &[0; 6], 0);
                }
            }
        }
    }

    /// The tracer is told of the same calls as the listener.
    #[test]
    fn the_tracing_program_differs_in_its_answer_alone() {
        let policy = Policy::default();
        let mut program = Filter::tracing(&policy);
        let answers: Vec<_> = program.iter_mut().filter(|op| op.code == 0x06 && op.k == TRACE).collect();
        assert!(!answers.is_empty() && TRACE & 0xffff == TRACE_DATA);
        answers.into_iter().for_each(|op| op.k = NOTIFY);
        assert_eq!(Filter::bytes(&program), Filter::bytes(&Filter::build(&policy)));
    }

    /// Calls that aren't watched for any arguments cost few comparisons, and on kernels with an allow-cache none.
    #[test]
    fn uninteresting_calls_are_cheap_and_cached() {
        for policy in POLICIES {
            let program = Filter::build(&policy);
            let own = policy.device.map_or(&[][..], |_| DEVICE);
            let mut worst = 0;
            for nr in (0..=547).filter(|nr| !X86_64.iter().chain(own).any(|rule| rule.nr == *nr)) {
                let (result, compares) =
                    interpreter::run(&program, &data(ARCH_X86_64, nr, &[u64::MAX; 6], GATE.calls + 1));
                assert_eq!(result, ALLOW, "nr {nr}");
                assert!(interpreter::is_cached(&program, ARCH_X86_64, nr), "nr {nr} isn't cached");
                worst = worst.max(compares - 1);
            }
            println!(
                "{} instructions; an uninteresting number costs at most {worst} comparisons and the architecture's",
                program.len()
            );
            assert!(worst <= 10);
        }
    }

    /// The wire carries the instructions as the kernel reads them.
    #[test]
    fn bytes_are_struct_sock_filter() {
        let program = Filter::build(&Policy::default());
        let bytes = Filter::bytes(&program);
        assert_eq!(bytes.len(), 8 * program.len());
        assert!(bytes.len() <= ummunotify_abi::wire::MAX_PAYLOAD);
        // ld [0]: the number.
        assert_eq!(bytes[..8], [0x20, 0, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn random_calls_agree(
            arch in prop::sample::select(&ARCHES[..]),
            nr in prop_oneof![0_u32..600, any::<u32>(), (0_u32..600).prop_map(|n| n | X32_BIT)],
            args in prop::array::uniform6(prop_oneof![any::<u64>(), prop::sample::select(edges())]),
            ip in prop_oneof![Just(GATE.calls), Just(GATE.tasks), any::<u64>()],
            which in 0..POLICIES.len(),
        ) {
            static PROGRAMS: LazyLock<[Vec<SockFilter>; 3]> =
                LazyLock::new(|| POLICIES.map(|policy| Filter::build(&policy)));
            check(&PROGRAMS[which], &POLICIES[which], arch, nr, &args, ip);
        }
    }
}
