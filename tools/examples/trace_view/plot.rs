//! Plots as SVG.

use foretoken_tools::html::escape;
use foretoken_tools::report::count;

/// A line or a set of bars.
pub struct Series<'a> {
    pub name: &'a str,
    pub colour: &'a str,
    pub values: Vec<f64>,
}

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 180.0;
const LEFT: f64 = 50.0;
const BOTTOM: f64 = 24.0;

/// Bars side by side, from 0 to 1, one group for each draft position.
pub fn bars(series: &[Series<'_>]) -> String {
    let places = series.iter().map(|series| series.values.len()).max().unwrap_or(0).max(1);
    let group = (WIDTH - LEFT) / places as f64;
    let width = 0.8 * group / series.len().max(1) as f64;
    let mut marks = String::new();
    for (i, series) in series.iter().enumerate() {
        for (place, value) in series.values.iter().enumerate() {
            let (x, height) = (LEFT + place as f64 * group + i as f64 * width, value * (HEIGHT - BOTTOM));
            marks += &format!(
                "<rect x={x:.1} y={:.1} width={width:.1} height={height:.1} fill=\"{}\"><title>{} at position {}: {:.0} %</title></rect>",
                HEIGHT - BOTTOM - height,
                series.colour,
                escape(series.name),
                place + 1,
                100.0 * value,
            );
        }
    }
    for place in 0..places {
        let x = LEFT + (place as f64 + 0.4) * group;
        marks += &format!("<text x={x:.1} y={:.1} text-anchor=middle>{}</text>", HEIGHT - 8.0, place + 1);
    }
    frame(series, 1.0, marks)
}

/// Step lines: constant during a round.
pub fn steps(series: &[Series<'_>]) -> String {
    let most = series.iter().flat_map(|series| &series.values).copied().fold(1e-9, f64::max);
    let mut marks = String::new();
    for series in series {
        let step = (WIDTH - LEFT) / series.values.len().max(1) as f64;
        let points: String = (series.values.iter().enumerate())
            .map(|(i, value)| {
                let (x, y) = (LEFT + i as f64 * step, (HEIGHT - BOTTOM) * (1.0 - value / most));
                format!("{x:.1},{y:.1} {:.1},{y:.1} ", x + step)
            })
            .collect();
        marks += &format!("<polyline points=\"{points}\" fill=none stroke=\"{}\" stroke-width=1.5 />", series.colour);
    }
    let rounds = series.first().map_or(0, |series| series.values.len());
    marks += &format!("<text x={WIDTH} y={:.1} text-anchor=end>{}</text>", HEIGHT - 8.0, count(rounds, "round"));
    frame(series, most, marks)
}

fn frame(series: &[Series<'_>], most: f64, marks: String) -> String {
    let base = HEIGHT - BOTTOM;
    let mut legend = String::new();
    for (i, series) in series.iter().enumerate() {
        let x = LEFT + 10.0 + 130.0 * i as f64;
        let (colour, name) = (series.colour, escape(series.name));
        legend += &format!(
            "<rect x={x:.0} y=-14 width=10 height=10 fill=\"{colour}\" /><text x={:.0} y=-5>{name}</text>",
            x + 14.0
        );
    }
    format!(
        "<svg viewBox=\"0 -20 {WIDTH} {:.0}\" width={WIDTH} role=img>{legend}\
         <text x=44 y=10 text-anchor=end>{most:.2}</text><text x=44 y={base:.0} text-anchor=end>0</text>\
         <line x1={LEFT} x2={WIDTH} y1={base} y2={base} stroke=\"#999\" />{marks}</svg>",
        HEIGHT + 20.0
    )
}
