//! Calls by which descriptors come, go and multiply.
//!
//! poll and select have no hook: the descriptor is the read end of a real pipe, and as long as the context is
//! readable there is a byte in it. For each invalidation that hits there is one more where the supervisor records;
//! where our own threads do, only once somebody was seen to wait for each: by O_ASYNC or edge-triggered epoll.

use core::ffi::{c_int, c_uint, c_void};

use crate::{device, memory, next, sys, table};

/// close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    table::forget(fd);
    next!(c"close" as fn(c_int) -> c_int; (fd); sys::libc_result(sys::close(fd)) as c_int)
}

/// `CLOSE_RANGE_CLOEXEC`: nothing is closed now.
const CLOSE_RANGE_CLOEXEC: c_int = 4;

/// close_range(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & CLOSE_RANGE_CLOEXEC == 0 && first <= last {
        table::forget_range(first, last);
    }
    next!(c"close_range" as fn(c_uint, c_uint, c_int) -> c_int; (first, last, flags);
        // SAFETY: no memory is involved.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_close_range, first as usize, last as usize, flags as usize, 0, 0, 0)
        }) as c_int)
}

/// closefrom(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let first = first.max(0);
    table::forget_range(first as c_uint, c_uint::MAX);
    next!(c"closefrom" as fn(c_int) -> (); (first); {
        // SAFETY: no memory is involved.
        unsafe { sys::call(libc::SYS_close_range, first as usize, c_uint::MAX as usize, 0, 0, 0, 0) };
    });
}

/// dup(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(old: c_int) -> c_int {
    let new = next!(c"dup" as fn(c_int) -> c_int; (old);
        // SAFETY: no memory is involved.
        sys::libc_result(unsafe { sys::call(libc::SYS_dup, old as usize, 0, 0, 0, 0, 0) }) as c_int);
    table::copied(old, new);
    new
}

/// dup2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    let result = next!(c"dup2" as fn(c_int, c_int) -> c_int; (old, new);
        // SAFETY: no memory is involved.
        sys::libc_result(unsafe { sys::call(libc::SYS_dup2, old as usize, new as usize, 0, 0, 0, 0) }) as c_int);
    table::copied(old, result);
    result
}

/// dup3(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    let result = next!(c"dup3" as fn(c_int, c_int, c_int) -> c_int; (old, new, flags);
        // SAFETY: no memory is involved.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_dup3, old as usize, new as usize, flags as usize, 0, 0, 0)
        }) as c_int);
    table::copied(old, result);
    result
}

/// What fcntl does beside the call itself. `Some`: the result instead of the call's.
fn before_fcntl(fd: c_int, command: c_int, argument: usize) -> Option<c_int> {
    if command == libc::F_SETFL && argument as c_int & libc::O_ASYNC != 0 {
        device::arm(fd);
    }
    // The size of a pipe is nobody's business here: the device isn't one.
    if matches!(command, libc::F_SETPIPE_SZ | libc::F_GETPIPE_SZ) && !table::is_foreign(fd) {
        let _blocked = sys::SignalsBlocked::new();
        if table::lookup(fd).is_some() {
            return Some(sys::libc_result(-(libc::EBADF as isize)) as c_int);
        }
    }
    None
}

macro_rules! fcntl_hooks {
    ($($hook:ident $name:literal $older:literal;)*) => {$(
        /// fcntl(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
            if let Some(result) = before_fcntl(fd, command, argument as usize) {
                return result;
            }
            let result = next!($name as fn(c_int, c_int; *mut c_void) -> c_int; (fd, command), (argument);
                next!($older as fn(c_int, c_int; *mut c_void) -> c_int; (fd, command), (argument);
                    // SAFETY: the application's own arguments.
                    sys::libc_result(unsafe {
                        sys::call(libc::SYS_fcntl, fd as usize, command as usize, argument as usize, 0, 0, 0)
                    }) as c_int));
            if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
                table::copied(fd, result);
            }
            result
        }
    )*};
}

fcntl_hooks! {
    fcntl c"fcntl" c"fcntl";
    fcntl64 c"fcntl64" c"fcntl";
}

/// epoll_ctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut c_void) -> c_int {
    if operation != libc::EPOLL_CTL_DEL && !table::is_foreign(fd) {
        // The flags come first. A bad pointer is for the kernel to refuse.
        let edges = memory::read::<u32>(event).is_ok_and(|flags| flags & libc::EPOLLET as u32 != 0);
        if edges {
            device::arm(fd);
        }
    }
    next!(c"epoll_ctl" as fn(c_int, c_int, c_int, *mut c_void) -> c_int; (epoll, operation, fd, event);
        // SAFETY: the application's own arguments.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_epoll_ctl, epoll as usize, operation as usize, fd as usize, event as usize, 0, 0)
        }) as c_int)
}

/// recvmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(socket: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
    let result = next!(c"recvmsg" as fn(c_int, *mut libc::msghdr, c_int) -> isize; (socket, message, flags);
    // SAFETY: the application's own arguments.
    sys::libc_result(unsafe {
        sys::call(libc::SYS_recvmsg, socket as usize, message as usize, flags as usize, 0, 0, 0)
    }));
    if result >= 0 {
        // SAFETY: the kernel has just filled the message.
        unsafe { received(&*message) };
    }
    result
}

/// recvmmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    socket: c_int,
    messages: *mut libc::mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    let result = next!(c"recvmmsg" as fn(c_int, *mut libc::mmsghdr, c_uint, c_int, *mut libc::timespec) -> c_int;
        (socket, messages, count, flags, timeout);
        // SAFETY: the application's own arguments.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_recvmmsg, socket as usize, messages as usize, count as usize, flags as usize,
                      timeout as usize, 0)
        }) as c_int);
    for i in 0..usize::try_from(result).unwrap_or(0) {
        // SAFETY: the kernel has just filled that many messages.
        unsafe { received(&(*messages.add(i)).msg_hdr) };
    }
    result
}

/// Looks at the descriptors that came with a message: one of them may be the first device descriptor of this
/// process.
///
/// # Safety
/// The kernel has filled the message.
unsafe fn received(message: &libc::msghdr) {
    if message.msg_control.is_null() || message.msg_controllen < size_of::<libc::cmsghdr>() {
        return;
    }
    // SAFETY: the kernel wrote well-formed control data of that length.
    unsafe {
        let mut part = libc::CMSG_FIRSTHDR(message);
        while !part.is_null() {
            if (*part).cmsg_level == libc::SOL_SOCKET && (*part).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(part).cast::<c_int>();
                let bytes = (*part).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                for i in 0..bytes / size_of::<c_int>() {
                    let fd = data.add(i).read_unaligned();
                    table::forget(fd);
                    let _blocked = sys::SignalsBlocked::new();
                    drop(table::resolve(fd));
                }
            }
            part = libc::CMSG_NXTHDR(message, part);
        }
    }
}
