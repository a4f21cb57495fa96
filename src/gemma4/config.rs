//! What `config.json` says, checked: every field that shapes the computation is honoured or refused by name.

use super::rope::inverse_frequencies;
use crate::Result;
use crate::checkpoint::Fields;
use crate::kv::{KvLayout, StoreLayout};

/// What a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionType {
    /// The newest `sliding_window` positions.
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
            _ => Err(fields.error(field, format!("{name:?} is unknown; sliding_attention and full_attention are"))),
        }
    }
}

/// Rotary parameters of one attention type.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Part of the pairs that rotate (`proportional`), 1 for `default`.
    pub partial_rotary_factor: f64,
    /// Divides the frequencies.
    pub factor: f64,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// What it attends to.
    pub attention: AttentionType,
    /// Width of a head.
    pub head_dim: usize,
    /// K/V heads; query heads share them in contiguous groups.
    pub num_kv_heads: usize,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// Whether V comes from the K projection.
    pub k_eq_v: bool,
    /// Whether it has no K and V of its own and reads those of an earlier layer.
    pub kv_shared: bool,
}

/// The mixture of experts beside the dense MLP.
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
    /// Positions that a sliding layer sees, its own included.
    pub sliding_window: usize,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// `c` of `c tanh(logits / c)`.
    pub final_logit_softcapping: Option<f64>,
    /// Width of the per-layer embeddings; 0 where there are none.
    pub hidden_size_per_layer_input: usize,
    /// Vocabulary of the per-layer embeddings.
    pub vocab_size_per_layer_input: usize,
    /// The experts, where there are any.
    pub moe: Option<MoeConfig>,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Rotary parameters of sliding layers.
    pub rope_sliding: RopeConfig,
    /// Rotary parameters of full layers.
    pub rope_full: RopeConfig,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end one.
    pub eos_token_ids: Vec<u32>,
}

/// More layers than any Gemma, few enough that a mistyped count cannot fill the memory.
pub(crate) const MAX_LAYERS: usize = 1024;

/// More query heads, and wider ones, than any Gemma: the layout of K and V and the table of angles are made of these sizes
/// before a tensor could contradict them.
pub(crate) const MAX_HEADS: usize = 1024;
pub(crate) const MAX_HEAD_DIM: usize = 8192;

impl TextConfig {
    /// Reads a target's config.json: the text model's fields at top level, or inside `text_config`.
    ///
    /// # Errors
    /// If a field is missing, malformed, or asks for something that is not implemented.
    pub fn target(config: &Fields) -> Result<Self> {
        match config.string("model_type")?.as_str() {
            "gemma4" | "gemma4_unified" => {
                let text = config.object("text_config")?;
                let mut text = Self::text(&text)?;
                text.tie_word_embeddings &= config.optional_flag("tie_word_embeddings")?.unwrap_or(true);
                if text.eos_token_ids.is_empty() || config.get("eos_token_id").is_some() {
                    text.eos_token_ids = config.token_ids("eos_token_id")?;
                }
                Ok(text)
            }
            "gemma4_text" | "gemma4_unified_text" => Self::text(config),
            "gemma4_assistant" | "gemma4_unified_assistant" => {
                Err(config.error("model_type", "is an assistant; give it as the assistant and its target as the model"))
            }
            other => Err(config.error("model_type", format!("{other:?} is not a Gemma 4 text model"))),
        }
    }

    /// Reads the fields of the text model itself; defaults are those of transformers' classes.
    fn text(fields: &Fields) -> Result<Self> {
        let unified = match fields.optional_string("model_type")?.as_deref() {
            None | Some("gemma4_text") => false,
            Some("gemma4_unified_text") => true,
            Some(other) => return Err(fields.error("model_type", format!("{other:?} is not a Gemma 4 text model"))),
        };
        refuse_unsupported(fields)?;
        let num_attention_heads = fields.size("num_attention_heads", Some(8))?;
        if num_attention_heads > MAX_HEADS {
            let problem = format!("is {num_attention_heads}, more than {MAX_HEADS}");
            return Err(fields.error("num_attention_heads", problem));
        }
        let hidden_size_per_layer_input =
            fields.optional_size("hidden_size_per_layer_input")?.unwrap_or(if unified { 0 } else { 256 });
        let (rope_sliding, rope_full) = rope(fields)?;
        let rms_norm_eps = fields.optional_number("rms_norm_eps")?.unwrap_or(1e-6);
        if rms_norm_eps < 0.0 {
            return Err(fields.error("rms_norm_eps", format!("is {rms_norm_eps}, must not be negative")));
        }
        let final_logit_softcapping = fields.optional_number("final_logit_softcapping")?;
        if final_logit_softcapping.is_some_and(|cap| cap <= 0.0) {
            return Err(fields.error("final_logit_softcapping", "must be positive, or null for none"));
        }
        Ok(Self {
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
        })
    }

    /// Ids below this can be read: the table of per-layer embeddings may be shorter than the vocabulary.
    pub fn num_readable_tokens(&self) -> usize {
        match self.hidden_size_per_layer_input {
            0 => self.vocab_size,
            _ => self.vocab_size.min(self.vocab_size_per_layer_input),
        }
    }

    /// Layers that compute their own K and V; the others read those of a donor among them.
    pub fn num_own_kv_layers(&self) -> usize {
        self.layers.iter().take_while(|layer| !layer.kv_shared).count()
    }

    /// The layer whose K and V the KV-shared layers of this type read, and the assistant with them: the last that
    /// computes its own.
    pub fn kv_donor(&self, attention: AttentionType) -> Option<usize> {
        self.layers[..self.num_own_kv_layers()].iter().rposition(|layer| layer.attention == attention)
    }

    /// The K/V that the model keeps: a store for every layer that computes its own, and who reads which. The weights of key
    /// norms, which only the checkpoint has, are ones.
    pub fn kv_layout(&self) -> KvLayout {
        let own = self.num_own_kv_layers();
        let stores = self.layers[..own].iter().map(|layer| StoreLayout {
            num_kv_heads: layer.num_kv_heads,
            head_dim: layer.head_dim,
            window: (layer.attention == AttentionType::Sliding).then_some(self.sliding_window),
            key_weight: layer.k_eq_v.then(|| vec![1.0; layer.head_dim]),
        });
        let store_of_layer = self.layers.iter().enumerate().map(|(i, layer)| match layer.kv_shared {
            false => i,
            true => self.kv_donor(layer.attention).unwrap_or(i),
        });
        let mut full = self.layers.iter().filter(|layer| layer.attention == AttentionType::Full);
        let inverse_frequencies = full.next().map(|layer| inverse_frequencies(&self.rope_full, layer.head_dim));
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

/// A `gemma4_assistant`: a small text model without K and V of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct AssistantConfig {
    /// Its layers and widths.
    pub text: TextConfig,
    /// Hidden size of the target that it was made for.
    pub backbone_hidden_size: usize,
    /// The centroid head, where it has one; else every row of its embedding is scored.
    pub centroids: Option<CentroidConfig>,
}

/// The centroid head: tokens are grouped under centroids, and only the best groups are scored.
#[derive(Clone, Debug, PartialEq)]
pub struct CentroidConfig {
    /// Groups, all of the same size.
    pub num_centroids: usize,
    /// Groups that are scored.
    pub top_k: usize,
}

impl AssistantConfig {
    /// Reads an assistant's config.json.
    ///
    /// # Errors
    /// If a field is missing, malformed, or asks for something that is not implemented.
    pub fn read(config: &Fields) -> Result<Self> {
        match config.string("model_type")?.as_str() {
            "gemma4_assistant" | "gemma4_unified_assistant" => {}
            other => return Err(config.error("model_type", format!("{other:?} is not a Gemma 4 assistant"))),
        }
        let fields = config.object("text_config")?;
        let mut text = TextConfig::text(&fields)?;
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
        let unified = config.string("model_type")? == "gemma4_unified_assistant";
        let centroids = if config.flag("use_ordered_embeddings")? { Some(centroids(config, &text)?) } else { None };
        let backbone_hidden_size = config.size("backbone_hidden_size", Some(if unified { 3840 } else { 1536 }))?;
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
        let problem = format!("is {top_k}, more than the {num_centroids} centroids");
        return Err(config.error("centroid_intermediate_top_k", problem));
    }
    Ok(CentroidConfig { num_centroids, top_k })
}

fn refuse_unsupported(fields: &Fields) -> Result<()> {
    if let Some(activation) = fields.optional_string("hidden_activation")?
        && activation != "gelu_pytorch_tanh"
    {
        let problem = format!("{activation:?} is not implemented; Gemma 4 has gelu_pytorch_tanh");
        return Err(fields.error("hidden_activation", problem));
    }
    if fields.flag("attention_bias")? {
        return Err(fields.error("attention_bias", "is true; projections with bias are not implemented"));
    }
    match fields.optional_string("use_bidirectional_attention")?.as_deref() {
        // "vision" changes attention inside image blocks only, and images are not read.
        None | Some("vision") => Ok(()),
        Some(other) => {
            let problem = format!("{other:?} is not implemented; text is attended causally (null or \"vision\")");
            Err(fields.error("use_bidirectional_attention", problem))
        }
    }
}

fn layers(fields: &Fields, num_attention_heads: usize) -> Result<Vec<LayerConfig>> {
    let count = fields.size("num_hidden_layers", Some(30))?;
    if count > MAX_LAYERS {
        return Err(fields.error("num_hidden_layers", format!("is {count}, more than {MAX_LAYERS}")));
    }
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
    let overrides = fields.optional_object("per_layer_config")?;

    let first_shared = count - shared;
    let mut layers = Vec::with_capacity(count);
    for (i, attention) in types.into_iter().enumerate() {
        let full = attention == AttentionType::Full;
        let kv_shared = i >= first_shared;
        let mut layer = LayerConfig {
            attention,
            head_dim,
            num_kv_heads,
            intermediate_size: if double_wide && kv_shared && first_shared > 0 { 2 } else { 1 } * intermediate_size,
            k_eq_v: k_eq_v && full,
            kv_shared,
        };
        // Published files give the full layers' shape in two fields; newer transformers write it out per layer instead.
        match &overrides {
            None if full => {
                layer.head_dim = global_head_dim;
                layer.num_kv_heads = global_kv_heads.unwrap_or(num_kv_heads);
            }
            None => {}
            Some(overrides) => {
                if let Some(own) = overrides.optional_object(&i.to_string())? {
                    layer.head_dim = own.size("head_dim", Some(head_dim))?;
                    layer.num_kv_heads = own.size("num_key_value_heads", Some(num_kv_heads))?;
                    let known = ["head_dim", "num_key_value_heads"];
                    if let Some(name) = own.names().find(|name| !known.contains(name)) {
                        return Err(own.error(name, "is not implemented as a per-layer value"));
                    }
                }
            }
        }
        if layer.num_kv_heads == 0 || !num_attention_heads.is_multiple_of(layer.num_kv_heads) {
            let problem = format!("{} K/V heads do not divide {num_attention_heads} query heads", layer.num_kv_heads);
            return Err(fields.error("num_key_value_heads", format!("layer {i}: {problem}")));
        }
        if !layer.head_dim.is_multiple_of(2) || layer.head_dim > MAX_HEAD_DIM {
            let problem = format!("layer {i}: {} is odd, or more than {MAX_HEAD_DIM}", layer.head_dim);
            return Err(fields.error("head_dim", problem));
        }
        layers.push(layer);
    }
    Ok(layers)
}

fn layer_types(fields: &Fields, count: usize) -> Result<Vec<AttentionType>> {
    let mut types = match fields.optional_strings("layer_types")? {
        Some(names) => {
            let parsed = names.iter().map(|name| AttentionType::parse(fields, "layer_types", name));
            parsed.collect::<Result<Vec<_>>>()?
        }
        None => (1..=count)
            .map(|i| if i.is_multiple_of(6) { AttentionType::Full } else { AttentionType::Sliding })
            .collect(),
    };
    if types.len() != count {
        return Err(fields.error("layer_types", format!("has {} entries for {count} layers", types.len())));
    }
    // As transformers does: the last layer sees everything, whatever the list says.
    if let Some(last) = types.last_mut() {
        *last = AttentionType::Full;
    }
    Ok(types)
}

fn rope(fields: &Fields) -> Result<(RopeConfig, RopeConfig)> {
    let sliding = RopeConfig { theta: 1e4, partial_rotary_factor: 1.0, factor: 1.0 };
    let full = RopeConfig { theta: 1e6, partial_rotary_factor: 0.25, factor: 1.0 };
    let Some(parameters) = fields.optional_object("rope_parameters")? else { return Ok((sliding, full)) };
    let read = |name: &str, default: RopeConfig| match parameters.optional_object(name)? {
        Some(own) => rope_of_type(&own, default.theta),
        None => Ok(default),
    };
    Ok((read("sliding_attention", sliding)?, read("full_attention", full)?))
}

fn rope_of_type(fields: &Fields, default_theta: f64) -> Result<RopeConfig> {
    let theta = fields.optional_number("rope_theta")?.unwrap_or(default_theta);
    if theta <= 0.0 {
        return Err(fields.error("rope_theta", format!("is {theta}, must be positive")));
    }
    match fields.optional_string("rope_type")?.as_deref().unwrap_or("default") {
        "default" => Ok(RopeConfig { theta, partial_rotary_factor: 1.0, factor: 1.0 }),
        "proportional" => {
            let partial_rotary_factor = fields.optional_number("partial_rotary_factor")?.unwrap_or(1.0);
            if !(0.0..=1.0).contains(&partial_rotary_factor) {
                return Err(fields.error("partial_rotary_factor", "must be from 0 to 1"));
            }
            let factor = fields.optional_number("factor")?.unwrap_or(1.0);
            if factor <= 0.0 {
                return Err(fields.error("factor", "must be positive"));
            }
            Ok(RopeConfig { theta, partial_rotary_factor, factor })
        }
        other => Err(fields.error("rope_type", format!("{other:?} is not implemented; default and proportional are"))),
    }
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
    // Early files spell the width differently.
    let older = fields.optional_size("expert_intermediate_size")?;
    let intermediate_size = fields.size("moe_intermediate_size", older)?;
    Ok(Some(MoeConfig { num_experts, top_k_experts, intermediate_size }))
}
