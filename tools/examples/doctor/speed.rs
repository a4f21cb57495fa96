//! Memory for a context, expected tokens per second on this machine, and the command.

use anyhow::Result;
use foretoken::chat::ChatTemplate;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::AssistantConfig;
use foretoken::kv::{KvCache, KvOptions, KvPreset, available_memory};
use foretoken::{Error, Isa, OwnDrafter, TargetFacts};
use foretoken_tools::measure::processor_bandwidth;
use foretoken_tools::println;
use foretoken_tools::report::{count, shell_word, significant, size};

use crate::features::line;

/// Share of the bandwidth that decoding achieves.
const REACHED: f64 = 0.8;
/// Acceptance of three drafts by position, as published for 31B with thinking off.
const ACCEPTED: [f64; 3] = [0.92, 0.78, 0.67];
/// A context that is short for a chat.
const SHORT: usize = 8192;

/// Cost of a forward pass over four rows, relative to one row: of E2B 1.00 with AVX-512 and 1.11 with AMX, 2.20 with
/// AVX2 (`e2b-verify-curve-*.json` in `benches/record`); of 26B-A4B, whose rows read different experts, 2.16 with
/// AVX-512 and 2.05 with AMX (`26b-verify-curve-*.txt`).
fn four_rows(facts: &TargetFacts) -> f64 {
    match Isa::best().name() {
        "avx512" | "amx" if !facts.has_experts => 1.1,
        _ => 2.0,
    }
}

pub fn print(
    checkpoint: &Checkpoint,
    facts: &TargetFacts,
    assistant: Option<&(Checkpoint, AssistantConfig)>,
    threads: usize,
) -> Result<()> {
    println!("on this machine");
    let of_assistant = |(checkpoint, config): &(Checkpoint, AssistantConfig)| checkpoint.assistant_bytes(config);
    let weights = facts.weight_bytes + assistant.map_or(0, of_assistant);
    let available = available_memory();
    match available {
        Some(available) if weights > available => line(
            "memory",
            &format!(
                "{} of weights, more than the {} available: they are read from disk for every token; \
                 use a smaller model or type",
                size(weights),
                size(available)
            ),
        ),
        Some(available) => {
            line("memory", &format!("{} of weights of {} available", size(weights), size(available)));
        }
        None => line("memory", &format!("{} of weights", size(weights))),
    }
    let free = available.map(|available| available.saturating_sub(weights + facts.state_bytes));
    let preset = contexts(facts, free);
    // Else the disk limits the speed.
    if available.is_none_or(|available| weights <= available) {
        tokens_per_second(facts, assistant, threads)?;
    }
    line("command", &command(checkpoint, facts, assistant, preset)?);
    Ok(())
}

/// Prints the context that fits in `free` bytes for every preset; returns the first preset with the
/// full or a long context.
fn contexts(facts: &TargetFacts, free: Option<u64>) -> KvPreset {
    let longest = facts.max_position_embeddings;
    let mut chosen = None;
    for preset in KvPreset::ALL {
        // Sizes only: pages are allocated on demand.
        let options = KvOptions { memory: Some(u64::MAX), ..preset.into() };
        let Ok(cache) = KvCache::new(facts.kv_layout.clone(), &options, longest, Isa::best()) else { continue };
        let fits = free.map_or(longest, |free| largest(longest, |len| cache.bytes_at(len) as u64 <= free));
        let per_token = cache.bytes_per_token();
        line(
            "context",
            &format!("{fits} of {longest} positions fit with K/V {} ({per_token} bytes per token)", preset.name()),
        );
        chosen = chosen.or((fits >= longest.min(SHORT)).then_some(preset));
    }
    chosen.unwrap_or(KvPreset::Compact)
}

/// The largest length up to `longest` that fits.
fn largest(longest: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, longest + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// Estimated from the bytes read per token and the best read bandwidth.
fn tokens_per_second(
    facts: &TargetFacts,
    assistant: Option<&(Checkpoint, AssistantConfig)>,
    threads: usize,
) -> Result<()> {
    let Some(bandwidth) = processor_bandwidth(Isa::best(), threads).map(|read| 1e9 * read) else {
        line("reads", "unknown: there is no free memory to measure with");
        return Ok(());
    };
    let step = facts.step_bytes as f64;
    let isa = Isa::best().name();
    line(
        "reads",
        &format!(
            "{:.1} GB/s with {} at best ({isa}); each token reads {} of weights",
            bandwidth / 1e9,
            count(threads, "thread"),
            size(step as u64)
        ),
    );
    let seconds = step / bandwidth / REACHED;
    // Models that fit the processor's caches are faster.
    let plain = format!("about {} tokens/s at a short context, without drafts", significant(1.0 / seconds));
    line("expect", &plain);
    let draft = match (facts.own_drafter, assistant) {
        (OwnDrafter::NextnHead(bytes), _) => Some(bytes),
        (_, assistant) => assistant.map(|(checkpoint, config)| checkpoint.assistant_step_bytes(config)),
    };
    if let Some(bytes) = draft {
        let draft = bytes as f64 / bandwidth / REACHED;
        let tokens = 1.0 + ACCEPTED.iter().sum::<f64>();
        let round = four_rows(facts) * seconds + ACCEPTED.len() as f64 * draft;
        let rates = ACCEPTED.map(|rate| format!("{:.0}", 100.0 * rate)).join(", ");
        let speed = significant(tokens / round);
        line("", &format!("about {speed} with three drafts per pass, accepted in {rates} % of passes"));
    }
    Ok(())
}

/// The command that generates text with it.
fn command(
    checkpoint: &Checkpoint,
    facts: &TargetFacts,
    assistant: Option<&(Checkpoint, AssistantConfig)>,
    preset: KvPreset,
) -> Result<String> {
    let path = |checkpoint: &Checkpoint| shell_word(&checkpoint.path().display().to_string());
    let mut words = vec![format!("cargo run --release --example generate -- --model {}", path(checkpoint))];
    if let Some((assistant, _)) = assistant {
        words.push(format!("--assistant {}", path(assistant)));
    }
    if preset != KvPreset::Exact {
        words.push(format!("--kv-preset {}", preset.name()));
    }
    words.push(match ChatTemplate::of(checkpoint) {
        Ok(Some(_)) => "--chat 'Why is the sky blue?'".into(),
        // One that does not compile was reported with the features.
        Err(error) if !matches!(error, Error::Template(_)) => return Err(error.into()),
        _ if checkpoint.tokenizer(facts.vocab_size)?.is_none() => "--prompt-ids 2,500".into(),
        _ => "'fn main() {'".into(),
    });
    Ok(words.join(" "))
}
