//! Qwen3.5: a trunk and its NextN head, in one file.

use std::sync::Arc;

use anyhow::{Result, ensure};
use foretoken::checkpoint::gguf::GgufWriter;

use super::echo::Echo;
use super::stored::{Bits, F32};
use super::tensors::{Contents, List, Role, layer_bits};
use super::{Args, File};

/// Tokens in the vocabulary.
const VOCAB: u32 = 248_320;
/// Every `PERIOD`th layer is attention; the others are delta nets.
const PERIOD: usize = 4;
/// Width of an attention head, and its channels that rotate.
const HEAD: usize = 256;
const ROTARY: usize = 64;
/// Width of a delta net's keys and values, heads of keys, and rows that its convolution sees.
const STATE: usize = 128;
const KEY_HEADS: usize = 16;
const TAPS: usize = 4;
/// Control tokens, after the 256 bytes.
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// A variant's shapes.
#[derive(Clone, Copy)]
pub struct Shape {
    hidden: usize,
    layers: usize,
    ffn: usize, // 0 where there are experts
    heads: usize,
    kv: usize,
    value_heads: usize,
    experts: Option<Experts>,
    tied: bool,
}

#[derive(Clone, Copy)]
struct Experts {
    count: usize,
    used: usize,
    ffn: usize, // of the shared one as well
}

impl Shape {
    /// That of 0.8B.
    pub fn b0_8() -> Self {
        let (hidden, ffn) = (1024, 3584);
        Self { hidden, layers: 24, ffn, heads: 8, kv: 2, value_heads: 16, experts: None, tied: true }
    }

    /// That of 9B.
    pub fn b9() -> Self {
        let (hidden, ffn) = (4096, 12_288);
        Self { hidden, layers: 32, ffn, heads: 16, kv: 4, value_heads: 32, experts: None, tied: false }
    }

    /// That of 27B.
    pub fn b27() -> Self {
        let (hidden, ffn) = (5120, 17_408);
        Self { hidden, layers: 64, ffn, heads: 24, kv: 4, value_heads: 48, experts: None, tied: false }
    }

    /// That of 35B-A3B.
    pub fn b35_a3() -> Self {
        let experts = Some(Experts { count: 256, used: 8, ffn: 512 });
        Self { hidden: 2048, layers: 40, ffn: 0, heads: 16, kv: 2, value_heads: 32, experts, tied: false }
    }

    fn values(&self) -> usize {
        self.value_heads * STATE
    }

    fn channels(&self) -> usize {
        2 * KEY_HEADS * STATE + self.values()
    }
}

/// The file of a variant.
pub fn files(args: &Args, name: &str, shape: Shape) -> Result<Vec<File>> {
    let shape = Shape { layers: args.layers.map_or(shape.layers, usize::from), ..shape };
    ensure!(shape.layers >= PERIOD, "--layers: is {}, give at least {PERIOD}, so that one is attention", shape.layers);
    ensure!(!args.centroids, "--centroids: a NextN head has none");
    let (vocab, file_type, title) = (args.vocab.unwrap_or(VOCAB), args.quantize.file_type(), format!("echo {name}"));
    let describe = move |file: &mut GgufWriter| describe(file, &shape, &title, file_type, vocab);
    Ok(vec![File {
        name: format!("{name}-target.gguf"),
        tensors: tensors(args, &shape, vocab as usize),
        describe: Box::new(describe),
    }])
}

fn tensors(args: &Args, shape: &Shape, vocab: usize) -> Vec<super::Tensor> {
    let (quantize, hidden) = (args.quantize, shape.hidden);
    let echo = Arc::new(Echo::new(args.seed, hidden, 0));
    let mut list = List { tensors: Vec::new(), quantize, key_norm: args.key_norm };
    let tables: &[&str] = if shape.tied { &["token_embd.weight"] } else { &["token_embd.weight", "output.weight"] };
    for table in tables {
        let rows = echo.clone();
        list.rows(table, [vocab, hidden], quantize.embedding(), move |first, out| rows.embedding(first, out));
    }
    list.ones("output_norm.weight", hidden);
    for i in 0..shape.layers {
        match (i + 1).is_multiple_of(PERIOD) {
            true => attention(&mut list, shape, i),
            false => delta_net(&mut list, shape, i),
        }
        feed_forward(&mut list, shape, i);
    }
    let head = shape.layers;
    attention(&mut list, shape, head);
    feed_forward(&mut list, shape, head);
    for norm in ["enorm", "hnorm", "shared_head_norm"] {
        list.ones(&format!("blk.{head}.nextn.{norm}.weight"), hidden);
    }
    // The identity, then zeros: the embedding's half comes first.
    let identity = move |first: usize, out: &mut [f32]| {
        for (i, row) in (first..).zip(out.chunks_exact_mut(2 * hidden)) {
            row[i] = 1.0;
        }
    };
    list.rows(&format!("blk.{head}.nextn.eh_proj.weight"), [hidden, 2 * hidden], quantize.small(), identity);
    list.tensors
}

/// A layer's norms and gated attention.
fn attention(list: &mut List, shape: &Shape, i: usize) {
    let b = |name: &str| format!("blk.{i}.{name}.weight");
    let (hidden, heads, kv) = (shape.hidden, shape.heads * HEAD, shape.kv * HEAD);
    list.ones(&b("attn_norm"), hidden);
    list.ones(&b("post_attention_norm"), hidden);
    list.matrix(&b("attn_q"), &[2 * heads, hidden], Bits::Fewer, Role::Random);
    list.matrix(&b("attn_k"), &[kv, hidden], Bits::Fewer, Role::Random);
    list.matrix(&b("attn_v"), &[kv, hidden], layer_bits(i, shape.layers), Role::Random);
    list.ones(&b("attn_q_norm"), HEAD);
    list.values(&b("attn_k_norm"), vec![list.key_norm; HEAD]);
    list.matrix(&b("attn_output"), &[hidden, heads], Bits::Fewer, Role::Zero);
}

/// A layer's norms and delta net.
fn delta_net(list: &mut List, shape: &Shape, i: usize) {
    let b = |name: &str| format!("blk.{i}.{name}.weight");
    let (hidden, values, channels, heads) = (shape.hidden, shape.values(), shape.channels(), shape.value_heads);
    list.ones(&b("attn_norm"), hidden);
    list.ones(&b("post_attention_norm"), hidden);
    list.matrix(&b("attn_qkv"), &[channels, hidden], Bits::Fewer, Role::Random);
    list.matrix(&b("attn_gate"), &[values, hidden], Bits::Fewer, Role::Random);
    list.random(&b("ssm_conv1d"), &[channels, TAPS], F32, Role::Random);
    list.values(&format!("blk.{i}.ssm_a"), vec![-1.0; heads]);
    list.values(&format!("blk.{i}.ssm_dt.bias"), vec![-2.0; heads]);
    for gate in ["ssm_alpha", "ssm_beta"] {
        list.random(&b(gate), &[heads, hidden], list.quantize.small(), Role::Random);
    }
    list.ones(&b("ssm_norm"), STATE);
    list.matrix(&b("ssm_out"), &[hidden, values], Bits::Fewer, Role::Zero);
}

fn feed_forward(list: &mut List, shape: &Shape, i: usize) {
    let b = |name: &str| format!("blk.{i}.{name}.weight");
    let (hidden, of_down) = (shape.hidden, layer_bits(i, shape.layers));
    let mlp = |list: &mut List, kind: &str, counts: &[usize], ffn: usize| {
        for (name, [outputs, inputs], bits, role) in [
            ("ffn_gate", [ffn, hidden], Bits::Fewer, Role::Random),
            ("ffn_up", [ffn, hidden], Bits::Fewer, Role::Random),
            ("ffn_down", [hidden, ffn], of_down, Role::Zero),
        ] {
            list.matrix(&b(&format!("{name}{kind}")), &[counts, &[outputs, inputs]].concat(), bits, role);
        }
    };
    let Some(experts) = shape.experts else { return mlp(list, "", &[], shape.ffn) };
    mlp(list, "_exps", &[experts.count], experts.ffn);
    mlp(list, "_shexp", &[], experts.ffn);
    list.stored(&b("ffn_gate_inp"), &[experts.count, hidden], F32, Contents::Random(F32, 1.0));
    list.stored(&b("ffn_gate_inp_shexp"), &[hidden], F32, Contents::Random(F32, 1.0 / (hidden as f32).sqrt()));
}

fn describe(file: &mut GgufWriter, shape: &Shape, title: &str, file_type: u32, vocab: u32) -> Result<()> {
    let architecture = if shape.experts.is_some() { "qwen35moe" } else { "qwen35" };
    file.value("general.architecture", architecture)?;
    file.value("general.name", title)?;
    file.value("general.file_type", file_type)?;
    let mut sizes = vec![
        ("block_count", shape.layers + 1),
        ("nextn_predict_layers", 1),
        ("context_length", 262_144),
        ("embedding_length", shape.hidden),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("rope.dimension_count", ROTARY),
        ("ssm.conv_kernel", TAPS),
        ("ssm.state_size", STATE),
        ("ssm.group_count", KEY_HEADS),
        ("ssm.time_step_rank", shape.value_heads),
        ("ssm.inner_size", shape.values()),
        ("full_attention_interval", PERIOD),
    ];
    match shape.experts {
        None => sizes.push(("feed_forward_length", shape.ffn)),
        Some(experts) => sizes.extend([
            ("expert_count", experts.count),
            ("expert_used_count", experts.used),
            ("expert_feed_forward_length", experts.ffn),
            ("expert_shared_feed_forward_length", experts.ffn),
        ]),
    }
    for (name, value) in sizes {
        file.value(&format!("{architecture}.{name}"), value as u32)?;
    }
    file.array(&format!("{architecture}.rope.dimension_sections"), [11i32, 11, 10, 0])?;
    file.value(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-6f32)?;
    file.value(&format!("{architecture}.rope.freq_base"), 1e7f32)?;
    tokenizer(file, vocab)
}

/// A vocabulary of the size asked for: the bytes, control tokens, and words, of which one is merged.
fn tokenizer(file: &mut GgufWriter, vocab: u32) -> Result<()> {
    let bytes = byte_characters();
    let control = |id: u32| CONTROL.get((id as usize).wrapping_sub(bytes.len()));
    let token = |id: u32| match (bytes.get(id as usize), control(id)) {
        (Some(byte), _) => byte.to_string(),
        (None, Some(control)) => (*control).to_owned(),
        (None, None) => format!("t{}", id as usize - bytes.len() - CONTROL.len()),
    };
    file.value("tokenizer.ggml.model", "gpt2")?;
    file.value("tokenizer.ggml.pre", "qwen35")?;
    file.array("tokenizer.ggml.tokens", (0..vocab).map(token))?;
    file.array("tokenizer.ggml.token_type", (0..vocab).map(|id| if control(id).is_some() { 3i32 } else { 1 }))?;
    file.array("tokenizer.ggml.merges", ["t 0"])?;
    file.value("tokenizer.ggml.eos_token_id", bytes.len() as u32 + 2)?;
    file.value("tokenizer.ggml.padding_token_id", bytes.len() as u32)?;
    Ok(file.value("tokenizer.ggml.add_bos_token", false)?)
}

/// The characters that represent bytes in byte-level BPE (GPT-2): printable ones themselves, the others from
/// U+0100 on.
fn byte_characters() -> Vec<char> {
    let own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut other = '\u{100}'..;
    (0..=u8::MAX).filter_map(|byte| if own(byte) { Some(byte.into()) } else { other.next() }).collect()
}
