//! Whether a process has an io_uring ring.

use std::fs;

use super::task;

/// What a ring is called among descriptors and mappings.
const NAME: &str = "anon_inode:[io_uring]";

/// True if the process has a ring, by its descriptors or by its mappings (a ring's descriptor can be closed while
/// its memory is mapped, or be registered with the ring alone). True when it can't be said.
pub fn has_ring(pid: u32) -> bool {
    // A first thread that has ended has neither; any other shows both, since threads share them as a rule.
    let thread = match task::is_zombie(pid) {
        Ok(true) => task::other_thread(pid),
        known => known.map(|_| Some(pid)),
    };
    let thread = thread.unwrap_or(None);
    thread.is_none_or(|tid| by_descriptor(tid).unwrap_or(true) || by_mapping(tid).unwrap_or(true))
}

fn by_descriptor(pid: u32) -> std::io::Result<bool> {
    let mut found = false;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        found |= match fs::read_link(entry?.path()) {
            Ok(name) => name.as_os_str() == NAME,
            // One that was closed meanwhile is none.
            Err(e) => !task::is_gone(&e),
        };
    }
    Ok(found)
}

fn by_mapping(pid: u32) -> std::io::Result<bool> {
    let table = fs::read(format!("/proc/{pid}/maps"))?;
    Ok(table.split(|b| *b == b'\n').any(|line| line.ends_with(NAME.as_bytes())))
}
