//! Names what the feature `rdma` needs and this host lacks, before the build of the bindings fails over it.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// Debian's packages, all of them.
const PACKAGES: &str = "cmake pkg-config libclang-14-dev libnl-3-dev libnl-route-3-dev libibverbs-dev";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_RDMA").is_none() {
        return ExitCode::SUCCESS;
    }
    let lacking = lacking();
    if lacking.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!(
        "cargo::error=the feature `rdma` needs what isn't here: {}; on Debian 12: apt-get install {PACKAGES} \
         (without the feature none of them is needed)",
        lacking.join(", ")
    );
    ExitCode::FAILURE
}

/// Only what the build is sure to fail without.
fn lacking() -> Vec<&'static str> {
    let cmake = std::env::var("CMAKE").unwrap_or_else(|_| "cmake".into());
    let mut lacking = Vec::new();
    let mut need = |what, is_there: bool| {
        if !is_there {
            lacking.push(what);
        }
    };
    need("cmake", works(&cmake, &["--version"]));
    // rdma-core asks pkg-config for libnl, so its answer counts.
    let has_config = works("pkg-config", &["--version"]);
    need("pkg-config", has_config);
    let has_headers = |module, header: &str| match has_config {
        true => works("pkg-config", &["--exists", module]),
        false => Path::new("/usr/include/libnl3/netlink").join(header).exists(),
    };
    need("libnl-3's headers", has_headers("libnl-3.0", "netlink.h"));
    need("libnl-route-3's headers", has_headers("libnl-route-3.0", "route/rtnl.h"));
    let probe = Path::new(&std::env::var("OUT_DIR").unwrap_or_default()).join("probe.so");
    let probe = probe.to_string_lossy();
    need(
        "libibverbs to link with",
        works("cc", &["-shared", "-x", "c", "/dev/null", "-libverbs", "-o", &probe]),
    );
    need("libclang's headers (stddef.h)", has_clang());
    lacking
}

fn works(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Whether clang's own headers lie where Debian has them; elsewhere, and where the caller says where libclang is, that
/// is libclang's affair.
fn has_clang() -> bool {
    let told = ["LIBCLANG_PATH", "CLANG_PATH", "BINDGEN_EXTRA_CLANG_ARGS"];
    if !Path::new("/etc/debian_version").exists() || told.iter().any(|name| std::env::var_os(name).is_some())
    {
        return true;
    }
    let folders = |path: &Path| -> Vec<_> {
        std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    folders(Path::new("/usr/lib"))
        .iter()
        .filter(|folder| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("llvm-")))
        .flat_map(|llvm| folders(&llvm.join("lib/clang")))
        .any(|version| version.join("include/stddef.h").exists())
}
