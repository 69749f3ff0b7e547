//! The interface as a list: what the text of the interface says, without regard to cost.

use std::vec::Vec;

use crate::{Event, PageRange};

/// Why a call of the model fails.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    NotReadable,
    Fault,
}

#[derive(Clone, Debug)]
struct Region {
    range: PageRange,
    cookie: u64,
    /// When it was registered; later ones have larger numbers.
    registered: u64,
    /// When it was registered or last dequeued.
    moved: u64,
    /// `Some` while queued; the hint if it has one.
    queued: Option<Option<PageRange>>,
}

/// One context.
#[derive(Clone, Default, Debug)]
pub(crate) struct Model {
    regions: Vec<Region>,
    fifo: Vec<u64>,
    time: u64,
    pub(crate) counter: u64,
    pub(crate) reported: u64,
    pub(crate) used: bool,
}

impl Model {
    pub(crate) fn exchange_features(&mut self) -> bool {
        !core::mem::replace(&mut self.used, true)
    }

    /// False: the cookie is in use.
    pub(crate) fn register(&mut self, range: PageRange, cookie: u64) -> bool {
        self.used = true;
        if self.regions.iter().any(|region| region.cookie == cookie) {
            return false;
        }
        self.time += 1;
        let (registered, moved) = (self.time, self.time);
        self.regions.push(Region { range, cookie, registered, moved, queued: None });
        true
    }

    /// False: no such cookie.
    pub(crate) fn unregister(&mut self, cookie: u64) -> bool {
        let before = self.regions.len();
        self.regions.retain(|region| region.cookie != cookie);
        self.fifo.retain(|&queued| queued != cookie);
        before != self.regions.len()
    }

    pub(crate) fn cookies(&self) -> Vec<u64> {
        self.regions.iter().map(|region| region.cookie).collect()
    }

    pub(crate) fn may_hit(&self, range: PageRange) -> bool {
        self.regions.iter().any(|region| region.range.start < range.end && range.start < region.range.end)
    }

    /// Rules 3 and 4: queues the chosen regions; true if there is one.
    fn hit(&mut self, chosen: impl Fn(&Region) -> bool, hint: Option<PageRange>) -> bool {
        let mut hits: Vec<&mut Region> = self.regions.iter_mut().filter(|region| chosen(region)).collect();
        hits.sort_by_key(|region| (region.range.start, u64::MAX - region.registered));
        for region in &mut hits {
            if region.queued.is_none() {
                self.fifo.push(region.cookie);
                region.queued = Some(hint);
            } else {
                region.queued = Some(None);
            }
        }
        !hits.is_empty()
    }

    fn overlaps(region: &Region, range: PageRange) -> bool {
        region.range.start < range.end && range.start < region.range.end
    }

    /// An invalidation; true if it hits.
    pub(crate) fn record(&mut self, range: PageRange) -> bool {
        let hit = self.hit(|region| Self::overlaps(region, range), Some(range));
        self.counter += u64::from(hit);
        hit
    }

    pub(crate) fn begin(&self) -> u64 {
        self.time
    }

    /// The after-hit; true if it hits.
    pub(crate) fn end(&mut self, begin: u64, range: PageRange) -> bool {
        let hit = self.hit(|region| region.moved > begin && Self::overlaps(region, range), Some(range));
        self.counter += u64::from(hit);
        hit
    }

    pub(crate) fn invalidate_all(&mut self) {
        self.hit(|_| true, None);
        self.counter += 1;
    }

    pub(crate) fn is_readable(&self) -> bool {
        !self.fifo.is_empty() || self.counter != self.reported
    }

    pub(crate) fn read(&mut self, room: usize, fault: bool) -> Result<Vec<Event>, Refusal> {
        self.used = true;
        if !self.is_readable() {
            return Err(Refusal::NotReadable);
        }
        let room = room.min(4096 / 32);
        let mut after = self.clone();
        let mut records = Vec::new();
        after.time += 1;
        while records.len() < room && !after.fifo.is_empty() {
            let cookie = after.fifo.remove(0);
            let region = after.regions.iter_mut().find(|region| region.cookie == cookie).unwrap();
            let (range, hint) = (region.range, region.queued.take().unwrap());
            region.moved = after.time;
            let bounds = hint
                .map_or(range, |hint| PageRange::new(hint.start.max(range.start), hint.end.min(range.end)));
            records.push(Event {
                kind: 0,
                flags: u32::from(hint.is_some()),
                hint_start: bounds.start,
                hint_end: bounds.end,
                cookie_counter: cookie,
            });
        }
        if records.len() < room {
            records.push(Event {
                kind: 1,
                flags: 0,
                hint_start: 0,
                hint_end: 0,
                cookie_counter: after.counter,
            });
            after.reported = after.counter;
        }
        if fault && !records.is_empty() {
            return Err(Refusal::Fault);
        }
        *self = after;
        Ok(records)
    }
}
