//! Facts about a task that its /proc entry tells.

use std::sync::Arc;

use crate::target::{self, KernelTraits, Mapping, ProcessTarget, Target};

/// The mapping table of a task. The one fact here that can wait for the task's mapping lock.
///
/// A first thread that has ended (pthread_exit in main) stays as a zombie without memory while the rest of its
/// process goes on: its own table is empty then, and that of another thread is the process's.
pub fn mappings(tid: u32, kernel: &KernelTraits) -> target::Result<Arc<[Mapping]>> {
    let own = ProcessTarget::new(tid.cast_signed(), false, kernel).mappings();
    if own.as_ref().is_ok_and(|table| !table.is_empty()) {
        return own;
    }
    let threads = std::fs::read_dir(format!("/proc/{tid}/task")).into_iter().flatten();
    let others = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    others
        .filter(|other| *other != tid)
        .find_map(|other| {
            let table = ProcessTarget::new(other.cast_signed(), false, kernel).mappings().ok()?;
            (!table.is_empty()).then_some(table)
        })
        .map_or(own, Ok)
}

/// The process (thread group) that a task belongs to; `None` if it is gone or not visible.
pub fn process_of(tid: u32) -> Option<u32> {
    status_field(tid, "Tgid:")
}

/// Whether there is a task of that number. Any thread has an entry in /proc, shown or not.
pub fn exists(tid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{tid}")).exists()
}

/// A thread of process `pid` beside the first that hasn't ended; `None` if there is none.
pub fn other_thread(pid: u32) -> Option<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let mut others = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    others.find(|tid| *tid != pid && !is_zombie(*tid))
}

/// Whether the task has ended and waits to be reaped, or for the other threads of its process.
pub fn is_zombie(tid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{tid}/status"))
        .is_ok_and(|status| status.lines().any(|line| line.starts_with("State:\tZ")))
}

/// Whether a process is that user's alone: its real, effective and saved ids all are.
pub fn belongs_to(pid: u32, uid: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let Some(ids) = status.lines().find_map(|line| line.strip_prefix("Uid:")) else { return false };
    let mut ids = ids.split_whitespace().take(3).peekable();
    ids.peek().is_some() && ids.all(|id| id.parse() == Ok(uid))
}

fn status_field(tid: u32, name: &str) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// Whether a task's pid namespace is the reader's own, so that both call a task by the same number. False
/// where that can't be told.
pub fn in_our_pid_namespace(pid: u32) -> bool {
    let ours = std::fs::read_link("/proc/self/ns/pid");
    let theirs = std::fs::read_link(format!("/proc/{pid}/ns/pid"));
    matches!((ours, theirs), (Ok(a), Ok(b)) if a == b)
}
