//! Bytes of weights in memory, and those read per token, from names, shapes and sizes alone.

use foretoken_kernels::quant::WeightType;

use super::files::{Checkpoint, Files};
use super::gguf::TensorInfo;
use super::head_names::is_head;
use super::inner_assistant::is_inner_assistants;
use super::tower_names::is_tower;
use crate::Result;
use crate::gemma4::{AssistantConfig, TextConfig, is_assistants_table, is_unused_kv};

impl Checkpoint {
    /// Bytes of weights read per step of the target: those of the loaded model
    /// ([`StepCost`](super::StepCost)), without loading it.
    ///
    /// # Errors
    /// If there is no embedding under any known prefix.
    pub fn target_step_bytes(&self, config: &TextConfig) -> Result<u64> {
        let prefix = self.text_prefix()?;
        let of_tensor = |name: &str, dimensions: usize, bytes: u64| {
            let is_gathered = name.ends_with("embed_tokens_per_layer.weight")
                || !config.tie_word_embeddings && name.ends_with("embed_tokens.weight");
            if dimensions < 2 || is_gathered || is_unread(name, prefix, config) {
                return 0;
            }
            let is_experts = name.contains(".experts.") || name.contains("_exps.");
            match config.moe.as_ref().filter(|_| is_experts) {
                Some(moe) => bytes / moe.num_experts as u64 * moe.top_k_experts as u64,
                None => bytes,
            }
        };
        Ok(self.sum_of_tensors(of_tensor))
    }

    /// Bytes of the target's weights when loaded: [`Checkpoint::loaded_bytes`] without the tensors that it does not
    /// read, such as a copy of the tied head.
    ///
    /// # Errors
    /// As [`Checkpoint::target_step_bytes`].
    pub(crate) fn target_bytes(&self, config: &TextConfig) -> Result<u64> {
        let prefix = self.text_prefix()?;
        Ok(self.sum_of_tensors(|name, _, bytes| if is_unread(name, prefix, config) { 0 } else { bytes }))
    }

    /// Bytes of weights read per draft step of the assistant, which reads only one of its tables: its output head.
    pub fn assistant_step_bytes(&self, config: &AssistantConfig) -> u64 {
        let head = assistants_head(config);
        self.sum_of_tensors(|name, dimensions, bytes| match &config.centroids {
            _ if dimensions < 2 => 0,
            Some(centroids) if name.ends_with(head) => bytes / centroids.num_centroids as u64 * centroids.top_k as u64,
            _ if is_assistants_table(name) && !name.ends_with(head) => 0,
            _ => bytes,
        })
    }

    /// Bytes of the assistant's weights when loaded: [`Checkpoint::loaded_bytes`] without the tables that it does not
    /// read.
    pub fn assistant_bytes(&self, config: &AssistantConfig) -> u64 {
        let head = assistants_head(config);
        let is_unread = |name: &str| is_tower(name) || is_assistants_table(name) && !name.ends_with(head);
        self.sum_of_tensors(|name, _, bytes| if is_unread(name) { 0 } else { bytes })
    }

    /// The sum of `of` over all tensors: Hugging Face name, dimensions, and bytes when loaded.
    pub(crate) fn sum_of_tensors(&self, of: impl Fn(&str, usize, u64) -> u64) -> u64 {
        match &self.files {
            Files::HuggingFace(tensors) => {
                tensors.described().map(|(name, dimensions, bytes)| of(name, dimensions, bytes)).sum()
            }
            Files::Gguf(gguf) => {
                let of_tensor = |tensor: &TensorInfo| {
                    let name = gguf.hugging_face_name(tensor.name());
                    let bytes = packed_bytes(tensor.type_id(), tensor.len_bytes().unwrap_or(0) as u64);
                    of(name.as_deref().unwrap_or(tensor.name()), tensor.shape().len(), bytes)
                };
                gguf.tensors().map(of_tensor).sum()
            }
        }
    }

    /// Bytes of the tensor `name` as [`Checkpoint::get`] returns it, from the headers; `None` if there is none, or its
    /// type is unknown.
    pub fn len_bytes(&self, name: &str) -> Option<usize> {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.len_bytes(name),
            Files::Gguf(gguf) => gguf.len_bytes(name.strip_prefix("model.").unwrap_or(name)),
        }
    }

    /// Bytes of the file's tensors without its towers, which nothing reads.
    pub(crate) fn text_bytes(&self) -> u64 {
        match &self.files {
            Files::HuggingFace(_) => self.loaded_bytes(),
            Files::Gguf(gguf) => {
                let text = gguf.tensors().filter(|tensor| !is_tower(tensor.name()));
                text.filter_map(TensorInfo::len_bytes).map(|bytes| bytes as u64).sum()
            }
        }
    }

    /// Bytes of all tensors when loaded: those of the file without its towers, except that matrices of grid types grow
    /// when packed ([`WeightType::packed_block_bytes`]).
    pub fn loaded_bytes(&self) -> u64 {
        self.sum_of_tensors(|name, _, bytes| if is_tower(name) { 0 } else { bytes })
    }
}

/// Whether a target, whose tensors are under `prefix`, does not read the tensor.
pub(crate) fn is_unread(name: &str, prefix: &str, config: &TextConfig) -> bool {
    is_tower(name)
        || is_inner_assistants(name)
        || is_unused_kv(name, prefix, config)
        || config.tie_word_embeddings && is_head(name)
}

/// How the name of an assistant's output head ends.
fn assistants_head(config: &AssistantConfig) -> &'static str {
    if config.text.tie_word_embeddings { "embed_tokens.weight" } else { "lm_head.weight" }
}

/// Bytes of a tensor of the GGUF type `id` when loaded, from its bytes in the file.
fn packed_bytes(id: u32, bytes: u64) -> u64 {
    match WeightType::from_ggml_id(id) {
        Some(of) => bytes / of.block_bytes() as u64 * of.packed_block_bytes() as u64,
        None => bytes,
    }
}
