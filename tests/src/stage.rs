//! The folder in which a test's programs run.

use crate::program::{Mode, Program};
use crate::{Account, Client, leftovers};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, id};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use ummunotify::shimfile::EMBEDDED;
use ummunotify_abi::config::SHIM_FILE;

/// A folder of its own for one test, which every user can read, with the emulator, the compiled clients and a
/// `work` folder that every user can write to. An ordinary user may not be able to reach the checkout, so
/// everything a program needs is copied here.
///
/// When it is dropped, no process of it may be left, and it is removed.
#[derive(Debug)]
pub struct Stage {
    folder: PathBuf,
    target: PathBuf,
    /// Process groups of the programs that were started.
    groups: Mutex<Vec<i32>>,
}

impl Stage {
    /// A stage with copies of the `ummunotify` binary and of the shim that was built with it.
    ///
    /// # Panics
    /// If the binary wasn't built, with a sentence that says so.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("ummunotify-test-{}-{number}", id()));
        let stage = Self { folder, target: target_folder(), groups: Mutex::default() };
        make_folder(&stage.folder, 0o755);
        make_folder(&stage.folder.join("bin"), 0o755);
        make_folder(&stage.work(), 0o1777);
        stage.copy(&stage.target.join("ummunotify"), &stage.binary());
        // The binary carries it; beside the binary it is found first, and plain preload needs a file.
        fs::write(stage.shim(), EMBEDDED).unwrap_or_else(|e| panic!("{}: {e}", stage.shim().display()));
        set_mode(&stage.shim(), 0o755);
        stage
    }

    /// The `ummunotify` binary.
    pub fn binary(&self) -> PathBuf {
        self.folder.join("bin/ummunotify")
    }

    /// The preloadable library.
    pub fn shim(&self) -> PathBuf {
        self.folder.join("bin").join(SHIM_FILE)
    }

    /// The folder that programs run in and may write to.
    pub fn work(&self) -> PathBuf {
        self.folder.join("work")
    }

    /// The stage's own folder: every process of the emulator that was started here names it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of the build, for what other builds may keep there.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Compiles a client if need be, and puts it on the stage.
    pub fn client(&self, client: &Client) -> PathBuf {
        let compiled = client.compile(&self.target);
        let staged = self.folder.join("bin").join(client.file_name());
        if !staged.exists() {
            self.copy(&compiled, &staged);
        }
        staged
    }

    /// Puts one of the library's examples on the stage.
    ///
    /// # Panics
    /// If it wasn't built, with a sentence that says so.
    pub fn example(&self, name: &str) -> PathBuf {
        self.staged(&self.target.join("examples").join(name), name)
    }

    /// Puts another program of the workspace on the stage.
    ///
    /// # Panics
    /// If it wasn't built, with a sentence that says so.
    pub fn program_of_the_build(&self, name: &str) -> PathBuf {
        self.staged(&self.target.join(name), name)
    }

    fn staged(&self, file: &Path, name: &str) -> PathBuf {
        let staged = self.folder.join("bin").join(name);
        if !staged.exists() {
            self.copy(file, &staged);
        }
        staged
    }

    /// A program to be run in `mode` by `account`. `path` may be a bare name that PATH resolves.
    pub fn program(&self, mode: Mode, account: Account, path: impl AsRef<Path>) -> Program<'_> {
        Program::new(self, mode, account, path.as_ref())
    }

    /// The processes that execute this stage's `ummunotify` binary: supervisors, once `run` has become its
    /// command.
    pub fn supervisors(&self) -> Vec<i32> {
        leftovers::executing(&self.binary())
    }

    /// Remembers the process group of a program that was started.
    pub(crate) fn started(&self, group: i32) {
        self.groups.lock().expect("no holder panics").push(group);
    }

    /// Forgets the process group of a program that has ended, unless somebody is left in it: its number may come back as
    /// that of somebody else's.
    pub(crate) fn ended(&self, group: i32) {
        if killpg(Pid::from_raw(group), None) == Err(Errno::ESRCH)
            && let Ok(mut groups) = self.groups.lock()
        {
            groups.retain(|known| *known != group);
        }
    }

    /// Insists that no process of this stage is left: no supervisor, no child of a program.
    pub fn assert_nothing_left(&self) {
        let left = self.end_leftovers();
        assert!(left.is_empty(), "processes outlived their programs (killed now): {left:?}");
    }

    /// Waits for the processes of this stage to end; those that don't are killed and returned.
    fn end_leftovers(&self) -> Vec<leftovers::Leftover> {
        let groups = self.groups.lock().map(|groups| groups.clone()).unwrap_or_default();
        let left = leftovers::wait(&self.folder, &groups);
        for process in &left {
            // They name this stage, so they are this test's own.
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
        }
        left
    }

    /// Copies a file so that every user can read and execute it.
    fn copy(&self, from: &Path, to: &Path) {
        assert!(
            from.exists(),
            "{} doesn't exist: build the whole workspace before its tests (cargo build --workspace --all-targets)",
            from.display()
        );
        // By another process, not fs::copy: whatever a test beside this one forks at that moment would hold a
        // descriptor of ours that is open for writing, and executing the file would fail with ETXTBSY.
        let copied = Command::new("cp").arg(from).arg(to).status().unwrap_or_else(|e| panic!("cp: {e}"));
        assert!(copied.success(), "cp {} {}: {copied}", from.display(), to.display());
        set_mode(to, 0o755);
    }
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let left = self.end_leftovers();
        let _ = fs::remove_dir_all(&self.folder);
        // Where the test failed already, a second panic would abort the run and hide why.
        if !std::thread::panicking() {
            assert!(left.is_empty(), "processes outlived their programs (killed now): {left:?}");
        }
    }
}

/// The folder of the build that this test belongs to: tests are executed from its `deps`.
fn target_folder() -> PathBuf {
    let own = env::current_exe().expect("the test knows its own file");
    let deps = own.parent().expect("a file lies in a folder");
    deps.parent().expect("deps lies in the build's folder").to_owned()
}

/// Makes a folder with exactly these permissions, whatever the umask.
fn make_folder(path: &Path, mode: u32) {
    fs::create_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    set_mode(path, mode);
}

/// Sets the permissions of a file.
fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
