//! `token_ordering`: the vocabulary's ids in the order of an assistant's centroids, a permutation.

use super::tensor::{RawTensor, TensorType};

/// The ids of `tensor`, or the problem with it.
pub(crate) fn token_ordering(tensor: &RawTensor) -> Result<Vec<u32>, String> {
    let bytes = tensor.bytes.as_slice();
    let ids: Vec<i64> = match tensor.dtype {
        TensorType::I64 => bytes.as_chunks().0.iter().map(|id| i64::from_le_bytes(*id)).collect(),
        TensorType::I32 => bytes.as_chunks().0.iter().map(|id| i64::from(i32::from_le_bytes(*id))).collect(),
        other => return Err(format!("is {}, not I64 or I32; convert the assistant again", other.name())),
    };
    if ids.len() > 1 && ids.iter().all(|id| *id == 0) {
        return Err("is all zeros, the result of a broken conversion; convert the assistant again".into());
    }
    let mut seen = vec![false; ids.len()];
    for id in &ids {
        match usize::try_from(*id).ok().and_then(|id| seen.get_mut(id)) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(format!("is not a permutation of the vocabulary (id {id}); convert the assistant again")),
        }
    }
    Ok(ids.into_iter().map(|id| id as u32).collect())
}
