//! What the inline layer decides about a call agrees with the filter, and with what is said of a trapped one.

use proptest::prelude::*;
use std::sync::LazyLock;
use ummunotify_abi::PageRange;
use ummunotify_inline::{NUMBERS, Plan, has_large_page, nr, plan};

use crate::trap::bpf::{SockFilter, interpreter};
use crate::trap::filter::{ALLOW, Filter};
use crate::trap::operation::{ADDRESS_END, Decoded, HUGE_1G, HUGE_2M, Syscall};
use crate::trap::policy::{ARCH_X86_64, Policy, advice};

static FILTER: LazyLock<Vec<SockFilter>> = LazyLock::new(|| Filter::build(&Policy::default()));

fn is_allowed(number: u32, args: &[u64; 6]) -> bool {
    let mut data = [0; 64];
    data[0..4].copy_from_slice(&number.to_le_bytes());
    data[4..8].copy_from_slice(&ARCH_X86_64.to_le_bytes());
    for (i, arg) in args.iter().enumerate() {
        data[16 + 8 * i..24 + 8 * i].copy_from_slice(&arg.to_le_bytes());
    }
    interpreter::run(&FILTER, &data).0 == ALLOW
}

fn inside(range: PageRange, first: PageRange, second: PageRange) -> bool {
    [first, second].iter().any(|outer| outer.start <= range.start && range.end <= outer.end)
}

fn check(number: u32, args: &[u64; 6]) {
    let decided = plan(number, args);
    match decided {
        Plan::Pass => assert!(is_allowed(number, args), "{number} {args:x?} is trapped"),
        Plan::Trap => {}
        Plan::Within(first, second) => {
            match Decoded::new(&Syscall { arch: ARCH_X86_64, nr: number, args: *args }) {
                Decoded::Ignore => {}
                Decoded::Operation(operation) => {
                    for range in operation.reach().ranges() {
                        assert!(
                            inside(range, first, second),
                            "{operation:x?} reaches {range:x?}, outside {decided:x?}"
                        );
                    }
                }
                other => panic!("{other:x?}"),
            }
        }
    }
}

/// Addresses and lengths at which something changes.
fn word() -> impl Strategy<Value = u64> {
    let edges = vec![
        0,
        1,
        4095,
        4096,
        8192,
        HUGE_2M,
        HUGE_2M + 4096,
        HUGE_1G,
        ADDRESS_END,
        ADDRESS_END - 4096,
        1 << 57,
        (1 << 57) | 4096,
        1 << 63,
        u64::MAX,
        u64::MAX - 4095,
        0x7f00_0000_0000,
    ];
    prop_oneof![
        prop::sample::select(edges),
        (0_u64..1 << 20).prop_map(|page| page << 12),
        (0_u64..1 << 10).prop_map(|page| 0x7f00_0000_0000 + (page << 21)),
        0_u64..128,
        any::<u64>(),
    ]
}

/// Flags, protections and advices.
fn flags() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..128,
        (0_u32..32).prop_map(|bit| 1 << bit),
        prop::sample::select(vec![
            0x10,
            0x12,
            0x22,
            0x32,
            0x11,
            0x13,
            0x33,
            0x10_0032,
            0x4_0032,
            0x0100_0003
        ]),
        any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200_000))]
    #[test]
    fn a_call_is_let_through_that_reaches_further(
        number in prop::sample::select(&NUMBERS[..]),
        start in word(),
        len in word(),
        third in prop_oneof![word(), flags()],
        fourth in flags(),
        fifth in word(),
        sixth in word(),
    ) {
        check(number, &[start, len, third, fourth, fifth, sixth]);
    }
}

/// Each advice, with whatever stands in the high half of the register.
#[test]
fn an_advice_that_invalidates_is_let_through() {
    for value in (0..300).flat_map(|value: u64| [value, value | 0xdead << 32]) {
        let args = [0x7f00_0000_0000, 4096, value, 0, 0, 0];
        check(nr::MADVISE, &args);
        let watched = advice::WATCHED.contains(&(value as i32));
        assert_eq!(plan(nr::MADVISE, &args) == Plan::Pass, !watched, "advice {value:#x}");
    }
}

/// A clone3 that is let through by its flags makes a task as clone does that isn't watched.
#[test]
fn a_copy_of_the_memory_is_let_through() {
    for flags in (0..1 << 12).map(|bits: u64| bits << 8) {
        let allowed = is_allowed(crate::trap::policy::nr::CLONE, &[flags, 0, 0, 0, 0, 0]);
        assert_eq!(ummunotify_inline::shares_memory(flags), allowed, "{flags:#x}");
    }
}

/// A range without a whole large page can't be hugetlb memory; ends that lie in the midst of one don't count.
#[test]
fn a_large_page_is_seen_where_there_is_room_for_none() {
    let large = |start: u64, end: u64| has_large_page(PageRange::new(HUGE_1G + start, HUGE_1G + end));
    assert!(large(0, HUGE_2M) && large(4096, 2 * HUGE_2M) && large(0, HUGE_1G));
    assert!(!large(0, 4096) && !large(0, HUGE_2M - 4096) && !large(4096, HUGE_2M + 4096));
    assert!(!large(4096, 2 * HUGE_2M - 4096), "two halves");
    assert!(has_large_page(PageRange::new(0, ADDRESS_END)));
    assert!(!has_large_page(PageRange::new(u64::MAX - 8191, u64::MAX - 4095)), "near the end");
}

/// The calls that matter are decided, not merely left to the traps.
#[test]
fn plain_calls_are_trapped() {
    let a = 0x7f00_0000_1000;
    let whole = PageRange::new(a, a + 8192);
    for (number, args) in [
        (nr::MUNMAP, [a, 8192, 9, 9, 9, 9]),
        (nr::MUNMAP, [a, 4097, 9, 9, 9, 9]),
        (nr::MADVISE, [a, 8192, 4, 9, 9, 9]),
        (nr::MPROTECT, [a, 8192, 3, 9, 9, 9]),
        (nr::MMAP, [a, 8192, 3, 0x32, u64::MAX, 0]),
        (nr::MMAP, [a, 8192, 3, 0x12, 3, 0]),
        (nr::MREMAP, [a, 8192, 16384, 1, 9, 9]),
    ] {
        let Plan::Within(first, second) = plan(number, &args) else { panic!("{number} {args:x?}") };
        assert_eq!((first, second.is_empty()), (whole, true), "{number} {args:x?}");
    }
    assert_eq!(plan(nr::MMAP, &[0, 8192, 3, 0x22, u64::MAX, 0]), Plan::Pass);
    assert_eq!(
        plan(nr::MADVISE, &[a, 8192, 9, 0, 0, 0]),
        Plan::Trap,
        "REMOVE reaches all mappings of a file"
    );
}
