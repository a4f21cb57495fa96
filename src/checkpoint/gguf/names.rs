//! Tensor names: llama.cpp's and Hugging Face's, without the latter's prefix (`model.language_model.`, `model.`).

/// GGUF names, and their Hugging Face equivalents.
type Table = &'static [(&'static str, &'static str)];

/// The tensor names of a family, in GGUF and at Hugging Face. Several in GGUF may map to one there.
pub struct Names {
    /// Outside the layers, except [`OUTER`].
    pub(crate) global: Table,
    /// Inside layer `i`: after `blk.i.`, and after `layers.i.`.
    pub(crate) layer: Table,
    /// The block of a NextN head, which is under `mtp.` at Hugging Face.
    pub(crate) nextn: Option<u32>,
    /// That head's names outside its layer: after `blk.i.`, and after `mtp.`.
    pub(crate) head: Table,
}

/// Embedding, norm and output head, which every family has.
pub(crate) const OUTER: Table = &[
    ("token_embd.weight", "embed_tokens.weight"),
    ("output_norm.weight", "norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// The gate and up projections of all experts of a layer, which a file may have apart.
pub(crate) const GATE_UP: &str = "ffn_gate_up_exps.weight";

impl Names {
    /// The possible GGUF names of the tensor `name` at Hugging Face, the likeliest first; empty if it has none.
    pub(crate) fn gguf(&self, name: &str) -> Vec<String> {
        match self.block(name) {
            Some((index, table, rest)) => with(table, rest).map(|name| format!("blk.{index}.{name}")).collect(),
            None => with(OUTER, name).chain(with(self.global, name)).map(str::to_owned).collect(),
        }
    }

    /// For a Hugging Face name inside a layer or a head: the block in GGUF, its table, and the name in the table.
    pub(crate) fn block<'a>(&self, name: &'a str) -> Option<(u32, Table, &'a str)> {
        match (name.strip_prefix("mtp."), self.nextn) {
            (Some(own), Some(block)) => match layer(own, "layers.") {
                Some((0, rest)) => Some((block, self.layer, rest)),
                _ => Some((block, self.head, own)),
            },
            _ => layer(name, "layers.").map(|(index, rest)| (index, self.layer, rest)),
        }
    }

    /// The Hugging Face name of the tensor `name` of a GGUF file, or `None`.
    pub(crate) fn hugging_face(&self, name: &str) -> Option<String> {
        let of = |table: &[(&str, &'static str)], name: &str| {
            table.iter().find(|(gguf, _)| *gguf == name).map(|(_, hf)| *hf)
        };
        match layer(name, "blk.") {
            Some((index, rest)) if self.nextn == Some(index) => match of(self.layer, rest) {
                Some(name) => Some(format!("mtp.layers.0.{name}")),
                None => of(self.head, rest).map(|name| format!("mtp.{name}")),
            },
            Some((index, rest)) => of(self.layer, rest).map(|name| format!("layers.{index}.{name}")),
            None => of(OUTER, name).or_else(|| of(self.global, name)).map(str::to_owned),
        }
    }

    /// Names of the separate gate and up projections that form `name`.
    pub(crate) fn split_gate_up(&self, name: &str) -> Option<(String, String)> {
        let (index, ..) = self.block(name).filter(|(_, table, rest)| with(table, rest).any(|own| own == GATE_UP))?;
        Some((format!("blk.{index}.ffn_gate_exps.weight"), format!("blk.{index}.ffn_up_exps.weight")))
    }
}

fn with<'a>(table: &'a [(&'static str, &'static str)], name: &'a str) -> impl Iterator<Item = &'static str> {
    table.iter().filter(move |(_, hf)| *hf == name).map(|(gguf, _)| *gguf)
}

/// The block of a NextN head among the tensors of a GGUF file, if it has one.
pub(super) fn nextn_block<'a>(mut tensors: impl Iterator<Item = &'a str>) -> Option<u32> {
    tensors.find_map(|name| layer(name, "blk.").filter(|(_, rest)| rest.starts_with("nextn.")).map(|(index, _)| index))
}

/// Splits `{prefix}{index}.{rest}`. The index must be canonical, so that no two names denote one tensor.
pub(crate) fn layer<'a>(name: &'a str, prefix: &str) -> Option<(u32, &'a str)> {
    let (digits, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let index: u32 = digits.parse().ok()?;
    (index.to_string() == digits).then_some((index, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nextn_block_has_a_heads_tensors() {
        let tensors = ["token_embd.weight", "nextn.pre_projection.weight", "blk.8.nextn.enorm.weight"];
        assert_eq!(nextn_block(tensors.into_iter()), Some(8));
    }
}
