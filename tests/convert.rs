//! Converts checkpoints from safetensors to GGUF and back: the same bits, the same text. No
//! incomplete file ever has a final name.

mod cases;
#[path = "../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cases::{Case, argmax, cache, pass, same_id, values};
use foretoken::OutputRows;
use foretoken::chat::{ChatOptions, ChatTemplate, Json, Message};
use foretoken::checkpoint::convert::{
    AssistantLayout, Outtype, ToGgufOptions, ToHuggingFaceOptions, Unknown, to_gguf, to_hugging_face,
};
use foretoken::checkpoint::gguf::{Gguf, GgufWriter};
use foretoken::checkpoint::quantize::{Mix, QuantizeOptions, quantize};
use foretoken::checkpoint::{Checkpoint, Progress, TensorType};
use foretoken::gemma4::{Assistant, Target};
use foretoken::verify::{Outcome, VerifyOptions, verify};
use foretoken::{
    Cancel, ElementType, Engine, EngineOptions, Error, GenerateOptions, Isa, SessionOptions, Speculation,
    SpeculationOptions,
};
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};
use skipped::skipped;

fn demo(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo").join(part)
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn options(outtype: Outtype) -> ToGgufOptions {
    ToGgufOptions { outtype, ..ToGgufOptions::default() }
}

fn convert(source: &Path, destination: &Path, options: &ToGgufOptions) -> Checkpoint {
    to_gguf(&open(source), destination, options).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    open(destination)
}

/// Every tensor of a text model by its name without prefix, with type, shape and bytes.
fn contents(checkpoint: &Checkpoint) -> BTreeMap<String, (TensorType, Vec<usize>, Vec<u8>)> {
    let tower = |name: &str| name.contains("vision") || name.contains("audio");
    let names = checkpoint.names().into_iter().filter(|name| !tower(name));
    let entry = |name: String| {
        let tensor = checkpoint.get(&name).expect("readable").expect("a name has a tensor");
        let short = ["model.language_model.", "model."].iter().find_map(|prefix| name.strip_prefix(prefix));
        (short.unwrap_or(&name).to_owned(), (tensor.dtype, tensor.shape, tensor.bytes.as_slice().to_vec()))
    };
    names.map(entry).collect()
}

/// Whether a GGUF file can represent the case's configuration; it can for all of this repository's.
fn can_be_said(case: &Case) -> bool {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("target.gguf");
    match to_gguf(&open(&case.path.join("target")), file, &options(Outtype::F32)) {
        Ok(_) => true,
        Err(error) => {
            assert!(!case.ships() && error.to_string().contains("a GGUF file cannot represent"), "{error}");
            println!("{}: {error}", case.name);
            false
        }
    }
}

#[test]
fn there_and_back_the_bits_are_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    // Floats that F32 represents exactly: the round trip is exact, back to the original type.
    let case = |path: PathBuf| {
        let is_bf16 = contents(&open(&path)).values().any(|(dtype, ..)| *dtype == TensorType::Float(ElementType::Bf16));
        (path, Outtype::F32, is_bf16.then_some(ElementType::Bf16))
    };
    let fixtures = cases::all()
        .into_iter()
        .filter(can_be_said)
        .flat_map(|case| [case.path.join("target"), case.path.join("assistant")]);
    // The demo pair is in bf16.
    let demo = ["target", "assistant"].map(|part| (demo(part), Outtype::F32, Some(ElementType::Bf16)));
    let same = ["target", "assistant"].map(|part| (self::demo(part), Outtype::Bf16, Some(ElementType::Bf16)));
    let sources: Vec<_> = fixtures.filter(|path| path.exists()).map(case).chain(demo).chain(same).collect();
    assert!(sources.len() >= 12, "{}", sources.len());
    for (i, (source, outtype, back)) in sources.iter().enumerate() {
        for layout in [AssistantLayout::Nextn, AssistantLayout::Mtp] {
            let name = format!("{i}-{}", layout.architecture());
            let file = directory.path().join(format!("{name}.gguf"));
            let gguf = convert(source, &file, &ToGgufOptions { layout, ..options(*outtype) });
            let again = directory.path().join(name);
            let options = ToHuggingFaceOptions { outtype: *back, ..ToHuggingFaceOptions::default() };
            to_hugging_face(&gguf, &again, &options).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
            let (want, got) = (contents(&open(source)), contents(&open(&again)));
            assert!(want.keys().eq(got.keys()), "{}", source.display());
            for (name, want) in &want {
                assert!(*want == got[name], "{}: {name} differs", source.display());
            }
        }
    }
}

/// The tokens that end a text.
fn ends(model: &Path) -> BTreeSet<u32> {
    let engine = Engine::load(&EngineOptions::new(model)).expect("an engine");
    engine.end_of_generation().iter().copied().collect()
}

/// A text ends at the same tokens, of which Qwen's have several.
#[test]
fn the_ends_of_texts_are_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    for source in [demo("target"), cases::demo_qwen().path] {
        let (file, again) = (directory.path().join("target.gguf"), directory.path().join("again"));
        let gguf = convert(&source, &file, &options(Outtype::Bf16));
        to_hugging_face(&gguf, &again, &ToHuggingFaceOptions::default()).expect("a directory");
        assert_eq!([ends(&file), ends(&again)], [ends(&source), ends(&source)], "{}", source.display());
        std::fs::remove_dir_all(again).expect("the directory");
    }
}

/// A copy of the directory `source`; `change` edits the object in its file `name`, which begins empty if it has none.
fn changed(source: &Path, to: &Path, name: &str, change: impl FnOnce(&mut Value)) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).expect("a directory");
    for entry in std::fs::read_dir(source).expect("a directory").map(|entry| entry.expect("an entry")) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
    let text = std::fs::read(to.join(name)).unwrap_or_else(|_| b"{}".to_vec());
    let mut value = serde_json::from_slice(&text).expect("JSON");
    change(&mut value);
    std::fs::write(to.join(name), value.to_string()).expect("written");
}

/// Those that only config.json lists as well, and more than llama.cpp has keys for.
#[test]
fn the_ends_of_texts_in_any_file_are_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let many: Vec<u32> = (300..400).collect();
    for source in [demo("target"), cases::demo_qwen().path] {
        for (ids, has_generation_config) in [(json!([7, 415]), false), (json!([415]), true), (json!(many), false)] {
            changed(&source, &at("source"), "config.json", |config| {
                let text =
                    if config["text_config"]["eos_token_id"].is_null() { config } else { &mut config["text_config"] };
                text["eos_token_id"] = ids.clone();
            });
            if !has_generation_config {
                std::fs::remove_file(at("source/generation_config.json")).expect("removed");
            }
            convert(&at("source"), &at("target.gguf"), &options(Outtype::Bf16));
            let want = ends(&at("source"));
            let last = ids.as_array().and_then(|ids| ids.last()?.as_u64()).expect("an id");
            assert!(want.contains(&(last as u32)), "{want:?}");
            assert_eq!(ends(&at("target.gguf")), want, "{}, {ids}", source.display());
        }
    }
}

/// A GGUF file's ids are signed: one of 2^31 or more would be another one, or none.
#[test]
fn ids_that_a_gguf_file_cannot_have_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for field in ["eos_token_id", "suppress_tokens"] {
        for id in [1u32 << 31, u32::MAX] {
            changed(&demo("target"), &at("source"), "generation_config.json", |config| config[field] = json!([1, id]));
            let refused = to_gguf(&open(&at("source")), at("x.gguf"), &options(Outtype::F16));
            let error = refused.expect_err("an id").to_string();
            let what = format!("has token {id} in {field}, but a GGUF file's ids are at most 2147483647; remove it");
            assert!(error.contains(&what) && !at("x.gguf").exists(), "{error}");
        }
    }
}

/// The publisher's parameters, unless the other format cannot represent them, and the tokens that are never written.
#[test]
fn the_sampling_parameters_are_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for (parameters, is_kept) in [
        (json!({"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}), true),
        (json!({"temperature": 0.6, "repetition_penalty": 1.1}), true),
        (json!({"top_k": 64}), true),
        (json!({"do_sample": false, "temperature": 0.7}), true),
        (json!({"temperature": 0.7, "typical_p": 0.9}), false),
    ] {
        changed(&demo("target"), &at("source"), "generation_config.json", |config| {
            config.as_object_mut().expect("an object").extend(parameters.as_object().expect("an object").clone());
            config["suppress_tokens"] = json!([5, 9]);
        });
        let gguf = convert(&at("source"), &at("target.gguf"), &options(Outtype::Bf16));
        to_hugging_face(&gguf, at("again"), &ToHuggingFaceOptions::default()).expect("a directory");
        let want = open(&at("source")).sampling_defaults().expect("parameters").filter(|_| is_kept);
        for checkpoint in [gguf, open(&at("again"))] {
            assert_eq!(checkpoint.sampling_defaults().expect("parameters"), want, "{parameters}");
            assert_eq!(checkpoint.generation_tokens().expect("tokens").suppressed, [5, 9], "{parameters}");
        }
        std::fs::remove_dir_all(at("again")).expect("the directory");
    }
    changed(&demo("target"), &at("source"), "generation_config.json", |config| config["top_p"] = json!(1.5));
    let error = to_gguf(&open(&at("source")), at("x.gguf"), &options(Outtype::F16)).expect_err("a share").to_string();
    assert!(error.contains("generation_config.json: top_p") && !at("x.gguf").exists(), "{error}");
}

/// A GGUF file has only the vocabulary and the merges: tokenizers with other steps would have other ids.
#[test]
fn tokenizers_that_a_gguf_file_cannot_represent_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let (gemma, qwen) = (demo("target"), cases::demo_qwen().path);
    let refused = |source: &Path, field: &str, change: &dyn Fn(&mut Value)| {
        changed(source, &at("source"), "tokenizer.json", change);
        let error = to_gguf(&open(&at("source")), at("x.gguf"), &options(Outtype::F16)).expect_err(field).to_string();
        let said = format!("tokenizer.json: {field}: is ");
        assert!(error.contains(&said) && error.contains("cannot represent") && !error.contains('\n'), "{error}");
    };
    let prepended =
        |step: &Value| json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, step]});
    refused(&gemma, "normalizer", &|file| file["normalizer"] = prepended(&file["normalizer"]));
    refused(&gemma, "normalizer", &|file| file["normalizer"] = Value::Null);
    refused(&qwen, "normalizer", &|file| file["normalizer"] = Value::Null);
    refused(&gemma, "pre_tokenizer", &|file| {
        file["pre_tokenizer"] =
            json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": false})
    });
    // Qwen2's.
    refused(&qwen, "pre_tokenizer", &|file| {
        let pattern = &mut file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
        *pattern = pattern.as_str().expect("a pattern").replace("[\\p{L}\\p{M}]", "\\p{L}").into();
    });
    for source in [&gemma, &qwen] {
        refused(source, "model.ignore_merges", &|file| file["model"]["ignore_merges"] = true.into());
        for flag in ["lstrip", "rstrip", "single_word"] {
            refused(source, &format!("added_tokens.{flag}"), &|file| file["added_tokens"][1][flag] = true.into());
        }
    }
    let bos = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"a": {"id": "a", "ids": [1], "tokens": ["a"]}}});
    refused(&qwen, "post_processor", &|file| file["post_processor"] = bos.clone());
    refused(&qwen, "added_tokens.normalized", &|file| {
        file["added_tokens"][1]["normalized"] = true.into();
        file["added_tokens"][1]["content"] = "\u{212b}".into();
    });
    // Steps that change nothing.
    changed(&gemma, &at("source"), "tokenizer.json", |file| {
        file["pre_tokenizer"] = Value::Null;
        file["normalizer"] = json!({"type": "Sequence", "normalizers": [file["normalizer"]]});
        file["added_tokens"][1]["normalized"] = true.into();
    });
    convert(&at("source"), &at("x.gguf"), &options(Outtype::F16));
}

/// Templates see the same tokens, and those with names are kept.
#[test]
fn templates_and_their_tokens_are_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let tokens = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ mask_token }}";
    changed(&demo("target"), &at("source"), "tokenizer_config.json", |config| {
        config["chat_template"] = json!([{"name": "default", "template": tokens}, {"name": "tool_use", "template": format!("tools {tokens}")}]);
    });
    let gguf = convert(&at("source"), &at("target.gguf"), &options(Outtype::Bf16));
    to_hugging_face(&gguf, at("again"), &ToHuggingFaceOptions::default()).expect("a directory");
    let with_tools = ChatOptions { tools: vec![Json::parse("{}").expect("JSON")], ..ChatOptions::default() };
    for checkpoint in [open(&at("source")), gguf, open(&at("again"))] {
        let template = ChatTemplate::of(&checkpoint).expect("no error").expect("a template");
        let prompt = |options: &ChatOptions| template.render(&[Message::user("Hi")], options).expect("a prompt");
        assert_eq!(prompt(&ChatOptions::default()), "<bos><eos><pad><unk><mask>");
        assert_eq!(prompt(&with_tools), "tools <bos><eos><pad><unk><mask>");
    }
}

/// Templates with names would be mixed with those of another conversion: a cancelled one leaves none, and a directory
/// that has some is refused.
#[test]
fn templates_with_names_are_not_mixed() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    changed(&demo("target"), &at("source"), "tokenizer_config.json", |config| {
        config["chat_template"] =
            json!([{"name": "default", "template": "chat"}, {"name": "tool_use", "template": "tools"}]);
    });
    let gguf = convert(&at("source"), &at("target.gguf"), &options(Outtype::Bf16));
    let cancel = Cancel::default();
    let on_progress = cancel.clone();
    let progress: Option<Arc<dyn Fn(Progress) + Send + Sync>> = Some(Arc::new(move |_| on_progress.cancel()));
    let cancelled = ToHuggingFaceOptions { progress, cancel, ..ToHuggingFaceOptions::default() };
    to_hugging_face(&gguf, at("again"), &cancelled).expect_err("cancelled");
    assert_eq!(std::fs::read_dir(at("again")).expect("a directory").count(), 0);

    // A killed one leaves its files, and is done again.
    std::fs::create_dir(at("again/additional_chat_templates")).expect("a directory");
    std::fs::write(at("again/additional_chat_templates/other.jinja"), "other").expect("a file");
    let error = to_hugging_face(&gguf, at("again"), &ToHuggingFaceOptions::default()).expect_err("templates");
    assert!(error.to_string().contains("has files of a checkpoint already"), "{error}");
    assert!(at("again/additional_chat_templates/other.jinja").exists());
    std::fs::write(at("again/model.safetensors.partial"), "").expect("a file");
    to_hugging_face(&gguf, at("again"), &ToHuggingFaceOptions::default()).expect("a directory");
    let entries = std::fs::read_dir(at("again/additional_chat_templates")).expect("a directory");
    let names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(names, ["tool_use.jinja"]);
}

/// The reference's ids, from the GGUF file and from the directory converted back.
#[test]
fn the_text_is_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    for case in cases::all().into_iter().filter(can_be_said) {
        let at = |name: &str| directory.path().join(format!("{}-{name}", case.name));
        let gguf = convert(&case.path.join("target"), &at("target.gguf"), &options(Outtype::F32));
        to_hugging_face(&gguf, at("target"), &ToHuggingFaceOptions::default()).expect("a directory");
        for (i, checkpoint) in [gguf, open(&at("target"))].into_iter().enumerate() {
            let target = Target::load(&checkpoint, Isa::best()).expect("a target");
            let mut kv = cache(&target, ElementType::F32, Isa::best());
            let mut output = pass(&target, &mut kv, &case.ids("input_ids"), OutputRows::Last);
            let state = output.hidden.clone();
            let (greedy, margins) = (case.ids("greedy_ids"), case.floats("greedy_margins"));
            let (error, name) = (case.tolerances().0, &case.name);
            if let Some(assistant) = case.assistant_path() {
                let layouts = [AssistantLayout::Nextn, AssistantLayout::Mtp];
                let files = layouts.map(|layout| {
                    let path = at(&format!("{}.gguf", layout.architecture()));
                    convert(&assistant, &path, &ToGgufOptions { layout, ..options(Outtype::F32) })
                });
                let again = at(&format!("assistant-{i}"));
                to_hugging_face(&files[0], &again, &ToHuggingFaceOptions::default()).expect("a directory");
                for checkpoint in files.iter().chain([&open(&again)]) {
                    let assistant = Assistant::load(checkpoint, &target, Isa::best()).expect("an assistant");
                    let step = cases::draft_step(&assistant, case.ids("first_id")[0], &state, &kv);
                    let best = argmax(&values(&step.scores.logits)) as usize;
                    let id = step.scores.ids.map_or(best as u32, |ids| ids[best]);
                    same_id(id, case.ids("draft_ids")[0], case.floats("draft_margins")[0], error, name);
                }
            }
            for (i, (want, margin)) in greedy.iter().zip(margins).enumerate() {
                same_id(argmax(&values(&output.logits)), *want, margin, error, &format!("{name}: token {i}"));
                output = pass(&target, &mut kv, &[*want], OutputRows::Last);
            }
        }
    }
}

/// The demo pair, including the tokenizer, through an engine.
#[test]
fn a_pair_talks_as_before() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    convert(&demo("target"), &at("target.gguf"), &options(Outtype::Bf16));
    convert(&demo("assistant"), &at("assistant.gguf"), &options(Outtype::Bf16));
    let text = |target: PathBuf, assistant: PathBuf| {
        let engine = Engine::load(&EngineOptions::new(target).with_assistant(assistant)).expect("an engine");
        let prompt = engine.tokenizer().expect("one").encode("impl Iterator for Counter {\n").expect("tokens");
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let speculation = Speculation::With(SpeculationOptions::mtp(4));
        let options = GenerateOptions { max_tokens: 48, speculation, ..GenerateOptions::default() };
        let mut generation = session.generate(&prompt, &options).expect("a generation");
        let text: String = generation.by_ref().map(|piece| piece.expect("a piece").text).collect();
        (text, generation.statistics().accepted)
    };
    assert_eq!(text(at("target.gguf"), at("assistant.gguf")), text(demo("target"), demo("assistant")));
}

/// Types as chosen by llama.cpp's converter.
#[test]
fn norms_scales_and_routers_stay_exact() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("moe.gguf");
    let fixture = cases::named("moe").path.join("target");
    convert(&fixture, &file, &options(Outtype::Q8_0));
    let gguf = Gguf::open(&file).expect("a file");
    let type_of = |name: &str| gguf.info(name).unwrap_or_else(|| panic!("{name} is missing")).type_id();
    assert_eq!(type_of("token_embd.weight"), 8);
    assert_eq!(type_of("blk.0.attn_q.weight"), 8);
    assert_eq!(type_of("blk.0.ffn_gate_up_exps.weight"), 8);
    assert_eq!(type_of("blk.0.ffn_down_exps.weight"), 1, "rows of 24 are not whole blocks");
    for exact in ["ffn_gate_inp.weight", "ffn_gate_inp.scale", "ffn_down_exps.scale", "attn_norm.weight"] {
        assert_eq!(type_of(&format!("blk.0.{exact}")), 0, "{exact}");
    }
    assert_eq!(type_of("rope_freqs.weight"), 0);
}

#[test]
fn nothing_is_dropped_in_silence() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("nested.gguf");
    let fixture = cases::named("nested").path.join("target");
    let report = to_gguf(&open(&fixture), &file, &options(Outtype::F32)).expect("a file");
    let towers = open(&fixture).names().iter().filter(|name| name.contains("vision")).count();
    assert!(towers > 0 && report.left_out.len() == towers, "{:?}", report.left_out);

    let source = copy(&directory.path().join("copy"), |header, data| {
        let end = data.len();
        let entry = json!({"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]});
        header["model.layers.1.layer_rascal"] = entry;
        data.extend([0; 4]);
    });
    let error = to_gguf(&source, &file, &options(Outtype::F32)).expect_err("a stranger").to_string();
    assert!(error.contains("layers.1.layer_rascal"), "{error}");
    let leave = ToGgufOptions { unknown: Unknown::LeftOut, ..options(Outtype::F32) };
    let report = to_gguf(&source, &file, &leave).expect("a file");
    assert!(report.left_out.iter().any(|(name, _)| name.contains("layer_rascal")));
}

/// A copy of the fixture `source` with the tensors that `name` renames to something, and another config.json.
fn renamed(
    source: &str,
    to: &Path,
    name: impl Fn(&str) -> Option<String>,
    change: impl FnOnce(&mut Value),
) -> Checkpoint {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(source);
    changed(&source, to, "config.json", change);
    let bytes = std::fs::read(source.join("model.safetensors")).expect("the fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let kept: Vec<_> = file.tensors().into_iter().filter_map(|(own, tensor)| Some((name(&own)?, tensor))).collect();
    serialize_to_file(kept, None, &to.join("model.safetensors")).expect("written");
    open(to)
}

/// Also those without which a GGUF file would be read as another model's: a tied output head, K = V.
#[test]
fn a_missing_tensor_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let (source, file) = (directory.path().join("source"), directory.path().join("x.gguf"));
    let whole: fn(&mut Value) = |_| {};
    let untied: fn(&mut Value) = |config| config["tie_word_embeddings"] = false.into();
    let dedicated: fn(&mut Value) = |config| config["mtp_use_dedicated_embeddings"] = true.into();
    for (fixture, config, missing) in [
        ("edge/target", untied, "lm_head.weight"),
        ("edge/target", whole, "model.layers.3.self_attn.v_proj.weight"),
        ("edge/target", whole, "model.layers.6.mlp.up_proj.weight"),
        ("moe/target", whole, "model.layers.0.router.per_expert_scale"),
        ("edge/assistant", untied, "lm_head.weight"),
        ("edge/assistant", whole, "masked_embedding.token_ordering"),
        ("edge/assistant", whole, "model.layers.1.self_attn.q_norm.weight"),
        ("qwen35-dense/target", whole, "lm_head.weight"),
        ("qwen35-nested/target", untied, "lm_head.weight"),
        ("qwen35-dense/target", whole, "model.layers.2.linear_attn.A_log"),
        ("qwen35-dense/target", whole, "mtp.fc.weight"),
        ("qwen35-dense/target", dedicated, "mtp.embed_tokens.weight"),
        ("qwen35-moe/target", whole, "mtp.layers.0.mlp.experts.7.down_proj.weight"),
        ("qwen35-moe/target", whole, "model.layers.1.mlp.experts.down_proj"),
    ] {
        let own = renamed(fixture, &source, |name| (name != missing).then(|| name.to_owned()), config);
        let error = to_gguf(&own, &file, &options(Outtype::F32)).map(drop).expect_err(missing).to_string();
        let apart = missing.replace("experts.down_proj", "experts.0.down_proj.weight");
        let is_named = error.contains(missing) || error.contains(&apart);
        assert!(is_named && error.contains("is missing") && !error.contains('\n'), "{fixture}, {missing}: {error}");
        assert!(!file.exists(), "{fixture}, {missing}");
    }
    // In a GGUF file, what a reader cannot take for another configuration.
    let fixture = cases::named("edge").path;
    for (part, missing, own) in [
        ("target", "blk.6.ffn_up.weight", "layers.6.mlp.up_proj.weight"),
        ("assistant", "blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
    ] {
        let (whole, partial) = (directory.path().join("whole.gguf"), directory.path().join("partial.gguf"));
        convert(&fixture.join(part), &whole, &options(Outtype::F32));
        drop_tensor(&whole, &partial, missing);
        let to = directory.path().join(part);
        let result = to_hugging_face(&open(&partial), &to, &ToHuggingFaceOptions::default());
        let error = result.map(drop).expect_err(missing).to_string();
        assert!(error.contains(own) && error.contains("is missing") && !to.exists(), "{error}");
    }
}

/// Writes the GGUF file `from` without the tensor `name`.
fn drop_tensor(from: &Path, to: &Path, name: &str) {
    let source = Gguf::open(from).expect("a file");
    let mut file = GgufWriter::create(to).expect("a writer");
    source.keys().for_each(|key| file.copy(key, source.metadata(key).expect("a value")).expect("a key"));
    let kept: Vec<_> = source.tensors().filter(|tensor| tensor.name() != name).collect();
    assert_eq!(kept.len() + 1, source.tensors().count(), "no tensor {name}");
    for info in &kept {
        file.tensor(info.name(), info.type_id(), info.shape()).expect("a tensor");
    }
    let mut file = file.begin().expect("the tensors");
    for info in kept {
        let tensor = source.tensor(info.name()).expect("readable").expect("there");
        file.write(info.name(), tensor.bytes.as_slice()).expect("written");
    }
    file.finish().expect("a file");
}

/// Its target embeds its tokens, so that an assistant with an output head of its own needs no embedding.
#[test]
fn an_untied_assistant_without_an_embedding_is_converted() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let case = cases::named("edge");
    let target = case.target(Isa::best());
    let name = |own: &str| Some(own.replace("model.embed_tokens.weight", "lm_head.weight"));
    let untied = |config: &mut Value| config["tie_word_embeddings"] = false.into();
    let source = renamed("edge/assistant", &at("source"), name, untied);
    let gguf = convert(source.path(), &at("assistant.gguf"), &options(Outtype::F32));
    to_hugging_face(&gguf, at("again"), &ToHuggingFaceOptions::default()).expect("a directory");
    for checkpoint in [&source, &gguf, &open(&at("again"))] {
        let assistant = Assistant::load(checkpoint, &target, Isa::best()).expect("an assistant");
        assert!(assistant.has_centroids());
        let findings =
            verify(&VerifyOptions { assistant: Some(checkpoint.path().to_owned()), ..VerifyOptions::default() });
        assert!(findings.iter().all(|finding| finding.outcome == Outcome::Passed), "{findings:?}");
    }
}

/// Progress counts the bytes of tensors, and ends with all of them.
#[test]
fn progress_ends_with_the_total() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let last = Arc::new(Mutex::new(None));
    let sink = last.clone();
    let progress: Option<Arc<dyn Fn(Progress) + Send + Sync>> =
        Some(Arc::new(move |progress: Progress| *sink.lock().expect("the last progress") = Some(progress)));
    let ends_with = |bytes: u64| {
        let last = last.lock().expect("the last progress").take();
        assert_eq!(last, Some(Progress { loaded: bytes, total: bytes }));
    };

    let to_file = ToGgufOptions { progress: progress.clone(), ..options(Outtype::F16) };
    ends_with(to_gguf(&open(&demo("target")), at("f16.gguf"), &to_file).expect("a file").bytes);
    let gguf = open(&at("f16.gguf"));
    let to_mix = QuantizeOptions { progress: progress.clone(), ..QuantizeOptions::new(Mix::Q8_0) };
    let quantized = quantize(&gguf, at("q8_0.gguf"), &to_mix).expect("a file");
    ends_with(quantized.iter().map(|tensor| tensor.bytes).sum());
    let back = ToHuggingFaceOptions { progress, ..ToHuggingFaceOptions::default() };
    ends_with(to_hugging_face(&gguf, at("back"), &back).expect("a directory").bytes);
}

/// What a caller cancels after the first write leaves no new file, and an old one as it was.
#[test]
fn a_conversion_that_is_cancelled_leaves_no_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let gguf = convert(&demo("target"), &at("f16.gguf"), &options(Outtype::F16));
    std::fs::write(at("old.gguf"), "old").expect("a file");
    let cancelling = |cancel: &Cancel| -> Option<Arc<dyn Fn(Progress) + Send + Sync>> {
        let cancel = cancel.clone();
        Some(Arc::new(move |_| cancel.cancel()))
    };

    let cancel = Cancel::default();
    let to_file = ToGgufOptions { progress: cancelling(&cancel), cancel, ..options(Outtype::F32) };
    let error = to_gguf(&open(&demo("target")), at("old.gguf"), &to_file).expect_err("cancelled");
    assert!(matches!(error, Error::Cancelled), "{error}");

    let cancel = Cancel::default();
    let to_mix = QuantizeOptions { progress: cancelling(&cancel), cancel, ..QuantizeOptions::new(Mix::Q8_0) };
    let error = quantize(&gguf, at("old.gguf"), &to_mix).expect_err("cancelled");
    assert!(matches!(error, Error::Cancelled), "{error}");

    let cancel = Cancel::default();
    let back = ToHuggingFaceOptions { progress: cancelling(&cancel), cancel, ..ToHuggingFaceOptions::default() };
    let error = to_hugging_face(&gguf, at("back"), &back).expect_err("cancelled");
    assert!(matches!(error, Error::Cancelled), "{error}");

    assert_eq!(std::fs::read(at("old.gguf")).expect("the file"), b"old");
    let names = |path: &Path| -> BTreeSet<String> {
        let entries = std::fs::read_dir(path).expect("a directory");
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names(directory.path()), BTreeSet::from(["back", "f16.gguf", "old.gguf"].map(String::from)));
    assert_eq!(names(&at("back")), BTreeSet::new());
}

#[test]
fn bad_input_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let refused = |result: foretoken::Result<()>, what: &str| {
        let message = result.expect_err(what).to_string();
        assert!(message.contains(what) && !message.contains('\n'), "{message:?} does not say {what:?}");
    };
    convert(&demo("target"), &at("q8.gguf"), &options(Outtype::Q8_0));
    let quantized = open(&at("q8.gguf"));
    refused(to_gguf(&quantized, at("x.gguf"), &options(Outtype::F16)).map(drop), "is already a GGUF file");
    let back = ToHuggingFaceOptions::default();
    refused(to_hugging_face(&quantized, at("back"), &back).map(drop), "is q8_0; only floating-point tensors");
    refused(to_hugging_face(&open(&demo("target")), at("back"), &back).map(drop), "is not a GGUF file");
    refused(to_gguf(&open(&demo("target")), at("x.bin"), &options(Outtype::F16)).map(drop), "does not end in .gguf");
    refused(to_gguf(&open(&demo("target")), at("no/x.gguf"), &options(Outtype::F16)).map(drop), "does not exist");
    convert(&demo("target"), &at("f16.gguf"), &options(Outtype::F16));
    let floats = open(&at("f16.gguf"));
    std::fs::write(at("a file"), "").expect("written");
    refused(to_hugging_face(&floats, at("f16.gguf"), &back).map(drop), "ends in .gguf");
    refused(to_hugging_face(&floats, at("other.gguf"), &back).map(drop), "ends in .gguf");
    refused(to_hugging_face(&floats, at("a file"), &back).map(drop), "is a file; use the name of a directory");
    assert!(!at("other.gguf").exists());
    to_hugging_face(&floats, at("whole"), &back).expect("a new directory");
    refused(to_hugging_face(&floats, at("whole"), &back).map(drop), "has files of a checkpoint already");
    std::fs::create_dir(at("project")).expect("a directory");
    std::fs::write(at("project/config.json"), "{}").expect("written");
    refused(to_hugging_face(&floats, at("project"), &back).map(drop), "has files of a checkpoint already");
    assert_eq!(std::fs::read_to_string(at("project/config.json")).expect("kept"), "{}");
    let elsewhere = ToGgufOptions { tokenizer: Some(at("nowhere")), ..options(Outtype::F16) };
    refused(to_gguf(&open(&demo("target")), at("x.gguf"), &elsewhere).map(drop), "has no tokenizer.json");
    // Half precision ends at 65504.
    let large = copy(&at("large"), |_, data| data.fill(0x7f)); // 3.39e38 everywhere
    refused(to_gguf(&large, at("x.gguf"), &options(Outtype::F16)).map(drop), "use one with more range");
    // As many tokens would be written, whatever the configuration claims.
    for size in [511, 2_000_000_000] {
        let dense = cases::named("dense").path.join("target");
        changed(&dense, &at("source"), "config.json", |config| config["vocab_size"] = size.into());
        let what = format!("the configuration implies [{size}, ");
        refused(to_gguf(&open(&at("source")), at("x.gguf"), &options(Outtype::F16)).map(drop), &what);
    }
    // Readers of GGUF files refuse it.
    for source in [demo("target"), cases::demo_qwen().path] {
        changed(&source, &at("source"), "config.json", |config| {
            let text = if config["text_config"].is_object() { &mut config["text_config"] } else { config };
            text["rms_norm_eps"] = json!(0);
        });
        let what = "config.json: rms_norm_eps: is 0, which a GGUF file cannot represent";
        refused(to_gguf(&open(&at("source")), at("x.gguf"), &options(Outtype::F16)).map(drop), what);
    }
    assert!(!at("x.gguf").exists() && !at("x.gguf.partial").exists());
}

/// The dense fixture's target with another header and other data.
fn copy(path: &Path, change: impl FnOnce(&mut Value, &mut Vec<u8>)) -> Checkpoint {
    let fixture = cases::named("dense").path.join("target");
    std::fs::create_dir(path).expect("a directory");
    std::fs::copy(fixture.join("config.json"), path.join("config.json")).expect("copied");
    let bytes = std::fs::read(fixture.join("model.safetensors")).expect("the fixture");
    let (len, rest) = bytes.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let mut data = data.to_vec();
    change(&mut header, &mut data);
    header.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(path.join("model.safetensors"), bytes).expect("written");
    open(path)
}

/// A killed run's partial file is replaced, and the old file stays until the new one is complete.
#[test]
fn an_interrupted_run_is_redone() {
    let directory = tempfile::tempdir().expect("a directory");
    let (file, partial) = (directory.path().join("demo.gguf"), directory.path().join("demo.gguf.partial"));
    std::fs::write(&partial, b"GGUF, and then the power failed").expect("written");
    convert(&demo("target"), &file, &options(Outtype::Bf16));
    assert!(!partial.exists());
    let whole = std::fs::read(&file).expect("the file");
    let writer = GgufWriter::create(&file).expect("a writer");
    assert!(partial.exists() && std::fs::read(&file).expect("the file") == whole);
    let busy = to_gguf(&open(&demo("target")), &file, &options(Outtype::F16)).expect_err("two writers").to_string();
    assert!(busy.contains("being written by another process"), "{busy}");
    drop(writer);
    assert!(!partial.exists() && std::fs::read(&file).expect("the file") == whole);
}

/// ggml's names end within 64 bytes.
#[test]
fn names_of_tensors_fit_ggmls() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut file = GgufWriter::create(directory.path().join("names.gguf")).expect("a writer");
    file.tensor(&"n".repeat(63), 0, &[32]).expect("a tensor");
    for name in [String::new(), "n".repeat(64)] {
        let error = file.tensor(&name, 0, &[32]).expect_err("a name").to_string();
        assert!(error.contains(&format!("has a name of {} bytes, must have 1 to 63", name.len())), "{error}");
    }
}

/// On a file system of two megabytes: the error is clear, and the old file is still there.
#[test]
fn a_full_disk_is_a_clear_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let test = std::env::current_exe().expect("this test");
    let script =
        r#"mount -t tmpfs -o size=2m none "$0" || exit 42; DISK="$0" exec "$1" --ignored --exact on_a_small_disk"#;
    let unshare = std::process::Command::new("unshare")
        .args(["-rm", "sh", "-c", script])
        .arg(directory.path())
        .arg(test)
        .output();
    let output = match unshare {
        // `unshare` itself fails with 1, `mount` above with 42.
        Ok(output) if ![Some(1), Some(42)].contains(&output.status.code()) => output,
        _ => return skipped("small file system", "no file systems can be mounted here"),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "run by a_full_disk_is_a_clear_error, on a disk of its own"]
fn on_a_small_disk() {
    let file = PathBuf::from(std::env::var("DISK").expect("a disk")).join("demo.gguf");
    std::fs::write(&file, b"the old file").expect("written");
    let error = to_gguf(&open(&demo("target")), &file, &options(Outtype::F16)).expect_err("too small");
    let message = error.to_string();
    assert!(message.contains("the disk is full after") && message.contains("free space"), "{message}");
    assert!(matches!(&error, Error::Io { cause, .. } if cause.kind() == ErrorKind::StorageFull), "{error:?}");
    assert_eq!(std::fs::read(&file).expect("the old file"), b"the old file");
    assert!(!file.with_extension("gguf.partial").exists());
}

/// PyPI's `gguf`, if installed, reads names, shapes, types and values as we wrote them.
#[test]
fn another_reader_agrees() {
    let python = |arguments: &[&std::ffi::OsStr]| std::process::Command::new("python3").args(arguments).output();
    if !python(&["-c".as_ref(), "import gguf".as_ref()]).is_ok_and(|output| output.status.success()) {
        return skipped("gguf in Python", "it is not installed (pip install gguf numpy)");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/check_gguf.py");
    for part in ["target", "assistant"] {
        let outtypes = [Outtype::F32, Outtype::F16, Outtype::Bf16, Outtype::Q8_0].into_iter().enumerate();
        for (i, outtype) in outtypes {
            let layout = if i % 2 == 0 { AssistantLayout::Nextn } else { AssistantLayout::Mtp };
            let file = directory.path().join(format!("{part}-{i}.gguf"));
            convert(&demo(part), &file, &ToGgufOptions { layout, ..options(outtype) });
            let source = demo(part).join("model.safetensors");
            let output =
                python(&[script.as_ref(), file.as_ref(), "--source".as_ref(), source.as_ref()]).expect("python3");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}
