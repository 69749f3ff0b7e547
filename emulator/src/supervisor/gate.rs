//! Trapped calls, and how they are let go on: by the filter's listener, or by the tracer.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::{Receiver, Sender, unbounded};
use nix::sys::eventfd::EventFd;
use ummunotify_abi::PageRange;
use ummunotify_sys::notify::Listener;

use super::log;
use super::sleepers::GoOn;
use super::space::Space;

/// What holds a call at its entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held {
    /// The listener, which calls it by this number.
    Notified(u64),
    /// The tracer.
    Traced {
        /// The task.
        tid: u32,
        /// Its calls are counted: another one of that task, or of a later task of that number, isn't meant.
        call: u64,
    },
}

/// A traced call may go on.
#[derive(Debug)]
pub struct Answer {
    /// The task that made it.
    pub tid: u32,
    /// Its number, see [`Held::Traced`].
    pub call: u64,
    /// The address spaces in which it was recorded.
    pub spaces: Vec<Arc<Space>>,
    /// What was recorded there: to be looked at again at the end of the call.
    pub pieces: Vec<PageRange>,
}

/// See the module.
#[derive(Debug)]
pub struct Gate {
    /// The one listener, once there is one.
    pub listener: Arc<OnceLock<Listener>>,
    /// The tracer is at work, and no listener comes.
    traced: AtomicBool,
    outbox: Sender<Answer>,
    /// For the tracer: calls that may go on.
    pub answers: Receiver<Answer>,
    wake: Arc<EventFd>,
}

impl Gate {
    /// Without a listener yet. `wake` wakes the tracer.
    pub fn new(wake: Arc<EventFd>) -> Self {
        let (outbox, answers) = unbounded();
        Self { listener: Arc::default(), traced: AtomicBool::new(false), outbox, answers, wake }
    }

    /// From here on calls are held by the tracer.
    pub fn set_traced(&self) {
        self.traced.store(true, Ordering::Release);
    }

    /// See [`Self::set_traced`].
    pub fn is_traced(&self) -> bool {
        self.traced.load(Ordering::Acquire)
    }

    /// Lets a call go on of which nothing needed to be recorded in `spaces`; it may yet act on `reach`, which is looked
    /// at again at its end. For the tracer itself, which looks at the answers before it sleeps.
    pub fn answer(&self, held: Held, spaces: &[Arc<Space>], reach: &[PageRange]) {
        match held {
            Held::Notified(id) => self.listener_says(|listener| listener.proceed(id)),
            Held::Traced { tid, call } => {
                let (spaces, pieces) = (spaces.to_vec(), reach.to_vec());
                // It fails only when the tracer has ended, and with it the process ends.
                let _ = self.outbox.send(Answer { tid, call, spaces, pieces });
            }
        }
    }

    /// Lets a call go on that was recorded in `spaces` as `pieces`, when the rings that this made have been heard: only
    /// programs that are served through a listener have readers who keep a ring waiting. For the tracer itself.
    pub fn recorded(&self, held: Held, spaces: &[Arc<Space>], pieces: &[PageRange]) {
        match held {
            Held::Notified(id) => {
                let call = GoOn::new(&self.listener, id);
                spaces.iter().for_each(|space| space.delay(&call));
            }
            Held::Traced { .. } => self.answer(held, spaces, pieces),
        }
    }

    /// The same for any other thread.
    pub fn recorded_elsewhere(&self, held: Held, spaces: &[Arc<Space>], pieces: &[PageRange]) {
        self.recorded(held, spaces, pieces);
        if let Held::Traced { .. } = held {
            // It counts up to 2^64 - 2: it can't fail.
            let _ = self.wake.write(1);
        }
    }

    /// Does something to the notified call; one whose task was killed is no error.
    pub fn listener_says(&self, say: impl FnOnce(&Listener) -> io::Result<()>) {
        if let Some(listener) = self.listener.get()
            && let Err(e) = say(listener)
        {
            log::warning!("a trapped call can't go on: {e}");
        }
    }
}
