//! `POST /v1/chat/completions`.

use foretoken::chat::{ChatOptions, ReplyPart, ToolCall};
use foretoken::{Piece, TokenLogprobs};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::generate_options::{self, MAX_TOP_LOGPROBS};
use crate::ignored::take_ignored;
use crate::job::Ended;
use crate::openai::{self, Form};
use crate::prompt::{Chat, Prompt};
use crate::reply::{ChoiceOutput, Generate, Reply, event};
use crate::served::Served;
use crate::tools::{self, OtherTools, Tools};
use crate::{messages, structured, token_json};

/// Reads the body.
pub(crate) fn request(served: &Served, mut fields: Fields) -> Result<Generate, ApiError> {
    served.check_model(&mut fields)?;
    let (chat, tools) = chat(served, &mut fields)?;
    let form = openai::form(&mut fields)?;
    let most = match generate_options::max_tokens(&mut fields, "max_completion_tokens", 1)? {
        Some(most) => {
            fields.ignore(&["max_tokens"]); // the older name
            Some(most)
        }
        None => generate_options::max_tokens(&mut fields, "max_tokens", 1)?,
    };
    let strings = fields.strings("stop")?;
    let format = structured::of_request(&mut fields)?;
    let calls = tools.calls;
    let structured = tools.constrain(&chat.options, format)?;
    let base = served.defaults.of_chats();
    let mut common = generate_options::common(&mut fields, served, base, most, strings, structured)?;
    common.options.logprobs = logprobs(&mut fields)?;
    calls.limit(&served.engine, &mut common.options.stop);
    let choices = openai::choices(&mut fields, served.parallel)?;
    take_ignored(&mut fields, &common.options.sampling)?;
    fields.only("modalities", &[json!(["text"])])?;
    fields.end()?;
    Ok(Generate {
        prompts: vec![Prompt::Chat(chat)],
        prompt_field: "messages",
        reply: Box::new(Completion { form: Form { logprobs: common.options.logprobs.is_some(), ..form } }),
        common,
        choices,
        streams: form.streams,
    })
}

/// Takes the messages, the tools, and what the template is rendered with.
pub(crate) fn chat(served: &Served, fields: &mut Fields) -> Result<(Chat, Tools), ApiError> {
    let messages = messages::openai(fields)?;
    let tools = tools::openai(fields, OtherTools::Refused)?;
    let generation_prompt = messages::generation_prompt(fields)?;
    let template_options = tools::template_options(fields, &served.defaults)?;
    let options = ChatOptions { tools: tools.list.clone(), generation_prompt, ..template_options };
    Ok((Chat::new(served, messages, options, fields.body_bytes), tools))
}

/// Takes `logprobs` and `top_logprobs`.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let logprobs = fields.flag("logprobs")?.unwrap_or(false);
    match fields.count("top_logprobs", 0..=MAX_TOP_LOGPROBS)? {
        Some(1..) if !logprobs => Err(fields.error("top_logprobs", "is allowed only with logprobs: true")),
        top => Ok(logprobs.then_some(top.unwrap_or(0))),
    }
}

/// Begins the ids.
const PREFIX: &str = "chatcmpl";

struct Completion {
    form: Form,
}

impl Completion {
    fn chunk(&self, output: &ChoiceOutput, choices: Value) -> Value {
        openai::chunk(self.form, output, openai::object(output, (PREFIX, "chat.completion.chunk"), choices))
    }

    fn delta(&self, output: &ChoiceOutput, delta: Value) -> Value {
        let choice = json!({"index": output.index, "delta": delta, "logprobs": null, "finish_reason": null});
        self.chunk(output, json!([choice]))
    }
}

/// A call in OpenAI's format.
fn tool_call(call: &ToolCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": call.id, "type": "function", "function": function})
}

impl Reply for Completion {
    fn begin(&mut self, output: &ChoiceOutput) -> String {
        event(&self.delta(output, json!({"role": "assistant", "content": ""})))
    }

    fn piece(&mut self, piece: &Piece, parts: &[ReplyPart], output: &ChoiceOutput) -> String {
        let of_calls = parts.iter().filter(|part| matches!(part, ReplyPart::ToolCall(_))).count();
        let mut call_index = output.calls().count() - of_calls;
        let delta = |part: &ReplyPart| match part {
            ReplyPart::Reasoning(text) => json!({"reasoning_content": text}),
            ReplyPart::ToolCall(call) => {
                let mut call = tool_call(call);
                call["index"] = json!(call_index);
                call_index += 1;
                json!({"tool_calls": [call]})
            }
            ReplyPart::Text(text) => json!({"content": text}),
            _ => json!({}),
        };
        let mut deltas: Vec<Value> = parts.iter().map(delta).collect();
        if deltas.is_empty() && (!piece.logprobs.is_empty() || self.form.token_origins) {
            deltas.push(json!({"content": ""}));
        }
        let mut chunks: Vec<Value> = deltas.into_iter().map(|delta| self.delta(output, delta)).collect();
        // The first chunk has all of the piece's tokens: some are in no part.
        if let Some(choice) = chunks.first_mut().map(|chunk| &mut chunk["choices"][0]) {
            if self.form.logprobs {
                choice["logprobs"] = choice_logprobs(output, &piece.logprobs);
            }
            if self.form.token_origins {
                choice["tokens"] = token_json::origins(&output.engine, piece);
            }
        }
        chunks.iter().map(event).collect()
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        let mut chunk = self.delta(output, json!({}));
        chunk["choices"][0]["finish_reason"] = json!(openai::finish_reason(output, ended));
        openai::last_chunk(chunk, ended)
    }

    fn close(&mut self, choices: &[ChoiceOutput]) -> String {
        openai::last_events(self.form, self.chunk(&choices[0], json!([])), choices)
    }

    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let choice = |(output, ended): &(ChoiceOutput, Ended)| {
            let (text, reasoning) = (output.content(), output.reasoning());
            let calls: Vec<_> = output.calls().map(tool_call).collect();
            let mut message = json!({"role": "assistant", "content": text, "refusal": null});
            if !reasoning.is_empty() {
                message["reasoning_content"] = json!(reasoning);
            }
            if !calls.is_empty() {
                message["tool_calls"] = json!(calls);
                if text.is_empty() {
                    message["content"] = Value::Null;
                }
            }
            json!({
                "index": output.index,
                "message": message,
                "logprobs": self.form.logprobs.then(|| choice_logprobs(output, output.logprobs())),
                "finish_reason": openai::finish_reason(output, ended),
            })
        };
        let list = choices.iter().map(choice).collect();
        openai::whole(choices, openai::object(&choices[0].0, (PREFIX, "chat.completion"), list))
    }
}

/// The field `logprobs` of a choice.
fn choice_logprobs(output: &ChoiceOutput, logprobs: &[TokenLogprobs]) -> Value {
    json!({"content": token_json::logprobs(&output.engine, logprobs), "refusal": null})
}
