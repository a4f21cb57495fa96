//! Scales of NVFP4 matrices: separate tensors, applied to the products.

use foretoken_kernels::ElementType;

use super::file::Gguf;
use super::header::TensorInfo;
use super::types::{self, GgmlType};
use crate::Result;

/// The scales of a weight.
#[derive(Default)]
pub(crate) struct Scales {
    /// One for all rows, or the same number for each matrix of a stack, in order; empty if the file has none.
    pub(crate) factors: Vec<f32>,
    /// The tensors that were read, and those that are not needed.
    pub(crate) tensors: Vec<String>,
}

impl Gguf {
    /// The scales of the weight with this Hugging Face name, a stack of `count` matrices. Converters name them
    /// `X.scale` or `X.weight.scale`. Separate gate and up projections of experts have their own, interleaved.
    ///
    /// `X.input_scale` is for 4-bit activations, which are not used here.
    ///
    /// # Errors
    /// If a scale is malformed.
    pub(crate) fn scales(&self, name: &str, count: usize) -> Result<Scales> {
        let apart = || self.gate_up_infos(name).map(|(gate, up)| vec![gate, up]);
        let parts = self.info_of_weight(name).map(|one| vec![one]).or_else(apart).unwrap_or_default();
        let mut scales = Scales::default();
        let mut of_parts = Vec::new();
        for part in &parts {
            scales.tensors.extend(self.spelled(part.name(), "input_scale"));
            let found = self.spelled(part.name(), "scale").next();
            of_parts.push(found.as_ref().map(|name| self.scale(name, part, count)).transpose()?);
            scales.tensors.extend(found);
        }
        scales.factors = match &of_parts[..] {
            [Some(of_all)] if of_all.len() == 1 => of_all.clone(),
            parts if parts.iter().all(Option::is_none) => Vec::new(),
            parts => {
                let factor = |part: &Option<Vec<f32>>, i: usize| match part.as_deref() {
                    None => 1.0,
                    Some([one]) => *one,
                    Some(several) => several[i],
                };
                (0..count).flat_map(|i| parts.iter().map(move |part| factor(part, i))).collect()
            }
        };
        Ok(scales)
    }

    /// Whether the tensor with this name has a separate scale.
    pub(crate) fn has_scale(&self, name: &str) -> bool {
        self.spelled(name, "scale").next().is_some()
    }

    /// The tensors `X.last` and `X.weight.last` of the tensor `name`, as far as they exist and are not weights.
    fn spelled(&self, name: &str, last: &str) -> impl Iterator<Item = String> {
        let base = name.strip_suffix(".weight").unwrap_or(name);
        let spelled = ["", "weight."].map(|before| format!("{base}.{before}{last}"));
        spelled.into_iter().filter(|name| self.info(name).is_some() && self.hugging_face_name(name).is_none())
    }

    /// The values of a scale: one, or one for each of `count` matrices.
    fn scale(&self, name: &str, of: &TensorInfo, count: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?.filter(|tensor| tensor.type_id == types::F32);
        let values = tensor.map_or_else(Vec::new, |tensor| ElementType::F32.read(tensor.bytes.as_slice()));
        if ![1, count].contains(&values.len()) || !values.iter().all(|scale| scale.is_finite()) {
            let (stored, shape) =
                self.info(name).map_or(("missing", &[][..]), |info| (GgmlType::name_of(info.type_id()), info.shape()));
            let expected = format!("F32, finite, one for all or each of {count} matrices in {}", of.name());
            let problem = format!("is {stored} of shape {shape:?}, must be {expected}; convert the checkpoint again");
            return Err(self.error(name, problem));
        }
        Ok(values)
    }
}
