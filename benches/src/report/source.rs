//! What measurements wrote.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize, Serializer};

/// All that there is. What is missing wasn't measured.
#[derive(Debug, Default, Serialize)]
pub struct Sources {
    /// A run of `ummunotify bench`.
    pub bench: Option<Bench>,
    /// One with everything on one processor.
    pub one_processor: Option<Bench>,
    /// Instructions in the guest.
    pub guest: Option<Guest>,
    /// Nanoseconds of the engine's calls, by number of regions and what was done.
    pub engine: Option<Vec<EngineLine>>,
    /// Single numbers by name.
    pub numbers: Option<BTreeMap<String, f64>>,
}

/// The report of `ummunotify bench`. Times are nanoseconds a repetition.
#[derive(Debug, Deserialize, Serialize)]
pub struct Bench {
    /// Seconds since 1970.
    pub began: u64,
    pub machine: Machine,
    pub rounds: usize,
    pub absent: Vec<Absent>,
    pub lines: Vec<Line>,
}

/// Where it ran.
#[derive(Debug, Deserialize, Serialize)]
pub struct Machine {
    pub processor: String,
    pub processors: usize,
    pub kernel: String,
    pub load: String,
}

/// What couldn't be measured.
#[derive(Debug, Deserialize, Serialize)]
pub struct Absent {
    pub name: String,
    pub reason: String,
}

/// One kind of work.
#[derive(Debug, Deserialize, Serialize)]
pub struct Line {
    pub work: String,
    pub regions: Option<u64>,
    pub cells: Vec<Cell>,
}

/// One contender's.
#[derive(Debug, Deserialize, Serialize)]
pub struct Cell {
    pub contender: String,
    pub time: Spread,
    pub ratio: Option<Spread>,
    pub extra: Option<Spread>,
    /// Of each round.
    #[serde(skip_serializing)]
    pub times: Vec<f64>,
}

/// Least, quartiles, most.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct Spread {
    pub least: f64,
    pub lower: f64,
    pub median: f64,
    pub upper: f64,
    pub most: f64,
}

/// Instructions that calls cost in the guest.
#[derive(Debug, Deserialize, Serialize)]
pub struct Guest {
    /// Seconds since 1970.
    pub began: u64,
    pub kernel: String,
    pub counts: Vec<Count>,
}

/// Of one kind of call.
#[derive(Debug, Deserialize, Serialize)]
pub struct Count {
    pub contender: String,
    pub work: String,
    pub regions: Option<u64>,
    /// In each layout of the mappings around, in the same order for every contender.
    #[serde(serialize_with = "the_median")]
    pub layouts: Vec<f64>,
}

fn the_median<S: Serializer>(layouts: &[f64], to: S) -> Result<S::Ok, S::Error> {
    Spread::of_median(layouts.to_vec()).serialize(to)
}

/// A line of the engine's example `figures`.
#[derive(Debug, PartialEq, Serialize)]
pub struct EngineLine {
    pub regions: u64,
    pub what: String,
    /// Median, nanoseconds.
    pub median: f64,
}

impl Spread {
    /// Of measured values; `None` of none.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |quarters: usize| values[last * quarters / 4];
        Some(Self { least: at(0), lower: at(1), median: at(2), upper: at(3), most: at(4) })
    }

    /// The same, but lower and upper are where the median of more of them would lie, with a confidence of 95 %: by ranks,
    /// n/2 +- sqrt(n), whatever their distribution.
    pub fn of_median(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (last, off) = (values.len().checked_sub(1)?, (values.len() as f64).sqrt().round() as usize);
        let (lower, upper) = ((last / 2).saturating_sub(off), (last / 2 + off).min(last));
        Some(Self { lower: values[lower], upper: values[upper], ..Self::of(values)? })
    }
}

impl Sources {
    /// True if there is anything.
    pub fn any(&self) -> bool {
        self.bench.is_some()
            || self.one_processor.is_some()
            || self.guest.is_some()
            || self.engine.is_some()
            || self.numbers.is_some()
    }
}

impl Bench {
    /// What was measured of a contender.
    pub fn cell(&self, work: &str, regions: Option<u64>, contender: &str) -> Option<&Cell> {
        let line = self.lines.iter().find(|line| line.work == work && line.regions == regions)?;
        line.cells.iter().find(|cell| cell.contender == contender)
    }

    /// One contender's times as multiples of another's in the same rounds.
    pub fn paired(&self, work: &str, regions: Option<u64>, who: &str, whom: &str) -> Option<Spread> {
        let (ours, theirs) = (self.cell(work, regions, who)?, self.cell(work, regions, whom)?);
        Spread::of(ours.times.iter().zip(&theirs.times).map(|(ours, theirs)| ours / theirs).collect())
    }
}

impl Guest {
    /// What was counted of a contender, among so many regions where it has any.
    pub fn layouts(&self, work: &str, regions: u64, contender: &str) -> Option<&[f64]> {
        let fits = |count: &&Count| count.work == work && count.contender == contender;
        let mut fitting = self.counts.iter().filter(fits);
        Some(&fitting.find(|count| count.regions.is_none_or(|n| n == regions))?.layouts)
    }

    /// One contender's instructions held against another's, layout by layout.
    pub fn paired(
        &self,
        work: &str,
        regions: u64,
        [who, whom]: [&str; 2],
        held: fn(f64, f64) -> f64,
    ) -> Option<Spread> {
        let (ours, theirs) = (self.layouts(work, regions, who)?, self.layouts(work, regions, whom)?);
        Spread::of_median(ours.iter().zip(theirs).map(|(ours, theirs)| held(*ours, *theirs)).collect())
    }
}

/// The lines of `N regions  WHAT  NUMBER... ns`; the last number is the median.
pub fn engine_lines(text: &str) -> Vec<EngineLine> {
    let line = |line: &str| {
        let (regions, rest) = line.trim().split_once(" regions ")?;
        let rest = rest.trim().strip_suffix(" ns")?;
        let (before, median) = rest.rsplit_once(' ')?;
        let what = before.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == ' ');
        Some(EngineLine {
            regions: regions.parse().ok()?,
            what: what.to_owned(),
            median: median.parse().ok()?,
        })
    };
    text.lines().filter_map(line).collect()
}

/// The numbers of lines of a name, a blank and a number.
///
/// # Errors
/// A line is something else.
pub fn numbers(text: &str) -> Result<BTreeMap<String, f64>> {
    let pair = |line: &str| {
        let (name, number) = line.trim().rsplit_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    text.lines().map(|line| pair(line).with_context(|| format!("`{line}` is no name and number"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_prints_one_number_or_least_and_median() {
        let text = "       10 regions  record, miss far away                             2.3 ns\n\
                    noise\n  1000000 regions  look, miss far away      1.9      2.4 ns\n";
        let line = |regions, what: &str, median| EngineLine { regions, what: what.into(), median };
        let expected = [line(10, "record, miss far away", 2.3), line(1_000_000, "look, miss far away", 2.4)];
        assert_eq!(engine_lines(text), expected);
    }

    #[test]
    fn a_median_is_known_the_better_the_more_there_are() {
        let spread = |values: u32| Spread::of_median((0..values).map(f64::from).collect());
        let of = |lower, median, upper, most| Some(Spread { least: 0.0, lower, median, upper, most });
        assert_eq!(spread(0), None);
        assert_eq!(spread(1), of(0.0, 0.0, 0.0, 0.0));
        assert_eq!(spread(9), of(1.0, 4.0, 7.0, 8.0));
        assert_eq!(spread(101), of(40.0, 50.0, 60.0, 100.0));
    }

    #[test]
    fn numbers_have_names() {
        let numbers = numbers("calls exec 76\nmemory-region 151.5\n").unwrap();
        assert_eq!((numbers["calls exec"], numbers["memory-region"]), (76.0, 151.5));
        assert!(super::numbers("calls many").unwrap_err().to_string().contains("calls many"));
    }
}
