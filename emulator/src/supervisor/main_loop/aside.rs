//! What is done before a call goes on and can wait for its process: on a thread of its own.

use std::sync::Arc;

use ummunotify_abi::PageRange;
use ummunotify_sys::notify::Notification;

use super::{MainLoop, Trapped};
use crate::supervisor::caller::Caller;
use crate::supervisor::gate::Held;
use crate::supervisor::shared::Shared;
use crate::supervisor::space::Space;
use crate::supervisor::{fault, log, open_call};
use crate::target::{ProcessTarget, Target as _};
use crate::trap::FaultLayer;

impl MainLoop {
    /// A ring is about to be set up: the call waits until userfaultfd watches. That can wait for the target's
    /// mapping lock, as the call's own mappings would.
    pub(super) fn before_ring(&self, call: &Trapped, spaces: Vec<Arc<Space>>) {
        let Trapped { held, .. } = *call;
        if self.shared.layers.fault == FaultLayer::Off
            || spaces.iter().all(|s| s.fault.is_on() && s.fault.bypass())
        {
            self.proceed(held);
            return;
        }
        if let ([space], Held::Notified(id)) = (spaces.as_slice(), held)
            && space.lacks_userfaultfd_of_a_shim()
        {
            return self.before_ring_without_shim(call, id, Arc::clone(space));
        }
        self.aside(held, Vec::new(), PageRange::ALL, move |shared| {
            for space in &spaces {
                if let Err(e) = space.expect_bypass(&shared.kernel) {
                    let errno = e.raw_os_error().map_or(nix::Error::EIO, nix::Error::from_raw);
                    fault::say_missing(space, errno, "it sets up an io_uring ring");
                }
            }
        });
    }

    /// The same where no shim has given a userfaultfd: the program is made to.
    fn before_ring_without_shim(&self, call: &Trapped, id: u64, space: Arc<Space>) {
        let shared = Arc::clone(&self.shared);
        let call = Notification {
            id,
            tid: call.tid,
            arch: call.call.arch,
            nr: call.call.nr,
            args: call.call.args,
            instruction_pointer: call.behind,
        };
        let started =
            std::thread::Builder::new().name("aside".into()).stack_size(256 * 1024).spawn(move || {
                let Some(listener) = shared.gate.listener.get() else { return };
                let caller = Caller { call: &call, listener };
                if !open_call::before_ring(&shared, &caller, &space) {
                    caller.proceed();
                }
            });
        if let Err(e) = started {
            log::warning!("can't start a thread: {e}; userfaultfd may miss what is to come");
            self.shared.gate.listener_says(|listener| listener.proceed(id));
        }
    }

    /// A userfaultfd of the application is about to watch something: ours steps aside, for a range can have one only.
    pub(super) fn before_own_watch(&self, call: &Trapped, argument: u64, spaces: Vec<Arc<Space>>) {
        if spaces.iter().all(|s| !s.fault.is_on()) {
            self.proceed(call.held);
            return;
        }
        let tid = call.tid;
        self.aside(call.held, Vec::new(), PageRange::ALL, move |shared| {
            let mut target = ProcessTarget::new(tid.cast_signed(), true, &shared.kernel);
            let mut words = [0u8; 16];
            let range = match target.read_memory(argument, &mut words) {
                Ok(()) => {
                    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| words[at + i]));
                    PageRange::new(word(0), word(0).saturating_add(word(8)))
                }
                Err(_) => PageRange::ALL,
            };
            for space in &spaces {
                if space.give_away(range, &shared.kernel) {
                    log::warning!(
                        "process {}: a userfaultfd of its own watches [{:#x},{:#x}): ours doesn't any more, and what \
                         io_uring changes there goes unseen",
                        space.pid,
                        range.start,
                        range.end
                    );
                }
            }
        });
    }

    /// Does something that can wait for a target on a thread of its own, before a call goes on.
    /// It goes on as one that was recorded in `spaces` as `piece`.
    pub(super) fn aside(
        &self,
        held: Held,
        spaces: Vec<Arc<Space>>,
        piece: PageRange,
        work: impl FnOnce(&Shared) + Send + 'static,
    ) {
        let (shared, theirs) = (Arc::clone(&self.shared), spaces.clone());
        let started =
            std::thread::Builder::new().name("aside".into()).stack_size(256 * 1024).spawn(move || {
                work(&shared);
                shared.gate.recorded_elsewhere(held, &theirs, &[piece]);
            });
        if let Err(e) = started {
            log::warning!("can't start a thread: {e}; userfaultfd may miss what is to come");
            self.shared.gate.recorded(held, &spaces, &[piece]);
        }
    }
}
