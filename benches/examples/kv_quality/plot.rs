//! Divergence of every format against its size.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use plotters::prelude::*;

use crate::{Case, summary};

/// Plots the median divergence (logarithmic) against the bits per value as SVG.
///
/// # Errors
/// If no median is above zero, or the file cannot be written.
pub fn divergence_by_size(path: &Path, cases: &[Case]) -> Result<()> {
    // On an axis from infinity to infinity, the search for ticks would not end.
    ensure!(
        cases.iter().any(|case| summary(case)[0] > 0.0),
        "--svg: at the median no format differs from the exact cache; measure others, or use more --tokens"
    );
    draw(path, cases).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw(path: &Path, cases: &[Case]) -> Result<(), Box<dyn std::error::Error>> {
    let points: Vec<_> = cases.iter().map(|case| (case.bits, summary(case)[0], case.name.as_str())).collect();
    let drawn = || points.iter().filter(|(_, median, _)| *median > 0.0);
    let low = drawn().map(|point| point.1).fold(f64::INFINITY, f64::min) / 2.0;
    let high = drawn().map(|point| point.1).fold(0.0, f64::max) * 2.0;
    let widest = points.iter().map(|point| point.0).fold(0.0, f64::max);

    let area = SVGBackend::new(path, (900, 600)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(1.5..widest.min(9.5), (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("bits per value")
        .y_desc("median divergence from the exact cache, nats")
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .draw()?;
    chart.draw_series(drawn().map(|(bits, median, _)| Circle::new((*bits, *median), 4, BLUE.filled())))?;
    chart.draw_series(drawn().map(|(bits, median, name)| {
        EmptyElement::at((*bits, *median)) + Text::new((*name).to_owned(), (7, -5), ("sans-serif", 13).into_font())
    }))?;
    area.present()?;
    Ok(())
}
