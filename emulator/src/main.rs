//! The `ummunotify` command.
//!
//! There is no Rust runtime start before `main`: it would ignore SIGPIPE and open descriptors 0 to 2 where they
//! are closed, and the command that `run` executes would inherit that.
#![cfg_attr(not(test), no_main)]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")))]
compile_error!("ummunotify needs x86-64 Linux with glibc");

mod cli;

/// The C library calls this.
#[cfg(not(test))]
// SAFETY: the one `main` of this program.
#[unsafe(no_mangle)]
pub extern "C" fn main(_count: libc::c_int, _arguments: *const *const libc::c_char) -> libc::c_int {
    cli::main()
}

/// Under the test harness, which has a `main` of its own.
#[cfg(test)]
fn main() {
    std::process::exit(cli::main());
}
