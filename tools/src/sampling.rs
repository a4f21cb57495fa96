//! Command-line options for sampling and stopping, with llama.cpp's names.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::RangedI64ValueParser;
use foretoken::sampler::{Breakers, Dry, Penalties, Xtc};
use foretoken::tokenizer::Tokenizer;
use foretoken::{Constraint, EndOfGeneration, Engine, FinishReason, GenerateOptions, Sampling, Stop};

use crate::input;

/// Sampling and stopping: the options of a generation.
#[derive(Args)]
pub struct GenerateArgs {
    /// Maximum number of tokens to generate; -1 generates until the context is full. Default: 128.
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, value_parser = at_least_minus_one())]
    max_tokens: Option<i64>,
    /// Sampling.
    #[command(flatten)]
    pub chain: Chain,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Continue past end-of-text tokens.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Stop before this string; may be repeated.
    #[arg(long, value_name = "STRING")]
    pub stop: Vec<String>,
    /// Constrained output.
    #[command(flatten)]
    pub constraint: Constrained,
}

/// Constrained output; at most one. Requires the cargo feature `constraint`.
#[derive(Args)]
#[group(multiple = false)]
pub struct Constrained {
    /// Constrain the text to JSON that matches the schema in this file. Constraints need the cargo feature
    /// `constraint`.
    #[arg(long, value_name = "FILE")]
    pub json_schema: Option<PathBuf>,
    /// Constrain the text to this regular expression.
    #[arg(long, value_name = "REGEX")]
    pub regex: Option<String>,
    /// Constrain the text to the grammar in this file, in llguidance's variant of the Lark syntax, not GBNF
    /// (docs/constraints.md).
    #[arg(long, value_name = "FILE")]
    pub grammar: Option<PathBuf>,
}

/// The chain of samplers; all are off by default. They are applied in this order: repeat, frequency and presence
/// penalty, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature.
#[derive(Args)]
pub struct Chain {
    /// Temperature; 0 takes the most probable token, without filters. Default: 0.
    #[arg(long, visible_alias = "temp")]
    pub temperature: Option<f32>,
    /// Keep the K most probable tokens; 0 or -1 keeps all. Default: all.
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = at_least_minus_one())]
    pub top_k: Option<i64>,
    /// Keep the most probable tokens up to this cumulative probability. Default: 1.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this probable relative to the best. Default: 0.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Divide positive logits of recent tokens by this, multiply negative ones. Default: 1 (off).
    #[arg(long, value_name = "X")]
    pub repeat_penalty: Option<f32>,
    /// Number of last tokens that the penalties consider; -1 for all. Default: 64.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least_minus_one())]
    pub repeat_last_n: Option<i64>,
    /// Subtract this from the logits of recent tokens. Default: 0.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this for every occurrence among recent tokens. Default: 0.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// DRY: multiplier of the penalty on tokens that extend a repetition. Default: 0 (off).
    #[arg(long, value_name = "X")]
    pub dry_multiplier: Option<f32>,
    /// DRY: growth of the penalty with every repeated token. Default: 1.75.
    #[arg(long, value_name = "X")]
    pub dry_base: Option<f32>,
    /// DRY: length of repetitions that is not penalized. Default: 2.
    #[arg(long, value_name = "N")]
    pub dry_allowed_length: Option<usize>,
    /// DRY: number of last tokens to consider; -1 for all. Default: -1.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least_minus_one())]
    pub dry_penalty_last_n: Option<i64>,
    /// DRY: tokens that contain this string end a repetition; may be repeated, and replaces the default ones; "none"
    /// for no breakers. Default: newline, colon, double quote, asterisk.
    #[arg(long, value_name = "STRING")]
    pub dry_sequence_breaker: Vec<String>,
    /// Keep tokens whose logits are at most this many standard deviations below the largest; 0 or -1 keeps all.
    /// Default: all.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub top_n_sigma: Option<f32>,
    /// Keep the locally most typical tokens up to this cumulative probability. Default: 1.
    #[arg(long, visible_alias = "typical-p", value_name = "P")]
    pub typical: Option<f32>,
    /// XTC: probability of excluding the most probable tokens. Default: 0 (off).
    #[arg(long, value_name = "P")]
    pub xtc_probability: Option<f32>,
    /// XTC: exclude all tokens above this probability except the least probable of them; at most 0.5. Default: 0.1.
    #[arg(long, value_name = "P")]
    pub xtc_threshold: Option<f32>,
}

/// llama.cpp's default sequence breakers of DRY.
pub const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// The tokens that have one of the strings in them.
pub fn breakers<'s>(tokenizer: &Tokenizer, strings: impl IntoIterator<Item = &'s str>) -> Breakers {
    strings.into_iter().flat_map(|string| tokenizer.ids_with(string)).collect()
}

/// Parses a count of 0 or more, or -1 for no limit.
pub fn at_least_minus_one() -> RangedI64ValueParser {
    clap::value_parser!(i64).range(-1..)
}

/// The count of an option where -1 is no limit.
pub fn unlimited_if_negative(count: i64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

impl GenerateArgs {
    /// Maximum number of tokens to generate.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens.map_or(GenerateOptions::default().max_tokens, unlimited_if_negative)
    }

    /// That a text ended at a limit, and the option that raises it: the context, a maximum of tokens that was not
    /// given, or one that a constrained text may have exceeded. `given` is `--context`: without it, the `context` is
    /// already the largest.
    pub fn limit_reached(&self, reason: FinishReason, context: usize, given: Option<usize>) -> Option<String> {
        let most = self.max_tokens();
        match reason {
            FinishReason::Context => {
                let remedy = if given.is_some() { "; raise --context" } else { "" };
                Some(format!("the context of {context} tokens is full{remedy}"))
            }
            FinishReason::MaxTokens if self.constraint.is_given() => {
                Some(format!("ended at {most} tokens, where the constraint allows more; raise --max-tokens"))
            }
            FinishReason::MaxTokens if self.max_tokens.is_none() => {
                Some(format!("ended at {most} tokens; raise --max-tokens, or pass -1 for no limit"))
            }
            _ => None,
        }
    }

    /// The options, with defaults for all others. `sampling` provides the parameters that were not given.
    ///
    /// # Errors
    /// If DRY is enabled and the checkpoint has no tokenizer to find its breakers, a parameter without effect was
    /// given, or a file cannot be read.
    pub fn options(&self, engine: &Engine, sampling: &Sampling) -> Result<GenerateOptions> {
        self.chain.check_unused(sampling)?;
        let end_of_generation = if self.ignore_eos { EndOfGeneration::Ignored } else { EndOfGeneration::Stops };
        Ok(GenerateOptions {
            max_tokens: self.max_tokens(),
            sampling: self.chain.sampling(engine, sampling)?,
            seed: self.seed,
            constraint: self.constraint.constraint()?,
            stop: Stop { end_of_generation, strings: self.stop.clone(), ..Stop::default() },
            ..GenerateOptions::default()
        })
    }
}

/// Maximum size of a schema or grammar.
const MAX_CONSTRAINT_BYTES: u64 = 16 << 20;

impl Constrained {
    fn is_given(&self) -> bool {
        self.json_schema.is_some() || self.regex.is_some() || self.grammar.is_some()
    }

    fn constraint(&self) -> Result<Option<Constraint>> {
        Ok(match self {
            Self { json_schema: Some(path), .. } => {
                Some(Constraint::json_schema(input::file_within(path, MAX_CONSTRAINT_BYTES)?))
            }
            Self { regex: Some(expression), .. } => Some(Constraint::regex(expression.as_str())),
            Self { grammar: Some(path), .. } => Some(Constraint::lark(input::file_within(path, MAX_CONSTRAINT_BYTES)?)),
            _ => None,
        })
    }
}

impl Chain {
    /// The parameters. `base` provides those that were not given.
    ///
    /// # Errors
    /// If DRY is enabled and the checkpoint has no tokenizer to find its breakers.
    pub fn sampling(&self, engine: &Engine, base: &Sampling) -> Result<Sampling> {
        Ok(Sampling {
            penalties: self.penalties(base.penalties),
            dry: match self.dry_multiplier {
                None => base.dry.clone(),
                Some(0.0) => None,
                Some(_) => Some(self.dry(engine.tokenizer()?)),
            },
            top_n_sigma: self.top_n_sigma.or(base.top_n_sigma).filter(|n| *n > 0.0),
            top_k: self.top_k.map_or(base.top_k, |k| usize::try_from(k).ok()).filter(|k| *k > 0),
            typical_p: self.typical.unwrap_or(base.typical_p),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            xtc: Some(self.xtc(base.xtc)).filter(|xtc| xtc.probability != 0.0),
            temperature: self.temperature.unwrap_or(base.temperature),
        })
    }

    /// As [`Chain::sampling`], with the parameters of DRY and XTC also if they are off, for requests that turn them on.
    ///
    /// # Errors
    /// As [`Chain::sampling`].
    pub fn request_defaults(&self, engine: &Engine, base: &Sampling) -> Result<Sampling> {
        let dry = engine.tokenizer().ok().map(|tokenizer| self.dry(tokenizer));
        Ok(Sampling { dry, xtc: Some(self.xtc(base.xtc)), ..self.sampling(engine, base)? })
    }

    /// `base` is that of [`Chain::sampling`]. A server's options are not checked: requests turn samplers on.
    ///
    /// # Errors
    /// If a parameter of a sampler that is off, an empty sequence breaker, or a filter was given that the default
    /// temperature of 0 makes useless.
    fn check_unused(&self, base: &Sampling) -> Result<()> {
        let Penalties { repeat, frequency, presence, .. } = self.penalties(base.penalties);
        let penalizes = repeat != 1.0 || frequency != 0.0 || presence != 0.0;
        let xtc = self.xtc(base.xtc).probability != 0.0;
        let dry = self.dry_multiplier.unwrap_or(0.0) != 0.0;
        let of_filters = "no filter applies at temperature 0, the default; pass a --temperature";
        let of_dry = "DRY is off; pass a --dry-multiplier above 0";
        let of_penalties = "all penalties are off; set --repeat-penalty, --presence-penalty or --frequency-penalty";
        let given = [
            ("--repeat-last-n", self.repeat_last_n.is_some() && !penalizes, of_penalties),
            ("--dry-base", self.dry_base.is_some() && !dry, of_dry),
            ("--dry-allowed-length", self.dry_allowed_length.is_some() && !dry, of_dry),
            ("--dry-penalty-last-n", self.dry_penalty_last_n.is_some() && !dry, of_dry),
            ("--dry-sequence-breaker", !self.dry_sequence_breaker.is_empty() && !dry, of_dry),
            (
                "--dry-sequence-breaker",
                self.dry_sequence_breaker.iter().any(String::is_empty),
                "is empty; name a string",
            ),
            ("--xtc-threshold", self.xtc_threshold.is_some() && !xtc, "XTC is off; pass an --xtc-probability above 0"),
        ];
        // Who gives a temperature of 0, or the most probable token as the only one, knows that nothing is sampled.
        let is_greedy_by_default = self.temperature.is_none() && self.top_k != Some(1) && base.temperature == 0.0;
        let filters = self.filters().into_iter().filter(|_| is_greedy_by_default);
        let mut all = given.into_iter().chain(filters.map(|(option, is_on)| (option, is_on, of_filters)));
        match all.find(|(_, is_unused, _)| *is_unused) {
            Some((option, _, problem)) => bail!("{option}: {problem}, or omit it"),
            None => Ok(()),
        }
    }

    /// The options of the filters, and whether each is given and does not turn its filter off.
    fn filters(&self) -> [(&'static str, bool); 7] {
        [
            ("--top-n-sigma", self.top_n_sigma.is_some_and(|n| n > 0.0)),
            ("--top-k", self.top_k.is_some_and(|k| k > 0)),
            ("--typical", self.typical.is_some_and(|p| p != 1.0)),
            ("--top-p", self.top_p.is_some_and(|p| p != 1.0)),
            ("--min-p", self.min_p.is_some_and(|p| p != 0.0)),
            ("--xtc-probability", self.xtc_probability.is_some_and(|p| p != 0.0)),
            ("--xtc-threshold", self.xtc_threshold.is_some()),
        ]
    }

    fn penalties(&self, base: Penalties) -> Penalties {
        Penalties {
            repeat: self.repeat_penalty.unwrap_or(base.repeat),
            frequency: self.frequency_penalty.unwrap_or(base.frequency),
            presence: self.presence_penalty.unwrap_or(base.presence),
            last_n: self.repeat_last_n.map_or(base.last_n, |n| usize::try_from(n).ok()),
        }
    }

    /// The parameters of XTC; a probability of 0 is off.
    fn xtc(&self, base: Option<Xtc>) -> Xtc {
        let base = base.unwrap_or(Xtc { probability: 0.0, ..Xtc::default() });
        Xtc {
            probability: self.xtc_probability.unwrap_or(base.probability),
            threshold: self.xtc_threshold.unwrap_or(base.threshold),
        }
    }

    /// The parameters of DRY; a multiplier of 0 is off.
    fn dry(&self, tokenizer: &Tokenizer) -> Dry {
        let (given, default) = (self.dry_sequence_breaker.iter().map(String::as_str), Dry::default());
        Dry {
            multiplier: self.dry_multiplier.unwrap_or(0.0),
            base: self.dry_base.unwrap_or(default.base),
            allowed_length: self.dry_allowed_length.unwrap_or(default.allowed_length),
            last_n: self.dry_penalty_last_n.and_then(|n| usize::try_from(n).ok()),
            breakers: match self.dry_sequence_breaker.is_empty() {
                true => breakers(tokenizer, BREAKERS),
                false => breakers(tokenizer, given.filter(|string| *string != "none")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        generate: GenerateArgs,
    }

    #[test]
    fn limits_are_named_where_they_may_surprise() {
        let limit = |arguments: &[&str], reason, context| {
            let command = Command::try_parse_from([&["x"][..], arguments].concat());
            let Command { generate } = command.unwrap_or_else(|error| panic!("{error}"));
            generate.limit_reached(reason, 64, context).unwrap_or_default()
        };
        let line = |arguments: &[&str], reason| limit(arguments, reason, Some(64));
        let (most, context) = (FinishReason::MaxTokens, FinishReason::Context);
        assert_eq!(line(&[], most), "ended at 128 tokens; raise --max-tokens, or pass -1 for no limit");
        assert_eq!(line(&["-n", "128"], most), "", "it was chosen");
        let cut = "ended at 9 tokens, where the constraint allows more; raise --max-tokens";
        assert_eq!(line(&["-n", "9", "--regex", "a*"], most), cut);
        assert_eq!(line(&["-n", "-1"], context), "the context of 64 tokens is full; raise --context");
        assert_eq!(limit(&[], context, None), "the context of 64 tokens is full", "it is the largest");
        for other in [FinishReason::EndOfText, FinishReason::Constraint, FinishReason::Cancelled] {
            assert_eq!(line(&[], other), "");
        }
    }
}
