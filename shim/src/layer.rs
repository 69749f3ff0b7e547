//! Which layer traps the calls of this process, and how it is set up: notify, a filter with a listener; trace, the
//! supervisor as tracer.
//!
//! Which of them can be had is found out by setting it up. A filter can't be taken off again, so what can fail
//! comes before it.

use core::ffi::c_int;

use ummunotify_abi::config;
use ummunotify_abi::wire::{self, Op};

use crate::door::{Answer, Buffer, Connection, Owned};
use crate::environment::{Layers, Net, layers};
use crate::filter;
use crate::log::{self, Part};
use crate::sys;

/// The layers that the environment names.
///
/// # Errors
/// EINVAL, explained on standard error.
pub fn chosen() -> Result<Layers, c_int> {
    layers().map_err(|list| {
        log::error(&[
            Part::Text("can't open /dev/ummunotify: "),
            Part::Text(config::ENV_TRAP),
            Part::Text(" is "),
            Part::Bytes(list),
            Part::Text(
                "; it can be auto, notify, trace or inline,notify, with or without fault, or fault alone",
            ),
        ]);
        libc::EINVAL
    })
}

/// Traps the calls of all threads. `program` is the filter of the notify layer; `buffer` gets the other one's. Returns
/// the layer that does it now: notify or trace.
///
/// # Errors
/// Each was explained on standard error.
pub fn enforce(
    net: Net,
    connection: &Connection,
    program: &Answer,
    buffer: &mut Buffer<{ wire::MAX_PAYLOAD }>,
) -> Result<Net, c_int> {
    let refused = match net {
        Net::Trace | Net::None => None,
        Net::Auto | Net::Notify => match filter::install(buffer.payload(program), filter::LISTENER) {
            Ok(listener) => return hand_over(connection, Owned::new(listener)).map(|()| Net::Notify),
            Err(errno) if net == Net::Auto => Some(errno),
            Err(errno) => {
                say_refused(errno, None);
                return Err(errno);
            }
        },
    };
    trace(connection, refused, buffer).map(|()| Net::Trace)
}

/// Gives the listener to the supervisor. From its making on, trapped calls of other threads wait until the
/// supervisor answers; we make none.
fn hand_over(connection: &Connection, listener: Owned) -> Result<(), c_int> {
    let mut buffer = Buffer::<0>::new();
    connection.ask(Op::Listener, [0; 6], Some(listener.get()), &mut buffer).map_err(lost)?;
    // As long as we hold a copy, the death of the supervisor would hang every trapped call.
    drop(listener);
    connection.ask(Op::Closed, [0; 6], None, &mut buffer).map_err(lost)?;
    Ok(())
}

fn lost(errno: c_int) -> c_int {
    match errno {
        libc::ECONNRESET => explain("the supervisor, which ended while it took over,", libc::EIO),
        errno => explain("handing the calls over to the supervisor", errno),
    }
}

fn explain(what: &str, errno: c_int) -> c_int {
    log::error(&[
        Part::Text("can't open /dev/ummunotify: "),
        Part::Text(what),
        Part::Text(" failed with "),
        Part::Errno(errno),
    ]);
    errno
}

/// Has the supervisor trace this process. Only then comes the filter: a call that it stops while nobody traces
/// fails with ENOSYS. `refused` is the errno of a listener that was tried before.
fn trace(
    connection: &Connection,
    refused: Option<c_int>,
    buffer: &mut Buffer<{ wire::MAX_PAYLOAD }>,
) -> Result<(), c_int> {
    let seized = match connection.ask(Op::Seize, [0; 6], None, buffer) {
        Ok(answer) => answer,
        Err(errno @ (libc::ECONNRESET | libc::EAGAIN)) => return Err(lost(errno)),
        Err(errno) => {
            say_untraceable(errno);
            if let Some(refused) = refused {
                say_refused(refused, Some(errno));
                return Err(refused);
            }
            return Err(errno);
        }
    };
    let filtered = filter::install(buffer.payload(&seized), 0);
    let mut buffer = Buffer::<0>::new();
    let ask = [u64::from(filtered.is_ok()), 0, 0, 0, 0, 0];
    connection.ask(Op::Traced, ask, None, &mut buffer).map_err(lost)?;
    say_lost(refused, filtered.err());
    Ok(())
}

/// Says once what is lost by the trace layer: where it wasn't asked for, and where no filter could be had for it.
fn say_lost(refused: Option<c_int>, unfiltered: Option<c_int>) {
    if refused.is_none() && unfiltered.is_none() {
        return;
    }
    let (what, errno) = match refused {
        Some(errno) => ("a seccomp filter with a listener was refused with ", errno),
        None => ("a seccomp filter was refused with ", unfiltered.unwrap_or(0)),
    };
    log::warning(&[
        Part::Text(what),
        Part::Errno(errno),
        Part::Text(
            ": the calls of this process are trapped by ptrace (layer trace). So no debugger can attach, and static \
             programs that it starts find no device",
        ),
        Part::Text(match refused {
            Some(libc::EBUSY) => {
                "; another program listens to its system calls: memory operations that the other listener is asked about \
                 go unseen"
            }
            _ => "",
        }),
        Part::Text(match unfiltered {
            Some(libc::ESRCH) => {
                "; a thread has a filter of its own: every system call is stopped, which makes each many times as dear"
            }
            Some(_) => {
                "; no filter can be had at all: every system call is stopped, which makes each many times as dear"
            }
            None => "",
        }),
    ]);
}

/// Says that the notify layer can't be had.
fn say_refused(errno: c_int, traced: Option<c_int>) {
    // Where both were tried, the first sentence has said what else would help.
    let last = if traced.is_some() { "" } else { ", or let the trace layer do it (UMMUNOTIFY_TRAP=auto)" };
    log::error(&[
        Part::Text("can't open /dev/ummunotify: a seccomp filter with a listener was refused with "),
        Part::Errno(errno),
        Part::Text(match errno {
            libc::EBUSY => {
                ": another program already listens to this process; start the client without it, or use the kernel module"
            }
            libc::ESRCH => {
                ": a thread has installed a filter of its own; open the device before it does, or use the kernel module"
            }
            libc::EPERM | libc::EACCES => {
                ": the surroundings (a container's seccomp profile?) forbid it; allow seccomp(2) there, or use the kernel module"
            }
            libc::ENOSYS | libc::EINVAL => {
                ": this kernel has no seccomp user notification with TSYNC (Linux 5.7); use the kernel module"
            }
            _ => "; use the kernel module",
        }),
        Part::Text(last),
    ]);
}

/// Says that the trace layer can't be had.
fn say_untraceable(errno: c_int) {
    let mut scope = [0u8; 1];
    let file = sys::open(b"/proc/sys/kernel/yama/ptrace_scope\0", libc::O_RDONLY | libc::O_CLOEXEC);
    if file >= 0 {
        let file = Owned::new(file as c_int);
        sys::read(file.get(), &mut scope);
    }
    log::error(&[
        Part::Text(
            "can't open /dev/ummunotify: its supervisor may not trace this process, ptrace(2) failed with ",
        ),
        Part::Errno(errno),
        Part::Text(match (errno, scope) {
            (libc::EBUSY, _) => ": a debugger or another tracer is attached; start the client without it",
            (libc::EPERM, [b'2' | b'3']) => {
                ": kernel.yama.ptrace_scope forbids it; set it to 0 or 1 (3 stays until the next boot)"
            }
            (libc::EPERM | libc::EACCES | libc::ENOSYS, _) => {
                ": the surroundings (a container's seccomp profile?) forbid it, or the process isn't dumpable; allow \
                 ptrace(2) there"
            }
            _ => "",
        }),
    ]);
}
