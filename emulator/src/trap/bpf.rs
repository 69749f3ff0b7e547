//! Classic BPF as seccomp runs it: instructions and an assembler with labels.
//!
//! Conditional jumps reach 255 instructions forward and no further (`jt` and `jf` are bytes), so the assembler
//! puts unconditional jumps, which reach any distance, behind those that would have to go further. Jumps go
//! forward only: a program without backward jumps always ends, and the kernel takes no other.

/// One instruction: `struct sock_filter` of `<linux/filter.h>`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SockFilter {
    /// What to do.
    pub code: u16,
    /// Instructions to skip if the comparison holds.
    pub jt: u8,
    /// Instructions to skip if it doesn't.
    pub jf: u8,
    /// The constant.
    pub k: u32,
}

const _: () = assert!(size_of::<SockFilter>() == 8 && align_of::<SockFilter>() == 4);

/// `BPF_LD | BPF_W | BPF_ABS`: load a word of `struct seccomp_data`.
pub const LOAD: u16 = 0x20;
/// `BPF_ALU | BPF_AND | BPF_K`.
pub const AND: u16 = 0x54;
/// `BPF_JMP | BPF_JA`.
pub const JUMP: u16 = 0x05;
/// `BPF_JMP | BPF_JEQ | BPF_K`.
pub const JUMP_EQUAL: u16 = 0x15;
/// `BPF_JMP | BPF_JGE | BPF_K`: unsigned.
pub const JUMP_AT_LEAST: u16 = 0x35;
/// `BPF_JMP | BPF_JSET | BPF_K`.
pub const JUMP_ANY_BIT: u16 = 0x45;
/// `BPF_RET | BPF_K`.
pub const RETURN: u16 = 0x06;

/// Longest program that the kernel takes (`BPF_MAXINSNS`).
pub const MAX_INSTRUCTIONS: usize = 4096;

/// A place in a program, to be bound by [`Assembler::bind`] after every jump to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Label(usize);

#[derive(Clone, Copy, Debug)]
enum Item {
    Plain(SockFilter),
    Branch { code: u16, k: u32, yes: Label, no: Label },
    Goto(Label),
}

/// Collects instructions and resolves labels.
#[derive(Debug, Default)]
pub struct Assembler {
    items: Vec<Item>,
    /// For each label the index of the item that it stands before.
    labels: Vec<Option<usize>>,
}

impl Assembler {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// A label that isn't bound yet.
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Binds `label` to the next instruction.
    ///
    /// # Panics
    /// If the label is bound already: a mistake of the program's author.
    pub fn bind(&mut self, label: Label) {
        let at = self.items.len();
        assert!(self.labels[label.0].replace(at).is_none(), "label bound twice");
    }

    /// Loads the word at `offset` of `struct seccomp_data`.
    pub fn load(&mut self, offset: u32) {
        self.plain(LOAD, offset);
    }

    /// Keeps the bits of `mask`.
    pub fn and(&mut self, mask: u32) {
        self.plain(AND, mask);
    }

    /// Ends with `value`.
    pub fn ret(&mut self, value: u32) {
        self.plain(RETURN, value);
    }

    /// Goes on at `label`.
    pub fn goto(&mut self, label: Label) {
        self.items.push(Item::Goto(label));
    }

    /// Goes to `yes` if the comparison `code` with `k` holds, else to `no`.
    pub fn branch(&mut self, code: u16, k: u32, yes: Label, no: Label) {
        self.items.push(Item::Branch { code, k, yes, no });
    }

    fn plain(&mut self, code: u16, k: u32) {
        self.items.push(Item::Plain(SockFilter { code, jt: 0, jf: 0, k }));
    }

    /// The program.
    ///
    /// # Panics
    /// If a label isn't bound or lies behind a jump to it: mistakes of the program's author.
    pub fn finish(self) -> Vec<SockFilter> {
        // A branch takes one instruction plus one for each side that lies too far. Growing a branch moves what
        // follows, which may push other sides out of reach: repeat until nothing grows. Sides only ever grow.
        let mut far = vec![(false, false); self.items.len()];
        loop {
            let starts = self.starts(&far);
            let mut grown = false;
            for (i, item) in self.items.iter().enumerate() {
                let Item::Branch { yes, no, .. } = *item else { continue };
                // Distances are taken from the branch itself: up to two jumps may stand before what follows.
                let reach = |label| self.at(label, &starts) - starts[i] - 1 <= usize::from(u8::MAX);
                let needs = (far[i].0 || !reach(yes), far[i].1 || !reach(no));
                grown |= needs != far[i];
                far[i] = needs;
            }
            if !grown {
                return self.emit(&far, &starts);
            }
        }
    }

    /// Where each item starts; one more for the end.
    fn starts(&self, far: &[(bool, bool)]) -> Vec<usize> {
        let mut at = 0;
        let mut starts = Vec::with_capacity(far.len() + 1);
        for far in far {
            starts.push(at);
            at += 1 + usize::from(far.0) + usize::from(far.1);
        }
        starts.push(at);
        starts
    }

    fn at(&self, label: Label, starts: &[usize]) -> usize {
        starts[self.labels[label.0].expect("label bound")]
    }

    fn emit(&self, far: &[(bool, bool)], starts: &[usize]) -> Vec<SockFilter> {
        let mut out = Vec::with_capacity(starts[self.items.len()]);
        let distance =
            |from: usize, label| self.at(label, starts).checked_sub(from + 1).expect("jumps go forward");
        for (i, item) in self.items.iter().enumerate() {
            match *item {
                Item::Plain(instruction) => out.push(instruction),
                Item::Goto(label) => out.push(jump(distance(starts[i], label))),
                Item::Branch { code, k, yes, no } => {
                    let mut jumps = Vec::with_capacity(2);
                    let mut side = |far: bool, label| {
                        if far {
                            jumps.push(label);
                            jumps.len() as u8 - 1
                        } else {
                            u8::try_from(distance(starts[i], label)).expect("within reach")
                        }
                    };
                    let (jt, jf) = (side(far[i].0, yes), side(far[i].1, no));
                    out.push(SockFilter { code, jt, jf, k });
                    for (j, label) in jumps.into_iter().enumerate() {
                        out.push(jump(distance(starts[i] + 1 + j, label)));
                    }
                }
            }
        }
        out
    }
}

fn jump(distance: usize) -> SockFilter {
    SockFilter { code: JUMP, jt: 0, jf: 0, k: u32::try_from(distance).expect("short program") }
}

/// What the kernel does with a program, for tests.
#[cfg(test)]
pub(crate) mod interpreter {
    use super::*;

    /// The result, and how many conditional jumps were taken to it.
    pub(crate) fn run(program: &[SockFilter], data: &[u8; 64]) -> (u32, usize) {
        let (mut pc, mut a, mut compares) = (0_usize, 0_u32, 0);
        loop {
            let SockFilter { code, jt, jf, k } = program[pc];
            pc += 1;
            let mut branch = |holds: bool| {
                compares += 1;
                pc += usize::from(if holds { jt } else { jf });
            };
            match code {
                LOAD => {
                    let at = k as usize;
                    assert!(at.is_multiple_of(4) && at < 64, "load outside seccomp_data");
                    a = u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
                }
                AND => a &= k,
                JUMP => pc += k as usize,
                JUMP_EQUAL => branch(a == k),
                JUMP_AT_LEAST => branch(a >= k),
                JUMP_ANY_BIT => branch(a & k != 0),
                RETURN => return (k, compares),
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    /// Whether the kernel's allow-cache takes number `nr` of `arch`: `seccomp_is_const_allow` runs a program
    /// with nothing but number and architecture known, and gives up at any other load.
    pub(crate) fn is_cached(program: &[SockFilter], arch: u32, nr: u32) -> bool {
        let (mut pc, mut a) = (0_usize, 0_u32);
        loop {
            let SockFilter { code, jt, jf, k } = program[pc];
            pc += 1;
            let mut branch = |holds: bool| pc += usize::from(if holds { jt } else { jf });
            match (code, k) {
                (LOAD, 0) => a = nr,
                (LOAD, 4) => a = arch,
                (LOAD, _) => return false,
                (AND, k) => a &= k,
                (JUMP, k) => pc += k as usize,
                (JUMP_EQUAL, k) => branch(a == k),
                (JUMP_AT_LEAST, k) => branch(a >= k),
                (JUMP_ANY_BIT, k) => branch(a & k != 0),
                (RETURN, k) => return k == crate::trap::filter::ALLOW,
                (other, _) => panic!("unknown instruction {other:#x}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A branch over `n` instructions, both ways, lands where it should, near and far.
    #[test]
    fn branches_reach_any_distance() {
        for n in [0, 1, 253, 254, 255, 256, 300, 1000] {
            for word in [7, 8] {
                let mut asm = Assembler::new();
                let (yes, no, start) = (asm.label(), asm.label(), asm.label());
                asm.load(0);
                asm.branch(JUMP_EQUAL, 7, yes, no);
                asm.bind(start);
                for _ in 0..n {
                    asm.ret(99);
                }
                asm.bind(yes);
                asm.ret(1);
                for _ in 0..n {
                    asm.ret(98);
                }
                asm.bind(no);
                asm.ret(2);
                let mut data = [0; 64];
                data[0] = word;
                let expected = if word == 7 { 1 } else { 2 };
                assert_eq!(interpreter::run(&asm.finish(), &data).0, expected, "over {n}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "label bound")]
    fn an_unbound_label_is_found() {
        let mut asm = Assembler::new();
        let nowhere = asm.label();
        asm.goto(nowhere);
        asm.finish();
    }
}
