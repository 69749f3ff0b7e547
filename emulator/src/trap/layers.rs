//! Which layers are to trap, and what is done about io_uring: as `run`'s options and the environment say.

use std::str::FromStr;

use crate::coverage::Layer;

/// What sees every call that a process makes, and stops it until its effect is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Net {
    /// Whatever this host allows.
    #[default]
    Auto,
    /// A seccomp filter, and this supervisor, which answers what it traps.
    Notify,
    /// Nothing: userfaultfd alone tells, late.
    None,
}

/// When the fault layer (userfaultfd) watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FaultLayer {
    /// Never.
    Off,
    /// As soon as the process has an io_uring ring, which no net sees through.
    #[default]
    WithRing,
    /// Always.
    On,
}

/// The layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layers {
    /// libc's own calls are looked at in the process, and trapped only if need be.
    pub inline: bool,
    /// What traps.
    pub net: Net,
    /// userfaultfd on registered ranges.
    pub fault: FaultLayer,
}

/// The word for the default, in which further layers can be put.
const AUTO: &str = "auto";

impl Layers {
    /// The layers that may come to record something.
    pub fn all(self) -> Vec<Layer> {
        let net = match self.net {
            Net::Auto | Net::Notify => Some(Layer::Notify),
            Net::None => None,
        };
        let fault = (self.fault != FaultLayer::Off).then_some(Layer::Fault);
        self.inline.then_some(Layer::Inline).into_iter().chain(net).chain(fault).collect()
    }
}

impl FromStr for Layers {
    type Err = String;

    /// Reads names of layers, separated by commas, or `auto` among them: the net that this host allows, and
    /// userfaultfd once there is a ring.
    fn from_str(list: &str) -> Result<Self, String> {
        let (auto, names): (Vec<&str>, Vec<&str>) = list.split(',').partition(|word| *word == AUTO);
        let auto = !auto.is_empty();
        let set = names.into_iter().map(Layer::named).collect::<Result<Vec<_>, _>>()?;
        let has = |layer| set.contains(&layer);
        let net = match (has(Layer::Notify), auto) {
            (true, true) => return Err(format!("{AUTO} chooses what traps by itself: without notify")),
            (true, false) => Net::Notify,
            (false, true) => Net::Auto,
            (false, false) => Net::None,
        };
        if has(Layer::Inline) && net == Net::None {
            return Err("the layer inline needs notify: inline,notify".to_owned());
        }
        let fault = match (has(Layer::Fault), auto) {
            (true, _) => FaultLayer::On,
            (false, true) => FaultLayer::WithRing,
            (false, false) => FaultLayer::Off,
        };
        Ok(Self { inline: has(Layer::Inline), net, fault })
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
        let layers = |inline, net, fault| Ok(Layers { inline, net, fault });
        assert_eq!("notify".parse(), layers(false, Net::Notify, FaultLayer::Off));
        assert_eq!("fault,notify".parse(), layers(false, Net::Notify, FaultLayer::On));
        assert_eq!("inline,notify,fault".parse(), layers(true, Net::Notify, FaultLayer::On));
        assert_eq!("fault".parse(), layers(false, Net::None, FaultLayer::On));
        assert_eq!("auto".parse(), Ok(Layers::default()));
        assert_eq!("inline,auto".parse(), layers(true, Net::Auto, FaultLayer::WithRing));
        assert_eq!("auto,fault".parse(), layers(false, Net::Auto, FaultLayer::On));
    }

    #[test]
    fn lists_that_mean_nothing_are_refused() {
        for (list, why) in [
            ("", "has the layers"),
            ("notify,", "has the layers"),
            ("notify,trap", "not `trap`"),
            (" fault", "has the layers"),
            ("inline", "needs notify"),
            ("inline,fault", "needs notify"),
            ("auto,notify", "without notify"),
        ] {
            assert!(list.parse::<Layers>().is_err_and(|e| e.contains(why)), "{list}");
        }
    }

    #[test]
    fn a_set_is_what_its_list_names() {
        for (list, set) in [
            ("notify", &[Layer::Notify][..]),
            ("inline,notify,fault", &[Layer::Inline, Layer::Notify, Layer::Fault]),
            ("fault", &[Layer::Fault]),
            ("auto", &[Layer::Notify, Layer::Fault]),
        ] {
            assert_eq!(list.parse::<Layers>().map(Layers::all).as_deref(), Ok(set), "{list}");
        }
    }

    #[test]
    fn rings_are_watched_or_denied() {
        assert_eq!("deny".parse(), Ok(Rings::Deny));
        assert_eq!("watch".parse(), Ok(Rings::Watch));
        assert!("no".parse::<Rings>().is_err());
    }
}
