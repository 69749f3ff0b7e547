//! A target that isn't looked at.

use std::sync::Arc;

use ummunotify_abi::PageRange;

use crate::target::{
    Descriptor, Device, FileKind, KernelTraits, Mapping, PathTarget, Result, Source, Target, Unreadable,
};

/// A task in the company of others: all that is said of it is that it isn't alone. What can't be computed from
/// that fails, and is left to a look that may wait.
#[derive(Debug)]
pub struct CrowdedTarget<'a> {
    kernel: &'a KernelTraits,
}

const NOT_LOOKED_AT: Unreadable = Unreadable { source: Source::Other, errno: libc::EAGAIN };

impl<'a> CrowdedTarget<'a> {
    /// On a kernel that behaves like this.
    pub fn new(kernel: &'a KernelTraits) -> Self {
        Self { kernel }
    }
}

impl Target for CrowdedTarget<'_> {
    fn mappings(&mut self) -> Result<Arc<[Mapping]>> {
        Err(NOT_LOOKED_AT)
    }

    fn mappings_over(&mut self, _ranges: &[PageRange]) -> Result<Arc<[Mapping]>> {
        Err(NOT_LOOKED_AT)
    }

    fn mappings_with_flags(&mut self) -> Result<Arc<[Mapping]>> {
        Err(NOT_LOOKED_AT)
    }

    fn locked_kib(&mut self) -> Result<u64> {
        Err(NOT_LOOKED_AT)
    }

    fn single_task(&mut self) -> Result<bool> {
        Ok(false)
    }

    fn descriptor(&mut self, _fd: i32) -> Result<Option<Descriptor>> {
        Err(NOT_LOOKED_AT)
    }

    fn read_memory(&mut self, _address: u64, _buffer: &mut [u8]) -> Result<()> {
        Err(NOT_LOOKED_AT)
    }

    fn resolve_path(&mut self, _directory: i32, _path: u64) -> Result<PathTarget> {
        Err(NOT_LOOKED_AT)
    }

    fn shm_size(&mut self, _id: i32) -> Result<Option<u64>> {
        Err(NOT_LOOKED_AT)
    }

    fn pidfd_is_self(&mut self, _fd: i32) -> Result<bool> {
        Err(NOT_LOOKED_AT)
    }

    fn pid_is_self(&mut self, _pid: i32) -> Result<bool> {
        Err(NOT_LOOKED_AT)
    }

    fn heap_floor(&mut self) -> Result<u64> {
        Err(NOT_LOOKED_AT)
    }

    fn read_implies_exec(&mut self) -> Result<bool> {
        Err(NOT_LOOKED_AT)
    }

    fn device_kind(&mut self, _device: Device) -> FileKind {
        FileKind::Stacked
    }

    fn kernel(&self) -> &KernelTraits {
        self.kernel
    }
}
