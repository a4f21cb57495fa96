//! Valid bodies of every route with each of their values replaced by others: what is refused is a 400 or 404 that names
//! a field of the body.

use foretoken::chat::ChatTemplate;
use foretoken::{Engine, EngineOptions};
use serde_json::{Value, json};

use crate::api_error::{ApiError, Result};
use crate::defaults::GenerateDefaults;
use crate::fields::Fields;
use crate::prompt::{self, Prompt};
use crate::served::Served;
use crate::{anthropic, llama, openai_chat, openai_completions, openai_responses};

fn served() -> Served {
    let engine = Engine::load(&EngineOptions::new(foretoken_tools::demo("target"))).expect("the demo model");
    let source = "{% for message in messages %}{{ message.content }}{% endfor %}";
    Served {
        model: "demo".into(),
        context: 8192,
        parallel: 4,
        places: 8,
        defaults: GenerateDefaults::default().of_checkpoint(&engine),
        chat_template: Some(ChatTemplate::new(source.into(), "<bos>".into(), "<eos>".into()).expect("a template")),
        engine,
    }
}

/// `body` with `own` fields.
fn with(mut body: Value, own: &Value) -> Value {
    body.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
    body
}

/// A body with `own` beside the fields of all generating routes.
fn generating(own: &Value) -> Value {
    let shared = json!({
        "model": "demo", "stream": true, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.9,
        "top_n_sigma": 1, "xtc_probability": 0.1, "xtc_threshold": 0.2, "dry_multiplier": 1, "dry_base": 2,
        "dry_allowed_length": 3, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n"], "repetition_penalty": 1.1,
        "repeat_last_n": 8, "frequency_penalty": 0.5, "presence_penalty": 0.5, "seed": 5, "ignore_eos": false,
        "stop_token_ids": [5], "logit_bias": {"5": 1}, "samplers": "edskypmxt", "metadata": {"user_id": "a"},
        "speculative": {"enabled": true, "type": "ngram-map-k", "draft_block_size": 4}, "min_tokens": 0,
    });
    with(shared, own)
}

fn chat() -> Value {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let function = json!({"name": "f", "description": "d", "parameters": parameters, "strict": true});
    json!({
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "t"},
            {"role": "system", "content": "late"},
        ],
        "tools": [{"type": "function", "function": function}], "tool_choice": "auto", "parallel_tool_calls": false,
        "chat_template_kwargs": {"enable_thinking": true, "a": [1]}, "reasoning_effort": "low",
        "add_generation_prompt": true, "continue_final_message": false,
    })
}

fn chat_completion() -> Value {
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}});
    let own = json!({
        "stream_options": {"include_usage": true}, "max_completion_tokens": 2, "max_tokens": 2, "stop": ["a"], "n": 2,
        "best_of": 2, "logprobs": true, "top_logprobs": 2, "response_format": format,
    });
    with(generating(&chat()), &own)
}

fn completion() -> Value {
    generating(&json!({
        "prompt": ["a", [2, 5]], "echo": true, "logprobs": 2, "max_tokens": 2, "stop": "a", "n": 2, "best_of": 2,
        "suffix": "", "guided_choice": ["a", "b"], "stream_options": {"include_usage": true},
    }))
}

fn response() -> Value {
    let format = json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": null});
    generating(&json!({
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "summary": []},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "o"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
        "tool_choice": "auto", "parallel_tool_calls": true, "max_output_tokens": 2, "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": format, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"], "background": false, "max_tool_calls": 1, "top_logprobs": 0,
    }))
}

fn anthropic_chat() -> Value {
    let schema = json!({"type": "object", "properties": {}});
    json!({
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": ""}, {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "is_error": true,
                 "content": [{"type": "text", "text": "t"}]},
            ]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": schema, "strict": false}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    })
}

fn message() -> Value {
    let mut body = generating(&anthropic_chat());
    body["max_tokens"] = json!(2);
    body["stop_sequences"] = json!(["a"]);
    body
}

fn llama_completion() -> Value {
    generating(&json!({
        "prompt": "a", "n_predict": 2, "max_tokens": 2, "stop": ["a"], "n_probs": 2, "return_tokens": true,
        "response_fields": ["content"], "json_schema": {"type": "object"}, "cache_prompt": true,
    }))
}

/// What replaces values.
fn others() -> Vec<Value> {
    let nested = (0..100).fold(json!(1), |inner, _| json!([inner]));
    vec![
        Value::Null,
        json!(true),
        json!(0),
        json!(-1),
        json!(2.5),
        json!(1e-45),
        json!(1e308),
        json!(-1e308),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(""),
        json!("\0\n\u{2028}"),
        json!("x".repeat(5000)),
        json!([]),
        json!([null]),
        json!([[], {}]),
        json!({}),
        json!({"\n": 1}),
        json!({"type": 3}),
        nested,
    ]
}

/// The places of all values in `value`, which is at `at`.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Array(items) => (0..).map(|i: usize| i.to_string()).zip(items).collect(),
        Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), field)).collect(),
        _ => Vec::new(),
    };
    for (name, child) in children {
        let place = format!("{at}/{name}");
        places(child, &place, all);
        all.push(place);
    }
}

/// Reads `body`, and then with every value replaced. `field` has the prompts that `read` returns.
fn check(served: &Served, body: &Value, field: &str, read: impl Fn(&Served, Fields) -> Result<Vec<Prompt>>) {
    let tokens = |body: &Value| -> Result<()> {
        let prompts = read(served, Fields::parse(body.to_string().as_bytes())?)?;
        let of_field = |error: foretoken::Error| ApiError::of(&error, field);
        prompts.into_iter().try_for_each(|prompt| prompt::tokens(served, prompt).map(drop).map_err(of_field))
    };
    tokens(body).expect("a valid body");
    let mut all = Vec::new();
    places(body, "", &mut all);
    for place in all {
        for other in others() {
            let mut changed = body.clone();
            *changed.pointer_mut(&place).expect("a value") = other.clone();
            let Err(error) = tokens(&changed) else { continue };
            let param = error.param.as_deref().unwrap_or_default();
            let first = param.split(['.', '[']).next().unwrap_or_default();
            let is_named = body.get(first).is_some() && error.message.starts_with(&format!("{param}: "));
            let is_refusal = [400, 404].contains(&error.status.as_u16());
            let is_line = !error.message.contains(char::is_control);
            assert!(is_named && is_refusal && is_line, "{field}: {place}: {other}: {error:?}");
        }
    }
}

#[test]
fn other_values_are_read_or_refused_by_name() {
    let served = served();
    check(&served, &chat_completion(), "messages", |served, fields| Ok(openai_chat::request(served, fields)?.prompts));
    check(&served, &completion(), "prompt", |served, fields| Ok(openai_completions::request(served, fields)?.prompts));
    check(&served, &response(), "input", |served, fields| Ok(openai_responses::request(served, fields)?.prompts));
    check(&served, &message(), "messages", |served, fields| Ok(anthropic::request(served, fields)?.prompts));
    check(&served, &llama_completion(), "prompt", |served, fields| Ok(llama::request(served, fields)?.prompts));
    check(&served, &anthropic_chat(), "messages", |served, fields| {
        Ok(vec![Prompt::Chat(anthropic::counted(served, fields)?)])
    });
    check(&served, &chat(), "messages", |served, fields| Ok(vec![Prompt::Chat(llama::rendered(served, fields)?)]));
}
