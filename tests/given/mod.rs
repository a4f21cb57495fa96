//! A drafter whose drafts a test gives, and what a generation with it writes.

use std::sync::Arc;

use foretoken::rand::rngs::StdRng;
use foretoken::speculative::{
    BlockSize, Context, CustomDrafter, Draft, DraftCost, Drafter, DrafterKind, DrafterOptions, Drafters, Observed,
};
use foretoken::{Error, GenerateOptions, Result, Session, Speculation, SpeculationOptions};

/// Tokens to draft after a sequence, at most as many as given.
type Drafts = Arc<dyn Fn(&[u32], usize) -> Vec<u32> + Send + Sync>;

/// Drafts what a function says; fails to observe sequences of `fails_at` tokens and more, and panics if one of these
/// begins a text.
struct Given {
    drafts: Drafts,
    fails_at: usize,
}

impl Drafter for Given {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }

    fn begin(&mut self, tokens: &[u32]) {
        assert!(tokens.len() < self.fails_at, "the drafter's");
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        draft.tokens = (self.drafts)(context.tokens, most);
        Ok(())
    }

    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        if seen.tokens.len() < self.fails_at {
            return Ok(());
        }
        Err(Error::Tokenizer("the drafter's".into()))
    }
}

/// Rounds of `block` rows with drafts of a drafter that fails at `fails_at` tokens: see [`Given`].
pub fn given(
    block: usize,
    fails_at: usize,
    drafts: impl Fn(&[u32], usize) -> Vec<u32> + Send + Sync + 'static,
) -> Speculation {
    let drafts: Drafts = Arc::new(drafts);
    let new = move || -> Box<dyn Drafter> { Box::new(Given { drafts: drafts.clone(), fails_at }) };
    let drafters = Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("given", new))]);
    Speculation::With(SpeculationOptions { drafters, block: BlockSize::Fixed(block), ..SpeculationOptions::default() })
}

/// The tokens, and the error that ended them.
pub fn outcome(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, Option<String>) {
    let (mut ids, mut error) = (Vec::new(), None);
    for piece in session.generate(prompt, options).expect("a generation") {
        match piece {
            Ok(piece) => ids.extend(piece.tokens),
            Err(failed) => error = Some(failed.to_string()),
        }
    }
    (ids, error)
}
