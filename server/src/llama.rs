//! llama.cpp's own routes: `/completion`, `/apply-template`, `/tokenize`, `/detokenize`, `/props`, `/slots`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::chat::{ChatTemplate, ReplyPart};
use foretoken::sampler::{Dry, Xtc};
use foretoken::tokenizer::Tokenizer;
use foretoken::{FinishReason, GenerateOptions, Piece};
use hyper::{StatusCode, Uri};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::fields::Fields;
use crate::generate_options::{self, MAX_TOP_LOGPROBS};
use crate::ignored::take_ignored;
use crate::job::Ended;
use crate::prompt::{self, Chat};
use crate::reply::{self, ChoiceOutput, Generate, Reply, decimal, event};
use crate::served::Served;
use crate::structured::{self, Structured};
use crate::timings::timings;
use crate::{openai_chat, token_json};

/// Reads the body of `POST /completion`.
pub(crate) fn request(served: &Served, mut fields: Fields) -> Result<Generate, ApiError> {
    served.check_model(&mut fields)?;
    let prompts = prompt::prompts(&mut fields, "prompt")?;
    served.check_places(&fields, prompts.len())?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let other_name = generate_options::max_tokens(&mut fields, "max_tokens", 0)?;
    let most = generate_options::max_tokens(&mut fields, "n_predict", 0)?.or(other_name);
    let strings = fields.strings("stop")?;
    let logprobs = fields.count("n_probs", 0..=MAX_TOP_LOGPROBS)?.filter(|n| *n > 0);
    let return_tokens = fields.flag("return_tokens")?.unwrap_or(false);
    let response_fields = response_fields(&mut fields)?;
    let structured = structured::of_request(&mut fields)?.map(Structured::Format);
    let base = &served.defaults.sampling;
    let mut common = generate_options::common(&mut fields, served, base, most, strings, structured)?;
    common.penalizes_output = false;
    common.options.logprobs = logprobs;
    take_ignored(&mut fields, &common.options.sampling)?;
    fields.end()?;
    let settings = settings(served, &common.options);
    let reply = Box::new(Completion { return_tokens, logprobs: logprobs.is_some(), settings, response_fields });
    Ok(Generate { prompts, prompt_field: "prompt", reply, common, choices: 1, streams })
}

/// Maximum number of selected fields: each is a copy.
const MAX_RESPONSE_FIELDS: usize = 64;

/// Takes `response_fields`: paths such as `generation_settings/n_predict`.
fn response_fields(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let list = fields.list("response_fields")?.unwrap_or_default();
    fields.check_count("response_fields", list.len(), "fields", MAX_RESPONSE_FIELDS)?;
    fields.each_string("response_fields", list)
}

/// The settings of a generation, but its seed.
fn settings(served: &Served, options: &GenerateOptions) -> Value {
    let sampling = &options.sampling;
    let last_n = |n: Option<usize>| n.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX));
    let xtc = sampling.xtc.unwrap_or(Xtc { probability: 0.0, ..Xtc::default() });
    let off = Dry { multiplier: 0.0, ..Dry::default() };
    let dry = sampling.dry.as_ref().unwrap_or(&off);
    json!({
        "n_ctx": served.context,
        "n_predict": i64::try_from(options.max_tokens).ok().filter(|most| *most < i64::MAX).unwrap_or(-1),
        "temperature": decimal(sampling.temperature),
        "top_k": sampling.top_k.unwrap_or(0),
        "top_p": decimal(sampling.top_p),
        "min_p": decimal(sampling.min_p),
        "typical_p": decimal(sampling.typical_p),
        "top_n_sigma": decimal(sampling.top_n_sigma.unwrap_or(-1.0)),
        "xtc_probability": decimal(xtc.probability),
        "xtc_threshold": decimal(xtc.threshold),
        "repeat_penalty": decimal(sampling.penalties.repeat),
        "repeat_last_n": last_n(sampling.penalties.last_n),
        "presence_penalty": decimal(sampling.penalties.presence),
        "frequency_penalty": decimal(sampling.penalties.frequency),
        "dry_multiplier": decimal(dry.multiplier),
        "dry_base": decimal(dry.base),
        "dry_allowed_length": dry.allowed_length,
        "dry_penalty_last_n": last_n(dry.last_n),
        "stop": options.stop.strings,
    })
}

struct Completion {
    return_tokens: bool,
    logprobs: bool,
    settings: Value,
    /// Paths of the fields that the response has; none: all.
    response_fields: Vec<String>,
}

impl Completion {
    /// The requested fields, under the last names of their paths.
    fn selected(&self, value: Value) -> Value {
        if self.response_fields.is_empty() {
            return value;
        }
        let of_path = |path: &String| {
            let found = value.pointer(&format!("/{path}"))?;
            Some((path.rsplit('/').next().unwrap_or_default().to_owned(), found.clone()))
        };
        Value::Object(self.response_fields.iter().filter_map(of_path).collect())
    }

    /// The object of a response that is not streamed.
    fn choice(&self, output: &ChoiceOutput, ended: &Ended) -> Value {
        let mut value = self.last(output, ended);
        value["content"] = json!(output.content());
        if self.return_tokens {
            value["tokens"] = json!(output.tokens);
        }
        if self.logprobs {
            value["completion_probabilities"] = token_json::logprobs(&output.engine, output.logprobs());
        }
        self.selected(value)
    }

    /// The last object of a stream; with the text, the response that is not streamed.
    fn last(&self, output: &ChoiceOutput, ended: &Ended) -> Value {
        let (kind, word) = match ended.finish {
            FinishReason::StopString => ("word", output.stop_string(ended).unwrap_or_default()),
            FinishReason::MaxTokens | FinishReason::Context => ("limit", String::new()),
            _ => ("eos", String::new()),
        };
        let mut settings = self.settings.clone();
        settings["seed"] = json!(output.seed);
        json!({
            "index": output.index,
            "content": "",
            "tokens": [],
            "stop": true,
            "model": output.model,
            "tokens_predicted": output.tokens.len(),
            "tokens_evaluated": output.prompt_tokens,
            "tokens_cached": output.cached_tokens,
            "generation_settings": settings,
            "truncated": false,
            "stop_type": kind,
            "stopping_word": word,
            "timings": timings(&ended.statistics),
        })
    }
}

impl Reply for Completion {
    fn piece(&mut self, piece: &Piece, _: &[ReplyPart], output: &ChoiceOutput) -> String {
        let mut value = json!({
            "index": output.index,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": false,
            "tokens_predicted": output.tokens.len(),
            "tokens_evaluated": output.prompt_tokens,
        });
        if self.logprobs {
            value["completion_probabilities"] = token_json::logprobs(&output.engine, &piece.logprobs);
        }
        event(&value)
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        event(&self.selected(self.last(output, ended)))
    }

    /// An object, or for several prompts an array of them, as in llama.cpp.
    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let mut all: Vec<Value> = choices.iter().map(|(output, ended)| self.choice(output, ended)).collect();
        if all.len() == 1 { all.remove(0) } else { Value::Array(all) }
    }
}

/// `POST /apply-template`: the prompt of a chat's messages.
pub(crate) async fn apply_template(State(app): State<Arc<App>>, fields: Fields) -> Result<Response, ApiError> {
    let chat = rendered(&app.served, fields)?;
    let render = move |served: &Served| served.template()?.render(&chat.messages, &chat.options);
    let (prompt, _) = app.run_blocking(app.admit(1)?, "messages", render).await?;
    Ok(reply::json(&json!({"prompt": prompt})))
}

/// Reads the body of `POST /apply-template`.
pub(crate) fn rendered(served: &Served, mut fields: Fields) -> Result<Chat, ApiError> {
    served.check_model(&mut fields)?;
    let (chat, _) = openai_chat::chat(served, &mut fields)?;
    fields.end()?;
    Ok(chat)
}

/// `POST /tokenize`: the tokens of `content`, with one BOS if `add_special` is set or the text begins with it. Names of
/// control tokens are text if `parse_special` is false. A text that is certainly longer than the context is refused.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, mut fields: Fields) -> Result<Response, ApiError> {
    let text = fields.string("content")?.ok_or_else(|| fields.error("content", "is required: a string"))?;
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    let with_pieces = fields.flag("with_pieces")?.unwrap_or(false);
    let parse_special = fields.flag("parse_special")?.unwrap_or(true);
    fields.end()?;
    let written = app.run_blocking(app.admit(1)?, "content", move |served| {
        let tokenizer = served.engine.tokenizer()?;
        prompt::check_length(served, text.len())?;
        // `encode` refuses an empty text, whose only token is BOS.
        let encoded = match parse_special {
            _ if text.is_empty() => Vec::new(),
            true => tokenizer.encode(&text)?,
            false => tokenizer.encode_text(&text)?,
        };
        // `encode` writes BOS, whether or not the text spells it.
        let bos = tokenizer.bos();
        let own = encoded.iter().copied().skip_while(|id| Some(*id) == bos);
        let is_spelled = |bos| tokenizer.token(bos).is_some_and(|name| text.starts_with(&name));
        let tokens = bos.filter(|bos| add_special || parse_special && is_spelled(*bos)).into_iter().chain(own);
        // Written token by token: an array of values would take far more memory than its text.
        let mut body = String::from("{\"tokens\":[");
        for (i, id) in tokens.enumerate() {
            body += if i > 0 { "," } else { "" };
            body += &match with_pieces {
                false => id.to_string(),
                true => json!({"id": id, "piece": piece(tokenizer, id)}).to_string(),
            };
        }
        Ok(body + "]}")
    });
    let (body, _) = written.await?;
    Ok(reply::json_text(body))
}

/// A token's text, or its bytes if they are not UTF-8.
fn piece(tokenizer: &Tokenizer, id: u32) -> Value {
    String::from_utf8(tokenizer.token_bytes(id)).map_or_else(|error| json!(error.into_bytes()), |text| json!(text))
}

/// `POST /detokenize`: the text of `tokens`, without special tokens.
pub(crate) async fn detokenize(State(app): State<Arc<App>>, mut fields: Fields) -> Result<Response, ApiError> {
    let list = fields.list("tokens")?.ok_or_else(|| fields.error("tokens", "is required: an array of token ids"))?;
    let ids = fields.token_ids("tokens", &list)?;
    let vocab = app.served.engine.target().num_readable_tokens();
    if let Some(at) = ids.iter().position(|id| *id as usize >= vocab) {
        let problem = format!("is {}, must be below the vocabulary's size, {vocab}", ids[at]);
        return Err(fields.error(&format!("tokens[{at}]"), problem));
    }
    fields.end()?;
    let decode = move |served: &Served| served.engine.tokenizer()?.decode(&ids);
    let (text, _) = app.run_blocking(app.admit(1)?, "tokens", decode).await?;
    Ok(reply::json(&json!({"content": text})))
}

/// `GET /props`, with the defaults of `/completion`. A seed of -1 is a random one.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Response {
    let served = &app.served;
    let mut params = settings(served, &served.defaults.options());
    params["seed"] = served.defaults.seed.map_or(json!(-1), Value::from);
    let template = served.template().ok();
    reply::json(&json!({
        "default_generation_settings": {"n_ctx": served.context, "params": params},
        "total_slots": served.parallel,
        "model_alias": served.model,
        "model_path": served.model, // the name only: clients need not know the machine's directories
        "chat_template": template.map_or("", ChatTemplate::source),
        "bos_token": template.map_or("", ChatTemplate::bos_token),
        "eos_token": template.map_or("", ChatTemplate::eos_token),
        "n_ctx": served.context,
        "modalities": {"vision": false, "audio": false},
        "build_info": concat!("foretoken ", env!("CARGO_PKG_VERSION")),
    }))
}

/// `GET /slots`: counts, and no text.
///
/// # Errors
/// 503 if none is free and the query has `fail_on_no_slot` with a value.
pub(crate) async fn slots(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let slots = app.worker.slots();
    let is_set = |pair: &str| pair.strip_prefix("fail_on_no_slot=").is_some_and(|value| !value.is_empty());
    let must_have_free = uri.query().is_some_and(|query| query.split('&').any(is_set));
    if must_have_free && slots.iter().all(|slot| slot.request_id.is_some()) {
        let message = format!("no slot is free; all {} are processing requests", slots.len());
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("no_slot"));
    }
    let slots = slots.into_iter().enumerate().map(|(id, slot)| {
        json!({
            "id": id,
            "n_ctx": app.served.context,
            "is_processing": slot.request_id.is_some(),
            "request_id": slot.request_id.as_deref(),
            "n_prompt_tokens": slot.prompt_tokens,
            "n_decoded": slot.generated_tokens,
        })
    });
    Ok(reply::json(&json!(slots.collect::<Vec<_>>())))
}
