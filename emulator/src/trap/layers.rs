//! Which layers trap: what a list such as `inline,notify` after `--trap`, or in `UMMUNOTIFY_TRAP`, means.
//!
//! Whether this host lets them work is another question: see [`crate::available`].

use core::fmt;
use core::str::FromStr;

use crate::coverage::Layer;

/// The layer on which everything rests: it stops a call wherever it is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Net {
    /// Notify if it can be had, else trace.
    #[default]
    Auto,
    /// A seccomp filter with a listener.
    Notify,
    /// ptrace, with a seccomp filter that picks the calls where that can be had.
    Trace,
}

impl Net {
    /// The word that stands for it in the list.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Notify => Layer::Notify.name(),
            Self::Trace => Layer::Trace.name(),
        }
    }
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of layers that can work together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layers {
    /// libc's own calls are looked at in the process and trapped only if need be.
    pub inline: bool,
    /// What traps all others.
    pub net: Net,
}

impl Layers {
    /// Those of the coverage table. [`Net::Auto`] stands for what it prefers; trace sees the same.
    pub fn seen_by(self) -> Vec<Layer> {
        let net = match self.net {
            Net::Auto | Net::Notify => Layer::Notify,
            Net::Trace => Layer::Trace,
        };
        if self.inline { vec![Layer::Inline, net] } else { vec![net] }
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.inline {
            write!(f, "{},", Layer::Inline.name())?;
        }
        f.write_str(self.net.name())
    }
}

impl FromStr for Layers {
    type Err = String;

    /// Names separated by commas. The error is a sentence that names the first word that is none, and those that are;
    /// or why the set can't be had.
    fn from_str(list: &str) -> Result<Self, String> {
        let (mut inline, mut net) = (false, None);
        for word in list.split(',') {
            let named = match Layer::ALL.iter().find(|layer| layer.name() == word) {
                Some(Layer::Inline) => {
                    inline = true;
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
        match net {
            None => Err("the layer inline needs notify: inline,notify".to_owned()),
            Some(Net::Trace) if inline => {
                Err("the layer inline needs notify and can't be had with trace: a tracer \
                                               stops the calls of the patched sites as well"
                    .to_owned())
            }
            Some(net) => Ok(Self { inline, net }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for list in ["auto", "notify", "trace", "inline,notify", "inline,auto"] {
            let layers: Layers = list.parse().unwrap();
            assert_eq!(layers.to_string(), list);
            assert_eq!(layers.inline, list.contains("inline"));
        }
        assert_eq!("notify,inline,notify".parse(), Ok(Layers { inline: true, net: Net::Notify }));
        assert_eq!("auto".parse(), Ok(Layers::default()));
        let seen = |list: &str| list.parse::<Layers>().unwrap().seen_by();
        assert_eq!(seen("inline,auto"), [Layer::Inline, Layer::Notify]);
        assert_eq!(seen("trace"), [Layer::Trace]);
    }

    #[test]
    fn what_cannot_be_had_is_said_in_a_sentence() {
        for list in ["", "magic", "notify,magic", "notify,", " notify"] {
            let e = list.parse::<Layers>().unwrap_err();
            assert!(e.contains("inline, notify, trace, and auto"), "{list}: {e}");
        }
        for (list, words) in [
            ("inline", "inline needs notify"),
            ("inline,trace", "can't be had with trace"),
            ("trace,inline", "can't be had with trace"),
            ("trace,notify", "trace and notify would stop the same calls"),
            ("notify,auto", "notify and auto would stop the same calls"),
        ] {
            let e = list.parse::<Layers>().unwrap_err();
            assert!(e.contains(words), "{list}: {e}");
        }
    }
}
