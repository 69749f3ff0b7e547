//! The `ummunotify` command.
fn main() {}
