//! Which layers trap: what a list such as `inline,notify` after `--trap`, or in `UMMUNOTIFY_TRAP`, means; and what is
//! done about io_uring.
//!
//! Whether this host lets them work is another question: see [`crate::available`].

use core::fmt;
use core::str::FromStr;

use crate::coverage::Layer;

/// The layer on which everything rests: it stops a call wherever it is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Net {
    /// Notify if it can be had, with the inline layer if that can, else trace.
    #[default]
    Auto,
    /// A seccomp filter with a listener.
    Notify,
    /// ptrace, with a seccomp filter that picks the calls where that can be had.
    Trace,
    /// Nothing stops a call: userfaultfd alone tells, late.
    None,
}

impl Net {
    /// The word that stands for it in the list.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Notify => Layer::Notify.name(),
            Self::Trace => Layer::Trace.name(),
            Self::None => "none",
        }
    }
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
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

/// A set of layers that can work together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layers {
    /// libc's own calls are looked at in the process and trapped only if need be. With [`Net::Auto`] where it can be had.
    pub inline: bool,
    /// What traps all others.
    pub net: Net,
    /// userfaultfd on registered ranges.
    pub fault: FaultLayer,
}

impl Default for Layers {
    fn default() -> Self {
        Self { inline: true, net: Net::default(), fault: FaultLayer::default() }
    }
}

impl Layers {
    /// Those of the coverage table. [`Net::Auto`] stands for what it prefers; trace sees the same.
    pub fn seen_by(self) -> Vec<Layer> {
        let net = match self.net {
            Net::Auto | Net::Notify => Some(Layer::Notify),
            Net::Trace => Some(Layer::Trace),
            Net::None => None,
        };
        let fault = (self.fault != FaultLayer::Off).then_some(Layer::Fault);
        self.inline.then_some(Layer::Inline).into_iter().chain(net).chain(fault).collect()
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Which `auto` says by itself.
        let inline = (self.inline && self.net != Net::Auto).then_some(Layer::Inline.name());
        let net = (self.net != Net::None).then_some(self.net.name());
        let fault = (self.fault == FaultLayer::On).then_some(Layer::Fault.name());
        let names: Vec<_> = inline.into_iter().chain(net).chain(fault).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Layers {
    type Err = String;

    /// Names separated by commas. The error is a sentence that names the first word that is none, and those that are;
    /// or why the set can't be had.
    fn from_str(list: &str) -> Result<Self, String> {
        let (mut inline, mut fault, mut net) = (false, false, None);
        for word in list.split(',') {
            let named = match Layer::ALL.iter().find(|layer| layer.name() == word) {
                Some(Layer::Inline) => {
                    inline = true;
                    continue;
                }
                Some(Layer::Fault) => {
                    fault = true;
                    continue;
                }
                Some(Layer::Notify) => Net::Notify,
                Some(Layer::Trace) => Net::Trace,
                None if word == Net::Auto.name() => Net::Auto,
                None => {
                    let names: Vec<_> = Layer::ALL.iter().map(|layer| layer.name()).collect();
                    return Err(format!("there are the layers {}, and auto; not `{word}`", names.join(", ")));
                }
            };
            match net {
                Some(other) if other != named => {
                    return Err(format!("{other} and {named} would stop the same calls: name one of them"));
                }
                _ => net = Some(named),
            }
        }
        let net = match net {
            None if inline || !fault => return Err("the layer inline needs notify: inline,notify".to_owned()),
            None => Net::None,
            Some(Net::Trace) if inline => {
                return Err("the layer inline needs notify and can't be had with trace: a tracer stops the calls of the \
                            patched sites as well"
                    .to_owned());
            }
            Some(net) => net,
        };
        let fault = match (fault, net) {
            (true, _) => FaultLayer::On,
            (false, Net::Auto) => FaultLayer::WithRing,
            (false, _) => FaultLayer::Off,
        };
        Ok(Self { inline: inline || net == Net::Auto, net, fault })
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
    fn lists_are_read_and_written() {
        for list in [
            "auto",
            "notify",
            "trace",
            "fault",
            "inline,notify",
            "auto,fault",
            "trace,fault",
            "inline,notify,fault",
        ] {
            let layers: Layers = list.parse().unwrap();
            assert_eq!(layers.to_string(), list);
            assert_eq!(layers.inline, list.contains("inline") || layers.net == Net::Auto);
            assert_eq!(layers.fault == FaultLayer::On, list.contains("fault"));
            assert_eq!(
                layers.fault == FaultLayer::WithRing,
                layers.net == Net::Auto && !list.contains("fault")
            );
        }
        let layers = Layers { inline: true, net: Net::Notify, fault: FaultLayer::Off };
        assert_eq!("notify,inline,notify".parse(), Ok(layers));
        assert_eq!("auto".parse(), Ok(Layers::default()));
        assert_eq!("inline,auto".parse(), Ok(Layers::default()));
        let seen = |list: &str| list.parse::<Layers>().unwrap().seen_by();
        assert_eq!(seen("inline,auto"), [Layer::Inline, Layer::Notify, Layer::Fault]);
        assert_eq!(seen("fault"), [Layer::Fault]);
        assert_eq!(seen("trace"), [Layer::Trace]);
    }

    #[test]
    fn what_cannot_be_had_is_said_in_a_sentence() {
        for list in ["", "magic", "notify,magic", "notify,", " notify"] {
            let e = list.parse::<Layers>().unwrap_err();
            assert!(e.contains("inline, notify, fault, trace, and auto"), "{list}: {e}");
        }
        for (list, words) in [
            ("inline", "inline needs notify"),
            ("inline,fault", "inline needs notify"),
            ("inline,trace", "can't be had with trace"),
            ("trace,inline", "can't be had with trace"),
            ("trace,notify", "trace and notify would stop the same calls"),
            ("notify,auto", "notify and auto would stop the same calls"),
        ] {
            let e = list.parse::<Layers>().unwrap_err();
            assert!(e.contains(words), "{list}: {e}");
        }
    }

    #[test]
    fn rings_are_watched_or_denied() {
        assert_eq!("deny".parse(), Ok(Rings::Deny));
        assert_eq!("watch".parse(), Ok(Rings::Watch));
        assert!("no".parse::<Rings>().is_err());
    }
}
