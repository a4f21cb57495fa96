//! Command-line options of sampling and of what ends a text, by llama.cpp's names.

use std::fs::read_to_string;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use foretoken::sampler::{Dry, Penalties, Xtc};
use foretoken::{Constraint, EndOfGeneration, Engine, GenerateOptions, Sampling, Stop};

/// How tokens are chosen, and what ends the text.
#[derive(Args)]
pub struct Text {
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// 0 takes the most probable token. Default: 0; of a chat, what the checkpoint's publisher says, as of top-k, top-p, min-p,
    /// typical and the repeat penalty.
    #[arg(long, visible_alias = "temp")]
    pub temperature: Option<f32>,
    /// Keep the K most probable tokens. Default: all.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Keep the most probable tokens up to this sum of probabilities. Default: 1.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this probable relative to the best. Default: 0.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Penalties and rarer filters.
    #[command(flatten)]
    pub chain: Chain,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Go on past the tokens that end a text.
    #[arg(long)]
    pub ignore_eos: bool,
    /// End the text before this string; may be given several times.
    #[arg(long, value_name = "STRING")]
    pub stop: Vec<String>,
    /// What the text must match.
    #[command(flatten)]
    pub constraint: Constrained,
}

/// What the text must match; at most one of them. Built with the cargo feature `constraint`.
#[derive(Args)]
#[group(multiple = false)]
pub struct Constrained {
    /// The text is JSON under the schema in this file.
    #[arg(long, value_name = "FILE")]
    pub json_schema: Option<PathBuf>,
    /// The text matches this regular expression.
    #[arg(long, value_name = "REGEX")]
    pub regex: Option<String>,
    /// The text follows the grammar in this file, in llguidance's variant of Lark's syntax.
    #[arg(long, value_name = "FILE")]
    pub grammar: Option<PathBuf>,
}

/// Penalties and rarer filters; all are off by default. They apply in this order: repeat, frequency and presence penalty, DRY,
/// top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature.
#[derive(Args)]
pub struct Chain {
    /// Divide the positive logits of the newest tokens by this, multiply the negative ones. Default: 1, off.
    #[arg(long, value_name = "X")]
    pub repeat_penalty: Option<f32>,
    /// Tokens that the penalties look at; -1 for all. Default: 64.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: Option<i64>,
    /// Subtract this from the logits of the newest tokens.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtract this for every occurrence among the newest tokens.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Scale of the penalty of tokens that prolong a repetition (DRY).
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub dry_multiplier: f32,
    /// Growth of DRY's penalty with every token.
    #[arg(long, value_name = "X", default_value_t = 1.75)]
    pub dry_base: f32,
    /// Tokens in a row that DRY lets be repeated.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub dry_allowed_length: usize,
    /// Tokens that DRY looks at; -1 for all.
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    pub dry_penalty_last_n: i64,
    /// Tokens with this string in them end a repetition; may be given several times, none is no string. Default: a line end, a
    /// colon, a double quote, an asterisk.
    #[arg(long, value_name = "STRING")]
    pub dry_sequence_breaker: Vec<String>,
    /// Keep tokens whose logits are at most this many standard deviations below the largest. Default: all.
    #[arg(long, value_name = "N")]
    pub top_n_sigma: Option<f32>,
    /// Keep the locally most typical tokens up to this sum of probabilities. Default: 1.
    #[arg(long, visible_alias = "typical-p", value_name = "P")]
    pub typical: Option<f32>,
    /// How often the most probable tokens are excluded (XTC).
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub xtc_probability: f32,
    /// Probability from which XTC excludes all tokens but the least probable of them; up to 0.5.
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    pub xtc_threshold: f32,
}

/// llama.cpp's: they end repetitions where none are named.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

impl Text {
    /// These options, with the default of every other. `sampling` has the parameters that were not given.
    ///
    /// # Errors
    /// If DRY is asked for and the checkpoint has no tokenizer to find its breakers with, or a file cannot be read.
    pub fn options(&self, engine: &Engine, sampling: &Sampling) -> Result<GenerateOptions> {
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(sampling.temperature),
            top_k: self.top_k.or(sampling.top_k),
            top_p: self.top_p.unwrap_or(sampling.top_p),
            min_p: self.min_p.unwrap_or(sampling.min_p),
            ..self.chain.sampling(engine, sampling)?
        };
        let end_of_generation = if self.ignore_eos { EndOfGeneration::Ignored } else { EndOfGeneration::Stops };
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            sampling,
            seed: self.seed,
            constraint: self.constraint.constraint()?,
            stop: Stop { end_of_generation, strings: self.stop.clone(), ..Stop::default() },
            ..GenerateOptions::default()
        })
    }
}

impl Constrained {
    fn constraint(&self) -> Result<Option<Constraint>> {
        let read = |path: &PathBuf| read_to_string(path).with_context(|| path.display().to_string());
        Ok(match self {
            Self { json_schema: Some(path), .. } => Some(Constraint::json_schema(read(path)?)),
            Self { regex: Some(expression), .. } => Some(Constraint::regex(expression.as_str())),
            Self { grammar: Some(path), .. } => Some(Constraint::lark(read(path)?)),
            _ => None,
        })
    }
}

impl Chain {
    fn sampling(&self, engine: &Engine, sampling: &Sampling) -> Result<Sampling> {
        let penalties = Penalties {
            repeat: self.repeat_penalty.unwrap_or(sampling.penalties.repeat),
            frequency: self.frequency_penalty,
            presence: self.presence_penalty,
            last_n: self.repeat_last_n.map_or(sampling.penalties.last_n, |n| usize::try_from(n).ok()),
        };
        Ok(Sampling {
            penalties,
            dry: if self.dry_multiplier == 0.0 { None } else { Some(self.dry(engine)?) },
            top_n_sigma: self.top_n_sigma.filter(|n| *n > 0.0).or(sampling.top_n_sigma),
            typical_p: self.typical.unwrap_or(sampling.typical_p),
            xtc: (self.xtc_probability != 0.0)
                .then_some(Xtc { probability: self.xtc_probability, threshold: self.xtc_threshold }),
            ..sampling.clone()
        })
    }

    fn dry(&self, engine: &Engine) -> Result<Dry> {
        let given = self.dry_sequence_breaker.iter().map(String::as_str);
        let strings: Vec<&str> = if self.dry_sequence_breaker.is_empty() {
            BREAKERS.to_vec()
        } else {
            given.filter(|s| *s != "none").collect()
        };
        let mut breakers = Vec::new();
        for string in strings {
            breakers.extend(engine.tokenizer()?.ids_with(string));
        }
        Ok(Dry {
            multiplier: self.dry_multiplier,
            base: self.dry_base,
            allowed_length: self.dry_allowed_length,
            last_n: usize::try_from(self.dry_penalty_last_n).ok(),
            breakers,
        })
    }
}
