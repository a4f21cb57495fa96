//! A small model whose keys are like those of trained Gemmas: a few channels are far larger than the rest, a
//! constant part is eight times as large as the varying part, and many query heads share a KV head. Its
//! attention distinguishes tokens by the varying part.

use std::path::Path;

use anyhow::{Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

use crate::synthetic::normal;

const VOCABULARY: usize = 512;
const HIDDEN: usize = 256;
const LAYERS: usize = 4;
/// Width of a head, in full layers.
const HEAD: usize = 256;
/// Width of a head, in the sliding layer.
const SLIDING_HEAD: usize = 128;
const MLP: usize = 64;
/// Length of the keys' constant part relative to the varying part.
const BIAS: f64 = 8.0;
/// Standard deviation of the logarithm of a channel's size.
const TAILS: f64 = 1.0;
/// Standard deviation of the scores due to the varying part of the keys, and of the logits.
const SCORES: f64 = 2.5;
const LOGITS: f64 = 3.0;

/// Shape of the full layers.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Query heads per KV head.
    pub group: usize,
    /// Whether V comes from the K projection.
    pub k_eq_v: bool,
}

/// Writes the model to `directory`.
///
/// # Errors
/// If the group is out of range, or a file cannot be written.
pub fn write(directory: &Path, shape: Shape) -> Result<()> {
    let Shape { group, k_eq_v } = shape;
    ensure!((1..=64).contains(&group), "--gemma-keys {group}: must be from 1 to 64");
    let types: Vec<_> = (0..LAYERS).map(|i| if i == 0 { "sliding_attention" } else { "full_attention" }).collect();
    let config = json!({
        "model_type": "gemma4_text", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": LAYERS, "layer_types": types, "num_attention_heads": group, "num_key_value_heads": 1,
        "num_global_key_value_heads": 1, "head_dim": SLIDING_HEAD, "global_head_dim": HEAD, "attention_k_eq_v": k_eq_v,
        "hidden_size_per_layer_input": 0, "sliding_window": 512, "max_position_embeddings": 32768,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": false,
    });
    std::fs::write(directory.join("config.json"), config.to_string())?;
    std::fs::write(directory.join("model.safetensors"), Tensors::of(shape).file())?;
    Ok(())
}

/// Random token ids.
pub fn ids(count: usize) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(3);
    (0..count).map(|_| rng.random_range(0..VOCABULARY as u32)).collect()
}

struct Tensors {
    rng: StdRng,
    /// Direction of the hidden states' constant part, of length 1.
    constant: Vec<f64>,
    tensors: Vec<(String, Vec<usize>, Vec<f64>)>,
}

impl Tensors {
    fn of(shape: Shape) -> Self {
        let mut rng = StdRng::seed_from_u64(shape.group as u64);
        let constant: Vec<f64> = (0..HIDDEN).map(|_| normal(&mut rng)).collect();
        let length = length(&constant);
        let constant: Vec<f64> = constant.into_iter().map(|x| x / length).collect();
        let mut model = Self { rng, constant, tensors: Vec::new() };
        // Rows of length 1, half of whose energy is constant: the hidden states have a root mean square of 1.
        let mut embedding = model.random(VOCABULARY, HIDDEN, (0.5 / HIDDEN as f64).sqrt());
        for row in embedding.chunks_exact_mut(HIDDEN) {
            row.iter_mut().zip(&model.constant).for_each(|(x, constant)| *x += constant * 0.5f64.sqrt());
        }
        model.push("model.embed_tokens.weight", &[VOCABULARY, HIDDEN], embedding);
        for layer in 0..LAYERS {
            model.layer(layer, shape);
        }
        model.push("model.norm.weight", &[HIDDEN], vec![1.0; HIDDEN]);
        let head = model.varying(VOCABULARY, LOGITS / (HIDDEN as f64 / 2.0).sqrt());
        model.push("lm_head.weight", &[VOCABULARY, HIDDEN], head);
        model
    }

    fn layer(&mut self, layer: usize, Shape { group, k_eq_v }: Shape) {
        let (full, own) = (layer > 0, |name: &str| format!("model.layers.{layer}.{name}"));
        let width = if full { HEAD } else { SLIDING_HEAD };
        // One factor per rotated pair: a channel and the one half a head later.
        let tails: Vec<f64> = (0..width / 2).map(|_| (TAILS * normal(&mut self.rng)).exp()).collect();
        let tails: Vec<f64> = tails.iter().chain(&tails).copied().collect();
        let size = length(&tails);
        // Share of the varying part in the length of a normalized key.
        let varies = if full { 1.0 / (1.0 + BIAS * BIAS).sqrt() } else { 1.0 };
        let gain = 1.0 / HIDDEN as f64;
        let q = self.random(group * width, HIDDEN, gain.sqrt());
        let mut k = self.varying(width, gain.sqrt());
        if full {
            self.add_bias(&mut k);
        }
        let o = self.random(HIDDEN, group * width, (1.0 / (group * width) as f64).sqrt());
        self.push(&own("self_attn.q_proj.weight"), &[group * width, HIDDEN], q);
        self.push(&own("self_attn.k_proj.weight"), &[width, HIDDEN], k);
        if !(full && k_eq_v) {
            let v = self.varying(width, gain.sqrt());
            self.push(&own("self_attn.v_proj.weight"), &[width, HIDDEN], v);
        }
        self.push(&own("self_attn.o_proj.weight"), &[HIDDEN, group * width], o);
        self.push(&own("self_attn.q_norm.weight"), &[width], vec![SCORES / size / varies; width]);
        self.push(&own("self_attn.k_norm.weight"), &[width], tails);
        for (name, shape) in [("gate_proj", [MLP, HIDDEN]), ("up_proj", [MLP, HIDDEN]), ("down_proj", [HIDDEN, MLP])] {
            let matrix = self.random(shape[0], shape[1], (1.0 / shape[1] as f64).sqrt());
            self.push(&own(&format!("mlp.{name}.weight")), &shape, matrix);
        }
        for (name, gain) in
            [("input", 1.0), ("post_attention", 0.5), ("pre_feedforward", 1.0), ("post_feedforward", 0.25)]
        {
            self.push(&own(&format!("{name}_layernorm.weight")), &[HIDDEN], vec![gain; HIDDEN]);
        }
        self.push(&own("layer_scalar"), &[1], vec![1.0]);
    }

    /// Adds a constant part to the keys that `k` computes: in a few channels, all among the three
    /// quarters of the pairs that are not rotated.
    fn add_bias(&mut self, k: &mut [f64]) {
        let still = |channel: usize| channel % (HEAD / 2) >= HEAD / 8;
        let bias: Vec<f64> =
            (0..HEAD).map(|channel| if still(channel) { normal(&mut self.rng).powi(3) } else { 0.0 }).collect();
        // The varying part of a hidden state has the length of the constant part, so rows of length
        // 1 give channels of variance 1/2.
        let size = BIAS * (HEAD as f64).sqrt() / (HIDDEN as f64).sqrt() / length(&bias);
        for (row, bias) in k.chunks_exact_mut(HIDDEN).zip(bias) {
            row.iter_mut().zip(&self.constant).for_each(|(x, constant)| *x += bias * size * constant);
        }
    }

    /// A random matrix.
    fn random(&mut self, rows: usize, columns: usize, deviation: f64) -> Vec<f64> {
        (0..rows * columns).map(|_| deviation * normal(&mut self.rng)).collect()
    }

    /// A random matrix `(rows, HIDDEN)`, orthogonal to the constant part of the hidden states.
    fn varying(&mut self, rows: usize, deviation: f64) -> Vec<f64> {
        let mut matrix = self.random(rows, HIDDEN, deviation);
        for row in matrix.chunks_exact_mut(HIDDEN) {
            let along: f64 = row.iter().zip(&self.constant).map(|(x, constant)| x * constant).sum();
            row.iter_mut().zip(&self.constant).for_each(|(x, constant)| *x -= along * constant);
        }
        matrix
    }

    fn push(&mut self, name: &str, shape: &[usize], values: Vec<f64>) {
        self.tensors.push((name.to_owned(), shape.to_vec(), values));
    }

    /// As safetensors, in f32.
    fn file(self) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, shape, values) in self.tensors {
            let start = data.len();
            values.iter().for_each(|x| data.extend((*x as f32).to_le_bytes()));
            let offsets = json!([start, data.len()]);
            header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
        }
        let header = Value::Object(header).to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
    }
}

fn length(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}
