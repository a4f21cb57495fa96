//! The configuration, validated: every field that affects the computation is implemented or refused by name.

use crate::Result;
use crate::checkpoint::{
    Fields, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, NameOf, not_implemented, other_model, without_text,
};
use crate::kv::{KvLayout, StoreLayout};
use crate::nn::DeltaNetConfig;

/// The token mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// A gated delta net.
    Linear,
    /// Gated attention over every position.
    Full,
}

/// Conventions that differ between file formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorLayout {
    /// Norms without the added 1, `A_log`, value heads of a key head contiguous.
    HuggingFace,
    /// Norms with the added 1, `-exp(A_log)`, value heads interleaved over the key heads.
    Gguf,
}

/// The experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts per layer.
    pub num_experts: usize,
    /// Experts per token.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// Width of the expert shared by all tokens.
    pub shared_intermediate_size: usize,
}

/// A Qwen3.5 text model.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP; 0 with experts.
    pub intermediate_size: usize,
    /// The experts, if there are any.
    pub moe: Option<MoeConfig>,
    /// The layers, first to last.
    pub layers: Vec<LayerType>,
    /// Query heads of attention.
    pub num_attention_heads: usize,
    /// K/V heads of attention.
    pub num_key_value_heads: usize,
    /// Width of an attention head.
    pub head_dim: usize,
    /// Leading channels of a head, which rotate.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The delta nets.
    pub delta_net: DeltaNetConfig,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Maximum context in positions.
    pub max_position_embeddings: usize,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Tensor conventions of the file.
    pub tensor_layout: TensorLayout,
    /// Number of NextN layers in the configuration; `None` if absent.
    pub mtp_num_hidden_layers: Option<usize>,
    /// Whether the NextN head must have its own embedding.
    pub mtp_use_dedicated_embeddings: bool,
    /// Beginning-of-text token.
    pub bos_token_id: Option<u32>,
    /// End-of-text tokens.
    pub eos_token_ids: Vec<u32>,
}

/// Maximum taps of a convolution, above any Qwen's.
pub(super) const MAX_TAPS: usize = 64;

impl TextConfig {
    /// Reads config.json: the text model's fields at top level, whichever of its names the model has there, or inside
    /// `text_config`. Vision fields are ignored.
    ///
    /// # Errors
    /// If a field is missing, malformed, or needs something that is not implemented.
    pub fn target(config: &Fields) -> Result<Self> {
        let model_type = config.string("model_type")?;
        // A text model that was saved again may keep the outer name. Only text models have the field.
        let is_flat = config.get("text_config").is_none() && config.get("num_hidden_layers").is_some();
        match model_type.as_str() {
            "qwen3_5" | "qwen3_5_moe" if is_flat => Self::text(config, model_type == "qwen3_5_moe"),
            "qwen3_5" | "qwen3_5_moe" => {
                let fields = config.object("text_config")?;
                let inner = format!("{model_type}_text");
                let own = fields.optional_string("model_type")?;
                if own.as_ref().is_some_and(|own| *own != inner) {
                    return Err(fields.error("model_type", format!("is {own:?} inside {model_type:?}")));
                }
                let mut text = Self::text(&fields, model_type == "qwen3_5_moe")?;
                if let Some(tied) = config.optional_flag("tie_word_embeddings")? {
                    text.tie_word_embeddings = tied;
                }
                if text.eos_token_ids.is_empty() || config.get("eos_token_id").is_some() {
                    text.eos_token_ids = config.token_ids("eos_token_id")?;
                }
                config.refuse_misspelt()?;
                Ok(text)
            }
            "qwen3_5_text" => Self::text(config, false),
            "qwen3_5_moe_text" => Self::text(config, true),
            other => Err(config.unsupported("model_type", other_family(other, NameOf::ConfigJson))),
        }
    }

    /// Reads the fields of the text model itself; defaults are those of transformers' classes.
    fn text(fields: &Fields, experts: bool) -> Result<Self> {
        refuse_unsupported(fields)?;
        let num_attention_heads = fields.size_up_to("num_attention_heads", 16, MAX_HEADS)?;
        let num_key_value_heads = fields.size_up_to("num_key_value_heads", if experts { 2 } else { 4 }, MAX_HEADS)?;
        divides(fields, "num_key_value_heads", num_key_value_heads, num_attention_heads, "query heads")?;
        let head_dim = fields.size_up_to("head_dim", 256, MAX_HEAD_DIM)?;
        let (rope_theta, partial_rotary_factor) = rope(fields)?;
        let rotary_dim = (head_dim as f64 * partial_rotary_factor) as usize;
        if !rotary_dim.is_multiple_of(2) {
            let problem = format!("gives {rotary_dim} of {head_dim} rotary channels, must be even");
            return Err(fields.error("partial_rotary_factor", problem));
        }
        let delta_net = DeltaNetConfig {
            num_key_heads: fields.size_up_to("linear_num_key_heads", 16, MAX_HEADS)?,
            num_value_heads: fields.size_up_to("linear_num_value_heads", 32, MAX_HEADS)?,
            key_head_dim: fields.size_up_to("linear_key_head_dim", 128, MAX_HEAD_DIM)?,
            value_head_dim: fields.size_up_to("linear_value_head_dim", 128, MAX_HEAD_DIM)?,
            conv_kernel_dim: fields.size_up_to("linear_conv_kernel_dim", 4, MAX_TAPS)?,
        };
        let (keys, values) = (delta_net.num_key_heads, delta_net.num_value_heads);
        divides(fields, "linear_num_key_heads", keys, values, "value heads")?;
        let rms_norm_eps = fields.optional_number("rms_norm_eps")?.unwrap_or(1e-6);
        if rms_norm_eps < 0.0 {
            return Err(fields.error("rms_norm_eps", format!("is {rms_norm_eps}, must not be negative")));
        }
        let layers = layers(fields, if experts { 40 } else { 32 })?;
        let config = Self {
            vocab_size: fields.size("vocab_size", Some(248_320))?,
            hidden_size: fields.size("hidden_size", Some(if experts { 2048 } else { 4096 }))?,
            intermediate_size: if experts { 0 } else { fields.size("intermediate_size", Some(12_288))? },
            moe: if experts { Some(moe(fields)?) } else { None },
            layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rotary_dim,
            rope_theta,
            delta_net,
            rms_norm_eps,
            max_position_embeddings: fields.size("max_position_embeddings", Some(32_768))?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
            tensor_layout: TensorLayout::HuggingFace,
            mtp_num_hidden_layers: mtp_layers(fields)?,
            mtp_use_dedicated_embeddings: fields.optional_flag("mtp_use_dedicated_embeddings")?.unwrap_or(false),
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.token_ids("eos_token_id")?,
        };
        fields.refuse_misspelt()?;
        Ok(config)
    }

    /// One store per attention layer; delta nets have none.
    pub(crate) fn kv_layout(&self) -> KvLayout {
        let mut stores = Vec::new();
        let store_of_layer = self.layers.iter().map(|layer| match layer {
            LayerType::Linear => KvLayout::NO_STORE,
            LayerType::Full => {
                stores.push(self.store());
                stores.len() - 1
            }
        });
        let store_of_layer = store_of_layer.collect();
        KvLayout { stores, store_of_layer, inverse_frequencies: Vec::new() }
    }

    /// The one store of a NextN head, whose layer is an attention layer.
    pub(crate) fn nextn_kv_layout(&self) -> KvLayout {
        KvLayout { stores: vec![self.store()], store_of_layer: vec![0], inverse_frequencies: Vec::new() }
    }

    /// The K/V of an attention layer.
    pub(crate) fn store(&self) -> StoreLayout {
        let (num_kv_heads, head_dim) = (self.num_key_value_heads, self.head_dim);
        StoreLayout { num_kv_heads, head_dim, window: None, k_eq_v: None }
    }

    /// `theta^(-2i / rotary_dim)` for each rotating pair `(i, i + rotary_dim / 2)`. Text has one position per token, so
    /// the three axes of the interleaved rotation are equal.
    pub(crate) fn inverse_frequencies(&self) -> Vec<f32> {
        // The exponent is rounded to f32 where the reference rounds it.
        let exponent = |i: usize| f64::from((2 * i) as f32 / self.rotary_dim as f32);
        (0..self.rotary_dim / 2).map(|i| 1.0 / (self.rope_theta.powf(exponent(i)) as f32)).collect()
    }
}

/// The error for a Qwen of another architecture, as named in config.json (`qwen3_next`) or GGUF (`qwen3next`).
pub(super) fn other_family(model_type: &str, of: NameOf) -> String {
    if without_text(model_type).is_some() {
        return other_model(model_type, of);
    }
    let (name, why) = match model_type {
        "qwen3_next" | "qwen3next" => ("Qwen3-Next", "its delta nets have fused projections in another order"),
        _ if model_type.starts_with("qwen3_vl") || model_type.starts_with("qwen3vl") => {
            ("Qwen3-VL", "its layers are all attention without gates")
        }
        "qwen3" | "qwen3_moe" | "qwen3moe" => ("Qwen3", "its layers are all attention without gates"),
        _ if model_type.starts_with("qwen2") => ("Qwen2", "its layers are all attention with biases"),
        _ => ("another Qwen", "its layers are unknown"),
    };
    not_implemented(model_type, &format!("{name} ({why})"), of)
}

fn divides(fields: &Fields, name: &str, heads: usize, all: usize, of: &str) -> Result<()> {
    if all.is_multiple_of(heads) {
        return Ok(());
    }
    Err(fields.error(name, format!("{heads} heads do not divide {all} {of}")))
}

fn refuse_unsupported(fields: &Fields) -> Result<()> {
    if let Some(activation) = fields.optional_string("hidden_act")?.filter(|activation| activation != "silu") {
        return Err(fields.unsupported("hidden_act", format!("{activation:?} is not implemented; expected silu")));
    }
    // The gate of the delta nets' outputs; "swish" is another name of silu.
    let of_outputs = fields.optional_string("output_gate_type")?;
    if let Some(gate) = of_outputs.filter(|gate| gate != "silu" && gate != "swish") {
        return Err(fields.unsupported("output_gate_type", format!("{gate:?} is not implemented; expected silu")));
    }
    for (field, supported) in [("attention_bias", false), ("attn_output_gate", true)] {
        if fields.optional_flag(field)?.is_some_and(|value| value != supported) {
            return Err(fields.unsupported(field, format!("is {}, which is not implemented", !supported)));
        }
    }
    let lists = fields.get("mlp_only_layers").is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty()));
    if lists || fields.optional_size("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        let field = if lists { "mlp_only_layers" } else { "decoder_sparse_step" };
        return Err(fields.unsupported(field, "is set; models with experts in some layers are not implemented"));
    }
    Ok(())
}

/// Base of the frequencies, and the share of rotary channels.
fn rope(fields: &Fields) -> Result<(f64, f64)> {
    // transformers reads the first that there is; users add it for other frequencies.
    let objects = [fields.optional_object("rope_scaling")?, fields.optional_object("rope_parameters")?];
    let objects = Vec::from_iter(objects.into_iter().flatten());
    for parameters in &objects {
        for field in ["rope_type", "type"] {
            if let Some(other) = parameters.optional_string(field)?.filter(|kind| kind != "default" && kind != "mrope")
            {
                return Err(parameters
                    .unsupported(field, format!("{other:?} is not implemented; use the published config.json")));
            }
        }
    }
    let read = |name: &str| -> Result<Option<f64>> {
        let values = objects.iter().map(|parameters| parameters.optional_number(name)).collect::<Result<Vec<_>>>()?;
        let mut values = values.into_iter().flatten();
        let (first, other) = (values.next(), values.next());
        if other.is_some() && other != first {
            return Err(fields.unsupported("rope_scaling", format!("and rope_parameters differ in {name}; omit one")));
        }
        Ok(first.or(fields.optional_number(name)?))
    };
    let theta = read("rope_theta")?.unwrap_or(1e4);
    if theta <= 0.0 {
        return Err(fields.error("rope_theta", format!("is {theta}, must be positive")));
    }
    let share = read("partial_rotary_factor")?.unwrap_or(0.25);
    if !(0.0..=1.0).contains(&share) {
        return Err(fields.error("partial_rotary_factor", format!("is {share}, must be from 0 to 1")));
    }
    objects.iter().try_for_each(Fields::refuse_misspelt)?;
    Ok((theta, share))
}

fn moe(fields: &Fields) -> Result<MoeConfig> {
    if fields.optional_flag("norm_topk_prob")? == Some(false) {
        let problem = "is false; weights of experts that do not sum to 1 are not implemented";
        return Err(fields.unsupported("norm_topk_prob", problem));
    }
    let num_experts = fields.size("num_experts", Some(256))?;
    let num_experts_per_tok = fields.size("num_experts_per_tok", Some(8))?;
    if num_experts_per_tok > num_experts {
        return Err(fields.error("num_experts_per_tok", format!("is {num_experts_per_tok} of {num_experts} experts")));
    }
    Ok(MoeConfig {
        num_experts,
        num_experts_per_tok,
        intermediate_size: fields.size("moe_intermediate_size", Some(512))?,
        shared_intermediate_size: fields.size("shared_expert_intermediate_size", Some(512))?,
    })
}

fn layers(fields: &Fields, default: usize) -> Result<Vec<LayerType>> {
    let count = fields.size_up_to("num_hidden_layers", default, MAX_LAYERS)?;
    let Some(names) = fields.optional_strings("layer_types")? else {
        let interval = fields.size("full_attention_interval", Some(4))?;
        let of = |i: usize| if (i + 1).is_multiple_of(interval) { LayerType::Full } else { LayerType::Linear };
        return Ok((0..count).map(of).collect());
    };
    if names.len() != count {
        return Err(fields.error("layer_types", format!("has {} entries for {count} layers", names.len())));
    }
    let of = |name: &String| match name.as_str() {
        "linear_attention" => Ok(LayerType::Linear),
        "full_attention" => Ok(LayerType::Full),
        other => Err(fields
            .unsupported("layer_types", format!("{other:?} is unknown; expected linear_attention or full_attention"))),
    };
    names.iter().map(of).collect()
}

fn mtp_layers(fields: &Fields) -> Result<Option<usize>> {
    let layers = fields.optional_size("mtp_num_hidden_layers")?;
    match layers {
        Some(2..) => Err(fields.unsupported("mtp_num_hidden_layers", "is more than 1, which is not implemented")),
        layers => Ok(layers),
    }
}
