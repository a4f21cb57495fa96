//! Compiles constraints, each once per engine.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::Value;

use super::vocabulary::vocabulary;
use super::{Constraint, ConstraintLimits, ConstraintState, Grammar, annotations, intersections, schema};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Maximum number of cached compiled constraints.
const KEPT: usize = 32;

/// Bytes of stack to compile on, committed on use. 1 KiB for each byte of the source.
const STACK: usize = 256 << 20;

/// Parser items at the start of an object per optional property. Compile time is quadratic in these properties, so they are
/// counted first.
const ROW_ITEMS: usize = 4;

/// Maximum nesting of brackets in a Lark grammar, which is parsed recursively.
const MAX_NESTING: usize = 500;

/// An engine's constraints.
#[derive(Default)]
pub(crate) struct Compiler {
    /// The vocabulary, from the first constraint on.
    factory: Mutex<Option<Arc<ParserFactory>>>,
    /// The last used at the end; each before its first token.
    compiled: Mutex<VecDeque<(Constraint, Matcher)>>,
}

impl Compiler {
    /// The state of `constraint` before the first token. `end` are the end-of-generation tokens.
    ///
    /// # Errors
    /// If it is malformed, no text satisfies it or it exceeds its limits, or the tokenizer has no known decoder.
    pub fn state(
        &self,
        constraint: &Constraint,
        tokenizer: &Arc<Tokenizer>,
        vocab_size: usize,
        end: &[u32],
    ) -> Result<ConstraintState> {
        if let Some(matcher) = self.kept(constraint) {
            return Ok(ConstraintState::new(matcher));
        }
        let factory = self.factory(tokenizer, vocab_size, end)?;
        // Without the lock: other generations can start meanwhile.
        let matcher = on_large_stack(|| compile(&factory, constraint))?;
        let own = matcher.deep_clone();
        let mut compiled = self.compiled.lock();
        if compiled.len() == KEPT {
            compiled.pop_front();
        }
        compiled.push_back((constraint.clone(), matcher));
        Ok(ConstraintState::new(own))
    }

    /// A copy with its own lexer: its states count against the limit of one generation.
    fn kept(&self, constraint: &Constraint) -> Option<Matcher> {
        let mut compiled = self.compiled.lock();
        let at = compiled.iter().position(|(kept, _)| kept == constraint)?;
        let used = compiled.remove(at)?;
        let matcher = used.1.deep_clone();
        compiled.push_back(used);
        Some(matcher)
    }

    fn factory(&self, tokenizer: &Arc<Tokenizer>, vocab_size: usize, end: &[u32]) -> Result<Arc<ParserFactory>> {
        let mut factory = self.factory.lock();
        if let Some(factory) = &*factory {
            return Ok(factory.clone());
        }
        let vocabulary = vocabulary(tokenizer, vocab_size, end)?;
        let made =
            ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &SlicedBiasComputer::json_slices());
        Ok(factory.insert(Arc::new(made.map_err(refused)?)).clone())
    }
}

/// Runs `work` on a thread of its own: llguidance recurses to the depth of a grammar's rules, or an object's properties.
///
/// # Errors
/// Those of `work`, or if the thread cannot be started.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("foretoken-compile".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(refused)?;
        thread.join().unwrap_or_else(|_| Err(refused("the grammar compiler panicked")))
    })
}

/// # Errors
/// As [`Compiler::state`].
fn compile(factory: &ParserFactory, constraint: &Constraint) -> Result<Matcher> {
    let Constraint { grammar, limits } = constraint;
    let (Grammar::JsonSchema(source) | Grammar::Regex(source) | Grammar::Lark(source)) = grammar;
    if source.len() > limits.source_bytes {
        let problem = format!("has {} bytes, at most {} are allowed; simplify it", source.len(), limits.source_bytes);
        return Err(Error::argument("constraint", problem));
    }
    let matcher = |grammar| matcher(factory, grammar, limits);
    match grammar {
        Grammar::JsonSchema(source) => {
            let malformed =
                |e: serde_json::Error| Error::argument("constraint", format!("the schema is not valid JSON: {e}"));
            let mut schema: Value = serde_json::from_str(source).map_err(malformed)?;
            annotations::remove(&mut schema);
            if let Some((place, optional)) = schema::widest(&schema)
                && optional > limits.row_items / ROW_ITEMS
            {
                let most = limits.row_items / ROW_ITEMS;
                let problem = format!(
                    "{place}: has {optional} optional properties, at most {most} are allowed; require some of them"
                );
                return Err(Error::argument("constraint", problem));
            }
            let count = intersections::of_schema(&schema);
            if count > limits.intersected {
                return Err(refused(too_many(count, limits)));
            }
            let compile = |schema| matcher(TopLevelGrammar::from_json_schema(limits.with_whitespace(schema)));
            compile(schema.clone()).map_err(|problem| {
                let (place, problem) = schema::locate(&schema, problem, |part| compile(part).err());
                Error::argument("constraint", format!("{place}: {problem}"))
            })
        }
        Grammar::Regex(expression) => matcher(TopLevelGrammar::from_regex(expression)).map_err(refused),
        Grammar::Lark(grammar) if nesting(grammar) > MAX_NESTING => {
            Err(refused(format!("has more than {MAX_NESTING} nested brackets; split it into rules")))
        }
        Grammar::Lark(grammar) => match intersections::of_lark(grammar) {
            count if count > limits.intersected => Err(refused(too_many(count, limits))),
            _ => matcher(TopLevelGrammar::from_lark(grammar.to_string())).map_err(refused),
        },
    }
}

fn too_many(count: usize, limits: &ConstraintLimits) -> String {
    let most = limits.intersected;
    format!(
        "intersects {count} regular expressions, may intersect {most}; merge the patterns, formats and lengths of allOf \
         branches, or the terms of & and ~"
    )
}

/// Compiles a grammar and computes the first mask after forced tokens, without which no text satisfies it.
fn matcher(factory: &ParserFactory, grammar: TopLevelGrammar, limits: &ConstraintLimits) -> Result<Matcher, String> {
    let limits = parser_limits(limits);
    let (init, silent) = (GrammarInit::Serialized(grammar), Logger::new(0, 0));
    let parser = factory.create_parser_from_init_ext(init, silent, InferenceCapabilities::default(), limits);
    let matcher = Matcher::new(Ok(parser.map_err(one_line)?));
    let mut begun = matcher.deep_clone();
    let forced = begun.compute_ff_tokens();
    let begins = begun.consume_tokens(&forced).and_then(|()| begun.compute_mask_or_eos());
    match begins {
        Ok(_) => Ok(matcher),
        Err(error) => Err(format!("no text satisfies it within its limits ({})", one_line(error))),
    }
}

fn parser_limits(limits: &ConstraintLimits) -> ParserLimits {
    ParserLimits {
        max_items_in_row: limits.row_items,
        initial_lexer_fuel: limits.compile_fuel,
        step_lexer_fuel: limits.mask_fuel,
        step_max_items: limits.mask_items,
        max_lexer_states: limits.lexer_states,
        max_grammar_size: limits.grammar_symbols,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Whether llguidance cannot compile a schema, as far as that is known without a tokenizer.
pub(crate) fn refuses(schema: &Value) -> bool {
    let limits = ConstraintLimits::default();
    if intersections::of_schema(schema) > limits.intersected {
        return true;
    }
    let compile = || {
        let grammar = GrammarInit::Serialized(TopLevelGrammar::from_json_schema(schema.clone()));
        grammar.to_internal(None, parser_limits(&limits)).map_err(refused)?;
        Ok(())
    };
    on_large_stack(compile).is_err()
}

/// The nesting depth of brackets; those in strings count.
fn nesting(grammar: &str) -> usize {
    let (mut depth, mut most) = (0usize, 0);
    for byte in grammar.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        most = most.max(depth);
    }
    most
}

/// Wraps llguidance's error.
pub(super) fn refused(error: impl Display) -> Error {
    Error::argument("constraint", one_line(error))
}

/// Start of the part of llguidance's errors that is not for callers.
const STATE: [&str; 2] = ["<non-verbose/>", "<backtrace>"];

/// The error with its causes, without the parser's state.
fn one_line(error: impl Display) -> String {
    let error = format!("{error:#}");
    let words = error.split_whitespace().take_while(|word| !STATE.contains(word));
    words.collect::<Vec<_>>().join(" ")
}
