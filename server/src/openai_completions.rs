//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::{GenerateOptions, Piece, Sampling, TokenLogprobs};
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::app::{App, RequestId};
use crate::convert::{self, MAX_TOP_LOGPROBS};
use crate::fields::Fields;
use crate::job::Ended;
use crate::openai::{self, Streaming};
use crate::reply::{Generate, Reply, Written, answer, event};
use crate::structured::Structured;

pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    id: RequestId,
    fields: Fields,
) -> Result<Response, ApiError> {
    let (generate, structured) = request(&app, fields)?;
    structured.compile(&app).await?;
    answer(&app, id, generate).await
}

fn request(app: &App, mut fields: Fields) -> Result<(Generate, Structured), ApiError> {
    app.check_model(&mut fields)?;
    let prompt = convert::prompt(&mut fields, "prompt")?;
    let streaming = openai::streaming(&mut fields)?;
    let most = fields.count("max_tokens", 1..=usize::MAX)?;
    let strings = convert::stop_strings(&mut fields, "stop")?;
    let structured = Structured::response_format(&mut fields)?;
    let options = GenerateOptions {
        constraint: structured.constraint.clone(),
        stop: convert::stop(&mut fields, strings)?,
        logprobs: fields.count("logprobs", 0..=MAX_TOP_LOGPROBS)?,
        ..convert::options(&mut fields, &app.defaults, &Sampling::default(), most)?
    };
    openai::take_inert(&mut fields)?;
    fields.only("best_of", &[json!(1)])?;
    fields.only("echo", &[json!(false)])?;
    fields.only("suffix", &[json!("")])?;
    fields.end()?;
    let generate = Generate {
        prompt,
        prompt_field: "prompt",
        reply: Box::new(Completion { streaming, logprobs: options.logprobs.is_some(), offset: 0 }),
        options,
        streams: streaming.streams,
    };
    Ok((generate, structured))
}

struct Completion {
    streaming: Streaming,
    logprobs: bool,
    /// Characters of the tokens in front of the next piece's.
    offset: usize,
}

impl Completion {
    fn object(&self, written: &Written, choices: Value) -> Value {
        json!({
            "id": format!("cmpl-{}", written.request_id),
            "object": "text_completion",
            "created": written.created,
            "model": written.model,
            "choices": choices,
        })
    }

    fn choice(&mut self, written: &Written, (text, logprobs): (&str, &[TokenLogprobs]), reason: Option<&str>) -> Value {
        let logprobs = self.logprobs.then(|| self.lists(written, logprobs));
        json!([{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}])
    }

    /// The older form of log-probabilities: a list for each of their parts.
    fn lists(&mut self, written: &Written, logprobs: &[TokenLogprobs]) -> Value {
        let token = |id| {
            let bytes = written.engine.tokenizer().map(|tokenizer| convert::token_bytes(tokenizer, id));
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        let (mut tokens, mut values, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for of in logprobs {
            let text = token(of.token);
            offsets.push(self.offset);
            self.offset += text.chars().count();
            let best = of.top.iter().map(|(id, logprob)| (token(*id), json!(logprob)));
            top.push(best.collect::<Map<_, _>>());
            values.push(of.logprob);
            tokens.push(text);
        }
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
    }
}

impl Reply for Completion {
    fn piece(&mut self, piece: &Piece, written: &Written) -> String {
        if piece.text.is_empty() && piece.logprobs.is_empty() {
            return String::new();
        }
        let choice = self.choice(written, (&piece.text, &piece.logprobs), None);
        event(&self.object(written, choice))
    }

    fn end(&mut self, written: &Written, ended: &Ended) -> String {
        let choice = self.choice(written, ("", &[]), Some(openai::finish_reason(ended)));
        let (last, empty) = (self.object(written, choice), self.object(written, json!([])));
        openai::last_events(self.streaming, [last, empty], written, ended)
    }

    fn whole(&mut self, written: &Written, ended: &Ended) -> Value {
        let reason = openai::finish_reason(ended);
        let choice = self.choice(written, (&written.text, &written.logprobs), Some(reason));
        let mut whole = self.object(written, choice);
        whole["usage"] = openai::usage(written);
        whole["timings"] = convert::timings(&ended.statistics);
        whole
    }
}
