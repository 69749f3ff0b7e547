//! Compiles C clients and preload libraries, once for each content.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, id};
use std::thread;

/// What every C source is compiled with.
const FLAGS: &[&str] = &["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"];

/// A C program or library of `tests/c`, described by its sources.
#[derive(Clone, Debug)]
pub struct Client {
    name: String,
    sources: Vec<String>,
    flags: Vec<String>,
    libraries: Vec<String>,
    compiler: String,
}

impl Client {
    /// A dynamically linked program. `name` is free; `sources` are relative to `tests/c`.
    pub fn program(name: &str, sources: &[&str]) -> Self {
        Self {
            name: name.replace('/', "-"),
            sources: sources.iter().map(|source| (*source).to_owned()).collect(),
            flags: Vec::new(),
            libraries: Vec::new(),
            compiler: "cc".to_owned(),
        }
    }

    /// The same with nothing to load at run time: no interpreter, no preloaded library.
    #[must_use]
    pub fn fixed(mut self) -> Self {
        self.name += "-static";
        self.flag("-static")
    }

    /// Compiles with another compiler than `cc`.
    #[must_use]
    pub fn compiler(mut self, compiler: &str) -> Self {
        self.name = format!("{}-{compiler}", self.name);
        self.compiler = compiler.to_owned();
        self
    }

    /// A shared library, for LD_PRELOAD or dlopen; its file is called `name` with `.so` behind it.
    pub fn library(name: &str, sources: &[&str]) -> Self {
        Self::program(&format!("{name}.so"), sources).flag("-shared").flag("-fPIC")
    }

    /// Adds a flag of the compiler.
    #[must_use]
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Adds a library to link with, such as `-ldl`.
    #[must_use]
    pub fn link(mut self, library: &str) -> Self {
        self.libraries.push(library.to_owned());
        self
    }

    /// The file name of the result, without the part that tells contents apart.
    pub(crate) fn file_name(&self) -> &str {
        &self.name
    }

    /// Compiles below `target` unless the same content was compiled before; returns the file.
    pub(crate) fn compile(&self, target: &Path) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let c = root.join("c");
        let include = root.join("../kmod-compat/include");
        let sources: Vec<PathBuf> = self.sources.iter().map(|source| c.join(source)).collect();

        let mut hasher = DefaultHasher::new();
        (FLAGS, &self.flags, &self.libraries, &self.sources, &self.compiler).hash(&mut hasher);
        hash_file(&include.join("linux/ummunotify.h"), &mut hasher);
        for source in &sources {
            hash_file(source, &mut hasher);
            hash_headers(source.parent().expect("a source lies in a folder"), &mut hasher);
        }
        hash_headers(&c, &mut hasher);

        let folder = target.join("c-clients").join(format!("{:016x}", hasher.finish()));
        let done = folder.join(&self.name);
        if done.exists() {
            return done;
        }
        fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        // Several tests may want the same client at once: each compiles under a name of its own, and the
        // rename is atomic.
        let unfinished = folder.join(format!("unfinished-{}-{:?}", id(), thread::current().id()));
        let mut cc = Command::new(&self.compiler);
        cc.args(FLAGS).args(&self.flags).arg("-I").arg(&include).arg("-I").arg(&c);
        cc.args(&sources).arg("-o").arg(&unfinished).args(&self.libraries);
        let output = cc.output().unwrap_or_else(|e| panic!("{}, which the tests need: {e}", self.compiler));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{cc:?} failed:\n{errors}");
        fs::rename(&unfinished, &done).unwrap_or_else(|e| panic!("{}: {e}", done.display()));
        done
    }
}

/// Feeds a file's content to `hasher`.
fn hash_file(path: &Path, hasher: &mut DefaultHasher) {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).hash(hasher);
}

/// Feeds every header of a folder to `hasher`: a source may include any of them.
fn hash_headers(folder: &Path, hasher: &mut DefaultHasher) {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut headers: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "h"))
        .collect();
    headers.sort();
    for header in headers {
        hash_file(&header, hasher);
    }
}
