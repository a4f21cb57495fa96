//! Effect of KV cache formats on quality: `cargo run --release --example kv_quality`.

mod gemma_keys;
mod plot;
mod synthetic;
mod verdict;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use foretoken::kv::{CodeFormat, ExactZones, KvCache, KvFormat, KvOptions, KvPreset};
use foretoken::nn::F32View;
use foretoken::{
    EndOfGeneration, Engine, EngineOptions, GenerateOptions, Isa, Model, OutputRows, SessionOptions, Speculation,
    SpeculationOptions, Statistics, Stop,
};
use foretoken_tools::arguments::Pair;
use foretoken_tools::report::count;
use foretoken_tools::{check_directory_of, input, measure, println};

/// Read a text with every KV cache format and compare the next-token distributions with those of the exact cache.
///
/// Every position is computed as in decoding: it reads the same K and V as the next generated token would. Ends with a
/// recommendation.
///
/// Example: kv_quality --model gemma-4-E2B-it-q4_k_m.gguf --text book.txt --tokens 8192 --csv kv.csv --svg kv.svg
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    pair: Pair,
    /// Text file; - is stdin. Default: this project's sources.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Tokens to read.
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Tokens to generate for measuring an assistant's acceptance, in pieces of 64 after prompts from the text; 0 does
    /// not measure it.
    #[arg(long, default_value_t = 2048)]
    generate: usize,
    /// Only these presets and formats; the exact cache is always included. Default: all, and variants of balanced.
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    only: Vec<String>,
    /// Without a checkpoint: a small synthetic model with keys like those of trained Gemmas (heavy-tailed channels, a
    /// constant part eight times as large as the varying part) and N query heads per KV head; Gemma 4 has 8 and 16.
    #[arg(long, value_name = "N", conflicts_with_all = ["model", "assistant", "text", "generate"])]
    gemma_keys: Option<usize>,
    /// Use K = V in the synthetic model's full layers.
    #[arg(long, requires = "gemma_keys")]
    k_eq_v: bool,
    /// Without a checkpoint: quantization errors on synthetic rows (Gaussian, biased, heavy-tailed, drifting).
    #[arg(long, conflicts_with_all = ["model", "assistant", "text", "tokens", "generate", "only", "gemma_keys", "csv", "svg"])]
    synthetic: bool,
    /// Instruction set of the CPU kernels. Default: the widest that the processor supports.
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    /// Write the table as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a plot of divergence against size as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// A KV cache configuration and its results.
struct Case {
    name: String,
    options: KvOptions,
    /// Divergence from the exact cache at every position, in nats.
    divergences: Vec<f64>,
    /// Positions whose most probable token is that of the exact cache.
    same_best: usize,
    bits: f64,
    acceptance: Option<f64>,
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    if args.synthetic {
        return synthetic::print(args.isa.unwrap_or_else(Isa::best));
    }
    ensure!(args.tokens > 0, "--tokens must be at least 1");
    for file in [&args.csv, &args.svg].into_iter().flatten() {
        check_directory_of(file)?;
    }
    let (engine, ids) = match args.gemma_keys {
        Some(group) => {
            let directory = tempfile::tempdir()?;
            gemma_keys::write(directory.path(), gemma_keys::Shape { group, k_eq_v: args.k_eq_v })?;
            let options = EngineOptions { isa: args.isa, ..EngineOptions::new(directory.path()) };
            (Engine::load(&options)?, gemma_keys::ids(args.tokens))
        }
        None => loaded(&args)?,
    };
    let has = count(ids.len(), "token");
    ensure!(ids.len() >= args.tokens, "the text has {has}, --tokens asks for {}", args.tokens);

    let mut cases = cases();
    if let Some(unknown) = args.only.iter().find(|name| cases.iter().all(|case| case.name != **name)) {
        // Names with a comma cannot be given in the list.
        let names: Vec<_> = cases.iter().map(|case| &case.name[..]).filter(|name| !name.contains(',')).collect();
        bail!("--only: {unknown:?} is unknown; expected some of {}", names.join(", "));
    }
    if !args.only.is_empty() {
        cases.retain(|case| case.name == KvPreset::Exact.name() || args.only.contains(&case.name));
    }
    read(&engine, &ids[..args.tokens], &mut cases)?;
    if engine.assistant().is_some() && args.generate > 0 {
        for case in &mut cases {
            case.acceptance = Some(acceptance(&engine, &ids, case.options.clone(), args.generate)?);
        }
    }
    print(&cases);
    verdict::print(&cases);
    if let Some(path) = &args.csv {
        std::fs::write(path, csv(&cases)).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &args.svg {
        plot::divergence_by_size(path, &cases)?;
    }
    Ok(())
}

/// The checkpoint, and the ids of the text.
fn loaded(args: &Args) -> Result<(Engine, Vec<u32>)> {
    let text = match &args.text {
        Some(path) => {
            let text = input::text(path)?;
            ensure!(!text.is_empty(), "{}: is empty; use another text", path.display());
            text
        }
        None => input::sources()?,
    };
    let engine = Engine::load(&EngineOptions { isa: args.isa, ..args.pair.options()? })?;
    let ids = engine.tokenizer()?.encode(&text)?;
    Ok((engine, ids))
}

/// The exact cache first, which the others are compared with; presets; every format; and variants
/// of `balanced` without a part.
fn cases() -> Vec<Case> {
    let case = |name: String, options: KvOptions| Case {
        name,
        options,
        divergences: Vec::new(),
        same_best: 0,
        bits: 0.0,
        acceptance: None,
    };
    let mut cases: Vec<_> =
        KvPreset::ALL.iter().map(|preset| case(preset.name().into(), KvOptions::from(*preset))).collect();
    for format in CodeFormat::ALL.map(KvFormat::from) {
        let options = KvOptions { key: format, value: format, ..KvOptions::default() };
        cases.push(case(format.to_string(), options));
    }
    let balanced = KvOptions::from(KvPreset::Balanced);
    let zones = balanced.exact;
    for (name, exact) in [
        ("balanced, no exact head", ExactZones { head: 0, ..zones }),
        ("balanced, no exact tail", ExactZones { tail: 0, ..zones }),
        ("balanced, neither", ExactZones { head: 0, tail: 0, ..zones }),
    ] {
        cases.push(case(name.into(), KvOptions { exact, ..balanced.clone() }));
    }
    let neither = ExactZones { head: 0, tail: 0, ..zones };
    for format in [CodeFormat::Tqc4, CodeFormat::Turbo4] {
        let name = format!("{}, no exact zones", format.name());
        cases.push(case(
            name,
            KvOptions { key: format.into(), value: format.into(), exact: neither, ..balanced.clone() },
        ));
    }
    cases
}

/// Runs the target over `ids` with every case's cache in lockstep.
fn read(engine: &Engine, ids: &[u32], cases: &mut [Case]) -> Result<()> {
    let target = engine.gemma4().context("kv_quality reads K and V of Gemma 4 alone; pass one with --model")?;
    let context = target.max_position_embeddings();
    ensure!(ids.len() <= context, "--tokens is {}, more than the context of {context}", ids.len());
    let new = |case: &Case| KvCache::new(target.kv_layout(), &case.options, context, engine.isa());
    let mut caches: Vec<_> = cases.iter().map(new).collect::<foretoken::Result<_>>()?;
    // The bits are those of single steps for any number of rows. Logits of all rows are held twice, in 64 bits.
    let rows = ((1 << 22) / target.vocab_size()).clamp(1, 64);
    for chunk in ids.chunks(rows) {
        let mut exact: Vec<f64> = Vec::new();
        for (case, cache) in cases.iter_mut().zip(&mut caches) {
            let round = cache.begin_round(chunk.len())?;
            let output = target.forward_one(chunk, round, OutputRows::All, chunk.len())?;
            let logits = F32View::new(&output.logits)?;
            let vocab = logits.len() / chunk.len();
            let log_probs: Vec<f64> = logits.chunks_exact(vocab).flat_map(log_softmax).collect();
            if exact.is_empty() {
                exact.clone_from(&log_probs);
            }
            for (want, got) in exact.chunks_exact(vocab).zip(log_probs.chunks_exact(vocab)) {
                let divergence: f64 = want.iter().zip(got).map(|(p, q)| p.exp() * (p - q)).sum();
                case.divergences.push(divergence.max(0.0));
                case.same_best += usize::from(best(want) == best(got));
            }
        }
    }
    let values: usize = target
        .kv_layout()
        .stores
        .iter()
        .filter(|store| store.window.is_none())
        .fold(0, |n, store| n + 2 * store.num_kv_heads * store.head_dim);
    for (case, cache) in cases.iter_mut().zip(&caches) {
        case.bits = 8.0 * cache.bytes_per_token() as f64 / values as f64;
    }
    Ok(())
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
    logits.iter().map(|x| f64::from(x - largest) - sum.ln()).collect()
}

fn best(log_probs: &[f64]) -> Option<usize> {
    (0..log_probs.len()).max_by(|a, b| log_probs[*a].total_cmp(&log_probs[*b]))
}

/// Accepted tokens per drafted token, in generations of 64 tokens after prompts of 2 to 4 thousand tokens.
fn acceptance(engine: &Engine, ids: &[u32], kv: KvOptions, tokens: usize) -> Result<f64> {
    const PIECE: usize = 64;
    let mut total = Statistics::default();
    let pieces = tokens.div_ceil(PIECE);
    let longest = 4096.min(ids.len());
    for piece in 0..pieces {
        let len = longest / 2 + longest / 2 * piece / pieces;
        let mut session = engine.session(&SessionOptions { kv: kv.clone() })?;
        let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
        let speculation = Speculation::With(SpeculationOptions::mtp(4));
        let options = GenerateOptions { max_tokens: PIECE, stop, speculation, ..GenerateOptions::default() };
        total.add(&measure::generate(&mut session, &ids[..len], &options)?.1);
    }
    Ok(total.acceptance_rate())
}

/// Median, mean and 99.9th percentile over the positions.
fn summary(case: &Case) -> [f64; 3] {
    let mut sorted = case.divergences.clone();
    sorted.sort_by(f64::total_cmp);
    let at = |part: f64| sorted[((sorted.len() - 1) as f64 * part) as usize];
    [at(0.5), sorted.iter().sum::<f64>() / sorted.len() as f64, at(0.999)]
}

fn print(cases: &[Case]) {
    println!(
        "{:<26} {:>6} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "K/V", "bits", "median", "mean", "99.9 %", "same", "accept"
    );
    for case in cases {
        let [median, mean, tail] = summary(case);
        let same = 100.0 * case.same_best as f64 / case.divergences.len() as f64;
        let acceptance = case.acceptance.map_or("-".into(), |rate| format!("{:.1} %", 100.0 * rate));
        println!(
            "{:<26} {:>6.3} {median:>10.2e} {mean:>10.2e} {tail:>10.2e} {same:>6.2} % {acceptance:>8}",
            case.name, case.bits
        );
    }
}

fn csv(cases: &[Case]) -> String {
    let mut csv = String::from("name,bits_per_value,median_kld,mean_kld,kld_99_9,same_top_1,acceptance\n");
    for case in cases {
        let [median, mean, tail] = summary(case);
        let same = case.same_best as f64 / case.divergences.len() as f64;
        let acceptance = case.acceptance.map_or(String::new(), |rate| rate.to_string());
        csv += &format!("\"{}\",{},{median},{mean},{tail},{same},{acceptance}\n", case.name, case.bits);
    }
    csv
}
