//! Which layers are to trap, and what is done about io_uring: as `run`'s options and the environment say.

use std::str::FromStr;

use crate::coverage::Layer;

/// When the fault layer (userfaultfd) watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultLayer {
    /// Never.
    Off,
    /// As soon as the process has an io_uring ring, which the notify layer can't see through.
    WithRing,
    /// Always.
    On,
}

/// The layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layers {
    /// A seccomp filter, and this supervisor, which answers what it traps.
    pub notify: bool,
    /// userfaultfd on registered ranges.
    pub fault: FaultLayer,
}

impl Default for Layers {
    fn default() -> Self {
        Self { notify: true, fault: FaultLayer::WithRing }
    }
}

impl FromStr for Layers {
    type Err = String;

    fn from_str(list: &str) -> Result<Self, String> {
        let set = Layer::set(list)?;
        let fault = if set.contains(&Layer::Fault) { FaultLayer::On } else { FaultLayer::Off };
        Ok(Self { notify: set.contains(&Layer::Notify), fault })
    }
}

/// What is done when a process sets up a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rings {
    /// It may; the fault layer watches what it can see of it.
    #[default]
    Watch,
    /// io_uring_setup answers EPERM.
    Deny,
}

impl Rings {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Watch => "watch",
            Self::Deny => "deny",
        }
    }
}

impl FromStr for Rings {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Watch, Self::Deny]
            .into_iter()
            .find(|r| r.name() == word)
            .ok_or_else(|| format!("rings can be watched or denied: watch, deny; not `{word}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_layers_are_taken_apart() {
        let layers = |notify, fault| Ok(Layers { notify, fault });
        assert_eq!("notify".parse(), layers(true, FaultLayer::Off));
        assert_eq!("fault,notify".parse(), layers(true, FaultLayer::On));
        assert_eq!("fault".parse(), layers(false, FaultLayer::On));
        for list in ["", "notify,", "notify,trap", " fault"] {
            assert!(list.parse::<Layers>().is_err_and(|e| e.contains("layers notify and fault")), "{list}");
        }
    }

    #[test]
    fn rings_are_watched_or_denied() {
        assert_eq!("deny".parse(), Ok(Rings::Deny));
        assert_eq!("watch".parse(), Ok(Rings::Watch));
        assert!("no".parse::<Rings>().is_err());
    }
}
