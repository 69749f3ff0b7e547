//! Who runs a program.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// The user and group that an ordinary user's programs get when the tests run as root: nobody and nogroup.
const NOBODY: u32 = 65534;

/// Who runs a program: the privileges decide how the filter may be installed and what may be read of whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Account {
    /// The superuser.
    Root,
    /// A user without privileges.
    Ordinary,
}

impl Account {
    /// Every account that this test run can take on. Without privileges that is the ordinary user alone, and
    /// the missing half is said.
    pub fn available() -> Vec<Self> {
        if Self::is_superuser() {
            return vec![Self::Root, Self::Ordinary];
        }
        crate::skip("every program as root", "the tests run without privileges");
        vec![Self::Ordinary]
    }

    /// The user and group to change to; `None` where the program just keeps the ones of the tests.
    pub(crate) fn change_to(self) -> Option<(u32, u32)> {
        match self {
            Self::Root => {
                assert!(
                    Self::is_superuser(),
                    "a program as root was asked for, and the tests run without privileges"
                );
                None
            }
            Self::Ordinary => Self::is_superuser().then_some((NOBODY, NOBODY)),
        }
    }

    /// True if these tests run as root.
    pub fn is_superuser() -> bool {
        fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
    }
}
