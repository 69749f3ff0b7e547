//! Which address space a trapped task lives in.

use std::sync::Arc;

use ummunotify_sys::process;

use super::MainLoop;
use crate::supervisor::space::Space;

/// Where a task lives.
#[derive(Debug)]
pub(super) enum Home {
    /// In this space.
    Space(Arc<Space>),
    /// In none that we know.
    Elsewhere,
    /// In one of these or elsewhere: its mapping table must show.
    Perhaps(Vec<Arc<Space>>),
}

impl MainLoop {
    pub(super) fn before_exec(&mut self, tid: u32, home: Home) {
        match home {
            Home::Elsewhere => {}
            Home::Space(space) => self.member_execs(tid, &space),
            Home::Perhaps(spaces) => spaces.iter().for_each(|space| self.member_execs(tid, space)),
        }
    }

    fn member_execs(&mut self, tid: u32, space: &Space) {
        if process::has_thread(space.pid, tid) {
            space.set_executing(tid);
            self.members.clear();
        } else {
            // A vfork child that calls execve leaves the space to its parent.
            self.members.remove(&tid);
        }
    }

    /// Where the task lives. No step here can wait for a target's mapping lock. `idle`: also in spaces without a
    /// context, since one may be opened before the call ends.
    pub(super) fn home(&mut self, tid: u32, idle: bool) -> Home {
        let spaces = self.shared.spaces();
        if spaces.len() == 1
            && let Some(space) = self.members.get(&tid)
        {
            return Home::Space(Arc::clone(space));
        }
        if self.strangers.has(tid) {
            return Home::Elsewhere;
        }
        self.strangers.remove(tid);
        let spaces: Vec<_> =
            spaces.into_iter().filter(|space| !space.is_gone() && (idle || !space.is_idle())).collect();
        let lives_in = |space: &&Arc<Space>| {
            space.executing().is_none() && process::has_thread(space.pid, tid) && space.process_alive()
        };
        if let Some(space) = spaces.iter().find(lives_in) {
            self.members.insert(tid, Arc::clone(space));
            return Home::Space(Arc::clone(space));
        }
        // Not remembered: it may be a vfork child, which leaves by an execve that isn't trapped.
        if let [space] = spaces.as_slice()
            && space.executing().is_none()
            && process::same_address_space(tid, space.pid).unwrap_or(false)
        {
            return Home::Space(Arc::clone(space));
        }
        // Before the look, so that what is seen holds for this process and no later one of that number.
        let pidfd = process::pidfd_open(tid);
        let mut perhaps = Vec::new();
        for space in spaces {
            if space.executing().is_some() && (tid == 0 || process::has_thread(space.pid, tid)) {
                perhaps.push(space);
                continue;
            }
            match process::same_address_space(tid, space.pid) {
                Ok(true) => return Home::Space(space),
                // A first thread that has ended has no memory to compare with.
                Ok(false) if !space.has_memory() => perhaps.push(space),
                Ok(false) => {}
                Err(_) => perhaps.push(space),
            }
        }
        if !perhaps.is_empty() {
            return Home::Perhaps(perhaps);
        }
        // A pidfd can be had of a process's first task only; other tasks of strangers are looked up each time.
        if let Ok(pidfd) = pidfd {
            self.strangers.insert(tid, pidfd);
        }
        Home::Elsewhere
    }
}
