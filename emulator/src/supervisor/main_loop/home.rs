//! Which address space a trapped task lives in.

use std::sync::Arc;

use ummunotify_sys::process;

use super::MainLoop;
use crate::supervisor::space::Space;
use crate::supervisor::task;

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
        // A vfork child that calls execve leaves the space to its parent.
        if task::process_of(tid) == Some(space.pid) {
            space.set_executing(tid);
        }
        self.members.clear();
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
        if let Some(pidfd) = self.strangers.get(&tid) {
            if process::pidfd_alive(pidfd) {
                return Home::Elsewhere;
            }
            self.strangers.remove(&tid);
        }
        let pidfd = process::pidfd_open(tid);
        let pid = task::process_of(tid);
        let mut perhaps = Vec::new();
        for space in spaces {
            if space.is_gone() || !idle && space.is_idle() {
                continue;
            }
            if space.executing().is_some() && (pid == Some(space.pid) || pid.is_none()) {
                perhaps.push(space);
            } else if pid == Some(space.pid) && space.process_alive() {
                self.members.insert(tid, Arc::clone(&space));
                return Home::Space(space);
            } else {
                match process::same_address_space(tid, space.pid) {
                    Ok(true) => {
                        self.members.insert(tid, Arc::clone(&space));
                        return Home::Space(space);
                    }
                    // A first thread that has ended has no memory to compare with.
                    Ok(false) if task::is_zombie(space.pid) => perhaps.push(space),
                    Ok(false) => {}
                    Err(_) => perhaps.push(space),
                }
            }
        }
        if !perhaps.is_empty() {
            return Home::Perhaps(perhaps);
        }
        // A pidfd can be had of a process's first task only; other tasks of strangers are looked up each time.
        if let (Ok(pidfd), Some(pid)) = (pidfd, pid)
            && pid == tid
        {
            if self.strangers.len() >= 4096 {
                self.strangers.clear();
            }
            self.strangers.insert(tid, pidfd);
        }
        Home::Elsewhere
    }
}
