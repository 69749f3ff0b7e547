//! What an adapter may do with registered memory.

use std::ops::{BitOr, BitOrAssign};

/// A set of rights. The empty set lets the adapter read on behalf of the registering process alone (a send).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Access(u8);

impl Access {
    /// Only reads by the process's own requests.
    pub const LOCAL_READ: Self = Self(0);
    /// Writes by the process's own requests (a receive).
    pub const LOCAL_WRITE: Self = Self(1);
    /// Writes by a peer.
    pub const REMOTE_WRITE: Self = Self(2);
    /// Reads by a peer.
    pub const REMOTE_READ: Self = Self(4);
    /// Atomic operations by a peer.
    pub const REMOTE_ATOMIC: Self = Self(8);

    /// How many different sets there are.
    pub(crate) const SETS: usize = 16;

    /// The set as a number below 16: the values above, added.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set of these bits; others than the values above are left out.
    pub const fn from_bits_truncate(bits: u8) -> Self {
        Self(bits % Self::SETS as u8)
    }

    /// True if every right of `other` is among these.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Access {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}
