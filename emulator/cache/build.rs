//! With the feature `rdma`: bindings of libibverbs, made of this host's header; or a sentence that says what is missing.

use std::process::ExitCode;

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "rdma")]
    if let Err(reason) = rdma::bindings() {
        println!(
            "cargo::error=the feature `rdma` can't be built here: {reason}; on Debian 12 it needs: apt-get install \
             libibverbs-dev libclang-14-dev (without the feature nothing does)"
        );
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

#[cfg(feature = "rdma")]
mod rdma {
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};

    pub fn bindings() -> Result<(), String> {
        let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
        let probe = out.join("probe.so").to_string_lossy().into_owned();
        if !works("cc", &["-fsyntax-only", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"]) {
            return Err("cc finds no infiniband/verbs.h".into());
        }
        if !works("cc", &["-shared", "-x", "c", "/dev/null", "-o", &probe, "-x", "none", "-libverbs"]) {
            return Err("cc finds no libibverbs to link with".into());
        }
        println!("cargo::rustc-link-lib=ibverbs");
        // bindgen panics where it finds no libclang.
        std::panic::catch_unwind(|| generate(&out.join("verbs.rs")))
            .map_err(|_| "no libclang was found (see above)".to_owned())?
            .map_err(|error| match has_clangs_headers() {
                true => error,
                false => format!("libclang has no headers of its own, such as stddef.h: {error}"),
            })
    }

    fn works(program: &str, arguments: &[&str]) -> bool {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    fn generate(to: &Path) -> Result<(), String> {
        let mut builder = bindgen::Builder::default()
            .header_contents("bindings.h", "#include <infiniband/verbs.h>")
            // As far as the newest rule that it knows of: extern blocks are unsafe.
            .rust_target(bindgen::RustTarget::stable(82, 0).map_err(|error| error.to_string())?)
            .allowlist_function("ibv_.*")
            .allowlist_type("ibv_.*")
            .derive_default(true)
            .prepend_enum_name(false)
            .layout_tests(false);
        for flags in ["ibv_access_flags", "ibv_qp_attr_mask", "ibv_send_flags"] {
            builder = builder.bitfield_enum(flags);
        }
        for values in ["ibv_qp_type", "ibv_qp_state", "ibv_wc_status", "ibv_wr_opcode"] {
            builder = builder.constified_enum_module(values);
        }
        let bindings = builder.generate().map_err(|error| error.to_string())?;
        bindings.write_to_file(to).map_err(|error| error.to_string())
    }

    /// Where Debian has them; a libclang that somebody built has them beside itself.
    fn has_clangs_headers() -> bool {
        let folders = |path: &Path| -> Vec<_> {
            std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        };
        let versions =
            folders(Path::new("/usr/lib")).into_iter().flat_map(|llvm| folders(&llvm.join("lib/clang")));
        versions.into_iter().any(|version| version.join("include/stddef.h").exists())
    }
}
