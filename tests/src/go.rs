//! Compiles programs in Go.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Client, Stage};

/// Whether there is a compiler.
pub fn is_available() -> bool {
    let version = Command::new("go").arg("version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

impl Stage {
    /// Compiles `tests/go/SOURCE`, statically linked. With an object of C code (flag `-r`) that is linked into it; without,
    /// no C library is in it.
    pub fn go_program(&self, source: &str, object: Option<&Client>) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("go").join(source);
        let name = source.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let program = self.folder().join("bin").join(format!("{name}-go"));
        let mut go = Command::new("go");
        go.arg("build");
        if let Some(object) = object {
            // The compiler names what it links twice: an archive may be.
            let object = self.client(object);
            let archive = self.folder().join("bin/libobject.a");
            let made = Command::new("ar").arg("rcs").args([&archive, &object]).status().expect("ar runs");
            assert!(made.success(), "ar: {made}");
            go.args(["-ldflags", "-linkmode external -extldflags -static"])
                .env("CGO_ENABLED", "1")
                .env("CGO_LDFLAGS", format!("-L{} -lobject", self.folder().join("bin").display()));
        } else {
            go.env("CGO_ENABLED", "0");
        }
        let built = go
            .arg("-o")
            .args([&program, &source])
            .env("GOCACHE", self.target().join("go-cache"))
            .env("GOPATH", self.target().join("go"))
            .current_dir(self.folder())
            .output()
            .expect("go runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        program
    }
}
