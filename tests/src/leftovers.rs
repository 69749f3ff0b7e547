//! Finds processes that outlived the programs of a [`crate::Stage`].

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long the emulator may take to notice that its last client is gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// A process that belongs to a stage.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Leftover {
    pub(crate) pid: i32,
    /// What it runs, for the message.
    what: String,
}

/// Processes of the stage in `folder`: they execute or map a file of it, carry its name in their environment, or
/// are in one of the process groups that its programs were started in.
fn find(folder: &Path, groups: &[i32]) -> Vec<Leftover> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir("/proc") else { return found };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let path = entry.path();
        // The kernel appends " (deleted)" to the name of a file that is gone; the folder still begins it.
        let exe = fs::read_link(path.join("exe")).unwrap_or_default();
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        // A process may have unmapped its environment and keep but a page of the shim.
        let maps = fs::read(path.join("maps")).unwrap_or_default();
        let named = holds(&environment, folder) || holds(&maps, folder);
        let stat = fs::read_to_string(path.join("stat")).unwrap_or_default();
        let grouped = stat_ids(&stat).is_some_and(|ids| ids.iter().any(|id| groups.contains(id)));
        // A zombie holds nothing but its number, and it is its parent's to reap.
        let zombie = stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'));
        if (exe.starts_with(folder) || named || grouped) && !zombie {
            let comm = fs::read_to_string(path.join("comm")).unwrap_or_default();
            found.push(Leftover { pid, what: format!("{} ({})", exe.display(), comm.trim_end()) });
        }
    }
    found
}

/// Processes that execute exactly this file.
pub(crate) fn executing(file: &Path) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries
        .flatten()
        .filter(|entry| fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == file));
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// True if `text` holds the folder's name.
fn holds(text: &[u8], folder: &Path) -> bool {
    let name = folder.as_os_str().as_encoded_bytes();
    // Another stage's name may go on with a digit.
    text.windows(name.len() + 1)
        .any(|window| window.starts_with(name) && !window[name.len()].is_ascii_digit())
}

/// Process group and session out of /proc/PID/stat; the name in parentheses may hold anything.
fn stat_ids(stat: &str) -> Option<[i32; 2]> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(2);
    Some([fields.next()?.parse().ok()?, fields.next()?.parse().ok()?])
}

/// Waits until no process of the stage is left; those that stay are returned.
pub(crate) fn wait(folder: &Path, groups: &[i32]) -> Vec<Leftover> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = find(folder, groups);
        if found.is_empty() || Instant::now() >= deadline {
            return found;
        }
        sleep(Duration::from_millis(20));
    }
}
