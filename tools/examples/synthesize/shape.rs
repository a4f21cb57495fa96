//! Gemma 4's shapes, and the metadata that describe them.

use anyhow::Result;
use foretoken::checkpoint::gguf::GgufWriter;

/// A variant's shapes.
#[derive(Clone, Default)]
pub struct Shape {
    pub hidden: usize,
    pub ffn: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv: [usize; 2], // K/V heads of sliding and of full layers
    pub window: usize,
    pub period: usize,    // every period-th layer is full
    pub shared: usize,    // layers at the end that have no K/V of their own
    pub per_layer: usize, // width of the per-layer embeddings; 0 if there are none
    pub wide_shared_ffn: bool,
    pub k_eq_v: bool,
    pub experts: Option<Experts>,
    pub assistant: Assistant,
}

#[derive(Clone, Copy)]
pub struct Experts {
    pub count: usize,
    pub used: usize,
    pub ffn: usize,
}

#[derive(Clone, Copy, Default)]
pub struct Assistant {
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
}

impl Shape {
    /// That of E2B.
    pub fn e2b() -> Self {
        Self { hidden: 1536, ffn: 6144, layers: 35, kv: [1, 1], period: 5, wide_shared_ffn: true, ..Self::small() }
    }

    /// That of E4B.
    pub fn e4b() -> Self {
        Self { hidden: 2560, ffn: 10_240, layers: 42, kv: [2, 2], period: 6, shared: 18, ..Self::small() }
    }

    /// That of 12B.
    pub fn b12() -> Self {
        Self { hidden: 3840, ffn: 15_360, layers: 48, ..Self::large() }
    }

    /// That of 26B-A4B.
    pub fn b26() -> Self {
        let experts = Some(Experts { count: 128, used: 8, ffn: 704 });
        Self { hidden: 2816, ffn: 2112, layers: 30, kv: [8, 2], experts, ..Self::large() }
    }

    /// That of 31B.
    pub fn b31() -> Self {
        let large = Self::large();
        let assistant = Assistant { heads: 32, ..large.assistant };
        Self { hidden: 5376, ffn: 21_504, layers: 60, heads: 32, kv: [16, 4], assistant, ..large }
    }

    fn small() -> Self {
        Self {
            window: 512,
            per_layer: 256,
            assistant: Assistant { hidden: 256, ffn: 2048, heads: 4 },
            k_eq_v: false,
            shared: 20,
            heads: 8,
            ..Self::default()
        }
    }

    fn large() -> Self {
        Self {
            window: 1024,
            period: 6,
            assistant: Assistant { hidden: 1024, ffn: 8192, heads: 16 },
            k_eq_v: true,
            heads: 16,
            kv: [8, 1],
            ..Self::default()
        }
    }

    /// With another number of layers: as many of them shared as the variant shares in proportion, but never those
    /// before the end of the first period, so that there is a layer of either kind to share.
    pub fn with_layers(mut self, layers: usize) -> Self {
        self.shared = (self.shared * layers / self.layers).min(layers.saturating_sub(self.period));
        self.layers = layers;
        self
    }

    pub fn target(&self) -> Stack {
        let n = self.layers;
        let wide = |i: usize| self.wide_shared_ffn && i >= n - self.shared;
        Stack {
            hidden: self.hidden,
            ffn: (0..n).map(|i| if wide(i) { 2 * self.ffn } else { self.ffn }).collect(),
            heads: self.heads,
            sliding: (1..=n).map(|i| i % self.period != 0 && i != n).collect(),
            kv: self.kv,
            window: self.window,
            shared: self.shared,
        }
    }

    pub fn assistant(&self) -> Stack {
        let Assistant { hidden, ffn, heads } = self.assistant;
        let sliding = vec![true, true, true, false];
        Stack { hidden, ffn: vec![ffn; 4], heads, sliding, kv: self.kv, window: self.window, shared: 4 }
    }
}

/// What a target and an assistant are both described by.
pub struct Stack {
    pub hidden: usize,
    pub ffn: Vec<usize>, // of each layer
    pub heads: usize,
    pub sliding: Vec<bool>, // of each layer
    pub kv: [usize; 2],
    pub window: usize,
    pub shared: usize,
}

/// Widths of the heads of sliding and of full layers.
pub const HEAD: [usize; 2] = [256, 512];
const EPS: f32 = 1e-6;

impl Stack {
    pub fn head(&self, layer: usize) -> usize {
        HEAD[usize::from(!self.sliding[layer])]
    }

    pub fn kv(&self, layer: usize) -> usize {
        self.kv[usize::from(!self.sliding[layer])]
    }

    pub fn describe(
        &self,
        file: &mut GgufWriter,
        architecture: &str,
        name: &str,
        file_type: u32,
        vocab: usize,
    ) -> Result<()> {
        let key = |key: &str| format!("{architecture}.{key}");
        file.value("general.architecture", architecture)?;
        file.value("general.name", name)?;
        file.value("general.file_type", file_type)?;
        let layers = self.sliding.len();
        for (name, value) in [
            ("context_length", 131_072),
            ("embedding_length", self.hidden),
            ("block_count", layers),
            ("attention.head_count", self.heads),
            ("attention.key_length", HEAD[1]),
            ("attention.value_length", HEAD[1]),
            ("attention.key_length_swa", HEAD[0]),
            ("attention.value_length_swa", HEAD[0]),
            ("attention.sliding_window", self.window),
            ("attention.shared_kv_layers", self.shared),
            ("rope.dimension_count", HEAD[1]),
            ("rope.dimension_count_swa", HEAD[0]),
        ] {
            file.value(&key(name), value as u32)?;
        }
        file.value(&key("attention.layer_norm_rms_epsilon"), EPS)?;
        file.value(&key("rope.freq_base"), 1e6f32)?;
        file.value(&key("rope.freq_base_swa"), 1e4f32)?;
        // Signed, as the converters' arrays of integers are.
        file.array(&key("attention.head_count_kv"), (0..layers).map(|i| self.kv(i) as i32))?;
        file.array(&key("attention.sliding_window_pattern"), self.sliding.iter().copied())?;
        match self.ffn.iter().all(|width| *width == self.ffn[0]) {
            true => file.value(&key("feed_forward_length"), self.ffn[0] as u32)?,
            false => file.array(&key("feed_forward_length"), self.ffn.iter().map(|width| *width as i32))?,
        }
        tokenizer(file, vocab as u32)
    }
}

/// A vocabulary of the real size: four control tokens, the bytes, and words that are never merged.
fn tokenizer(file: &mut GgufWriter, vocab: u32) -> Result<()> {
    let token = |id: u32| match id {
        0..4 => ["<pad>", "<eos>", "<bos>", "<unk>"][id as usize].to_owned(),
        4..260 => format!("<0x{:02X}>", id - 4),
        _ => format!("\u{2581}t{}", id - 260),
    };
    let kind = |id: u32| match id {
        0..3 => 3i32, // control
        3 => 2,       // unknown
        4..260 => 6,  // byte
        _ => 1,       // normal
    };
    file.value("tokenizer.ggml.model", "llama")?;
    file.array("tokenizer.ggml.tokens", (0..vocab).map(token))?;
    file.array("tokenizer.ggml.scores", (0..vocab).map(|id| -(id as f32)))?;
    file.array("tokenizer.ggml.token_type", (0..vocab).map(kind))?;
    for (name, id) in [("padding", 0u32), ("eos", 1), ("bos", 2), ("unknown", 3)] {
        file.value(&format!("tokenizer.ggml.{name}_token_id"), id)?;
    }
    Ok(file.value("tokenizer.ggml.add_bos_token", true)?)
}
