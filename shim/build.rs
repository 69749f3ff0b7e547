//! Link arguments of the preloadable library.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Both must be named as needed whatever the build host's libc is made of: without libc a library that is
    // loaded RTLD_LOCAL or into another namespace finds nothing behind itself, and before glibc 2.34 dlsym
    // lives in libdl.
    for argument in ["-Wl,--no-as-needed", "-ldl", "-lc", "-Wl,-z,now", "-Wl,-soname,libummunotify_shim.so"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
