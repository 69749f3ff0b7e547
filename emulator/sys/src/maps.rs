//! The mapping table, asked for one mapping at a time: `PROCMAP_QUERY` on `/proc/PID/maps` (Linux 6.11, `struct
//! procmap_query` of linux/fs.h). The text of the table takes a quarter of a microsecond for each mapping there is.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::check;

/// `_IOWR('f', 17, struct procmap_query)`.
const QUERY: libc::Ioctl = 0xc068_6611_u32 as libc::Ioctl;
/// `PROCMAP_QUERY_COVERING_OR_NEXT_VMA`.
const COVERING_OR_NEXT: u64 = 0x10;

/// Longest name, with its end (`PATH_MAX`): the kernel gives no longer one.
const NAME_MAX: usize = 4096;

/// `struct procmap_query`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<Query>() == 0x68);

/// A mapping, as the text of the table shows it.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Its first address.
    pub start: u64,
    /// The address behind its last one.
    pub end: u64,
    /// PROT_READ, PROT_WRITE, PROT_EXEC.
    pub prot: u8,
    /// Made with MAP_SHARED.
    pub shared: bool,
    /// Offset of its first byte in the file, 0 without a file.
    pub offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// The file's inode, 0 without a file.
    pub inode: u64,
    /// Its name, without the escapes of the text.
    pub name: &'a [u8],
}

/// An open `/proc/PID/maps`: the table of the address space that the task had when it was opened.
#[derive(Debug)]
pub struct Table {
    file: File,
    name: Vec<u8>,
}

impl Table {
    /// Of an open file.
    pub fn new(file: File) -> Self {
        Self { file, name: vec![0; NAME_MAX] }
    }

    /// The mapping that holds `address`, or else the next one above; `None` if there is none. The kernel's own page above
    /// all user addresses isn't found.
    ///
    /// # Errors
    /// ENOTTY before Linux 6.11; ESRCH if the address space is gone; ENAMETOOLONG for a path that is too long for anybody.
    pub fn at_or_above(&mut self, address: u64) -> io::Result<Option<Answer<'_>>> {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            query_flags: COVERING_OR_NEXT,
            query_addr: address,
            vma_name_size: NAME_MAX as u32,
            vma_name_addr: self.name.as_mut_ptr() as u64,
            ..Query::default()
        };
        // SAFETY: the kernel reads and writes one `procmap_query`, whose size it is told, and writes at most
        // `vma_name_size` bytes to the name, which has as many.
        let ret = unsafe { libc::ioctl(self.file.as_raw_fd(), QUERY, &raw mut query) };
        match check(ret.into()) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(e) => return Err(e),
        }
        // With its end; 0 if it has none.
        let name = self.name.get(..query.vma_name_size as usize).unwrap_or_default();
        Ok(Some(Answer {
            start: query.vma_start,
            end: query.vma_end,
            prot: (query.vma_flags & 0x7) as u8,
            shared: query.vma_flags & 0x8 != 0,
            offset: query.vma_offset,
            device: (query.dev_major, query.dev_minor),
            inode: query.inode,
            name: name.strip_suffix(b"\0").unwrap_or(name),
        }))
    }
}
