//! The results as CSV and Markdown tables.

use crate::journal::{Event, Origin, Record};
use crate::matrix::Setting;
use crate::summary::{Row, Section, Spread};
use foretoken_tools::report::significant;

/// A line per cell: medians with minimum and maximum, machine and commit.
pub fn csv(origin: &Origin, records: &[&Record], sections: &[Section]) -> String {
    let figures = [
        "tokens_per_second",
        "times_off",
        "acceptance",
        "tokens_per_round",
        "draft_ms_per_round",
        "verify_ms_per_round",
        "weights_gb_per_second",
        "read_gb_per_second",
        "prefill_tokens_per_second",
        "peak_rss_bytes",
    ];
    let columns = figures.map(|name| format!("{name},{name}_min,{name}_max")).join(",");
    let mut csv = format!(
        "pair,prompt_tokens,kv,mode,runs,{columns},kv_bytes,acceptance_at,max_tokens,texts,threads,quantize,\
         simulated_acceptance,machine,commit,command\n"
    );
    let command = records.iter().rev().find_map(|record| match &record.event {
        Event::Start { command, .. } => Some(command.as_str()),
        _ => None,
    });
    let machine = [origin.machine.as_str(), &origin.commit, command.unwrap_or_default()].map(quoted).join(",");
    for section in sections {
        for row in &section.rows {
            csv += &format!("{},{machine}\n", fields(section, row));
        }
    }
    csv
}

/// A cell's fields before those of the machine.
fn fields(section: &Section, row: &Row) -> String {
    let setting = section.setting;
    let figures = [
        Some(row.speed),
        row.speedup,
        row.acceptance(),
        row.spread(|run| Some(run.tokens_per_round)),
        row.spread(|run| run.draft_ms),
        row.spread(|run| run.verify_ms),
        row.spread(|run| run.weights_gb_per_second),
        row.spread(|run| run.read_gb_per_second),
        row.spread(|run| Some(run.prefill_tokens_per_second)),
        row.spread(|run| Some(run.peak_rss_bytes? as f64)),
    ];
    let spread = |s: Option<Spread>| s.map_or(",,".into(), |s| format!("{},{},{}", s.median, s.min, s.max));
    let number = |value: Option<String>| value.unwrap_or_default();
    let places: Vec<_> = row.acceptance_at().iter().map(|at| format!("{:.4}", at.median)).collect();
    let fields = [
        quoted(&setting.pair),
        row.cell.prompt.0.to_string(),
        quoted(&row.cell.kv),
        quoted(&row.cell.mode),
        row.runs.len().to_string(),
        figures.map(spread).join(","),
        number(row.runs.last().and_then(|run| run.kv_bytes).map(|bytes| bytes.to_string())),
        places.join(" "),
        setting.max_tokens.to_string(),
        setting.texts.to_string(),
        number(section.turns.last().map(|turn| turn.threads.to_string())),
        number(setting.quantize.clone()),
        rates(setting),
    ];
    fields.join(",")
}

/// The simulated acceptance rates by position; empty if acceptance is not simulated.
pub fn rates(setting: &Setting) -> String {
    setting.simulated_acceptance.iter().map(f64::to_string).collect::<Vec<_>>().join(" ")
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// Tokens/s and speed-up over plain decoding: a row for every prompt and KV cache format, a column for every mode.
pub fn markdown(sections: &[Section]) -> String {
    let mut modes: Vec<&str> = Vec::new();
    for mode in sections.iter().flat_map(Section::modes) {
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    let mut table = format!("| tokens/s | {} |\n|---|{}\n", modes.join(" | "), "---|".repeat(modes.len()));
    let (mut apart, mut runs) = (0f64, usize::MAX);
    for section in sections {
        for group in section.groups() {
            let cell = |mode: &&str| {
                let row = group.iter().find(|row| row.cell.mode == **mode);
                row.map_or(String::new(), |row| match row.speedup {
                    Some(times) if !row.is_off() => format!("{} ({:.2}x)", significant(row.speed.median), times.median),
                    _ => significant(row.speed.median),
                })
            };
            let name = format!("{}, {}, K/V {}", section.setting.pair, group[0].cell.prompt, group[0].cell.kv);
            table += &format!("| {name} | {} |\n", modes.iter().map(cell).collect::<Vec<_>>().join(" | "));
            for row in group {
                let Spread { median, min, max } = row.speed;
                apart = apart.max((max / median - 1.0).max(1.0 - min / median));
                runs = runs.min(row.runs.len());
            }
        }
    }
    let far = 100.0 * apart;
    table
        + &format!(
            "\nMedians of {runs} runs, none further than {far:.0} % from its median; in parentheses, the speed-up over off (plain decoding).\n"
        )
}
