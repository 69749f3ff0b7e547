//! Builds the shim and hands it to the binary.
fn main() {
    // Until the shim's own build stands here: an empty library, which nothing accepts.
    let path = std::path::Path::new(&std::env::var_os("OUT_DIR").unwrap_or_default()).join("shim.so");
    std::fs::write(&path, b"").expect("write to OUT_DIR");
    println!("cargo::rustc-env=UMMUNOTIFY_SHIM_PATH={}", path.display());
    println!("cargo::rerun-if-changed=build.rs");
}
