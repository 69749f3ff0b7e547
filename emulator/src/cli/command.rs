//! Finds the program that `run` is to execute, and looks at what it is.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, eaccess};

/// Where execvp looks if there is no PATH.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// Interpreters of interpreters that the kernel follows.
const MAX_INTERPRETERS: usize = 5;
/// Bytes of a script's first line that the kernel looks at.
const SCRIPT_HEAD: usize = 256;

/// What kind of program a file is, as far as preloading goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A dynamic x86-64 program: it can be preloaded into.
    Dynamic,
    /// An x86-64 program without an interpreter: nothing is ever preloaded into it, it gets a filter instead.
    Static,
    /// For another architecture or word size; the sentence says which.
    Foreign(String),
    /// Neither an ELF file nor a script: execvp gives it to the shell.
    Text,
}

/// A program that can be executed.
#[derive(Debug)]
pub(super) struct Program {
    /// What is passed to execve.
    pub path: PathBuf,
    /// What ends up running: the script's last interpreter, or the file itself.
    pub image: PathBuf,
    /// The kind of that.
    pub kind: Kind,
    /// True if the loader will ignore LD_PRELOAD, since executing it changes privileges.
    pub gains_privileges: bool,
}

/// Why a program can't be executed.
#[derive(Debug)]
pub(super) enum Missing {
    /// No file of that name.
    NotFound(String),
    /// There is one, which can't be executed.
    NotExecutable(String),
}

impl Missing {
    /// The shells' exit code for it.
    pub(super) const fn exit_code(&self) -> i32 {
        match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(_) => 126,
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound(message) | Self::NotExecutable(message) => f.write_str(message),
        }
    }
}

/// Finds `name` as execvp does, and looks at it.
pub(super) fn find(name: &OsStr) -> Result<Program, Missing> {
    let path = locate(name)?;
    let (image, kind) = follow(&path)?;
    let gains_privileges = gains_privileges(&image);
    Ok(Program { path, image, kind, gains_privileges })
}

/// The file that `name` stands for.
fn locate(name: &OsStr) -> Result<PathBuf, Missing> {
    let shown = name.to_string_lossy();
    if name.as_bytes().contains(&b'/') {
        return match executable(Path::new(name)) {
            Ok(()) => Ok(PathBuf::from(name)),
            Err(e) if is_absent(&e) => Err(Missing::NotFound(format!("{shown}: {e}; check the path"))),
            Err(e) => Err(not_executable(&shown, &e)),
        };
    }
    let search = std::env::var_os("PATH").unwrap_or_else(|| OsString::from(DEFAULT_PATH));
    let mut refused = None;
    for directory in search.as_bytes().split(|&b| b == b':').filter(|_| !name.is_empty()) {
        // An empty entry is the current directory.
        let directory = if directory.is_empty() { b"." } else { directory };
        let path = Path::new(OsStr::from_bytes(directory)).join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            // A directory that can't be searched tells nothing; a file that can't be executed does.
            Err(e) if is_absent(&e) || fs::metadata(&path).is_err() => {}
            Err(e) => refused = refused.or(Some(not_executable(&path.to_string_lossy(), &e))),
        }
    }
    Err(refused.unwrap_or_else(|| {
        Missing::NotFound(format!("{shown}: no such command in PATH; give its path, as in ./{shown}"))
    }))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG))
}

fn not_executable(path: &str, error: &io::Error) -> Missing {
    let help =
        if Path::new(path).is_dir() { "it is a directory" } else { "make it executable with chmod +x" };
    Missing::NotExecutable(format!("{path}: can't be executed: {error}; {help}"))
}

/// True if this user may execute that regular file.
fn executable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    eaccess(path, AccessFlags::X_OK).map_err(io::Error::from)
}

/// Follows the first lines of scripts to what the kernel will load.
fn follow(path: &Path) -> Result<(PathBuf, Kind), Missing> {
    let mut image = path.to_path_buf();
    for _ in 0..=MAX_INTERPRETERS {
        // A file that may be executed but not read is taken for a plain dynamic program.
        let Ok(file) = File::open(&image) else { return Ok((image, Kind::Dynamic)) };
        let mut head = [0u8; SCRIPT_HEAD];
        let length = file.read_at(&mut head, 0).unwrap_or(0);
        let head = &head[..length];
        let Some(interpreter) = interpreter(head) else {
            return Ok((image, classify(&file, head)));
        };
        if let Err(e) = executable(&interpreter) {
            return Err(Missing::NotExecutable(format!(
                "{}: its interpreter {} can't be executed: {e}; correct the first line",
                image.display(),
                interpreter.display()
            )));
        }
        image = interpreter;
    }
    Err(Missing::NotExecutable(format!("{}: too many interpreters, one for the other", path.display())))
}

/// The interpreter that a script's first line names.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|&b| b == b'\n').next()?;
    let name = line.split(|b| b" \t\0".contains(b)).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsString::from_vec(name.to_vec())))
}

/// What a file is that isn't a script.
fn classify(file: &File, head: &[u8]) -> Kind {
    const EM_X86_64: u16 = 62;
    let Some((&[0x7f, b'E', b'L', b'F', class, data, ..], _)) = head.split_first_chunk::<64>() else {
        let elf = head.starts_with(b"\x7fELF");
        return if elf { Kind::Foreign("a broken ELF file".into()) } else { Kind::Text };
    };
    if class != 2 {
        return Kind::Foreign("a 32-bit program".into());
    }
    let machine = read_u16(head, 18);
    if data != 1 || machine != EM_X86_64 {
        return Kind::Foreign(format!("a program for another machine (ELF machine {machine})"));
    }
    if has_interpreter(file, head) { Kind::Dynamic } else { Kind::Static }
}

fn read_u16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u16::from_le_bytes(*b))
}

/// True if one of the program headers is PT_INTERP.
fn has_interpreter(file: &File, head: &[u8]) -> bool {
    const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
    let offset = head.get(32..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_le_bytes(*b));
    let (size, count) = (u64::from(read_u16(head, 54)), u64::from(read_u16(head, 56)));
    (0..count).any(|i| {
        let mut kind = [0u8; 4];
        let at = i.checked_mul(size).and_then(|n| n.checked_add(offset));
        at.is_some_and(|at| file.read_exact_at(&mut kind, at).is_ok()) && kind == PT_INTERP
    })
}

/// True if executing the file makes the loader distrust the environment (AT_SECURE).
fn gains_privileges(path: &Path) -> bool {
    let Ok(meta) = fs::metadata(path) else { return false };
    let user = nix::unistd::geteuid().as_raw();
    let set_user = meta.mode() & libc::S_ISUID != 0 && meta.uid() != user;
    // The group bit counts only together with the group's execute bit.
    let group_bits = libc::S_ISGID | libc::S_IXGRP;
    let set_group = meta.mode() & group_bits == group_bits && meta.gid() != nix::unistd::getegid().as_raw();
    // Under no_new_privs nothing is gained, and nothing distrusted.
    (set_user || set_group || (user != 0 && has_capabilities(path)))
        && !nix::sys::prctl::get_no_new_privs().unwrap_or(false)
}

/// True if the file carries capabilities.
fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: two NUL-terminated strings, and no buffer: the call answers the attribute's size.
    let size =
        unsafe { libc::getxattr(path.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0) };
    size > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_are_found_as_the_kernel_finds_them() {
        let named = |line: &[u8]| interpreter(line).map(|p| p.to_string_lossy().into_owned());
        assert_eq!(named(b"#!/bin/sh\n").as_deref(), Some("/bin/sh"));
        assert_eq!(named(b"#! \t/usr/bin/env python3\nx").as_deref(), Some("/usr/bin/env"));
        assert_eq!(named(b"#!/bin/sh").as_deref(), Some("/bin/sh"));
        assert_eq!(named(b"#!\n/bin/sh"), None);
        assert_eq!(named(b"\x7fELF"), None);
    }

    #[test]
    fn a_command_is_searched_in_path_and_missing_ones_are_127() {
        assert_eq!(find(OsStr::new("true")).unwrap().kind, Kind::Dynamic);
        for name in ["", "no-such-command-here", "/no/such/file", "/etc/passwd/x"] {
            assert_eq!(find(OsStr::new(name)).unwrap_err().exit_code(), 127, "{name}");
        }
        for name in ["/", "/etc/passwd", "./"] {
            assert_eq!(find(OsStr::new(name)).unwrap_err().exit_code(), 126, "{name}");
        }
    }

    #[test]
    fn elf_kinds_are_told_apart() {
        let file = File::open("/bin/true").unwrap();
        let mut head = [0u8; 64];
        file.read_exact_at(&mut head, 0).unwrap();
        assert_eq!(classify(&file, &head), Kind::Dynamic);
        let null = File::open("/dev/null").unwrap(); // no program header can be read there
        assert_eq!(classify(&null, &head), Kind::Static);
        head[18] = 183;
        assert_eq!(
            classify(&file, &head),
            Kind::Foreign("a program for another machine (ELF machine 183)".into())
        );
        head[4] = 1;
        assert_eq!(classify(&file, &head), Kind::Foreign("a 32-bit program".into()));
        assert_eq!(classify(&file, b"\x7fELF"), Kind::Foreign("a broken ELF file".into()));
        assert_eq!(classify(&file, b"echo hello\n"), Kind::Text);
    }
}
