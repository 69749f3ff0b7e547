//! Who registers memory, and what an error of it says.

use crate::Access;
use std::fmt;
use std::io;
use ummunotify_abi::PageRange;

/// Registers memory with an adapter: finds the physical pages behind an address, keeps them, and gives them back.
///
/// The cache calls it without holding a lock, from whatever thread misses, evicts or drops the last handle of a stale
/// entry. It may panic: the cache stays as it was.
pub trait Registrar: Send + Sync {
    /// What the adapter knows the memory by (a key, a handle).
    type Registration: Send + Sync;

    /// Registers `range`: whole pages, half-open.
    ///
    /// # Errors
    /// A [`RegistrarError`]; with errno `ENOMEM` the cache gives back what is idle, and tries again.
    fn register(&self, range: PageRange, access: Access) -> Result<Self::Registration, RegistrarError>;

    /// Gives a registration back.
    ///
    /// # Errors
    /// A [`RegistrarError`]. The cache forgets the registration all the same, and counts the failure.
    fn deregister(&self, registration: Self::Registration) -> Result<(), RegistrarError>;
}

impl<R: Registrar + ?Sized> Registrar for std::sync::Arc<R> {
    type Registration = R::Registration;

    fn register(&self, range: PageRange, access: Access) -> Result<Self::Registration, RegistrarError> {
        (**self).register(range, access)
    }

    fn deregister(&self, registration: Self::Registration) -> Result<(), RegistrarError> {
        (**self).deregister(registration)
    }
}

/// A call of a registrar that failed: which, on what, with which errno, and what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegistrarError {
    /// The call, such as `ibv_reg_mr`.
    pub call: &'static str,
    /// The errno that it left; 0 if it left none.
    pub errno: i32,
    /// The range that it was for, in bytes, half-open.
    pub range: Option<PageRange>,
    /// What to do about it, as a sentence without a full stop; empty if there is nothing to say.
    pub advice: &'static str,
}

impl RegistrarError {
    /// `call` on `range` failed with the calling thread's current errno.
    pub fn last_os_error(call: &'static str, range: PageRange) -> Self {
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        Self { call, errno, range: Some(range), advice: "" }
    }
}

impl fmt::Display for RegistrarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.call)?;
        if let Some(range) = self.range {
            write!(f, " of {:#x}-{:#x} ({} bytes)", range.start, range.end, range.len())?;
        }
        match self.errno {
            0 => f.write_str(": failed without an errno")?,
            errno => write!(f, ": {}", io::Error::from_raw_os_error(errno))?,
        }
        if !self.advice.is_empty() {
            write!(f, "; {}", self.advice)?;
        }
        Ok(())
    }
}

impl std::error::Error for RegistrarError {}
