//! What is watched: ranges are armed and disarmed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ummunotify_abi::PageRange;
use ummunotify_abi::arena::ELSEWHERE_FAULT;
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_sys::uffd::Watch;

use super::State;
use crate::supervisor::context::{Context, lock};
use crate::supervisor::host::SupervisorHost;
use crate::supervisor::ranges::Ranges;
use crate::supervisor::space::Space;
use crate::supervisor::{log, task};
use crate::target::maps::{self, Mapping, Name};
use crate::target::{KernelTraits, Target};
use crate::trap::operation::ADDRESS_END;

/// How many probes may be spent on finding out which pages of a range are registered by nobody else.
const PROBES: usize = 512;

/// What is done with `order` held.
pub(super) struct Arming<'a> {
    pub(super) space: &'a Arc<Space>,
    pub(super) kernel: &'a KernelTraits,
    pub(super) watch: Arc<Watch>,
}

impl Arming<'_> {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.space.fault.state)
    }

    /// Turns the context's own registrations to us, and arms those that are there.
    pub(super) fn context(&self, context: &Arc<Context>) {
        let host = SupervisorHost::new(Arc::clone(self.space), Arc::clone(context));
        let mut regions = Ranges::default();
        let seen = context
            .engine
            .set_elsewhere(&host, ELSEWHERE_FAULT)
            .and_then(|()| context.engine.visit(&host, |region| regions.insert(pages_of(region.range))));
        if seen.is_err() {
            self.space.fault.unwatched.fetch_add(1, Ordering::Relaxed);
            log::warning!(
                "process {}, context {}: a thread stays inside a call of the device, so its regions can't be \
                 watched by userfaultfd",
                self.space.pid,
                context.number
            );
        }
        for range in regions.all() {
            self.arm_or_wait(range);
        }
    }

    /// Arms what is mapped in a range: as a whole, else mapping by mapping. What isn't mapped yet is armed later.
    pub(super) fn arm_or_wait(&self, range: PageRange) {
        self.state().arming = Some((range, false));
        let mapped = self.arm(range);
        let mut state = self.state();
        let went = state.arming.take().is_some_and(|(_, went)| went);
        state.lost.insert(range);
        // Some of it may have gone before it was known to be armed.
        mapped.into_iter().filter(|_| !went).for_each(|piece| state.lost.remove(piece));
    }

    /// What is mapped there.
    fn arm(&self, range: PageRange) -> Vec<PageRange> {
        let Err(whole) = self.arm_piece(range) else { return vec![range] };
        if self.space.is_gone() || !self.space.process_alive() {
            return vec![range];
        }
        let table = match task::mappings(self.space.pid, self.kernel) {
            Ok(table) => table,
            Err(e) => {
                self.lose(range, &format!("{whole}; {e}"));
                return vec![range];
            }
        };
        let mut mapped = Vec::new();
        for mapping in maps::overlapping(&table, range).iter().filter(|m| m.name != Name::Special) {
            let Some(piece) = mapping.range.intersection(range) else { continue };
            mapped.push(piece);
            // Huge pages are watched whole.
            let piece = if self.is_huge(mapping) { mapping.range } else { piece };
            if let Err(e) = self.arm_piece(piece) {
                self.lose(piece, &e.to_string());
            }
        }
        mapped
    }

    fn arm_piece(&self, range: PageRange) -> io::Result<()> {
        self.watch.arm(range.start, range.len())?;
        let mut state = self.state();
        state.armed.insert(range);
        state.bare.remove(range);
        Ok(())
    }

    fn is_huge(&self, mapping: &Mapping) -> bool {
        use crate::target::{FileKind, ProcessTarget};
        let mut target = ProcessTarget::new(self.space.pid.cast_signed(), true, self.kernel);
        matches!(target.device_kind(mapping.device), FileKind::Hugetlb(_))
    }

    /// Coverage is lost: said the first time, and counted.
    fn lose(&self, piece: PageRange, why: &str) {
        self.state().bare.insert(piece);
        if self.space.fault.unwatched.fetch_add(1, Ordering::Relaxed) == 0 {
            log::warning!(
                "process {}: userfaultfd can't watch [{:#x},{:#x}): {why}; what changes it past the filter goes \
                 unseen (said once, counted in the statistics)",
                self.space.pid,
                piece.start,
                piece.end
            );
        }
    }

    /// Disarms a range, whatever is mapped there now.
    pub(super) fn disarm(&self, range: PageRange) {
        self.state().armed.remove(range);
        if self.watch.disarm(range.start, range.len()).is_ok() {
            return;
        }
        // Something in it never was watched. What isn't mapped any more needs nothing.
        let Ok(table) = task::mappings(self.space.pid, self.kernel) else { return };
        for mapping in maps::overlapping(&table, range) {
            let Some(piece) = mapping.range.intersection(range) else { continue };
            if self.watch.disarm(piece.start, piece.len()).is_err()
                && piece != mapping.range
                && self.is_huge(mapping)
                && !self.space.any(|c| c.engine.may_hit(mapping.range))
                && self.watch.disarm(mapping.range.start, mapping.range.len()).is_ok()
            {
                // As a whole it was watched, and as a whole it goes when nobody has registered any of it.
                self.state().armed.remove(mapping.range);
            }
        }
    }

    /// Disarms the parts of a range that nobody has registered.
    pub(super) fn disarm_unregistered(&self, range: PageRange) {
        let registered = |range| self.space.any(|c| c.engine.may_hit(range));
        let mut free = Ranges::default();
        unregistered(range, &registered, &mut free, &mut { PROBES });
        for piece in free.all() {
            {
                let mut state = self.state();
                state.lost.remove(piece);
                state.bare.remove(piece);
            }
            self.disarm(piece);
        }
    }

    /// Arms what was lost and is mapped again, and disarms what was moved to where nothing is registered.
    pub(super) fn tidy(&self) {
        let (waiting, stray) = {
            let mut state = self.state();
            (!state.lost.is_empty(), std::mem::take(&mut state.stray))
        };
        for range in stray.all() {
            self.disarm_unregistered(range);
        }
        if !waiting {
            return;
        }
        // What isn't mapped needs no look, however much of that is registered.
        let Ok(table) = task::mappings(self.space.pid, self.kernel) else { return };
        let mut lost = Ranges::default();
        for mapping in table.iter().filter(|m| m.name != Name::Special) {
            for piece in self.state().lost.over(mapping.range) {
                piece.intersection(mapping.range).into_iter().for_each(|piece| lost.insert(piece));
            }
        }
        for range in lost.all().into_iter().take(PROBES) {
            // Where it was taken off for a call, that would fail; it is armed after the call. And it stays in the set
            // until it is armed: who is about to make such a call looks there. Nor where a call acts.
            let waits = self.space.fault.is_off_at(range) || !self.space.fault.acting_on(range).is_empty();
            let wanted = self.space.any(|c| c.engine.may_hit(range));
            if !wanted {
                self.state().lost.remove(range);
            } else if !waits {
                self.arm_or_wait(range);
            }
        }
    }
}

/// The pages that an invalidation of a region can be about, whatever the region looks like.
pub(super) fn pages_of(region: PageRange) -> PageRange {
    let start = region.start.min(region.end.saturating_sub(1));
    let end = region.end.max(region.start.saturating_add(1));
    let down = |address: u64| address & !(PAGE_SIZE - 1);
    PageRange::new(
        down(start.min(ADDRESS_END)),
        down(end.min(ADDRESS_END).saturating_add(PAGE_SIZE - 1)).max(PAGE_SIZE),
    )
}

/// Adds the parts of `range` that aren't `registered` to `free`, as far as the probes suffice.
fn unregistered(
    range: PageRange,
    registered: &dyn Fn(PageRange) -> bool,
    free: &mut Ranges,
    probes: &mut usize,
) {
    if range.is_empty() || *probes == 0 {
        return;
    }
    *probes -= 1;
    if !registered(range) {
        free.insert(range);
    } else if range.len() > PAGE_SIZE {
        let middle = range.start + ((range.len() / 2) & !(PAGE_SIZE - 1)).max(PAGE_SIZE);
        unregistered(PageRange::new(range.start, middle), registered, free, probes);
        unregistered(PageRange::new(middle, range.end), registered, free, probes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn pages(start: u64, end: u64) -> PageRange {
        PageRange::new(start * PAGE_SIZE, end * PAGE_SIZE)
    }

    #[test]
    fn regions_of_any_shape_have_pages() {
        assert_eq!(pages_of(PageRange::new(0x1800, 0x1801)), pages(1, 2));
        assert_eq!(pages_of(pages(1, 3)), pages(1, 3));
        assert_eq!(pages_of(PageRange::new(0x1800, 0x1800)), pages(1, 2));
        assert_eq!(pages_of(pages(5, 5)), pages(4, 6));
        assert_eq!(pages_of(pages(9, 5)), pages(4, 10));
        assert_eq!(pages_of(PageRange::new(0, 0)), pages(0, 1));
        assert_eq!(pages_of(PageRange::ALL), PageRange::new(0, ADDRESS_END));
    }

    #[test]
    fn what_others_registered_stays_armed() {
        let left = [pages(3, 4), pages(7, 9), pages(20, 21)];
        let registered = |range: PageRange| left.iter().any(|r| range.hits(*r));
        let mut free = Ranges::default();
        unregistered(pages(0, 16), &registered, &mut free, &mut { PROBES });
        assert_eq!(free.all(), [pages(0, 3), pages(4, 7), pages(9, 16)]);
        let mut free = Ranges::default();
        unregistered(pages(0, 1 << 30), &|_| true, &mut free, &mut { PROBES });
        assert_eq!(free.all(), [], "and the search ends");
    }
}
