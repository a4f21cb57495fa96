//! Shows what is in a checkpoint: `cargo run --release --example inspect -- models/demo/target`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::TextConfig;
use foretoken::kv::KvLayout;
use foretoken::{ElementType, Isa};

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

fn main() -> Result<()> {
    let args = Args::parse();
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    metadata(&checkpoint)?;
    tensors(&checkpoint, !args.no_tensors)?;
    // An assistant keeps no K/V.
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
    let available = available_bytes();
    let layout = config.kv_layout();
    for (name, element) in [("f32", ElementType::F32), ("f16", ElementType::F16), ("bf16", ElementType::Bf16)] {
        let (per_token, windows) = kv_bytes(&layout, element);
        print!("K/V in {name}: {per_token} bytes per token, and {} of sliding windows", mebibytes(windows));
        let fits = available.map(|available| available.saturating_sub(weights + windows) / per_token.max(1));
        match fits.map(|fits| fits.min(config.max_position_embeddings as u64)) {
            Some(0) => println!("; does not fit the memory that is available"),
            Some(fits) => println!("; {fits} of {} positions fit", config.max_position_embeddings),
            None => println!(),
        }
    }
    if let Some(available) = available {
        let isa = Isa::best().name();
        println!("weights take {} of the {} that are available; {isa}", mebibytes(weights), mebibytes(available));
    }
}

/// Bytes of K and V that grow with the text, per token, and bytes of those that do not.
fn kv_bytes(layout: &KvLayout, element: ElementType) -> (u64, u64) {
    let mut bytes = (0, 0);
    for store in &layout.stores {
        let row = (2 * store.num_kv_heads * store.head_dim * element.size()) as u64;
        match store.window {
            None => bytes.0 += row,
            Some(window) => bytes.1 += row * window as u64,
        }
    }
    bytes
}

/// What the system would give without swapping, where it tells.
fn available_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
