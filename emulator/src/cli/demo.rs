//! The demonstration.
use super::{DemoArguments, Failure};
pub(super) fn main(_o: &DemoArguments) -> Result<i32, Failure> {
    Ok(1)
}
