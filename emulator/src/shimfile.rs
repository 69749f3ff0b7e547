//! Where the preloadable library is: beside the binary, in `../lib` or `../lib/ummunotify`, else the copy that
//! the binary carries, written once to a directory of the user's.
//!
//! The library is loaded into every program that `run` starts, so a file that somebody else could have written
//! is never used: the cache directory and everything above it must belong to this user or to root, and a copy
//! found there that isn't equal to the embedded one, byte by byte, is replaced.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ummunotify_abi::config::SHIM_FILE;
use ummunotify_sys::process::Ignored;

/// The library as it was built together with this binary.
pub const EMBEDDED: &[u8] = include_bytes!(env!("UMMUNOTIFY_SHIM_PATH"));

/// Where the library was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Installed near the binary.
    Installed,
    /// Written from the binary to a cache directory, now or by an earlier run.
    Cached,
}

/// A library that can be preloaded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShimFile {
    /// Its absolute path, free of characters that the loader would take for a separator.
    pub path: PathBuf,
    /// Where that is.
    pub origin: Origin,
}

impl ShimFile {
    /// True if the file is the very library that this binary carries.
    pub fn is_embedded(&self) -> bool {
        File::open(&self.path).is_ok_and(|file| same_bytes(&file, EMBEDDED))
    }
}

/// Why there is no library.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is where it should be, and can't be used.
    #[error(
        "the preloadable library {path}: {why}; make it readable, or delete it and the built-in copy serves"
    )]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Unfit,
    },
    /// The embedded copy could be written nowhere.
    #[error(
        "no place to write the preloadable library to:{tried}; set XDG_CACHE_HOME to a directory that you own, or \
         install {SHIM_FILE} beside the binary or in ../lib"
    )]
    Nowhere {
        /// Every place and what was wrong with it.
        tried: String,
    },
}

/// Why a file or a directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// A call failed.
    #[error("{0}: {1}")]
    Call(&'static str, #[source] io::Error),
    /// Not a library for this machine.
    #[error("it isn't an x86-64 ELF library")]
    NotElf,
    /// The loader separates the entries of LD_PRELOAD at blanks and colons and expands `$`.
    #[error("its path has a blank, a colon or a dollar sign, which LD_PRELOAD can't hold")]
    Path,
    /// Others could write there.
    #[error("{0} could be changed by another user")]
    Untrusted(PathBuf),
}

/// Adds the name of the call that failed.
fn call(name: &'static str) -> impl FnOnce(io::Error) -> Unfit {
    move |e| Unfit::Call(name, e)
}

/// The library for the binary at `binary`.
///
/// # Errors
/// [`Error::Unusable`] where a file stands beside the binary and can't be used; [`Error::Nowhere`] where none
/// stands there and the embedded one can't be written either.
pub fn find(binary: &Path) -> Result<ShimFile, Error> {
    for path in places(binary) {
        match check(&path) {
            Ok(()) => return Ok(ShimFile { path, origin: Origin::Installed }),
            Err(Unfit::Call(_, e)) if is_absent(&e) => {}
            Err(Unfit::Path) => {} // the embedded copy goes where the path can be used
            Err(why) => return Err(Error::Unusable { path, why }),
        }
    }
    write_embedded(&cache_directories(), EMBEDDED)
}

/// Where an installed library may stand.
fn places(binary: &Path) -> Vec<PathBuf> {
    let Some(directory) = binary.parent() else { return Vec::new() };
    let mut places = vec![directory.join(SHIM_FILE)];
    if let Some(prefix) = directory.parent() {
        places.push(prefix.join("lib").join(SHIM_FILE));
        places.push(prefix.join("lib/ummunotify").join(SHIM_FILE));
    }
    places
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// True if the path can stand in LD_PRELOAD.
fn can_be_preloaded(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|b| b" \t\n:$".contains(b))
}

/// Opens a library and tries what the loader will do: read it, and map it executable.
fn check(path: &Path) -> Result<(), Unfit> {
    let file = File::open(path).map_err(call("open"))?;
    if !can_be_preloaded(path) {
        return Err(Unfit::Path);
    }
    check_file(&file)
}

fn check_file(file: &File) -> Result<(), Unfit> {
    const EM_X86_64: u8 = 62;
    const ET_DYN: u8 = 3;
    let mut header = [0u8; 20];
    match file.read_exact_at(&mut header, 0) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(Unfit::NotElf),
        answer => answer.map_err(call("read"))?,
    }
    let [0x7f, b'E', b'L', b'F', class, data, ..] = header else { return Err(Unfit::NotElf) };
    if (class, data) != (2, 1) || header[16..20] != [ET_DYN, 0, EM_X86_64, 0] {
        return Err(Unfit::NotElf);
    }
    // A file system mounted noexec answers EPERM to this, and only to this.
    // SAFETY: a new private mapping at an address of the kernel's choice, gone again before anyone uses it.
    let page = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            1,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(Unfit::Call("mmap executable (is it mounted noexec?)", io::Error::last_os_error()));
    }
    // SAFETY: the mapping was made above and nobody knows it.
    unsafe { libc::munmap(page, 1) };
    Ok(())
}

/// Directories for the embedded copy, best first, each with the mode to make it with.
fn cache_directories() -> Vec<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let mut places = Vec::new();
    if let Some(cache) = absolute("XDG_CACHE_HOME") {
        places.push(cache.join("ummunotify"));
    }
    // A home that doesn't exist is meant not to exist: Debian gives /nonexistent to accounts without one.
    if let Some(home) = absolute("HOME").filter(|home| home.is_dir()) {
        places.push(home.join(".cache/ummunotify"));
    }
    places.push(PathBuf::from(format!("/tmp/ummunotify-{}", nix::unistd::geteuid())));
    places
}

/// Writes `library` to the first of `directories` that can take it, or finds it written there.
fn write_embedded(directories: &[PathBuf], library: &[u8]) -> Result<ShimFile, Error> {
    let mut tried = String::new();
    for directory in directories {
        match write_into(directory, library) {
            Ok(path) => return Ok(ShimFile { path, origin: Origin::Cached }),
            Err(why) => {
                // Writing to a String can't fail.
                let _ = write!(tried, " {} ({why});", directory.display());
            }
        }
    }
    tried.pop();
    Err(Error::Nowhere { tried })
}

/// The file in `directory`, written if it wasn't there.
fn write_into(directory: &Path, library: &[u8]) -> Result<PathBuf, Unfit> {
    let versioned = directory.join(format!("{}-{:016x}", env!("CARGO_PKG_VERSION"), fingerprint(library)));
    let path = versioned.join(SHIM_FILE);
    if !can_be_preloaded(&path) {
        return Err(Unfit::Path);
    }
    DirBuilder::new().recursive(true).mode(0o700).create(&versioned).map_err(call("mkdir"))?;
    trusted(&versioned)?;
    match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path) {
        Ok(file) if same_bytes(&file, library) => return check_file(&file).map(|()| path),
        Ok(_) => {} // cut short by a crash, or damaged
        Err(e) if is_absent(&e) => {}
        Err(e) => return Err(Unfit::Call("open", e)),
    }
    write_new(&versioned, &path, library)?;
    check(&path).map(|()| path.clone()).inspect_err(|_| {
        // Useless there, and this run made it: nothing to do if that fails too.
        let _ = fs::remove_file(&path);
    })
}

/// Writes a file under a name of its own and renames it: whoever looks sees nothing or all of it.
fn write_new(directory: &Path, path: &Path, library: &[u8]) -> Result<(), Unfit> {
    let mut name = OsString::from(".");
    name.push(format!("{SHIM_FILE}.{}", std::process::id()));
    let temporary = directory.join(name);
    // What a killed run of the same pid left; the directory is ours alone.
    let _ = fs::remove_file(&temporary);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o644).custom_flags(libc::O_NOFOLLOW);
    // A limit of the size of files (ulimit -f) is an error like others, and no death.
    let _alive = Ignored::new(libc::SIGXFSZ);
    let written = options
        .open(&temporary)
        .map_err(call("create"))
        .and_then(|mut file| file.write_all(library).map_err(call("write")))
        .and_then(|()| fs::rename(&temporary, path).map_err(call("rename")));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// True if nobody but this user and root can change what stands at `directory`: it and every directory above
/// it belong to one of the two, and others can't write there, or can't touch what isn't theirs (sticky).
fn trusted(directory: &Path) -> Result<(), Unfit> {
    let user = nix::unistd::geteuid().as_raw();
    let real = directory.canonicalize().map_err(call("realpath"))?;
    for part in real.ancestors() {
        let meta = fs::symlink_metadata(part).map_err(call("stat"))?;
        let sticky_above = meta.mode() & libc::S_ISVTX != 0 && part != real;
        if ![0, user].contains(&meta.uid()) || (meta.mode() & 0o022 != 0 && !sticky_above) {
            return Err(Unfit::Untrusted(part.to_path_buf()));
        }
    }
    Ok(())
}

/// Compares a file with what it should be.
fn same_bytes(file: &File, expected: &[u8]) -> bool {
    let mut content = Vec::with_capacity(expected.len() + 1);
    file.metadata().is_ok_and(|m| m.is_file() && m.len() == expected.len() as u64)
        && file.take(expected.len() as u64 + 1).read_to_end(&mut content).is_ok()
        && content == expected
}

/// FNV-1a, eight bytes at a time: names a version of the file. It proves nothing, so the bytes are compared too.
fn fingerprint(bytes: &[u8]) -> u64 {
    let mix = |h: u64, word: u64| (h ^ word).wrapping_mul(0x0100_0000_01b3);
    let (words, rest) = bytes.as_chunks::<8>();
    let h = words.iter().fold(0xcbf2_9ce4_8422_2325, |h, word| mix(h, u64::from_le_bytes(*word)));
    rest.iter().fold(h, |h, &byte| mix(h, u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A directory of the test's own, gone at its end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ummunotify-test-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Something that passes for a library.
    fn library() -> Vec<u8> {
        let mut elf = vec![0u8; 9000];
        elf[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        elf[16..20].copy_from_slice(&[3, 0, 62, 0]);
        elf
    }

    #[test]
    fn the_embedded_copy_is_written_once_and_found_again() {
        let scratch = Scratch::new("once");
        let places = [scratch.0.join("cache")];
        let first = write_embedded(&places, &library()).unwrap();
        let inode = fs::metadata(&first.path).unwrap().ino();
        assert_eq!(fs::read(&first.path).unwrap(), library());
        assert_eq!(write_embedded(&places, &library()).unwrap(), first);
        assert_eq!(fs::metadata(&first.path).unwrap().ino(), inode);
        let left: Vec<_> = fs::read_dir(first.path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "a temporary file was left");
    }

    #[test]
    fn a_copy_that_differs_is_replaced() {
        let scratch = Scratch::new("differs");
        let places = [scratch.0.join("cache")];
        let found = write_embedded(&places, &library()).unwrap();
        let mut other = library();
        other[8000] = 1;
        for damaged in [&other[..], &other[..5000], b""] {
            fs::write(&found.path, damaged).unwrap();
            assert_eq!(write_embedded(&places, &library()).unwrap(), found);
            assert_eq!(fs::read(&found.path).unwrap(), library());
        }
    }

    #[test]
    fn a_link_in_the_place_of_the_copy_is_refused() {
        let scratch = Scratch::new("link");
        let places = [scratch.0.join("cache")];
        let found = write_embedded(&places, &library()).unwrap();
        fs::remove_file(&found.path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &found.path).unwrap();
        let error = write_embedded(&places, &library()).unwrap_err().to_string();
        assert!(error.contains("(open:"), "{error}");
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_not_used() {
        let scratch = Scratch::new("others");
        let open = scratch.0.join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        let fallback = scratch.0.join("own");
        let found = write_embedded(&[open.join("cache"), fallback.clone()], &library()).unwrap();
        assert!(found.path.starts_with(fallback));
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_not_used() {
        let scratch = Scratch::new("split");
        for name in ["a b", "a:b", "a$LIB"] {
            let error = write_embedded(&[scratch.0.join(name)], &library()).unwrap_err().to_string();
            assert!(error.contains("LD_PRELOAD can't hold"), "{error}");
        }
    }

    #[test]
    fn each_place_that_failed_is_named() {
        let error = write_embedded(&[PathBuf::from("/proc/none"), PathBuf::from("/dev/null/x")], &library());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("/proc/none (mkdir:") && error.contains("/dev/null/x (mkdir:"), "{error}");
    }

    #[test]
    fn a_file_beside_the_binary_wins_and_must_be_a_library() {
        let scratch = Scratch::new("beside");
        let (bin, lib) = (scratch.0.join("bin"), scratch.0.join("lib"));
        fs::create_dir(&bin).unwrap();
        fs::create_dir(&lib).unwrap();
        fs::write(lib.join(SHIM_FILE), library()).unwrap();
        let found = find(&bin.join("ummunotify")).unwrap();
        assert_eq!(found, ShimFile { path: lib.join(SHIM_FILE), origin: Origin::Installed });
        fs::write(bin.join(SHIM_FILE), "no library").unwrap();
        let error = find(&bin.join("ummunotify")).unwrap_err().to_string();
        assert!(error.contains("isn't an x86-64 ELF library"), "{error}");
    }
}
