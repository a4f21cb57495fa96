//! The fixtures, whose heads have 32 channels, with wider heads.
//!
//! A head of `from` channels is embedded in one of `to`, with zeros between. A norm over more channels has a larger
//! result by the square root of the quotient, which the norms' weights and the output projection undo; rotations have
//! the same angles with another base. So the outputs are the fixture's, up to rounding.
//!
//! Where the leading channels rotate, the zeros are after them and the rotation is the same.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use half::bf16;
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
    zeros: Zeros,
}

/// Where the added channels are.
#[derive(PartialEq, Eq)]
enum Zeros {
    /// In both halves of a head, after the rotating channels of the first halves of pairs and after the others.
    Between,
    /// After all others. Norms have an added 1, values have none.
    After,
}

impl Widening {
    /// The new index of a head's channel.
    fn channel(&self, channel: usize) -> usize {
        if self.zeros == Zeros::After {
            return channel;
        }
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

    /// The tensor `part` `x` of the checkpoint, and its dimension that is wider.
    fn widened(&self, part: &str, x: &[f32], shape: &[usize]) -> Option<(Vec<f32>, usize)> {
        let scale = self.scale();
        Some(match (part, &self.zeros) {
            ("q_proj" | "k_proj" | "v_proj", _) => (self.spread(x, 1, shape[1], 1.0), 0),
            ("o_proj", Zeros::Between) => (self.spread(x, shape[0], 1, scale), 1),
            ("o_proj", Zeros::After) => (self.spread(x, shape[0], 1, 1.0), 1),
            ("q_norm" | "k_norm", Zeros::Between) => (self.spread(x, 1, 1, scale), 0),
            // The scale of the scores, which follows from the width, undoes the other factor of queries.
            ("q_norm", Zeros::After) => (self.spread(x, 1, 1, 1.0), 0),
            ("k_norm", Zeros::After) => {
                let x: Vec<f32> = x.iter().map(|x| (1.0 + x) * scale - 1.0).collect();
                (self.spread(&x, 1, 1, 1.0), 0)
            }
            _ => return None,
        })
    }
}

/// The widening of a tensor, by its name.
type Widenings = Box<dyn Fn(&str) -> Option<Rc<Widening>>>;

/// Sliding and full layers of a Gemma; `text` becomes the copy's configuration.
fn of_gemma(text: &mut Value, widths: Widths) -> Widenings {
    let number = |name: &str| text[name].as_u64().expect(name) as usize;
    let (head_dim, global) = (number("head_dim"), number("global_head_dim"));
    let part = text["rope_parameters"]["full_attention"]["partial_rotary_factor"].as_f64().unwrap_or(0.25);
    let of = |width, pairs, to| Rc::new(Widening { from: Heads { width, pairs }, to, zeros: Zeros::Between });
    let sliding = of(head_dim, head_dim / 2, widths.sliding);
    let full = of(global, (part * global as f64 / 2.0) as usize, widths.full);
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
    Box::new(move |name| {
        let layer = name.split("layers.").nth(1).and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        layer.filter(|_| !name.contains("vision")).map(|i| if kinds[i] { full.clone() } else { sliding.clone() })
    })
}

/// The attention layers of a model whose leading channels rotate; they get the width of full layers.
fn of_leading(text: &mut Value, widths: Widths) -> Widenings {
    let width = text["head_dim"].as_u64().expect("head_dim") as usize;
    let rotary = &mut text["rope_parameters"]["partial_rotary_factor"];
    *rotary = json!(rotary.as_f64().expect("a factor") * width as f64 / widths.full.width as f64);
    text["head_dim"] = json!(widths.full.width);
    let widening = Widening { from: Heads { width, pairs: 0 }, to: widths.full, zeros: Zeros::After };
    let widening = Rc::new(widening);
    Box::new(move |name| name.contains("self_attn").then(|| widening.clone()))
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    match tensor.dtype() {
        Dtype::F32 => tensor.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        Dtype::BF16 => tensor.data().as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        other => panic!("tensors of {other:?}"),
    }
}

/// Writes a copy of the checkpoint in `from` to `to`, and returns its path.
pub fn widen(from: &Path, to: &Path, widths: Widths) -> PathBuf {
    std::fs::create_dir_all(to).expect("a folder");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).expect("config.json")).expect("JSON");
    let nested = config.get("text_config").is_some();
    let text = if nested { &mut config["text_config"] } else { &mut config };
    let widenings = match text.get("global_head_dim") {
        Some(_) => of_gemma(text, widths),
        None => of_leading(text, widths),
    };
    std::fs::write(to.join("config.json"), config.to_string()).expect("config.json");

    let bytes = std::fs::read(from.join("model.safetensors")).expect("model.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in file.tensors() {
        let mut shape = tensor.shape().to_vec();
        let mut dtype = tensor.dtype();
        let grown =
            widenings(&name).and_then(|widening| widening.widened(name.rsplit('.').nth(1)?, &floats(&tensor), &shape));
        let data = match grown {
            Some((wide, dimension)) => {
                dtype = Dtype::F32;
                shape[dimension] = wide.len() * shape[dimension] / shape.iter().product::<usize>();
                wide.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
            None => tensor.data().to_vec(),
        };
        tensors.push((name, dtype, shape, data));
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    serialize_to_file(views, None, &to.join("model.safetensors")).expect("a file");
    to.to_owned()
}
