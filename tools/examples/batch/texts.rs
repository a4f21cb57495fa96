//! The texts of all prompts.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use foretoken::{Engine, FinishReason, GenerateOptions, Scheduler, SequenceId};
use foretoken_tools::interrupt::{INTERRUPTED, cancel_on_interrupt};
use foretoken_tools::report::count;
use foretoken_tools::{describe, eprintln, println};

use crate::{Args, add, scheduler_options};

/// What was written after a prompt.
#[derive(Clone, Default)]
struct Written {
    text: String,
    /// `None` if the prompt was not begun, or could not be.
    finish_reason: Option<FinishReason>,
    error: Option<String>,
}

impl Written {
    /// Prints the text of prompt `i`.
    fn print(&self, i: usize) {
        let error = self.error.as_ref().map(|error| format!("\n== {} failed: {error}", i + 1)).unwrap_or_default();
        println!("== {}\n{}{error}", i + 1, self.text);
    }
}

/// Continues all prompts, `--sequences` at a time, up to Ctrl-C.
pub fn print(args: &Args, engine: &Engine, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<ExitCode> {
    cancel_on_interrupt(options.cancel.clone());
    let mut scheduler = Scheduler::new(engine, scheduler_options(args));
    let mut running: Vec<(SequenceId, usize)> = Vec::new();
    let mut written = vec![Written::default(); prompts.len()];
    let (mut next, mut printed, mut tokens) = (0, 0, 0);
    let most = args.max_sequences();
    let begins = |next: usize| next < prompts.len() && !options.cancel.is_cancelled();
    let start = Instant::now();
    while begins(next) || scheduler.is_active() {
        while running.len() < most && begins(next) {
            match add(&mut scheduler, engine, &args.kv, &prompts[next], options) {
                Ok(id) => running.push((id, next)),
                Err(error) => written[next].error = Some(describe::<Args>(&error)),
            }
            next += 1;
        }
        for event in scheduler.step() {
            let Some((_, prompt)) = running.iter().find(|(id, _)| *id == event.id) else { continue };
            let of_prompt = &mut written[*prompt];
            match event.piece {
                Ok(piece) => {
                    of_prompt.text += &piece.text;
                    tokens += piece.tokens.len();
                }
                Err(error) => of_prompt.error = Some(describe::<Args>(&error.into())),
            }
            if event.finish_reason.is_some() {
                of_prompt.finish_reason = event.finish_reason;
                scheduler.remove(event.id);
                running.retain(|(id, _)| *id != event.id);
            }
        }
        // In order, each as soon as those before it are complete: a killed run has written them.
        while !args.json && printed < next && running.iter().all(|(_, prompt)| *prompt != printed) {
            written[printed].print(printed);
            printed += 1;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        println!("{}", json(&written, tokens, seconds));
    }
    let all = count(prompts.len(), "prompt");
    let begun = if next < prompts.len() { format!("{next} of {all}") } else { all };
    let (per_second, tokens) = (tokens as f64 / seconds, count(tokens, "token"));
    eprintln!("{begun}, {most} at a time: {tokens} at {per_second:.1} tokens/s in total");
    let is_cut = |of: &Written| of.finish_reason == Some(FinishReason::Cancelled);
    let is_interrupted = next < prompts.len() || written.iter().any(is_cut);
    failures(&written)?;
    Ok(if is_interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// One JSON object, with a list over all prompts for each kind of result.
fn json(written: &[Written], tokens: usize, seconds: f64) -> serde_json::Value {
    serde_json::json!({
        "texts": written.iter().map(|of| &of.text).collect::<Vec<_>>(),
        "finish_reasons": written.iter().map(|of| of.finish_reason.map(FinishReason::name)).collect::<Vec<_>>(),
        "errors": written.iter().map(|of| &of.error).collect::<Vec<_>>(),
        "generated_tokens": tokens,
        "seconds": seconds,
    })
}

/// # Errors
/// If a prompt failed.
fn failures(written: &[Written]) -> Result<()> {
    let mut failed = written.iter().enumerate().filter_map(|(i, of)| Some((i + 1, of.error.as_ref()?)));
    match failed.next() {
        Some((first, error)) => {
            bail!("{} of {} prompts failed; prompt {first}: {error}", 1 + failed.count(), written.len())
        }
        None => Ok(()),
    }
}
