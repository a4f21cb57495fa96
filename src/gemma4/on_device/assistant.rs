//! The assistant: see `gemma4::assistant`.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::positions::Placement;
use foretoken_gpu::plan::vocabulary::{Grouped, MAX_TOP_K, Scores, argmax, argmax_parts, top_k};

use super::layer::DeviceLayer;
use super::positions::{Frequencies, HostPosition, PassPositions, PositionBuffers};
use super::target::{DeviceTarget, PassStart};
use super::workspace::LayerWorkspace;
use super::workspace::Pass;
use super::{Norm, linear};
use crate::device::{Buffer, Device, DeviceKv, Input, Launcher, Matrices, subslice};
use crate::gemma4::assistant::Head;
use crate::gemma4::{Assistant, TextConfig};
use crate::{Error, Result};

pub(super) struct DeviceAssistant {
    config: TextConfig,
    pre_projection: Matrices,
    layers: Vec<DeviceLayer>,
    norm: Norm,
    post_projection: Matrices,
    head: DeviceHead,
    frequencies: Frequencies,
    donors: Vec<usize>,
}

enum DeviceHead {
    Dense(Matrices),
    Centroids(Box<Centroids>),
}

/// See `gemma4::centroids`.
struct Centroids {
    centroids: Matrices,
    table: Matrices,
    ordering: Buffer<u32>,
    token_ordering: Vec<u32>,
    top_k: usize,
    // Buckets of one row: one per chosen centroid.
    starts: Buffer<i32>,
    count: Buffer<i32>,
    row: Buffer<i32>,
}

/// Buffers for draft steps of one row.
pub(super) struct AssistantWorkspace {
    h: Buffer<f32>, // (hidden)
    layers: LayerWorkspace,
    places: PositionBuffers,
    /// `(2 * backbone)`: a token's embedding, then the hidden state that predicted it; for the first step, and for
    /// later ones.
    first: Buffer<f32>,
    next: Buffer<f32>,
    normed: Buffer<f32>, // (hidden)
    ranks: Buffer<f32>,  // (centroids)
    groups: Buffer<i32>, // (top_k)
    scores: Buffer<f32>,
    partial: Buffer<[u32; 2]>,
}

impl DeviceAssistant {
    pub(super) fn upload(device: &dyn Device, from: &Assistant) -> Result<Self> {
        let head = match &from.head {
            Head::Dense(head) => DeviceHead::Dense(linear(device, "model.embed_tokens", head)?),
            Head::Centroids(head) => {
                let (count, best) = (head.table.count(), head.top_k);
                if count > MAX_TOP_K {
                    let problem = format!("an assistant of {count} centroids; the kernels rank {MAX_TOP_K} at most");
                    return Err(Error::Device { device: device.name(), problem: format!("{problem}; use the CPU") });
                }
                let starts: Vec<i32> = (0..=best as i32).collect();
                DeviceHead::Centroids(Box::new(Centroids {
                    centroids: linear(device, "masked_embedding.centroids", &head.centroids)?,
                    table: Matrices::upload(device, "model.embed_tokens.weight", &head.table)?,
                    ordering: Buffer::of(device, &head.token_ordering)?,
                    token_ordering: head.token_ordering.clone(),
                    top_k: best,
                    starts: Buffer::of(device, &starts)?,
                    count: Buffer::of(device, &[best as i32])?,
                    row: Buffer::of(device, &vec![0; best])?,
                }))
            }
        };
        let layers = from.layers.iter().zip(&from.config.layers).enumerate();
        let layers = layers.map(|(i, (layer, config))| DeviceLayer::upload(device, i, config, layer));
        Ok(Self {
            pre_projection: linear(device, "pre_projection", &from.pre_projection)?,
            layers: layers.collect::<Result<_>>()?,
            norm: Norm::upload(device, &from.norm)?,
            post_projection: linear(device, "post_projection", &from.post_projection)?,
            head,
            frequencies: Frequencies::upload(device, &from.rotations)?,
            donors: from.donors.clone(),
            config: from.config.clone(),
        })
    }

    pub(super) fn workspace(&self, device: &dyn Device) -> Result<AssistantWorkspace> {
        let (hidden, backbone) = (self.config.hidden_size, self.post_projection.outputs());
        let (centroids, groups, scores) = match &self.head {
            DeviceHead::Dense(head) => (1, 1, head.outputs()),
            DeviceHead::Centroids(head) => (head.centroids.outputs(), head.top_k, head.top_k * head.table.outputs()),
        };
        Ok(AssistantWorkspace {
            h: Buffer::new(device, hidden)?,
            layers: LayerWorkspace::new(device, &self.config, 1, 2 * backbone)?,
            places: PositionBuffers::new(device, &self.frequencies, 1)?,
            first: Buffer::new(device, 2 * backbone)?,
            next: Buffer::new(device, 2 * backbone)?,
            normed: Buffer::new(device, hidden)?,
            ranks: Buffer::new(device, centroids)?,
            groups: Buffer::new(device, groups)?,
            scores: Buffer::new(device, scores)?,
            partial: Buffer::new(device, Scores::partial_len(1, scores))?,
        })
    }

    /// Positions of a draft chain: all steps have the one after the committed positions. The first step computes it on
    /// the device; later ones reuse it.
    pub(super) fn place(
        &self,
        launcher: &Launcher,
        workspace: &AssistantWorkspace,
        at: HostPosition,
        begin: Option<&PassStart>,
    ) -> Result<PassPositions> {
        match begin {
            Some(begin) => {
                let start = (begin.length, begin.emitted, at);
                workspace.places.place(launcher, &self.frequencies, start, (1, Placement::Constant))
            }
            None => Ok(workspace.places.placed(at, (1, Placement::Constant))),
        }
    }

    /// One draft step from `token` and the hidden state that predicted it: scores of the next token, and its hidden
    /// state in [`AssistantWorkspace::next`]. Step 0 reads [`AssistantWorkspace::state`], later ones the previous
    /// step's.
    pub(super) fn step(
        &self,
        launcher: &Launcher,
        (workspace, placed): (&AssistantWorkspace, &PassPositions),
        target: &DeviceTarget,
        kv: &DeviceKv,
        (token, link): (DeviceSlice<u32>, usize),
    ) -> Result<()> {
        let (hidden, backbone) = (self.config.hidden_size, self.post_projection.outputs());
        let (h, quants) = (workspace.h.slice(), &workspace.layers.quants);
        let input = if link == 0 { workspace.first.slice() } else { workspace.next.slice() };
        target.embed(launcher, (token, 1), subslice(input, 0, backbone))?; // embedding first
        self.pre_projection.multiply(launcher, &Input::new(quants, input, (1, 2 * backbone)), h)?;
        let pass = Pass { launcher, workspace: &workspace.layers, placed };
        for (layer, donor) in self.layers.iter().zip(&self.donors) {
            layer.forward(&pass, kv, *donor, (h, None))?;
        }
        let normed = workspace.normed.slice();
        self.norm.write(launcher, h, 1, normed)?;
        let n = Input::new(quants, normed, (1, hidden));
        match &self.head {
            DeviceHead::Dense(head) => head.multiply(launcher, &n, workspace.scores.slice())?,
            DeviceHead::Centroids(head) => {
                let (count, best) = (head.centroids.outputs(), head.top_k);
                head.centroids.multiply(launcher, &n, workspace.ranks.slice())?;
                launcher.run(top_k((workspace.ranks.slice(), count), (workspace.groups.slice(), best)))?;
                let lists = Buckets {
                    matrices: workspace.groups.slice(),
                    starts: head.starts.slice(),
                    count: head.count.slice(),
                    rows: Some(head.row.slice()),
                };
                head.table.multiply_buckets(launcher, &n, &lists, (best, best), workspace.scores.slice())?;
            }
        }
        self.post_projection.multiply(launcher, &n, subslice(workspace.next.slice(), backbone, backbone))
    }

    /// Writes the argmax of the last step's scores to `token`, which need not be aligned.
    pub(super) fn choose(
        &self,
        launcher: &Launcher,
        workspace: &AssistantWorkspace,
        suppressed: Option<(DeviceSlice<u32>, usize)>,
        token: DeviceSlice<u32>,
    ) -> Result<()> {
        let (n, grouped) = match &self.head {
            DeviceHead::Dense(head) => (head.outputs(), None),
            DeviceHead::Centroids(head) => {
                let len = head.table.outputs();
                let grouped = Grouped { groups: workspace.groups.slice(), ordering: head.ordering.slice(), len };
                (head.top_k * len, Some(grouped))
            }
        };
        let scores = Scores { x: workspace.scores.slice(), rows: 1, n, stride: n, cap: None, suppressed, grouped };
        launcher.run(argmax_parts(&scores, workspace.partial.slice(), token))?;
        launcher.run(argmax(&scores, workspace.partial.slice(), token))
    }

    /// The last step's scores, and their ids (`None`: all, in order).
    pub(super) fn scores(&self, workspace: &AssistantWorkspace) -> Result<(Option<Vec<u32>>, Vec<f32>)> {
        match &self.head {
            DeviceHead::Dense(head) => Ok((None, workspace.scores.read(0, head.outputs())?)),
            DeviceHead::Centroids(head) => {
                let (best, len) = (head.top_k, head.table.outputs());
                let groups = workspace.groups.read(0, best)?;
                let ids = groups.iter().flat_map(|group| {
                    let start = *group as usize * len;
                    head.token_ordering.get(start..start + len).unwrap_or_default()
                });
                Ok((Some(ids.copied().collect()), workspace.scores.read(0, best * len)?))
            }
        }
    }
}

impl AssistantWorkspace {
    /// See [`crate::device::AttentionWorkspace::grown`].
    pub(super) fn grown(&self) -> usize {
        self.layers.attention.grown()
    }

    /// The target's hidden state `(backbone)` that a chain starts from: buffer and offset.
    pub(super) fn state(&self) -> (&Buffer<f32>, usize) {
        (&self.first, self.first.len() / 2)
    }
}
