//! A trapped call that may be one of the device's, from its registers alone.
//!
//! It *may* be: an open is of some path, and a descriptor in the band can be something else's. Whoever serves it
//! finds that out; what isn't the device's is treated as it would be without the device.

use super::operation::{AT_FDCWD, Syscall};
use super::policy::{ARCH_X86_64, Band, nr};
use ummunotify_abi::device::{EXCHANGE_FEATURES, REGISTER_REGION, UNREGISTER_REGION};

/// Where a read puts its records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// One buffer: address and bytes.
    Buffer(u64, u64),
    /// `struct iovec`s: their address and their number.
    Vector(u64, u64),
}

/// Where the flags of an open stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenFlags {
    /// In a register.
    Given(i32),
    /// In a `struct open_how`: its address and size.
    Behind(u64, u64),
}

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceCall {
    /// open, openat, openat2, creat.
    #[allow(missing_docs)]
    Open { path: u64, flags: OpenFlags },
    /// ioctl.
    #[allow(missing_docs)]
    Ioctl { fd: i32, request: u32, argument: u64 },
    /// read and its kin. `offset` where they have one, `flags` as of preadv2.
    #[allow(missing_docs)]
    Read { fd: i32, room: Room, offset: Option<i64>, flags: i32 },
    /// A write at an offset, which a pipe and a device refuse differently.
    #[allow(missing_docs)]
    Write { fd: i32 },
    /// mmap of the descriptor.
    #[allow(missing_docs)]
    Map { fd: i32, arguments: [u64; 6] },
    /// A copy of the descriptor at no certain number: dup, F_DUPFD.
    #[allow(missing_docs)]
    Copy { fd: i32, least: i32, cloexec: bool },
    /// A copy at a certain number: dup2, dup3.
    #[allow(missing_docs)]
    CopyTo { fd: i32, number: i32 },
    /// F_GETPIPE_SZ, F_SETPIPE_SZ.
    #[allow(missing_docs)]
    PipeSize { fd: i32 },
}

impl DeviceCall {
    /// Reads a call. `None`: it is surely none of the device's.
    pub fn new(call: &Syscall, band: Band) -> Option<Self> {
        if call.arch != ARCH_X86_64 {
            return None;
        }
        let a = &call.args;
        let int = |i: usize| a[i] as i32;
        let fd = int(0);
        let buffer = Room::Buffer(a[1], a[2]);
        // The kernel takes the number of segments as a long, and refuses a negative one as too large.
        let vector = Room::Vector(a[1], a[2]);
        let read = |room, offset, flags| Self::Read { fd, room, offset, flags };
        let offset = Some(a[3].cast_signed());
        let open = |path, flags| Some(Self::Open { path, flags });
        match call.nr {
            nr::OPEN => return open(a[0], OpenFlags::Given(int(1))),
            nr::OPENAT => return open(a[1], OpenFlags::Given(int(2))),
            nr::OPENAT2 => return open(a[1], OpenFlags::Behind(a[2], a[3])),
            nr::CREAT => {
                let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
                return open(a[0], OpenFlags::Given(flags));
            }
            nr::IOCTL => {
                let request = a[1] as u32;
                let own = [EXCHANGE_FEATURES, REGISTER_REGION, UNREGISTER_REGION].contains(&request);
                return (own || band.has(fd)).then_some(Self::Ioctl { fd, request, argument: a[2] });
            }
            nr::MMAP => {
                let anonymous = a[3] & super::operation::MAP_ANONYMOUS != 0;
                let fd = int(4);
                return (band.has(fd) && !anonymous).then_some(Self::Map { fd, arguments: *a });
            }
            _ if !band.has(fd) => return None,
            _ => {}
        }
        Some(match call.nr {
            nr::READ => read(buffer, None, 0),
            nr::PREAD64 => read(buffer, offset, 0),
            nr::READV => read(vector, None, 0),
            nr::PREADV => read(vector, offset, 0),
            // The offset -1 means the current position.
            nr::PREADV2 => read(vector, offset.filter(|at| *at != -1), int(5)),
            nr::PWRITE64 | nr::PWRITEV | nr::PWRITEV2 => Self::Write { fd },
            nr::DUP => Self::Copy { fd, least: 0, cloexec: false },
            nr::DUP2 | nr::DUP3 => Self::CopyTo { fd, number: int(1) },
            nr::FCNTL => match int(1) {
                libc::F_DUPFD => Self::Copy { fd, least: int(2), cloexec: false },
                libc::F_DUPFD_CLOEXEC => Self::Copy { fd, least: int(2), cloexec: true },
                libc::F_GETPIPE_SZ | libc::F_SETPIPE_SZ => Self::PipeSize { fd },
                _ => return None,
            },
            _ => return None,
        })
    }

    /// The descriptor that it is about; `None` for an open.
    pub const fn fd(&self) -> Option<i32> {
        match *self {
            Self::Open { .. } => None,
            Self::Ioctl { fd, .. }
            | Self::Read { fd, .. }
            | Self::Write { fd }
            | Self::Map { fd, .. }
            | Self::Copy { fd, .. }
            | Self::CopyTo { fd, .. }
            | Self::PipeSize { fd } => Some(fd),
        }
    }
}

const _: () = assert!(AT_FDCWD == libc::AT_FDCWD);

#[cfg(test)]
mod tests {
    use super::*;

    const BAND: Band = Band { first: 960, last: 1023 };

    fn call(nr: u32, args: [u64; 6]) -> Option<DeviceCall> {
        DeviceCall::new(&Syscall { arch: ARCH_X86_64, nr, args }, BAND)
    }

    #[test]
    fn descriptors_outside_the_band_are_something_elses() {
        for number in [nr::READ, nr::READV, nr::PREADV2, nr::DUP, nr::PWRITE64] {
            assert_eq!(call(number, [959, 0, 0, 0, 0, 0]), None, "{number}");
            assert_eq!(call(number, [1024, 0, 0, 0, 0, 0]), None, "{number}");
            assert_eq!(call(number, [960, 0, 0, 0, 0, 0]).and_then(|c| c.fd()), Some(960), "{number}");
            // The high half of a register means nothing to an int.
            assert!(call(number, [960 | 5 << 32, 0, 0, 0, 0, 0]).is_some(), "{number}");
        }
        assert_eq!(call(nr::MMAP, [0, 8, 1, 1, 5, 0]), None);
        assert_eq!(call(nr::MMAP, [0, 8, 1, 0x22, 960, 0]), None);
        assert!(call(nr::MMAP, [0, 8, 1, 1, 960, 0]).is_some());
    }

    #[test]
    fn the_devices_own_requests_count_anywhere() {
        let register = u64::from(REGISTER_REGION);
        assert!(call(nr::IOCTL, [5, register, 0, 0, 0, 0]).is_some());
        assert_eq!(call(nr::IOCTL, [5, 0x541b, 0, 0, 0, 0]), None);
        assert!(call(nr::IOCTL, [960, 0x541b, 0, 0, 0, 0]).is_some());
    }

    #[test]
    fn a_band_fits_below_the_limit() {
        assert_eq!(Band::below(1024), Some(BAND));
        assert_eq!(Band::below(u64::MAX), Some(BAND));
        assert_eq!(Band::below(256), Some(Band { first: 192, last: 255 }));
        assert_eq!(Band::below(20), Some(Band { first: 15, last: 19 }));
        assert_eq!(Band::below(3), None);
    }
}
