//! Huge pages of the hugetlb kind, which only the superuser can set aside.

use std::fs;
use std::sync::{Mutex, MutexGuard};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// One test at a time may change the pool.
static HOLDER: Mutex<()> = Mutex::new(());

/// Huge pages set aside for the time that this value lives.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
    _holder: MutexGuard<'static, ()>,
}

impl HugePages {
    /// Sets aside `pages` huge pages more than there are; `Err` says why they can't be had.
    pub fn reserve(pages: u64) -> Result<Self, String> {
        let holder = HOLDER.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let before = pool()?;
        fs::write(POOL, (before + pages).to_string()).map_err(|e| format!("{POOL}: {e}"))?;
        let reserved = Self { before, _holder: holder };
        let now = pool()?;
        if now < before + pages {
            return Err(format!("{POOL} went to {now} instead of {}", before + pages));
        }
        Ok(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Nothing to do about a failure but to leave the pages where they are.
        let _ = fs::write(POOL, self.before.to_string());
    }
}

/// How many huge pages there are.
fn pool() -> Result<u64, String> {
    let text = fs::read_to_string(POOL).map_err(|e| format!("{POOL}: {e}"))?;
    text.trim().parse().map_err(|e| format!("{POOL}: {e}"))
}
