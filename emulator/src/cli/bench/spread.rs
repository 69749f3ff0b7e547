//! Many measurements of one thing, as five of them.

use serde::Serialize;

/// Least, quartiles and most. In the unit of what was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The least.
    pub least: f64,
    /// A quarter is not above.
    pub lower: f64,
    /// Half is not above.
    pub median: f64,
    /// Three quarters are not above.
    pub upper: f64,
    /// The most.
    pub most: f64,
}

impl Spread {
    /// Of measured values; `None` of none. Each of the five is one of the values.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |quarters: usize| values[last * quarters / 4];
        Some(Self { least: at(0), lower: at(1), median: at(2), upper: at(3), most: at(4) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_values_stand_for_all() {
        assert_eq!(Spread::of(Vec::new()), None);
        let one = Spread::of(vec![7.0]).unwrap();
        assert_eq!((one.least, one.median, one.most), (7.0, 7.0, 7.0));
        let many = Spread::of((0..=8).rev().map(f64::from).collect()).unwrap();
        assert_eq!(many, Spread { least: 0.0, lower: 2.0, median: 4.0, upper: 6.0, most: 8.0 });
    }
}
