//! Shows what is in a checkpoint: `cargo run --release --example inspect -- models/demo/target`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use foretoken::Isa;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::TextConfig;
use foretoken::kv::{KvCache, KvOptions, KvPreset, available_memory};

/// Print a checkpoint's metadata and tensors, what its K/V take, and how long a context fits this machine's memory.
///
/// Example: inspect gemma-4-E2B-it-q4_k_m.gguf
#[derive(Parser)]
#[command(version)]
struct Args {
    /// A directory or a GGUF file, a target's or an assistant's.
    checkpoint: PathBuf,
    /// Leave out the list of tensors.
    #[arg(long)]
    no_tensors: bool,
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    metadata(&checkpoint)?;
    tensors(&checkpoint, !args.no_tensors)?;
    // An assistant stores no K/V.
    if let Ok(config) = checkpoint.target_config() {
        memory(&config, checkpoint.bytes());
    }
    Ok(())
}

fn metadata(checkpoint: &Checkpoint) -> Result<()> {
    if let Some(gguf) = checkpoint.gguf() {
        for key in gguf.keys() {
            println!("{key} = {:?}", gguf.metadata(key));
        }
        return Ok(());
    }
    let path = checkpoint.path().join("config.json");
    println!("{}", std::fs::read_to_string(path)?.trim_end());
    Ok(())
}

fn tensors(checkpoint: &Checkpoint, list: bool) -> Result<()> {
    let mut totals: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for name in checkpoint.names() {
        let Some(tensor) = checkpoint.get(&name)? else { continue };
        let (kind, bytes) = (tensor.dtype.name(), tensor.bytes.as_slice().len());
        if list {
            println!("{name:60} {kind:8} {:20} {bytes:>12}", format!("{:?}", tensor.shape));
        }
        let total = totals.entry(kind).or_default();
        *total = (total.0 + 1, total.1 + bytes);
    }
    for (kind, (count, bytes)) in &totals {
        println!("{count} tensors of {kind}: {}", mebibytes(*bytes as u64));
    }
    println!("{} in all", mebibytes(totals.values().map(|(_, bytes)| *bytes as u64).sum()));
    Ok(())
}

fn memory(config: &TextConfig, weights: u64) {
    let available = available_memory();
    for preset in KvPreset::ALL {
        // Sizes only: nothing is held before it is needed.
        let options = KvOptions { memory: Some(u64::MAX), ..preset.into() };
        let longest = config.max_position_embeddings;
        let Ok(cache) = KvCache::new(config.kv_layout(), &options, longest, Isa::best()) else { continue };
        print!("K/V {:9} {:>7} bytes per token, ", preset.name(), cache.bytes_per_token());
        print!("{} at {longest} positions", mebibytes(cache.bytes_at(longest) as u64));
        let room = available.map(|available| available.saturating_sub(weights) as usize);
        let fits = room.map(|room| largest(longest, |len| cache.bytes_at(len) <= room));
        match fits {
            Some(fits) => println!("; {fits} fit the memory that is available"),
            None => println!(),
        }
    }
    if let Some(available) = available {
        let isa = Isa::best().name();
        println!("weights take {} of the {} that are available; {isa}", mebibytes(weights), mebibytes(available));
    }
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

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
