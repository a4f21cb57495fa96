//! The recurrent state of a sequence: for every delta net a matrix per value head, and the convolution's last inputs.
//!
//! A pass never writes rows that may be rejected into a matrix: it computes their outputs on a copy of a few columns,
//! and logs what the recurrence read of them. A commit sets how many of them are accepted; the next pass applies those
//! first, while it reads the matrix anyway. The order of operations is that of single steps, so the bits are those of a
//! sequence that only ever saw the committed rows. Rounds of many rows that are committed whole or not at all, such as
//! a prompt's, store the matrices after them instead.

use std::sync::Arc;

use foretoken_kernels::delta_net::{HeadRows, advance, convolve, l2_normalize, outputs, replay, scratch_len};

use super::recurrent::Recurrent;
use crate::nn::{DeltaNet, HeadOrder, for_each, for_row_blocks, row_blocks};
use crate::{Error, Result};

/// Maximum logged rows until the next pass; a larger log would exceed the matrices.
const MAX_LOGGED: usize = 64;

/// Minimum heads per task: a row of a head takes about a microsecond.
const HEADS_PER_TASK: usize = 4;

/// Inputs of a delta net for some rows.
pub(crate) struct Inputs<'a> {
    pub qkv: &'a [f32],   // (rows, channels), before the convolution
    pub decay: &'a [f32], // (rows, heads)
    pub beta: &'a [f32],  // (rows, heads)
}

/// Inputs of the recurrence for some rows, of which the first `count` are valid.
#[derive(Clone)]
struct Rows {
    x: Vec<f32>,     // (rows, channels): convolved, queries and keys normalized
    decay: Vec<f32>, // (heads, rows)
    beta: Vec<f32>,  // (heads, rows)
    heads: usize,
    count: usize,
}

/// Uncommitted rows.
enum Staged {
    /// A prefix may be committed: the recurrence's inputs, and the convolution's `(rows, channels)`.
    Logged(Rows, Vec<f32>),
    /// All or none: the state after them.
    Whole { matrices: Vec<f32>, window: Vec<f32> },
}

/// The state of one layer.
struct Layer {
    net: Arc<DeltaNet>,
    matrices: Arc<Vec<f32>>, // (value heads, key_head_dim, value_head_dim), shared with forks until it changes
    window: Vec<f32>,        // (taps - 1, channels): the last inputs of the convolution
    accepted: Option<Rows>,  // committed, not yet in `matrices`
    staged: Option<Staged>,
}

/// The state of all delta nets of a sequence.
pub(crate) struct DeltaNetState {
    layers: Vec<Layer>,
    whole: bool, // the round is committed whole or not at all
}

/// The state of one delta net, as values.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNetMatrices {
    /// `(value heads, key_head_dim, value_head_dim)`.
    pub matrices: Vec<f32>,
    /// `(taps - 1, channels)`: the convolution's last inputs, the oldest row first; zeros before the sequence.
    pub window: Vec<f32>,
}

impl DeltaNet {
    /// The key head of a value head.
    fn key_head(&self, value_head: usize) -> usize {
        match self.order {
            HeadOrder::Grouped => value_head / (self.dims.num_value_heads / self.dims.num_key_heads),
            HeadOrder::Tiled => value_head % self.dims.num_key_heads,
        }
    }

    /// The convolution of `rows`, then normalized queries and keys: `(rows.len() - (taps - 1), channels)`.
    fn convolved(&self, rows: &[&[f32]]) -> Vec<f32> {
        let (channels, keys, key_dim) = (self.dims.channels(), self.dims.keys(), self.dims.key_head_dim);
        let before = self.dims.conv_kernel_dim - 1;
        row_blocks(rows.len() - before, channels, |first, x| {
            let rows = &rows[first..first + x.len() / channels + before];
            convolve(self.isa, rows, &self.conv_weight, channels, x);
            for x in x.chunks_exact_mut(channels) {
                l2_normalize(&mut x[..keys], key_dim, (key_dim as f32).powf(-0.5));
                l2_normalize(&mut x[keys..2 * keys], key_dim, 1.0);
            }
        })
    }

    /// The inputs of value head `head` for `rows`.
    fn head<'a>(&self, head: usize, rows: &'a Rows) -> HeadRows<'a> {
        let (keys, key_dim, channels) = (self.dims.keys(), self.dims.key_head_dim, self.dims.channels());
        let query = self.key_head(head) * key_dim;
        let value = 2 * keys + head * self.dims.value_head_dim;
        let (decay, beta) = (rows.of_head(&rows.decay, head), rows.of_head(&rows.beta, head));
        let x = &rows.x[..rows.count * channels];
        HeadRows { x, stride: channels, query, key: keys + query, value, decay, beta }
    }

    /// Length of a head's matrix.
    fn matrix(&self) -> usize {
        self.dims.key_head_dim * self.dims.value_head_dim
    }

    /// Calls `of(head, part, scratch)` with every head's part, on all threads.
    fn for_heads<T: Send>(&self, parts: impl Iterator<Item = T>, of: impl Fn(usize, T, &mut [f32]) + Sync) {
        let mut parts = parts.enumerate();
        let tasks = std::iter::from_fn(|| {
            let task: Vec<_> = parts.by_ref().take(HEADS_PER_TASK).collect();
            (!task.is_empty()).then_some(task)
        });
        for_each(tasks, |heads| {
            let mut scratch = vec![0.0; scratch_len(self.dims.key_head_dim)];
            heads.into_iter().for_each(|(head, part)| of(head, part, &mut scratch));
        });
    }

    /// Advances `matrices` by `rows`.
    fn advance(&self, matrices: &mut [f32], rows: &Rows) {
        self.for_heads(matrices.chunks_mut(self.matrix()), |head, state, scratch| {
            advance(self.isa, state, self.dims.key_head_dim, self.head(head, rows), scratch, &mut []);
        });
    }
}

/// Appends `new` to `window`, and keeps the last values, as many as there were.
fn shift(window: &mut [f32], new: &[f32]) {
    let (old, new) = (window.len().saturating_sub(new.len()), &new[new.len().saturating_sub(window.len())..]);
    window.copy_within(new.len().., 0);
    window[old..].copy_from_slice(new);
}

impl Rows {
    fn new(x: Vec<f32>, inputs: &Inputs<'_>, heads: usize) -> Self {
        let by_head = |x: &[f32]| (0..heads).flat_map(|head| x.iter().skip(head).step_by(heads)).copied().collect();
        let (decay, beta) = (by_head(inputs.decay), by_head(inputs.beta));
        Self { x, decay, beta, heads, count: inputs.decay.len() / heads }
    }

    fn of_head<'a>(&self, x: &'a [f32], head: usize) -> &'a [f32] {
        let rows = x.len() / self.heads;
        &x[head * rows..][..self.count]
    }
}

impl Layer {
    fn new(net: &Arc<DeltaNet>) -> Self {
        let [matrices, window] = net.dims.state_len().map(|len| vec![0.0; len]);
        let matrices = Arc::new(matrices);
        Self { net: net.clone(), matrices, window, accepted: None, staged: None }
    }

    /// The committed state.
    fn committed(&self) -> Self {
        let (net, matrices) = (self.net.clone(), self.matrices.clone());
        Self { net, matrices, window: self.window.clone(), accepted: self.accepted.clone(), staged: None }
    }

    /// Applies the accepted rows.
    fn apply_accepted(&mut self) {
        if let Some(rows) = self.accepted.take() {
            let matrices: &mut Vec<f32> = Arc::make_mut(&mut self.matrices);
            self.net.advance(matrices, &rows);
        }
    }

    /// Stages rows and writes their outputs to `y`, `(rows, heads * value_head_dim)`.
    fn stage(&mut self, inputs: &Inputs<'_>, whole: bool, y: &mut [f32]) {
        let net = self.net.clone();
        let DeltaNet { dims, isa, .. } = &*net;
        let (key_dim, value_dim, heads) = (dims.key_head_dim, dims.value_head_dim, dims.num_value_heads);
        let window_and_rows = [&self.window, inputs.qkv].into_iter().flat_map(|x| x.chunks_exact(dims.channels()));
        let window_and_rows: Vec<&[f32]> = window_and_rows.collect();
        let rows = Rows::new(net.convolved(&window_and_rows), inputs, heads);
        let count = rows.count;
        let mut by_head = vec![0.0; y.len()]; // (heads, rows, value_head_dim)
        let outputs_of = by_head.chunks_mut(count * value_dim);
        if whole && count > MAX_LOGGED {
            let mut matrices = self.matrices.to_vec();
            if let Some(accepted) = &self.accepted {
                net.advance(&mut matrices, accepted);
            }
            let states = matrices.chunks_mut(net.matrix()).zip(outputs_of);
            net.for_heads(states, |head, (state, y), scratch| {
                advance(*isa, state, key_dim, net.head(head, &rows), scratch, y);
            });
            let window = window_and_rows[count..].concat();
            self.staged = Some(Staged::Whole { matrices, window });
        } else {
            match self.accepted.take() {
                Some(accepted) => {
                    let states = Arc::make_mut(&mut self.matrices).chunks_mut(net.matrix()).zip(outputs_of);
                    net.for_heads(states, |head, (state, y), scratch| {
                        let both = [net.head(head, &accepted), net.head(head, &rows)];
                        replay(*isa, state, key_dim, both, scratch, y);
                    });
                }
                None => {
                    let states = self.matrices.chunks(net.matrix()).zip(outputs_of);
                    net.for_heads(states, |head, (state, y), scratch| {
                        outputs(*isa, state, key_dim, net.head(head, &rows), scratch, y);
                    });
                }
            }
            self.staged = Some(Staged::Logged(rows, inputs.qkv.to_vec()));
        }
        for_row_blocks(y, heads * value_dim, |first, y| {
            for (i, y) in y.chunks_exact_mut(value_dim).enumerate() {
                let (row, head) = (first + i / heads, i % heads);
                y.copy_from_slice(&by_head[(head * count + row) * value_dim..][..value_dim]);
            }
        });
    }

    /// Commits the first `keep` staged rows, at least one.
    fn commit(&mut self, keep: usize) {
        match self.staged.take() {
            Some(Staged::Logged(rows, qkv)) => {
                shift(&mut self.window, &qkv[..keep * self.net.dims.channels()]);
                self.accepted = Some(Rows { count: keep, ..rows });
                if keep > MAX_LOGGED {
                    self.apply_accepted();
                }
            }
            Some(Staged::Whole { matrices, window }) => {
                (self.matrices, self.window, self.accepted) = (Arc::new(matrices), window, None);
            }
            None => {}
        }
    }
}

impl DeltaNetState {
    /// The state of an empty sequence, if it fits the `available` bytes; `None`: they are unknown.
    ///
    /// # Errors
    /// If it does not fit; nothing is allocated then.
    pub(crate) fn new<'a>(layers: impl Iterator<Item = &'a Arc<DeltaNet>>, available: Option<u64>) -> Result<Self> {
        let layers = Vec::from_iter(layers);
        let numbers: usize = layers.iter().flat_map(|net| net.dims.state_len()).sum();
        let needed = 4 * numbers as u64;
        if available.is_some_and(|available| needed > available) {
            return Err(Error::Memory {
                what: "the delta nets' states of a sequence".into(),
                needed: Some(needed),
                available,
                fits: None,
                remedy: "free memory, or use a smaller model".into(),
            });
        }
        Ok(Self { layers: layers.into_iter().map(Layer::new).collect(), whole: false })
    }

    /// Stages rows of delta net `index` and writes their outputs to `y`, `(rows, heads * value_head_dim)`.
    pub(crate) fn stage(&mut self, index: usize, inputs: &Inputs<'_>, y: &mut [f32]) {
        self.layers[index].stage(inputs, self.whole, y);
    }

    /// The committed state of every delta net.
    pub(crate) fn matrices(&self) -> Vec<DeltaNetMatrices> {
        let applied = |layer: &Layer| {
            let mut layer = layer.committed();
            layer.apply_accepted();
            DeltaNetMatrices { matrices: layer.matrices.to_vec(), window: layer.window }
        };
        self.layers.iter().map(applied).collect()
    }
}

impl Recurrent for DeltaNetState {
    fn begin(&mut self, _: usize) {
        self.whole = false;
        self.layers.iter_mut().for_each(|layer| layer.staged = None);
    }

    fn begin_whole(&mut self, rows: usize) {
        self.begin(rows);
        self.whole = true;
    }

    fn commit(&mut self, keep: usize) {
        self.layers.iter_mut().filter(|_| keep > 0).for_each(|layer| layer.commit(keep));
    }

    fn fork(&self) -> Box<dyn Recurrent> {
        Box::new(Self { layers: self.layers.iter().map(Layer::committed).collect(), whole: false })
    }

    fn save(&self) -> Option<Vec<f32>> {
        Some(self.matrices().into_iter().flat_map(|layer| [layer.matrices, layer.window].concat()).collect())
    }

    fn load(&mut self, values: &[f32]) -> bool {
        let of = |layer: &Layer| layer.matrices.len() + layer.window.len();
        if values.len() != self.layers.iter().map(of).sum::<usize>() {
            return false;
        }
        let mut values = values;
        for layer in &mut self.layers {
            let (matrices, rest) = values.split_at(layer.matrices.len());
            let (window, rest) = rest.split_at(layer.window.len());
            (layer.matrices, layer.window) = (Arc::new(matrices.to_vec()), window.to_vec());
            (layer.accepted, layer.staged, values) = (None, None, rest);
        }
        true
    }

    fn bytes(&self) -> usize {
        let rows = |rows: &Rows| rows.x.len() + 2 * rows.decay.len();
        let staged = |staged: &Staged| match staged {
            Staged::Logged(log, qkv) => rows(log) + qkv.len(),
            Staged::Whole { matrices, window } => matrices.len() + window.len(),
        };
        let floats = |layer: &Layer| {
            let log = layer.accepted.as_ref().map_or(0, rows) + layer.staged.as_ref().map_or(0, staged);
            layer.matrices.len() + layer.window.len() + log
        };
        4 * self.layers.iter().map(floats).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use foretoken_kernels::Isa;

    use super::*;
    use crate::nn::DeltaNetConfig;

    #[test]
    fn a_window_has_the_last_values() {
        let all = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        for len in 0..=4 {
            for new in 0..=all.len() - len {
                let mut window = all[..len].to_vec();
                shift(&mut window, &all[len..len + new]);
                assert_eq!(window, all[new..len + new], "{new} values after {len}");
            }
        }
    }

    #[test]
    fn states_that_do_not_fit_memory_are_refused() {
        let net = |num_value_heads| {
            let dims = DeltaNetConfig {
                num_key_heads: 1,
                num_value_heads,
                key_head_dim: 8,
                value_head_dim: 4,
                conv_kernel_dim: 3,
            };
            let (order, isa) = (HeadOrder::Grouped, Isa::best());
            let (conv_weight, dt_bias, rate) = (Vec::new(), Vec::new(), Vec::new());
            Arc::new(DeltaNet { dims, order, conv_weight, dt_bias, rate, isa })
        };
        let nets = [net(1), net(2)];
        let new = |available: Option<u64>| DeltaNetState::new(nets.iter(), available);
        // Per value head 8 x 4, and of the convolution two rows of 2 x 8 + 4 and of 2 x 8 + 8.
        let bytes = 4 * (3 * 8 * 4 + 2 * (20 + 24));
        for enough in [Some(bytes), None] {
            assert_eq!(new(enough).expect("a state").bytes() as u64, bytes);
        }
        let error = new(Some(bytes - 1)).err().expect("an error");
        let Error::Memory { needed, available, .. } = &error else { panic!("{error}") };
        assert_eq!((*needed, *available), (Some(bytes), Some(bytes - 1)));
    }
}
