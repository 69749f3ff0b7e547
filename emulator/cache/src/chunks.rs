//! An array that grows without moving: elements are made a chunk at a time, and stay where they are for good.

use crate::sync::OnceLock;

/// Elements of a chunk; small for a model checker, which should see chunks being made.
const CHUNK: usize = if cfg!(shuttle) { 2 } else { 512 };

/// Up to `capacity` elements.
#[derive(Debug)]
pub(crate) struct Chunks<T> {
    chunks: Box<[OnceLock<Box<[T]>>]>,
}

impl<T: Default> Chunks<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { chunks: (0..capacity.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect() }
    }

    /// The element, if its chunk was made.
    #[inline(always)]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let index = index as usize;
        self.chunks.get(index / CHUNK)?.get()?.get(index % CHUNK)
    }

    /// The element; makes its chunk if need be. `None` beyond the capacity.
    pub(crate) fn make(&self, index: u32) -> Option<&T> {
        let index = index as usize;
        let chunk = self.chunks.get(index / CHUNK)?;
        chunk.get_or_init(|| (0..CHUNK).map(|_| T::default()).collect()).get(index % CHUNK)
    }
}
