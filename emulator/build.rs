//! Builds the shim and hands it to the binary.
fn main() {}
