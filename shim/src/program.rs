//! Where the supervisor's program is: named by the environment, beside the library, or in `../bin` of it.

use core::ffi::c_int;

use ummunotify_abi::config;

use crate::door::Owned;
use crate::log::{self, Part};
use crate::{environment, sys};

/// Its file name.
const NAME: &[u8] = b"ummunotify";

/// A path with its terminator.
pub struct Path {
    bytes: [u8; 4096],
    len: usize,
}

impl Path {
    /// An empty one.
    pub const fn new() -> Self {
        Self { bytes: [0; 4096], len: 0 }
    }

    /// The terminated string.
    pub fn as_ptr(&self) -> *const core::ffi::c_char {
        self.bytes.as_ptr().cast()
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn clear(&mut self) {
        self.cut(0);
    }

    /// Keeps that many bytes at most.
    fn cut(&mut self, len: usize) {
        self.len = self.len.min(len);
        if let Some(end) = self.bytes.get_mut(self.len) {
            *end = 0;
        }
    }

    /// Adds bytes; the terminator follows. What doesn't fit makes the path empty.
    fn push(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if end >= self.bytes.len() {
            return self.clear();
        }
        for (to, &from) in self.bytes.iter_mut().skip(self.len).zip(bytes.iter().chain(&[0])) {
            *to = from;
        }
        self.len = end;
    }

    fn is_executable(&self) -> bool {
        // A directory passes the test of access, too.
        // SAFETY: zero is a valid value of every field.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: a terminated path and room for the result.
        let found = unsafe {
            sys::call(
                libc::SYS_newfstatat,
                libc::AT_FDCWD as usize,
                self.as_ptr() as usize,
                &raw mut stat as usize,
                0,
                0,
                0,
            )
        };
        self.len != 0
            && found == 0
            && stat.st_mode & libc::S_IFMT == libc::S_IFREG
            && sys::access(self.as_ptr().cast(), libc::X_OK) == 0
    }
}

/// Finds it; says on standard error what is missing.
///
/// # Errors
/// ENOENT.
pub fn find(path: &mut Path, maps: &mut [u8]) -> Result<(), c_int> {
    path.clear();
    if let Some(named) = environment::get(config::ENV_BINARY) {
        path.push(named);
        if path.is_executable() {
            return Ok(());
        }
        log::error(&[
            Part::Text("can't open /dev/ummunotify: "),
            Part::Text(config::ENV_BINARY),
            Part::Text(" names "),
            Part::Bytes(named),
            Part::Text(", which can't be executed; set it to the path of the ummunotify program"),
        ]);
        return Err(libc::ENOENT);
    }
    find_library(path, maps);
    let directory = path.text().iter().rposition(|&b| b == b'/').map_or(0, |slash| slash + 1);
    for way in [&b""[..], b"../bin/"] {
        path.cut(directory);
        path.push(way);
        path.push(NAME);
        // Shorter if there was no room.
        if directory > 0 && path.len > directory && path.is_executable() {
            return Ok(());
        }
    }
    path.cut(directory);
    log::error(&[
        Part::Text(
            "can't open /dev/ummunotify: no program ummunotify beside the library or in ../bin of its directory ",
        ),
        Part::Bytes(path.text()),
        Part::Text("; put it there or set "),
        Part::Text(config::ENV_BINARY),
        Part::Text(" to its path"),
    ]);
    Err(libc::ENOENT)
}

/// Reads our own path out of the mapping table.
fn find_library(path: &mut Path, maps: &mut [u8]) {
    let address = find_library as *const () as usize;
    let table = sys::open(b"/proc/self/maps\0", libc::O_RDONLY | libc::O_CLOEXEC);
    if table < 0 {
        return;
    }
    let table = Owned::new(table as c_int);
    let mut have = 0;
    loop {
        let Some(room) = maps.get_mut(have..) else { return };
        let got = sys::read(table.get(), room);
        if got <= 0 {
            return;
        }
        have += got as usize;
        while let Some(end) = maps.get(..have).and_then(|text| text.iter().position(|&b| b == b'\n')) {
            let line = maps.get(..end).unwrap_or_default();
            if covers(line, address) {
                if let Some(slash) = line.iter().position(|&b| b == b'/') {
                    path.push(line.get(slash..).unwrap_or_default());
                }
                return;
            }
            maps.copy_within(end + 1..have, 0);
            have -= end + 1;
        }
        if have == maps.len() {
            return;
        }
    }
}

/// True if a line of the table (`start-end ...`) covers the address.
fn covers(line: &[u8], address: usize) -> bool {
    let mut bounds = [0usize; 2];
    let mut bound = 0;
    for &byte in line {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'-' if bound == 0 => {
                bound = 1;
                continue;
            }
            _ => break,
        };
        if let Some(value) = bounds.get_mut(bound) {
            *value = *value << 4 | usize::from(digit);
        }
    }
    (bounds[0]..bounds[1]).contains(&address)
}
