//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::chat::ReplyPart;
use foretoken::{GenerateOptions, Piece, Sampling, TokenLogprobs};
use serde_json::{Map, Value, json};

use crate::answer::answer;
use crate::api_error::ApiError;
use crate::app::{App, RequestId};
use crate::convert::{self, MAX_TOP_LOGPROBS};
use crate::fields::Fields;
use crate::job::Ended;
use crate::openai::{self, Form};
use crate::reply::{Generate, Reply, Written, event};
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
    let form = openai::form(&mut fields)?;
    let most = fields.count("max_tokens", 1..=usize::MAX)?;
    let strings = convert::stop_strings(&mut fields, "stop")?;
    let structured = Structured::response_format(&mut fields)?;
    let options = GenerateOptions {
        constraint: structured.constraint.clone(),
        stop: convert::stop(&mut fields, strings)?,
        logprobs: fields.count("logprobs", 0..=MAX_TOP_LOGPROBS)?,
        ..convert::options(&mut fields, (&app.engine, &app.defaults), &Sampling::default(), most)?
    };
    let choices = openai::choices(&mut fields, app.parallel)?;
    openai::take_inert(&mut fields)?;
    fields.only("best_of", &[json!(1)])?;
    fields.only("echo", &[json!(false)])?;
    fields.only("suffix", &[json!("")])?;
    fields.end()?;
    let generate = Generate {
        prompt,
        prompt_field: "prompt",
        reply: Box::new(Completion {
            form: Form { logprobs: options.logprobs.is_some(), ..form },
            offsets: vec![0; choices],
        }),
        options,
        choices,
        streams: form.streams,
    };
    Ok((generate, structured))
}

struct Completion {
    form: Form,
    /// Of every choice, characters of the tokens in front of the next piece's.
    offsets: Vec<usize>,
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
        let logprobs = self.form.logprobs.then(|| self.lists(written, logprobs));
        json!({"index": written.index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    }

    /// The older form of log-probabilities: a list for each of their parts.
    fn lists(&mut self, written: &Written, logprobs: &[TokenLogprobs]) -> Value {
        let offset = &mut self.offsets[written.index];
        let token = |id| {
            let bytes = written.engine.tokenizer().map(|tokenizer| convert::token_bytes(tokenizer, id));
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        let (mut tokens, mut values, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for of in logprobs {
            let text = token(of.token);
            offsets.push(*offset);
            *offset += text.chars().count();
            let best = of.top.iter().map(|(id, logprob)| (token(*id), json!(logprob)));
            top.push(best.collect::<Map<_, _>>());
            values.push(of.logprob);
            tokens.push(text);
        }
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
    }
}

impl Reply for Completion {
    fn piece(&mut self, piece: &Piece, _: &[ReplyPart], written: &Written) -> String {
        if piece.text.is_empty() && piece.logprobs.is_empty() && !self.form.token_origins {
            return String::new();
        }
        let mut choice = self.choice(written, (&piece.text, &piece.logprobs), None);
        if self.form.token_origins {
            choice["tokens"] = convert::origins(&written.engine, piece);
        }
        event(&self.object(written, json!([choice])))
    }

    fn end(&mut self, written: &Written, ended: &Ended) -> String {
        let choice = self.choice(written, ("", &[]), Some(openai::finish_reason(written, ended)));
        openai::last_chunk(self.object(written, json!([choice])), ended)
    }

    fn close(&mut self, choices: &[Written]) -> String {
        openai::last_events(self.form, self.object(&choices[0], json!([])), choices)
    }

    fn whole(&mut self, choices: &[(Written, Ended)]) -> Value {
        let mut list = Vec::new();
        for (written, ended) in choices {
            let reason = openai::finish_reason(written, ended);
            list.push(self.choice(written, (&written.text, &written.logprobs), Some(reason)));
        }
        let (written, ended) = &choices[0];
        let mut whole = self.object(written, json!(list));
        whole["usage"] = openai::usage(choices.iter().map(|(written, _)| written));
        whole["timings"] = convert::timings(&ended.statistics);
        whole
    }
}
