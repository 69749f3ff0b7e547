//! Link arguments of the preloadable library.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Both must be named as needed whatever the build host's libc is made of: without libc a library that is
    // loaded RTLD_LOCAL or into another namespace finds nothing behind itself, and before glibc 2.34 dlsym
    // lives in libdl, whose newer development packages hold an empty archive only: hence the file's full name.
    for argument in
        ["-Wl,--no-as-needed", "-l:libdl.so.2", "-lc", "-Wl,-z,now", "-Wl,-soname,libummunotify_shim.so"]
    {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
