//! Generates text: `cargo run --release --example generate -- "fn main() {"`.

mod flags;

use std::io::Write;
use std::time::Instant;

use anyhow::Result;
use foretoken::Engine;

fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN).init();
    let args = flags::arguments()?;
    let start = Instant::now();
    let engine = Engine::load(&flags::engine_options(&args)?)?;
    let load_seconds = start.elapsed().as_secs_f64();

    let prompt = flags::prompt(&args, &engine)?;
    let mut session = engine.session(&flags::session_options(&args))?;
    let mut generation = session.generate(&prompt, &flags::generate_options(&args))?;
    let (mut text, mut tokens, mut out) = (String::new(), Vec::new(), std::io::stdout().lock());
    for piece in generation.by_ref() {
        let piece = piece?;
        if !args.json {
            write!(out, "{}", piece.text)?;
            out.flush()?;
        }
        text += &piece.text;
        tokens.extend(piece.tokens);
    }
    let s = generation.statistics().clone();
    drop(generation);
    let kv = session.kv();
    eprintln!(
        "\n{} tokens at {:.1} tokens/s after {} at {:.1} tokens/s; {} rounds, {:.2} tokens per round, {:.0} % of {} drafts \
         accepted; {:.1} MiB of K/V",
        s.generated_tokens,
        s.decode_tokens_per_second(),
        s.prompt_tokens,
        s.prefill_tokens_per_second(),
        s.rounds,
        s.tokens_per_round(),
        100.0 * s.acceptance_rate(),
        s.drafted,
        kv.bytes() as f64 / f64::from(1 << 20),
    );
    if args.json {
        let report = serde_json::json!({
            "text": text,
            "tokens": tokens,
            "prompt_tokens": s.prompt_tokens,
            "generated_tokens": s.generated_tokens,
            "load_seconds": load_seconds,
            "prefill_tokens_per_second": s.prefill_tokens_per_second(),
            "decode_tokens_per_second": s.decode_tokens_per_second(),
            "rounds": s.rounds,
            "drafted": s.drafted,
            "accepted": s.accepted,
            "acceptance_rate": s.acceptance_rate(),
            "tokens_per_round": s.tokens_per_round(),
            "kv_bytes": kv.bytes(),
            "kv_bytes_per_token": kv.bytes_per_token(),
            "peak_rss_bytes": peak_rss_bytes(),
        });
        writeln!(out, "{report}")?;
    } else {
        writeln!(out)?;
    }
    Ok(())
}

/// The most memory that the process has held, where the system tells.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
