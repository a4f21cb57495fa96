//! A family's contents of a GGUF file, and of a directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use foretoken_kernels::ElementType;
use serde_json::Value;

use super::options::{Outtype, ToGgufOptions, Unknown};
use crate::checkpoint::gguf::GgufWriter;
use crate::checkpoint::gguf::names::layer;
use crate::checkpoint::recode::recode;
use crate::checkpoint::separate_experts::{Place, place};
use crate::checkpoint::unsupported_tensors::{STRAY_SCALE, is_scale};
use crate::checkpoint::{Checkpoint, Expected, Fields, RawTensor, TensorType, is_tower, token_ordering};
use crate::{Error, Result};

/// The contents of a GGUF file, except the tokenizer.
pub(crate) struct Description {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub bos: Option<u32>,
    /// End-of-generation tokens of the configuration.
    pub eos: Vec<u32>,
    /// Declares the configuration's keys.
    pub describe: Describe,
    /// Tensors that only GGUF files have: name and values.
    pub constants: Vec<(&'static str, Vec<f32>)>,
    pub planned: Vec<Planned>,
    pub left_out: LeftOut,
    /// The tensors that the configuration implies, with the checkpoint's names.
    pub implied: Vec<Expected>,
}

/// The contents of a Hugging Face directory made from a GGUF file.
pub(crate) struct Directory {
    /// The family's name.
    pub family: &'static str,
    /// config.json.
    pub config: Value,
    /// Whether config.json represents the GGUF file's configuration.
    pub reads_back: ReadsBack,
    /// Tensors implied by the configuration or found only in GGUF files.
    pub left_out: &'static [&'static str],
    /// Prefixes of names outside the text model's prefix.
    pub outside: &'static [&'static str],
    /// The shape of a tensor, from its name there and its shape in the GGUF file.
    pub shape: fn(&str, Vec<usize>) -> Vec<usize>,
    /// The change to a tensor, by its name in the GGUF file.
    pub change: ChangeOf,
    /// The tensors that the configuration implies, with Hugging Face's names.
    pub implied: Vec<Expected>,
}

/// Declares keys.
pub(crate) type Describe = Box<dyn FnOnce(&mut GgufWriter) -> Result<()>>;

/// Compares a configuration with the fields of a file.
pub(crate) type ReadsBack = Box<dyn Fn(&Fields) -> Result<bool>>;

/// The change to a tensor, by its name.
pub(crate) type ChangeOf = Box<dyn Fn(&str) -> Option<Change>>;

/// A change to a tensor before it is stored, or the problem with it.
pub(crate) type Change = Box<dyn Fn(RawTensor) -> Result<RawTensor, String>>;

/// A tensor of the new file.
pub(crate) struct Planned {
    /// Its parts' names in the checkpoint, in order.
    pub sources: Vec<String>,
    /// Its name in the file.
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: TensorType,
    pub change: Option<Change>,
}

/// A tensor's place in a stack, if it is part of one, and its name in the checkpoint.
type Part = (Option<Place>, String);

/// Ending of the name of a token ordering.
pub(super) const ORDERING: &str = "masked_embedding.token_ordering";

/// Skipped tensors, and the reasons.
pub(super) type LeftOut = Vec<(String, &'static str)>;

/// The new file's tensors, layer by layer, and the skipped ones. `name` maps a tensor, for separate experts their stack,
/// to its name in the file of a `family`, if it has one, or to the reason for skipping it.
///
/// # Errors
/// If there are unnamed tensors that may not be skipped, or several of one name.
pub(crate) fn plan(
    source: &Checkpoint,
    options: &ToGgufOptions,
    family: &str,
    name: impl Fn(&str) -> Result<Option<String>, &'static str>,
) -> Result<(Vec<Planned>, LeftOut)> {
    let (mut left_out, mut others) = (Vec::new(), Vec::new());
    let mut named: BTreeMap<(Option<u32>, String), Vec<Part>> = BTreeMap::new();
    for own in source.names() {
        let (stack, place) = place(&own).map_or((own.clone(), None), |(stack, place)| (stack, Some(place)));
        match name(&stack) {
            Err(why) => left_out.push((own, why)),
            Ok(None) => others.push(own),
            // Tensors outside the layers come first, then layer by layer.
            Ok(Some(name)) => {
                let layer = layer(&name, "blk.").map(|(index, _)| index);
                named.entry((layer, name)).or_default().push((place, own));
            }
        }
    }
    leave_out(source, family, options.unknown, others, &mut left_out)?;
    let planned = named.into_iter().map(|((_, name), mut parts)| {
        parts.sort();
        if let [(None, first), (_, second), ..] = &parts[..] {
            let problem = format!("is {name} in a GGUF file, as is {first}; download the checkpoint again");
            return Err(tensor_error(source, second, problem));
        }
        let first = source.type_and_shape(&parts[0].1);
        let (dtype, mut shape) = first.ok_or_else(|| tensor_error(source, &parts[0].1, MISSING))?;
        if let Some(Place { per_expert, .. }) = parts[0].0 {
            // Any shape: `check_complete` compares it with the configuration's.
            let rows = shape.first().map_or(0, |rows| rows.saturating_mul(per_expert));
            shape = [&[parts.len() / per_expert, rows], shape.get(1..).unwrap_or_default()].concat();
        }
        // These files drop dimensions of one element.
        if shape.len() > 1 && !name.contains("_exps.") {
            shape.retain(|size| *size != 1);
        }
        let dtype = stored_type(&name, &shape, dtype, options.outtype);
        let sources = parts.into_iter().map(|(_, own)| own).collect();
        Ok(Planned { sources, name, shape, dtype, change: None })
    });
    Ok((planned.collect::<Result<_>>()?, left_out))
}

/// Refuses a checkpoint without a tensor that its configuration implies, in another shape, or with further experts.
/// Readers would not notice all of them: a GGUF file without an output head has a tied one, a Gemma 4's layer without V
/// has K = V, and experts are one tensor there.
///
/// # Errors
/// If a tensor of `implied` is not among `written`, names in the source, or has another shape, or an expert's matrix is
/// not implied.
pub(super) fn check_complete<'a>(
    source: &Checkpoint,
    implied: &[Expected],
    written: impl Iterator<Item = &'a String>,
) -> Result<()> {
    let written: BTreeSet<&str> = written.map(String::as_str).collect();
    let names: BTreeSet<&str> = implied.iter().map(|tensor| tensor.name.as_str()).collect();
    let prefix = if source.gguf().is_some() { "model." } else { "" }; // GGUF names have none
    let is_missing = |name: &str| !written.contains(name.strip_prefix(prefix).unwrap_or(name));
    let mut missing = implied.iter().map(|tensor| tensor.name.as_str()).filter(|name| is_missing(name));
    let Some(first) = missing.next() else {
        if let Some(name) = written.iter().find(|name| place(name).is_some() && !names.contains(*name)) {
            let problem = "is of an expert that the configuration lacks; download the checkpoint again";
            return Err(tensor_error(source, name, problem));
        }
        return implied.iter().try_for_each(|tensor| check_shape(source, tensor));
    };
    let others = match missing.count() {
        0 => String::new(),
        count => format!(", as are {count} others"),
    };
    let problem = format!("is missing{others}, but the configuration implies it; download the checkpoint again");
    Err(tensor_error(source, first, problem))
}

fn check_shape(source: &Checkpoint, Expected { name, shape, .. }: &Expected) -> Result<()> {
    let own = source.type_and_shape(name).map(|(_, shape)| shape).unwrap_or_default();
    match source.is_shape(&own, shape) {
        true => Ok(()),
        false => {
            let problem = format!("has shape {own:?}, the configuration implies {shape:?}");
            Err(tensor_error(source, name, format!("{problem}; download the checkpoint again")))
        }
    }
}

/// Skips `others`, the tensors that belong to no text model of the `family`.
///
/// # Errors
/// If there are some that may not be skipped, or one is a scale of weights, which would be wrong without it.
pub(super) fn leave_out(
    source: &Checkpoint,
    family: &str,
    unknown: Unknown,
    others: Vec<String>,
    left_out: &mut LeftOut,
) -> Result<()> {
    if unknown == Unknown::Refused && !others.is_empty() {
        let problem = format!(
            "has {} tensors that belong to no {family} text model ({}); skip them explicitly, or fix the checkpoint",
            others.len(),
            others.join(", ")
        );
        return Err(Error::file(source.path(), problem));
    }
    if let Some(scale) = others.iter().find(|name| is_scale(name) && !is_tower(name)) {
        return Err(tensor_error(source, scale, STRAY_SCALE));
    }
    left_out.extend(others.into_iter().map(|name| (name, "belongs to no text model of its family")));
    Ok(())
}

/// Passes the tensor `name` of the source to `write`, changed and converted to `dtype`: a token ordering if that is an
/// integer type.
///
/// # Errors
/// If it is missing or malformed, or cannot be converted, or that of `write`.
pub(super) fn write_tensor(
    source: &Checkpoint,
    name: &str,
    dtype: TensorType,
    change: Option<&Change>,
    mut write: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let wrong = |problem: String| tensor_error(source, name, problem);
    let mut tensor = get(source, name)?;
    if matches!(dtype, TensorType::I32 | TensorType::I64) {
        if !name.ends_with(ORDERING) {
            return Err(wrong("contains integers, which only a token_ordering may".into()));
        }
        let ids = token_ordering(&tensor).map_err(wrong)?;
        let bytes: Vec<u8> = match dtype {
            TensorType::I32 => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            _ => ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect(),
        };
        return write(&bytes);
    }
    if let Some(change) = change {
        tensor = change(tensor).map_err(wrong)?;
    }
    recode(&tensor, dtype, None, wrong, write)
}

/// The number `field` of the configuration in `directory` in single precision, as GGUF files have it.
///
/// # Errors
/// If it is not positive and finite there, which readers refuse.
pub(crate) fn positive(directory: &Path, field: &str, value: f64) -> Result<f32> {
    let single = value as f32;
    match single > 0.0 && single.is_finite() {
        true => Ok(single),
        false => {
            let problem =
                format!("is {value}, which a GGUF file cannot represent (it must be above 0); use the directory");
            Err(Error::Config { path: directory.join("config.json"), field: field.into(), problem })
        }
    }
}

/// As in llama.cpp's converter: norms, scales, convolutions and routers stay F32.
fn stored_type(name: &str, shape: &[usize], from: TensorType, outtype: Outtype) -> TensorType {
    if matches!(from, TensorType::I64 | TensorType::I32) {
        return TensorType::I32;
    }
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight"];
    let exact = shape.len() < 2 || !name.ends_with(".weight") || kept.iter().any(|kept| name.ends_with(kept));
    match exact {
        true => TensorType::Float(ElementType::F32),
        false => outtype.tensor_type(shape.last().copied().unwrap_or(1)),
    }
}

pub(super) fn get(source: &Checkpoint, name: &str) -> Result<RawTensor> {
    source.get(name)?.ok_or_else(|| tensor_error(source, name, MISSING))
}

const MISSING: &str = "is missing; download the checkpoint again";

pub(super) fn tensor_error(source: &Checkpoint, name: &str, problem: impl Into<String>) -> Error {
    Error::Tensor { path: source.path().to_owned(), tensor: name.to_owned(), problem: problem.into() }
}
