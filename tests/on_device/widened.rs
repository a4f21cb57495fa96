//! The fixtures with wider heads: there are no kernels for heads of 32.
//!
//! A head of `from` channels is embedded in one of `to`, with zeros between. A norm over more channels has a larger result by the
//! square root of the quotient, which the norms' weights and the output projection undo; rotations have the same angles with
//! another base. So the outputs are the fixture's, up to rounding.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

/// The widened heads of a layer type.
#[derive(Clone, Copy)]
pub struct Heads {
    /// Channels.
    pub width: usize,
    /// Rotating pairs; the added ones are zero.
    pub pairs: usize,
}

/// The widths of a copy.
#[derive(Clone, Copy)]
pub struct Widths {
    pub sliding: Heads,
    pub full: Heads,
}

struct Widening {
    from: Heads,
    to: Heads,
}

impl Widening {
    /// The new index of a head's channel.
    fn channel(&self, channel: usize) -> usize {
        let (half, i) = (channel / (self.from.width / 2), channel % (self.from.width / 2));
        let i = if i < self.from.pairs { i } else { self.to.pairs + i - self.from.pairs };
        half * (self.to.width / 2) + i
    }

    /// The factor that undoes the wider norm.
    fn scale(&self) -> f32 {
        (self.from.width as f32 / self.to.width as f32).sqrt()
    }

    /// `(outer, heads * from, inner)` to `(outer, heads * to, inner)`.
    fn spread(&self, x: &[f32], outer: usize, inner: usize, scale: f32) -> Vec<f32> {
        let all = x.len() / outer / inner;
        let wide = all / self.from.width * self.to.width;
        let mut y = vec![0.0; outer * wide * inner];
        for o in 0..outer {
            for row in 0..all {
                let to = row / self.from.width * self.to.width + self.channel(row % self.from.width);
                for i in 0..inner {
                    y[(o * wide + to) * inner + i] = scale * x[(o * all + row) * inner + i];
                }
            }
        }
        y
    }
}

/// Writes a copy of the checkpoint in `from` to `to`, and returns its path.
pub fn widen(from: &Path, to: &Path, widths: Widths) -> PathBuf {
    std::fs::create_dir_all(to).expect("a folder");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).expect("config.json")).expect("JSON");
    let nested = config.get("text_config").is_some();
    let text = if nested { &mut config["text_config"] } else { &mut config };
    let number = |text: &Value, name: &str| text[name].as_u64().expect(name) as usize;
    let (head_dim, global) = (number(text, "head_dim"), number(text, "global_head_dim"));
    let part = text["rope_parameters"]["full_attention"]["partial_rotary_factor"].as_f64().unwrap_or(0.25);
    let sliding = Widening { from: Heads { width: head_dim, pairs: head_dim / 2 }, to: widths.sliding };
    let full =
        Widening { from: Heads { width: global, pairs: (part * global as f64 / 2.0) as usize }, to: widths.full };
    let kinds: Vec<bool> =
        text["layer_types"].as_array().expect("layer_types").iter().map(|kind| kind == "full_attention").collect();
    for (name, base, widening) in [("sliding_attention", 1e4, &sliding), ("full_attention", 1e6, &full)] {
        let quotient = widening.to.width as f64 / widening.from.width as f64;
        let parameters = &mut text["rope_parameters"][name];
        let theta = parameters["rope_theta"].as_f64().unwrap_or(base);
        *parameters = json!({
            "rope_type": "proportional",
            "rope_theta": theta.powf(quotient),
            "partial_rotary_factor": 2.0 * widening.to.pairs as f64 / widening.to.width as f64,
        });
    }
    text["head_dim"] = json!(sliding.to.width);
    text["global_head_dim"] = json!(full.to.width);
    std::fs::write(to.join("config.json"), config.to_string()).expect("config.json");

    let bytes = std::fs::read(from.join("model.safetensors")).expect("model.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in file.tensors() {
        let layer = name.split("layers.").nth(1).and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let widening = layer.filter(|_| !name.contains("vision")).map(|i| if kinds[i] { &full } else { &sliding });
        let mut shape = tensor.shape().to_vec();
        let floats = || -> Vec<f32> { tensor.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect() };
        let grown = widening.and_then(|widening| {
            let part = name.rsplit('.').nth(1)?;
            match part {
                "q_proj" | "k_proj" | "v_proj" => Some((widening.spread(&floats(), 1, shape[1], 1.0), 0)),
                "o_proj" => Some((widening.spread(&floats(), shape[0], 1, widening.scale()), 1)),
                "q_norm" | "k_norm" => Some((widening.spread(&floats(), 1, 1, widening.scale()), 0)),
                _ => None,
            }
        });
        let data = match grown {
            Some((wide, dimension)) => {
                shape[dimension] = wide.len() * shape[dimension] / shape.iter().product::<usize>();
                wide.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
            None => tensor.data().to_vec(),
        };
        tensors.push((name, tensor.dtype(), shape, data));
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    serialize_to_file(views, None, &to.join("model.safetensors")).expect("a file");
    to.to_owned()
}
