//! What calls of the engine fail with.

use core::fmt;

/// Why memory can't be used as an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BadArena {
    /// Too small, or made for other sizes.
    Size,
    /// The arena isn't aligned to 512 bytes, or the counter to 8.
    Alignment,
    /// Not an arena, or one that isn't finished.
    Magic,
    /// An arena of another version.
    Version,
    /// Memory to make an arena of isn't zeroed.
    InUse,
}

/// The context was used before: EXCHANGE_FEATURES answers EINVAL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AlreadyUsed;

/// Why a region wasn't registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegisterError {
    /// A live region has that cookie: EINVAL.
    CookieInUse,
    /// The arena is full: ENOMEM.
    NoMemory,
    /// Not for a client's thread to do now: the supervisor must be asked.
    Elsewhere,
    /// The arena is beyond repair, or its lock doesn't come free.
    Broken,
}

/// Why a region wasn't unregistered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnregisterError {
    /// No live region has that cookie: EINVAL.
    UnknownCookie,
    /// Not for a client's thread to do now: the supervisor must be asked.
    Elsewhere,
    /// The arena is beyond repair, or its lock doesn't come free.
    Broken,
}

/// Why nothing was read. Nothing was consumed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadError<E> {
    /// Nothing to report: EAGAIN, or wait.
    NotReadable,
    /// The port didn't take the records: EFAULT.
    Port(E),
    /// Not for a client's thread to do now: the supervisor must be asked.
    Elsewhere,
    /// The arena is beyond repair, or its lock doesn't come free.
    Broken,
}

/// The arena's lock doesn't come free. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stuck;

impl fmt::Display for BadArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size => "the arena has another size",
            Self::Alignment => "the arena isn't aligned",
            Self::Magic => "the memory holds no arena",
            Self::Version => "the arena has another version",
            Self::InUse => "the memory is in use",
        })
    }
}

impl fmt::Display for AlreadyUsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the context was used before")
    }
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CookieInUse => "a live region has that cookie",
            Self::NoMemory => "no room for another region",
            Self::Elsewhere => ELSEWHERE,
            Self::Broken => "the arena is broken",
        })
    }
}

impl fmt::Display for UnregisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnknownCookie => "no live region has that cookie",
            Self::Elsewhere => ELSEWHERE,
            Self::Broken => "the arena is broken",
        })
    }
}

impl<E: fmt::Display> fmt::Display for ReadError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReadable => f.write_str("nothing to report"),
            Self::Port(error) => error.fmt(f),
            Self::Elsewhere => f.write_str(ELSEWHERE),
            Self::Broken => f.write_str("the arena is broken"),
        }
    }
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the arena's lock doesn't come free")
    }
}

const ELSEWHERE: &str = "the supervisor has to be asked for it";

impl core::error::Error for BadArena {}
impl core::error::Error for AlreadyUsed {}
impl core::error::Error for RegisterError {}
impl core::error::Error for UnregisterError {}
impl<E: core::error::Error> core::error::Error for ReadError<E> {}
impl core::error::Error for Stuck {}
