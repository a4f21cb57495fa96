//! Compiles constraints, and caches each once per engine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Map, Value};

use super::errors::{NO_TOKEN, one_line, refused};
use super::schema::{self, SchemaProblem};
use super::vocabulary::vocabulary;
use super::{Constraint, ConstraintLimits, ConstraintState, Grammar};
use super::{divisors, intersections, merges, rewrite, unenforced};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Maximum number of constraints that stay compiled while nothing holds them.
const MAX_CACHED: usize = 128;

/// Maximum bytes of them together, unless one alone has more: most have a few megabytes, but one as large as
/// [`ConstraintLimits`] allow may have over a hundred.
const MAX_CACHED_BYTES: usize = 1 << 30;

/// About what a symbol of a compiled grammar takes.
const BYTES_PER_SYMBOL: usize = 300;

/// Bytes of stack to compile on for each byte of the source, and the least; committed on use.
const STACK_PER_BYTE: usize = 1 << 10;
const MIN_STACK: usize = 16 << 20;

/// Parser items at the start of an object per optional property. Compile time is quadratic in these
/// properties, so they are counted first.
const ROW_ITEMS: usize = 4;

/// Maximum nesting of brackets in a Lark grammar, which is parsed recursively.
const MAX_NESTING: usize = 500;

/// Why a grammar with `::=` does not compile, most likely.
const NOT_LARK: &str = "GBNF and EBNF (::=) are not supported; write a Lark grammar, a regular expression or a JSON \
     schema (docs/constraints.md)";

/// An engine's constraints.
#[derive(Default)]
pub(crate) struct Compiler {
    /// The vocabulary, from the first constraint on.
    factory: Mutex<Option<Arc<ParserFactory>>>,
    cache: Mutex<Cache>,
}

/// What was compiled.
#[derive(Default)]
struct Cache {
    /// The last used at the end.
    recent: VecDeque<CompiledConstraint>,
    /// Evicted ones, which are found for as long as something holds them.
    evicted: Vec<(Constraint, Weak<Compiled>)>,
}

/// A constraint compiled by an engine ([`Engine::compile`](crate::Engine::compile)). While this is held, generations of
/// the engine do not compile it again.
#[derive(Clone)]
pub struct CompiledConstraint {
    constraint: Constraint,
    compiled: Arc<Compiled>,
}

struct Compiled {
    /// Before its first token.
    matcher: Matcher,
    /// About what it takes, in bytes.
    bytes: usize,
}

impl Compiler {
    /// Compiles `constraint`, unless it is cached. `end` are the end-of-generation tokens.
    ///
    /// # Errors
    /// If it is malformed, no text satisfies it or it exceeds its limits, the tokenizer has no known decoder, or there
    /// is no memory for the stack.
    pub fn compile(
        &self,
        constraint: &Constraint,
        tokenizer: &Arc<Tokenizer>,
        vocab_size: usize,
        end: &[u32],
    ) -> Result<CompiledConstraint> {
        if let Some(cached) = self.cached(constraint) {
            return Ok(cached);
        }
        let factory = self.factory(tokenizer, vocab_size, end)?;
        // Without the lock: other generations can start meanwhile.
        let compiled = Arc::new(on_large_stack(&constraint.limits, || compile(&factory, constraint))?);
        let compiled = CompiledConstraint { constraint: constraint.clone(), compiled };
        self.cache.lock().insert(compiled.clone());
        Ok(compiled)
    }

    /// `constraint`, if it is cached or held. It is then evicted after all others.
    pub fn cached(&self, constraint: &Constraint) -> Option<CompiledConstraint> {
        let mut cache = self.cache.lock();
        let found = cache.find(constraint)?;
        cache.insert(found.clone());
        Some(found)
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

impl Cache {
    fn find(&self, constraint: &Constraint) -> Option<CompiledConstraint> {
        let recent = self.recent.iter().find(|recent| recent.constraint == *constraint);
        recent.cloned().or_else(|| {
            let (of, compiled) = self.evicted.iter().find(|(of, _)| of == constraint)?;
            Some(CompiledConstraint { constraint: of.clone(), compiled: compiled.upgrade()? })
        })
    }

    /// Adds the last used one, in place of an equal one, which another thread may have compiled at the same time.
    fn insert(&mut self, used: CompiledConstraint) {
        self.recent.retain(|recent| recent.constraint != used.constraint);
        self.evicted.retain(|(of, compiled)| *of != used.constraint && compiled.strong_count() > 0);
        self.recent.push_back(used);
        let mut bytes = self.recent.iter().map(|recent| recent.compiled.bytes).fold(0, usize::saturating_add);
        while self.recent.len() > MAX_CACHED || bytes > MAX_CACHED_BYTES && self.recent.len() > 1 {
            let Some(CompiledConstraint { constraint, compiled }) = self.recent.pop_front() else { break };
            bytes = bytes.saturating_sub(compiled.bytes);
            self.evicted.push((constraint, Arc::downgrade(&compiled)));
        }
    }
}

impl CompiledConstraint {
    /// What was compiled.
    pub fn constraint(&self) -> &Constraint {
        &self.constraint
    }

    /// The state before the first token.
    pub(crate) fn state(&self, vocab_size: usize) -> ConstraintState {
        ConstraintState::new(&self.compiled.matcher, vocab_size)
    }
}

impl fmt::Debug for CompiledConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompiledConstraint").field(&self.constraint).finish()
    }
}

/// Runs `work` on a thread of its own: llguidance recurses to the depth of a grammar's rules, or an
/// object's properties.
///
/// # Errors
/// Those of `work`; [`Error::Memory`] if the thread cannot be started.
fn on_large_stack<T: Send>(limits: &ConstraintLimits, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let stack = limits.source_bytes.saturating_mul(STACK_PER_BYTE).max(MIN_STACK);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("foretoken-compile".into()).stack_size(stack);
        let thread = thread.spawn_scoped(scope, work).map_err(|cause| Error::Memory {
            what: format!("the stack to compile a constraint ({cause})"),
            needed: Some(stack as u64),
            available: None,
            fits: None,
            remedy: "free memory, or lower ConstraintLimits::source_bytes".into(),
        })?;
        thread.join().unwrap_or_else(|_| Err(refused("the grammar compiler panicked")))
    })
}

/// # Errors
/// As [`Compiler::compile`].
fn compile(factory: &ParserFactory, constraint: &Constraint) -> Result<Compiled> {
    let Constraint { grammar, limits } = constraint;
    let (Grammar::JsonSchema(source) | Grammar::Regex(source) | Grammar::Lark(source)) = grammar;
    limits.check_source(source)?;
    let matcher = |grammar| matcher(factory, grammar, limits);
    match grammar {
        Grammar::JsonSchema(source) => {
            let schema = rewrite::parse(source)?;
            let at_place = |SchemaProblem { place, problem }| {
                let place = schema::place_in(source, &place);
                Error::argument("constraint", format!("{place}: {problem}"))
            };
            check_schema(&schema, limits).map_err(at_place)?;
            let whole = limits.with_options(schema.clone());
            let options = whole.get("x-guidance").cloned().unwrap_or_else(|| Value::Object(Map::new()));
            let compile = |schema| matcher(TopLevelGrammar::from_json_schema(schema));
            let refuses = |mut part: Value| {
                part["x-guidance"] = options.clone();
                compile(part).err()
            };
            let locate = |problem| match schema.get("x-guidance").and_then(|_| refuses(Value::Object(Map::new()))) {
                Some(problem) => SchemaProblem { place: "#/x-guidance".into(), problem },
                None => schema::locate(&schema, problem, refuses),
            };
            compile(whole).map_err(|problem| at_place(locate(problem)))
        }
        Grammar::Regex(expression) => matcher(TopLevelGrammar::from_regex(expression)).map_err(refused),
        Grammar::Lark(grammar) if nesting(grammar) > MAX_NESTING => {
            Err(refused(format!("has more than {MAX_NESTING} nested brackets; split it into rules")))
        }
        Grammar::Lark(grammar) => {
            check_embedded(grammar, limits)?;
            matcher(TopLevelGrammar::from_lark(grammar.to_string())).map_err(|problem| match grammar.contains("::=") {
                true => refused(format!("{problem}; {NOT_LARK}")),
                false => refused(problem),
            })
        }
    }
}

/// Checks a schema against the limits that llguidance does not have, and for what it would not
/// enforce. Its cost is about linear in the schema.
///
/// # Errors
/// The problem of a part that exceeds a limit or is not enforced.
fn check_schema(schema: &Value, limits: &ConstraintLimits) -> Result<(), SchemaProblem> {
    let problem = |fields: &Map<String, Value>| too_wide(fields, limits).or_else(|| unenforced::problem(fields));
    if let Some(found) = schema::first(schema, &problem) {
        return Err(found);
    }
    divisors::check(schema, limits)?;
    intersections::check_schema(schema, limits)?;
    merges::check(schema, limits).map_err(SchemaProblem::of_root)
}

/// The problem of an object with more optional properties than the parser has room for.
fn too_wide(fields: &Map<String, Value>, limits: &ConstraintLimits) -> Option<String> {
    let most = limits.row_items / ROW_ITEMS;
    let properties = fields.get("properties").and_then(Value::as_object).map_or(0, Map::len);
    let optional = properties.saturating_sub(fields.get("required").and_then(Value::as_array).map_or(0, Vec::len));
    (optional > most)
        .then(|| format!("has {optional} optional properties, at most {most} are allowed; require some of them"))
}

/// Checks the schemas in a Lark grammar; text in its strings and comments that looks like one counts.
///
/// # Errors
/// If one exceeds a limit.
fn check_embedded(grammar: &str, limits: &ConstraintLimits) -> Result<()> {
    for (at, directive) in grammar.match_indices("%json") {
        let mut values = serde_json::Deserializer::from_str(&grammar[at + directive.len()..]).into_iter::<Value>();
        // llguidance reports malformed ones.
        if let Some(Ok(schema)) = values.next() {
            let in_grammar = |SchemaProblem { place, problem }| refused(format!("%json {place}: {problem}"));
            check_schema(&schema, limits).map_err(in_grammar)?;
        }
    }
    Ok(())
}

/// Compiles a grammar and computes the first mask after forced tokens, without which no text satisfies it.
fn matcher(factory: &ParserFactory, grammar: TopLevelGrammar, limits: &ConstraintLimits) -> Result<Compiled, String> {
    let of_parser = parser_limits(limits);
    let read = GrammarInit::Serialized(grammar).to_internal(Some(factory.tok_env().clone()), of_parser.clone());
    let (grammar, lexer) = read.map_err(one_line)?;
    intersections::check_expressions(lexer.regex_builder.exprset(), limits)?;
    let of_symbols = grammar.num_symbols().saturating_mul(BYTES_PER_SYMBOL);
    let (init, silent) = (GrammarInit::Internal(grammar, lexer), Logger::new(0, 0));
    let parser = factory.create_parser_from_init_ext(init, silent, InferenceCapabilities::default(), of_parser);
    let parser = parser.map_err(one_line)?;
    let bytes = of_symbols.saturating_add(parser.parser.lexer_stats().num_bytes);
    let matcher = Matcher::new(Ok(parser));
    let mut begun = matcher.deep_clone();
    let forced = begun.compute_ff_tokens();
    let begins = begun.consume_tokens(&forced).and_then(|()| begun.compute_mask_or_eos());
    match begins.map_err(one_line) {
        Ok(_) => Ok(Compiled { matcher, bytes }),
        Err(problem) if problem == NO_TOKEN => Err("no text satisfies it; allow at least one".into()),
        Err(problem) => Err(format!("no text satisfies it within its limits ({problem})")),
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
    let compile = || {
        check_schema(schema, &limits).map_err(|of_part| refused(of_part.problem))?;
        let grammar = GrammarInit::Serialized(TopLevelGrammar::from_json_schema(limits.with_options(schema.clone())));
        let (_, lexer) = grammar.to_internal(None, parser_limits(&limits)).map_err(refused)?;
        intersections::check_expressions(lexer.regex_builder.exprset(), &limits).map_err(refused)
    };
    on_large_stack(&limits, compile).is_err()
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn compiler_of(constraints: &[&Constraint]) -> Compiler {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::read(path, 4096).expect("the demo model's"));
        let compiler = Compiler::default();
        for constraint in constraints {
            compiler.compile(constraint, &tokenizer, 4096, &[1]).expect("compiled");
        }
        compiler
    }

    fn cached(compiler: &Compiler) -> Vec<Constraint> {
        compiler.cache.lock().recent.iter().map(|recent| recent.constraint.clone()).collect()
    }

    /// What `compiled` is, as that of another constraint and size.
    fn sized(compiled: &CompiledConstraint, constraint: &Constraint, bytes: usize) -> CompiledConstraint {
        let matcher = compiled.compiled.matcher.deep_clone();
        CompiledConstraint { constraint: constraint.clone(), compiled: Arc::new(Compiled { matcher, bytes }) }
    }

    /// A request that waits finds what was compiled for it, however many others were compiled since.
    #[test]
    fn what_is_evicted_is_found_while_it_is_held() {
        let [first, second] = ["[ab]", "[bc]"].map(Constraint::regex);
        let compiler = compiler_of(&[&first]);
        let held = compiler.cached(&first).expect("the first");
        compiler.cache.lock().insert(sized(&held, &second, MAX_CACHED_BYTES));
        assert_eq!(cached(&compiler), std::slice::from_ref(&second));
        let found = compiler.cached(&first).expect("it is held");
        assert!(Arc::ptr_eq(&found.compiled, &held.compiled));
        assert_eq!(cached(&compiler), [first]);
        assert!(compiler.cached(&second).is_none(), "nothing holds it");
    }

    /// Two generations that find a constraint missing both compile it.
    #[test]
    fn what_two_threads_compile_takes_one_place() {
        let [first, second] = ["[ab]", "[bc]"].map(Constraint::regex);
        let compiler = compiler_of(&[&first, &second]);
        let CompiledConstraint { compiled, .. } = compiler.cached(&second).expect("the second");
        compiler.cache.lock().insert(CompiledConstraint { constraint: first.clone(), compiled });
        assert_eq!(cached(&compiler), [second, first]);
    }

    /// Of large ones fewer are cached, the last of them whatever its size.
    #[test]
    fn what_is_cached_has_a_maximum_of_bytes() {
        let constraints = ["[ab]", "[bc]", "[cd]"].map(Constraint::regex);
        let compiler = compiler_of(&[&constraints[0]]);
        let small = compiler.cached(&constraints[0]).expect("the first");
        assert!(small.compiled.bytes > 0);
        let half = MAX_CACHED_BYTES / 2;
        for (at, bytes, left) in [
            (0, half, vec![0]),
            (1, half, vec![0, 1]),
            (2, half, vec![1, 2]),
            (0, MAX_CACHED_BYTES + 1, vec![0]),
            (1, 1, vec![1]),
        ] {
            compiler.cache.lock().insert(sized(&small, &constraints[at], bytes));
            let left: Vec<_> = left.into_iter().map(|at: usize| constraints[at].clone()).collect();
            assert_eq!(cached(&compiler), left, "{at} of {bytes} bytes");
        }
    }
}
