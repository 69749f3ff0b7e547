//! Opening an emulated device.
//!
//! The first open of a process starts a supervisor and ends with a filter on all threads; a process that inherited
//! a filter, and every later open, turns to the supervisor that is there. Which of them it is the kernel tells:
//! the trapped call [`hello`] is answered only under a filter. A filter can't be taken off again, so all that can
//! fail comes before it.

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::null;

use ummunotify_abi::config::{self, SUPERVISE_COMMAND};
use ummunotify_abi::wire::{self, Op};

use crate::context::{self, Identity};
use crate::door::{Answer, Buffer, Connection, Owned};
use crate::environment::Net;
use crate::keeper::{self, Launch, STACK};
use crate::log::{self, Part};
use crate::owner::Opening;
use crate::program::{self, Path};
use crate::{environment, inline, layer, owner, sys, table, userfault};

/// The token of the supervisor whose filter we are under; 0 if there is none.
///
/// # Errors
/// ENOSYS: the supervisor is dead. EPROTONOSUPPORT: it is of another version.
pub fn hello() -> Result<u64, c_int> {
    // SAFETY: integers; no kernel knows the option (EINVAL).
    let token = unsafe {
        sys::call(libc::SYS_prctl, wire::HELLO_PRCTL as usize, wire::WIRE_VERSION as usize, 0, 0, 0, 0)
    };
    match -token as c_int {
        errno @ (libc::ENOSYS | libc::EPROTONOSUPPORT) if token < 0 => Err(errno),
        _ => Ok(u64::try_from(token).unwrap_or(0)),
    }
}

/// Whether we are under the filter of a supervisor, of whatever version, alive or dead.
pub fn is_filtered() -> bool {
    // SAFETY: integers; no kernel knows the option (EINVAL).
    let answer =
        unsafe { sys::call(libc::SYS_prctl, wire::HELLO_PRCTL as usize, wire::PRESENT as usize, 0, 0, 0, 0) };
    // Those of other versions ask their supervisor.
    answer >= 0 || matches!(-answer as c_int, wire::PRESENT_ERRNO | libc::ENOSYS | libc::EPROTONOSUPPORT)
}

/// Opens the device. Explains a failure on standard error.
///
/// # Errors
/// The errno that open returns.
pub fn open(flags: c_int) -> Result<c_int, c_int> {
    let _blocked = sys::SignalsBlocked::new();
    let opening = Opening::begin().map_err(|errno| explain("MADV_WIPEONFORK memory", errno))?;
    // SAFETY: `Opening` admits one thread at a time.
    let scratch = unsafe { &mut *SCRATCH.0.get() };
    let layers = layer::chosen()?;
    let token = hello().map_err(|errno| match errno {
        libc::ENOSYS => {
            log::error(&[Part::Text(
                "can't open /dev/ummunotify: the supervisor whose filter this process is under is dead; \
                 start the process afresh",
            )]);
            libc::EIO
        }
        errno => refused(errno, 0),
    })?;
    let [calls, tasks] = inline::offer(layers.inline);
    let ask = |connection: &Connection, fresh: bool, scratch: &mut Scratch| {
        let args = [flags as u32 as u64, u64::from(fresh), calls, tasks, 0, 0];
        connection.ask(Op::Open, args, None, &mut scratch.reply)
    };
    let mut met = None;
    // Without a filter an earlier open has left the token of its supervisor, which may have ended since.
    if token == 0
        && opening.supervisor() != 0
        && let Ok(connection) = Connection::to_supervisor(opening.supervisor())
        && let Ok(answer) = ask(&connection, false, scratch)
    {
        met = Some((connection, answer));
    }
    let fresh = token == 0 && met.is_none();
    let (connection, mut answer) = match met {
        Some(met) => met,
        None => {
            let connection = if fresh { start(scratch)? } else { find(token)? };
            let answer = ask(&connection, fresh, scratch).map_err(|errno| refused(errno, token))?;
            (connection, answer)
        }
    };
    let opened = Opened::arrange(&mut answer, flags)?;
    if answer.args[4] & wire::WANTS_USERFAULTFD != 0 {
        userfault::give(&connection, top(&mut scratch.stacks.0[1]))
            .map_err(|errno| explain("userfaultfd, without which nothing would be seen,", errno))?;
    }
    let mut traced = false;
    if fresh && layers.net == Net::None {
        opening.set_supervisor(answer.args[2]);
    } else if fresh {
        traced = layer::enforce(layers.net, &connection, &answer, &mut scratch.reply)? == Net::Trace;
    }
    // A tracer stops the patched calls as well.
    if opened.inline && !traced {
        inline::patch(&connection, layers.inline);
    }
    table::activate();
    table::note(opened.device.get(), &opened.ticket);
    Ok(opened.device.release())
}

/// Connects to the supervisor whose filter this process is under.
fn find(token: u64) -> Result<Connection, c_int> {
    Connection::to_supervisor(token).map_err(|errno| match errno {
        libc::ECONNREFUSED => {
            log::error(&[Part::Text(
                "can't open /dev/ummunotify: this process is under the filter of a supervisor that can't be reached \
                 (it is dead, or in another network namespace); start the process afresh",
            )]);
            libc::EIO
        }
        errno => explain("connection to the supervisor", errno),
    })
}

/// A context that is ready but for the filter.
struct Opened {
    device: Owned,
    ticket: context::Ticket,
    inline: bool,
}

impl Opened {
    fn arrange(answer: &mut Answer, flags: c_int) -> Result<Self, c_int> {
        let broken = || explain("answer of the supervisor", libc::EPROTO);
        // Taken before the others are looked at: they close with the answer.
        let device = answer.fds.take(0).ok_or_else(broken)?;
        let arena = answer.fds.take(1).ok_or_else(broken)?;
        let counter = answer.fds.take(2).ok_or_else(broken)?;
        let marker = answer.fds.take(3);
        let stat = sys::fstat(device.get()).ok_or_else(broken)?;
        if flags & libc::O_NONBLOCK != 0 {
            sys::fcntl(device.get(), libc::F_SETFL, libc::O_NONBLOCK as usize);
        }
        if flags & libc::O_CLOEXEC == 0 {
            sys::fcntl(device.get(), libc::F_SETFD, 0);
        }
        if answer.args[3] == 1 {
            mark_space(&marker.ok_or_else(broken)?)?;
        }
        let supervisor = answer.args[5] as usize;
        if supervisor != 0 {
            // Yama (ptrace_scope 1) lets only ancestors read our mapping table. EINVAL without Yama.
            // SAFETY: integers.
            unsafe { sys::call(libc::SYS_prctl, PR_SET_PTRACER, supervisor, 0, 0, 0, 0) };
        }
        let identity = Identity { device: stat.st_dev, inode: stat.st_ino };
        let granted = answer.args[4];
        let inline = granted & wire::INLINE_GRANTED != 0;
        let flags = if granted & wire::INLINE_MUNMAP != 0 { inline::MUNMAP_HITS } else { 0 };
        let ticket = context::add_owned(identity, &arena, &counter, inline.then_some(flags))
            .map_err(|errno| explain("mapping", errno))?;
        Ok(Self { device, ticket, inline })
    }
}

/// `PR_SET_PTRACER` ("Yama").
const PR_SET_PTRACER: usize = 0x5961_6d61;

/// Maps the page by which the supervisor knows this address space: neither a forked copy nor the next program
/// image has it. It stays. It counts from when it is readable: what a fork amid this inherits isn't, and never will be.
fn mark_space(marker: &Owned) -> Result<(), c_int> {
    let at = sys::mmap(4096, libc::PROT_NONE, libc::MAP_SHARED, marker.get());
    if at < 0 {
        return Err(explain("mapping", -at as c_int));
    }
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        let failed = sys::madvise(at as usize, 4096, advice);
        if failed < 0 {
            return Err(explain("madvise", -failed as c_int));
        }
    }
    let failed = sys::mprotect(at as usize, 4096, libc::PROT_READ);
    if failed < 0 {
        return Err(explain("mprotect", -failed as c_int));
    }
    owner::be_opener();
    Ok(())
}

/// Starts a supervisor.
fn start(scratch: &mut Scratch) -> Result<Connection, c_int> {
    program::find(&mut scratch.program, &mut scratch.maps)?;
    check_log_file();
    if sys::descriptor_limit().rlim_max < SUPERVISOR_DESCRIPTORS {
        return Err(explain("start of a supervisor under such a limit of descriptors", libc::EMFILE));
    }
    let (connection, theirs) = Connection::pair().map_err(|errno| explain("socket pair", errno))?;
    scratch.arguments = [scratch.program.as_ptr(), COMMAND.as_ptr().cast(), null()];
    fill_environment(&mut scratch.environment);
    let mut launch = Launch {
        program: scratch.program.as_ptr(),
        arguments: scratch.arguments.as_ptr(),
        environment: scratch.environment.as_ptr(),
        socket: -1,
        keeps_stderr: keeps_stderr(),
        stack_top: top(&mut scratch.stacks.0[1]),
        result: 0,
    };
    let launcher_top = top(&mut scratch.stacks.0[0]);
    // SAFETY: strings and arrays are terminated and stay; `Opening` keeps others away from the stacks.
    unsafe { keeper::start(&mut launch, theirs, launcher_top) }
        .map_err(|errno| explain("new process", errno))?;
    Ok(connection)
}

fn log_file() -> Option<&'static [u8]> {
    environment::get(config::ENV_LOG_FILE).filter(|name| !name.is_empty())
}

/// The supervisor can tell nobody that it has no log.
fn check_log_file() {
    let Some(name) = log_file() else { return };
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NOCTTY;
    // The entry of the environment is terminated where the value ends.
    // SAFETY: a terminated path.
    let file = unsafe {
        sys::call(
            libc::SYS_openat,
            libc::AT_FDCWD as usize,
            name.as_ptr() as usize,
            flags as usize,
            0o666,
            0,
            0,
        )
    };
    if file >= 0 {
        sys::close(file as c_int);
        return;
    }
    log::warning(&[
        Part::Text("no log is written: "),
        Part::Text(config::ENV_LOG_FILE),
        Part::Text("="),
        Part::Bytes(name),
        Part::Text(" can't be opened, "),
        Part::Errno(-file as c_int),
    ]);
}

/// The supervisor writes to the client's standard error only where it was asked to; otherwise it would hold a
/// pipeline open.
fn keeps_stderr() -> bool {
    log_file().is_none()
        && (environment::get(config::ENV_STATS) == Some(b"1")
            || matches!(environment::get(config::ENV_LOG), Some(b"info" | b"debug")))
}

/// Our own variables and PATH. The library isn't preloaded into the supervisor.
fn fill_environment(environment: &mut [*const c_char; VARIABLES]) {
    let ours = environment::entries().filter(|entry| {
        let entry = entry.to_bytes();
        entry.starts_with(b"UMMUNOTIFY_") || entry.starts_with(b"PATH=")
    });
    let mut used = 0;
    // One place stays for the end.
    for (place, entry) in environment.iter_mut().take(VARIABLES - 1).zip(ours) {
        *place = entry.as_ptr();
        used += 1;
    }
    if let Some(end) = environment.get_mut(used) {
        *end = null();
    }
}

fn top(stack: &mut [u8; STACK]) -> *mut c_void {
    stack.as_mut_ptr_range().end.cast()
}

fn refused(errno: c_int, token: u64) -> c_int {
    match errno {
        libc::ECONNRESET if token == 0 => explain(
            "the supervisor, which ended before it answered (UMMUNOTIFY_LOG_FILE shows why),",
            libc::EIO,
        ),
        libc::ECONNRESET | libc::EAGAIN => explain("the supervisor, which gives no answer,", libc::EIO),
        libc::EPROTONOSUPPORT => {
            explain("the supervisor, which is of another version than the library,", libc::EPROTONOSUPPORT)
        }
        libc::EMFILE => explain("reception of descriptors", errno),
        errno => explain("what the supervisor was asked for", errno),
    }
}

/// Says that `what` failed, and passes errno on.
fn explain(what: &str, errno: c_int) -> c_int {
    log::error(&[
        Part::Text("can't open /dev/ummunotify: "),
        Part::Text(what),
        Part::Text(" failed with "),
        Part::Errno(errno),
        Part::Text(match errno {
            libc::EMFILE => {
                "; the client needs eight free descriptors for a moment, the supervisor 24 (ulimit -n)"
            }
            libc::EOPNOTSUPP => {
                ": system calls are emulated here (valgrind?), and processes don't share memory; run without that, or use \
                 the kernel module"
            }
            libc::EAGAIN => "; an open starts two processes (ulimit -u)",
            libc::EFBIG => "; a context's table is a file of 480 MiB, hardly ever filled (ulimit -f)",
            libc::ENOMEM => {
                "; a context's table takes 480 MiB of addresses, hardly any of it memory (ulimit -v)"
            }
            _ => "",
        }),
    ]);
    errno
}

/// The first argument, terminated.
const COMMAND: [u8; SUPERVISE_COMMAND.len() + 1] = {
    let mut bytes = [0; SUPERVISE_COMMAND.len() + 1];
    let mut i = 0;
    while i < SUPERVISE_COMMAND.len() {
        bytes[i] = SUPERVISE_COMMAND.as_bytes()[i];
        i += 1;
    }
    bytes
};

/// Descriptors that a supervisor of one context uses, and some to spare.
const SUPERVISOR_DESCRIPTORS: u64 = 24;

/// Entries of the supervisor's environment, with its end.
const VARIABLES: usize = 32;

/// What an open needs and an application's stack may not have room for.
struct Scratch {
    stacks: Stacks,
    program: Path,
    maps: [u8; 8192],
    arguments: [*const c_char; 3],
    environment: [*const c_char; VARIABLES],
    reply: Buffer<{ wire::MAX_PAYLOAD }>,
}

#[repr(align(16))]
struct Stacks([[u8; STACK]; 2]);

struct Guarded(UnsafeCell<Scratch>);

// SAFETY: used only by the holder of `Opening`.
unsafe impl Sync for Guarded {}

static SCRATCH: Guarded = Guarded(UnsafeCell::new(Scratch {
    stacks: Stacks([[0; STACK]; 2]),
    program: Path::new(),
    maps: [0; 8192],
    arguments: [null(); 3],
    environment: [null(); VARIABLES],
    reply: Buffer::new(),
}));
