//! Processes that live in no space of ours.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use ummunotify_sys::process;

/// So many are kept before those that have ended are looked for.
const LEAST: usize = 32;
/// So many at most, and never more than a quarter of the descriptors that we may have.
const MOST: usize = 4096;

/// Processes, by their first task, that were seen in no space. A wrong entry would miss invalidations: each use asks the
/// pidfd, opened before that was seen, whether it still is that process.
#[derive(Debug)]
pub(super) struct Strangers {
    known: HashMap<u32, OwnedFd>,
    room: usize,
    most: usize,
}

impl Strangers {
    /// For a process that may have `limit` descriptors.
    pub(super) fn new(limit: u64) -> Self {
        let most = usize::try_from(limit / 4).unwrap_or(MOST).min(MOST);
        Self { known: HashMap::new(), room: LEAST.min(most), most }
    }

    /// Whether the task is a known one's first.
    pub(super) fn has(&self, tid: u32) -> bool {
        self.known.get(&tid).is_some_and(process::pidfd_alive)
    }

    /// Remembers one, as long as there is room: all are forgotten if there is none. Those that have ended go from time to time, so that many short ones in turn need few descriptors:
    /// the kernel's table of these grows slowly in a process with threads.
    pub(super) fn insert(&mut self, tid: u32, pidfd: OwnedFd) {
        if self.known.len() >= self.room {
            self.known.retain(|_, pidfd| process::pidfd_alive(pidfd));
            if self.known.len() >= self.most {
                self.known.clear();
            }
            self.room = (2 * self.known.len()).max(LEAST).min(self.most);
        }
        self.known.insert(tid, pidfd);
    }

    /// Forgets one.
    pub(super) fn remove(&mut self, tid: u32) {
        self.known.remove(&tid);
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.known.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().expect("a process")
    }

    fn meet(strangers: &mut Strangers, child: &Child) {
        strangers.insert(child.id(), process::pidfd_open(child.id()).expect("a pidfd"));
    }

    fn end(mut child: Child) {
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    #[test]
    fn many_that_end_leave_nothing_and_who_lives_is_forgotten() {
        let mut strangers = Strangers::new(1 << 20);
        let lasting: Vec<_> = (0..LEAST + 8).map(|_| sleeper()).collect();
        lasting.iter().for_each(|child| meet(&mut strangers, child));
        for _ in 0..4 * LEAST {
            let short = sleeper();
            meet(&mut strangers, &short);
            assert!(strangers.has(short.id()));
            let tid = short.id();
            end(short);
            assert!(!strangers.has(tid), "it has ended");
        }
        assert!(strangers.known.len() <= 2 * lasting.len() + 1, "{}", strangers.known.len());
        assert!(lasting.iter().all(|child| strangers.has(child.id())));
        strangers.remove(lasting[0].id());
        assert!(!strangers.has(lasting[0].id()));
        strangers.clear();
        assert!(!strangers.has(lasting[1].id()));
        // Where few descriptors can be had, a few are kept.
        for limit in [0, 4, 64] {
            let mut strangers = Strangers::new(limit);
            for child in &lasting {
                meet(&mut strangers, child);
                assert!(strangers.has(child.id()));
                assert!(strangers.known.len() as u64 <= (limit / 4).max(1));
            }
        }
        lasting.into_iter().for_each(end);
    }
}
