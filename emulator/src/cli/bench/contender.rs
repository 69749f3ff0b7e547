//! What is compared: the module, the emulator with a set of layers, and neither.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;
use ummunotify::available;
use ummunotify::backend::{Backend as _, Kmod};
use ummunotify::trap::layers::{FaultLayer, Layers};

use crate::cli::probe::host;

/// The dynamic loader of x86-64 (System V ABI): itself a program without an interpreter.
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// One of those that are compared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Contender {
    /// Neither device nor filter.
    Native,
    /// The kernel module.
    Kmod,
    /// The emulator.
    Emulated(Layers),
    /// Neither, but somebody else's library preloaded.
    Peer {
        /// What it is called.
        name: String,
        /// The library.
        library: PathBuf,
    },
    /// The emulator's filter around a static program that doesn't open the device.
    Enclosed,
}

/// One that isn't compared.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Absent {
    /// Its name.
    pub name: String,
    /// Why, in a sentence.
    pub reason: String,
}

impl Contender {
    /// The name on the command line and in the report.
    pub fn name(&self) -> String {
        match self {
            Self::Native => "native".to_owned(),
            Self::Kmod => "kmod".to_owned(),
            Self::Enclosed => "static".to_owned(),
            Self::Emulated(layers) => layers.to_string(),
            Self::Peer { name, .. } => name.clone(),
        }
    }

    /// That of a name. The error is a sentence.
    pub fn named(name: &str) -> Result<Self, String> {
        match name {
            "native" => Ok(Self::Native),
            "kmod" => Ok(Self::Kmod),
            "static" => Ok(Self::Enclosed),
            layers => layers
                .parse()
                .map(Self::Emulated)
                .map_err(|e| format!("{e}; native, kmod and static can be compared as well")),
        }
    }

    /// That of `NAME=LIBRARY`. The error is a sentence.
    pub fn peer(text: &str) -> Result<Self, String> {
        let (name, library) =
            text.split_once('=').ok_or_else(|| format!("NAME=LIBRARY is asked for; not `{text}`"))?;
        let library = std::path::absolute(library).map_err(|e| format!("{library}: {e}"))?;
        if name.is_empty() || Self::named(name).is_ok() {
            return Err(format!("`{name}` isn't free as a name"));
        }
        // The loader would only warn, and the figures would be native's.
        std::fs::File::open(&library).map_err(|e| format!("{}: {e}", library.display()))?;
        Ok(Self::Peer { name: name.to_owned(), library })
    }

    /// Those that are compared if none is named.
    pub fn usual() -> Vec<Self> {
        ["native", "kmod", "notify", "inline,notify", "trace", "static"]
            .into_iter()
            .filter_map(|name| Self::named(name).ok())
            .collect()
    }

    /// Whether a process of it has the device open.
    pub fn has_device(&self) -> bool {
        matches!(self, Self::Kmod | Self::Emulated(_))
    }

    /// Why it can't be had here, in a sentence; `None` if it can.
    pub fn obstacle(&self) -> Option<String> {
        match self {
            Self::Native | Self::Peer { .. } => None,
            Self::Kmod => Kmod.check().err().map(|obstacle| obstacle.to_string()),
            Self::Enclosed if !Path::new(LOADER).exists() => Some(format!("{LOADER} is missing")),
            Self::Enclosed => Self::Emulated(Layers::default()).obstacle(),
            Self::Emulated(layers) => {
                let net = available::check(layers.net).err();
                let net = net.map(|obstacles| {
                    obstacles.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
                });
                let watched = (layers.fault == FaultLayer::On).then(host::try_userfaultfd);
                net.or_else(|| Some(format!("userfaultfd: {}", watched?.err()?)))
            }
        }
    }

    /// The command of a process that works.
    pub fn command(&self, own: &Path) -> Command {
        let mut command = match self {
            Self::Enclosed => {
                let mut command = self.around(own, LOADER.as_ref());
                command.arg(own);
                command
            }
            _ => self.around(own, own.as_os_str()),
        };
        command.args(["bench", "--worker", self.word()]);
        command
    }

    /// That command as it is run by this contender, from start to end.
    pub fn whole(&self, own: &Path, program: &[&str]) -> Command {
        let mut command = self.around(own, program[0].as_ref());
        command.args(&program[1..]).arg(self.word());
        command
    }

    /// What a process of it is told of the device.
    fn word(&self) -> &'static str {
        if self.has_device() { "device" } else { "plain" }
    }

    fn around(&self, own: &Path, program: &OsStr) -> Command {
        let run = |arguments: &[&str]| {
            let mut command = Command::new(own);
            command.arg("run").args(arguments).arg("--").arg(program);
            command
        };
        match self {
            Self::Native => Command::new(program),
            Self::Peer { library, .. } => {
                let mut command = Command::new(program);
                command.env("LD_PRELOAD", library);
                command
            }
            Self::Kmod => run(&["--backend", "kmod"]),
            Self::Emulated(layers) => run(&["--backend", "emulated", "--trap", &layers.to_string()]),
            Self::Enclosed => run(&["--backend", "emulated"]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_a_library_that_is_there() {
        let own = std::env::current_exe().unwrap();
        let peer = Contender::peer(&format!("ucx={}", own.display())).unwrap();
        assert_eq!((peer.name().as_str(), peer.has_device(), peer.obstacle()), ("ucx", false, None));
        for wrong in ["ucx", "ucx=/no/such/library.so", "=/bin/true", "notify=/bin/true"] {
            assert!(Contender::peer(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_whole_program_is_told_whether_there_is_a_device() {
        let shown = |name: &str| {
            format!("{:?}", Contender::named(name).unwrap().whole("/u".as_ref(), &["true", "-x"]))
                .replace('"', "")
        };
        assert_eq!(shown("native"), "true -x plain");
        assert_eq!(shown("kmod"), "/u run --backend kmod -- true -x device");
        assert_eq!(shown("notify"), "/u run --backend emulated --trap notify -- true -x device");
    }

    #[test]
    fn contenders_have_the_names_by_which_they_are_found() {
        for contender in Contender::usual() {
            assert_eq!(Contender::named(&contender.name()), Ok(contender));
        }
        let e = Contender::named("nothing").unwrap_err();
        assert!(e.contains("`nothing`") && e.contains("kmod"), "{e}");
    }
}
