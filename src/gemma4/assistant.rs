//! The MTP drafter: a small model that reads the target's K and V and its last hidden state.

use super::centroids::{CentroidUsage, Centroids};
use super::config::{CentroidConfig, TextConfig};
use super::layer::DecoderLayer;
use super::pair::check_pair;
use super::rope::Rotations;
use super::target::Target;
use super::tensor_names::is_assistants_table;
use crate::Result;
use crate::checkpoint::{Checkpoint, LoadOptions, Loader, WeightUse, token_ordering};
use crate::kv::Borrowed;
use crate::model::{ChainModel, DraftRows, DraftStep, weights_on_device};
use crate::nn::{CentroidHead, Embedding};
use crate::ops::{CpuDestination, CpuOps, Destination, Ops};

/// A `gemma4_assistant`, checked against its target.
pub struct Assistant {
    ops: CpuOps,
    donors: Vec<usize>, // for each layer, the target layer whose K and V it reads
    centroid_head: bool,
    /// With the target's embedding. `None`: on a device.
    model: Option<(AssistantModel<CpuOps>, Embedding)>,
}

/// Weights of an assistant on backend `O`. Its input embedding is the target's.
pub(crate) struct AssistantModel<O: Ops> {
    pre_projection: O::Linear, // (hidden, 2 * backbone)
    layers: Vec<DecoderLayer<O>>,
    norm: O::Norm,
    post_projection: O::Linear, // (backbone, hidden)
    pub(crate) head: Head<O>,
    rotations: Rotations<O>,
}

/// The output head.
pub(crate) enum Head<O: Ops> {
    Dense(O::Linear),
    Centroids(O::CentroidHead),
}

impl Assistant {
    /// Loads an assistant for `target`.
    ///
    /// # Errors
    /// If the pair does not fit, config.json needs something that is not implemented, a tensor is missing or has
    /// another shape, the target's weights are on a device, or the load is cancelled.
    pub fn load(checkpoint: &Checkpoint, target: &Target, options: impl Into<LoadOptions>) -> Result<Self> {
        let options = options.into();
        let embed_tokens = target.model()?.embed_tokens.clone();
        let (assistant, model) =
            Self::load_to(&CpuDestination { isa: options.isa }, checkpoint, target.config(), &options)?;
        Ok(Self { model: Some((model, embed_tokens)), ..assistant })
    }

    /// Loads an assistant for the target of `target` to `to`, tensor by tensor. The returned host
    /// module has no weights.
    ///
    /// # Errors
    /// As [`Assistant::load`], or those of `to`.
    pub(crate) fn load_to<D: Destination>(
        to: &D,
        checkpoint: &Checkpoint,
        target: &TextConfig,
        options: &LoadOptions,
    ) -> Result<(Self, AssistantModel<D::Ops>)> {
        // Centroids are built, and compared in speed, on the CPU.
        let weight_use = match options.centroids {
            Centroids::Build(_) => WeightUse::Multiply,
            Centroids::Own | Centroids::None => to.weight_use(),
        };
        let config = checkpoint.assistant_config()?;
        let donors = check_pair(&config, target)?;
        let (text, backbone) = (&config.text, config.backbone_hidden_size);
        let hidden = text.hidden_size;
        let mut projections = Loader::new(checkpoint, "", options).for_use(weight_use);
        let pre_projection = to.linear(projections.linear("pre_projection.weight", hidden, 2 * backbone)?)?;
        let post_projection = to.linear(projections.linear("post_projection.weight", backbone, hidden)?)?;
        let mut loader = projections.beside("model.");
        let layers = text.layers.iter().enumerate();
        let layers: Result<Vec<_>> = layers.map(|(i, l)| DecoderLayer::load(&mut loader, to, i, text, l)).collect();
        let layers = layers?;
        let norm = to.norm(loader.norm("norm.weight", hidden, text.rms_norm_eps)?)?;
        let own = config.centroids.as_ref().filter(|_| match &options.centroids {
            Centroids::Own => true,
            Centroids::None => false,
            Centroids::Build(build) => build.usage == CentroidUsage::IfFaster,
        });
        let head = Head::load(to, &mut projections, text, own, options)?;
        loader.absorb(projections);
        let unused = |name: &str| own.is_none() && name.starts_with("masked_embedding.");
        loader.finish(|name| is_assistants_table(name) || unused(name))?;
        let rotations = Rotations::new(text, options.isa, to)?;
        let centroid_head = matches!(head, Head::Centroids(_));
        tracing::info!(path = %checkpoint.path().display(), hidden, centroid_head, "assistant loaded");
        let model = AssistantModel { pre_projection, layers, norm, post_projection, head, rotations };
        Ok((Self { ops: CpuOps { isa: options.isa }, donors, centroid_head, model: None }, model))
    }

    /// Whether a draft step scores only the ids of the best centroids; otherwise it reads the whole LM head.
    pub fn has_centroids(&self) -> bool {
        self.centroid_head
    }

    /// For each layer, the target layer whose K and V it reads.
    pub(crate) fn donors(&self) -> &[usize] {
        &self.donors
    }
}

impl ChainModel for Assistant {
    /// A row's position is the one after the committed tokens, the same for all steps of a chain: the assistant writes
    /// no K or V and was trained with a constant position.
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> Result<Vec<DraftStep>> {
        let ids: Vec<_> = sequences.iter().flat_map(|rows| &rows.ids).copied().collect();
        let states = DraftRows::states(sequences)?;
        let mut kv = Borrowed { committed: DraftRows::committed(sequences)?, donors: &self.donors };
        let (model, embed_tokens) = self.model.as_ref().ok_or_else(|| weights_on_device("assistant"))?;
        let (scores, states) = model.step(&self.ops, embed_tokens, &ids, &states, &mut kv)?;
        let steps = scores.into_iter().enumerate();
        steps.map(|(row, scores)| Ok(DraftStep { scores, hidden: states.narrow(0, row, 1)? })).collect()
    }
}

impl<O: Ops> Head<O> {
    /// Loads the head to `to`: `own` are the file's centroids, unless they are not to be used.
    fn load(
        to: &impl Destination<Ops = O>,
        loader: &mut Loader<'_>,
        config: &TextConfig,
        own: Option<&CentroidConfig>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let rows = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
        if let Some(centroids) = own {
            let name = "masked_embedding.token_ordering";
            let ordering = loader.tensor(name, &[vocab])?;
            let ordering = token_ordering(&ordering).map_err(|problem| loader.error(name, problem))?;
            let of_centroids = loader.linear("masked_embedding.centroids.weight", centroids.num_centroids, hidden)?;
            // Rows in centroid order, so that a group is contiguous.
            let shape = [centroids.num_centroids, vocab / centroids.num_centroids, hidden];
            let table = loader.reordered(rows, shape, &ordering)?;
            let head = CentroidHead::new(of_centroids, ordering, table, centroids.top_k, options.isa);
            return Ok(Self::Centroids(to.centroid_head(head)?));
        }
        // Each head has an allocation of its own: that of the head that is not used is freed.
        let mut apart = loader.beside("");
        let dense = apart.head(rows, vocab, hidden)?;
        loader.absorb(apart);
        let built = match &options.centroids {
            Centroids::Build(build) if build.fits(vocab)? => {
                build.head(&mut loader.beside(""), rows, &dense, options.isa)?
            }
            _ => None,
        };
        Ok(match built {
            Some(head) => Self::Centroids(to.centroid_head(head)?),
            None => Self::Dense(to.linear(dense)?),
        })
    }
}

impl<O: Ops> AssistantModel<O> {
    /// Scores of the tokens after `ids`, which `state` predicted, and the states for the next step.
    /// `table` is the target's embedding.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, or memory is exhausted.
    pub(crate) fn step(
        &self,
        ops: &O,
        table: &O::Embedding,
        ids: O::Ids<'_>,
        state: &O::State,
        kv: &mut O::Kv<'_>,
    ) -> Result<(O::Scores, O::State)> {
        let mut h = ops.linear(&self.pre_projection, &ops.embed_concat(table, ids, state)?)?;
        let angles = self.rotations.angles(ops, kv)?;
        for (i, layer) in self.layers.iter().enumerate() {
            h = layer.forward(ops, &h, None, |self_attn, x| self_attn.forward(ops, x, &angles, kv, i))?;
        }
        let n = ops.norm(&self.norm, &h)?;
        let scores = match &self.head {
            Head::Dense(head) => ops.scores(head, &n)?,
            Head::Centroids(head) => ops.centroid_scores(head, &n)?,
        };
        Ok((scores, ops.next_state(&self.post_projection, &n)?))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use foretoken_kernels::Isa;
    use foretoken_kernels::quant::WeightType;

    use super::*;
    use crate::gemma4::BuildCentroids;
    use crate::nn::{Allocation, Linear, Storage, Weight};

    /// Memory is unmapped only once all weights in it are dropped: beside others, a head that is not used would stay.
    #[test]
    fn heads_have_memory_of_their_own() {
        let open = |part: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo").join(part);
            Checkpoint::open(path).expect("a checkpoint")
        };
        let target = open("target").target_config().expect("a configuration");
        let sizes = CentroidConfig { num_centroids: 64, top_k: 8 };
        let built = BuildCentroids { sizes, cache: None, usage: CentroidUsage::Always };
        for centroids in [Centroids::None, Centroids::Build(built)] {
            let isa = Isa::best();
            let options = LoadOptions { quantize: Some(WeightType::Q8_0), centroids, ..LoadOptions::from(isa) };
            let loaded = Assistant::load_to(&CpuDestination { isa }, &open("assistant"), &target, &options);
            let (_, model) = loaded.expect("an assistant");
            let head = match &model.head {
                Head::Dense(head) => memory(head.weight()),
                Head::Centroids(head) => memory(&head.table),
            };
            let others = [&model.pre_projection, &model.post_projection].map(Linear::weight);
            assert!(others.into_iter().all(|other| !head.is_beside(memory(other))), "{:?}", options.centroids);
        }
    }

    fn memory(weight: &Weight) -> &Allocation {
        match weight.storage() {
            Storage::Packed(_, memory) => memory,
            _ => panic!("{} is not packed", weight.name()),
        }
    }
}
