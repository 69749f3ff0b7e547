//! Link arguments of the preloadable library.

/// `ummunotify_inline::IMAGE_BASE`: the loader maps an image where it was linked for, if nothing lies there.
const IMAGE_BASE: &str = "-Wl,--image-base=0x700000000000";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Both must be named as needed whatever the build host's libc is made of: without libc a library that is
    // loaded RTLD_LOCAL or into another namespace finds nothing behind itself, and before glibc 2.34 dlsym
    // lives in libdl, whose newer development packages hold an empty archive only: hence the file's full name.
    // It stays loaded: patched sites jump into it.
    for argument in [
        "-Wl,--no-as-needed",
        "-l:libdl.so.2",
        "-lc",
        "-Wl,-z,now",
        "-Wl,-z,nodelete",
        IMAGE_BASE,
        "-Wl,-soname,libummunotify_shim.so",
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
