//! Programs of many sources that more than one test runs.

use crate::Client;

/// The sources of the interface suite, in the order in which its tests run.
const INTERFACE: [&str; 14] = [
    "interface/check.c",
    "interface/device.c",
    "interface/rules.c",
    "interface/call_open.c",
    "interface/call_ioctl.c",
    "interface/call_read.c",
    "interface/call_block.c",
    "interface/call_poll.c",
    "interface/call_mmap.c",
    "interface/share.c",
    "interface/proc.c",
    "interface/order.c",
    "interface/corners.c",
    "interface/emulated.c",
];

/// The sources of the walk over the operations.
const WALK: [&str; 18] = [
    "operations/walk.c",
    "operations/coverage.c",
    "operations/device.c",
    "operations/area.c",
    "operations/calls.c",
    "operations/rows_map.c",
    "operations/rows_remap.c",
    "operations/rows_protect.c",
    "operations/rows_advise.c",
    "operations/rows_file.c",
    "operations/rows_process.c",
    "operations/rows_library.c",
    "operations/rows_rare.c",
    "operations/rows_entry.c",
    "operations/rows_moved.c",
    "operations/rows_kinds.c",
    "operations/rows_ring.c",
    "operations/rows_sharing.c",
];

impl Client {
    /// The interface suite: one program, which is also the other programs that its tests execute.
    pub fn interface_suite() -> Self {
        // As distributions build their programs: the fortified entry points are used where sizes are known. In
        // the order of the sources, so that the tests run in it.
        Self::program("interface-suite", &INTERFACE)
            .flag("-O2")
            .flag("-D_FORTIFY_SOURCE=2")
            .flag("-fno-toplevel-reorder")
    }

    /// The walk over the operations.
    pub fn walk() -> Self {
        Self::program("walk", &WALK)
    }

    /// The same as an object to be linked into a program in Go ([`Stage::go_program`](crate::Stage::go_program)).
    pub fn walk_for_go() -> Self {
        Self::program("walk-for-go.o", &WALK).flag("-r").flag("-Dmain=walk_main").flag("-DWALK_IN_GO")
    }
}
