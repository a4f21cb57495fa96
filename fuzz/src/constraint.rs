//! The kind of a grammar (a byte: `0` for a JSON schema, `1` for a regular expression, `2` for Lark) and its source,
//! compiled under small limits; what compiles is followed for some tokens. Panics that llguidance returns as errors are
//! errors.

use std::sync::LazyLock;

use super::{checked, uniform};
use foretoken::kv::KvOptions;
use foretoken::speculative::{BlockSize, Drafters};
use foretoken::{
    Constraint, ConstraintLimits, Engine, GenerateOptions, Sampling, SessionOptions, Speculation, SpeculationOptions,
};

const TARGET: &str = "constraint";

/// An error names a part of a schema by compiling its parts one by one: these take a millisecond or two each.
const LIMITS: ConstraintLimits = ConstraintLimits {
    source_bytes: 2048,
    grammar_symbols: 20_000,
    intersected: 4,
    alternatives: 4096,
    divisor: 100,
    pattern_properties: 16,
    merged_schemas: 2000,
    compile_fuel: 100_000,
    mask_fuel: 50_000,
    mask_items: 20_000,
    row_items: 1000,
    lexer_states: 5000,
    json_whitespace: 1,
};

static ENGINE: LazyLock<Engine> = LazyLock::new(|| uniform::engine(TARGET));

fn constraint(data: &[u8]) -> Option<Constraint> {
    let (kind, source) = data.split_first()?;
    let source = String::from_utf8_lossy(source).into_owned();
    let constraint = match kind % 3 {
        0 => Constraint::json_schema(source),
        1 => Constraint::regex(source),
        _ => Constraint::lark(source),
    };
    Some(constraint.with_limits(LIMITS))
}

/// Whether the constraint compiles; follows it if so.
pub fn is_accepted(data: &[u8]) -> bool {
    let Some(constraint) = constraint(data) else { return false };
    // Only forced tokens are drafted, in rounds of a fixed size: measured times have no effect.
    let (drafters, block) = (Drafters::Priority(Vec::new()), BlockSize::Fixed(4));
    let options = GenerateOptions {
        max_tokens: 16,
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        seed: crc32fast::hash(data).into(),
        speculation: Speculation::With(SpeculationOptions { drafters, block, ..SpeculationOptions::default() }),
        constraint: Some(constraint),
        ..GenerateOptions::default()
    };
    let kv = KvOptions { max_round_rows: 4, ..KvOptions::default() };
    let mut session = ENGINE.session(&SessionOptions { kv }).expect("a session");
    let begun = session.generate(&[0, 1, 2], &options);
    let begun = begun.inspect_err(|error| {
        // libFuzzer aborts at a panic; elsewhere the engine catches it.
        assert_ne!(error.to_string(), "constraint: the grammar compiler panicked");
    });
    let Some(generation) = checked(begun) else { return false };
    generation.for_each(|piece| drop(checked(piece)));
    true
}

/// Reads `data`.
pub fn read(data: &[u8]) {
    is_accepted(data);
}
