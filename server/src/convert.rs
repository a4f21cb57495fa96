//! Conversions between the fields of requests and responses and the library's types.

use foretoken::chat::{ChatOptions, ChatTemplate, GenerationPrompt, Message, Role};
use foretoken::sampler::LogitBias;
use foretoken::speculative::{BlockSize, DraftSampling, DrafterOptions, Drafters};
use foretoken::tokenizer::Tokenizer;
use foretoken::{
    EndOfGeneration, Engine, GenerateOptions, Piece, Sampling, Speculation, SpeculationOptions, Statistics, Stop,
    TokenLogprobs,
};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::defaults::GenerateDefaults;
use crate::fields::{Fields, kind};
use crate::ignored::defaults_in_use;
use crate::min_tokens::MinTokens;
use crate::processors::add_processor;
use crate::sampling::sampling;

type Result<T> = std::result::Result<T, ApiError>;

/// A conversation, and the options that it is rendered with.
pub(crate) struct Chat {
    pub messages: Vec<Message>,
    pub options: ChatOptions,
    /// Bytes of the request's body: its texts have no more.
    pub body_bytes: usize,
}

impl Chat {
    /// With what opens the reasoning of replies. System messages behind the first message are the user's if the
    /// template does not take them: coding agents send such messages between turns.
    pub fn new(app: &App, mut messages: Vec<Message>, mut options: ChatOptions, body_bytes: usize) -> Self {
        if let Ok(template) = app.template() {
            options.reasoning_start = template.reasoning_start(&options);
            let mut late = messages.iter_mut().skip(1).filter(|message| message.role == Role::System).peekable();
            if late.peek().is_some() && !takes_late_system(template, &options) {
                late.for_each(|message| message.role = Role::User);
            }
        }
        Self { messages, options, body_bytes }
    }
}

/// Whether the template writes a system message that is not the first: Qwen3.5's refuses it.
fn takes_late_system(template: &ChatTemplate, options: &ChatOptions) -> bool {
    const TEXT: &str = "a late system message";
    let messages = [Message::user("a"), Message::assistant("b"), Message::system(TEXT), Message::user("c")];
    let generation_prompt = GenerationPrompt::default();
    let options = ChatOptions { tools: Vec::new(), generation_prompt, ..options.clone() };
    template.render(&messages, &options).is_ok_and(|prompt| prompt.contains(TEXT))
}

/// A prompt.
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Chat(Chat),
}

/// Maximum number of strings in a field, and bytes of one: every token is compared with all of them.
const MAX_STRINGS: usize = 16;
const MAX_STRING_BYTES: usize = 1024;
/// Maximum number of alternatives to a token whose log-probabilities are reported.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;
/// Maximum number of tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Maximum size of a bias: no sum of biases and penalties is infinite.
const MAX_BIAS: f32 = 1e30;
/// Maximum number of stop tokens: every token is compared with all of them.
const MAX_STOP_TOKENS: usize = 1024;

/// What all routes have under the same names.
pub(crate) struct Common {
    pub options: GenerateOptions,
    pub seeds: Seeds,
    /// DRY's sequence breakers, if the request has some of its own.
    pub breakers: Option<Vec<String>>,
    /// Whether frequency and presence penalties count generated tokens only, as in OpenAI's API: unless the request has
    /// llama.cpp's `repeat_last_n`.
    pub penalizes_output: bool,
    /// The least tokens of a text, if the request has a minimum.
    pub min_tokens: Option<MinTokens>,
}

/// Takes what all routes have under the same names. `base` has the sampling parameters that the request does not set.
pub(crate) fn common(
    fields: &mut Fields,
    engine: &Engine,
    defaults: &GenerateDefaults,
    base: &Sampling,
    max_tokens: Option<usize>,
) -> Result<Common> {
    let seeds = seeds(fields, defaults);
    // Before it is taken.
    let penalizes_output = fields.peek("repeat_last_n").is_none();
    let sampling = sampling(fields, &defaults_in_use(fields, base))?;
    let has_breakers = fields.peek("dry_sequence_breakers").is_some();
    let breakers = strings(fields, "dry_sequence_breakers")?;
    let speculation = speculation(fields, engine, &defaults.speculation)?;
    let speculation = if seeds == Seeds::Given { reproducible(speculation) } else { speculation };
    let mut options = GenerateOptions {
        max_tokens: max_tokens.or(defaults.max_tokens).unwrap_or(usize::MAX),
        sampling,
        seed: seed(fields, defaults)?,
        speculation,
        logits_processor: defaults.logits_processor.clone(),
        ..GenerateOptions::default()
    };
    let biases = logit_bias(fields, engine.target().num_readable_tokens())?;
    if !biases.is_empty() {
        add_processor(&mut options, LogitBias { biases });
    }
    Ok(Common { options, seeds, breakers: has_breakers.then_some(breakers), penalizes_output, min_tokens: None })
}

/// The options of a request without fields.
pub(crate) fn default_options(engine: &Engine, defaults: &GenerateDefaults) -> Result<GenerateOptions> {
    Ok(common(&mut Fields::parse(b"{}")?, engine, defaults, &defaults.sampling, None)?.options)
}

/// Takes `logit_bias`: OpenAI's object of biases by token id, or llama.cpp's array of pairs, in
/// which `false` excludes a token.
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
            return Err(fields.error("logit_bias", format!("is {}, must be an object or an array", kind(&other))));
        }
    };
    if pairs.len() > MAX_BIASES {
        return Err(fields.error("logit_bias", format!("has {} tokens, at most {MAX_BIASES} are allowed", pairs.len())));
    }
    let bias = |(id, bias): &(Value, Value)| {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
        let bias = match bias {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            Value::String(bias) => bias.parse::<f32>().ok().filter(|bias| bias.abs() <= MAX_BIAS),
            bias => bias.as_f64().map(|bias| bias as f32).filter(|bias| bias.abs() <= MAX_BIAS),
        };
        id.zip(bias).ok_or_else(|| {
            let range = format!("numbers between -{MAX_BIAS:e} and {MAX_BIAS:e}");
            fields.error("logit_bias", format!("must map token ids below {vocab} to {range}"))
        })
    };
    pairs.iter().map(bias).collect()
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

/// The seeds of several prompts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seeds {
    /// The request's or the server's: every prompt gets what it gets alone.
    Given,
    /// Random ones: equal prompts get several samples.
    Drawn,
}

/// Whether the seed is given: -1 asks for a random one, as in llama.cpp.
fn seeds(fields: &Fields, defaults: &GenerateDefaults) -> Seeds {
    let is_given = fields.peek("seed").map_or(defaults.seed.is_some(), |seed| seed.as_f64() != Some(-1.0));
    if is_given { Seeds::Given } else { Seeds::Drawn }
}

/// A seed that clients whose numbers are floating-point (JavaScript's) can repeat.
pub(crate) fn random_seed() -> u64 {
    rand::random::<u32>().into()
}

fn seed(fields: &mut Fields, defaults: &GenerateDefaults) -> Result<u64> {
    match fields.integer("seed")? {
        None => Ok(defaults.seed.unwrap_or_else(random_seed)),
        Some(-1) => Ok(random_seed()),
        // Any 64-bit integer: negative ones are the seeds of their two's complement.
        Some(seed) => Ok(seed as u64),
    }
}

/// `speculative: {enabled, type, draft_block_size}`: as `--no-speculation`, `--spec-type` and `--draft-block-size`.
fn speculation(fields: &mut Fields, engine: &Engine, default: &Speculation) -> Result<Speculation> {
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
        _ => SpeculationOptions::default(),
    };
    if let Some(rows) = block {
        options.block = BlockSize::Fixed(rows);
        // Without listed drafters, a block size selects the assistant, as on the command line.
        if drafters.is_none() && options.drafters == Drafters::Auto {
            if engine.has_mtp() {
                options.drafters = Drafters::Priority(vec![DrafterOptions::Mtp]);
            } else if engine.draft_model().is_none() {
                let problem = "needs an assistant, a NextN head or a draft model; omit it, or name drafters in type";
                return Err(own.error("draft_block_size", problem));
            }
        }
    }
    if let Some(name) = &drafters {
        if name.contains(':') {
            // Parameters are sizes of tables, which only the command line may set.
            return Err(
                own.error("type", "must be auto or a list of drafters without parameters, such as ngram-map-k,mtp")
            );
        }
        let named = name.parse::<Drafters>();
        options.drafters = named.map_err(|error| ApiError::of(&error, "prompt"))?;
    }
    own.end()?;
    match (enabled, drafters.is_some() || block.is_some()) {
        (Some(true), false) if matches!(default, Speculation::Off) => Ok(Speculation::Auto),
        (_, false) => Ok(default.clone()),
        _ => Ok(Speculation::With(options)),
    }
}

/// `speculation` with greedy drafts, on which the text of a seed does not depend.
fn reproducible(speculation: Speculation) -> Speculation {
    match speculation {
        Speculation::With(options) => {
            Speculation::With(SpeculationOptions { drafts: DraftSampling::Greedy, ..options })
        }
        other => other,
    }
}

/// The strings of the field `name`, stop strings or sequence breakers: a string or an array. Empty ones are the same as
/// absent.
pub(crate) fn strings(fields: &mut Fields, name: &str) -> Result<Vec<String>> {
    let mut strings = match fields.value(name) {
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
            return Err(fields.error(name, format!("is {}, must be a string or an array of strings", kind(&other))));
        }
    };
    strings.retain(|string| !string.is_empty());
    if strings.len() > MAX_STRINGS {
        return Err(fields.error(name, format!("has {} strings, at most {MAX_STRINGS} are allowed", strings.len())));
    }
    match strings.iter().find(|string| string.len() > MAX_STRING_BYTES) {
        Some(string) => {
            let problem = format!("has a string of {} bytes, at most {MAX_STRING_BYTES} are allowed", string.len());
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
    let list = fields.list("stop_token_ids")?.unwrap_or_default();
    if list.len() > MAX_STOP_TOKENS {
        let problem = format!("has {} token ids, at most {MAX_STOP_TOKENS} are allowed", list.len());
        return Err(fields.error("stop_token_ids", problem));
    }
    let tokens = token_ids(fields, "stop_token_ids", &list)?;
    Ok(Stop { end_of_generation, tokens, strings, ..Stop::default() })
}

/// Token ids in an array.
pub(crate) fn token_ids(fields: &Fields, name: &str, list: &[Value]) -> Result<Vec<u32>> {
    let id = |(i, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| fields.error(&format!("{name}[{i}]"), format!("is {}, must be a token id", kind(value))))
    };
    list.iter().enumerate().map(id).collect()
}

/// Maximum number of prompts in one request.
const MAX_PROMPTS: usize = 64;

/// One or more prompts of the field `name`: a prompt, or an array of prompts.
pub(crate) fn prompts(fields: &mut Fields, name: &str) -> Result<Vec<Prompt>> {
    let list = match fields.value(name) {
        None => return Err(fields.error(name, "is required: a string or an array of token ids")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(fields.error(name, format!("is {}, must be a string or an array of token ids", kind(&other))));
        }
    };
    match list.first() {
        None => return Err(fields.error(name, "is empty; at least one token is required")),
        Some(Value::Number(_)) => return Ok(vec![Prompt::Ids(token_ids(fields, name, &list)?)]),
        Some(_) if list.len() > MAX_PROMPTS => {
            let problem =
                format!("has {} prompts, at most {MAX_PROMPTS} are allowed; send several requests", list.len());
            return Err(fields.error(name, problem));
        }
        Some(_) => {}
    }
    let prompt = |(i, value): (usize, Value)| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => token_ids(fields, &format!("{name}[{i}]"), &ids).map(Prompt::Ids),
        other => {
            Err(fields.error(&format!("{name}[{i}]"), format!("is {}, must be a string or token ids", kind(&other))))
        }
    };
    list.into_iter().enumerate().map(prompt).collect()
}

/// The tokens of a prompt that a sequence can begin with. Takes time that grows with the prompt.
///
/// # Errors
/// If there are none, one is outside the vocabulary, they do not fit the context, the checkpoint has no tokenizer or no
/// template, or the template refuses the messages.
pub(crate) fn tokens(app: &App, prompt: Prompt) -> foretoken::Result<Vec<u32>> {
    let tokens = match prompt {
        Prompt::Ids(ids) => ids,
        Prompt::Text(text) => {
            check_length(app, text.len())?;
            app.engine.tokenizer()?.encode(&text)?
        }
        Prompt::Chat(chat) => {
            if check_length(app, chat.body_bytes).is_err() {
                // A template need not write all that the request has.
                check_length(app, app.template()?.render(&chat.messages, &chat.options)?.len())?;
            }
            chat_tokens(app, &chat)?
        }
    };
    let outside = |problem: String| Err(foretoken::Error::Argument { name: "prompt", problem });
    let (vocab, context) = (app.engine.target().num_readable_tokens(), app.context);
    match tokens.iter().find(|id| **id as usize >= vocab) {
        Some(id) => outside(format!("token id {id} is outside the vocabulary of {vocab}")),
        None if tokens.is_empty() => outside("is empty; pass at least one token".into()),
        None if tokens.len() > context => Err(foretoken::Error::Context { needed: tokens.len(), limit: context }),
        None => Ok(tokens),
    }
}

/// The tokens of a chat, however many. Takes time that grows with its text.
///
/// # Errors
/// If the checkpoint has no tokenizer or no template, or the template refuses the messages.
pub(crate) fn chat_tokens(app: &App, chat: &Chat) -> foretoken::Result<Vec<u32>> {
    app.template()?.encode(app.engine.tokenizer()?, &chat.messages, &chat.options)
}

/// # Errors
/// If a text of so many bytes is certainly longer than the context. Encoding it would take seconds for megabytes.
pub(crate) fn check_length(app: &App, bytes: usize) -> foretoken::Result<()> {
    let longest = app.engine.tokenizer().map_or(usize::MAX, Tokenizer::longest_token);
    match bytes > app.context.saturating_mul(longest) {
        true => Err(foretoken::Error::Context { needed: bytes.div_ceil(longest), limit: app.context }),
        false => Ok(()),
    }
}

/// Which stop string ended a text of these tokens: one behind the last control token, as none has one within it, that
/// ends with the last token, as earlier ones were not looked for (`min_tokens`). Of several the first one, at the same
/// place the longest.
pub(crate) fn stop_string(engine: &Engine, tokens: &[u32], strings: &[String]) -> Option<String> {
    let tokenizer = engine.tokenizer().ok()?;
    let part = tokens.rsplit(|token| tokenizer.is_control(*token)).find(|part| !part.is_empty())?;
    let bytes: Vec<u8> = part.iter().flat_map(|token| tokenizer.token_bytes(*token)).collect();
    let text = String::from_utf8_lossy(&bytes);
    let own_bytes = part.last().map_or(0, |token| tokenizer.token_bytes(*token).len());
    let before = whole_characters(&bytes[..bytes.len() - own_bytes]);
    let find = |string: &String| {
        let from = text.ceil_char_boundary((before + 1).saturating_sub(string.len()));
        text[from..].find(string.as_str()).map(|at| from + at)
    };
    let found = strings.iter().filter_map(|string| Some((find(string)?, string)));
    found.min_by_key(|(at, string)| (*at, std::cmp::Reverse(string.len()))).map(|(_, string)| string.clone())
}

/// The length of the bytes' text, in which U+FFFD is written for invalid ones, without a character that the end cuts.
fn whole_characters(bytes: &[u8]) -> usize {
    let is_cut = |last: &[u8]| std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    let cut = bytes.utf8_chunks().last().is_some_and(|chunk| is_cut(chunk.invalid()));
    String::from_utf8_lossy(bytes).len() - if cut { char::REPLACEMENT_CHARACTER.len_utf8() } else { 0 }
}

/// The tokens of a piece, each with its text, and whether it was drafted.
pub(crate) fn origins(engine: &Engine, piece: &Piece) -> Value {
    let Ok(tokenizer) = engine.tokenizer() else { return json!([]) };
    let token = |(i, id): (usize, &u32)| {
        let bytes = if tokenizer.is_control(*id) { Vec::new() } else { tokenizer.token_bytes(*id) };
        json!({"id": id, "text": String::from_utf8_lossy(&bytes), "drafted": i < piece.accepted})
    };
    piece.tokens.iter().enumerate().map(token).collect()
}

/// A token with its log-probability: OpenAI's fields, and llama.cpp's `id`.
fn logprob(engine: &Engine, id: u32, logprob: f32) -> Value {
    let bytes = engine.tokenizer().map(|tokenizer| tokenizer.token_bytes(id)).unwrap_or_default();
    json!({"id": id, "token": String::from_utf8_lossy(&bytes), "bytes": bytes, "logprob": logprob})
}

/// Tokens as [`logprob`], each with the most probable ones at its position.
pub(crate) fn logprobs(engine: &Engine, tokens: &[TokenLogprobs]) -> Value {
    let token = |of: &TokenLogprobs| {
        let mut value = logprob(engine, of.token, of.logprob);
        value["top_logprobs"] = of.top.iter().map(|(id, value)| logprob(engine, *id, *value)).collect();
        value
    };
    tokens.iter().map(token).collect()
}

/// A number with the digits of the 32-bit one, not those of its 64-bit neighbor.
pub(crate) fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Counts and times under llama.cpp's names; times are in milliseconds.
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
