//! Generates text: `cargo run --release --example generate -- "fn main() {"`.

mod flags;
mod report;

use std::io::Write;
use std::time::Instant;

use anyhow::Result;
use foretoken::Engine;
use foretoken::speculative::Costs;

fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN).init();
    let args = flags::arguments()?;
    let start = Instant::now();
    let engine = Engine::load(&flags::engine_options(&args)?)?;
    let load_seconds = start.elapsed().as_secs_f64();

    if let Some(path) = args.costs.as_deref().filter(|path| path.exists()) {
        engine.set_costs(Costs::load(path, engine.costs().machine())?)?;
    }
    let prompt = flags::prompt(&args, &engine)?;
    let mut session = engine.session(&flags::session_options(&args))?;
    let kept = report::kept(session.kv());
    let mut generation = session.generate(&prompt, &flags::generate_options(&args, &engine)?)?;
    eprint!("{kept}");
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
    if let Some(path) = &args.costs {
        engine.costs().save(path)?;
    }
    if let (Some(path), Some(cache)) = (&args.ngram_dynamic, session.learnt_ngrams()) {
        cache.save(path)?;
    }
    report::print(&s, session.kv_bytes());
    if args.json {
        let own = serde_json::json!({"text": text, "tokens": tokens, "load_seconds": load_seconds});
        writeln!(out, "{}", report::json(own, &s, (session.kv(), session.kv_bytes())))?;
    } else {
        writeln!(out)?;
    }
    Ok(())
}
