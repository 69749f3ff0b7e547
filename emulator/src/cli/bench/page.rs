//! The report as one HTML page that needs nothing else: no network, no script.

use std::fmt::Write as _;

use super::report::{Cell, Line, Report};

const STYLE: &str = "\
body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
h1{font-size:1.5em}h2{font-size:1.05em;margin:2em 0 .2em}p.note{color:#555;margin:.1em 0}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.1em .8em;text-align:right}\
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid #bbb;font-weight:600}\
svg{display:block;margin:.4em 0}svg text{font:12px system-ui,sans-serif;fill:#222}\
@media(prefers-color-scheme:dark){body,svg text{color:#ddd;fill:#ddd;background:#1b1b1b}th{border-color:#555}\
p.note{color:#aaa}}";

/// One colour for each contender, told apart by those who see few colours, too (Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#888888", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442"];

/// Width of a plot's bars, in pixels.
const WIDTH: f64 = 480.0;
/// Height of a bar and the space below it.
const ROW: f64 = 20.0;
/// Room for names on the left, and for figures on the right.
const LEFT: f64 = 120.0;
const RIGHT: f64 = 150.0;

/// The page.
pub fn render(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a String can't fail.
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>ummunotify bench</title>\
         <style>{STYLE}</style></head><body>\n<h1>What interception costs</h1>\n"
    );
    for line in report.preface() {
        let _ = writeln!(page, "<p class=\"note\">{}</p>", escaped(&line));
    }
    let _ = writeln!(
        page,
        "<p class=\"note\">Bars: the median time; the line across a bar's end: from the lower to the upper quartile. Each plot has \
         its own scale, from zero.</p>"
    );
    for line in &report.lines {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(&line.title()));
        plot(&mut page, line, &report.contenders);
        table(&mut page, &line.cells);
    }
    page.push_str("</body></html>\n");
    page
}

fn plot(page: &mut String, line: &Line, contenders: &[String]) {
    let most = line.cells.iter().map(|cell| cell.time.upper).fold(f64::MIN_POSITIVE, f64::max);
    let scale = WIDTH / most;
    let height = ROW * line.cells.len() as f64;
    let _ = writeln!(
        page,
        "<svg width=\"{0}\" height=\"{height}\" viewBox=\"0 0 {0} {height}\" role=\"img\" aria-label=\"{1}\">",
        LEFT + WIDTH + RIGHT,
        escaped(&line.title())
    );
    for (n, cell) in line.cells.iter().enumerate() {
        let colour = contenders.iter().position(|name| *name == cell.contender).unwrap_or(0);
        let colour = COLOURS[colour % COLOURS.len()];
        let top = ROW * n as f64;
        let (end, from, to) =
            (LEFT + cell.time.median * scale, LEFT + cell.time.lower * scale, LEFT + cell.time.upper * scale);
        let middle = top + ROW * 0.4;
        let _ = writeln!(
            page,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{top}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>\
             <line x1=\"{from:.1}\" y1=\"{middle}\" x2=\"{to:.1}\" y2=\"{middle}\" stroke=\"#222\" stroke-width=\"1.5\"/>\
             <text x=\"{:.1}\" y=\"{}\">{}</text>",
            LEFT - 8.0,
            top + ROW * 0.6,
            escaped(&cell.contender),
            end - LEFT,
            ROW * 0.8,
            to.max(end) + 6.0,
            top + ROW * 0.6,
            time(cell.time.median),
        );
    }
    page.push_str("</svg>\n");
}

fn table(page: &mut String, cells: &[Cell]) {
    page.push_str("<table><tr><th></th><th>median</th><th>quartiles</th><th>least</th><th>most</th><th>ratio</th></tr>\n");
    for Cell { contender, time: t, ratio, .. } in cells {
        let ratio = ratio.filter(|_| contender != "native").map_or_else(String::new, |ratio| {
            format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.lower, ratio.upper)
        });
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{} to {}</td><td>{}</td><td>{}</td><td>{ratio}</td></tr>",
            escaped(contender),
            time(t.median),
            time(t.lower),
            time(t.upper),
            time(t.least),
            time(t.most),
        );
    }
    page.push_str("</table>\n");
}

/// Nanoseconds in a unit that fits.
fn time(ns: f64) -> String {
    match ns {
        ns if ns < 10.0 => format!("{ns:.2} ns"),
        ns if ns < 1e4 => format!("{ns:.0} ns"),
        ns if ns < 1e7 => format!("{:.1} µs", ns / 1e3),
        ns => format!("{:.1} ms", ns / 1e6),
    }
}

/// Text that means nothing but itself in HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::contender::Absent;
    use crate::cli::bench::spread::Spread;

    #[test]
    fn the_page_stands_alone_and_shows_each_figure() {
        let absent = Absent { name: "kmod".into(), reason: "<script>alert(1)</script>".into() };
        let mut report = Report::new(3, None, vec!["native".into(), "notify".into()], vec![absent]);
        let cell = |contender: &str, times: [f64; 3]| Cell {
            contender: contender.into(),
            time: Spread::of(times.to_vec()).unwrap(),
            ratio: Spread::of(times.map(|t| t / 900.0).to_vec()),
            extra: Spread::of(times.map(|t| t - 900.0).to_vec()),
            times: times.to_vec(),
        };
        let cells = vec![cell("native", [800.0, 900.0, 1000.0]), cell("notify", [2e4, 3e4, 4e4])];
        report.lines.push(Line { work: "munmap", what: "munmap", regions: None, cells });
        let page = render(&report);
        for shown in ["900 ns", "30.0 µs", "33.33", "&lt;script&gt;"] {
            assert!(page.contains(shown), "{shown}: {page}");
        }
        for foreign in ["<script", "http:", "https:", "src=", "@import", "url("] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        for tag in ["svg", "table", "body", "html", "p", "h2"] {
            let (open, close) =
                (page.matches(&format!("<{tag}")).count(), page.matches(&format!("</{tag}>")).count());
            assert!(open >= close && close > 0, "{tag}: {open} {close}");
        }
    }
}
