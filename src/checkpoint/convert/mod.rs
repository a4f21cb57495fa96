//! Checkpoints from one file format to another: Hugging Face directories to GGUF as llama.cpp's converter writes it,
//! and GGUF files of floating point back.
//!
//! Tensors are streamed in chunks of a few megabytes. The new file gets its name when it is complete.

mod config_json;
mod describe;
mod hugging_face;
mod vocabulary;

pub use hugging_face::{ToHuggingFace, to_hugging_face};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretoken_kernels::quant::WeightType;
use foretoken_kernels::{ElementType, Isa};

use super::gguf::{self, GgufWriter, TensorWriter};
use super::recode::{RecodeError, recode};
use super::{Checkpoint, Fields, Progress, RawTensor, TensorType, token_ordering};
use crate::gemma4::{AssistantConfig, TextConfig, is_tower};
use crate::{Error, Result};
use vocabulary::SpecialIds;

/// The type of the matrices in a converted file. Norms, scales and routers are F32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outtype {
    /// Single precision.
    F32,
    /// Half precision; an error where a value is too large for it.
    F16,
    /// bf16, the type of published checkpoints.
    Bf16,
    /// 8 bits; F16 for rows that are no multiple of 32.
    Q8_0,
}

impl Outtype {
    fn tensor_type(self, inputs: usize) -> TensorType {
        match self {
            Self::F32 => F32,
            Self::F16 => TensorType::Float(ElementType::F16),
            Self::Bf16 => TensorType::Float(ElementType::Bf16),
            Self::Q8_0 if inputs.is_multiple_of(WeightType::Q8_0.block_len()) => {
                TensorType::Quantized(WeightType::Q8_0)
            }
            Self::Q8_0 => TensorType::Float(ElementType::F16),
        }
    }

    /// llama.cpp's file type id (`general.file_type`).
    fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }
}

impl std::str::FromStr for Outtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            "q8_0" => Ok(Self::Q8_0),
            _ => Err(Error::argument("outtype", format!("{name:?} is unknown; f32, f16, bf16 and q8_0 are"))),
        }
    }
}

/// Layout of an assistant's GGUF file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AssistantLayout {
    /// llama.cpp's: `gemma4-assistant`, `nextn.*`. Centroids have names that its loader ignores.
    #[default]
    Nextn,
    /// A fork's older one: `gemma4_assistant`, `mtp.*`.
    Mtp,
}

impl AssistantLayout {
    /// The architecture name of the layout.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Nextn => "gemma4-assistant",
            Self::Mtp => "gemma4_assistant",
        }
    }
}

impl std::str::FromStr for AssistantLayout {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = [Self::Nextn, Self::Mtp].into_iter().find(|layout| layout.architecture() == name);
        let unknown = || format!("{name:?} is unknown; gemma4-assistant and gemma4_assistant are");
        known.ok_or_else(|| Error::argument("layout", unknown()))
    }
}

/// Handling of tensors that are not part of a Gemma 4 text model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unknown {
    /// An error that lists them.
    #[default]
    Refused,
    /// They are skipped; the report lists them.
    LeftOut,
}

/// Options of a conversion to GGUF.
#[derive(Clone)]
pub struct ToGguf {
    /// Type of the matrices. Default: F16.
    pub outtype: Outtype,
    /// Layout of an assistant's file. Default: llama.cpp's.
    pub layout: AssistantLayout,
    /// Directory whose tokenizer goes into the file. Default: the checkpoint's own.
    pub tokenizer: Option<PathBuf>,
    /// `general.name`. Default: the directory's name.
    pub name: Option<String>,
    /// Tensors of no text model. Default: refused. Image and audio towers are always skipped.
    pub unknown: Unknown,
    /// Called as tensors are written. Default: none.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl Default for ToGguf {
    fn default() -> Self {
        let (outtype, layout, unknown) = (Outtype::F16, AssistantLayout::default(), Unknown::default());
        Self { outtype, layout, tokenizer: None, name: None, unknown, progress: None }
    }
}

/// The result of a conversion.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of them.
    pub bytes: u64,
    /// Skipped tensors: name and reason.
    pub left_out: Vec<(String, &'static str)>,
}

const F32: TensorType = TensorType::Float(ElementType::F32);

/// A tensor of the new file.
struct Planned {
    source: String, // its name in the checkpoint
    name: String,   // its name in the file
    dtype: TensorType,
}

enum Config {
    Target(TextConfig),
    Assistant(AssistantConfig),
}

/// Writes the Hugging Face checkpoint `source`, a target's or an assistant's, as the GGUF file `destination`.
///
/// # Errors
/// If the checkpoint is malformed or not Gemma 4's, has tensors that no text model has, or the file cannot be written:
/// an existing one stays as it is then.
pub fn to_gguf(source: &Checkpoint, destination: &Path, options: &ToGguf) -> Result<Report> {
    if source.path().is_file() {
        return Err(Error::file(source.path(), "is a GGUF file already; give a Hugging Face directory"));
    }
    check_destination(source, destination)?;
    let config = read_config(source)?;
    let text = match &config {
        Config::Target(text) => text,
        Config::Assistant(assistant) => &assistant.text,
    };
    let (planned, left_out) = plan(source, &config, options)?;
    let architecture = match &config {
        Config::Target(_) => "gemma4",
        Config::Assistant(_) => options.layout.architecture(),
    };
    let mut file = GgufWriter::create(destination)?;
    file.value("general.architecture", architecture)?;
    file.value("general.type", "model")?;
    let own = source.path().canonicalize().unwrap_or_else(|_| source.path().to_owned());
    let own = own.file_name().map_or_else(|| "Gemma 4".into(), |name| name.to_string_lossy());
    file.value("general.name", options.name.as_deref().unwrap_or(&own))?;
    file.value("general.file_type", options.outtype.file_type())?;
    file.value("general.quantization_version", 2u32)?;
    match &config {
        Config::Target(text) => describe::target(&mut file, source.path(), text)?,
        Config::Assistant(assistant) => describe::assistant(&mut file, source.path(), assistant, options.layout)?,
    }
    let tokenizer = options.tokenizer.as_deref().unwrap_or(source.path());
    let eos = text.eos_token_ids.first().copied();
    let ids = SpecialIds { bos: text.bos_token_id, eos, ..SpecialIds::default() };
    vocabulary::declare(&mut file, architecture, tokenizer, text.vocab_size, &ids)?;
    let suppressed = source.generation_tokens()?.suppressed;
    if !suppressed.is_empty() {
        file.array("tokenizer.ggml.suppress_tokens", suppressed.iter().map(|id| *id as i32))?;
    }
    let freqs = describe::rope_freqs(text);
    if let Some(freqs) = &freqs {
        file.tensor(ROPE_FREQS, 0, &[freqs.len()])?;
    }
    for tensor in &planned {
        let shape = &get(source, &tensor.source)?.shape;
        file.tensor(&tensor.name, tensor.dtype.ggml_id().unwrap_or(0), shape)?;
    }
    let mut job = Job { tensors: file.begin()?, written: 0, progress: options.progress.as_deref() };
    if let Some(freqs) = &freqs {
        job.write(ROPE_FREQS, &freqs.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())?;
    }
    for tensor in &planned {
        job.tensor(source, tensor)?;
    }
    let bytes = job.written;
    job.tensors.finish()?;
    Ok(Report { tensors: planned.len() + usize::from(freqs.is_some()), bytes, left_out })
}

/// Refuses to overwrite the mapped source, and paths that cannot be a file.
pub(crate) fn check_destination(source: &Checkpoint, destination: &Path) -> Result<()> {
    if destination.extension().is_none_or(|extension| extension != "gguf") {
        return Err(Error::file(destination, "does not end in .gguf, so nothing would open it; give such a name"));
    }
    // A path that does not exist is not the source.
    let Ok(own) = destination.canonicalize() else { return Ok(()) };
    match source.files().iter().any(|file| file.canonicalize().is_ok_and(|file| file == own)) {
        true => Err(Error::file(destination, "is the source itself; give another name")),
        false => Ok(()),
    }
}

const ROPE_FREQS: &str = "rope_freqs.weight";
const ORDERING: &str = "masked_embedding.token_ordering";

fn read_config(source: &Checkpoint) -> Result<Config> {
    let kind = Fields::read(source.path().join("config.json"))?.optional_string("model_type")?;
    match kind.is_some_and(|kind| kind.ends_with("_assistant")) {
        true => source.assistant_config().map(Config::Assistant),
        false => source.target_config().map(Config::Target),
    }
}

type LeftOut = Vec<(String, &'static str)>;

/// The new file's tensors, layer by layer, and the skipped ones.
fn plan(source: &Checkpoint, config: &Config, options: &ToGguf) -> Result<(Vec<Planned>, LeftOut)> {
    let (prefix, text, layout) = match config {
        Config::Target(text) => (source.text_prefix()?, text, AssistantLayout::Nextn),
        Config::Assistant(assistant) => ("model.", &assistant.text, options.layout),
    };
    let (mut planned, mut left_out, mut strangers) = (Vec::new(), Vec::new(), Vec::new());
    for source_name in source.names() {
        let name = source_name.strip_prefix(prefix).unwrap_or(&source_name);
        if name == "lm_head.weight" && text.tie_word_embeddings {
            left_out.push((source_name, "the embedding is the head"));
            continue;
        }
        if is_tower(&source_name) {
            left_out.push((source_name, "image and audio towers are no part of a text model"));
            continue;
        }
        match gguf_name(name, layout) {
            Some(gguf_name) => {
                let dtype = stored_type(&gguf_name, &get(source, &source_name)?, options.outtype);
                planned.push(Planned { source: source_name, name: gguf_name, dtype });
            }
            None => strangers.push(source_name),
        }
    }
    match options.unknown {
        Unknown::Refused if !strangers.is_empty() => return Err(refused(source, &strangers)),
        _ => left_out.extend(strangers.into_iter().map(|name| (name, "no Gemma 4 text model has it"))),
    }
    // Order: tensors outside the layers, then layer by layer.
    planned.sort_by_cached_key(|tensor| (layer(&tensor.name), tensor.name.clone()));
    Ok((planned, left_out))
}

fn refused(source: &Checkpoint, strangers: &[String]) -> Error {
    let problem = format!(
        "has {} tensors that no Gemma 4 text model has ({}); leave them out explicitly, or fix the checkpoint",
        strangers.len(),
        strangers.join(", ")
    );
    Error::file(source.path(), problem)
}

fn gguf_name(name: &str, layout: AssistantLayout) -> Option<String> {
    let names = gguf::gguf_names(name);
    let older = names.iter().find(|name| name.starts_with("mtp.")).filter(|_| layout == AssistantLayout::Mtp);
    older.or(names.first()).cloned()
}

fn layer(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// As in llama.cpp's converter: norms, scales and routers stay F32.
fn stored_type(name: &str, tensor: &RawTensor, outtype: Outtype) -> TensorType {
    if matches!(tensor.dtype, TensorType::I64 | TensorType::I32) {
        return TensorType::I32;
    }
    let exact = tensor.shape.len() < 2
        || name.ends_with("_norm.weight")
        || name.ends_with("ffn_gate_inp.weight")
        || !name.ends_with(".weight");
    match exact {
        true => F32,
        false => outtype.tensor_type(tensor.shape.last().copied().unwrap_or(1)),
    }
}

fn get(source: &Checkpoint, name: &str) -> Result<RawTensor> {
    source.get(name)?.ok_or_else(|| tensor_error(source, name, "is missing; download the checkpoint again"))
}

fn tensor_error(source: &Checkpoint, name: &str, problem: impl Into<String>) -> Error {
    Error::Tensor { path: source.path().to_owned(), tensor: name.to_owned(), problem: problem.into() }
}

/// A GGUF file that is being written.
struct Job<'a> {
    tensors: TensorWriter,
    written: u64,
    progress: Option<&'a (dyn Fn(Progress) + Send + Sync)>,
}

impl Job<'_> {
    fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.tensors.write(name, bytes)?;
        self.written += bytes.len() as u64;
        if let Some(progress) = self.progress {
            progress(Progress { loaded: self.written, total: self.tensors.total_bytes() });
        }
        Ok(())
    }

    fn tensor(&mut self, source: &Checkpoint, planned: &Planned) -> Result<()> {
        let tensor = get(source, &planned.source)?;
        if planned.dtype == TensorType::I32 {
            if !planned.source.ends_with(ORDERING) {
                return Err(tensor_error(source, &planned.source, "holds integers; only a token_ordering does"));
            }
            let ids = token_ordering(&tensor).map_err(|problem| tensor_error(source, &planned.source, problem))?;
            return self.write(&planned.name, &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        }
        let recoded = recode(Isa::best(), &tensor, planned.dtype, None, |bytes| self.write(&planned.name, bytes));
        recoded.map_err(|error| match error {
            RecodeError::Tensor(problem) => tensor_error(source, &planned.source, problem),
            RecodeError::Sink(error) => error,
        })
    }
}
