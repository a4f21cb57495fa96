//! From requests to the library's types and back: the one file that knows both.

use std::sync::Arc;

use foretoken::chat::{ChatOptions, ChatTemplate, Message};
use foretoken::sampler::{LogitBias, LogitsProcessor, Penalties, Sampler};
use foretoken::speculative::{BlockSize, DrafterOptions, Drafters};
use foretoken::tokenizer::Tokenizer;
use foretoken::{
    EndOfGeneration, Engine, GenerateOptions, Piece, Sampling, Speculation, SpeculationOptions, Statistics, Stop,
    TokenLogprobs,
};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::{Fields, kind};

type Result<T> = std::result::Result<T, ApiError>;

/// What a generation uses where its request says nothing.
#[derive(Clone, Debug, Default)]
pub struct GenerateDefaults {
    /// Default: 0; of a chat, the checkpoint's, as of the next three.
    pub temperature: Option<f32>,
    /// Default: all tokens.
    pub top_k: Option<usize>,
    /// Default: 1.
    pub top_p: Option<f32>,
    /// Default: 0.
    pub min_p: Option<f32>,
    /// Default: drawn anew for every request.
    pub seed: Option<u64>,
    /// Default: what the context has room for.
    pub max_tokens: Option<usize>,
    /// Default: where possible.
    pub speculation: Speculation,
    /// Modifies logits of every request, in front of its own biases. Default: none.
    pub logits_processor: Option<Arc<dyn LogitsProcessor>>,
}

/// A conversation, and what it is rendered with.
pub(crate) struct Chat {
    pub messages: Vec<Message>,
    pub options: ChatOptions,
}

/// What is continued.
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Chat(Chat),
}

/// Most stop strings of a request, and bytes of one: every token is compared with all of them.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most tokens whose log-probabilities are reported beside the emitted one's.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;
/// Most tokens whose logits a request biases.
const MAX_BIASES: usize = 1024;

/// The options that all routes have, by their common names. `base` has the sampling parameters that neither the request nor the
/// command line gives.
pub(crate) fn options(
    fields: &mut Fields,
    (engine, defaults): (&Engine, &GenerateDefaults),
    base: &Sampling,
    max_tokens: Option<usize>,
) -> Result<GenerateOptions> {
    let options = GenerateOptions {
        max_tokens: max_tokens.or(defaults.max_tokens).unwrap_or(usize::MAX),
        sampling: sampling(fields, defaults, base)?,
        seed: seed(fields, defaults)?,
        speculation: speculation(fields, &defaults.speculation)?,
        logits_processor: logits_processor(fields, engine, defaults)?,
        ..GenerateOptions::default()
    };
    Sampler::new(options.sampling.clone(), Vec::new()).map_err(|error| ApiError::of(&error, "prompt"))?;
    Ok(options)
}

/// The options of a request that says nothing.
pub(crate) fn default_options(engine: &Engine, defaults: &GenerateDefaults) -> Result<GenerateOptions> {
    options(&mut Fields::parse(b"{}")?, (engine, defaults), &Sampling::default(), None)
}

/// One behind the other.
#[derive(Debug)]
struct Processors(Vec<Arc<dyn LogitsProcessor>>);

impl LogitsProcessor for Processors {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        self.0.iter().try_for_each(|processor| processor.process(tokens, logits))
    }
}

fn logits_processor(
    fields: &mut Fields,
    engine: &Engine,
    defaults: &GenerateDefaults,
) -> Result<Option<Arc<dyn LogitsProcessor>>> {
    let biases = logit_bias(fields, engine.target().num_readable_tokens())?;
    let bias: Option<Arc<dyn LogitsProcessor>> =
        if biases.is_empty() { None } else { Some(Arc::new(LogitBias { biases })) };
    Ok(match (defaults.logits_processor.clone(), bias) {
        (Some(first), Some(bias)) => Some(Arc::new(Processors(vec![first, bias]))),
        (one, other) => one.or(other),
    })
}

/// Takes `logit_bias`: OpenAI's object of biases by token id, or llama.cpp's list of pairs, in which `false` excludes a
/// token.
fn logit_bias(fields: &mut Fields, vocab: usize) -> Result<Vec<(u32, f32)>> {
    let pairs: Vec<(Value, Value)> = match fields.value("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(biases)) => {
            let id = |id: &String| id.parse::<u32>().map_or(Value::Null, Value::from);
            biases.iter().map(|(token, bias)| (id(token), bias.clone())).collect()
        }
        Some(Value::Array(list)) => {
            let pair = |pair: &Value| (pair[0].clone(), if pair[2].is_null() { pair[1].clone() } else { Value::Null });
            list.iter().map(pair).collect()
        }
        Some(other) => {
            return Err(fields.error("logit_bias", format!("is {}, must be an object or a list", kind(&other))));
        }
    };
    if pairs.len() > MAX_BIASES {
        return Err(fields.error("logit_bias", format!("has {} tokens, may have {MAX_BIASES}", pairs.len())));
    }
    let bias = |(id, bias): &(Value, Value)| {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
        let bias = match bias {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            bias => bias.as_f64().map(|bias| bias as f32).filter(|bias| bias.is_finite()),
        };
        id.zip(bias)
            .ok_or_else(|| fields.error("logit_bias", format!("must have finite numbers for token ids below {vocab}")))
    };
    pairs.iter().map(bias).collect()
}

fn sampling(fields: &mut Fields, defaults: &GenerateDefaults, base: &Sampling) -> Result<Sampling> {
    let mut number = |field: &str| fields.number(field).map(|number| number.map(|number| number as f32));
    let temperature = number("temperature")?.or(defaults.temperature).unwrap_or(base.temperature);
    let top_p = number("top_p")?.or(defaults.top_p).unwrap_or(base.top_p);
    let min_p = number("min_p")?.or(defaults.min_p).unwrap_or(base.min_p);
    let top_k = match fields.integer("top_k")? {
        None => defaults.top_k.or(base.top_k),
        Some(-1 | 0) => None, // vLLM's and llama.cpp's words for all
        Some(k) => match usize::try_from(k) {
            Ok(k) => Some(k),
            Err(_) => {
                return Err(fields.error("top_k", format!("is {k}, must be at least 1; 0 and -1 keep all tokens")));
            }
        },
    };
    Ok(Sampling { temperature, top_k, top_p, min_p, penalties: penalties(fields, base.penalties)?, ..base.clone() })
}

/// OpenAI's penalties, vLLM's `repetition_penalty` and llama.cpp's names; of the newest tokens, as llama.cpp's server.
fn penalties(fields: &mut Fields, base: Penalties) -> Result<Penalties> {
    let mut number = |field: &str| fields.number(field).map(|number| number.map(|number| number as f32));
    let frequency = number("frequency_penalty")?.unwrap_or(base.frequency);
    let presence = number("presence_penalty")?.unwrap_or(base.presence);
    let repeat = number("repeat_penalty")?.or(number("repetition_penalty")?).unwrap_or(base.repeat);
    let last_n = match fields.integer("repeat_last_n")? {
        None => base.last_n,
        Some(-1) => None,
        Some(n) => match usize::try_from(n) {
            Ok(n) => Some(n),
            Err(_) => return Err(fields.error("repeat_last_n", format!("is {n}, must be 0 or more; -1 counts all"))),
        },
    };
    Ok(Penalties { repeat, frequency, presence, last_n })
}

fn seed(fields: &mut Fields, defaults: &GenerateDefaults) -> Result<u64> {
    match fields.integer("seed")? {
        None => Ok(defaults.seed.unwrap_or_else(rand::random)),
        Some(-1) => Ok(rand::random()),
        Some(seed) => u64::try_from(seed)
            .map_err(|_| fields.error("seed", format!("is {seed}, must be 0 or more; -1 draws one at random"))),
    }
}

/// `speculative: {enabled, type, draft_block_size}`: as `--no-speculation`, `--spec-type` and `--draft-block-size`. The text does
/// not depend on it; of sampled text, the draws do.
fn speculation(fields: &mut Fields, default: &Speculation) -> Result<Speculation> {
    let Some(mut own) = fields.object("speculative")? else { return Ok(default.clone()) };
    let enabled = own.flag("enabled")?;
    let drafters = own.string("type")?;
    let block = own.count("draft_block_size", 1..=usize::MAX)?;
    if enabled == Some(false) {
        own.end()?;
        return Ok(Speculation::Off);
    }
    let mut options = match default {
        Speculation::With(options) => options.clone(),
        Speculation::Mtp(mtp) => SpeculationOptions::from(*mtp),
        _ => SpeculationOptions::default(),
    };
    if let Some(rows) = block {
        options.block = BlockSize::Fixed(rows);
        if drafters.is_none() {
            // A block size alone means the assistant, as on the command line.
            options.drafters = Drafters::Priority(vec![DrafterOptions::Mtp]);
        }
    }
    if let Some(name) = &drafters {
        if name.contains(':') {
            // Parameters are sizes of tables, which are the operator's to choose.
            return Err(own.error("type", "takes names without parameters: auto, or a list such as ngram-map-k,mtp"));
        }
        let named = name.parse::<Drafters>();
        options.drafters = named.map_err(|error| ApiError::of(&error, "prompt"))?;
    }
    own.end()?;
    match (enabled, drafters.is_some() || block.is_some()) {
        // Nothing was said: as the server was started.
        (None, false) => Ok(default.clone()),
        (Some(true), false) if matches!(default, Speculation::Off) => Ok(Speculation::WherePossible),
        (_, false) => Ok(default.clone()),
        _ => Ok(Speculation::With(options)),
    }
}

/// Stop strings of the field `name`: a string or a list.
pub(crate) fn stop_strings(fields: &mut Fields, name: &str) -> Result<Vec<String>> {
    let strings = match fields.value(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(list)) => {
            let string = |(i, value): (usize, Value)| match value {
                Value::String(string) => Ok(string),
                other => Err(fields.error(&format!("{name}[{i}]"), format!("is {}, must be a string", kind(&other)))),
            };
            list.into_iter().enumerate().map(string).collect::<Result<_>>()?
        }
        Some(other) => {
            return Err(fields.error(name, format!("is {}, must be a string or a list of strings", kind(&other))));
        }
    };
    if strings.len() > MAX_STOPS {
        return Err(fields.error(name, format!("has {} strings, may have {MAX_STOPS}", strings.len())));
    }
    match strings.iter().find(|string| string.is_empty() || string.len() > MAX_STOP_BYTES) {
        Some(string) => {
            let problem = format!("has a string of {} bytes, must have 1 to {MAX_STOP_BYTES}", string.len());
            Err(fields.error(name, problem))
        }
        None => Ok(strings),
    }
}

/// Stop conditions, with vLLM's and llama.cpp's `ignore_eos` and `stop_token_ids`.
pub(crate) fn stop(fields: &mut Fields, strings: Vec<String>) -> Result<Stop> {
    let end_of_generation = match fields.flag("ignore_eos")? {
        Some(true) => EndOfGeneration::Ignored,
        _ => EndOfGeneration::Stops,
    };
    let tokens =
        fields.list("stop_token_ids")?.map_or(Ok(Vec::new()), |list| token_ids(fields, "stop_token_ids", &list))?;
    Ok(Stop { end_of_generation, tokens, strings })
}

/// Token ids in a list.
pub(crate) fn token_ids(fields: &Fields, name: &str, list: &[Value]) -> Result<Vec<u32>> {
    let id = |(i, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| fields.error(&format!("{name}[{i}]"), format!("is {}, must be a token id", kind(value))))
    };
    list.iter().enumerate().map(id).collect()
}

/// A prompt of the field `name`: a text, or a list of token ids. A list of one prompt is that prompt.
pub(crate) fn prompt(fields: &mut Fields, name: &str) -> Result<Prompt> {
    let several = "has several prompts; send a request for each";
    match fields.value(name) {
        None => Err(fields.error(name, "is missing; give a text or token ids")),
        Some(Value::String(text)) => Ok(Prompt::Text(text)),
        Some(Value::Array(mut list)) => match list.first_mut().map(Value::take) {
            None => Err(fields.error(name, "is empty; give at least one token")),
            Some(Value::Number(first)) => {
                list[0] = Value::Number(first);
                token_ids(fields, name, &list).map(Prompt::Ids)
            }
            Some(_) if list.len() > 1 => Err(fields.error(name, several)),
            Some(Value::String(text)) => Ok(Prompt::Text(text)),
            Some(Value::Array(ids)) => token_ids(fields, &format!("{name}[0]"), &ids).map(Prompt::Ids),
            Some(other) => Err(fields.error(name, format!("has {}, must have a text or token ids", kind(&other)))),
        },
        Some(other) => Err(fields.error(name, format!("is {}, must be a text or a list of token ids", kind(&other)))),
    }
}

/// The tokens of a prompt. Takes time that grows with the prompt.
///
/// # Errors
/// If the text is empty, the checkpoint has no tokenizer or no template, or the template refuses the messages.
pub(crate) fn tokens(engine: &Engine, template: Option<&ChatTemplate>, prompt: Prompt) -> foretoken::Result<Vec<u32>> {
    match (prompt, template) {
        (Prompt::Ids(ids), _) => Ok(ids),
        (Prompt::Text(text), _) => engine.tokenizer()?.encode(&text),
        (Prompt::Chat(chat), None) => engine.encode_chat(&chat.messages, &chat.options),
        (Prompt::Chat(chat), Some(template)) => template.encode(engine.tokenizer()?, &chat.messages, &chat.options),
    }
}

/// The sampling parameters of a chat that says nothing: the checkpoint's.
pub(crate) fn chat_sampling(engine: &Engine) -> Sampling {
    engine.sampling_defaults().cloned().unwrap_or_default()
}

/// The bytes of a token: part of a character, for a token of one byte.
pub(crate) fn token_bytes(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let Some(token) = tokenizer.token(id) else { return Vec::new() };
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

/// Which stop string ended a text: the one that the tokens go on with behind it.
pub(crate) fn stop_string(engine: &Engine, tokens: &[u32], text: &str, strings: &[String]) -> Option<String> {
    let whole = engine.tokenizer().ok()?.decode(tokens).ok()?;
    let rest = whole.strip_prefix(text)?;
    strings.iter().filter(|string| rest.starts_with(string.as_str())).max_by_key(|string| string.len()).cloned()
}

/// Tokens of a piece, each with its text, and whether a drafter wrote it.
pub(crate) fn origins(engine: &Engine, piece: &Piece) -> Value {
    let Ok(tokenizer) = engine.tokenizer() else { return json!([]) };
    let token = |(i, id): (usize, &u32)| {
        let bytes = if tokenizer.is_control(*id) { Vec::new() } else { token_bytes(tokenizer, *id) };
        json!({"id": id, "text": String::from_utf8_lossy(&bytes), "drafted": i < piece.drafted})
    };
    piece.tokens.iter().enumerate().map(token).collect()
}

/// A token with its log-probability: OpenAI's fields, and llama.cpp's `id`.
pub(crate) fn logprob(engine: &Engine, id: u32, logprob: f32) -> Value {
    let bytes = engine.tokenizer().map(|tokenizer| token_bytes(tokenizer, id)).unwrap_or_default();
    json!({"id": id, "token": String::from_utf8_lossy(&bytes), "bytes": bytes, "logprob": logprob})
}

/// A token as [`logprob`], with those that were most probable in its place.
pub(crate) fn logprobs(engine: &Engine, of: &TokenLogprobs) -> Value {
    let mut value = logprob(engine, of.token, of.logprob);
    value["top_logprobs"] = of.top.iter().map(|(id, value)| logprob(engine, *id, *value)).collect();
    value
}

/// Counts and times under llama.cpp's names; times are milliseconds.
pub(crate) fn timings(statistics: &Statistics) -> Value {
    let ms = |time: std::time::Duration| 1e3 * time.as_secs_f64();
    let per = |time: f64, count: usize| if count > 0 { time / count as f64 } else { 0.0 };
    let (prompt_ms, predicted_ms) = (ms(statistics.prefill), ms(statistics.decode));
    let computed = statistics.prompt_tokens - statistics.cached_tokens;
    json!({
        "cache_n": statistics.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": per(prompt_ms, computed),
        "prompt_per_second": statistics.prefill_tokens_per_second(),
        "predicted_n": statistics.generated_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": per(predicted_ms, statistics.generated_tokens.saturating_sub(1)),
        "predicted_per_second": statistics.decode_tokens_per_second(),
        "draft_n": statistics.drafted,
        "draft_n_accepted": statistics.accepted,
    })
}
