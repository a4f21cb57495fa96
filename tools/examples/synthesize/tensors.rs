//! The tensors of a checkpoint, and their contents.

use std::sync::Arc;

use super::echo::Echo;
use super::shape::{HEAD, Shape, Stack};
use super::stored::{Bits, F16, F32, I32_ID, Quantize, Stored};

/// A tensor to be written.
pub struct Tensor {
    pub name: String,
    pub ggml_id: u32,
    pub shape: Vec<usize>, // outermost first
    pub bytes: usize,
    pub contents: Contents,
}

/// Contents of a tensor.
pub enum Contents {
    /// Zero blocks, which are zeros in every type.
    Zeros,
    /// Random numbers with this standard deviation around zero.
    Random(Stored, f32),
    /// Rows that the function fills in.
    Rows(Stored, Rows),
    /// Explicit values.
    Values(Vec<f32>),
    /// Token ids.
    Ids(Vec<u32>),
}

/// Fills `(rows, inputs)`, rows counted from the first argument on.
pub type Rows = Box<dyn Fn(usize, &mut [f32]) + Sync>;

pub struct List {
    pub tensors: Vec<Tensor>,
    pub quantize: Quantize,
    pub key_norm: f32,
}

/// Purpose of a matrix of a layer.
#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    /// Random weights, at the cost of real ones.
    Random,
    /// Zeros, which add nothing to the residual stream.
    Zero,
}

impl List {
    fn push(&mut self, name: &str, ggml_id: u32, shape: &[usize], bytes: usize, contents: Contents) {
        self.tensors.push(Tensor { name: name.to_owned(), ggml_id, shape: shape.to_vec(), bytes, contents });
    }

    pub fn values(&mut self, name: &str, values: Vec<f32>) {
        self.push(name, F32.ggml_id(), &[values.len()], 4 * values.len(), Contents::Values(values));
    }

    pub fn ones(&mut self, name: &str, len: usize) {
        self.values(name, vec![1.0; len]);
    }

    pub fn stored(&mut self, name: &str, shape: &[usize], stored: Stored, contents: Contents) {
        self.push(name, stored.ggml_id(), shape, stored.bytes(shape.iter().product()), contents);
    }

    pub fn rows(
        &mut self,
        name: &str,
        shape: [usize; 2],
        stored: Stored,
        rows: impl Fn(usize, &mut [f32]) + Sync + 'static,
    ) {
        self.stored(name, &shape, stored, Contents::Rows(stored, Box::new(rows)));
    }

    pub fn random(&mut self, name: &str, shape: &[usize], stored: Stored, role: Role) {
        let inputs = shape.last().copied().unwrap_or(1) as f32;
        let contents = match role {
            Role::Random => Contents::Random(stored, 1.0 / inputs.sqrt()),
            Role::Zero => Contents::Zeros,
        };
        self.stored(name, shape, stored, contents);
    }

    pub fn matrix(&mut self, name: &str, shape: &[usize], bits: Bits, role: Role) {
        let stored = self.quantize.matrix(shape.last().copied().unwrap_or(1), bits);
        self.random(name, shape, stored, role);
    }

    /// The first quarter of the full layers' pairs rotates.
    fn rotation(&mut self) {
        let pairs = HEAD[1] / 2;
        self.values("rope_freqs.weight", (0..pairs).map(|i| if i < pairs / 4 { 1.0 } else { 1e30 }).collect());
    }

    /// The tensors of a layer of either model; K and V, if any, are between the Q and output projections.
    fn layer(&mut self, stack: &Stack, i: usize, own_kv: Option<OwnKv>, bits: Bits) {
        let b = |name: &str| format!("blk.{i}.{name}");
        let (hidden, ffn, head) = (stack.hidden, stack.ffn[i], stack.head(i));
        for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            self.ones(&b(&format!("{norm}.weight")), hidden);
        }
        self.matrix(&b("attn_q.weight"), &[stack.heads * head, hidden], Bits::Fewer, Role::Random);
        self.ones(&b("attn_q_norm.weight"), head);
        if let Some(own) = own_kv {
            let shape = [stack.kv(i) * head, hidden];
            self.matrix(&b("attn_k.weight"), &shape, Bits::Fewer, Role::Random);
            self.values(&b("attn_k_norm.weight"), vec![self.key_norm; head]);
            if own == OwnKv::KeyAndValue {
                self.matrix(&b("attn_v.weight"), &shape, bits, Role::Random);
            }
        }
        self.matrix(&b("attn_output.weight"), &[hidden, stack.heads * head], Bits::Fewer, Role::Zero);
        self.matrix(&b("ffn_gate.weight"), &[ffn, hidden], Bits::Fewer, Role::Random);
        self.matrix(&b("ffn_up.weight"), &[ffn, hidden], Bits::Fewer, Role::Random);
        self.matrix(&b("ffn_down.weight"), &[hidden, ffn], bits, Role::Zero);
        self.ones(&b("layer_output_scale.weight"), 1);
    }
}

/// The K and V that a layer computes itself.
#[derive(Clone, Copy, PartialEq)]
enum OwnKv {
    /// One projection for both.
    Key,
    KeyAndValue,
}

/// Bits of the matrices of layer `i` of `n` for which a mix may use more: at both ends, and on every third between.
pub fn layer_bits(i: usize, n: usize) -> Bits {
    if i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2 { Bits::More } else { Bits::Fewer }
}

/// The tensors of the target.
pub fn target(
    shape: &Shape,
    stack: &Stack,
    quantize: Quantize,
    key_norm: f32,
    vocab: usize,
    echo: &Arc<Echo>,
) -> Vec<Tensor> {
    let mut list = List { tensors: Vec::new(), quantize, key_norm };
    let (n, hidden, width) = (shape.layers, stack.hidden, shape.per_layer);
    let rows = echo.clone();
    let fill = move |first: usize, out: &mut [f32]| rows.embedding(first, out);
    list.rows("token_embd.weight", [vocab, hidden], quantize.embedding(), fill);
    list.ones("output_norm.weight", hidden);
    list.rotation();
    if width > 0 {
        list.matrix("per_layer_token_embd.weight", &[vocab, width * n], Bits::Fewer, Role::Random);
        list.stored("per_layer_model_proj.weight", &[width * n, hidden], F16, Contents::Random(F16, 1.0));
        list.ones("per_layer_proj_norm.weight", width);
    }
    for i in 0..n {
        let b = |name: &str| format!("blk.{i}.{name}");
        let one_for_both = shape.k_eq_v && !stack.sliding[i];
        let own = if one_for_both { OwnKv::Key } else { OwnKv::KeyAndValue };
        list.layer(stack, i, (i < n - shape.shared).then_some(own), layer_bits(i, n));
        if width > 0 {
            list.random(&b("inp_gate.weight"), &[width, hidden], quantize.small(), Role::Random);
            list.random(&b("proj.weight"), &[hidden, width], quantize.small(), Role::Zero);
            list.ones(&b("post_norm.weight"), hidden);
        }
        if let Some(experts) = shape.experts {
            list.stored(&b("ffn_gate_inp.weight"), &[experts.count, hidden], F32, Contents::Random(F32, 1.0));
            list.ones(&b("ffn_gate_inp.scale"), hidden);
            let gate_up = [experts.count, 2 * experts.ffn, hidden];
            list.matrix(&b("ffn_gate_up_exps.weight"), &gate_up, Bits::Fewer, Role::Random);
            list.matrix(&b("ffn_down_exps.weight"), &[experts.count, hidden, experts.ffn], Bits::Fewer, Role::Zero);
            list.ones(&b("ffn_down_exps.scale"), experts.count);
            for norm in ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] {
                list.ones(&b(&format!("{norm}.weight")), hidden);
            }
        }
    }
    list.tensors
}

/// A centroid head: how many centroids there are, and the ids in their order.
pub struct Centroids {
    pub count: usize,
    pub ids: Vec<u32>,
}

/// The tensors of the assistant, in the older layout if there are centroids.
pub fn assistant(
    shape: &Shape,
    stack: &Stack,
    quantize: Quantize,
    vocab: usize,
    echo: &Arc<Echo>,
    centroids: Option<Centroids>,
) -> Vec<Tensor> {
    // The assistant has no keys of its own.
    let mut list = List { tensors: Vec::new(), quantize, key_norm: 1.0 };
    let (hidden, target) = (stack.hidden, shape.hidden);
    let section = if centroids.is_some() { "mtp" } else { "nextn" };
    let rows = echo.clone();
    let fill = move |first: usize, out: &mut [f32]| rows.assistant_embedding(first, out);
    list.rows("token_embd.weight", [vocab, hidden], quantize.embedding(), fill);
    list.ones("output_norm.weight", hidden);
    list.rotation();
    let rows = echo.clone();
    let fill = move |first: usize, out: &mut [f32]| rows.pre_projection(first, out);
    list.rows(&format!("{section}.pre_projection.weight"), [hidden, 2 * target], quantize.embedding(), fill);
    list.matrix(&format!("{section}.post_projection.weight"), &[target, hidden], Bits::Fewer, Role::Random);
    if let Some(Centroids { count, ids }) = centroids {
        let rows = echo.clone();
        let fill = move |first: usize, out: &mut [f32]| rows.centroids(first, out);
        list.rows("mtp.centroids.weight", [count, hidden], quantize.small(), fill);
        list.push("mtp.token_ordering.weight", I32_ID, &[vocab], 4 * vocab, Contents::Ids(ids));
    }
    for i in 0..stack.sliding.len() {
        list.layer(stack, i, None, Bits::Fewer);
    }
    list.tensors
}
