//! Medians and ranges of the runs.

use crate::journal::{Event, Record, Run, Turn};
use crate::matrix::{Cell, LLAMA, OFF, Setting};
use foretoken_tools::measure::median;

/// Median, minimum and maximum of some values.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// `None` if there are no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().collect();
        let (min, max) = (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
        Some(Self { median: median(values), min, max })
    }
}

/// All measurements of one pair in one setting.
pub struct Section<'a> {
    pub setting: &'a Setting,
    pub turns: Vec<&'a Turn>,
    /// By prompt, KV cache format and mode.
    pub rows: Vec<Row<'a>>,
}

/// A cell's runs.
pub struct Row<'a> {
    pub cell: &'a Cell,
    pub runs: Vec<&'a Run>,
    pub speed: Spread,
    /// Speed-up over plain decoding in the same run, if that was measured.
    pub speedup: Option<Spread>,
    /// Whether the text equals that of plain decoding.
    pub same_text: Option<bool>,
}

impl Row<'_> {
    /// Median and range of a figure of the runs; `None` if no run has it.
    pub fn spread(&self, figure: impl Fn(&Run) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs.iter().filter_map(|run| figure(run)))
    }

    /// Accepted tokens per drafted token.
    pub fn acceptance(&self) -> Option<Spread> {
        self.spread(|run| (run.drafted > 0).then(|| run.accepted as f64 / run.drafted as f64))
    }

    /// The same for each draft position, over runs with enough drafts there.
    pub fn acceptance_at(&self) -> Vec<Spread> {
        const ENOUGH: usize = 5;
        let share = |run: &Run, place: usize| {
            let drafted = run.drafted_at.get(place).copied().filter(|drafted| *drafted >= ENOUGH)?;
            Some(run.accepted_at.get(place).copied().unwrap_or(0) as f64 / drafted as f64)
        };
        (0..).map_while(|place| self.spread(|run| share(run, place))).collect()
    }

    /// Whether this is plain decoding, which the others are compared with.
    pub fn is_off(&self) -> bool {
        self.cell.mode == OFF
    }
}

impl<'a> Section<'a> {
    /// Best read bandwidth of the machine in GB/s, over the turns.
    pub fn read(&self) -> Option<Spread> {
        Spread::of(self.turns.iter().filter_map(|turn| turn.read_gb_per_second))
    }

    /// v(B): cost of verifying B rows, relative to one row.
    pub fn curve(&self) -> Vec<(usize, Spread)> {
        let Some(first) = self.turns.first() else { return Vec::new() };
        let rows = first.verify_ms.iter().map(|(rows, _)| *rows);
        let v = |turn: &Turn, rows: usize| {
            let ms = |rows| turn.verify_ms.iter().find(|(other, _)| *other == rows).map(|(_, ms)| *ms);
            Some(ms(rows)? / ms(1)?)
        };
        rows.filter_map(|rows| Some((rows, Spread::of(self.turns.iter().filter_map(|turn| v(turn, rows)))?))).collect()
    }

    /// Our rows that draft.
    pub fn drafting(&self) -> impl Iterator<Item = &Row<'a>> {
        self.rows.iter().filter(|row| !row.is_off() && !row.cell.mode.starts_with(LLAMA))
    }

    /// The rows by prompt and KV cache format.
    pub fn groups(&self) -> impl Iterator<Item = &[Row<'a>]> {
        self.rows.chunk_by(|a, b| a.cell.prompt == b.cell.prompt && a.cell.kv == b.cell.kv)
    }

    /// The distinct modes of all rows, in order.
    pub fn modes(&self) -> Vec<&'a str> {
        let mut modes: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !modes.contains(&row.cell.mode.as_str()) {
                modes.push(&row.cell.mode);
            }
        }
        modes.sort_by_key(|mode| rank(mode));
        modes
    }
}

/// Plain decoding first, then blocks by size, then the planner's modes, then llama.cpp.
fn rank(mode: &str) -> usize {
    let rows = mode.strip_prefix("B = ").and_then(|rows| rows.parse().ok());
    match rows {
        _ if mode == OFF => 0,
        Some(rows) => rows,
        None if mode == "auto" => 1 << 20,
        None if !mode.starts_with(LLAMA) => 1 << 21,
        None => 1 << 22,
    }
}

/// Summaries of the records, one per pair in the order of measurement.
pub fn sections<'a>(records: &[&'a Record]) -> Vec<Section<'a>> {
    let mut sections: Vec<Section> = Vec::new();
    let mut cells: Vec<Vec<(&Cell, Vec<&Run>)>> = Vec::new();
    for record in records {
        let setting = match &record.event {
            Event::Start { .. } => continue,
            Event::Turn(turn) => &turn.setting,
            Event::Run(run) => &run.setting,
        };
        let at = sections.iter().position(|section| section.setting == setting).unwrap_or_else(|| {
            sections.push(Section { setting, turns: Vec::new(), rows: Vec::new() });
            cells.push(Vec::new());
            sections.len() - 1
        });
        match &record.event {
            Event::Turn(turn) => sections[at].turns.push(turn),
            Event::Run(run) => match cells[at].iter_mut().find(|(cell, _)| **cell == run.cell) {
                Some((_, runs)) => runs.push(run),
                None => cells[at].push((&run.cell, vec![run])),
            },
            Event::Start { .. } => {}
        }
    }
    for (section, cells) in sections.iter_mut().zip(cells) {
        let kv_order: Vec<&str> = cells.iter().map(|(cell, _)| cell.kv.as_str()).collect();
        section.rows = cells.iter().filter_map(|(cell, runs)| row(cell, runs, &cells)).collect();
        let kv_rank = |kv: &str| kv_order.iter().position(|other| *other == kv);
        section.rows.sort_by_key(|row| (row.cell.prompt.0, kv_rank(&row.cell.kv), rank(&row.cell.mode)));
    }
    sections
}

fn row<'a>(cell: &'a Cell, runs: &[&'a Run], cells: &[(&'a Cell, Vec<&'a Run>)]) -> Option<Row<'a>> {
    let of_off = |other: &Cell| other.mode == OFF && other.prompt == cell.prompt && other.kv == cell.kv;
    let off = cells.iter().find(|(other, _)| of_off(other)).map_or(&[][..], |(_, runs)| runs);
    // The ratio within a run, because the machine's speed drifts between runs.
    let quotient = |run: &&Run| {
        let off = off.iter().find(|off| off.run == run.run)?;
        Some(run.tokens_per_second / off.tokens_per_second)
    };
    Some(Row {
        cell,
        runs: runs.to_vec(),
        speed: Spread::of(runs.iter().map(|run| run.tokens_per_second))?,
        speedup: Spread::of(runs.iter().filter_map(quotient)),
        same_text: off
            .first()
            .filter(|_| runs.iter().all(|run| !run.written.is_empty()))
            .map(|off| runs.iter().all(|run| run.written == off.written)),
    })
}
