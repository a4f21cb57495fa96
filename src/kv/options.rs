//! How much is kept, in what, and whether it fits.

use super::format::{ExactZones, KvFormat, KvPreset};
use super::{KvLayout, PAGE};
use crate::{Error, Result};

/// How rows are kept, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvOptions {
    /// Format of the keys. Default: f16.
    pub key: KvFormat,
    /// Format of the values. Default: f16.
    pub value: KvFormat,
    /// What stays exact of a layer that is coded; its type is also that of sliding layers, which are bounded by their
    /// window and stay exact, unless `layers` says otherwise.
    pub exact: ExactZones,
    /// Layers of the target with formats of their own.
    pub layers: Vec<LayerFormat>,
    /// What happens where a layer's keys are its values, normed and rotated. Default: they are derived from them.
    pub keys_of_values: KeysOfValues,
    /// Positions that fit. Default: what the model was made for, or less if memory does not reach.
    pub max_context: Option<usize>,
    /// Rows that one round may stage (a prefill chunk, a verify batch). Sliding layers keep this many rows beyond their
    /// window, so that a round can be rolled back. Default: 512.
    pub max_round_rows: usize,
    /// Bytes that K and V may take. Default: what the system says is available.
    pub memory: Option<u64>,
}

/// The formats of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerFormat {
    /// The layer's place in the target. It must be one that computes its own K and V.
    pub layer: usize,
    /// Format of its keys.
    pub key: KvFormat,
    /// Format of its values.
    pub value: KvFormat,
}

/// What happens where a layer's keys are its values, normed and rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeysOfValues {
    /// Only the values are kept, and the keys are made as they are read, if both have the same exact format.
    #[default]
    Derived,
    /// Both are kept.
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
            keys_of_values: KeysOfValues::default(),
            max_context: None,
            max_round_rows: 512,
            memory: None,
        }
    }
}

impl KvOptions {
    /// Formats of the keys and values of store `index`.
    pub(crate) fn formats(&self, layout: &KvLayout, index: usize) -> (KvFormat, KvFormat) {
        let owns = |format: &&LayerFormat| layout.store_of_layer.get(format.layer) == Some(&index);
        if let Some(format) = self.layers.iter().find(owns) {
            return (format.key, format.value);
        }
        let bounded = layout.stores[index].window.is_some();
        let or_exact = |format| match format {
            KvFormat::Coded(_) if bounded => KvFormat::Exact(self.exact.element),
            format => format,
        };
        (or_exact(self.key), or_exact(self.value))
    }

    pub(crate) fn check(&self, layout: &KvLayout) -> Result<()> {
        if self.max_context == Some(0) || self.max_round_rows == 0 {
            return Err(Error::Input("the context and the rows of a round must be at least 1".into()));
        }
        if self.exact.head > PAGE {
            let head = self.exact.head;
            return Err(Error::Input(format!("the exact head is {head} positions, {PAGE} is the most")));
        }
        let own = |layer: usize| layout.store_of_layer.iter().position(|s| Some(s) == layout.store_of_layer.get(layer));
        if let Some(LayerFormat { layer, .. }) = self.layers.iter().find(|f| own(f.layer) != Some(f.layer)) {
            return Err(Error::Input(format!("layer {layer} has no K and V of its own whose format could be chosen")));
        }
        Ok(())
    }

    /// The context to prepare for: the one asked for, if it fits memory; else the model's, or the largest that fits.
    pub(crate) fn context(&self, default: usize, bytes_at: impl Fn(usize) -> usize) -> Result<usize> {
        let wanted = self.max_context.unwrap_or(default);
        let Some(available) = self.memory.or_else(available_memory) else { return Ok(wanted) };
        if bytes_at(wanted) as u64 <= available {
            return Ok(wanted);
        }
        let (mut fits, mut too_long) = (0, wanted);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if bytes_at(middle) as u64 <= available { fits = middle } else { too_long = middle }
        }
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        if self.max_context.is_some() || fits == 0 {
            let (needed, available) = (gib(bytes_at(wanted) as u64), gib(available));
            return Err(Error::Input(format!(
                "a context of {wanted} needs {needed:.2} GiB of K/V and {available:.2} GiB are available; the largest that \
                 fits is {fits}, a smaller cache type fits more"
            )));
        }
        tracing::warn!(model = wanted, fits, "memory does not reach for the model's context; it is shortened");
        Ok(fits)
    }
}

/// Bytes that the system could give without swapping; `None` where it does not tell.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
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
