//! Where a thread may be stopped or killed: the tests do so at each of these places. Nothing in other builds.

#[cfg(not(test))]
#[inline(always)]
pub(crate) fn step() {}

#[cfg(test)]
pub(crate) use crate::tests::hook::step;
