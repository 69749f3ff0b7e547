//! The test harness: runs programs with and without the emulated device, as root and as an ordinary user,
//! under a time limit, and insists that nothing of the emulator is left behind.
//!
//! A test makes a [`Stage`], compiles a C client into it, and runs programs on it:
//!
//! ```no_run
//! use ummunotify_tests::{Account, Client, Mode, Stage};
//!
//! let stage = Stage::new();
//! let client = stage.client(&Client::program("interface/example", &["interface/example.c"]));
//! for account in Account::available() {
//!     for mode in [Mode::Run, Mode::Preload] {
//!         let outcome = stage.program(mode, account, &client).arg("--verbose").run();
//!         outcome.assert_success();
//!     }
//! }
//! ```
//!
//! The emulator is the one that the workspace's build put beside the tests: build the workspace first.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod account;
mod client;
pub mod go;
mod hugepages;
mod leftovers;
mod program;
mod stage;
mod suites;

pub use account::Account;
pub use client::Client;
pub use hugepages::HugePages;
pub use program::{Mode, Outcome, Program, Running};
pub use stage::Stage;

use std::io::Write;

/// Says a line to whoever watches the tests: also for a test that passes, whose output is otherwise swallowed.
pub fn say(line: &str) {
    // Not eprintln!: the test runner captures what goes through the macros.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Says that something was not tested, and why.
pub fn skip(what: &str, reason: &str) {
    say(&format!("SKIPPED {what}: {reason}"));
}
