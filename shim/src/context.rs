//! The contexts that descriptors of this process refer to.
//!
//! A slot is either *owned*, the context was opened in this very address space and its arena is mapped, or
//! *remote*: opened by another process, or by the one that we were forked from. An owned slot that fork copied
//! becomes remote by itself, since its generation isn't the copy's; the copy has no mapping of the arena
//! (MADV_DONTFORK), and must not unmap whatever lies there now.
//!
//! A slot's word says in one place whether it may be entered, so that the mappings vanish only when nobody is
//! inside: `generation << 32 | CLOSING | users`. 0 is a free slot.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, size_of};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use ummunotify_engine::{ARENA_BYTES, Engine};

use crate::door::Owned;
use crate::{inline, owner, sys};

/// Nobody may enter any more.
const CLOSING: u64 = 1 << 31;
/// Generation of a slot that was remote from the beginning.
const REMOTE: u32 = u32::MAX;

/// Slots of a chunk; chunks come as they are needed.
const CHUNK: usize = 256;
/// Chunks; together they number as many slots as a table entry can name.
const CHUNKS: usize = 255;

/// What is mapped of an owned context.
#[derive(Clone, Copy)]
struct Mapped {
    arena: usize,
    counter: usize,
    engine: Engine,
    /// Listed for our own threads to record in (see [`crate::inline`]): it stays until the supervisor says that it
    /// is over, whatever the table knows of its descriptors.
    listed: bool,
}

/// See the module.
#[repr(C, align(64))]
pub struct Slot {
    word: AtomicU64,
    /// Table entries that name this slot. Strays of an earlier use are possible; they only delay an unmapping.
    references: AtomicU32,
    /// The supervisor's end was seen, and everything reported as invalid because of it.
    orphaned: AtomicU32,
    inode: AtomicU64,
    device: AtomicU64,
    mapped: UnsafeCell<MaybeUninit<Mapped>>,
}

// SAFETY: `mapped` is written only by who claimed a free slot, before the word admits anyone, and read only by
// those whom the word admitted.
unsafe impl Sync for Slot {}

static CHUNK_POINTERS: [AtomicPtr<Slot>; CHUNKS] = [const { AtomicPtr::new(null_mut()) }; CHUNKS];

/// A descriptor's identity: device and inode of its pipe.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Of the file system of pipes.
    pub device: u64,
    /// Of the pipe.
    pub inode: u64,
}

/// The right to use a slot, for as long as it lives.
pub struct Ticket {
    slot: &'static Slot,
    index: u16,
    identity: Identity,
    /// Here the arena is mapped.
    mapped: Option<Mapped>,
}

impl Ticket {
    /// Which slot.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The engine on our own mapping; `None` for a remote context.
    pub fn engine(&self) -> Option<Engine> {
        self.mapped.map(|mapped| mapped.engine)
    }

    /// The pipe.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether the address lies in our mapping of the arena.
    pub fn maps(&self, address: usize) -> bool {
        self.mapped.is_some_and(|mapped| (mapped.arena..mapped.arena + ARENA_BYTES).contains(&address))
    }

    /// Keeps the slot for good: for a ticket that a fork copied, whose slot may be another's by now.
    pub fn forget(self) {
        core::mem::forget(self);
    }

    /// Notes that the supervisor is dead; true for who notes it first.
    pub fn orphan(&self) -> bool {
        self.slot.orphaned.swap(1, Ordering::AcqRel) == 0
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.mapped.is_some() {
            self.slot.leave();
        }
    }
}

/// What libc calls when a thread that waits with a ticket in hand is cancelled or leaves by longjmp: Rust's own
/// clean-up doesn't run then.
pub type CleanUp = extern "C" fn(*mut c_void);

impl Ticket {
    /// A function, and its argument, that does what dropping the ticket would.
    pub fn clean_up(&self) -> (CleanUp, *mut c_void) {
        extern "C" fn nothing(_: *mut c_void) {}
        extern "C" fn leave(slot: *mut c_void) {
            // SAFETY: the pointer is that of a slot, which stays for good.
            unsafe { &*slot.cast::<Slot>() }.leave();
        }
        let function: CleanUp = if self.mapped.is_some() { leave } else { nothing };
        (function, (&raw const *self.slot).cast_mut().cast())
    }
}

fn users(word: u64) -> u64 {
    word & (CLOSING - 1)
}

fn generation(word: u64) -> u32 {
    (word >> 32) as u32
}

impl Slot {
    fn identity(&self) -> Identity {
        Identity { device: self.device.load(Ordering::Acquire), inode: self.inode.load(Ordering::Acquire) }
    }

    fn enter(&'static self, index: u16) -> Option<Ticket> {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if word == 0 || word & CLOSING != 0 {
                return None;
            }
            if generation(word) == REMOTE || generation(word) != owner::generation() {
                return Some(Ticket { slot: self, index, identity: self.identity(), mapped: None });
            }
            match self.word.compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // SAFETY: the word admitted us, so the field was written.
                    let mapped = unsafe { (*self.mapped.get()).assume_init() };
                    return Some(Ticket {
                        slot: self,
                        index,
                        identity: self.identity(),
                        mapped: Some(mapped),
                    });
                }
                Err(now) => word = now,
            }
        }
    }

    fn leave(&self) {
        let left = self.word.fetch_sub(1, Ordering::AcqRel) - 1;
        if left & CLOSING != 0 && users(left) == 0 {
            self.tear_down();
        }
    }

    /// Lets nobody in any more, unless the context is listed.
    fn retire(&self) {
        let word = self.word.load(Ordering::Acquire);
        let owned = word != 0
            && word & CLOSING == 0
            && generation(word) != REMOTE
            && generation(word) == owner::generation();
        if !owned || !self.is_listed() {
            self.close();
        }
    }

    /// Lets nobody in any more; who leaves last unmaps.
    fn close(&self) {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if word == 0 || word & CLOSING != 0 {
                return;
            }
            let owned = generation(word) != REMOTE && generation(word) == owner::generation();
            // Nobody is ever counted inside a remote slot; what a copied one counts are its parent's threads.
            let next = if owned { word | CLOSING } else { 0 };
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if owned && users(word) == 0 => return self.tear_down(),
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    fn tear_down(&self) {
        // SAFETY: the word is CLOSING without users: we alone may touch the slot.
        let mapped = unsafe { (*self.mapped.get()).assume_init() };
        if mapped.listed {
            // Threads may look at it once more; what they see then is an arena without regions. Its memory is given
            // back (MADV_REMOVE), and only then the mapping waits for another context.
            inline::remove(mapped.arena);
            // SAFETY: shared memory of ours, whose contents nobody needs any more.
            unsafe {
                sys::call(libc::SYS_madvise, mapped.arena, ARENA_BYTES, libc::MADV_REMOVE as usize, 0, 0, 0)
            };
            inline::keep(mapped.arena, mapped.counter);
        } else {
            // SAFETY: nobody uses the mappings.
            unsafe { unmap(mapped.arena, mapped.counter) };
        }
        self.word.store(0, Ordering::Release);
    }

    /// To be asked of an owned slot only.
    fn is_listed(&self) -> bool {
        // SAFETY: an owned slot's field was written before its word admitted anyone.
        unsafe { (*self.mapped.get()).assume_init() }.listed
    }
}

fn slot(index: u16) -> Option<&'static Slot> {
    let chunk = CHUNK_POINTERS.get(usize::from(index) / CHUNK)?.load(Ordering::Acquire);
    if chunk.is_null() {
        return None;
    }
    // SAFETY: a published chunk holds CHUNK slots and stays for good.
    Some(unsafe { &*chunk.add(usize::from(index) % CHUNK) })
}

/// Enters a slot, if it still holds that context.
pub fn enter(index: u16, identity: Identity) -> Option<Ticket> {
    let ticket = slot(index)?.enter(index)?;
    // The number of a pipe that is gone may be that of another one.
    let over = ticket.mapped.is_some_and(|mapped| mapped.listed && mapped.engine.is_over());
    (ticket.identity() == identity && !over).then_some(ticket)
}

/// Finds the slot of a context, and enters it.
pub fn find(identity: Identity) -> Option<Ticket> {
    slots().find_map(|(index, slot)| {
        if slot.inode.load(Ordering::Acquire) != identity.inode {
            return None;
        }
        enter(index, identity)
    })
}

fn slots() -> impl Iterator<Item = (u16, &'static Slot)> {
    (0..(CHUNK * CHUNKS) as u16).map_while(|index| Some((index, slot(index)?)))
}

/// One more table entry names the slot.
pub fn retain(index: u16) {
    if let Some(slot) = slot(index) {
        slot.references.fetch_add(1, Ordering::AcqRel);
    }
}

/// One entry less. With the last one the mappings go; a descriptor that the table doesn't know attaches anew.
pub fn release(index: u16) {
    if let Some(slot) = slot(index)
        && slot.references.fetch_sub(1, Ordering::AcqRel) == 1
    {
        slot.retire();
    }
}

/// A descriptor that can't be in the table was closed: what only such ones refer to goes.
pub fn release_unlisted(identity: Identity) {
    let Some(ticket) = find(identity) else { return };
    if ticket.slot.references.load(Ordering::Acquire) == 0 {
        ticket.slot.retire();
    }
}

/// Takes a slot for a context of another address space.
///
/// # Errors
/// ENFILE if there are none left.
pub fn add_remote(identity: Identity) -> Result<Ticket, c_int> {
    let (index, slot) = claim()?;
    slot.publish(identity, REMOTE);
    slot.enter(index).ok_or(libc::ENFILE)
}

/// Closes the listed contexts that the supervisor has given up. The caller has all signals blocked.
pub fn sweep() {
    for (index, slot) in slots() {
        let over = slot.enter(index).is_some_and(|ticket| {
            ticket.mapped.is_some_and(|mapped| mapped.listed && mapped.engine.is_over())
        });
        if over {
            slot.close();
        }
    }
}

/// Maps a context of our own address space and takes a slot for it. With flags of [`inline::add`] it is listed.
///
/// # Errors
/// The errno of mmap; EPROTO if the arena isn't one of our version; ENFILE if there is no slot left.
pub fn add_owned(
    identity: Identity,
    arena: &Owned,
    counter: &Owned,
    listed: Option<u32>,
) -> Result<Ticket, c_int> {
    owner::ensure()?;
    let generation = owner::generation();
    if listed.is_some() {
        sweep();
    }
    let mut mapped = map(arena, counter, listed.is_some())?;
    let (index, slot) = match claim() {
        Ok(claimed) => claimed,
        Err(errno) => {
            if listed.is_none() {
                // SAFETY: nobody has seen these mappings.
                unsafe { unmap(mapped.arena, mapped.counter) };
            }
            return Err(errno);
        }
    };
    if let Some(flags) = listed {
        // Where there is no room the supervisor counts more than we know, and all calls are trapped.
        mapped.listed = inline::add(mapped.arena, mapped.counter, identity.inode, flags).is_ok();
    }
    // SAFETY: the claimed slot is ours alone until it is published.
    unsafe { (*slot.mapped.get()).write(mapped) };
    slot.publish(identity, generation);
    slot.enter(index).ok_or(libc::ENFILE)
}

impl Slot {
    fn publish(&self, identity: Identity, generation: u32) {
        self.orphaned.store(0, Ordering::Release);
        self.device.store(identity.device, Ordering::Release);
        self.inode.store(identity.inode, Ordering::Release);
        self.word.store(u64::from(generation) << 32, Ordering::Release);
    }
}

/// A free slot, marked so that nobody enters it.
fn claim() -> Result<(u16, &'static Slot), c_int> {
    loop {
        for (index, slot) in slots() {
            let free = slot.word.load(Ordering::Acquire) == 0;
            if free && slot.word.compare_exchange(0, CLOSING, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Ok((index, slot));
            }
        }
        let Some(place) = CHUNK_POINTERS.iter().find(|p| p.load(Ordering::Acquire).is_null()) else {
            return Err(libc::ENFILE);
        };
        let len = CHUNK * size_of::<Slot>();
        let made =
            sys::mmap(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        if made < 0 {
            return Err(-made as c_int);
        }
        if place.compare_exchange(null_mut(), made as *mut Slot, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            // SAFETY: nobody has seen this chunk.
            unsafe { sys::munmap(made as usize, len) };
        }
    }
}

/// Maps both. Over what was listed before, if that is allowed and there is such.
/// What fails over those leaves them there, unused.
fn map(arena: &Owned, counter: &Owned, reuse: bool) -> Result<Mapped, c_int> {
    // A smaller file would be a SIGBUS later.
    let sizes =
        [sys::fstat(arena.get()), sys::fstat(counter.get())].map(|s| s.map_or(0, |s| s.st_size as usize));
    if sizes[0] < ARENA_BYTES || sizes[1] < 4096 {
        return Err(libc::EPROTO);
    }
    let at = if reuse { inline::take_spare() } else { None };
    let (arena_at, counter_at) = at.map_or((None, None), |(arena, counter)| (Some(arena), Some(counter)));
    let counter = map_one(counter.get(), 4096, Fill::AsItComes, counter_at)?;
    // Under mlockall(MCL_FUTURE) a mapping is filled at once, and an arena is large and sparse. A locked mapping
    // refuses MADV_COLD (madvise(2)), which otherwise does nothing to a page in use.
    let locked = sys::madvise(counter, 4096, libc::MADV_COLD) == -(libc::EINVAL as isize);
    // The way around that makes it inaccessible for a moment: not where a thread may be looking.
    let (fill, arena_at) = if locked { (Fill::Never, None) } else { (Fill::AsItComes, arena_at) };
    let arena = match map_one(arena.get(), ARENA_BYTES, fill, arena_at) {
        Ok(arena) => arena,
        Err(errno) => {
            if at.is_none() {
                // SAFETY: nobody has seen this mapping.
                unsafe { sys::munmap(counter, 4096) };
            }
            return Err(errno);
        }
    };
    if let (Some(base), Some(word)) =
        (NonNull::new(arena as *mut u8), NonNull::new(counter as *mut AtomicU64))
    {
        // SAFETY: both are mapped writable, aligned to pages and of the sizes stated, until `tear_down`, which
        // runs when nobody is inside.
        if let Ok(engine) = unsafe { Engine::attach(base, ARENA_BYTES, word) } {
            return Ok(Mapped { arena, counter, engine, listed: false });
        }
    }
    if at.is_none() {
        // SAFETY: nobody has seen these mappings.
        unsafe { unmap(arena, counter) };
    }
    Err(libc::EPROTO)
}

/// Whether a mapping may be filled at once where the process locks its future mappings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    AsItComes,
    Never,
}

/// Maps a shared file that forked children don't get and core files don't hold.
///
/// As a rule without mprotect or munmap: those are trapped, and an event in a context whose regions span the
/// place.
fn map_one(fd: c_int, len: usize, fill: Fill, over: Option<usize>) -> Result<usize, c_int> {
    let accessible = libc::PROT_READ | libc::PROT_WRITE;
    // What is inaccessible isn't filled.
    let protection = if fill == Fill::Never { libc::PROT_NONE } else { accessible };
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let at = match over {
        // SAFETY: a mapping of ours of the same length, which others at most look at.
        Some(at) => unsafe { sys::mmap_over(at, len, protection, flags, fd) },
        None => sys::mmap(len, protection, flags, fd),
    };
    if at < 0 {
        return Err(-at as c_int);
    }
    let at = at as usize;
    let mut result = sys::madvise(at, len, libc::MADV_DONTFORK);
    if result == 0 && fill == Fill::Never {
        // SAFETY: a mapping that nobody else has seen.
        result = unsafe {
            sys::call(libc::SYS_munlock, at, len, 0, 0, 0, 0);
            sys::call(libc::SYS_mprotect, at, len, accessible as usize, 0, 0, 0)
        };
    }
    if result < 0 {
        // SAFETY: as above.
        unsafe { sys::munmap(at, len) };
        return Err(-result as c_int);
    }
    sys::madvise(at, len, libc::MADV_DONTDUMP);
    Ok(at)
}

/// # Safety
/// Nobody uses the mappings.
unsafe fn unmap(arena: usize, counter: usize) {
    // SAFETY: passed on to the caller.
    unsafe {
        sys::munmap(arena, ARENA_BYTES);
        sys::munmap(counter, 4096);
    }
}
