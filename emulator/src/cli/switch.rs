//! `ummunotify switch`: moves a running program's contexts to another backend.

use std::time::Duration;

use ummunotify::switch::{Moved, Place, switch_process};

use super::{Failure, SwitchArguments};

fn go(pid: u32, to: Place, deadline: u64) -> Result<Moved, Failure> {
    switch_process(pid, to, Duration::from_secs(deadline))
        .map_err(|e| Failure::new(1, format!("process {pid} can't switch to {to}: {e}")))
}

pub(super) fn main(options: &SwitchArguments) -> Result<i32, Failure> {
    let SwitchArguments { pid, mut backend, deadline, times } = *options;
    let mut done = go(pid, backend, deadline)?;
    for _ in 1..times {
        backend = if backend == Place::Kmod { Place::Emulated } else { Place::Kmod };
        done = go(pid, backend, deadline)?;
        if done.moved == 0 {
            return Err(Failure::new(1, format!("process {pid}: somebody else moved it to {backend}")));
        }
    }
    let contexts = |n: u64| if n == 1 { "1 context".to_owned() } else { format!("{n} contexts") };
    match (done.moved, done.already) {
        (0, n) => println!("process {pid}: {} on {backend} already", contexts(n)),
        (n, 0) => println!("process {pid}: {} moved to {backend}", contexts(n)),
        (n, m) => {
            println!("process {pid}: {} moved to {backend}, {} there already", contexts(n), contexts(m))
        }
    }
    Ok(0)
}
