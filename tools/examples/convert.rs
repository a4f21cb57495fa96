//! Converts checkpoints: `cargo run --release --example convert -- models/demo/target /tmp/demo.gguf`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use foretoken::checkpoint::convert::{
    AssistantLayout, Outtype, Report, ToGgufOptions, ToHuggingFaceOptions, Unknown, to_gguf, to_hugging_face,
};
use foretoken::checkpoint::{Checkpoint, Progress};
use foretoken::{Cancel, ElementType};
use foretoken_tools::arguments::resolve;
use foretoken_tools::interrupt::{cancel_on_interrupt, exit_code};
use foretoken_tools::progress::ProgressLine;
use foretoken_tools::report::{count, size};
use foretoken_tools::{eprintln, println};

/// Convert a Hugging Face directory of a target or an assistant to a GGUF file that llama.cpp can also
/// read, or a floating-point GGUF file to a directory.
///
/// Ctrl-C ends the command with exit code 130, and removes the incomplete file.
///
/// Example: convert path/to/gemma-4-E2B-it gemma-4-E2B-it-bf16.gguf --outtype bf16
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The checkpoint: a directory with config.json and safetensors, a GGUF file, or (feature hub) a Hugging Face Hub name.
    source: PathBuf,
    /// The file (NAME.gguf) or directory to write.
    destination: PathBuf,
    /// Type of the matrices: f32, f16, bf16, q8_0. Default: f16 for a GGUF file, the types of the file for a directory.
    #[arg(long, value_name = "TYPE")]
    outtype: Option<Outtype>,
    /// Layout of an assistant's GGUF file: gemma4-assistant (llama.cpp's), or gemma4_assistant (an older one). Default:
    /// gemma4-assistant.
    #[arg(long)]
    layout: Option<AssistantLayout>,
    /// Directory of the tokenizer for the GGUF file, e.g. the assistant's target. Default: the checkpoint's own.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Name of the model in the GGUF file. Default: the directory's name.
    #[arg(long)]
    name: Option<String>,
    /// Skip tensors that no text model of the family has, instead of refusing the checkpoint.
    #[arg(long)]
    leave_out_unknown: bool,
}

fn main() -> ExitCode {
    foretoken_tools::log_warnings();
    foretoken_tools::run(|args| exit_code(command(args)))
}

fn command(args: Args) -> Result<()> {
    let path = resolve(&args.source)?;
    let cancel = Cancel::default();
    cancel_on_interrupt(cancel.clone());
    let source = Checkpoint::open(&path)?;
    let line = ProgressLine::new("converting", 0);
    let progress: Option<Arc<dyn Fn(Progress) + Send + Sync>> =
        Some(Arc::new(move |progress: Progress| line.set(progress.loaded, progress.total)));
    let unknown = if args.leave_out_unknown { Unknown::LeftOut } else { Unknown::Refused };
    let report = match source.gguf() {
        None => {
            let Args { outtype, layout, tokenizer, name, .. } = args;
            ensure!(
                layout.is_none() || source.is_assistant()?,
                "--layout: applies to an assistant, but {} is a target; omit it",
                path.display()
            );
            let (outtype, layout) = (outtype.unwrap_or(Outtype::F16), layout.unwrap_or_default());
            if tokenizer.is_none() && !path.join("tokenizer.json").exists() {
                eprintln!("no tokenizer.json: the file will have no tokens, which llama.cpp requires; see --tokenizer");
            }
            let options = ToGgufOptions { outtype, layout, tokenizer, name, unknown, progress, cancel };
            to_gguf(&source, &args.destination, &options)?
        }
        Some(_) => {
            let of_gguf = [
                ("--layout", args.layout.is_some()),
                ("--tokenizer", args.tokenizer.is_some()),
                ("--name", args.name.is_some()),
            ];
            if let Some((option, _)) = of_gguf.iter().find(|(_, is_given)| *is_given) {
                bail!("{option}: applies to a GGUF file to write, but this one is converted to a directory; omit it");
            }
            let outtype = args.outtype.map(element).transpose()?;
            let options = ToHuggingFaceOptions { outtype, unknown, progress, cancel };
            to_hugging_face(&source, &args.destination, &options)?
        }
    };
    print(&report, &args.destination);
    Ok(())
}

fn element(outtype: Outtype) -> Result<ElementType> {
    Ok(match outtype {
        Outtype::F32 => ElementType::F32,
        Outtype::F16 => ElementType::F16,
        Outtype::Bf16 => ElementType::Bf16,
        _ => bail!("--outtype: safetensors are floating point; use f32, f16 or bf16"),
    })
}

fn print(report: &Report, destination: &std::path::Path) {
    println!("{}: {}, {}", destination.display(), count(report.tensors, "tensor"), size(report.bytes));
    let mut left_out: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, why) in &report.left_out {
        left_out.entry(why).or_default().push(name);
    }
    for (why, names) in left_out {
        // Vision/audio towers have hundreds.
        let shown = names.iter().take(20).copied().collect::<Vec<_>>().join(", ");
        let more = if names.len() > 20 { ", ..." } else { "" };
        println!("left out, {why}: {} ({shown}{more})", names.len());
    }
}
