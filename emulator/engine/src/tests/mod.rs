//! Tests of the engine.

mod announced;
mod death;
mod elsewhere;
pub(crate) mod hook;
mod hostile;
mod memory;
mod model;
mod properties;
mod rules;
mod size;
mod stress;
mod waiting;

use core::sync::atomic::{AtomicU32, Ordering};
use std::vec::Vec;

use crate::{Engine, Event, Host, Port, ReadError};

/// A thread of that id; those in `dead` are dead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Thread {
    pub(crate) id: u32,
    pub(crate) dead: &'static [u32],
}

/// The thread that most tests are.
pub(crate) const ME: Thread = Thread { id: 7, dead: &[] };

impl Host for Thread {
    fn id(&self) -> u32 {
        self.id
    }
    fn wait(&self, word: &AtomicU32, seen: u32) {
        if word.load(Ordering::Acquire) == seen {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }
    fn wake(&self, _: &AtomicU32) {}
    fn gone(&self, id: u32) -> bool {
        self.dead.contains(&id)
    }
}

/// Collects records, or refuses them.
#[derive(Default, Debug)]
pub(crate) struct Buffer {
    pub(crate) records: Vec<Event>,
    pub(crate) refuse: bool,
    pub(crate) settled: Option<bool>,
}

/// EFAULT.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Fault;

impl Port for Buffer {
    type Error = Fault;
    fn deliver(&mut self, records: &[Event]) -> Result<(), Fault> {
        if self.refuse {
            return Err(Fault);
        }
        self.records.extend_from_slice(records);
        Ok(())
    }
    fn settle(&mut self, _: &Engine, readable: bool) {
        self.settled = Some(readable);
    }
}

/// One read.
pub(crate) fn read(engine: &Engine, room: usize) -> Result<Vec<Event>, ReadError<Fault>> {
    let mut buffer = Buffer::default();
    let result = engine.read(&ME, room, &mut buffer);
    if let Ok(n) = result {
        assert_eq!(n, buffer.records.len());
    }
    result.map(|_| buffer.records)
}
