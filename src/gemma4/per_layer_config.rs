//! `per_layer_config` of config.json: per-layer overrides.

use std::collections::BTreeMap;

use crate::Result;
use crate::checkpoint::Fields;

/// The overrides, by layer. A map, even an empty one, replaces `global_head_dim` and `num_global_key_value_heads`: a
/// layer without an entry has the sliding layers' geometry, whatever its type.
pub(super) struct PerLayerConfig(BTreeMap<usize, LayerOverride>);

/// The overrides of one layer.
#[derive(Clone, Copy, Default)]
pub(super) struct LayerOverride {
    pub(super) head_dim: Option<usize>,
    pub(super) num_kv_heads: Option<usize>,
}

impl PerLayerConfig {
    /// The overrides of a model with `count` layers; `None` if there is no map. transformers zero-pads its
    /// keys to the digits of the largest (`"05"`).
    ///
    /// # Errors
    /// If a key is not a layer or is duplicated, or a value is malformed or overrides a field that is not implemented.
    pub(super) fn read(fields: &Fields, count: usize) -> Result<Option<Self>> {
        let Some(map) = fields.optional_object("per_layer_config")? else { return Ok(None) };
        let mut layers = BTreeMap::new();
        for key in map.names() {
            let index = Some(key).filter(|key| key.bytes().all(|byte| byte.is_ascii_digit()));
            let index = index.and_then(|key| key.parse::<usize>().ok()).filter(|index| *index < count);
            let Some(index) = index else {
                return Err(map.error(key, format!("is not a layer; the keys are layers from 0 to {}", count - 1)));
            };
            let Some(own) = map.optional_object(key)? else { continue };
            let known = ["head_dim", "num_key_value_heads"];
            if let Some(name) = own.names().find(|name| !known.contains(name)) {
                return Err(own.unsupported(name, "is not implemented as a per-layer value"));
            }
            let size = |name: &str| own.get(name).map(|_| own.size(name, None)).transpose();
            let layer = LayerOverride { head_dim: size("head_dim")?, num_kv_heads: size("num_key_value_heads")? };
            if layers.insert(index, layer).is_some() {
                return Err(map.error(key, format!("repeats layer {index}; keep one of the entries")));
            }
        }
        Ok(Some(Self(layers)))
    }

    /// The overrides of the layer.
    pub(super) fn layer(&self, index: usize) -> LayerOverride {
        self.0.get(&index).copied().unwrap_or_default()
    }
}
