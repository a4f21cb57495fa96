//! The options of a generation, from the fields that all generating routes have under the same names.

use foretoken::sampler::LogitBias;
use foretoken::{GenerateOptions, Sampling};

use crate::api_error::Result;
use crate::defaults::GenerateDefaults;
use crate::fields::Fields;
use crate::ignored::defaults_in_use;
use crate::logit_bias::logit_bias;
use crate::min_tokens::MinTokens;
use crate::processors::add_processor;
use crate::sampling::sampling;
use crate::served::Served;
use crate::speculation::{reproducible, speculation};
use crate::stop;
use crate::structured::Structured;

/// Maximum number of alternatives to a token whose log-probabilities are reported.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;

/// What all routes have under the same names.
pub(crate) struct Common {
    /// Without the constraint and the seed.
    pub options: GenerateOptions,
    /// What the text must match.
    pub structured: Option<Structured>,
    /// The request's seed or the server's: every prompt gets what it gets alone. `None`: each has a random one, so that
    /// equal prompts get several samples.
    pub seed: Option<u64>,
    /// DRY's sequence breakers, if the request has some of its own.
    pub breakers: Option<Vec<String>>,
    /// Whether frequency and presence penalties count generated tokens only, as in OpenAI's API: unless the request has
    /// llama.cpp's `repeat_last_n`.
    pub penalizes_output: bool,
    /// The least tokens of a text, if the request has a minimum.
    pub min_tokens: Option<MinTokens>,
}

/// Takes what all routes have under the same names. `base` has the sampling parameters that the request does not set;
/// `strings` are its stop strings, and `structured` is its format.
pub(crate) fn common(
    fields: &mut Fields,
    served: &Served,
    base: &Sampling,
    max_tokens: Option<usize>,
    strings: Vec<String>,
    structured: Option<Structured>,
) -> Result<Common> {
    let Served { engine, defaults, .. } = served;
    // Before it is taken.
    let penalizes_output = fields.peek("repeat_last_n").is_none();
    let sampling = sampling(fields, &defaults_in_use(fields, base))?;
    let has_breakers = fields.peek("dry_sequence_breakers").is_some();
    let breakers = fields.strings("dry_sequence_breakers")?;
    let speculation = speculation(fields, engine, &defaults.speculation)?;
    let seed = seed(fields, defaults)?;
    let speculation = if seed.is_some() { reproducible(speculation) } else { speculation };
    let own = defaults.options();
    let mut options =
        GenerateOptions { max_tokens: max_tokens.unwrap_or(own.max_tokens), sampling, speculation, ..own };
    let biases = logit_bias(fields, engine.target().num_readable_tokens())?;
    if !biases.is_empty() {
        add_processor(&mut options, LogitBias { biases });
    }
    options.stop = stop::conditions(fields, strings)?;
    let min_tokens = MinTokens::of_request(fields, engine, &mut options, structured.as_ref())?;
    let breakers = has_breakers.then_some(breakers);
    Ok(Common { options, structured, seed, breakers, penalizes_output, min_tokens })
}

/// A maximum number of tokens, at least `least`; -1 is no maximum, as in llama.cpp.
pub(crate) fn max_tokens(fields: &mut Fields, field: &str, least: usize) -> Result<Option<usize>> {
    match fields.integer(field)? {
        None => Ok(None),
        Some(-1) => Ok(Some(usize::MAX)),
        Some(given) => match usize::try_from(given).ok().filter(|most| *most >= least) {
            Some(most) => Ok(Some(most)),
            None => Err(fields.error(field, format!("is {given}, must be at least {least}, or -1 for no limit"))),
        },
    }
}

/// A seed that clients whose numbers are floating-point (JavaScript's) can repeat.
pub(crate) fn random_seed() -> u64 {
    rand::random::<u32>().into()
}

/// Takes `seed`; -1 requests a random one, as in llama.cpp.
fn seed(fields: &mut Fields, defaults: &GenerateDefaults) -> Result<Option<u64>> {
    Ok(match fields.integer("seed")? {
        None => defaults.seed,
        Some(-1) => None,
        // Any 64-bit integer: negative ones are the seeds of their two's complement.
        Some(seed) => Some(seed as u64),
    })
}
