//! Computes the keys that the device stores for layers with K = V from V, when a session file is loaded.

use foretoken_kernels::{Elements, Isa, rope};

use crate::kv::{PAGE, RotaryFirst};
use crate::nn::Angles;

/// Keys that are stored on the device but not in files (K = V).
pub(super) struct RecomputedKeys {
    /// The key norm's weight: `(head_dim)`.
    pub(super) weight: Vec<f32>,
    /// Channel order on the device; `None` is the model's.
    pub(super) rotary_first: Option<RotaryFirst>,
}

impl RecomputedKeys {
    /// The keys of a page, from its values `(heads, PAGE, head_dim)` and the angles of its positions.
    pub(super) fn keys(&self, angles: &Angles, values: &[f32]) -> Vec<f32> {
        let mut keys = vec![0.0; values.len()];
        let head = PAGE * self.weight.len();
        for (values, keys) in values.chunks_exact(head).zip(keys.chunks_exact_mut(head)) {
            let values = Elements::F32(values);
            rope::k_eq_v(Isa::best(), values, &self.weight, angles.cos(), angles.sin(), keys);
        }
        keys
    }
}
