//! Experts of a Gemma 4 with one tensor per matrix, as in quantized directories: `X.experts.7.gate_proj.weight`,
//! `up_proj` and `down_proj` become the stacks `X.experts.gate_up_proj` and `X.experts.down_proj` at load.

use std::collections::BTreeMap;

use super::tensor::RawTensor;

/// The matrices of a stack, expert by expert; for `gate_up_proj`, an expert's gate and its up.
pub(super) type Stacks = BTreeMap<String, Vec<String>>;

/// The stacks, and the parts of an expert's matrix in each.
const STACKS: [(&str, &[&str]); 2] = [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// The complete stacks among `names`: experts from 0 on without a gap.
pub(super) fn collect<'a>(names: impl Iterator<Item = &'a str>) -> Stacks {
    let mut counts: BTreeMap<&str, BTreeMap<&str, Vec<usize>>> = BTreeMap::new();
    for (module, expert, part) in names.filter_map(split) {
        counts.entry(module).or_default().entry(part).or_default().push(expert);
    }
    let mut stacks = Stacks::new();
    for (module, parts) in counts {
        for (stack, of_expert) in STACKS {
            let count = parts.get(of_expert[0]).map_or(0, Vec::len);
            let is_complete = |part: &&str| {
                let mut experts = parts.get(*part).cloned().unwrap_or_default();
                experts.sort_unstable();
                experts.into_iter().eq(0..count)
            };
            if count > 0 && of_expert.iter().all(is_complete) {
                let matrices =
                    (0..count).flat_map(|i| of_expert.iter().map(move |part| format!("{module}.{i}.{part}.weight")));
                stacks.insert(format!("{module}.{stack}"), matrices.collect());
            }
        }
    }
    stacks
}

/// `X.experts`, the number and the matrix of `X.experts.7.gate_proj.weight`. Those of Qwen
/// (`mlp.experts`) stay separate.
fn split(name: &str) -> Option<(&str, usize, &str)> {
    let (module, part) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let (module, digits) = module.rsplit_once('.')?;
    let expert: usize = digits.parse().ok()?;
    let is_own = module.ends_with(".experts") && !module.ends_with(".mlp.experts") && expert.to_string() == digits;
    is_own.then_some((module, expert, part))
}

/// The stack of `count` experts' matrices, in the order of `matrices`; or the problem with one.
pub(super) fn stack<E>(
    count: usize,
    matrices: impl ExactSizeIterator<Item = Result<RawTensor, E>>,
) -> Result<Result<RawTensor, String>, E> {
    let per_expert = matrices.len() / count.max(1);
    let mut first: Option<RawTensor> = None;
    let mut bytes = Vec::new();
    for matrix in matrices {
        let matrix = matrix?;
        let of = first.get_or_insert_with(|| matrix.clone());
        if (matrix.dtype, &matrix.shape) != (of.dtype, &of.shape) || matrix.shape.len() != 2 {
            let problem = format!("is {} of shape {:?}", matrix.dtype.name(), matrix.shape);
            return Ok(Err(format!(
                "{problem}, the first expert's {} of shape {:?}; all experts must be alike",
                of.dtype.name(),
                of.shape
            )));
        }
        bytes.extend_from_slice(matrix.bytes.as_slice());
        matrix.bytes.release(0..matrix.bytes.as_slice().len());
    }
    let Some(RawTensor { dtype, shape, .. }) = first else { return Ok(Err("has no experts".into())) };
    Ok(Ok(RawTensor { dtype, shape: vec![count, per_expert * shape[0], shape[1]], bytes: bytes.into() }))
}
