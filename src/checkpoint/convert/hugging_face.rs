//! Converts floating-point GGUF files to Hugging Face directories.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretoken_kernels::ElementType;
use serde_json::{Map, Value, json};

use super::Report;
use super::options::Unknown;
use super::plan::{Change, Directory, LeftOut, ORDERING, check_complete, get, leave_out, tensor_error, write_tensor};
use crate::checkpoint::generation::sampling_fields;
use crate::checkpoint::gguf::{self, Gguf};
use crate::checkpoint::partial::Partial;
use crate::checkpoint::{Checkpoint, Fields, Progress, TensorType};
use crate::speculative::Cancel;
use crate::{Error, Result, chat, family};

/// Options of a conversion to a directory.
#[derive(Clone, Default)]
pub struct ToHuggingFaceOptions {
    /// Type of all floating-point tensors. Default: the file's.
    pub outtype: Option<ElementType>,
    /// Tensors that belong to no text model. Default: refused.
    pub unknown: Unknown,
    /// Called as tensors are written. Default: none.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Cancels the conversion from any thread, or from `progress`, before the next write. Default: a new handle.
    pub cancel: Cancel,
}

/// Files beside the weights, and the directory of the templates with names.
const WRITTEN: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    chat::NAMED_TEMPLATES,
];

/// A tensor of the new file.
struct Planned {
    source: String, // its name in the checkpoint
    name: String,
    dtype: TensorType,
    shape: Vec<usize>,
    len: usize, // bytes
    change: Option<Change>,
}

/// Writes the GGUF checkpoint `source` as the directory `destination`: config.json, the file's token data, and
/// model.safetensors last, so that a directory that has it is complete.
///
/// # Errors
/// If the file is malformed or of no supported family, lacks a tensor that its configuration implies, has quantized
/// tensors or some that belong to no text model, the directory's name is a GGUF file's or that of a file, it has
/// files of a checkpoint that are not those of an interrupted conversion, a file cannot be written, or the conversion is
/// cancelled.
pub fn to_hugging_face(
    source: &Checkpoint,
    destination: impl AsRef<Path>,
    options: &ToHuggingFaceOptions,
) -> Result<Report> {
    let destination = destination.as_ref();
    let Some(gguf) = source.gguf() else {
        return Err(Error::file(source.path(), "is not a GGUF file; use one"));
    };
    check_directory(destination)?;
    let directory = family::directory(source)?;
    let (planned, left_out) = plan(source, gguf, &directory, options)?;
    check_complete(source, &directory.implied, planned.iter().map(|tensor| &tensor.source))?;
    std::fs::create_dir_all(destination).map_err(Error::io(destination))?;
    // Locked: another process that converts into the directory fails here.
    let weights = Partial::create(&destination.join("model.safetensors"))?;
    let remove = |path: PathBuf| std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(path));
    let remove_written = || WRITTEN.iter().for_each(|name| drop(remove(destination.join(name))));
    remove_written(); // of an interrupted conversion
    let written = write_configuration(source, gguf, destination, directory)
        .and_then(|()| write_tensors(source, weights, &planned, options));
    if written.is_err() {
        remove_written();
    }
    Ok(Report { tensors: planned.len(), bytes: written?, left_out })
}

/// Writes the files beside the weights.
fn write_configuration(source: &Checkpoint, gguf: &Gguf, destination: &Path, directory: Directory) -> Result<()> {
    let at = |name: &str| destination.join(name);
    let config = at("config.json");
    write(&config, &pretty(&directory.config))?;
    if !(directory.reads_back)(&Fields::read(&config)?)? {
        return Err(Error::file(&config, "cannot represent this GGUF file's layer configuration; keep the GGUF file"));
    }
    let text = directory.config.get("text_config").unwrap_or(&directory.config);
    let mut tokens = json!({ "bos_token_id": text["bos_token_id"], "eos_token_id": text["eos_token_id"] });
    let suppressed = gguf::suppressed_tokens(gguf)?;
    if !suppressed.is_empty() {
        tokens["suppress_tokens"] = json!(suppressed);
    }
    if let Some(sampling) = source.sampling_defaults()? {
        sampling_fields(source.path(), &sampling).into_iter().for_each(|(name, value)| tokens[name] = value);
    }
    write(&at("generation_config.json"), &pretty(&tokens))?;
    if let Some(tokenizer) = gguf::tokenizer(gguf)? {
        let text = tokenizer.to_string(false).map_err(|e| Error::Tokenizer(e.to_string()))?;
        write(&at("tokenizer.json"), text.as_bytes())?;
        write(&at("tokenizer_config.json"), &pretty(&tokenizer_config(gguf)))?;
    }
    write_templates(gguf, destination)
}

/// The special tokens by name.
fn tokenizer_config(gguf: &Gguf) -> Value {
    // The class of any tokenizer.json.
    let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
    for (name, token) in chat::gguf_special_tokens(gguf) {
        config[name] = json!(token);
    }
    if let Some(add) = gguf.metadata("tokenizer.ggml.add_bos_token").and_then(|value| value.as_bool()) {
        config["add_bos_token"] = json!(add);
    }
    config
}

/// Writes the chat templates: the default one, and those with names.
fn write_templates(gguf: &Gguf, destination: &Path) -> Result<()> {
    let text = |key: &str| gguf.metadata(key).and_then(|value| value.as_str());
    if let Some(template) = text("tokenizer.chat_template") {
        write(&destination.join("chat_template.jinja"), template.as_bytes())?;
    }
    for key in gguf.keys() {
        let Some(name) = key.strip_prefix("tokenizer.chat_template.") else { continue };
        let is_file_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if let Some(template) = text(key).filter(|_| is_file_name) {
            let directory = destination.join(chat::NAMED_TEMPLATES);
            std::fs::create_dir_all(&directory).map_err(Error::io(&directory))?;
            write(&directory.join(format!("{name}.jinja")), template.as_bytes())?;
        }
    }
    Ok(())
}

/// Refuses destinations that cannot be a directory, that are meant as a file, or that have files of a checkpoint, which
/// would be mixed with the new ones, except those of an interrupted conversion.
fn check_directory(destination: &Path) -> Result<()> {
    let has = |names: &[&str]| names.iter().any(|name| destination.join(name).exists());
    let is_interrupted = has(&["model.safetensors.partial"]);
    let problem = if destination.extension().is_some_and(|extension| extension == "gguf") {
        "ends in .gguf, but a GGUF file is converted to a directory; use the name of one"
    } else if destination.is_file() {
        "is a file; use the name of a directory"
    } else if has(&["model.safetensors", "model.safetensors.index.json"]) || !is_interrupted && has(&WRITTEN) {
        "has files of a checkpoint already; use the name of a new directory"
    } else {
        return Ok(());
    };
    Err(Error::file(destination, problem))
}

fn plan(
    source: &Checkpoint,
    gguf: &Gguf,
    directory: &Directory,
    options: &ToHuggingFaceOptions,
) -> Result<(Vec<Planned>, LeftOut)> {
    let (mut planned, mut left_out, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for own in gguf.tensors().map(|tensor| tensor.name()) {
        if directory.left_out.contains(&own) {
            left_out.push((own.to_owned(), "is in config.json"));
            continue;
        }
        // Experts' gate and up projections may be separate in GGUF; they become one tensor.
        if gguf.info(&own.replace("ffn_up_exps", "ffn_gate_exps")).is_some_and(|gate| gate.name() != own) {
            continue;
        }
        let Some(weight) = gguf.hugging_face_name(&own.replace("ffn_gate_exps", "ffn_gate_up_exps")) else {
            others.push(own.to_owned());
            continue;
        };
        let tensor = get(source, &weight)?;
        let (dtype, size) = match tensor.dtype {
            TensorType::Float(element) => {
                let element = options.outtype.unwrap_or(element);
                (TensorType::Float(element), element.size())
            }
            TensorType::I32 | TensorType::I64 if weight == ORDERING => (TensorType::I64, 8),
            other => {
                let problem = "only floating-point tensors can be converted; use a file that is not quantized";
                return Err(tensor_error(source, own, format!("is {}; {problem}", other.name())));
            }
        };
        // Head tensors have no `model.` prefix.
        let root = if directory.outside.iter().any(|prefix| weight.starts_with(prefix)) { "" } else { "model." };
        let (name, len) = (format!("{root}{weight}"), size * tensor.shape.iter().product::<usize>());
        let shape = (directory.shape)(&weight, tensor.shape);
        planned.push(Planned { source: weight, name, dtype, shape, len, change: (directory.change)(own) });
    }
    leave_out(source, directory.family, options.unknown, others, &mut left_out)?;
    Ok((planned, left_out))
}

/// Writes a small file atomically.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = Partial::create(path)?;
    file.put(bytes)?;
    file.publish()
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Writes the safetensors file: the length of the header, the header, the tensors.
fn write_tensors(
    source: &Checkpoint,
    mut file: Partial,
    planned: &[Planned],
    options: &ToHuggingFaceOptions,
) -> Result<u64> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut end = 0usize;
    for tensor in planned {
        let start = end;
        end += tensor.len;
        let dtype = match tensor.dtype {
            TensorType::Float(ElementType::F32) => "F32",
            TensorType::Float(ElementType::F16) => "F16",
            TensorType::Float(ElementType::Bf16) => "BF16",
            _ => "I64",
        };
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    file.expect((8 + header.len() + end) as u64);
    file.put(&(header.len() as u64).to_le_bytes())?;
    file.put(&header)?;
    let begin = file.len();
    for planned in planned {
        write_tensor(source, &planned.source, planned.dtype, planned.change.as_ref(), |bytes| {
            options.cancel.check()?;
            file.put(bytes)?;
            if let Some(progress) = &options.progress {
                progress(Progress { loaded: file.len() - begin, total: end as u64 });
            }
            Ok(())
        })?;
    }
    file.publish()?;
    Ok(end as u64)
}
