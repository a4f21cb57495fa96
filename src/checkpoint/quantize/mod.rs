//! Quantizes GGUF files with llama.cpp's mixes.

mod importance;
pub(super) mod mix;

pub use importance::Importance;
pub use mix::Mix;

use std::path::Path;
use std::sync::Arc;

use super::convert::{ProgressWriter, check_destination};
use super::gguf::{GgmlType, Gguf, GgufWriter, Keys, architecture};
use super::recode::{Weighted, recode};
use super::tensor::tensor_type;
use super::{Checkpoint, Progress, RawTensor, TensorType};
use crate::speculative::Cancel;
use crate::{Error, Result};
use mix::{FileFacts, TensorFacts, is_quantized, is_value, type_of};

/// Handling of matrices that are already quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Requantize {
    /// Refused: quantization errors would accumulate.
    #[default]
    Refused,
    /// Quantized again.
    Allowed,
}

/// The rules that choose each tensor's type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rules {
    /// llama.cpp's rules: more bits for tables, heads, and some of attn_v and ffn_down.
    #[default]
    Mixed,
    /// One type for all matrices whose rows are whole blocks of it.
    Pure,
}

/// Options of a quantization.
#[derive(Clone)]
pub struct QuantizeOptions {
    /// The mix.
    pub mix: Mix,
    /// The rules. Default: llama.cpp's.
    pub rules: Rules,
    /// Importance matrix that weights errors. Default: none.
    pub importance: Option<Importance>,
    /// Already quantized matrices. Default: refused.
    pub requantize: Requantize,
    /// Called as tensors are written. Default: none.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Cancels the quantization from any thread, or from `progress`, before the next write. Default: a new handle.
    pub cancel: Cancel,
}

impl QuantizeOptions {
    /// `mix` with defaults.
    pub fn new(mix: Mix) -> Self {
        let (rules, requantize) = (Rules::default(), Requantize::default());
        Self { mix, rules, importance: None, requantize, progress: None, cancel: Cancel::default() }
    }
}

/// One tensor of the new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantized {
    /// Its name.
    pub name: String,
    /// Its old type.
    pub from: &'static str,
    /// Its new type.
    pub to: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// Whether errors were weighted by importance.
    pub by_importance: bool,
}

/// Writes the GGUF checkpoint `source` as `destination`, quantized, on all threads of the current rayon
/// pool. Memory: a few megabytes besides the maps.
///
/// # Errors
/// If the file is malformed, a matrix is already quantized or has values beyond the range of its new type, importances
/// are for another model, the new file cannot be written, or the quantization is cancelled: an existing file is
/// unchanged then.
pub fn quantize(
    source: &Checkpoint,
    destination: impl AsRef<Path>,
    options: &QuantizeOptions,
) -> Result<Vec<Quantized>> {
    let destination = destination.as_ref();
    let Some(gguf) = source.gguf() else {
        return Err(Error::file(source.path(), "is a directory of safetensors; convert it to GGUF first"));
    };
    check_destination(source, destination)?;
    let planned = plan(gguf, options)?;
    let mut file = GgufWriter::create(destination)?;
    declare(&mut file, gguf, options)?;
    for tensor in &planned {
        file.tensor(&tensor.name, tensor.to_id, &tensor.shape)?;
    }
    let (progress, cancel) = (options.progress.as_deref(), &options.cancel);
    let mut file = ProgressWriter { tensors: file.begin()?, written: 0, progress, cancel };
    let mut report = Vec::with_capacity(planned.len());
    for planned in &planned {
        let (name, start) = (&planned.name, file.written);
        let tensor = gguf.tensor(name)?.ok_or_else(|| gguf.error(name, "is missing; download the file again"))?;
        let mut by_importance = false;
        if planned.to_id == tensor.type_id {
            file.write(name, tensor.bytes.as_slice())?;
            tensor.bytes.release_all();
        } else {
            let (inputs, rows) = (planned.inputs(), planned.rows_per_matrix());
            let count = planned.shape.iter().product::<usize>() / (inputs * rows);
            let importances = options.importance.as_ref().map(|all| all.of(name, count, inputs)).transpose()?.flatten();
            by_importance = importances.is_some();
            let weighted = importances.map(|importances| Weighted { importances, rows });
            let raw = RawTensor { dtype: tensor_type(tensor.type_id), shape: tensor.shape, bytes: tensor.bytes };
            let error = |problem: String| gguf.error(name, problem);
            recode(&raw, tensor_type(planned.to_id), weighted, error, |bytes| file.write(name, bytes))?;
        }
        let name = name.clone();
        let (from, to) = (GgmlType::name_of(tensor.type_id), GgmlType::name_of(planned.to_id));
        report.push(Quantized { name, from, to, bytes: file.written - start, by_importance });
    }
    file.tensors.finish()?;
    Ok(report)
}

/// The source's metadata without the keys that describe its files and types.
fn declare(file: &mut GgufWriter, gguf: &Gguf, options: &QuantizeOptions) -> Result<()> {
    let own = ["general.alignment", "general.file_type", "general.quantization_version"];
    for key in
        gguf.keys().filter(|key| !own.contains(key) && !key.starts_with("split.") && !key.starts_with("quantize."))
    {
        if let Some(value) = gguf.metadata(key) {
            file.copy(key, value)?;
        }
    }
    file.value("general.file_type", options.mix.file_type())?;
    file.value("general.quantization_version", 2u32)?;
    if let Some(importance) = &options.importance {
        let name = importance.path().file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        file.value("quantize.imatrix.file", &*name)?;
        file.value("quantize.imatrix.entries_count", importance.len() as u32)?;
    }
    Ok(())
}

struct Planned {
    name: String,
    shape: Vec<usize>,
    to_id: u32,
}

impl Planned {
    fn inputs(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows of one matrix of a stack.
    fn rows_per_matrix(&self) -> usize {
        self.shape.len().checked_sub(2).map_or(1, |outer| self.shape[outer])
    }
}

fn plan(gguf: &Gguf, options: &QuantizeOptions) -> Result<Vec<Planned>> {
    let experts = || gguf.tensors().any(|tensor| tensor.name().contains(mix::EXPERTS));
    if options.mix == Mix::MXFP4_MOE && options.rules == Rules::Mixed && !experts() {
        let problem =
            "mxfp4_moe quantizes experts, but the file has none; use iq4_xs, or one type for all (pure rules)";
        return Err(Error::argument("mix", problem));
    }
    let values: Vec<usize> =
        gguf.tensors().filter(|tensor| is_value(tensor.name())).filter_map(|tensor| layer(tensor.name())).collect();
    let keys = Keys::new(gguf, architecture(gguf)?);
    let of_file = FileFacts {
        layers: keys.size("block_count")?,
        values: values.len(),
        group: group(&keys),
        tied: gguf.info("output.weight").is_none(),
        importance: options.importance.is_some(),
    };
    let planned = gguf.tensors().map(|tensor| {
        let (name, shape) = (tensor.name().to_owned(), tensor.shape().to_vec());
        let stored = tensor_type(tensor.type_id());
        if !is_quantized(&name, shape.len()) {
            return Ok(Planned { name, shape, to_id: tensor.type_id() });
        }
        let layer = layer(&name).unwrap_or(0);
        let values_before = values.iter().filter(|other| **other < layer).count();
        let of_tensor = TensorFacts { layer, values_before, inputs: shape.last().copied().unwrap_or(1) };
        let preferred = match options.rules {
            Rules::Mixed => type_of(options.mix, &name, &of_tensor, &of_file),
            Rules::Pure => mix::fitting(options.mix.weight_type(), of_tensor.inputs),
        };
        match stored {
            TensorType::Quantized(_) if stored != preferred && options.requantize == Requantize::Refused => {
                let error = gguf.error(&name, format!("is already {}", stored.name()));
                let remedy = "quantize its source file, or allow quantizing it again";
                return Err(Error::argument("requantize", format!("{error}; {remedy}")));
            }
            TensorType::Quantized(_) if stored != preferred && gguf.has_scale(&name) => {
                return Err(gguf.error(&name, "has a separate scale; quantize its source file"));
            }
            TensorType::Quantized(_) | TensorType::Float(_) => {}
            _ => return Err(gguf.error(&name, "has a type that cannot be quantized; convert the checkpoint again")),
        }
        Ok(Planned { name, shape, to_id: preferred.ggml_id().unwrap_or(tensor.type_id()) })
    });
    planned.collect()
}

fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Query heads per K/V head of the first layer; 1 if the file does not say.
fn group(keys: &Keys<'_>) -> usize {
    let first = |key: &str| {
        let value = keys.value(key)?;
        value.as_u64().or_else(|| value.as_array()?.iter().next()?.as_u64())
    };
    let heads = first("attention.head_count").zip(first("attention.head_count_kv").filter(|heads| *heads > 0));
    heads.map_or(1, |(heads, kv)| (heads / kv) as usize)
}
