//! The report: one self-contained HTML file.

use crate::journal::{Event, Origin, Record, Run, Turn};
use crate::matrix::LLAMA;
use crate::plot::{self, Bar};
use crate::summary::{Row, Section, Spread};
use crate::tables::rates;
use foretoken_tools::html::escape;
use foretoken_tools::report::{count, significant};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

pub fn page(origin: &Origin, records: &[&Record], sections: &[Section]) -> String {
    let parts: String = sections.iter().map(section).collect();
    let starts = records.iter().filter_map(|record| match &record.event {
        Event::Start { command, time } => Some(format!("<dt>{time}</dt><dd><code>{}</code></dd>", escape(command))),
        _ => None,
    });
    let starts: String = starts.collect();
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <title>foretoken: benchmark matrix</title><style>{STYLE}</style>\
         <header><h1>Benchmark matrix</h1><p>{} \u{b7} commit {}</p>{}</header>{parts}\
         <footer><h3>Method</h3><p>Every figure is the median of its runs, followed by the minimum and maximum. \
         The runs of a pair's cells are interleaved, so that slow periods of the machine affect all of them; \
         the speed-up compares a run with plain decoding (\u{201c}off\u{201d}) in the same turn, which was measured \
         in an earlier start (below) if the run was added later. Tokens per second are measured \
         after the first token, which comes from the prompt's forward pass. B rows verify B \u{2212} 1 \
         drafts of the assistant; with auto and drafter lists the planner chooses. \
         Acceptance is shown for positions with at least 5 drafts in a run.</p>\
         <dl>{starts}</dl></footer><script>{SCRIPT}</script></html>\n",
        escape(&origin.machine),
        escape(&origin.commit),
        overview(sections),
    )
}

fn section(section: &Section) -> String {
    let setting = section.setting;
    let modes = section.modes();
    let legend: String = modes
        .iter()
        .map(|mode| format!("<span class=key><i class=\"{}\"></i>{}</span>", class(mode, &modes), escape(mode)))
        .collect();
    let groups: String = section.groups().map(|group| card(section, group, &modes)).collect();
    format!(
        "<section><h2>{}</h2><p class=facts>{}</p>{}{}{}<h3>Throughput and acceptance</h3><p class=legend>{legend}</p>\
         <div class=cards>{groups}</div><h3>What verifying B rows costs</h3>{}<h3>All figures</h3>{}</section>",
        escape(&setting.pair),
        facts(section),
        simulated(section),
        verdict(section),
        speedups(section, &modes),
        cost(section),
        table(section, &modes),
    )
}

/// The common settings of a section.
fn facts(section: &Section) -> String {
    let setting = section.setting;
    let mut facts = vec![
        count(section.rows.iter().map(|row| row.runs.len()).max().unwrap_or(0), "run"),
        format!("{} tokens after {} of each length", setting.max_tokens, count(setting.texts, "prompt")),
    ];
    facts.extend(section.turns.last().map(|turn| count(turn.threads, "thread")));
    facts.extend(
        section.turns.last().map(|turn| format!("a step reads {:.3} GB of weights", turn.step_bytes as f64 / 1e9)),
    );
    facts.extend(
        section
            .read()
            .map(|read| format!("read bandwidth {:.1} GB/s ({:.1}\u{2013}{:.1})", read.median, read.min, read.max)),
    );
    facts.extend(setting.quantize.as_ref().map(|name| format!("quantized to {}", escape(name))));
    facts.join(" \u{b7} ")
}

fn simulated(section: &Section) -> String {
    let rates = rates(section.setting);
    if rates.is_empty() {
        return rates;
    }
    format!(
        "<p class=note>Acceptance was simulated, at rates by position of {rates}: these are speeds at that acceptance.</p>"
    )
}

/// Our drafting cell with the largest speed-up, and the speed-up.
fn best<'s, 'a>(section: &'s Section<'a>) -> Option<(&'s Row<'a>, Spread)> {
    section.drafting().filter_map(|row| Some((row, row.speedup?))).max_by(|a, b| a.1.median.total_cmp(&b.1.median))
}

/// The result in one line.
fn verdict(section: &Section) -> String {
    let Some((best, speedup)) = best(section) else { return String::new() };
    let of_best = |row: &&Row| row.is_off() && row.cell.prompt == best.cell.prompt && row.cell.kv == best.cell.kv;
    let off = section.rows.iter().find(of_best).map_or(String::new(), |row| significant(row.speed.median));
    let slower = section.drafting().filter(|row| row.speedup.is_some_and(|times| times.median < 1.0)).count();
    let (class, says) = speedup_class(speedup);
    format!(
        "<div class=\"verdict {class}\"><strong>{:.2}\u{d7}</strong><p><b>{says}:</b> {off} \u{2192} {} tokens/s with {}, \
         {}, K/V {}.<br><span>{}</span></p></div>",
        speedup.median,
        significant(best.speed.median),
        escape(&best.cell.mode),
        best.cell.prompt,
        escape(&best.cell.kv),
        match (slower, section.drafting().count()) {
            (0, all) => format!("All {all} cells that draft are at least as fast as plain decoding."),
            (some, all) => format!("{some} of {all} cells that draft are slower than plain decoding."),
        },
    )
}

/// CSS class and wording for a speed-up.
fn speedup_class(speedup: Spread) -> (&'static str, &'static str) {
    match speedup.median {
        pays if pays >= 1.03 => ("pays", "Speculation is faster"),
        lost if lost < 0.97 => ("loses", "Speculation is slower"),
        _ => ("even", "Speculation makes little difference"),
    }
}

/// Overview of several pairs.
fn overview(sections: &[Section]) -> String {
    let line = |section: &Section| {
        let (row, speedup) = best(section)?;
        let (class, _) = speedup_class(speedup);
        let (pair, mode) = (escape(&section.setting.pair), escape(&row.cell.mode));
        Some(format!("<li class={class}>{pair} <strong>{:.2}\u{d7}</strong> <span>{mode}</span></li>", speedup.median))
    };
    match sections {
        [] | [_] => String::new(),
        several => format!("<ul class=overview>{}</ul>", several.iter().filter_map(line).collect::<String>()),
    }
}

/// Speed-up over plain decoding: a row for every prompt and KV cache format, a column for every mode.
fn speedups(section: &Section, modes: &[&str]) -> String {
    let head: String = modes.iter().map(|mode| format!("<th>{}</th>", escape(mode))).collect();
    let line = |group: &[Row]| {
        let cell = |mode: &&str| {
            let Some(row) = group.iter().find(|row| row.cell.mode == **mode) else { return "<td></td>".into() };
            let tokens = significant(row.speed.median);
            match row.speedup {
                Some(times) if !row.is_off() => format!(
                    "<td style=\"{}\"><b>{:.2}\u{d7}</b><small>{:.2}\u{2013}{:.2}</small>\
                     <small>{tokens} tokens/s</small></td>",
                    heat(times.median),
                    times.median,
                    times.min,
                    times.max,
                ),
                _ => format!(
                    "<td><b>{tokens}</b><small>{}\u{2013}{}</small><small>tokens/s</small></td>",
                    significant(row.speed.min),
                    significant(row.speed.max)
                ),
            }
        };
        let cells: String = modes.iter().map(cell).collect();
        let first = group[0].cell;
        format!("<tr><th>{}<small>K/V {}</small></th>{cells}</tr>", first.prompt, escape(&first.kv))
    };
    let lines: String = section.groups().map(line).collect();
    format!(
        "<h3>Speed-up over plain decoding</h3><div class=wide><table class=heat><thead><tr><th></th>{head}</tr></thead>\
         <tbody>{lines}</tbody></table></div>"
    )
}

/// Green if faster, red if slower; full intensity at 4x and 1/4x.
fn heat(times: f64) -> String {
    let strength = (times.ln() / 4f64.ln()).clamp(-1.0, 1.0);
    let colour = if strength > 0.0 { "win" } else { "lose" };
    format!("background:color-mix(in srgb,var(--{colour}) {:.0}%,var(--card))", 8.0 + 52.0 * strength.abs())
}

/// A prompt with one KV cache format: speed and acceptance of every mode.
fn card(section: &Section, group: &[Row], modes: &[&str]) -> String {
    let most = 1.02 * section.rows.iter().map(|row| row.speed.max).fold(0.0, f64::max);
    let bars: Vec<Bar> = (group.iter())
        .map(|row| {
            let times = row.speedup.filter(|_| !row.is_off());
            let times = times.map_or(String::new(), |times| format!("  {:.2}\u{d7}", times.median));
            let label = format!("{}{times}", significant(row.speed.median));
            Bar { mode: &row.cell.mode, class: class(&row.cell.mode, modes), value: row.speed, label }
        })
        .collect();
    let places: Vec<_> = (group.iter().zip(&bars))
        .map(|(row, bar)| (bar.mode, bar.class.as_str(), row.acceptance_at()))
        .filter(|(_, _, at)| !at.is_empty())
        .collect();
    let drafted: usize = group.iter().flat_map(|row| &row.runs).map(|run| run.drafted).sum();
    let acceptance = match (places.is_empty(), drafted) {
        (false, _) => plot::places(&places),
        (true, 0) => "<p class=none>Nothing was drafted.</p>".to_owned(),
        (true, few) => format!("<p class=none>{few} drafts are too few for acceptance figures.</p>"),
    };
    format!(
        "<figure><figcaption>{}, K/V {}</figcaption><div><div><h4>Tokens per second</h4>{}</div>\
         <div><h4>Acceptance by position</h4>{acceptance}</div></div></figure>",
        group[0].cell.prompt,
        escape(&group[0].cell.kv),
        plot::bars(&bars, most, "tokens/s"),
    )
}

/// v(B), as a plot and a table.
fn cost(section: &Section) -> String {
    let curve = section.curve();
    let ms = |rows: usize| {
        let of = |turn: &&Turn| turn.verify_ms.iter().find(|(other, _)| *other == rows).map(|(_, ms)| *ms);
        Spread::of(section.turns.iter().filter_map(of))
    };
    let line = |(rows, v): &(usize, Spread)| {
        let ms = ms(*rows).map_or(String::new(), |ms| spread(ms, |x| format!("{x:.2}")));
        format!(
            "<tr><td>{rows}</td><td>{ms}</td><td>{}</td><td>{:.2}</td></tr>",
            spread(*v, |x| format!("{x:.2}")),
            *rows as f64 / v.median
        )
    };
    let lines: String = curve.iter().map(line).collect();
    let draft = Spread::of(section.turns.iter().filter_map(|turn| turn.draft_ms));
    let draft = draft.map(|ms| spread(ms, |x| format!("{x:.2}")));
    let draft =
        draft.map_or(String::new(), |ms| format!("<p class=none>A draft step of the assistant takes {ms} ms.</p>"));
    format!(
        "<figure><div><div><h4>v(B), relative to one row</h4>{}</div><div><table class=plain><thead><tr><th>B</th><th>ms</th>\
         <th>v(B)</th><th>maximum gain</th></tr></thead><tbody>{lines}</tbody></table>\
         <p class=none>The maximum gain is B / v(B): all drafts accepted, at no drafting cost.</p>{draft}</div></div>\
         </figure>",
        plot::curve(&curve)
    )
}

fn table(section: &Section, modes: &[&str]) -> String {
    let head = [
        "prompt",
        "K/V",
        "mode",
        "tokens/s",
        "speed-up",
        "accepted, %",
        "tokens per round",
        "draft, ms per round",
        "verify, ms per round",
        "weights, GB/s",
        "of read bandwidth, %",
        "prefill, tokens/s",
        "K/V, MiB",
        "peak memory, MiB",
        "text as plain",
    ];
    let head: String = head.iter().map(|name| format!("<th><button>{name}</button></th>")).collect();
    let line = |row: &Row| {
        let plain = |digits: usize| move |x: f64| format!("{x:.digits$}");
        let mebibytes = |bytes: f64| bytes / f64::from(1 << 20);
        let at_best = |run: &Run| Some(100.0 * run.weights_gb_per_second? / run.read_gb_per_second?);
        let cells = [
            figure(Some(row.speed), significant),
            figure(row.speedup, plain(2)),
            figure(row.acceptance(), |share| format!("{:.1}", 100.0 * share)),
            figure(row.spread(|run| Some(run.tokens_per_round)), plain(2)),
            figure(row.spread(|run| run.draft_ms), plain(2)),
            figure(row.spread(|run| run.verify_ms), plain(2)),
            figure(row.spread(|run| run.weights_gb_per_second), plain(1)),
            figure(row.spread(at_best), plain(0)),
            figure(row.spread(|run| Some(run.prefill_tokens_per_second)), significant),
            figure(row.spread(|run| Some(mebibytes(run.kv_bytes? as f64))), plain(1)),
            figure(row.spread(|run| Some(mebibytes(run.peak_rss_bytes? as f64))), plain(0)),
        ];
        let same = match row.same_text {
            _ if !section.setting.simulated_acceptance.is_empty() => "",
            Some(true) => "same",
            Some(false) => "different",
            None => "",
        };
        format!(
            "<tr data-cell=\"{}\"><td data-v={}>{}</td><td>{}</td><td><i class=\"{}\"></i>{}</td>{}<td>{same}</td></tr>",
            escape(&row.cell.to_string()),
            row.cell.prompt.0,
            row.cell.prompt,
            escape(&row.cell.kv),
            class(&row.cell.mode, modes),
            escape(&row.cell.mode),
            cells.concat(),
        )
    };
    let lines: String = section.rows.iter().map(line).collect();
    format!("<div class=wide><table class=all><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>")
}

/// A table cell, sorted by the median.
fn figure(value: Option<Spread>, text: impl Fn(f64) -> String) -> String {
    match value {
        Some(value) => format!("<td data-v={}>{}</td>", value.median, spread(value, text)),
        None => "<td data-v=-1>\u{2013}</td>".into(),
    }
}

/// The median, with minimum and maximum if they print differently.
fn spread(value: Spread, text: impl Fn(f64) -> String) -> String {
    let (median, min, max) = (text(value.median), text(value.min), text(value.max));
    if min == max { median } else { format!("{median}<small>{min}\u{2013}{max}</small>") }
}

/// CSS class of a mode's colour: blocks are blue, darker for more rows.
fn class(mode: &str, modes: &[&str]) -> String {
    let kind = |mode: &str| match mode {
        "off" | "auto" => 'a',
        block if block.starts_with("B = ") => 'b',
        llama if llama.starts_with(LLAMA) => 'l',
        _ => 'x',
    };
    let index = modes.iter().filter(|other| kind(other) == kind(mode)).position(|other| *other == mode).unwrap_or(0);
    match kind(mode) {
        'a' => format!("m-{mode}"),
        'b' => format!("m-b{}", index.min(5)),
        other => format!("m-{other}{}", index % 3),
    }
}
