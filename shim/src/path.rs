//! The one path that is ours.

use core::ffi::c_char;

use ummunotify_abi::device;

/// True if the path names the device; several slashes count as one, as for the kernel. Relative paths and
/// paths through links don't match.
///
/// # Safety
/// The kernel has just read the path, or the caller knows otherwise that it is a readable string.
pub unsafe fn is_device(path: *const c_char) -> bool {
    let mut at = path.cast::<u8>();
    if at.is_null() {
        return false;
    }
    for &expected in device::PATH.as_bytes() {
        // SAFETY: every byte before this one matched, so none of them was the terminator.
        unsafe {
            if *at != expected {
                return false;
            }
            at = at.add(1);
            while expected == b'/' && *at == b'/' {
                at = at.add(1);
            }
        }
    }
    // SAFETY: as above.
    unsafe { *at == 0 }
}
