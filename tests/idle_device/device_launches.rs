//! The launches of steps and rounds are those enumerated by `scripts/device_launches.py`, which `scripts/roofline.py`
//! models: kernels, grids and blocks, in order.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::quantize::{Mix, QuantizeOptions, quantize};
use foretoken::kv::{KvOptions, KvPreset};
use foretoken::{
    DeviceChoice, Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation, SpeculationOptions, WeightType,
};
use serde_json::{Value, json};

use crate::widened::{Heads, Widths, widen};
use crate::{Idle, cases, skipped};

/// Tokens of the prompts: more than one split of attention over all positions.
const DEPTH: usize = 600;

/// The recordings of a generation in rounds of `rows` rows, from the acceptance of the prompt's token on.
fn recorded(options: &EngineOptions, kv: KvPreset, rows: usize) -> Vec<Value> {
    let device = Arc::new(Idle::default());
    let seen = device.0.clone();
    let device = DeviceChoice::Given(device);
    let engine = Engine::load(&EngineOptions { device, threads: Some(1), ..options.clone() }).expect("an engine");
    let kv = KvOptions { max_context: Some(1024), ..kv.into() };
    let speculation = match rows {
        1 => Speculation::Off,
        _ => Speculation::With(SpeculationOptions::mtp(rows)),
    };
    let options = GenerateOptions { speculation, ..cases::plain(32) };
    let mut session = engine.session(&SessionOptions { kv }).expect("a session");
    let mut generation = session.generate(&[7; DEPTH], &options).expect("a generation");
    for _ in 0..2 {
        generation.next().expect("a piece").expect("a round");
    }
    let seen = seen.lock().expect("a list");
    seen.recorded.clone()
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).expect("config.json")).expect("JSON")
}

#[test]
fn launches_are_those_of_the_roofline_model() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return skipped::skipped("launches of the roofline model", "python3 is not installed");
    }
    let files = tempfile::tempdir().expect("a folder");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let demo = |part: &str| root.join("models/demo").join(part);
    let at = |name: &str| files.path().join(name);
    to_gguf(
        &Checkpoint::open(demo("target")).expect("a checkpoint"),
        at("f32.gguf"),
        &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() },
    )
    .expect("a file");
    quantize(&Checkpoint::open(at("f32.gguf")).expect("a file"), at("mixed.gguf"), &QuantizeOptions::new(Mix::Q4_K_M))
        .expect("a file");

    let mut lists = Vec::new();
    let mut list = |options: &EngineOptions, folders: [PathBuf; 2], weights: [[&str; 2]; 2], kv: KvPreset| {
        for rows in [1, 2, 4, 8] {
            let [target, assistant] = [&folders[0], &folders[1]].map(|folder| config(folder));
            lists.push(json!({
                "what": options.model, "target": target, "assistant": assistant, "weights": weights, "kv": kv.name(),
                "depth": DEPTH, "rows": rows, "passes": recorded(options, kv, rows),
            }));
        }
    };
    let pair = EngineOptions::new(demo("target")).with_assistant(demo("assistant"));
    list(&pair, [demo("target"), demo("assistant")], [["bf16"; 2]; 2], KvPreset::Exact);
    let mixed = EngineOptions { model: at("mixed.gguf"), ..pair };
    list(&mixed, [demo("target"), demo("assistant")], [["q4_k_m", "f32"], ["bf16"; 2]], KvPreset::Exact);
    // Heads as wide as the kernels of quantized K and V need; with K = V, a group of 128 rotary channels.
    let widths = Widths { sliding: Heads { width: 128, pairs: 64 }, full: Heads { width: 256, pairs: 64 } };
    for case in cases::all().into_iter().filter(|case| ["dense", "edge", "moe", "nested"].contains(&&*case.name)) {
        let part = |part: &str| widen(&case.path.join(part), &at(&case.name).join(part), widths);
        let folders = [part("target"), part("assistant")];
        let options = EngineOptions::new(&folders[0]).with_assistant(&folders[1]);
        list(&options, folders.clone(), [["f32"; 2]; 2], KvPreset::Exact);
        let options = EngineOptions { quantize: Some(WeightType::Q8_0), ..options };
        list(&options, folders, [["q8_0", "f32"]; 2], KvPreset::Balanced);
    }

    let file = at("launches.json");
    std::fs::write(&file, Value::from(lists).to_string()).expect("a file");
    let script = root.join("scripts/device_launches.py");
    let output = Command::new("python3").arg(script).arg(&file).output().expect("python3");
    let [said, problem] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{said}{problem}");
    print!("{said}");
}
