//! Handles a generation request: admission, tokenization, submission, response.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use foretoken::chat::ReplyParser;

use crate::api_error::ApiError;
use crate::app::{App, RequestId};
use crate::convert::{self, Prompt};
use crate::events::{EventBody, events};
use crate::job::{Ended, Job, Running, Update};
use crate::output_penalties;
use crate::reply::{ChoiceOutput, Generate, Reply, encode, json, now};

/// Answers a request.
///
/// # Errors
/// Everything that is known before the first token.
pub(crate) async fn answer(
    app: &Arc<App>,
    RequestId(request_id): RequestId,
    generate: Generate,
) -> Result<Response, ApiError> {
    let Generate { prompt, prompt_field, mut options, penalizes_output, choices, streams, reply } = generate;
    let tickets = app.admit(choices)?;
    let admitted = Instant::now();
    let parser = |app: &App| match &prompt {
        Prompt::Chat(chat) => app.engine.tokenizer().ok().map(|tokenizer| ReplyParser::new(tokenizer, &chat.options)),
        _ => None,
    };
    let parsers: Vec<_> = (0..choices).map(|_| parser(app)).collect();
    let (prompt, tickets) = encode(app, tickets, prompt_field, move |app| {
        convert::tokens(&app.engine, app.chat_template.as_ref(), app.context, prompt)
    })
    .await?;
    if penalizes_output {
        options = output_penalties::apply(options, prompt.len());
    }
    let (mut others, mut running) = Running::choices(&options, tickets);
    let output = |(index, parser)| ChoiceOutput {
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
        logprobs: (!streams).then(Vec::new),
        parser,
    };
    let mut outputs: Vec<_> = parsers.into_iter().enumerate().map(output).collect();
    let choice = others.remove(0);
    let job = Job { prompt: Arc::new(prompt), request_id, admitted, choice, others };
    app.worker.submit(job).map_err(|failure| ApiError::of_failure(&failure, prompt_field))?;
    // The headers are sent once the sequence exists, so that an error before that has a status of its own.
    match running.next().await {
        Some((_, Update::Failed(failure))) => return Err(ApiError::of_failure(&failure, prompt_field)),
        Some((i, Update::Started(cached))) => outputs[i].cached_tokens = cached,
        _ => {}
    }
    match streams {
        true => Ok(events(EventBody::new(running, outputs, reply))),
        false => whole(running, outputs, reply, prompt_field).await,
    }
}

/// Waits for all choices, and answers with one object.
async fn whole(
    mut running: Running,
    mut outputs: Vec<ChoiceOutput>,
    mut reply: Box<dyn Reply>,
    prompt_field: &str,
) -> Result<Response, ApiError> {
    let mut ended: Vec<Option<Ended>> = outputs.iter().map(|_| None).collect();
    while let Some((i, update)) = running.next().await {
        match update {
            Update::Started(_) => {}
            Update::Piece(piece) => drop(outputs[i].add(&piece)),
            Update::Ended(end) => {
                outputs[i].finish();
                ended[i] = Some(*end);
            }
            Update::Failed(failure) => return Err(ApiError::of_failure(&failure, prompt_field)),
        }
    }
    let choices: Vec<_> = outputs.into_iter().zip(ended.into_iter().flatten()).collect();
    Ok(json(&reply.whole(&choices)))
}
