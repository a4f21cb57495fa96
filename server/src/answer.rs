//! One way from a request to its answer: admit, tokenize, submit, write.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use foretoken::chat::ReplyParser;

use crate::api_error::ApiError;
use crate::app::{App, RequestId};
use crate::convert::{self, Prompt};
use crate::events::{EventBody, events};
use crate::job::{Ended, Job, Running, Update};
use crate::reply::{Generate, Reply, Written, encode, json, now};

/// Answers a request.
///
/// # Errors
/// Everything that is known before the first token.
pub(crate) async fn answer(
    app: &Arc<App>,
    RequestId(request_id): RequestId,
    generate: Generate,
) -> Result<Response, ApiError> {
    let Generate { prompt, prompt_field, options, choices, streams, reply } = generate;
    let tickets = app.admit(choices)?;
    let admitted = Instant::now();
    let parser = |app: &App| match &prompt {
        Prompt::Chat(chat) => app.engine.tokenizer().ok().map(|tokenizer| ReplyParser::new(tokenizer, &chat.options)),
        _ => None,
    };
    let parsers: Vec<_> = (0..choices).map(|_| parser(app)).collect();
    let (prompt, tickets) =
        encode(app, tickets, prompt_field, move |app| convert::tokens(&app.engine, app.chat_template.as_ref(), prompt))
            .await?;
    let (mut others, mut running) = Running::choices(&options, tickets);
    let written = |(index, parser)| Written {
        engine: app.engine.clone(),
        model: app.model.clone(),
        request_id: request_id.clone(),
        created: now(),
        prompt_tokens: prompt.len(),
        cached_tokens: 0,
        stop_strings: options.stop.strings.clone(),
        index,
        tokens: Vec::new(),
        text: String::new(),
        content: String::new(),
        reasoning: String::new(),
        calls: Vec::new(),
        logprobs: Vec::new(),
        parser,
    };
    let mut written: Vec<_> = parsers.into_iter().enumerate().map(written).collect();
    let choice = others.remove(0);
    let job = Job { prompt: Arc::new(prompt), request_id, admitted, choice, others };
    app.worker.submit(job).map_err(|failure| ApiError::of_failure(&failure, prompt_field))?;
    // Headers follow when the sequence is there, so that what fails until then has a status of its own.
    match running.next().await {
        Some((_, Update::Failed(failure))) => return Err(ApiError::of_failure(&failure, prompt_field)),
        Some((i, Update::Started(cached))) => written[i].cached_tokens = cached,
        _ => {}
    }
    if streams {
        return Ok(events(EventBody::new(running, written, reply)));
    }
    whole(running, written, reply).await.map_err(|error| error(prompt_field))
}

/// Waits for all choices, and answers with one object. An error is still to be told the prompt's field.
async fn whole(
    mut running: Running,
    mut written: Vec<Written>,
    mut reply: Box<dyn Reply>,
) -> Result<Response, impl FnOnce(&str) -> ApiError> {
    let mut ended: Vec<Option<Ended>> = written.iter().map(|_| None).collect();
    while let Some((i, update)) = running.next().await {
        match update {
            Update::Started(_) => {}
            Update::Piece(piece) => drop(written[i].add(&piece)),
            Update::Ended(end) => {
                written[i].finish();
                ended[i] = Some(*end);
            }
            Update::Failed(failure) => return Err(move |field: &str| ApiError::of_failure(&failure, field)),
        }
    }
    let choices: Vec<_> = written.into_iter().zip(ended.into_iter().flatten()).collect();
    Ok(json(&reply.whole(&choices)))
}
