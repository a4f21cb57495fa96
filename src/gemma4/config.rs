//! `config.json`, validated: every field that affects the computation is implemented or refused by name.

use super::per_layer_config::PerLayerConfig;
use super::rope_config::{RopeConfig, rope};
use crate::Result;
use crate::checkpoint::{Fields, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, NameOf, other_model};
use crate::kv::{KvLayout, StoreLayout};

/// The attention type of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionType {
    /// The last `sliding_window` positions.
    Sliding,
    /// Every position.
    Full,
}

impl AttentionType {
    /// The name in config.json.
    pub fn name(self) -> &'static str {
        match self {
            AttentionType::Sliding => "sliding_attention",
            AttentionType::Full => "full_attention",
        }
    }

    fn parse(fields: &Fields, field: &str, name: &str) -> Result<Self> {
        match name {
            "sliding_attention" => Ok(AttentionType::Sliding),
            "full_attention" => Ok(AttentionType::Full),
            _ => {
                Err(fields
                    .unsupported(field, format!("{name:?} is unknown; expected sliding_attention or full_attention")))
            }
        }
    }
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Its attention type.
    pub attention: AttentionType,
    /// Width of a head.
    pub head_dim: usize,
    /// K/V heads; query heads share them in contiguous groups.
    pub num_kv_heads: usize,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// Whether K = V: V comes from the K projection.
    pub k_eq_v: bool,
    /// Whether it reads the K and V of an earlier layer.
    pub kv_shared: bool,
}

/// The mixture of experts next to the dense MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts per layer.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k_experts: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
}

/// A Gemma 4 text model (`gemma4_text`, `gemma4_unified_text`).
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads of every layer.
    pub num_attention_heads: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Positions visible in a sliding layer, including the query's.
    pub sliding_window: usize,
    /// Maximum context in positions.
    pub max_position_embeddings: usize,
    /// `c` of `c tanh(logits / c)`.
    pub final_logit_softcapping: Option<f64>,
    /// Width of the per-layer embeddings; 0 if there are none.
    pub hidden_size_per_layer_input: usize,
    /// Vocabulary of the per-layer embeddings.
    pub vocab_size_per_layer_input: usize,
    /// The mixture of experts, if there is one.
    pub moe: Option<MoeConfig>,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Rotary parameters of sliding layers.
    pub rope_sliding: RopeConfig,
    /// Rotary parameters of full layers.
    pub rope_full: RopeConfig,
    /// Beginning-of-text token.
    pub bos_token_id: Option<u32>,
    /// End-of-text tokens.
    pub eos_token_ids: Vec<u32>,
}

impl TextConfig {
    /// Reads a target's config.json: the text model's fields at top level, or inside `text_config`.
    ///
    /// # Errors
    /// If a field is missing, malformed, or needs something that is not implemented.
    pub fn target(config: &Fields) -> Result<Self> {
        match model_type(config)?.as_str() {
            "gemma4" | "gemma4_unified" => {
                let text = config.object("text_config")?;
                let mut text = Self::text(&text)?;
                // Transformers reads the outer one only.
                text.tie_word_embeddings = config.optional_flag("tie_word_embeddings")?.unwrap_or(true);
                if text.eos_token_ids.is_empty() || config.get("eos_token_id").is_some() {
                    text.eos_token_ids = config.token_ids("eos_token_id")?;
                }
                config.refuse_misspelt()?;
                Ok(text)
            }
            "gemma4_text" | "gemma4_unified_text" => Self::text(config),
            "gemma4_assistant" | "gemma4_unified_assistant" => {
                Err(config.error("model_type", "is an assistant; use it as the assistant and its target as the model"))
            }
            other => Err(config.unsupported("model_type", other_model(other, NameOf::ConfigJson))),
        }
    }

    /// Reads the fields of the text model itself; defaults are those of transformers' classes.
    fn text(fields: &Fields) -> Result<Self> {
        let unified = match fields.optional_string("model_type")?.as_deref() {
            None | Some("gemma4_text") => false,
            Some("gemma4_unified_text") => true,
            Some(other) => {
                return Err(fields.unsupported("model_type", format!("{other:?} is not a Gemma 4 text model")));
            }
        };
        refuse_unsupported(fields)?;
        let num_attention_heads = fields.size_up_to("num_attention_heads", 8, MAX_HEADS)?;
        let hidden_size_per_layer_input =
            fields.optional_size("hidden_size_per_layer_input")?.unwrap_or(if unified { 0 } else { 256 });
        let (rope_sliding, rope_full) =
            rope(fields, [AttentionType::Sliding, AttentionType::Full].map(AttentionType::name))?;
        let rms_norm_eps = fields.optional_number("rms_norm_eps")?.unwrap_or(1e-6);
        if rms_norm_eps < 0.0 {
            return Err(fields.error("rms_norm_eps", format!("is {rms_norm_eps}, must not be negative")));
        }
        let final_logit_softcapping = fields.optional_number("final_logit_softcapping")?;
        if final_logit_softcapping.is_some_and(|cap| cap <= 0.0) {
            return Err(fields.error("final_logit_softcapping", "must be positive, or null for none"));
        }
        let text = Self {
            vocab_size: fields.size("vocab_size", Some(262_144))?,
            hidden_size: fields.size("hidden_size", Some(2304))?,
            num_attention_heads,
            layers: layers(fields, num_attention_heads)?,
            rms_norm_eps,
            sliding_window: fields.size("sliding_window", Some(if unified { 1024 } else { 512 }))?,
            max_position_embeddings: fields
                .size("max_position_embeddings", Some(if unified { 262_144 } else { 131_072 }))?,
            final_logit_softcapping,
            hidden_size_per_layer_input,
            vocab_size_per_layer_input: fields.optional_size("vocab_size_per_layer_input")?.unwrap_or(262_144),
            moe: moe(fields)?,
            tie_word_embeddings: fields.optional_flag("tie_word_embeddings")?.unwrap_or(true),
            rope_sliding,
            rope_full,
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.token_ids("eos_token_id")?,
        };
        fields.refuse_misspelt()?;
        Ok(text)
    }

    /// Input ids are below this: the table of per-layer embeddings may be shorter than the vocabulary.
    pub fn num_readable_tokens(&self) -> usize {
        match self.hidden_size_per_layer_input {
            0 => self.vocab_size,
            _ => self.vocab_size.min(self.vocab_size_per_layer_input),
        }
    }

    /// Number of layers that compute their own K and V; the others read those of a donor among them.
    pub fn num_own_kv_layers(&self) -> usize {
        self.layers.iter().take_while(|layer| !layer.kv_shared).count()
    }

    /// The donor of an attention type: the last layer that computes K and V, read by KV-shared layers and the
    /// assistant.
    pub fn kv_donor(&self, attention: AttentionType) -> Option<usize> {
        self.layers[..self.num_own_kv_layers()].iter().rposition(|layer| layer.attention == attention)
    }

    /// The K/V layout: one store per layer that computes K and V, and the store of each layer. Key norm weights,
    /// which are only in the checkpoint, are set to 1.
    pub fn kv_layout(&self) -> KvLayout {
        let own = self.num_own_kv_layers();
        let stores = self.layers[..own].iter().map(|layer| StoreLayout {
            num_kv_heads: layer.num_kv_heads,
            head_dim: layer.head_dim,
            window: (layer.attention == AttentionType::Sliding).then_some(self.sliding_window),
            k_eq_v: layer.k_eq_v.then(|| vec![1.0; layer.head_dim]),
        });
        let store_of_layer = self.layers.iter().enumerate().map(|(i, layer)| match layer.kv_shared {
            false => i,
            true => self.kv_donor(layer.attention).unwrap_or(i),
        });
        let mut full = self.layers.iter().filter(|layer| layer.attention == AttentionType::Full);
        let inverse_frequencies = full.next().map(|layer| self.rope_full.inverse_frequencies(layer.head_dim));
        KvLayout {
            stores: stores.collect(),
            store_of_layer: store_of_layer.collect(),
            inverse_frequencies: inverse_frequencies.unwrap_or_default(),
        }
    }

    /// Rotary parameters of an attention type.
    pub fn rope(&self, attention: AttentionType) -> &RopeConfig {
        match attention {
            AttentionType::Sliding => &self.rope_sliding,
            AttentionType::Full => &self.rope_full,
        }
    }
}

/// A `gemma4_assistant`: a small text model that computes no K and V.
#[derive(Clone, Debug, PartialEq)]
pub struct AssistantConfig {
    /// Its layers and widths.
    pub text: TextConfig,
    /// Hidden size of its target.
    pub backbone_hidden_size: usize,
    /// The centroid head; `None`: every row of the embedding is scored.
    pub centroids: Option<CentroidConfig>,
}

/// The centroid head: tokens are grouped by centroid, and only the best groups are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CentroidConfig {
    /// Number of groups, of equal size.
    pub num_centroids: usize,
    /// Number of groups that are scored.
    pub top_k: usize,
}

fn model_type(config: &Fields) -> Result<String> {
    let missing = || config.error("model_type", "is missing; use the config.json published with the language model");
    config.optional_string("model_type")?.ok_or_else(missing)
}

impl AssistantConfig {
    /// Reads an assistant's config.json.
    ///
    /// # Errors
    /// If a field is missing, malformed, or needs something that is not implemented.
    pub fn read(config: &Fields) -> Result<Self> {
        let unified = match model_type(config)?.as_str() {
            "gemma4_assistant" => false,
            "gemma4_unified_assistant" => true,
            other @ ("gemma4" | "gemma4_text" | "gemma4_unified" | "gemma4_unified_text") => {
                let problem = format!("{other:?} is a target's, not a Gemma 4 assistant's");
                return Err(
                    config.error("model_type", format!("{problem}; use it as the model, and its -assistant here"))
                );
            }
            other => {
                let problem = format!("{other:?} is not a Gemma 4 assistant; use the one published for the target");
                return Err(config.unsupported("model_type", problem));
            }
        };
        let fields = config.object("text_config")?;
        let mut text = TextConfig::text(&fields)?;
        text.tie_word_embeddings = config.optional_flag("tie_word_embeddings")?.unwrap_or(true);
        if fields.optional_size("hidden_size_per_layer_input")?.is_some_and(|width| width > 0) || text.moe.is_some() {
            let problem = "an assistant has neither per-layer embeddings nor experts";
            return Err(fields.error("hidden_size_per_layer_input", problem));
        }
        text.hidden_size_per_layer_input = 0;
        let own = fields.optional_size("num_kv_shared_layers")?.filter(|n| *n > 0 && *n != text.layers.len());
        if let Some(shared) = own {
            let problem =
                format!("is {shared}, but all {} layers of an assistant read the target's", text.layers.len());
            return Err(fields.error("num_kv_shared_layers", problem));
        }
        text.layers.iter_mut().for_each(|layer| layer.kv_shared = true);
        let centroids = if config.flag("use_ordered_embeddings")? { Some(centroids(config, &text)?) } else { None };
        let backbone_hidden_size = config.size("backbone_hidden_size", Some(if unified { 3840 } else { 1536 }))?;
        config.refuse_misspelt()?;
        Ok(Self { text, backbone_hidden_size, centroids })
    }
}

fn centroids(config: &Fields, text: &TextConfig) -> Result<CentroidConfig> {
    let num_centroids = config.size("num_centroids", Some(2048))?;
    if !text.vocab_size.is_multiple_of(num_centroids) {
        let problem = format!("{num_centroids} groups cannot share {} tokens equally", text.vocab_size);
        return Err(config.error("num_centroids", problem));
    }
    let top_k = config.size("centroid_intermediate_top_k", Some(32))?;
    if top_k > num_centroids {
        let problem = format!("is {top_k}, but there are {num_centroids} centroids");
        return Err(config.error("centroid_intermediate_top_k", problem));
    }
    Ok(CentroidConfig { num_centroids, top_k })
}

fn refuse_unsupported(fields: &Fields) -> Result<()> {
    if let Some(activation) = fields.optional_string("hidden_activation")?
        && activation != "gelu_pytorch_tanh"
    {
        let problem = format!("{activation:?} is not implemented; Gemma 4 has gelu_pytorch_tanh");
        return Err(fields.unsupported("hidden_activation", problem));
    }
    if fields.flag("attention_bias")? {
        return Err(fields.unsupported("attention_bias", "is true; projections with bias are not implemented"));
    }
    if let Some(cap) = fields.optional_number("attn_logit_softcapping")?.filter(|cap| *cap != 0.0) {
        let problem = format!("is {cap}, which is not implemented; attention scores of Gemma 4 have no cap");
        return Err(fields.unsupported("attn_logit_softcapping", problem));
    }
    match fields.optional_string("use_bidirectional_attention")?.as_deref() {
        // "vision" affects attention inside image blocks only; images are not supported.
        None | Some("vision") => Ok(()),
        Some(other) => {
            let problem = format!("{other:?} is not implemented; text is attended causally (null or \"vision\")");
            Err(fields.unsupported("use_bidirectional_attention", problem))
        }
    }
}

fn layers(fields: &Fields, num_attention_heads: usize) -> Result<Vec<LayerConfig>> {
    let count = fields.size_up_to("num_hidden_layers", 30, MAX_LAYERS)?;
    let shared = fields.optional_size("num_kv_shared_layers")?.unwrap_or(0);
    if shared > count {
        return Err(fields.error("num_kv_shared_layers", format!("is {shared} of {count} layers")));
    }
    let types = layer_types(fields, count)?;
    let intermediate_size = fields.size("intermediate_size", Some(9216))?;
    let double_wide = fields.flag("use_double_wide_mlp")?;
    let k_eq_v = fields.flag("attention_k_eq_v")?;
    let head_dim = fields.size("head_dim", Some(256))?;
    let num_kv_heads = fields.size("num_key_value_heads", Some(4))?;
    let global_head_dim = fields.size("global_head_dim", Some(512))?;
    let global_kv_heads = fields.optional_size("num_global_key_value_heads")?.filter(|_| k_eq_v);
    let overrides = PerLayerConfig::read(fields, count)?;

    let first_shared = count - shared;
    let mut layers = Vec::with_capacity(count);
    for (i, attention) in types.into_iter().enumerate() {
        let full = attention == AttentionType::Full;
        let kv_shared = i >= first_shared;
        // Published files have the full layers' shape in two fields; newer transformers write it per layer.
        let (head_dim, num_kv_heads) = match &overrides {
            None if full => (global_head_dim, global_kv_heads.unwrap_or(num_kv_heads)),
            None => (head_dim, num_kv_heads),
            Some(overrides) => {
                let own = overrides.layer(i);
                (own.head_dim.unwrap_or(head_dim), own.num_kv_heads.unwrap_or(num_kv_heads))
            }
        };
        if num_kv_heads == 0 || !num_attention_heads.is_multiple_of(num_kv_heads) {
            let problem = format!("{num_kv_heads} K/V heads do not divide {num_attention_heads} query heads");
            return Err(fields.error("num_key_value_heads", format!("layer {i}: {problem}")));
        }
        if !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD_DIM {
            let problem = format!("layer {i}: {head_dim} must be even and at most {MAX_HEAD_DIM}");
            return Err(fields.error("head_dim", problem));
        }
        layers.push(LayerConfig {
            attention,
            head_dim,
            num_kv_heads,
            intermediate_size: if double_wide && kv_shared && first_shared > 0 { 2 } else { 1 } * intermediate_size,
            k_eq_v: k_eq_v && full,
            kv_shared,
        });
    }
    refuse_mixed_widths(fields, &layers)?;
    Ok(layers)
}

/// Layers of one type share their angles, so their heads have the same width. Only `per_layer_config` can differ.
fn refuse_mixed_widths(fields: &Fields, layers: &[LayerConfig]) -> Result<()> {
    for (i, layer) in layers.iter().enumerate() {
        let first = layers.iter().position(|other| other.attention == layer.attention).unwrap_or(i);
        let (own, width) = (layer.head_dim, layers[first].head_dim);
        if own != width {
            let name = layer.attention.name();
            let problem = format!("layers of {name} have heads of {width} in layer {first}, of {own} in layer {i}");
            return Err(fields.unsupported("per_layer_config", format!("{problem}, which is not implemented")));
        }
    }
    Ok(())
}

fn layer_types(fields: &Fields, count: usize) -> Result<Vec<AttentionType>> {
    let mut types = match fields.optional_strings("layer_types")? {
        Some(names) => {
            let parsed = names.iter().map(|name| AttentionType::parse(fields, "layer_types", name));
            parsed.collect::<Result<Vec<_>>>()?
        }
        None => {
            // transformers ignores the pattern; other engines imply the list from it.
            if let Some(pattern) = fields.optional_size("sliding_window_pattern")?.filter(|pattern| *pattern != 6) {
                let problem = format!("is {pattern}, but 6 is implied without layer_types; list these");
                return Err(fields.unsupported("sliding_window_pattern", problem));
            }
            let is_full = |i: usize| i.is_multiple_of(6);
            (1..=count).map(|i| if is_full(i) { AttentionType::Full } else { AttentionType::Sliding }).collect()
        }
    };
    if types.len() != count {
        return Err(fields.error("layer_types", format!("has {} entries for {count} layers", types.len())));
    }
    // As in transformers: the last layer has full attention, whatever the list says.
    if let Some(last) = types.last_mut() {
        *last = AttentionType::Full;
    }
    Ok(types)
}

fn moe(fields: &Fields) -> Result<Option<MoeConfig>> {
    if !fields.flag("enable_moe_block")? {
        return Ok(None);
    }
    let num_experts = fields.size("num_experts", None)?;
    let top_k_experts = fields.size("top_k_experts", None)?;
    if top_k_experts > num_experts {
        return Err(fields.error("top_k_experts", format!("is {top_k_experts} of {num_experts} experts")));
    }
    // Early files have another key for the width.
    let older = fields.optional_size("expert_intermediate_size")?;
    let intermediate_size = fields.size("moe_intermediate_size", older)?;
    Ok(Some(MoeConfig { num_experts, top_k_experts, intermediate_size }))
}
