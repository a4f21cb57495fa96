//! Converts checkpoints between formats: Hugging Face directories to GGUF like llama.cpp's
//! converter, and floating-point GGUF files back.
//!
//! Tensors are streamed in chunks of a few megabytes. The new file gets its name once it is complete.

mod hugging_face;
pub(crate) mod options;
pub(crate) mod plan;
mod representable;
mod tokenizer_file;
mod vocabulary;

pub use hugging_face::{ToHuggingFaceOptions, to_hugging_face};
pub use options::{AssistantLayout, Outtype, ToGgufOptions, Unknown};

use std::collections::HashSet;
use std::path::Path;

use super::generation::GenerationTokens;
use super::gguf::{self, GgufWriter, MAX_IDS, TensorWriter};
use super::{Checkpoint, Progress, model_name};
use crate::speculative::Cancel;
use crate::{Error, Result, family};
use plan::{Description, check_complete, write_tensor};
use vocabulary::SpecialIds;

/// The result of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Tensors written.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Skipped tensors: name and reason.
    pub left_out: Vec<(String, &'static str)>,
}

/// Writes the Hugging Face checkpoint `source`, a target's or an assistant's, as the GGUF file `destination`.
///
/// # Errors
/// If the checkpoint is malformed or of no supported family, lacks a tensor that its configuration implies or has it in
/// another shape, has some that belong to no text model, the file cannot be written, or the conversion is cancelled: an
/// existing file is unchanged then.
pub fn to_gguf(source: &Checkpoint, destination: impl AsRef<Path>, options: &ToGgufOptions) -> Result<Report> {
    let destination = destination.as_ref();
    if source.path().is_file() {
        return Err(Error::file(source.path(), "is already a GGUF file; use a Hugging Face directory"));
    }
    check_destination(source, destination)?;
    let tokenizer = options.tokenizer.as_deref().unwrap_or(source.path());
    if options.tokenizer.is_some() && !tokenizer.join("tokenizer.json").is_file() {
        return Err(Error::file(tokenizer, "has no tokenizer.json; use the directory of the model's tokenizer"));
    }
    let Description { architecture, vocab_size, bos, eos, describe, constants, planned, left_out, implied } =
        family::describe(source, options)?;
    check_complete(source, &implied, planned.iter().flat_map(|tensor| &tensor.sources))?;
    let mut file = GgufWriter::create(destination)?;
    file.value("general.architecture", architecture)?;
    file.value("general.type", "model")?;
    let own = source.path().canonicalize().unwrap_or_else(|_| source.path().to_owned());
    file.value("general.name", options.name.as_deref().unwrap_or(&model_name(own)))?;
    file.value("general.file_type", options.outtype.file_type())?;
    file.value("general.quantization_version", 2u32)?;
    describe(&mut file)?;
    let ids = SpecialIds { bos, eos: eos.first().copied(), ..SpecialIds::default() };
    vocabulary::declare(&mut file, architecture, tokenizer, vocab_size, &ids)?;
    declare_generation(&mut file, source, &eos)?;
    for (name, values) in &constants {
        file.tensor(name, 0, &[values.len()])?;
    }
    for tensor in &planned {
        file.tensor(&tensor.name, tensor.dtype.ggml_id().unwrap_or(0), &tensor.shape)?;
    }
    let (progress, cancel) = (options.progress.as_deref(), &options.cancel);
    let mut file = ProgressWriter { tensors: file.begin()?, written: 0, progress, cancel };
    for (name, values) in &constants {
        file.write(name, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())?;
    }
    for tensor in &planned {
        for name in &tensor.sources {
            let write = |bytes: &[u8]| file.write(&tensor.name, bytes);
            write_tensor(source, name, tensor.dtype, tensor.change.as_ref(), write)?;
        }
    }
    file.tensors.finish()?;
    Ok(Report { tensors: planned.len() + constants.len(), bytes: file.written, left_out })
}

/// Declares what generation_config.json has: the ends of a text, with those of config.json (`eos`), the
/// suppressed tokens, and the sampling parameters.
fn declare_generation(file: &mut GgufWriter, source: &Checkpoint, eos: &[u32]) -> Result<()> {
    let GenerationTokens { mut end, suppressed } = source.generation_tokens()?;
    end.extend(eos);
    let mut seen = HashSet::new();
    end.retain(|id| seen.insert(*id));
    for (name, field, ids) in
        [("eos_token_ids", "eos_token_id", end), ("suppress_tokens", "suppress_tokens", suppressed)]
    {
        if ids.len() > MAX_IDS {
            let problem = format!("has {} tokens in {field}, but a GGUF file may have {MAX_IDS}", ids.len());
            return Err(Error::file(source.path(), format!("{problem}; remove some from its JSON files")));
        }
        let signed = |id: &u32| {
            i32::try_from(*id).map_err(|_| {
                let problem = format!("has token {id} in {field}, but a GGUF file's ids are at most {}", i32::MAX);
                Error::file(source.path(), format!("{problem}; remove it from its JSON files"))
            })
        };
        let ids: Vec<i32> = ids.iter().map(signed).collect::<Result<_>>()?;
        if !ids.is_empty() {
            file.array(&format!("tokenizer.ggml.{name}"), ids)?;
        }
    }
    match source.sampling_defaults()? {
        Some(sampling) => gguf::declare_sampling(file, source.path(), &sampling),
        None => Ok(()),
    }
}

/// Refuses the mapped source as destination, and paths that cannot be a file.
pub(crate) fn check_destination(source: &Checkpoint, destination: &Path) -> Result<()> {
    if destination.extension().is_none_or(|extension| extension != "gguf") {
        return Err(Error::file(destination, "does not end in .gguf; use a name that does"));
    }
    // A path that does not exist is not the source.
    let Ok(own) = destination.canonicalize() else { return Ok(()) };
    match source.files().iter().any(|file| file.canonicalize().is_ok_and(|file| file == own)) {
        true => Err(Error::file(destination, "is the source itself; use another name")),
        false => Ok(()),
    }
}

/// Writes a GGUF file's tensors, reports the progress, and can be cancelled between two writes.
pub(crate) struct ProgressWriter<'a> {
    pub tensors: TensorWriter,
    pub written: u64, // bytes
    pub progress: Option<&'a (dyn Fn(Progress) + Send + Sync)>,
    pub cancel: &'a Cancel,
}

impl ProgressWriter<'_> {
    /// As [`TensorWriter::write`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.cancel.check()?;
        self.tensors.write(name, bytes)?;
        self.written += bytes.len() as u64;
        if let Some(progress) = self.progress {
            progress(Progress { loaded: self.written, total: self.tensors.total_bytes() });
        }
        Ok(())
    }
}
