//! A figure beside its limit.

use serde::Serialize;

use crate::source::Spread;

/// What a figure is measured in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A multiple of something else.
    Ratio,
    Nanoseconds,
    Instructions,
    Bytes,
    /// Calls that were told to a supervisor.
    Calls,
}

/// How a figure stands to its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It isn't above.
    Holds,
    /// It isn't above, but the upper quartile is.
    HoldsWithinSpread,
    /// It is above.
    Exceeds,
    /// It is above, but the lower quartile isn't.
    ExceedsWithinSpread,
    /// There is no limit.
    Reported,
    /// There is no figure.
    NotMeasured,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured, of whom, against what.
    pub figure: String,
    pub unit: Unit,
    /// At most; `None` where nothing is asked for.
    pub limit: Option<f64>,
    /// True if the limit itself is too much.
    pub below: bool,
    pub value: Option<f64>,
    /// Lower and upper quartile.
    pub quartiles: Option<[f64; 2]>,
}

impl Row {
    /// A figure that is to be at most `limit`.
    pub fn at_most(figure: impl Into<String>, unit: Unit, limit: f64) -> Self {
        Self { figure: figure.into(), unit, limit: Some(limit), below: false, value: None, quartiles: None }
    }

    /// One that is only told.
    pub fn told(figure: impl Into<String>, unit: Unit) -> Self {
        Self { limit: None, ..Self::at_most(figure, unit, 0.0) }
    }

    /// With a single value, if there is one.
    #[must_use]
    pub fn value(self, value: Option<f64>) -> Self {
        Self { value, ..self }
    }

    /// With the median of many.
    #[must_use]
    pub fn spread(self, spread: Option<Spread>) -> Self {
        let quartiles = spread.map(|spread| [spread.lower, spread.upper]);
        Self { value: spread.map(|spread| spread.median), quartiles, ..self }
    }

    /// How it stands.
    pub fn verdict(&self) -> Verdict {
        let Some(value) = self.value else { return Verdict::NotMeasured };
        let Some(limit) = self.limit else { return Verdict::Reported };
        let holds = |value: f64| if self.below { value < limit } else { value <= limit };
        let [lower, upper] = self.quartiles.unwrap_or([value; 2]);
        match (holds(lower), holds(value), holds(upper)) {
            (_, true, true) => Verdict::Holds,
            (_, true, false) => Verdict::HoldsWithinSpread,
            (true, false, _) => Verdict::ExceedsWithinSpread,
            (false, false, _) => Verdict::Exceeds,
        }
    }
}

impl Unit {
    /// A number of it as text.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Ratio => format!("{value:.2}"),
            Self::Nanoseconds if value.abs() < 100.0 => format!("{value:.1} ns"),
            Self::Nanoseconds if value.abs() < 1e4 => format!("{value:.0} ns"),
            Self::Nanoseconds if value.abs() < 1e6 => format!("{:.1} us", value / 1e3),
            Self::Nanoseconds => format!("{:.1} ms", value / 1e6),
            Self::Instructions => format!("{value:.0} instructions"),
            Self::Bytes if value < 1e4 => format!("{value:.0} bytes"),
            Self::Bytes => format!("{:.0} KiB", value / 1024.0),
            Self::Calls => format!("{value:.1} calls"),
        }
    }
}

impl Verdict {
    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::HoldsWithinSpread => "holds, limit within the spread",
            Self::Exceeds => "EXCEEDS",
            Self::ExceedsWithinSpread => "exceeds, limit within the spread",
            Self::Reported => "",
            Self::NotMeasured => "not measured",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_judged_by_the_median_and_the_quartiles() {
        let row = Row::at_most("munmap", Unit::Ratio, 1.1);
        let spread = |lower, median, upper| Spread { least: lower, lower, median, upper, most: upper };
        assert_eq!(row.verdict(), Verdict::NotMeasured);
        assert_eq!(row.clone().value(Some(1.1)).verdict(), Verdict::Holds);
        assert_eq!(row.clone().value(Some(1.2)).verdict(), Verdict::Exceeds);
        assert_eq!(row.clone().spread(Some(spread(1.0, 1.2, 1.3))).verdict(), Verdict::ExceedsWithinSpread);
        assert_eq!(row.clone().spread(Some(spread(1.0, 1.05, 1.3))).verdict(), Verdict::HoldsWithinSpread);
        assert_eq!(row.clone().spread(Some(spread(1.0, 1.05, 1.1))).verdict(), Verdict::Holds);
        assert_eq!(row.clone().spread(Some(spread(1.15, 1.2, 1.3))).verdict(), Verdict::Exceeds);
        assert_eq!(Row { below: true, ..row }.value(Some(1.1)).verdict(), Verdict::Exceeds);
        assert_eq!(Row::told("ucx", Unit::Ratio).value(Some(9.0)).verdict(), Verdict::Reported);
    }

    #[test]
    fn numbers_have_units_that_fit() {
        assert_eq!(Unit::Nanoseconds.show(2.34), "2.3 ns");
        assert_eq!(Unit::Nanoseconds.show(12_345_678.0), "12.3 ms");
        assert_eq!(Unit::Bytes.show(151.0), "151 bytes");
        assert_eq!(Unit::Bytes.show(262_144.0), "256 KiB");
    }
}
