//! Sentences on standard error, without allocation. Only opens of the device speak.

use core::ffi::c_int;

use ummunotify_abi::config;

use crate::{environment, sys};

/// A piece of a sentence.
#[derive(Clone, Copy)]
pub enum Part<'a> {
    /// As it is.
    Text(&'a str),
    /// Bytes of a path.
    Bytes(&'a [u8]),
    /// An errno, by number and by name where it is a likely one.
    Errno(c_int),
}

/// Says what failed, unless the log is off.
pub fn error(parts: &[Part<'_>]) {
    if environment::get(config::ENV_LOG) != Some(b"off") {
        say(parts);
    }
}

/// Says what is less than was asked for, unless the log is off or of errors alone.
pub fn warning(parts: &[Part<'_>]) {
    if !matches!(environment::get(config::ENV_LOG), Some(b"off" | b"error")) {
        say(parts);
    }
}

/// Writes `ummunotify: `, the parts and a newline, by one write(2).
fn say(parts: &[Part<'_>]) {
    let mut line = Line { bytes: [0; 600], len: 0 };
    line.push(b"ummunotify: ");
    for part in parts {
        match *part {
            Part::Text(text) => line.push(text.as_bytes()),
            Part::Bytes(bytes) => line.push(bytes),
            Part::Errno(errno) => {
                line.push(b"errno ");
                line.number(errno.unsigned_abs());
                if let Some(name) = name(errno) {
                    line.push(b" (");
                    line.push(name.as_bytes());
                    line.push(b")");
                }
            }
        }
    }
    line.push(b"\n");
    let written = line.bytes.get(..line.len).unwrap_or_default();
    // A closed or full standard error changes nothing about the error that the caller gets.
    let _ = sys::write(2, written);
}

struct Line {
    bytes: [u8; 600],
    len: usize,
}

impl Line {
    /// Adds what fits.
    fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if let Some(slot) = self.bytes.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, n: u32) {
        if n >= 10 {
            self.number(n / 10);
        }
        self.push(&[b'0' + (n % 10) as u8]);
    }
}

fn name(errno: c_int) -> Option<&'static str> {
    Some(match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::ESRCH => "ESRCH",
        libc::EIO => "EIO",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EINVAL => "EINVAL",
        libc::EFBIG => "EFBIG",
        libc::EMFILE => "EMFILE",
        libc::ENFILE => "ENFILE",
        libc::ENOEXEC => "ENOEXEC",
        libc::EPIPE => "EPIPE",
        libc::ENOSYS => "ENOSYS",
        libc::EPROTO => "EPROTO",
        libc::EPROTONOSUPPORT => "EPROTONOSUPPORT",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::ECONNRESET => "ECONNRESET",
        _ => return None,
    })
}
