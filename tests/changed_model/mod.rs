//! A target of which a test changes the passes.

use foretoken::checkpoint::StepCost;
use foretoken::gemma4::Target;
use foretoken::kv::{Batch, KvOptions, PagePool, SequenceState};
use foretoken::{Model, Output, Request, Result};

/// The target, and what runs a pass of it.
pub struct ChangedModel<F> {
    pub target: Target,
    pub forward: F,
}

impl<F> Model for ChangedModel<F>
where
    F: Fn(&Target, &mut Batch<'_>, &Request) -> Result<Output> + Send + Sync,
{
    fn vocab_size(&self) -> usize {
        self.target.vocab_size()
    }

    fn hidden_size(&self) -> usize {
        self.target.hidden_size()
    }

    fn max_position_embeddings(&self) -> usize {
        self.target.max_position_embeddings()
    }

    fn step_cost(&self) -> StepCost {
        self.target.step_cost()
    }

    fn fingerprint(&self) -> Result<u64> {
        self.target.fingerprint()
    }

    fn new_state(&self, options: &KvOptions, pool: &PagePool) -> Result<SequenceState> {
        self.target.new_state(options, pool)
    }

    fn forward(&self, batch: &mut Batch<'_>, request: &Request) -> Result<Output> {
        (self.forward)(&self.target, batch, request)
    }
}
