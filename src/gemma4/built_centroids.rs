//! Builds centroids for an assistant that has none: its head's rows in equally sized groups, and the groups' means.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_nn::Module;
use foretoken_kernels::{ElementType, Isa};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use super::centroids::{BuildCentroids, CentroidUsage};
use super::config::CentroidConfig;
use crate::checkpoint::{Loader, Partial};
use crate::nn::{Bytes, CentroidHead, Linear, Weight, balanced_groups, tensor};
use crate::{Error, Result};

/// The ids in group order, and the groups' means `(groups, hidden)`.
struct Groups {
    ordering: Vec<u32>,
    means: Vec<f32>,
}

const ORDERING: &str = "masked_embedding.token_ordering";
const CENTROIDS: &str = "masked_embedding.centroids.weight";
/// Timed runs of each head; the fastest counts.
const RUNS: usize = 5;
/// Maximum time relative to the dense head: built centroids miss some of the best tokens (record:
/// `2026-11-23-epyc-zen4-2vcpu/centroids.txt`), which a smaller gain would not make up for.
const MAX_TIME: f64 = 0.9;
/// Minimum tokens per group: the centroids are at most 1/16 of the dense head's rows.
const MIN_GROUP: usize = 16;

impl BuildCentroids {
    /// Whether a vocabulary can be divided into these groups, and they are large enough.
    ///
    /// # Errors
    /// If it cannot, but centroids are required.
    pub(super) fn fits(&self, vocab: usize) -> Result<bool> {
        let CentroidConfig { num_centroids: groups, top_k } = self.sizes;
        let divides = groups.is_power_of_two() && vocab.is_multiple_of(groups) && (1..=groups).contains(&top_k);
        match self.usage {
            CentroidUsage::Always if !divides => {
                let problem = "must be a power of two that divides the vocabulary, and at least as many as are read";
                Err(Error::argument("centroids", format!("{groups}, of {vocab} tokens: {problem}")))
            }
            CentroidUsage::Always => Ok(true),
            // With small groups, the centroids cost what they save.
            CentroidUsage::IfFaster => Ok(divides && vocab / groups >= MIN_GROUP),
        }
    }

    /// The head over the rows of `dense`, which are the tensor `name`; `None` if it must be faster but is not.
    ///
    /// # Errors
    /// If a tensor cannot be read, or memory is exhausted.
    pub(super) fn head(
        &self,
        loader: &mut Loader<'_>,
        name: &str,
        dense: &Linear,
        isa: Isa,
    ) -> Result<Option<CentroidHead>> {
        let CentroidConfig { num_centroids, top_k } = self.sizes;
        let (vocab, hidden) = (dense.weight().outputs(), dense.weight().inputs());
        let Groups { ordering, means } = self.groups(dense.weight());
        let table = loader.reordered(name, [num_centroids, vocab / num_centroids, hidden], &ordering)?;
        let means: Vec<u8> = means.iter().flat_map(|x| x.to_le_bytes()).collect();
        let means = Weight::float(Bytes::from(means), ElementType::F32, [1, num_centroids, hidden]);
        let means = means.ok_or_else(|| loader.error(name, "has no groups of equal size"))?;
        let head = CentroidHead::new(Linear::new(means.named(CENTROIDS), isa), ordering, table, top_k, isa);
        if self.usage == CentroidUsage::Always {
            return Ok(Some(head));
        }
        let state = tensor((0..hidden).map(|i| (i % 7) as f32 - 3.0).collect(), (1, hidden))?;
        let all = fastest(|| dense.forward(&state).map(drop).map_err(Error::from))?;
        let best = fastest(|| head.forward(&state).map(drop))?;
        tracing::info!(?all, ?best, "times of an assistant's head: all tokens, and with built centroids");
        Ok((best.as_secs_f64() < MAX_TIME * all.as_secs_f64()).then_some(head))
    }

    /// The groups of the head's rows: from the cache, or built and stored there.
    fn groups(&self, weight: &Weight) -> Groups {
        let file = self.cache.as_ref().map(|directory| directory.join(self.file_name(weight)));
        if let Some(file) = file.as_deref().filter(|file| file.exists()) {
            match self.read(file, weight) {
                Some(groups) => return groups,
                None => tracing::warn!(path = %file.display(), "does not contain these centroids; building them again"),
            }
        }
        let start = Instant::now();
        let row = |index: u32, out: &mut [f32]| weight.row(index as usize, out);
        let sizes = (weight.outputs(), self.sizes.num_centroids, weight.inputs());
        let (ordering, means) = balanced_groups(sizes.0, sizes.1, sizes.2, &row);
        tracing::info!(groups = sizes.1, seconds = start.elapsed().as_secs_f64(), "centroids built");
        let groups = Groups { ordering, means };
        if let Some(file) = &file
            && let Err(error) = self.write(file, weight, &groups)
        {
            tracing::warn!(%error, "the centroids could not be cached");
        }
        groups
    }

    /// A name derived from the inputs of the groups.
    fn file_name(&self, weight: &Weight) -> String {
        let sum = crc32fast::hash(weight.storage().bytes());
        format!("centroids-{}-{}-{}-{sum:08x}.safetensors", weight.outputs(), weight.inputs(), self.sizes.num_centroids)
    }

    /// `None` if the file was not written by [`BuildCentroids::write`].
    fn read(&self, file: &Path, weight: &Weight) -> Option<Groups> {
        let bytes = std::fs::read(file).ok()?;
        let tensors = SafeTensors::deserialize(&bytes).ok()?;
        let of_shape = |name: &str, dtype, shape: &[usize]| {
            tensors.tensor(name).ok().filter(|tensor| tensor.dtype() == dtype && tensor.shape() == shape)
        };
        let ordering = of_shape(ORDERING, Dtype::U32, &[weight.outputs()])?;
        let ordering: Vec<u32> = ordering.data().as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        let mut seen = vec![false; ordering.len()];
        let is_new = |id: &u32| seen.get_mut(*id as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        if !ordering.iter().all(is_new) {
            return None;
        }
        let means = of_shape(CENTROIDS, Dtype::F32, &[self.sizes.num_centroids, weight.inputs()])?;
        let means = ElementType::F32.read(means.data());
        means.iter().all(|x| x.is_finite()).then_some(Groups { ordering, means })
    }

    fn write(&self, file: &Path, weight: &Weight, groups: &Groups) -> Result<()> {
        if let Some(directory) = &self.cache {
            std::fs::create_dir_all(directory).map_err(Error::io(directory))?;
        }
        let ordering: Vec<u8> = groups.ordering.iter().flat_map(|id| id.to_le_bytes()).collect();
        let means: Vec<u8> = groups.means.iter().flat_map(|x| x.to_le_bytes()).collect();
        let problem = |e: safetensors::SafeTensorError| Error::file(file, format!("cannot be made: {e}"));
        let view = |dtype, shape, bytes| TensorView::new(dtype, shape, bytes).map_err(problem);
        let views = HashMap::from([
            (ORDERING, view(Dtype::U32, vec![weight.outputs()], &ordering[..])?),
            (CENTROIDS, view(Dtype::F32, vec![self.sizes.num_centroids, weight.inputs()], &means[..])?),
        ]);
        let mut partial = Partial::create(file)?;
        partial.put(&safetensors::serialize(views, None).map_err(problem)?)?;
        partial.publish()
    }
}

/// The minimum of several runs: other load only makes them longer.
fn fastest(run: impl Fn() -> Result<()>) -> Result<Duration> {
    let mut shortest = Duration::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        run()?;
        shortest = shortest.min(start.elapsed());
    }
    Ok(shortest)
}
