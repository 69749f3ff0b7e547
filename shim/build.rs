//! Link arguments of the preloadable library.

/// `ummunotify_inline::IMAGE_BASE`: the loader maps an image where it was linked for, if nothing lies there.
const IMAGE_BASE: &str = "-Wl,--image-base=0x550000000000";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // libc must be named as needed: without it a library that is loaded RTLD_LOCAL or into another namespace finds
    // nothing behind itself. Before glibc 2.34 dlsym lives in libdl, whose newer development packages hold an empty
    // archive only: hence the file's full name. Where it isn't needed every program would load it for nothing.
    // The library stays loaded: patched sites jump into it.
    for argument in [
        "-Wl,--no-as-needed",
        "-lc",
        "-Wl,--as-needed",
        "-l:libdl.so.2",
        "-Wl,--no-as-needed",
        "-Wl,-z,now",
        // One piece less for the loader to map, by a call that an inherited filter traps.
        "-Wl,--no-rosegment",
        "-Wl,-z,nodelete",
        IMAGE_BASE,
        "-Wl,-soname,libummunotify_shim.so",
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
