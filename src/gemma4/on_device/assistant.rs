//! The assistant: see `gemma4::assistant`.

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::matmul::Buckets;
use foretoken_kernels::gpu::positions::Stand;
use foretoken_kernels::gpu::vocabulary::{Grouped, MOST_RANKED, Scores, argmax, argmax_parts, top_k};

use super::layer::{DeviceLayer, Pass};
use super::room::LayerRoom;
use super::standing::{At, Frequencies, Placed, Places};
use super::target::{Begin, DeviceTarget};
use super::{Norm, linear};
use crate::device::{Buffer, Device, DeviceKv, Input, Matrices, Work, part};
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
    // The buckets of one row: a centroid each.
    starts: Buffer<i32>,
    count: Buffer<i32>,
    row: Buffer<i32>,
}

/// Rooms for steps of one row.
pub(super) struct AssistantRoom {
    h: Buffer<f32>, // (hidden)
    layers: LayerRoom,
    places: Places,
    /// `(2 * backbone)`: a token's embedding, and the state behind it. The first step's, and the others'.
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
                if count > MOST_RANKED {
                    let problem = format!("an assistant of {count} centroids; the kernels rank {MOST_RANKED} at most");
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

    pub(super) fn room(&self, device: &dyn Device) -> Result<AssistantRoom> {
        let (hidden, backbone) = (self.config.hidden_size, self.post_projection.outputs());
        let (centroids, groups, scores) = match &self.head {
            DeviceHead::Dense(head) => (1, 1, head.outputs()),
            DeviceHead::Centroids(head) => (head.centroids.outputs(), head.top_k, head.top_k * head.table.outputs()),
        };
        Ok(AssistantRoom {
            h: Buffer::new(device, hidden)?,
            layers: LayerRoom::new(device, &self.config, 1, 2 * backbone)?,
            places: Places::new(device, &self.frequencies, 1)?,
            first: Buffer::new(device, 2 * backbone)?,
            next: Buffer::new(device, 2 * backbone)?,
            normed: Buffer::new(device, hidden)?,
            ranks: Buffer::new(device, centroids)?,
            groups: Buffer::new(device, groups)?,
            scores: Buffer::new(device, scores)?,
            partial: Buffer::new(device, Scores::partial_len(1, scores))?,
        })
    }

    /// Where a chain's links stand: behind the committed positions, all of them. The first link says where that begins.
    pub(super) fn place(&self, work: &Work, room: &AssistantRoom, at: At, begin: Option<&Begin>) -> Result<Placed> {
        match begin {
            Some(begin) => {
                let start = (begin.length, begin.emitted, at);
                room.places.place(work, &self.frequencies, start, (1, Stand::Together))
            }
            None => Ok(room.places.placed(at, (1, Stand::Together))),
        }
    }

    /// One link of a chain, from `token` and the state behind it: scores of the next token, and its state in
    /// [`AssistantRoom::next`]. The `link` 0 starts from [`AssistantRoom::state`], the others from the link before.
    pub(super) fn step(
        &self,
        work: &Work,
        (room, placed): (&AssistantRoom, &Placed),
        target: &DeviceTarget,
        kv: &DeviceKv,
        (token, link): (Span<u32>, usize),
    ) -> Result<()> {
        let (hidden, backbone) = (self.config.hidden_size, self.post_projection.outputs());
        let (h, quants) = (room.h.span(), &room.layers.quants);
        let input = if link == 0 { room.first.span() } else { room.next.span() };
        target.embed(work, (token, 1), part(input, 0, backbone))?; // embedding first
        self.pre_projection.multiply(work, &Input::new(quants, input, (1, 2 * backbone)), h)?;
        let pass = Pass { work, room: &room.layers, placed };
        for (layer, donor) in self.layers.iter().zip(&self.donors) {
            layer.forward(&pass, kv, *donor, (h, None))?;
        }
        let normed = room.normed.span();
        self.norm.write(work, h, 1, normed)?;
        let n = Input::new(quants, normed, (1, hidden));
        match &self.head {
            DeviceHead::Dense(head) => head.multiply(work, &n, room.scores.span())?,
            DeviceHead::Centroids(head) => {
                let (count, best) = (head.centroids.outputs(), head.top_k);
                head.centroids.multiply(work, &n, room.ranks.span())?;
                work.run(top_k((room.ranks.span(), count), (room.groups.span(), best)))?;
                let lists = Buckets {
                    matrices: room.groups.span(),
                    starts: head.starts.span(),
                    count: head.count.span(),
                    rows: Some(head.row.span()),
                };
                head.table.multiply_buckets(work, &n, &lists, (best, best), room.scores.span())?;
            }
        }
        self.post_projection.multiply(work, &n, part(room.next.span(), backbone, backbone))
    }

    /// The best of what the last step scored goes to `token`, which need not be aligned.
    pub(super) fn choose(
        &self,
        work: &Work,
        room: &AssistantRoom,
        suppressed: Option<(Span<u32>, usize)>,
        token: Span<u32>,
    ) -> Result<()> {
        let (n, grouped) = match &self.head {
            DeviceHead::Dense(head) => (head.outputs(), None),
            DeviceHead::Centroids(head) => {
                let len = head.table.outputs();
                let grouped = Grouped { groups: room.groups.span(), ordering: head.ordering.span(), len };
                (head.top_k * len, Some(grouped))
            }
        };
        let scores = Scores { x: room.scores.span(), rows: 1, n, stride: n, cap: None, suppressed, grouped };
        work.run(argmax_parts(&scores, room.partial.span(), token))?;
        work.run(argmax(&scores, room.partial.span(), token))
    }

    /// What the last step scored, and of which ids; no ids means all, in order.
    pub(super) fn scores(&self, room: &AssistantRoom) -> Result<(Option<Vec<u32>>, Vec<f32>)> {
        match &self.head {
            DeviceHead::Dense(head) => Ok((None, room.scores.read(0, head.outputs())?)),
            DeviceHead::Centroids(head) => {
                let (best, len) = (head.top_k, head.table.outputs());
                let groups = room.groups.read(0, best)?;
                let ids = groups.iter().flat_map(|group| {
                    let start = *group as usize * len;
                    head.token_ordering.get(start..start + len).unwrap_or_default()
                });
                Ok((Some(ids.copied().collect()), room.scores.read(0, best * len)?))
            }
        }
    }
}

impl AssistantRoom {
    /// See [`crate::device::Room::grown`].
    pub(super) fn grown(&self) -> usize {
        self.layers.attention.grown()
    }

    /// Where the target's state that a chain starts from lies, `(backbone)`: a buffer, and where it begins there.
    pub(super) fn state(&self) -> (&Buffer<f32>, usize) {
        (&self.first, self.first.len() / 2)
    }
}
