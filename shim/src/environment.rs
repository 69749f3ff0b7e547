//! The environment variables that configure us, read from where they are.

use core::ffi::{CStr, c_char};

use ummunotify_abi::config;

unsafe extern "C" {
    /// libc's; null until it has started.
    static environ: *const *const c_char;
}

/// What an open of the device should give.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A real device that opens is used as it is, else the emulated one.
    Auto,
    /// Never the emulated one.
    Kmod,
    /// Never a real one.
    Emulated,
    /// The variable names none of these: open fails.
    Unknown(&'static [u8]),
}

/// [`config::ENV_BACKEND`].
pub fn backend() -> Backend {
    match get(config::ENV_BACKEND) {
        Some(b"kmod") => Backend::Kmod,
        Some(b"emulated") => Backend::Emulated,
        None | Some(b"auto" | b"") => Backend::Auto,
        Some(other) => Backend::Unknown(other),
    }
}

/// Which layer stops the calls of a process that opens the emulated device, wherever they are made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// Notify if it can be had, else trace.
    Auto,
    /// A seccomp filter with a listener.
    Notify,
    /// ptrace.
    Trace,
    /// None: userfaultfd alone tells.
    None,
}

/// Whether libc's own calls are looked at in the process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Inline {
    /// No.
    Off,
    /// Where that can be had.
    Welcome,
    /// They are to be: it is said if it can't be had.
    Wanted,
}

/// The layers of a process, as `emulator/src/trap/layers.rs` reads them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// See there.
    pub inline: Inline,
    /// What traps all others.
    pub net: Net,
}

/// [`config::ENV_TRAP`].
///
/// # Errors
/// The list, which names none of these or a set that can't be had: open fails.
pub fn layers() -> Result<Layers, &'static [u8]> {
    let list = get(config::ENV_TRAP).filter(|list| !list.is_empty()).unwrap_or(b"auto");
    let (mut inline, mut fault, mut net) = (false, false, None);
    for word in list.split(|&b| b == b',') {
        let named = match word {
            b"inline" => {
                inline = true;
                continue;
            }
            b"fault" => {
                fault = true;
                continue;
            }
            b"auto" => Net::Auto,
            b"notify" => Net::Notify,
            b"trace" => Net::Trace,
            _ => return Err(list),
        };
        if net.is_some_and(|other| other != named) {
            return Err(list);
        }
        net = Some(named);
    }
    match (net, inline) {
        (None, false) if fault => Ok(Layers { inline: Inline::Off, net: Net::None }),
        (None, _) | (Some(Net::Trace), true) => Err(list),
        (Some(net), true) => Ok(Layers { inline: Inline::Wanted, net }),
        (Some(Net::Auto), false) => Ok(Layers { inline: Inline::Welcome, net: Net::Auto }),
        (Some(net), false) => Ok(Layers { inline: Inline::Off, net }),
    }
}

/// The value of a variable. Nothing in a program that runs with more rights than its caller (AT_SECURE): one of
/// the variables names a program to execute.
pub fn get(name: &str) -> Option<&'static [u8]> {
    entries().find_map(|entry| {
        let value = entry.to_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(value)
    })
}

/// The environment itself.
pub fn pointer() -> *const *const c_char {
    // SAFETY: a plain load.
    unsafe { environ }
}

/// The entries, as `execve` takes them.
pub fn entries() -> impl Iterator<Item = &'static CStr> {
    // SAFETY: no pointer is passed.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    // SAFETY: a plain load; a program that changes its environment meanwhile races with its own getenv, too.
    let mut at = if secure { core::ptr::null() } else { unsafe { environ } };
    core::iter::from_fn(move || {
        if at.is_null() {
            return None;
        }
        // SAFETY: environ is an array that ends in a null pointer, which was not reached yet.
        let entry = unsafe { *at };
        if entry.is_null() {
            return None;
        }
        // SAFETY: as above; the entry is a terminated string.
        unsafe {
            at = at.add(1);
            Some(CStr::from_ptr(entry))
        }
    })
}
