//! Several logits processors of one generation.

use std::sync::Arc;

use foretoken::GenerateOptions;
use foretoken::sampler::LogitsProcessor;

/// Processors that are applied in order.
#[derive(Debug)]
struct Processors(Vec<Arc<dyn LogitsProcessor>>);

impl LogitsProcessor for Processors {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        self.0.iter().try_for_each(|processor| processor.process(tokens, logits))
    }
}

/// Adds a processor, which is applied after those that are there.
pub(crate) fn add_processor(options: &mut GenerateOptions, processor: impl LogitsProcessor + 'static) {
    let own: Arc<dyn LogitsProcessor> = Arc::new(processor);
    options.logits_processor = Some(match options.logits_processor.take() {
        Some(first) => Arc::new(Processors(vec![first, own])),
        None => own,
    });
}
