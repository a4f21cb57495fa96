//! Damaged checkpoints: truncated anywhere, with one byte of a header or a JSON file changed, or with two tensors
//! exchanged. None panics or takes more memory than its packed tensors and 64 MiB, and damage visible in names, shapes
//! or lengths is an error. The matrices here are as large packed as in the file, whose length is the measure.
//!
//! Files of counts, costs and importances are truncated and changed in the same way.

mod counting;
mod gguf_writer;
mod twins;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use counting::{HELD, PEAK, alone};
use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::gguf::{Gguf, Value as GgufValue};
use foretoken::checkpoint::quantize::Importance;
use foretoken::gemma4::{Assistant, Target};
use foretoken::speculative::{Costs, DrafterKind, Machine, NgramCache};
use foretoken::{Engine, EngineOptions, Isa, Result};
use gguf_writer::GgufFile;
use serde_json::{Value, json};
use tempfile::TempDir;
use twins::{Twin, written};

/// Memory that loading may take besides the tensors.
const ROOM: usize = 64 << 20;

/// On a memory file system if there is one.
fn directory() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory")
}

fn seed(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name)).expect("a seed")
}

/// Loads the model as a caller would; `None` if it is rejected. The error is one line.
fn load(path: &Path, size: usize, case: &dyn Fn() -> String) -> Option<Engine> {
    let options = EngineOptions { threads: Some(1), ..EngineOptions::new(path) };
    checked(size, case, || Engine::load(&options))
}

fn checked<T>(size: usize, case: &dyn Fn() -> String, run: impl FnOnce() -> Result<T>) -> Option<T> {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| panic!("{}: a panic", case()));
    let taken = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    assert!(taken <= size + ROOM, "{}: {taken} bytes for a file of {size}", case());
    result.inspect_err(|error| assert_eq!(error.to_string().lines().count(), 1, "{}: {error}", case())).ok()
}

/// The fields that an assistant's config.json needs.
const ASSISTANTS_FIELDS: [&str; 6] = [
    "model_type",
    "backbone_hidden_size",
    "num_centroids",
    "centroid_intermediate_top_k",
    "use_ordered_embeddings",
    "text_config",
];
/// Those in its `text_config`.
const TEXT_FIELDS: [&str; 13] = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "global_head_dim",
    "sliding_window",
    "max_position_embeddings",
    "rope_parameters",
];

/// A model whose file is damaged in place, or an assistant of `target`.
struct Model {
    directory: TempDir,
    given: PathBuf,
    target: Option<Target>,
}

impl Model {
    /// A directory with one file of each kind.
    fn directory(name: &str) -> Self {
        let directory = directory();
        let seed_bytes = seed(&format!("safetensors/{name}"));
        let end = seed_bytes.iter().position(|byte| *byte == 0).expect("two files");
        let generation = json!({
            "bos_token_id": 2, "do_sample": true, "eos_token_id": [1, 3], "suppress_tokens": [5], "temperature": 1.0,
            "top_k": 64, "top_p": 0.95, "repetition_penalty": 1.1
        });
        for (file, bytes) in [
            ("config.json", &seed_bytes[..end]),
            ("model.safetensors", &seed_bytes[end + 1..]),
            ("tokenizer.json", &seed("tokenizer/bpe")),
            ("generation_config.json", generation.to_string().as_bytes()),
        ] {
            std::fs::write(directory.path().join(file), bytes).expect("written");
        }
        Self { given: directory.path().to_owned(), directory, target: None }
    }

    fn gguf(bytes: &[u8]) -> Self {
        let directory = directory();
        let given = directory.path().join("model.gguf");
        std::fs::write(&given, bytes).expect("written");
        Self { directory, given, target: None }
    }

    /// The fixture's assistant, in its directory or as a GGUF file.
    fn assistant(fixture: &str, as_gguf: bool) -> Self {
        let twin = Twin::of(fixture);
        let target = Checkpoint::open(twin.path("target")).and_then(|target| Target::load(&target, Isa::best()));
        let model = match as_gguf {
            true => Self::gguf(&twin.gguf("assistant").bytes()),
            false => {
                let directory = directory();
                // Without metadata and unread fields.
                twin.tensors("assistant/model.safetensors", |_| ());
                twin.json("assistant/config.json", |config| {
                    let keep = |fields: &mut Value, read: &[&str]| {
                        fields.as_object_mut().expect("an object").retain(|name, _| read.contains(&name.as_str()));
                    };
                    keep(config, &ASSISTANTS_FIELDS);
                    keep(&mut config["text_config"], &TEXT_FIELDS);
                });
                for file in ["config.json", "model.safetensors"] {
                    std::fs::copy(twin.path("assistant").join(file), directory.path().join(file)).expect("a copy");
                }
                Self { given: directory.path().to_owned(), directory, target: None }
            }
        };
        Self { target: Some(target.expect("a target")), ..model }
    }

    /// Whether it loads, as a caller would load it.
    fn loads(&self, size: usize, case: &dyn Fn() -> String) -> bool {
        let assistant = |target| {
            checked(size, case, || Assistant::load(&Checkpoint::open(&self.given)?, target, Isa::best())).is_some()
        };
        self.target.as_ref().map_or_else(|| load(&self.given, size, case).is_some(), assistant)
    }

    /// The only file read of a GGUF checkpoint.
    const GGUF: &str = "model.gguf";

    fn bytes(&self, file: &str) -> Vec<u8> {
        std::fs::read(self.directory.path().join(file)).expect("a file")
    }

    fn write(&self, file: &str, bytes: &[u8]) {
        std::fs::write(self.directory.path().join(file), bytes).expect("written");
    }

    /// Loads it with each of `bytes` changed, and calls `check` with the damaged file and the result.
    fn flips(&self, file: &str, bytes: impl Iterator<Item = usize>, check: impl Fn(&[u8], bool, &str)) -> usize {
        let (mut content, path) = (self.bytes(file), self.directory.path().join(file));
        let handle = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        let mut cases = 0;
        for at in bytes {
            let mask = mask(at, cases);
            content[at] ^= mask;
            handle.write_all_at(&content[at..=at], at as u64).expect("written");
            let case = || format!("{file}: byte {at} with {mask:#04x}");
            let loaded = self.loads(content.len(), &case);
            check(&content, loaded, &case());
            content[at] ^= mask;
            handle.write_all_at(&content[at..=at], at as u64).expect("written");
            cases += 1;
        }
        cases
    }

    /// Loads it truncated at each of `lengths`; all must be rejected.
    fn cuts(&self, file: &str, lengths: impl Iterator<Item = usize>) -> usize {
        let content = self.bytes(file);
        let mut cases = 0;
        for len in lengths {
            self.write(file, &content[..len]);
            let case = || format!("{file}: cut to {len} of {} bytes", content.len());
            assert!(!self.loads(len, &case), "{}: accepted", case());
            cases += 1;
        }
        self.write(file, &content);
        cases
    }
}

/// Changes to a byte: one bit, or several.
fn mask(at: usize, turn: usize) -> u8 {
    let mixed = (((turn as u64) << 24) | (at as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    if mixed & 1 == 0 { 1 << ((mixed >> 8) & 7) } else { (mixed >> 8) as u8 | 1 }
}

/// Where a file is truncated: everywhere near its start and end, and some hundred places between.
fn lengths(len: usize) -> impl Iterator<Item = usize> {
    let step = (len / 400).max(1);
    (0..len).filter(move |at| at % step == 0 || *at < 16 || *at + 16 >= len)
}

#[test]
fn the_untouched_models_load() {
    let _alone = alone();
    for model in ["dense", "moe"] {
        assert!(load(&Model::directory(model).given, 0, &|| model.into()).is_some(), "{model}");
    }
    for file in FILES {
        assert!(load(&Model::gguf(&seed(file)).given, 0, &|| file.into()).is_some(), "{file}");
    }
    for as_gguf in [false, true] {
        assert!(Model::assistant("edge", as_gguf).loads(0, &|| "an assistant".into()), "as GGUF: {as_gguf}");
    }
}

// ---- safetensors ----

/// Names, types, shapes and offsets in the header; `None` if it is not a header.
fn header(file: &[u8]) -> Option<BTreeMap<String, Value>> {
    let len = usize::try_from(u64::from_le_bytes(file.get(..8)?.try_into().ok()?)).ok()?;
    serde_json::from_slice(file.get(8..len.checked_add(8)?)?).ok()
}

fn header_len(file: &[u8]) -> usize {
    8 + u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize
}

#[test]
fn damaged_safetensors() {
    let _alone = alone();
    let mut cases = 0;
    for model in [Model::directory("dense"), Model::directory("moe"), Model::assistant("edge", false)] {
        let file = "model.safetensors";
        let whole = model.bytes(file);
        cases += model.cuts(file, lengths(whole.len()));
        let original = header(&whole);
        cases += model.flips(file, 0..header_len(&whole), |damaged, loaded, case| {
            assert!(!loaded || header(damaged) == original, "{case}: accepted, though the header says something else");
        });
    }
    println!("{cases} cases");
}

/// Names of two tensors exchanged: an error wherever their shapes differ, or their lengths.
#[test]
fn exchanged_tensors() {
    let _alone = alone();
    let mut cases = 0;
    for model in [Model::directory("dense"), Model::directory("moe"), Model::assistant("edge", false)] {
        let whole = model.bytes("model.safetensors");
        let (tensors, data) = (header(&whole).expect("a header"), &whole[header_len(&whole)..]);
        let names: Vec<&String> = tensors.keys().collect();
        for (i, a) in names.iter().enumerate() {
            for b in &names[i + 1..] {
                let differ = |field: &str| tensors[*a][field] != tensors[*b][field];
                for field in [None, Some("data_offsets")] {
                    let mut exchanged = tensors.clone();
                    match field {
                        None => {
                            exchanged.insert((*a).clone(), tensors[*b].clone());
                            exchanged.insert((*b).clone(), tensors[*a].clone());
                        }
                        Some(field) => {
                            exchanged.get_mut(*a).expect("a tensor")[field] = tensors[*b][field].clone();
                            exchanged.get_mut(*b).expect("a tensor")[field] = tensors[*a][field].clone();
                        }
                    }
                    let text = serde_json::to_vec(&exchanged).expect("JSON");
                    model.write("model.safetensors", &[&(text.len() as u64).to_le_bytes(), &text[..], data].concat());
                    let case = || format!("{a} and {b}, exchanged {field:?}");
                    let loaded = model.loads(whole.len(), &case);
                    let length = |name: &str| {
                        let end = |i: usize| tensors[name]["data_offsets"][i].as_u64().expect("a place");
                        end(1) - end(0)
                    };
                    let betrayed = if field.is_none() { differ("shape") } else { length(a) != length(b) };
                    assert!(!loaded || !betrayed, "{}: accepted", case());
                    cases += 1;
                }
            }
        }
    }
    println!("{cases} cases");
}

// ---- JSON files ----

/// Fields of config.json that contradict the tensors' shapes if damaged.
const GEOMETRY: [&str; 16] = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_kv_shared_layers",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "num_experts",
    "moe_intermediate_size",
];

/// Every field by its path. Token ids differ in one letter, and have defaults.
fn fields(value: &Value, path: &str, found: &mut BTreeMap<String, Value>) {
    if let Value::Object(object) = value {
        for (name, value) in object.iter().filter(|(name, _)| !name.ends_with("_token_id")) {
            let path = format!("{path}/{name}");
            fields(value, &path, found);
            let is_geometry = GEOMETRY.iter().any(|field| name == field);
            found.insert(path, if is_geometry { value.clone() } else { Value::Null });
        }
    }
}

fn fields_of(file: &[u8]) -> Option<BTreeMap<String, Value>> {
    let mut found = BTreeMap::new();
    fields(&serde_json::from_slice(file).ok()?, "", &mut found);
    Some(found)
}

#[test]
fn damaged_json() {
    let _alone = alone();
    let mut cases = 0;
    let of_targets = ["config.json", "generation_config.json", "tokenizer.json"];
    // Two of the files are the same for either target.
    for (model, files) in [
        (Model::directory("dense"), &of_targets[..]),
        (Model::directory("moe"), &of_targets[..1]),
        (Model::assistant("edge", false), &of_targets[..1]),
    ] {
        for file in files {
            let whole = model.bytes(file);
            cases += model.cuts(file, 0..whole.len());
            let original = fields_of(&whole);
            // A damaged token is another token, whatever its name.
            let names_matter = *file != "tokenizer.json";
            cases += model.flips(file, 0..whole.len(), |damaged, loaded, case| {
                let now = fields_of(damaged);
                let betrayed = now.is_none() || names_matter && changed(&original, &now);
                assert!(!loaded || !betrayed, "{case}: accepted: {}", String::from_utf8_lossy(damaged));
            });
        }
    }
    println!("{cases} cases");
}

/// Whether a field has changed, or a name of at least eight bytes: shorter ones may be valid names.
fn changed(original: &Option<BTreeMap<String, Value>>, now: &Option<BTreeMap<String, Value>>) -> bool {
    let long = |fields: &Option<BTreeMap<String, Value>>| -> BTreeMap<String, Value> {
        let is_long = |path: &str| path.rsplit('/').next().is_some_and(|name| name.len() >= 8);
        fields.iter().flatten().filter(|(path, _)| is_long(path)).map(|(p, v)| (p.clone(), v.clone())).collect()
    };
    let (original, now) = (long(original), long(now));
    original.iter().any(|(path, value)| now.get(path) != Some(value))
}

// ---- GGUF ----

const FILES: [&str; 3] = ["gguf/model-dense-q8_0", "gguf/model-moe-q4_0", "gguf/model-wide-q4_k_m"];

/// Keys whose values cannot be checked against the tensors.
const FREE: [&str; 7] = [
    "context_length",
    "attention.sliding_window",
    "rope.freq_base",
    "rope.freq_base_swa",
    "attention.layer_norm_rms_epsilon",
    "final_logit_softcapping",
    "expert_used_count",
];
/// Keys that the tensors also imply.
const NOT_READ: [&str; 2] = ["nextn_predict_layers", "vocab_size"];

/// A file's tensor descriptions, and the architecture's keys. Types of the same padded length cannot be told apart.
fn contents(gguf: &Gguf, architecture: &str) -> BTreeMap<String, String> {
    let tensors = gguf.tensors().map(|tensor| {
        let padded = tensor.len_bytes().map(|len| len.next_multiple_of(32));
        (format!("tensor {}", tensor.name()), format!("{:?}, {padded:?} bytes", tensor.shape()))
    });
    let keys = gguf.keys().filter_map(|key| {
        let own = key.strip_prefix(architecture)?.strip_prefix('.').filter(|own| !NOT_READ.contains(own))?;
        let value = gguf.metadata(key).expect("a value");
        Some((key.to_owned(), if FREE.contains(&own) { String::new() } else { shown(value) }))
    });
    tensors.chain(keys).collect()
}

fn shown(value: GgufValue<'_>) -> String {
    match value {
        GgufValue::Array(values) => values.iter().map(|value| shown(value) + ", ").collect(),
        value => value.as_u64().map_or_else(|| format!("{value:?}"), |number| number.to_string()),
    }
}

/// The end of the header: the first byte of the first tensor.
fn gguf_header_len(gguf: &Gguf, file: &[u8]) -> usize {
    file.len() - gguf.tensors().map(|tensor| tensor.len_bytes().unwrap_or(0).next_multiple_of(32)).sum::<usize>()
}

#[test]
fn damaged_gguf() {
    let _alone = alone();
    let mut cases = 0;
    for file in FILES {
        cases += gguf_damaged(file, &Model::gguf(&seed(file)));
    }
    println!("{cases} cases");
}

#[test]
fn damaged_assistants() {
    let _alone = alone();
    println!("{} cases", gguf_damaged("an assistant", &Model::assistant("edge", true)));
}

/// Truncations, changes and exchanges of one file.
fn gguf_damaged(file: &str, model: &Model) -> usize {
    let whole = model.bytes(Model::GGUF);
    let gguf = Gguf::from_bytes(whole.clone()).expect("a file");
    let architecture = gguf.metadata("general.architecture").and_then(GgufValue::as_str).expect("a name");
    let original = contents(&gguf, architecture);
    // The last tensor may end in padding.
    let mut cases = model.cuts(Model::GGUF, lengths(whole.len()).filter(|len| len + 32 < whole.len()));
    cases += model.flips(Model::GGUF, 0..gguf_header_len(&gguf, &whole), |damaged, loaded, case| {
        if loaded {
            let now = contents(&Gguf::from_bytes(damaged.to_vec()).expect("it was opened"), architecture);
            let missing: Vec<_> = original.iter().filter(|(name, value)| now.get(*name) != Some(value)).collect();
            assert!(missing.is_empty(), "{file}: {case}: accepted without {missing:?}");
        }
    });
    // Names of two tensors exchanged.
    let tensors = written(&gguf).tensors;
    for a in 0..tensors.len() {
        for b in a + 1..tensors.len() {
            let mut exchanged = written(&gguf);
            let name = std::mem::take(&mut exchanged.tensors[a].name);
            exchanged.tensors[a].name = std::mem::replace(&mut exchanged.tensors[b].name, name);
            model.write(Model::GGUF, &exchanged.bytes());
            let name = |i: usize| String::from_utf8_lossy(&tensors[i].name).into_owned();
            let case = || format!("{file}: {} and {}", name(a), name(b));
            let loaded = model.loads(whole.len(), &case);
            assert!(!loaded || tensors[a].shape == tensors[b].shape, "{}: accepted", case());
            cases += 1;
        }
    }
    cases
}

// ---- other files ----

type Read<'a> = &'a dyn Fn(&Path) -> Result<()>;

#[test]
fn damaged_counts_costs_and_importances() {
    let _alone = alone();
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let mut counts = NgramCache::default();
    counts.learn(&[1, 2, 3, 1, 2, 3, 1, 2, 4], 0, 4);
    counts.save(at("counts")).expect("written");
    let machine = Machine { processor: "avx2".into(), threads: 3, step_bytes: 1000, step_multiply_adds: 500 };
    let mut costs = Costs::new(machine.clone());
    (0..9).for_each(|i| costs.verified(600, 1 + i % 3, 4.0));
    (0..2).for_each(|_| costs.drafted(DrafterKind::Mtp, 4, 2.0));
    costs.save(at("costs")).expect("written");
    let importance = GgufFile::new().floats("a.in_sum2", &[2, 4], &[8.0; 8]).floats("a.counts", &[2, 1], &[2.0; 2]);
    std::fs::write(at("importance"), importance.bytes()).expect("written");
    let (int, values) = (i32::to_le_bytes, [1.0f32; 4].map(f32::to_le_bytes).concat());
    let older = [&int(1)[..], &int(1), b"a", &int(8), &int(4), &values].concat();
    std::fs::write(at("older importance"), older).expect("written");

    let read_costs = |path: &Path| -> Result<()> {
        let costs = Costs::load(path, &machine)?;
        assert!(costs.verify(600, 16).iter().all(|estimate| estimate.ms.is_finite()));
        assert!(costs.step(DrafterKind::Mtp, 600).is_finite());
        Ok(())
    };
    let read_importance = |path: &Path| Importance::read(path).map(drop);
    let readers: [(&str, Read<'_>); 4] = [
        ("counts", &|path: &Path| NgramCache::load(path).map(drop)),
        ("costs", &read_costs),
        ("importance", &read_importance),
        ("older importance", &read_importance),
    ];
    let mut cases = 0;
    for (name, read) in readers {
        let whole = std::fs::read(at(name)).expect("written");
        let path = at("damaged");
        let is_read = |bytes: &[u8], case: &dyn Fn() -> String| {
            std::fs::write(&path, bytes).expect("written");
            checked(bytes.len(), case, || read(&path)).is_some()
        };
        assert!(is_read(&whole, &|| name.into()), "{name}");
        for len in 0..whole.len() {
            let case = || format!("{name}: cut to {len} of {} bytes", whole.len());
            assert!(!is_read(&whole[..len], &case), "{}: accepted", case());
        }
        for byte in 0..whole.len() {
            let mut changed = whole.clone();
            changed[byte] ^= mask(byte, cases);
            is_read(&changed, &|| format!("{name}: byte {byte} changed"));
            cases += 1;
        }
    }
    println!("{cases} cases");
}
