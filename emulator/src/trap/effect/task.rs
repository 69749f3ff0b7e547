//! New tasks with an address space of their own.

use ummunotify_abi::PageRange;

use super::advice::word;
use super::{Pieces, View};
use crate::target::Target;
use crate::target::maps::{Mapping, Name};
use crate::trap::policy::CLONE_VM;

/// fork write-protects what it shares: each private mapping that was ever written, as a whole
/// (`copy_page_range`). Whether it was written can't be read, so each private one is reported. Mappings with
/// MADV_DONTFORK aren't copied, and those with MADV_WIPEONFORK have nothing to copy; that shows only in smaps,
/// which is read if a private mapping matters to anyone.
pub(super) fn fork(target: &mut dyn Target) -> Pieces {
    let view = View::new(target)?;
    if !view.maps.iter().any(|m| copied(m) && target.watches(m.range)) && view.alone {
        return Ok(Vec::new());
    }
    let view = View::with_flags(target)?;
    let mut out = Vec::new();
    for (piece, mapping) in view.cut(PageRange::ALL) {
        if mapping.is_none_or(copied) {
            out.push(piece);
        }
    }
    Ok(out)
}

fn copied(m: &Mapping) -> bool {
    let flags = m.flags.unwrap_or_default();
    !m.shared && m.name != Name::Special && !flags.dont_copy && !flags.wipe_on_fork
}

/// clone3 takes its flags from memory. They are believed: a thread that changed another's arguments during the
/// call would deceive nobody but its own process, and pthread_create comes this way. Unreadable ones mean fork.
pub(super) fn clone3(target: &mut dyn Target, arguments: u64) -> Pieces {
    let mut bytes = [0; 8];
    match target.read_memory(arguments, &mut bytes) {
        Ok(()) if word(&bytes, 0) & u64::from(CLONE_VM) != 0 => Ok(Vec::new()),
        _ => fork(target),
    }
}
