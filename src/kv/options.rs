//! Options of the KV cache, and the context that fits memory.

use super::format::{ExactZones, KvFormat, KvPreset};
use super::layout::{KvLayout, PAGE};
use crate::{Error, Result};

/// Formats and limits of the KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvOptions {
    /// Format of the keys. Default: f16.
    pub key: KvFormat,
    /// Format of the values. Default: f16.
    pub value: KvFormat,
    /// Exact rows of quantized layers. Its type replaces a quantized `key` or `value` in sliding layers, which stay exact
    /// (their size is bounded by the window) unless `layers` says otherwise. Default: [`ExactZones::default`].
    pub exact: ExactZones,
    /// Formats of single layers, instead of `key` and `value`. Default: none.
    pub layers: Vec<LayerFormat>,
    /// Storage of layers with K = V. Default: V alone.
    pub k_eq_v: KEqV,
    /// Maximum positions. More than the model's maximum, which it was trained for, are possible, with a warning.
    /// Default: the model's maximum, or the largest that fits memory.
    pub max_context: Option<usize>,
    /// Rows that one round may stage (a prefill chunk, a verify batch). Sliding layers retain this many rows beyond
    /// their window, so that a round can be rolled back. Default: 512.
    pub max_round_rows: usize,
    /// Limit of K and V in bytes. Default: available system memory.
    pub memory: Option<u64>,
}

/// Remedy for K and V that do not fit.
pub(crate) const MEMORY_REMEDY: &str = "use a smaller cache type or context";

/// The formats of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerFormat {
    /// Index of a target layer that computes its own K and V.
    pub layer: usize,
    /// Format of its keys.
    pub key: KvFormat,
    /// Format of its values.
    pub value: KvFormat,
}

/// Storage of a layer with K = V: its keys are its values, normed and rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KEqV {
    /// V is stored, and K computed from it while reading: all of K if both have the same exact format, the channels
    /// that do not rotate if both are quantized.
    #[default]
    Recomputed,
    /// K and V are both stored.
    Stored,
}

impl Default for KvOptions {
    fn default() -> Self {
        KvPreset::Exact.into()
    }
}

impl From<KvPreset> for KvOptions {
    fn from(preset: KvPreset) -> Self {
        let (key, value, exact) = preset.formats();
        Self {
            key,
            value,
            exact,
            layers: Vec::new(),
            k_eq_v: KEqV::default(),
            max_context: None,
            max_round_rows: 512,
            memory: None,
        }
    }
}

impl KvOptions {
    /// Formats of the keys and values of store `index`.
    pub(crate) fn formats(&self, layout: &KvLayout, index: usize) -> (KvFormat, KvFormat) {
        let is_of_store = |format: &&LayerFormat| layout.store_of_layer.get(format.layer) == Some(&index);
        if let Some(format) = self.layers.iter().find(is_of_store) {
            return (format.key, format.value);
        }
        let bounded = layout.stores[index].window.is_some();
        let or_exact = |format| match format {
            KvFormat::Quantized(_) if bounded => KvFormat::Exact(self.exact.element),
            format => format,
        };
        (or_exact(self.key), or_exact(self.value))
    }

    pub(crate) fn check(&self, layout: &KvLayout) -> Result<()> {
        if self.max_context == Some(0) {
            return Err(Error::argument("max_context", "is 0, must be at least 1"));
        }
        if self.max_round_rows == 0 {
            return Err(Error::argument("max_round_rows", "is 0, must be at least 1"));
        }
        layout.check()?;
        if self.exact.head > PAGE {
            let head = self.exact.head;
            return Err(Error::argument("exact.head", format!("is {head} positions, must be at most {PAGE}")));
        }
        // A layer that computes K and V is the first that reads its store.
        let has_own = |LayerFormat { layer, .. }: &LayerFormat| {
            layout.store_of(*layer).is_ok_and(|store| !layout.store_of_layer[..*layer].contains(&store))
        };
        if let Some(LayerFormat { layer, .. }) = self.layers.iter().find(|format| !has_own(format)) {
            let problem = format!("layer {layer} has no K/V store of its own; name another layer");
            return Err(Error::argument("layers", problem));
        }
        Ok(())
    }

    /// The options that determine the bits of K and V, without limits of memory and context.
    pub(crate) fn without_limits(&self) -> Self {
        Self { max_context: None, memory: None, ..self.clone() }
    }

    /// The context: `max_context` if set, else the largest up to `default` that fits `memory`, if that is set.
    pub(crate) fn context(&self, default: usize, bytes_at: impl Fn(usize) -> usize) -> Result<usize> {
        let requested = self.max_context.unwrap_or(default);
        let Some(available) = self.memory else { return Ok(requested) };
        if bytes_at(requested) as u64 <= available {
            return Ok(requested);
        }
        let (mut fits, mut too_long) = (0, requested);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if bytes_at(middle) as u64 <= available { fits = middle } else { too_long = middle }
        }
        if self.max_context.is_some() || fits == 0 {
            return Err(Error::Memory {
                what: format!("K and V of a context of {requested}"),
                needed: Some(bytes_at(requested) as u64),
                available: Some(available),
                fits: Some(fits),
                remedy: MEMORY_REMEDY.into(),
            });
        }
        Ok(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_context_that_fits_is_found() {
        let options = KvOptions { memory: Some(1000), ..KvOptions::default() };
        let bytes_at = |context: usize| 7 * context;
        assert_eq!(options.context(100, bytes_at).unwrap(), 100);
        assert_eq!(options.context(5000, bytes_at).unwrap(), 142);
        let asked = KvOptions { max_context: Some(143), ..options };
        let message = asked.context(5000, bytes_at).unwrap_err().to_string();
        assert!(message.contains("143") && message.contains("142"), "{message}");
        assert!(KvOptions { memory: Some(6), ..KvOptions::default() }.context(10, bytes_at).is_err());
    }
}
