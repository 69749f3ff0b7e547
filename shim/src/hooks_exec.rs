//! exec and posix_spawn, for the sake of static executables: nothing can be preloaded into one, so it is started by
//! `ummunotify run`, which puts a filter around it and becomes it. The process stays the same, and so does all that
//! it inherits.
//!
//! Whatever speaks against that, the call is the plain one: no `run` above us, an environment without that or without a preloaded library, a filter
//! around us already, a file that can't be read. fexecve, execveat, execl and its kin and raw calls are plain always.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null;

use ummunotify_abi::config;

use crate::door::Owned;
use crate::environment::{self, Backend, Net, backend};
use crate::{activate, next, sys};

type Strings = *const *const c_char;

/// execve(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe {
        with_detour(
            |_| path,
            arguments,
            environment,
            |detour| {
                let (path, arguments) = detour.unwrap_or((path, arguments));
                real_execve(path, arguments, environment)
            },
        )
    }
}

fn real_execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    next!(c"execve" as fn(*const c_char, Strings, Strings) -> c_int; (path, arguments, environment);
        // SAFETY: the application's own arguments.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_execve, path as usize, arguments as usize, environment as usize, 0, 0, 0)
        }) as c_int)
}

/// execv(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    let environment = environment::pointer();
    let start = |detour| match detour {
        Some((program, instead)) => real_execve(program, instead, environment),
        None => next!(c"execv" as fn(*const c_char, Strings) -> c_int; (path, arguments);
            real_execve(path, arguments, environment)),
    };
    // SAFETY: the application's own arguments.
    unsafe { with_detour(|_| path, arguments, environment, start) }
}

/// execvp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(name: *const c_char, arguments: Strings) -> c_int {
    let environment = environment::pointer();
    let start = |detour| match detour {
        Some((program, instead)) => real_execve(program, instead, environment),
        None => next!(c"execvp" as fn(*const c_char, Strings) -> c_int; (name, arguments);
            sys::libc_result(-(libc::ENOSYS as isize)) as c_int),
    };
    // SAFETY: the application's own arguments.
    unsafe { with_detour(|found| found.search(name), arguments, environment, start) }
}

/// execvpe(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(name: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    let start = |detour| match detour {
        Some((program, instead)) => real_execve(program, instead, environment),
        None => {
            next!(c"execvpe" as fn(*const c_char, Strings, Strings) -> c_int; (name, arguments, environment);
            sys::libc_result(-(libc::ENOSYS as isize)) as c_int)
        }
    };
    // SAFETY: the application's own arguments.
    unsafe { with_detour(|found| found.search(name), arguments, environment, start) }
}

/// posix_spawn(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    let start = |detour: Option<Detour>| {
        let (path, arguments) = detour.unwrap_or((path, arguments));
        real_spawn(pid, path, actions, attributes, arguments, environment)
    };
    // SAFETY: the application's own arguments.
    unsafe { with_detour(|_| path, arguments, environment, start) }
}

fn real_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    next!(c"posix_spawn" as fn(*mut libc::pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int;
        (pid, path, actions, attributes, arguments, environment); libc::ENOSYS)
}

/// posix_spawnp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    name: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    let start = |detour| match detour {
        Some((program, instead)) => real_spawn(pid, program, actions, attributes, instead, environment),
        None => {
            next!(c"posix_spawnp" as fn(*mut libc::pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int;
            (pid, name, actions, attributes, arguments, environment); libc::ENOSYS)
        }
    };
    // SAFETY: the application's own arguments.
    unsafe { with_detour(|found| found.search(name), arguments, environment, start) }
}

/// What is started instead, and its arguments.
type Detour = (*const c_char, Strings);

/// Arguments that a program may have to be started by `run`; and so many as most have.
const ARGUMENTS: usize = 500;
const FEW: usize = 32;
/// Words that come before them.
const WORDS: usize = 6;

/// Calls `start`, with `run` and its arguments for a static executable. `find` tells its path; it is asked only if that
/// matters. Handlers on a small stack start programs, too: what needs room has a frame of its own.
///
/// # Safety
/// Those of execve: strings, and arrays of them, with their ends.
unsafe fn with_detour(
    find: impl FnOnce(&mut Text) -> *const c_char,
    arguments: Strings,
    environment: Strings,
    start: impl FnOnce(Option<Detour>) -> c_int,
) -> c_int {
    // SAFETY: passed on.
    let (run, preload) =
        unsafe { (entry(environment, config::ENV_BINARY), entry(environment, config::PRELOAD)) };
    // Whoever takes the library from a program's environment takes the device from it, whatever kind it is of.
    // SAFETY: a terminated string.
    let is_ours = |list| is_preloaded(unsafe { CStr::from_ptr(list) }.to_bytes());
    let Some(run) = run.filter(|_| preload.is_some_and(is_ours)) else { return start(None) };
    if arguments.is_null() || backend() == Backend::Kmod || is_traced() {
        return start(None);
    }
    let before = sys::errno();
    let mut text = Text::new();
    let path = find(&mut text);
    // SAFETY: a terminated string.
    let wanted = !path.is_null() && is_static(unsafe { CStr::from_ptr(path) }) && activate::hello() == Ok(0);
    sys::set_errno(before);
    if !wanted {
        return start(None);
    }
    let mut here = Text::new();
    // Without a slash it lies in the current directory: `run` would look for it in PATH.
    // SAFETY: a terminated string.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    let program = if bytes.contains(&b'/') { path } else { here.join(&[b"./", bytes]) };
    if program.is_null() {
        return start(None);
    }
    // SAFETY: an array with its end.
    let count = (0..).take_while(|n| unsafe { !(*arguments.add(*n)).is_null() }).count();
    // SAFETY: passed on.
    unsafe {
        if count <= FEW {
            detour::<{ FEW + WORDS }>(run, path, program, arguments, count, start)
        } else if count <= ARGUMENTS {
            detour::<{ ARGUMENTS + WORDS }>(run, path, program, arguments, count, start)
        } else {
            start(None)
        }
    }
}

/// Calls `start` with `run` and its arguments for `program`, which has `count` of its own.
///
/// # Safety
/// There are so many, and no more than `N` less [`WORDS`].
#[inline(never)]
unsafe fn detour<const N: usize>(
    run: *const c_char,
    path: *const c_char,
    program: *const c_char,
    arguments: Strings,
    count: usize,
    start: impl FnOnce(Option<Detour>) -> c_int,
) -> c_int {
    // SAFETY: passed on.
    let own = unsafe { core::slice::from_raw_parts(arguments, count) };
    // The name that the program is to see.
    let shown = own.first().copied().unwrap_or(path);
    let head = [run, c"run".as_ptr(), c"--instead-of".as_ptr(), shown, c"--".as_ptr(), program];
    let mut line = [null::<c_char>(); N];
    let words = head.iter().chain(own.iter().skip(1));
    // What follows the last word stays null.
    for (place, word) in line.iter_mut().zip(words) {
        *place = *word;
    }
    start(Some((run, line.as_ptr())))
}

/// Whether a value of [`config::PRELOAD`] names the library (ld.so(8): the names are parted by spaces or colons).
fn is_preloaded(list: &[u8]) -> bool {
    list.split(|b| b" :".contains(b)).any(|entry| entry.ends_with(config::SHIM_FILE.as_bytes()))
}

/// The layer trace doesn't serve static programs: `run` couldn't do more than complain.
fn is_traced() -> bool {
    environment::layers().is_ok_and(|layers| layers.net == Net::Trace)
}

/// The value of a variable in an environment.
///
/// # Safety
/// An array of terminated strings with its end, or null.
unsafe fn entry(environment: Strings, name: &str) -> Option<*const c_char> {
    if environment.is_null() {
        return None;
    }
    let mut at = environment;
    // SAFETY: passed on.
    unsafe {
        while !(*at).is_null() {
            let value = CStr::from_ptr(*at).to_bytes().strip_prefix(name.as_bytes());
            if let Some([b'=', _, ..]) = value {
                return Some((*at).add(name.len() + 1));
            }
            at = at.add(1);
        }
    }
    None
}

/// Bytes of a file that are looked at at once: what the kernel reads of a script (`BINPRM_BUF_SIZE`), or the first of an
/// executable's headers, among which there is an interpreter as a rule.
const HEAD: usize = 256;

/// Whether a file is a 64-bit x86 executable without an interpreter, or a script for such a one.
#[inline(never)]
fn is_static(path: &CStr) -> bool {
    let mut head = [0u8; HEAD];
    let Some(file) = open_executable(path) else { return false };
    let Some(read) = read_head(&file, &mut head) else { return false };
    let Some(line) = read.strip_prefix(b"#!") else { return is_static_executable(&file, read) };
    let line = line.split(|b| b"\n".contains(b)).next().unwrap_or_default();
    let mut words = line.split(|b| b" \t\0".contains(b)).filter(|word| !word.is_empty());
    let Some(word) = words.next() else { return false };
    let mut interpreter = Text::new();
    let path = interpreter.join(&[word]);
    if path.is_null() {
        return false;
    }
    // SAFETY: not null, so terminated.
    let Some(file) = open_executable(unsafe { CStr::from_ptr(path) }) else { return false };
    read_head(&file, &mut head).is_some_and(|read| is_static_executable(&file, read))
}

/// The same of an executable that begins so.
fn is_static_executable(file: &Owned, head: &[u8]) -> bool {
    const EM_X86_64: u16 = 62;
    const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
    let word = |at: usize| head.get(at..at + 2).map_or(0, |b| u16::from(b[0]) | u16::from(b[1]) << 8);
    if !head.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]) || word(18) != EM_X86_64 {
        return false;
    }
    let offset =
        head.get(32..40).map_or(0, |b| b.iter().rev().fold(0usize, |sum, b| sum << 8 | usize::from(*b)));
    let (size, count) = (usize::from(word(54)), usize::from(word(56)));
    // A table that isn't all there could hold one.
    let mut kinds = (0..count).map(|i| {
        let at = size.checked_mul(i)?.checked_add(offset)?;
        let mut kind = [0; PT_INTERP.len()];
        match head.get(at..at.checked_add(kind.len())?) {
            Some(bytes) => kind.copy_from_slice(bytes),
            None if sys::pread(file.get(), &mut kind, at) == kind.len() as isize => {}
            None => return None,
        }
        Some(kind)
    });
    count > 0 && kinds.all(|kind| kind.is_some_and(|kind| kind != PT_INTERP))
}

/// A regular file that may be executed.
fn open_executable(path: &CStr) -> Option<Owned> {
    if sys::access(path.as_ptr(), libc::X_OK) < 0 {
        return None;
    }
    // Not blocking: it could be a FIFO.
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    let file = sys::open(path.to_bytes_with_nul(), flags);
    if file < 0 {
        return None;
    }
    let file = Owned::new(file as c_int);
    sys::fstat(file.get()).filter(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG).map(|_| file)
}

/// The beginning of a file.
fn read_head<'a>(file: &Owned, head: &'a mut [u8; HEAD]) -> Option<&'a [u8]> {
    let got = sys::pread(file.get(), head, 0);
    head.get(..usize::try_from(got).ok()?)
}

/// Room for a path. Who has a longer one, which has to be put together, is on its own.
struct Text([u8; 512]);

impl Text {
    const fn new() -> Self {
        Self([0; 512])
    }

    /// The parts as one terminated string; null if there is no room.
    fn join(&mut self, parts: &[&[u8]]) -> *const c_char {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len >= self.0.len() {
            return null();
        }
        for (to, from) in self.0.iter_mut().zip(parts.iter().copied().flatten().chain(&[0])) {
            *to = *from;
        }
        self.0.as_ptr().cast()
    }

    /// The file that execvp would take: the name itself if it has a slash, else the first of that name in PATH that
    /// may be executed; null if there is none.
    ///
    /// # Safety
    /// A terminated string, or null.
    unsafe fn search(&mut self, name: *const c_char) -> *const c_char {
        if name.is_null() {
            return null();
        }
        // SAFETY: passed on.
        let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
        if bytes.contains(&b'/') || bytes.is_empty() {
            return name;
        }
        let search = environment::get("PATH").unwrap_or(b"/bin:/usr/bin");
        for directory in search.split(|b| *b == b':') {
            let directory = if directory.is_empty() { b"." } else { directory };
            let path = self.join(&[directory, b"/", bytes]);
            // Not the next one, which isn't the one that would be taken, if there is no room.
            if path.is_null() || sys::access(path, libc::X_OK) == 0 {
                return path;
            }
        }
        null()
    }
}
