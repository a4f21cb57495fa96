//! Constrained decoding: grammars and JSON schemas as token masks.
//!
//! A constraint is compiled once per engine. Before every draw, tokens that it rejects get `-inf`,
//! before penalties and filters: the token is drawn from the target's distribution over the remaining
//! tokens, renormalised. The end of the text is allowed exactly where the grammar accepts, and if
//! nothing else is allowed the generation ends without a token.
//!
//! With drafts, row `i` of a verification gets the mask after drafts `0..i`. Drafts are cut before the first token that
//! the grammar rejects, so that no row is spent on it, and tokens that the grammar forces are drafted by
//! [`Forced`](crate::speculative::Forced).

mod annotations;
mod bounds;
#[cfg(feature = "constraint")]
mod compile;
#[cfg(not(feature = "constraint"))]
mod disabled;
#[cfg(feature = "constraint")]
mod divisors;
#[cfg(feature = "constraint")]
mod errors;
mod escapes;
mod formats;
#[cfg(feature = "constraint")]
mod intersections;
pub(crate) mod keywords;
#[cfg(feature = "constraint")]
mod merges;
mod one_of;
mod patterns;
pub(crate) mod references;
pub(crate) mod rewrite;
#[cfg(feature = "constraint")]
mod schema;
#[cfg(feature = "constraint")]
mod state;
#[cfg(feature = "constraint")]
mod unenforced;
#[cfg(feature = "constraint")]
mod vocabulary;

#[cfg(feature = "constraint")]
pub use compile::CompiledConstraint;
#[cfg(feature = "constraint")]
pub(crate) use compile::{Compiler, refuses};
#[cfg(not(feature = "constraint"))]
pub use disabled::CompiledConstraint;
#[cfg(not(feature = "constraint"))]
pub(crate) use disabled::{Compiler, ConstraintState, refuses};
pub(crate) use escapes::allowed_escapes;
#[cfg(feature = "constraint")]
pub(crate) use state::ConstraintState;

use std::sync::Arc;

use serde_json::{Value, json};

use crate::{Error, Result};

/// A grammar for the text: a JSON schema, any JSON object, a regular expression or a context-free grammar. It is plain
/// data; the engine compiles it, which needs a tokenizer and the cargo feature `constraint`.
///
/// ```
/// use foretoken::{Constraint, GenerateOptions};
///
/// let constraint = Constraint::json_schema(r#"{"type": "object", "properties": {"n": {"type": "integer"}}}"#);
/// let options = GenerateOptions { constraint: Some(constraint), ..GenerateOptions::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    pub(crate) grammar: Grammar,
    pub(crate) limits: ConstraintLimits,
}

/// The kind of grammar, and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "constraint"), allow(dead_code))]
pub(crate) enum Grammar {
    JsonSchema(Arc<str>),
    Regex(Arc<str>),
    Lark(Arc<str>),
}

impl Constraint {
    /// JSON that is valid under a schema (draft 2020-12, as far as llguidance implements it; the rest is
    /// an error). Properties come in the schema's order, `$ref` refers to the same document. The schema's
    /// key `x-guidance` sets llguidance's options.
    pub fn json_schema(schema: impl Into<Arc<str>>) -> Self {
        Self::new(Grammar::JsonSchema(schema.into()))
    }

    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::json_schema(r#"{"type":"object"}"#)
    }

    /// Text that matches a regular expression as a whole: the syntax of the crate `regex`, without
    /// boundaries. Anchors are allowed only at the ends; they and lazy repetition have no effect.
    pub fn regex(expression: impl Into<Arc<str>>) -> Self {
        Self::new(Grammar::Regex(expression.into()))
    }

    /// A context-free grammar in llguidance's variant of Lark's syntax, with start symbol `start`.
    pub fn lark(grammar: impl Into<Arc<str>>) -> Self {
        Self::new(Grammar::Lark(grammar.into()))
    }

    /// The JSON schema, if it is one.
    pub fn schema(&self) -> Option<&str> {
        match &self.grammar {
            Grammar::JsonSchema(schema) => Some(schema),
            Grammar::Regex(_) | Grammar::Lark(_) => None,
        }
    }

    fn new(grammar: Grammar) -> Self {
        Self { grammar, limits: ConstraintLimits::default() }
    }

    /// With other limits.
    pub fn with_limits(self, limits: ConstraintLimits) -> Self {
        Self { limits, ..self }
    }
}

/// Limits on compiling and running a constraint. Exceeding one is an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintLimits {
    /// Bytes of the schema, expression or grammar. The thread that compiles it reserves a KiB of stack for each.
    /// Default: 262144.
    pub source_bytes: usize,
    /// Symbols in the productions of the grammar. Default: 200000.
    pub grammar_symbols: usize,
    /// Regular expressions that are intersected: conditions (`pattern`, `format`, lengths) on one string of a schema,
    /// through `allOf` and `$ref`, or terms of `&` in a Lark grammar. Default: 8.
    pub intersected: usize,
    /// Combinations of alternatives in an intersection: the product over its regular expressions of how many of their
    /// character classes overlap. Compile time is linear in it; 1000 take about a millisecond. Default: 65536.
    pub alternatives: u64,
    /// A divisor (`multipleOf`), of a decimal number its digits, at most 8 of them after the point; in a document with
    /// schemas that are merged, the least common multiple of all, whose square in the finest decimals must also fit 32
    /// bits. About 500 bytes each. Default: 10000.
    pub divisor: u64,
    /// `patternProperties` of one object, which are intersected in pairs. Default: 64.
    pub pattern_properties: usize,
    /// Schemas that result from merging those that hold beside each other (`allOf`, `$ref`, a schema's own keywords)
    /// with each case of a union (`anyOf`, `oneOf`, `enum`), about 450 bytes each. An upper bound. Default: 200000.
    pub merged_schemas: u64,
    /// Regular expression nodes built at compile time; 50000 take about a millisecond. Default: 1000000.
    pub compile_fuel: u64,
    /// Regular expression nodes built per mask; 14000 take about a millisecond. Default: 200000.
    pub mask_fuel: u64,
    /// Parser items made per mask; 20000 take about a millisecond. Default: 50000.
    pub mask_items: usize,
    /// Parser items per position. Default: 2000.
    pub row_items: usize,
    /// Lexer states of one generation, 1 to 2 KiB each; with drafts, as many again may be made to check them.
    /// Default: 50000.
    pub lexer_states: usize,
    /// Maximum consecutive white space between tokens of JSON; 0 for none. Uncertain models tend to
    /// fill what is allowed. Default: 1.
    pub json_whitespace: usize,
}

impl Default for ConstraintLimits {
    fn default() -> Self {
        Self {
            source_bytes: 262_144,
            grammar_symbols: 200_000,
            intersected: 8,
            alternatives: 65_536,
            divisor: 10_000,
            pattern_properties: 64,
            merged_schemas: 200_000,
            compile_fuel: 1_000_000,
            mask_fuel: 200_000,
            mask_items: 50_000,
            row_items: 2_000,
            lexer_states: 50_000,
            json_whitespace: 1,
        }
    }
}

impl ConstraintLimits {
    /// # Errors
    /// If a schema, expression or grammar has too many bytes.
    pub(crate) fn check_source(&self, source: &str) -> Result<()> {
        if source.len() > self.source_bytes {
            let most = self.source_bytes;
            let problem = format!("has {} bytes, at most {most} are allowed; simplify it", source.len());
            return Err(Error::argument("constraint", problem));
        }
        Ok(())
    }

    /// The schema with llguidance's options for white space and escapes, unless it sets them.
    pub(crate) fn with_options(&self, mut schema: Value) -> Value {
        let escapes = allowed_escapes(&schema);
        if schema == Value::Bool(true) {
            schema = json!({});
        }
        if let Value::Object(fields) = &mut schema
            && let Value::Object(options) = fields.entry("x-guidance").or_insert_with(|| json!({}))
        {
            if let Some(escapes) = escapes {
                options.entry("json_allowed_escapes").or_insert_with(|| json!(escapes));
            }
            let own = options.contains_key("whitespace_flexible") || options.contains_key("whitespace_pattern");
            match self.json_whitespace {
                _ if own => {}
                0 => drop(options.insert("whitespace_flexible".into(), json!(false))),
                most => {
                    let pattern = format!(r"[\x20\x0A\x0D\x09]{{1,{most}}}");
                    options.insert("whitespace_pattern".into(), json!(pattern));
                }
            }
        }
        schema
    }
}
