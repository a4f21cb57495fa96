//! Plots as SVG, in the page's colours: marks are medians, whiskers reach from minimum to maximum.

use crate::summary::Spread;
use foretoken_tools::html::escape;

const WIDTH: f64 = 540.0;
/// Approximate width of a character of a label.
const CHARACTER: f64 = 7.0;

/// One figure of one mode.
pub struct Bar<'a> {
    pub mode: &'a str,
    /// CSS class of the colour.
    pub class: String,
    pub value: Spread,
    /// Label to the right of the bar.
    pub label: String,
}

/// Horizontal bars on a scale from 0 to `most`; a dashed line marks the end of the first one.
pub fn bars(bars: &[Bar], most: f64, unit: &str) -> String {
    const ROW: f64 = 30.0;
    let longest = bars.iter().map(|bar| bar.mode.chars().count()).max().unwrap_or(0).min(26);
    let (left, right, top) = (14.0 + CHARACTER * longest as f64, 104.0, 6.0);
    let bottom = top + ROW * bars.len() as f64;
    let x = |value: f64| left + (WIDTH - left - right) * value / most;
    let mut marks = String::new();
    for tick in ticks(most) {
        let (at, tick) = (x(tick), number(tick));
        marks += &format!(
            "<line class=grid x1={at:.1} x2={at:.1} y1={top} y2={bottom} />\
             <text class=tick x={at:.1} y={:.0} text-anchor=middle>{tick}</text>",
            bottom + 15.0
        );
    }
    // Background and foreground of the line.
    let mut labels = String::new();
    for (i, bar) in bars.iter().enumerate() {
        let middle = top + ROW * (i as f64 + 0.5);
        let Spread { median, min, max } = bar.value;
        marks += &format!(
            "<rect class=\"{}\" x={left:.1} y={:.1} width={:.1} height=17 rx=2>\
             <title>{}: {median:.2} {unit}, {min:.2} to {max:.2}</title></rect>",
            bar.class,
            middle - 8.5,
            (x(median) - left).max(0.5),
            escape(bar.mode),
        );
        labels += &format!(
            "<text x={:.1} y={:.1} text-anchor=end>{}</text>{}<text class=value x={:.1} y={:.1}>{}</text>",
            left - 8.0,
            middle + 4.0,
            escape(&shortened(bar.mode, longest)),
            whisker([x(min), middle], [x(max), middle]),
            x(max) + 9.0,
            middle + 4.0,
            escape(&bar.label),
        );
    }
    if let Some(first) = bars.first() {
        let at = x(first.value.median);
        marks += &format!("<line class=reference x1={at:.1} x2={at:.1} y1={top} y2={bottom} />");
    }
    marks += &labels;
    marks += &format!("<text class=tick x={left:.1} y={:.0}>{unit}</text>", bottom + 31.0);
    svg(bottom + 36.0, &marks)
}

/// Grouped columns: acceptance of each draft position, by mode.
pub fn places(modes: &[(&str, &str, Vec<Spread>)]) -> String {
    let (left, top, bottom) = (40.0, 14.0, 184.0);
    let places = modes.iter().map(|(_, _, at)| at.len()).max().unwrap_or(0);
    let y = |share: f64| bottom - (bottom - top) * share;
    let mut marks = grid(&[0.0, 0.25, 0.5, 0.75, 1.0], left, y, |share| format!("{:.0} %", 100.0 * share));
    // Fewer modes draft later positions, so a group is as wide as its columns.
    let at_place = |place: usize| modes.iter().filter(move |(_, _, at)| at.len() > place);
    let columns: usize = (0..places).map(|place| at_place(place).count()).sum();
    let gap = 14.0;
    let width = ((WIDTH - left - gap * places as f64) / columns.max(1) as f64).min(30.0);
    let mut x = left + gap / 2.0;
    for place in 0..places {
        let begin = x;
        for (mode, class, at) in at_place(place) {
            let Spread { median, min, max } = at[place];
            let percent = |share: f64| format!("{:.0}", 100.0 * share);
            marks += &format!(
                "<g><title>{}, position {}: {} %, {} to {} %</title>\
                 <rect class=\"{class}\" x={:.1} y={:.1} width={:.1} height={:.1} rx=1.5 />",
                escape(mode),
                place + 1,
                percent(median),
                percent(min),
                percent(max),
                x + 1.0,
                y(median),
                width - 2.0,
                (bottom - y(median)).max(0.5),
            );
            let middle = x + width / 2.0;
            if max - min > 0.004 {
                marks += &whisker([middle, y(max)], [middle, y(min)]);
            }
            if width >= 24.0 {
                let (at, value) = (y(max) - 4.0, percent(median));
                marks += &format!("<text class=tick x={middle:.1} y={at:.1} text-anchor=middle>{value}</text>");
            }
            marks += "</g>";
            x += width;
        }
        let (middle, place) = ((begin + x) / 2.0, place + 1);
        marks += &format!("<text class=tick x={middle:.1} y={:.0} text-anchor=middle>{place}</text>", bottom + 15.0);
        x += gap;
    }
    marks += &format!("<text class=tick x={left} y={:.0}>draft position</text>", bottom + 31.0);
    svg(bottom + 36.0, &marks)
}

/// v(B) between its bounds: 1 (additional rows are free) and B (each row costs a step). Rows are on a
/// logarithmic scale, because the first ones matter most.
pub fn curve(points: &[(usize, Spread)]) -> String {
    let (left, top, bottom) = (40.0, 10.0, 250.0);
    let most_rows = points.last().map_or(2, |(rows, _)| *rows).max(2) as f64;
    // Longer whiskers are cut off, so that an outlier does not flatten the curve.
    let most = 1.3 * points.iter().map(|(_, v)| v.median).fold(1.5, f64::max);
    let x = |rows: f64| left + 20.0 + (WIDTH - left - 44.0) * rows.ln() / most_rows.ln();
    let y = |v: f64| bottom - (bottom - top) * v / most;
    let line = |points: &mut dyn Iterator<Item = (f64, f64)>| -> String {
        points.map(|(rows, v)| format!("{:.1},{:.1} ", x(rows), y(v))).collect()
    };
    let mut marks = grid(&ticks(most).collect::<Vec<_>>(), left, y, |v| format!("{}\u{d7}", number(v)));
    let end = most.min(most_rows);
    marks += &format!(
        "<polyline class=reference points=\"{}\" />\
         <text class=tick x={:.1} y={:.1} text-anchor=end>v = B: every row costs a step</text>\
         <polyline class=reference points=\"{}\" />\
         <text class=tick x={:.1} y={:.1} text-anchor=end>v = 1: further rows are free</text>\
         <polyline class=line points=\"{}\" />",
        line(&mut (0..=40).map(|i| 1.0 + (end - 1.0) * f64::from(i) / 40.0).map(|rows| (rows, rows))),
        x(end) - 18.0,
        y(end) + 12.0,
        line(&mut [(1.0, 1.0), (most_rows, 1.0)].into_iter()),
        x(most_rows),
        y(1.0) + 16.0,
        line(&mut points.iter().map(|(rows, v)| (*rows as f64, v.median))),
    );
    for (rows, v) in points {
        let (at, Spread { median, min, max }) = (x(*rows as f64), *v);
        marks += &format!(
            "<g><title>B = {rows}: {median:.2} steps, {min:.2} to {max:.2}</title>{}\
             <circle class=dot cx={at:.1} cy={:.1} r=4 />\
             <text class=value x={at:.1} y={:.1} text-anchor=middle>{median:.2}</text></g>\
             <text class=tick x={at:.1} y={:.0} text-anchor=middle>{rows}</text>",
            whisker([at, y(max.min(most))], [at, y(min)]),
            y(median),
            y(median) - 10.0,
            bottom + 15.0,
        );
    }
    marks += &format!("<text class=tick x={left} y={:.0}>rows verified at once, B</text>", bottom + 31.0);
    svg(bottom + 36.0, &marks)
}

fn svg(height: f64, marks: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=img>{marks}</svg>")
}

fn grid(at: &[f64], left: f64, y: impl Fn(f64) -> f64, label: impl Fn(f64) -> String) -> String {
    let line = |value: &f64| {
        let (at, label) = (y(*value), label(*value));
        format!(
            "<line class=grid x1={left} x2={WIDTH} y1={at:.1} y2={at:.1} />\
             <text class=tick x={:.0} y={:.1} text-anchor=end>{label}</text>",
            left - 6.0,
            at + 4.0
        )
    };
    at.iter().map(line).collect()
}

/// A line with caps, horizontal or vertical.
fn whisker([x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) -> String {
    let (cap_x, cap_y) = if y1 == y2 { (0.0, 3.5) } else { (3.5, 0.0) };
    let line = |x1: f64, y1: f64, x2: f64, y2: f64| format!("M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}");
    let caps = [(x1, y1), (x2, y2)].map(|(x, y)| line(x - cap_x, y - cap_y, x + cap_x, y + cap_y)).concat();
    format!("<path class=whisker d=\"{}{caps}\" />", line(x1, y1, x2, y2))
}

/// Round numbers from 0 to `most`, four to eight of them.
fn ticks(most: f64) -> impl Iterator<Item = f64> {
    let power = 10f64.powf((most / 4.0).log10().floor());
    let step = [5.0, 2.0, 1.0].map(|n| n * power).into_iter().find(|step| most / step >= 4.0).unwrap_or(power);
    (0..).map(move |i| f64::from(i) * step).take_while(move |tick| *tick <= most)
}

fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['\u{2026}']).collect()
}
