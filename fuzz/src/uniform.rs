//! An engine whose tokens are all equally probable: every byte, the end of a text, and a few words.

use std::sync::Arc;

use super::file;
use foretoken::candle_core::{DType, Device, Tensor};
use foretoken::checkpoint::StepCost;
use foretoken::kv::{Batch, KvCache, KvLayout, KvOptions, PagePool, SequenceState};
use foretoken::tokenizer::Tokenizer;
use foretoken::{Engine, Isa, Model, ModelOptions, Output, Request, Result};

/// The tokens behind the 256 bytes.
const WORDS: &str = r#""<eos>":256,"true":257,"{\"a\":":258,"\",\"":259,"ab":260,"12":261,"ä":262,"]}":263"#;
const END: u32 = 256;
const VOCAB: usize = 264;

struct Uniform;

impl Model for Uniform {
    fn vocab_size(&self) -> usize {
        VOCAB
    }
    fn hidden_size(&self) -> usize {
        1
    }
    fn max_position_embeddings(&self) -> usize {
        32
    }
    fn step_cost(&self) -> StepCost {
        StepCost { bytes: 1, multiply_adds: 1 }
    }
    fn fingerprint(&self) -> Result<u64> {
        Ok(1)
    }
    fn new_state(&self, options: &KvOptions, pool: &PagePool) -> Result<SequenceState> {
        let layout = KvLayout { stores: Vec::new(), store_of_layer: Vec::new(), inverse_frequencies: Vec::new() };
        let kv = KvCache::in_pool(layout, options, self.max_position_embeddings(), Isa::best(), pool)?;
        Ok(SequenceState::new(kv))
    }
    fn forward(&self, _: &mut Batch<'_>, request: &Request) -> Result<Output> {
        let zeros = |rows: &[usize], width: usize| Tensor::zeros((rows.len(), width), DType::F32, &Device::Cpu);
        Ok(Output { logits: zeros(&request.logits, VOCAB)?, hidden: zeros(&request.hidden, 1)?, taps: Vec::new() })
    }
}

/// The engine; its tokenizer is read from a file of `target`.
pub fn engine(target: &str) -> Engine {
    let bytes: String = (0..=u8::MAX).map(|byte| format!(r#""<0x{byte:02X}>":{byte},"#)).collect();
    let model = format!(r#"{{"byte_fallback":true,"vocab":{{{bytes}{WORDS}}},"merges":[]}}"#);
    let json = format!(r#"{{"decoder":{{"type":"ByteFallback"}},"model":{model}}}"#);
    let tokenizer = Tokenizer::read(file(target, "tokenizer.json", json.as_bytes()), VOCAB).expect("a tokenizer");
    let end_of_generation = vec![END];
    let options =
        ModelOptions { threads: Some(1), tokenizer: Some(tokenizer), end_of_generation, ..ModelOptions::default() };
    Engine::from_model(Arc::new(Uniform), options).expect("an engine")
}
