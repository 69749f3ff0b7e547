//! Registrations with an RDMA adapter, by libibverbs.
//!
//! Memory of the caller's is registered where it lies, which the crate `ibverbs` doesn't do (it registers what it
//! allocated itself); so this uses the layer below it, `ibverbs-sys`.

use ibverbs_sys as ffi;
use std::ffi::CStr;
use std::io;
use std::ptr::NonNull;

use crate::{Access, Registrar, RegistrarError};
use ummunotify_abi::PageRange;

/// A protection domain of an open device.
///
/// It must outlive what was registered with it, which the cache sees to. Queue pairs made from its raw pointers are
/// the caller's: destroy them before it is dropped, or the device refuses to give the domain back.
#[derive(Debug)]
pub struct Verbs {
    context: NonNull<ffi::ibv_context>,
    pd: NonNull<ffi::ibv_pd>,
    name: String,
}

// SAFETY: libibverbs may be called from any thread, for the same objects at once (ibverbs(7): fully thread safe).
unsafe impl Send for Verbs {}
// SAFETY: as above.
unsafe impl Sync for Verbs {}

/// Memory that the adapter knows.
#[derive(Debug)]
pub struct Region {
    mr: NonNull<ffi::ibv_mr>,
}

// SAFETY: as for `Verbs`.
unsafe impl Send for Region {}
// SAFETY: what is read of it doesn't change.
unsafe impl Sync for Region {}

impl Region {
    /// The key by which the process's own requests name the memory.
    pub fn local_key(&self) -> u32 {
        // SAFETY: libibverbs' own, until it is deregistered, which takes `self`.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// The key by which a peer's requests name the memory.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.mr.as_ref() }.rkey
    }
}

impl Verbs {
    /// Opens the device of that name, or the first one, and makes a protection domain.
    ///
    /// # Errors
    /// No device, none of that name, or one that can't be opened.
    pub fn open(name: Option<&str>) -> Result<Self, RegistrarError> {
        let error = |call, advice| Err(RegistrarError { call, errno: errno(), range: None, advice });
        let mut count = 0;
        // SAFETY: the count is written; the list belongs to the caller.
        let list = unsafe { ffi::ibv_get_device_list(&mut count) };
        if list.is_null() {
            return error("ibv_get_device_list", "load the kernel's module ib_uverbs");
        }
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the list has that many entries, and lives until it is freed below.
        let devices = unsafe { std::slice::from_raw_parts(list, count) };
        let named = |device: &&*mut ffi::ibv_device| name.is_none_or(|name| device_name(**device) == name);
        let opened = devices.iter().find(named).map(|&device| {
            // SAFETY: a device of the list.
            (unsafe { ffi::ibv_open_device(device) }, device_name(device))
        });
        let failed = errno();
        // SAFETY: from ibv_get_device_list; an open device stays valid without it.
        unsafe { ffi::ibv_free_device_list(list) };
        let advice = match name {
            _ if count == 0 => {
                "there is no RDMA device here: load its driver, or set one up (rdma link add NAME type rxe netdev NAME)"
            }
            Some(_) => "there is no RDMA device of that name: `rdma link` lists them",
            None => "",
        };
        let Some((context, name)) = opened else {
            return Err(RegistrarError { call: "ibv_open_device", errno: libc::ENODEV, range: None, advice });
        };
        let Some(context) = NonNull::new(context) else {
            let advice = "may this user open /dev/infiniband/uverbs*?";
            return Err(RegistrarError { call: "ibv_open_device", errno: failed, range: None, advice });
        };
        // SAFETY: an open device.
        let Some(pd) = NonNull::new(unsafe { ffi::ibv_alloc_pd(context.as_ptr()) }) else {
            let failure = error("ibv_alloc_pd", "");
            // SAFETY: opened above, and nothing was made of it.
            unsafe { ffi::ibv_close_device(context.as_ptr()) };
            return failure;
        };
        Ok(Self { context, pd, name })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The open device, for calls of the caller's own.
    pub fn context(&self) -> *mut ffi::ibv_context {
        self.context.as_ptr()
    }

    /// The protection domain, for queue pairs of the caller's own.
    pub fn domain(&self) -> *mut ffi::ibv_pd {
        self.pd.as_ptr()
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        // SAFETY: both are ours alone, and nothing that this crate made of them is left.
        unsafe {
            ffi::ibv_dealloc_pd(self.pd.as_ptr());
            ffi::ibv_close_device(self.context.as_ptr());
        }
    }
}

impl Registrar for Verbs {
    type Registration = Region;

    /// `ibv_reg_mr`. Rights to write from afar bring the local one with them, as verbs ask for.
    fn register(&self, range: PageRange, access: Access) -> Result<Region, RegistrarError> {
        let (address, length) = (range.start as *mut libc::c_void, range.len() as usize);
        // SAFETY: the kernel checks the range; nothing is written by this call.
        let mr = unsafe { ffi::ibv_reg_mr(self.pd.as_ptr(), address, length, flags(access)) };
        NonNull::new(mr).map(|mr| Region { mr }).ok_or_else(|| {
            let mut error = RegistrarError::last_os_error("ibv_reg_mr", range);
            error.advice = advice(error.errno);
            error
        })
    }

    fn deregister(&self, region: Region) -> Result<(), RegistrarError> {
        // SAFETY: registered above, and nobody has it any more.
        match unsafe { ffi::ibv_dereg_mr(region.mr.as_ptr()) } {
            0 => Ok(()),
            errno => {
                let advice = advice(errno);
                Err(RegistrarError { call: "ibv_dereg_mr", errno, range: None, advice })
            }
        }
    }
}

/// What a failure of ibv_reg_mr calls for; sources: ibv_reg_mr(3) and drivers/infiniband/core (umem, uverbs).
fn advice(errno: i32) -> &'static str {
    match errno {
        libc::ENOMEM => {
            "the limit on locked memory (ulimit -l), or the adapter, has no room: raise it, or lower the cache's limit of bytes"
        }
        libc::EFAULT => "is all of it mapped, and writable if the adapter is to write?",
        libc::EINVAL | libc::EOPNOTSUPP => "the adapter doesn't know these rights",
        libc::EPERM => "the limit on locked memory (ulimit -l) is 0",
        libc::ENODEV | libc::EIO => "the adapter is gone: was it removed?",
        libc::EBUSY => "something is still bound to it (a memory window)",
        _ => "",
    }
}

fn flags(access: Access) -> i32 {
    let table = [
        (Access::LOCAL_WRITE, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0),
        (Access::REMOTE_WRITE, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0),
        (Access::REMOTE_READ, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0),
        (Access::REMOTE_ATOMIC, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0),
        // ibv_reg_mr(3): whoever lets a peer write must let itself.
        (Access::REMOTE_WRITE, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0),
        (Access::REMOTE_ATOMIC, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0),
    ];
    table.iter().filter(|(right, _)| access.contains(*right)).fold(0, |all, (_, flag)| all | *flag as i32)
}

fn device_name(device: *mut ffi::ibv_device) -> String {
    // SAFETY: a device of a list that lives; the name lies in it, zero-terminated.
    let name = unsafe { ffi::ibv_get_device_name(device) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_not_called_by_its_name() {
        let error = Verbs::open(Some("no such device")).map(drop).expect_err("a device of that name");
        let text = error.to_string();
        assert!(
            text.contains("ibv_") && text.contains("RDMA device") || text.contains("ib_uverbs"),
            "{text}"
        );
        assert!(error.errno != 0, "{text}");
    }

    #[test]
    fn remote_writers_lack_the_local_right() {
        assert_eq!(flags(Access::REMOTE_WRITE), 3);
        assert_eq!(flags(Access::REMOTE_ATOMIC), 9);
        assert_eq!(flags(Access::LOCAL_READ), 0);
        assert_eq!(flags(Access::REMOTE_READ), 4);
    }
}
