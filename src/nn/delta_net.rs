//! The gated delta net, without its projections.

use candle_core::Tensor;
use foretoken_kernels::Isa;
pub use foretoken_kernels::delta_net::HeadOrder;

use super::F32View;
use crate::Result;

/// Dimensions of the gated delta nets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// Number of query and key heads.
    pub num_key_heads: usize,
    /// Number of value heads, a multiple of the key heads.
    pub num_value_heads: usize,
    /// Width of a query and of a key.
    pub key_head_dim: usize,
    /// Width of a value.
    pub value_head_dim: usize,
    /// Rows that the convolution sees, including the current one.
    pub conv_kernel_dim: usize,
}

/// The convolution, gates and recurrence of a layer.
pub struct DeltaNet {
    /// The dimensions.
    pub dims: DeltaNetConfig,
    /// Key heads of the value heads.
    pub order: HeadOrder,
    /// `(taps, channels)`: the convolution's weight, the oldest row's first.
    pub conv_weight: Vec<f32>,
    /// `(value heads)`.
    pub dt_bias: Vec<f32>,
    /// `(value heads)`: `-exp(A_log)`.
    pub rate: Vec<f64>,
    /// The instruction set.
    pub isa: Isa,
}

impl DeltaNetConfig {
    /// Channels of all queries, or of all keys.
    pub(crate) fn keys(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Channels of all values.
    pub(crate) fn values(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Channels of the convolution: queries, keys, values.
    pub(crate) fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Numbers in the state of a sequence: the matrices', and those of the convolution's last inputs.
    pub(crate) fn state_len(&self) -> [usize; 2] {
        [self.values() * self.key_head_dim, (self.conv_kernel_dim - 1) * self.channels()]
    }
}

impl DeltaNet {
    /// The decay of every head's state, `exp(-exp(A_log) softplus(a + dt_bias))`, and `beta = sigmoid(b)`:
    /// `(rows, value heads)` each, as `a` and `b` are.
    ///
    /// # Errors
    /// Candle's.
    pub(crate) fn gates(&self, a: &Tensor, b: &Tensor) -> Result<(Vec<f32>, Vec<f32>)> {
        let heads = self.dt_bias.len();
        let decay = F32View::new(a)?.iter().enumerate().map(|(i, a)| self.decay(i % heads, *a)).collect();
        Ok((decay, F32View::new(b)?.iter().map(|b| sigmoid(*b)).collect()))
    }

    fn decay(&self, head: usize, a: f32) -> f32 {
        let x = f64::from(a) + f64::from(self.dt_bias[head]);
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        (self.rate[head] * softplus).exp() as f32
    }
}

fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}
