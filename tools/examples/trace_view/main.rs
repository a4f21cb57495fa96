//! Renders a trace as HTML: `cargo run --release --example trace_view -- trace.ndjson --out trace.html`.

mod plot;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use foretoken_tools::html::escape;
use foretoken_tools::report::count;
use foretoken_tools::{input, println};
use plot::{Series, bars, steps};
use serde_json::Value;

/// Render a trace (generate --trace FILE) as one self-contained HTML file: the text coloured by the drafter of each
/// token, details of a token's round on hover, and plots.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The trace.
    trace: PathBuf,
    /// Output file. Default: next to the trace.
    #[arg(long)]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    let text = input::file(&args.trace)?;
    // An interrupted trace ends in an incomplete line.
    let lines: Vec<Value> = text.lines().map_while(|line| serde_json::from_str(line).ok()).collect();
    let is_trace = lines.first().is_some_and(|line| line["event"].is_string());
    anyhow::ensure!(is_trace, "{}: is not a trace; create one with generate --trace", args.trace.display());
    let out = args.out.unwrap_or_else(|| args.trace.with_extension("html"));
    let is_input = out.canonicalize().is_ok_and(|out| args.trace.canonicalize().is_ok_and(|trace| trace == out));
    anyhow::ensure!(!is_input, "{}: is the trace itself; pass another --out", out.display());
    std::fs::write(&out, page(&lines)).with_context(|| out.display().to_string())?;
    println!("{}", out.display());
    Ok(())
}

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Background colours for black text, safe for colour-blind readers.
const COLOURS: [&str; 7] = ["#8ecae6", "#ffb703", "#b5e48c", "#f4acb7", "#cdb4db", "#f9dcc4", "#9bf6ff"];
const TARGET: &str = "#e9ecef";

fn page(lines: &[Value]) -> String {
    let rounds: Vec<&Value> = lines.iter().filter(|line| line["event"] == "round").collect();
    let mut drafters: Vec<&str> = rounds.iter().filter_map(|round| round["drafter"].as_str()).collect();
    drafters.sort_unstable();
    drafters.dedup();
    let colour = |drafter: &str| {
        let at = drafters.iter().position(|known| *known == drafter);
        at.map_or(TARGET, |at| COLOURS[at % COLOURS.len()])
    };
    let legend = std::iter::once(("target", TARGET)).chain(drafters.iter().map(|name| (*name, colour(name))));
    let legend: String = legend
        .map(|(name, colour)| format!("<span class=key style=\"background:{colour}\">{}</span>", escape(name)))
        .collect();
    let texts = texts(lines, &colour);
    // Closing tags inside the data would end the script element.
    let data = serde_json::to_string(&rounds).unwrap_or_default().replace('<', "\\u003c");
    let emitted: usize = rounds.iter().map(|round| round["tokens"].as_array().map_or(0, Vec::len)).sum();
    let summary = format!(
        "{}, {}, {:.2} tokens per round",
        count(rounds.len(), "round"),
        count(emitted, "token"),
        emitted as f64 / rounds.len().max(1) as f64
    );
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>foretoken trace</title><style>{STYLE}</style>\
         <h1>Tokens by drafter</h1><p>{summary}</p><p>{legend} <small>later draft positions are darker</small></p>\
         <aside id=round>Hover over a token.</aside>{texts}<h2>Acceptance by draft position</h2>{}\
         <h2>Rows verified (B) per round</h2>{}<h2>Milliseconds of each phase per round</h2>{}\
         <script type=\"application/json\" id=data>{data}</script><script>{SCRIPT}</script></html>",
        acceptance(&rounds, &drafters, &colour),
        steps(&[Series {
            name: "rows",
            colour: "#023047",
            values: rounds.iter().map(|r| number(&r["rows"])).collect()
        }]),
        phases(&rounds),
    )
}

/// The texts, session by session; rounds are numbered over all of them.
fn texts(lines: &[Value], colour: &dyn Fn(&str) -> &'static str) -> String {
    let mut sessions: BTreeMap<u64, String> = BTreeMap::new();
    let mut index = 0;
    for line in lines {
        let text = sessions.entry(line["session"].as_u64().unwrap_or(0)).or_default();
        match line["event"].as_str() {
            Some("begin") => {
                let prompt = escape(&line["prompt_tokens"].to_string());
                *text += &format!("<p class=begin>prompt tokens: {prompt}</p><div class=text>");
            }
            Some("first") => *text += &tokens(line, None, colour),
            Some("round") => {
                *text += &tokens(line, Some(index), colour);
                index += 1;
            }
            Some("end") => {
                *text += &format!("</div><p class=begin>end: {}</p>", escape(line["finish"].as_str().unwrap_or("")))
            }
            _ => {}
        }
    }
    sessions.iter().map(|(session, text)| format!("<section><h2>session {session}</h2>{text}</section>")).collect()
}

/// The tokens of a line: drafted tokens in their drafter's colour, the target's own in grey.
fn tokens(line: &Value, round: Option<usize>, colour: &dyn Fn(&str) -> &'static str) -> String {
    let accepted = line["accepted"].as_u64().unwrap_or(0) as usize;
    let drafter = line["drafter"].as_str().unwrap_or("target");
    let mut html = String::new();
    for (place, token) in line["tokens"].as_array().into_iter().flatten().enumerate() {
        let drafted = place < accepted;
        let shade = if drafted { 0.045 * place.min(6) as f64 } else { 0.0 };
        let text = token["text"].as_str().map_or_else(|| escape(&format!("[{}]", token["id"])), escape);
        let text = text.replace('\n', "\u{21b5}\n");
        let round = round.map_or(String::new(), |round| format!(" data-round={round} data-place={place}"));
        html += &format!(
            "<span class=token style=\"background:color-mix(in srgb,{} {:.0}%,black)\"{round}>{text}</span>",
            if drafted { colour(drafter) } else { TARGET },
            100.0 * (1.0 - shade),
        );
    }
    html
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// For each drafter, the share of its drafts accepted up to each position.
fn acceptance<'a>(rounds: &[&Value], drafters: &[&'a str], colour: &dyn Fn(&str) -> &'static str) -> String {
    let of_drafter = |name: &'a str| {
        let own = rounds.iter().filter(|round| round["drafter"] == name);
        let (mut drafted, mut accepted) = (Vec::new(), Vec::new());
        for round in own {
            let (of, at) = (round["draft"].as_array().map_or(0, Vec::len), number(&round["accepted"]) as usize);
            drafted.resize(drafted.len().max(of), 0.0);
            accepted.resize(drafted.len(), 0.0);
            drafted[..of].iter_mut().for_each(|n| *n += 1.0);
            // An edited trace may say more than were drafted.
            let at = at.min(accepted.len());
            accepted[..at].iter_mut().for_each(|n| *n += 1.0);
        }
        let values = accepted.iter().zip(drafted).map(|(accepted, drafted): (&f64, f64)| accepted / drafted);
        Series { name, colour: colour(name), values: values.collect() }
    };
    bars(&drafters.iter().copied().map(of_drafter).collect::<Vec<_>>())
}

fn phases(rounds: &[&Value]) -> String {
    let phase = |(name, field, colour)| Series {
        name,
        colour,
        values: rounds.iter().map(|round| number(&round[field]) / 1e3).collect(),
    };
    let phases =
        [("draft", "us_draft", "#fb8500"), ("verify", "us_verify", "#219ebc"), ("accept", "us_accept", "#8a817c")];
    steps(&phases.map(phase))
}
