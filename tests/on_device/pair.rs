//! A pair of models on the CPU and on an emulated device.

use std::path::Path;
use std::sync::Arc;

use foretoken::kv::KvOptions;
use foretoken::speculative::{
    BlockSize, Context, CustomDrafter, Draft, DraftCost, Drafter, DrafterKind, DrafterOptions, Drafters,
};
use foretoken::{
    DeviceChoice, ElementType, Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation, SpeculationOptions,
    Statistics, WeightType,
};
use rand::rngs::StdRng;

use super::machine::Emulated;
use super::widened::{Heads, Widths, widen};
use crate::cases;

/// More memory than any of these models needs.
pub const MEMORY: usize = 1 << 30;

pub const NARROW: Widths = Widths { sliding: Heads { width: 64, pairs: 32 }, full: Heads { width: 64, pairs: 8 } };

/// The next tokens, of which some are wrong.
struct Guess(Arc<Vec<u32>>);

impl Drafter for Guess {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }
    fn draft(
        &mut self,
        context: &Context<'_>,
        most: usize,
        draft: &mut Draft,
        _: &mut StdRng,
    ) -> foretoken::Result<()> {
        let next = self.0.iter().enumerate().skip(context.tokens.len()).take(most);
        draft.tokens.extend(next.map(|(i, token)| token ^ u32::from(i % 5 == 3)));
        Ok(())
    }
}

/// A pair on the CPU and on an emulated device.
pub struct Pair {
    pub cpu: Engine,
    pub device: Engine,
    pub machine: Arc<Emulated>,
    pub prompt: Vec<u32>,
    _files: tempfile::TempDir,
}

/// The fixture `name` with heads of `widths`.
pub fn pair(name: &str, widths: Widths, quantize: Option<WeightType>) -> Pair {
    damaged(name, widths, quantize, |_| {})
}

/// The same, after `damage` to the target's folder.
pub fn damaged(name: &str, widths: Widths, quantize: Option<WeightType>, damage: impl Fn(&Path)) -> Pair {
    let case = cases::named(name);
    let files = tempfile::tempdir().expect("a folder");
    let part = |part: &str| widen(&case.path.join(part), &files.path().join(part), widths);
    let options = EngineOptions::new(part("target"));
    let options = if case.assistant_path().is_some() { options.with_assistant(part("assistant")) } else { options };
    damage(&files.path().join("target"));
    load(EngineOptions { quantize, ..options }, case.ids("input_ids"), files)
}

pub fn load(options: EngineOptions, prompt: Vec<u32>, files: tempfile::TempDir) -> Pair {
    let machine = Emulated::new(MEMORY);
    let options = EngineOptions { threads: Some(1), ..options };
    let device = EngineOptions { device: DeviceChoice::Given(machine.clone()), ..options.clone() };
    let cpu = Engine::load(&options).expect("an engine");
    let device = Engine::load(&device).expect("an engine on a device");
    Pair { cpu, device, machine, prompt, _files: files }
}

pub fn exact(element: ElementType) -> SessionOptions {
    let kv = KvOptions { key: element.into(), value: element.into(), max_round_rows: 48, ..KvOptions::default() };
    SessionOptions { kv: KvOptions { max_context: Some(1024), ..kv } }
}

pub fn mtp(block_size: usize, options: &GenerateOptions) -> GenerateOptions {
    let speculation = Speculation::With(SpeculationOptions::mtp(block_size));
    GenerateOptions { speculation, ..options.clone() }
}

/// Drafts of `block_size - 1` tokens of the known `text`; every fifth token of the text is drafted wrong.
pub fn guess(block_size: usize, text: &[u32], options: &GenerateOptions) -> GenerateOptions {
    let text = Arc::new(text.to_vec());
    let custom = CustomDrafter::new("guess", move || Box::new(Guess(text.clone())));
    let (drafters, block) = (Drafters::Priority(vec![DrafterOptions::Custom(custom)]), BlockSize::Fixed(block_size));
    let speculation = Speculation::With(SpeculationOptions { drafters, block, ..SpeculationOptions::default() });
    GenerateOptions { speculation, ..options.clone() }
}

pub fn run(
    engine: &Engine,
    session: &SessionOptions,
    prompt: &[u32],
    options: &GenerateOptions,
) -> (Vec<u32>, Statistics) {
    let mut session = engine.session(session).expect("a session");
    let mut generation = session.generate(prompt, options).expect("a generation");
    let pieces: Vec<_> = generation.by_ref().map(|piece| piece.expect("a piece")).collect();
    (pieces.into_iter().flat_map(|piece| piece.tokens).collect(), generation.statistics().clone())
}
