//! The recurrent state of a sequence: for every delta net a matrix per value head, and the convolution's last inputs.
//!
//! A pass never writes rows that may be rejected into a matrix: it computes their outputs on a copy of a few columns,
//! and keeps their inputs. A commit marks how many of them are accepted; the next pass applies those first, while it
//! reads the matrix anyway. The order of operations is that of single steps, so the bits are those of a sequence that
//! only ever saw the committed rows.

use std::sync::Arc;

use foretoken_kernels::Isa;
use foretoken_kernels::delta_net::{HeadRows, advance, convolve, l2_normalize, outputs, scratch_len};
use rayon::prelude::*;

use super::config::{DeltaNetConfig, TensorLayout};
use crate::kv::Recurrent;
use crate::nn::for_row_blocks;

/// Committed rows whose inputs are kept until the next pass; of more, which only prompts have, the inputs would be
/// larger than the matrices.
const MOST_PENDING: usize = 64;

/// What the recurrence of a layer needs besides its state.
pub(super) struct Recurrence {
    dims: DeltaNetConfig,
    layout: TensorLayout,
    conv_weight: Vec<f32>, // (taps, channels)
    isa: Isa,
}

/// Inputs of some rows, of which the first `count` are valid.
#[derive(Clone)]
pub(super) struct Rows {
    qkv: Vec<f32>,   // (rows, channels), before the convolution
    decay: Vec<f32>, // (heads, rows)
    beta: Vec<f32>,  // (heads, rows)
    heads: usize,
    count: usize,
}

/// The state of one layer.
#[derive(Clone)]
struct Layer {
    recurrence: Arc<Recurrence>,
    matrices: Arc<Vec<f32>>, // (value heads, key_head_dim, value_head_dim), shared with forks until it changes
    window: Vec<f32>,        // (taps - 1, channels): the last inputs of the convolution
    pending: Option<Rows>,   // committed, not yet in `matrices` and `window`
    staged: Option<Rows>,
}

/// The state of all delta nets of a sequence.
pub(super) struct DeltaNetState {
    layers: Vec<Layer>,
}

/// The state of one delta net, as numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNetMatrices {
    /// `(value heads, key_head_dim, value_head_dim)`.
    pub matrices: Vec<f32>,
    /// `(taps - 1, channels)`: the convolution's last inputs, the oldest row first; zeros before the sequence.
    pub window: Vec<f32>,
}

impl Recurrence {
    /// `conv_weight` is `(taps, channels)`.
    pub(super) fn new(dims: DeltaNetConfig, layout: TensorLayout, conv_weight: Vec<f32>, isa: Isa) -> Self {
        Self { dims, layout, conv_weight, isa }
    }

    /// The key head that a value head reads.
    fn key_head(&self, value_head: usize) -> usize {
        match self.layout {
            TensorLayout::HuggingFace => value_head / (self.dims.num_value_heads / self.dims.num_key_heads),
            TensorLayout::Gguf => value_head % self.dims.num_key_heads,
        }
    }

    /// The convolution of `rows`, then normalized queries and keys: `(rows.len() - (taps - 1), channels)`.
    fn convolved(&self, rows: &[&[f32]]) -> Vec<f32> {
        let (channels, keys, key_dim) = (self.dims.channels(), self.dims.keys(), self.dims.key_head_dim);
        let before = self.dims.conv_kernel_dim - 1;
        let mut x = vec![0.0; (rows.len() - before) * channels];
        for_row_blocks(&mut x, channels, |first, x| {
            let rows = &rows[first..first + x.len() / channels + before];
            convolve(self.isa, rows, &self.conv_weight, channels, x);
            for x in x.chunks_exact_mut(channels) {
                l2_normalize(&mut x[..keys], key_dim, (key_dim as f32).powf(-0.5));
                l2_normalize(&mut x[keys..2 * keys], key_dim, 1.0);
            }
        });
        x
    }

    /// What value head `head` reads of the rows `inputs`, whose convolution is `x`.
    fn head<'a>(&self, head: usize, x: &'a [f32], inputs: &'a Rows) -> HeadRows<'a> {
        let (keys, key_dim) = (self.dims.keys(), self.dims.key_head_dim);
        let query = self.key_head(head) * key_dim;
        let value = 2 * keys + head * self.dims.value_head_dim;
        let (decay, beta) = (inputs.of_head(&inputs.decay, head), inputs.of_head(&inputs.beta, head));
        HeadRows { x, stride: self.dims.channels(), query, key: keys + query, value, decay, beta }
    }
}

impl Rows {
    /// `qkv` is `(rows, channels)`; `decay` and `beta` are `(rows, heads)`.
    pub(super) fn new(qkv: &[f32], decay: &[f32], beta: &[f32], heads: usize) -> Self {
        let by_head = |x: &[f32]| (0..heads).flat_map(|head| x.iter().skip(head).step_by(heads)).copied().collect();
        let (decay, beta, count) = (by_head(decay), by_head(beta), decay.len() / heads);
        Self { qkv: qkv.to_vec(), decay, beta, heads, count }
    }

    fn of_head<'a>(&self, x: &'a [f32], head: usize) -> &'a [f32] {
        let rows = x.len() / self.heads;
        &x[head * rows..][..self.count]
    }
}

impl Layer {
    fn new(recurrence: &Arc<Recurrence>) -> Self {
        let dims = &recurrence.dims;
        let matrices = Arc::new(vec![0.0; dims.values() * dims.key_head_dim]);
        let window = vec![0.0; (dims.conv_kernel_dim - 1) * dims.channels()];
        Self { recurrence: recurrence.clone(), matrices, window, pending: None, staged: None }
    }

    /// The convolution's inputs up to the last of `rows`: the window's, then theirs.
    fn inputs<'a>(&'a self, rows: &'a Rows) -> Vec<&'a [f32]> {
        let channels = self.recurrence.dims.channels();
        let inputs = self.window.chunks_exact(channels).chain(rows.qkv.chunks_exact(channels));
        inputs.take(self.recurrence.dims.conv_kernel_dim - 1 + rows.count).collect()
    }

    /// Applies the pending rows.
    fn settle(&mut self) {
        let Some(rows) = self.pending.take() else { return };
        let Recurrence { dims, isa, .. } = &*self.recurrence;
        let inputs = self.inputs(&rows);
        let x = self.recurrence.convolved(&inputs);
        let window = inputs[rows.count..].concat();
        let matrices = Arc::make_mut(&mut self.matrices).par_chunks_mut(dims.key_head_dim * dims.value_head_dim);
        matrices.enumerate().for_each(|(head, state)| {
            let mut scratch = vec![0.0; scratch_len(dims.key_head_dim)];
            advance(*isa, state, dims.key_head_dim, self.recurrence.head(head, &x, &rows), &mut scratch);
        });
        self.window = window;
    }

    /// The outputs of `rows` behind a settled state: `y` is `(rows, heads * value_head_dim)`.
    fn outputs(&self, rows: &Rows, y: &mut [f32]) {
        let Recurrence { dims, isa, .. } = &*self.recurrence;
        let (key_dim, value_dim) = (dims.key_head_dim, dims.value_head_dim);
        let x = self.recurrence.convolved(&self.inputs(rows));
        let mut by_head = vec![0.0; y.len()]; // (heads, rows, value_head_dim)
        let heads = self.matrices.par_chunks(key_dim * value_dim).zip(by_head.par_chunks_mut(rows.count * value_dim));
        heads.enumerate().for_each(|(head, (state, y))| {
            let mut scratch = vec![0.0; scratch_len(key_dim)];
            outputs(*isa, state, key_dim, self.recurrence.head(head, &x, rows), &mut scratch, y);
        });
        for (i, y) in y.chunks_exact_mut(value_dim).enumerate() {
            let (row, head) = (i / rows.heads, i % rows.heads);
            y.copy_from_slice(&by_head[(head * rows.count + row) * value_dim..][..value_dim]);
        }
    }
}

impl DeltaNetState {
    /// The state of an empty sequence.
    pub(super) fn new<'a>(layers: impl Iterator<Item = &'a Arc<Recurrence>>) -> Self {
        Self { layers: layers.map(Layer::new).collect() }
    }

    /// Stages rows of delta net `index` and writes their outputs to `y`, `(rows, heads * value_head_dim)`.
    pub(super) fn stage(&mut self, index: usize, rows: Rows, y: &mut [f32]) {
        let layer = &mut self.layers[index];
        layer.settle();
        layer.outputs(&rows, y);
        layer.staged = Some(rows);
    }

    /// The committed state of every delta net.
    pub(super) fn matrices(&self) -> Vec<DeltaNetMatrices> {
        let settled = |layer: &Layer| {
            let mut layer = layer.clone();
            layer.settle();
            DeltaNetMatrices { matrices: layer.matrices.to_vec(), window: layer.window }
        };
        self.layers.iter().map(settled).collect()
    }
}

impl Recurrent for DeltaNetState {
    fn begin(&mut self, _: usize) {
        self.layers.iter_mut().for_each(|layer| layer.staged = None);
    }

    fn commit(&mut self, keep: usize) {
        for layer in self.layers.iter_mut().filter(|_| keep > 0) {
            layer.settle(); // nothing to do if the pass computed this layer
            layer.pending = layer.staged.take().map(|rows| Rows { count: keep, ..rows });
            if keep > MOST_PENDING {
                layer.settle();
            }
        }
    }

    fn fork(&self) -> Box<dyn Recurrent> {
        let layers = self.layers.iter().map(|layer| Layer { staged: None, ..layer.clone() });
        Box::new(Self { layers: layers.collect() })
    }

    fn save(&self) -> Option<Vec<f32>> {
        Some(self.matrices().into_iter().flat_map(|layer| [layer.matrices, layer.window].concat()).collect())
    }

    fn load(&mut self, numbers: &[f32]) -> bool {
        let of = |layer: &Layer| layer.matrices.len() + layer.window.len();
        if numbers.len() != self.layers.iter().map(of).sum::<usize>() {
            return false;
        }
        let mut numbers = numbers;
        for layer in &mut self.layers {
            let (matrices, rest) = numbers.split_at(layer.matrices.len());
            let (window, rest) = rest.split_at(layer.window.len());
            (layer.matrices, layer.window) = (Arc::new(matrices.to_vec()), window.to_vec());
            (layer.pending, layer.staged, numbers) = (None, None, rest);
        }
        true
    }

    fn bytes(&self) -> usize {
        let rows = |rows: &Option<Rows>| rows.as_ref().map_or(0, |rows| rows.qkv.len() + 2 * rows.decay.len());
        let floats =
            |layer: &Layer| layer.matrices.len() + layer.window.len() + rows(&layer.pending) + rows(&layer.staged);
        4 * self.layers.iter().map(floats).sum::<usize>()
    }
}
