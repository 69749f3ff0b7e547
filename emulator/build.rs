//! Builds the shim and hands it to the binary, which carries it: copying one file to another host is enough.
//!
//! It is a build of its own since Cargo would unify features and profiles otherwise (see shim/Cargo.toml).

use std::path::Path;
use std::process::{Command, ExitCode};

/// The one platform that the shim is for.
const TARGET: &str = "x86_64-unknown-linux-gnu";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    // What the shim is made of. Its target directory may lie beside its sources, so not all of `../shim`.
    for source in [
        "../shim/src",
        "../shim/build.rs",
        "../shim/Cargo.toml",
        "../shim/Cargo.lock",
        "abi/src",
        "abi/Cargo.toml",
        "engine/src",
        "engine/Cargo.toml",
        "inline/src",
        "inline/Cargo.toml",
        "../Cargo.toml",
    ] {
        println!("cargo::rerun-if-changed={source}");
    }
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (arch, os, env) = (
        variable("CARGO_CFG_TARGET_ARCH"),
        variable("CARGO_CFG_TARGET_OS"),
        variable("CARGO_CFG_TARGET_ENV"),
    );
    if (arch.as_str(), os.as_str(), env.as_str()) != ("x86_64", "linux", "gnu") {
        // The client library works there, on a real device; the command refuses to be built (see src/main.rs).
        println!(
            "cargo::warning=there is no emulator for {arch}-{os}-{env}: it needs x86-64 Linux with glibc"
        );
        let nothing = Path::new(&variable("OUT_DIR")).join("nothing");
        return match std::fs::write(&nothing, b"") {
            Ok(()) => succeed(&nothing),
            Err(e) => fail(&format!("{}: {e}", nothing.display())),
        };
    }
    let target_dir = Path::new(&variable("OUT_DIR")).join("shim");
    match build(&variable("CARGO"), &target_dir) {
        Ok(()) => succeed(&target_dir.join(TARGET).join("release/libummunotify_shim.so")),
        Err(reason) => fail(&format!("the preloadable library in shim/ can't be built: {reason}")),
    }
}

fn succeed(library: &Path) -> ExitCode {
    println!("cargo::rustc-env=UMMUNOTIFY_SHIM_PATH={}", library.display());
    ExitCode::SUCCESS
}

fn fail(reason: &str) -> ExitCode {
    println!("cargo::error={reason}");
    ExitCode::FAILURE
}

fn build(cargo: &str, target_dir: &Path) -> Result<(), String> {
    let mut command = Command::new(if cargo.is_empty() { "cargo" } else { cargo });
    command
        .args(["build", "--release", "--locked", "--target", TARGET, "--manifest-path", "../shim/Cargo.toml"])
        .arg("--target-dir")
        .arg(target_dir);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(leaks) {
            command.env_remove(name);
        }
    }
    match command.output() {
        Err(e) => Err(format!("{cargo}: {e}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            Err(format!("cargo ended with {}; its messages stand below", output.status))
        }
    }
}

/// What the outer build says about itself: its flags, profiles, wrappers (clippy), job server. Where Cargo's home
/// is and how it reaches the network holds for the inner build as well.
fn leaks(name: &str) -> bool {
    let kept = name == "CARGO_HOME"
        || ["CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTRIES_"].iter().any(|p| name.starts_with(p));
    let cargo = ["CARGO_", "DEP_", "RUSTC", "__CARGO"].iter().any(|prefix| name.starts_with(prefix));
    let other = [
        "CARGO",
        "RUSTFLAGS",
        "RUSTDOC",
        "RUSTDOCFLAGS",
        "MAKEFLAGS",
        "MFLAGS",
        "TARGET",
        "HOST",
        "PROFILE",
        "OUT_DIR",
        "OPT_LEVEL",
        "DEBUG",
        "NUM_JOBS",
    ];
    !kept && (cargo || other.contains(&name))
}
