//! The demo pair, and the options and the tokens of its generations.

use std::path::Path;

use foretoken::speculative::{BlockSize, Drafters};
use foretoken::{
    DraftPipeline, EndOfGeneration, Engine, EngineOptions, GenerateOptions, Session, Speculation, SpeculationOptions,
    Stop,
};

pub fn demo(threads: usize) -> Engine {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let options = EngineOptions::new(demo.join("target")).with_assistant(demo.join("assistant"));
    Engine::load(&EngineOptions { threads: Some(threads), ..options }).expect("the demo pair")
}

pub fn options(drafters: &str, block: BlockSize, pipeline: DraftPipeline, max_tokens: usize) -> GenerateOptions {
    let drafters: Drafters = drafters.parse().expect("drafters");
    let speculation = Speculation::With(SpeculationOptions { drafters, block, pipeline, ..Default::default() });
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, speculation, stop, ..GenerateOptions::default() }
}

pub fn plain(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        speculation: Speculation::Off,
        ..options("auto", BlockSize::Measured, DraftPipeline::InTurn, max_tokens)
    }
}

pub fn ids(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    let generation = session.generate(prompt, options).expect("a generation");
    generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
}
