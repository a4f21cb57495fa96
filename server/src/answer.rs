//! Handles a generation request: compilation of its constraint, admission, tokenization, submission, response.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::response::Response;
use foretoken::CompiledConstraint;
use foretoken::chat::ReplyParser;
use foretoken_tools::sampling::breakers;

use crate::api_error::ApiError;
use crate::app::{App, RequestContext};
use crate::events::{EventBody, events};
use crate::generate_options::{Common, random_seed};
use crate::job::{Ended, Failure, Job, Running, Ticket, Update};
use crate::output_penalties;
use crate::prompt::{self, Prompt};
use crate::reply::{ChoiceOutput, Generate, Reply, json, now};

/// Answers a request.
///
/// # Errors
/// Everything that is known before the first token.
pub(crate) async fn answer(
    app: &Arc<App>,
    RequestContext { id: request_id, generated }: RequestContext,
    mut generate: Generate,
) -> Result<Response, ApiError> {
    let (mut constraint, mut constraint_name) = (None, String::new());
    if let Some(structured) = generate.common.structured.take() {
        constraint_name = structured.field().to_owned();
        constraint = structured.compile(&app.served.engine, &app.compilers).await?;
    }
    let (prompts, choices, streams) = (std::mem::take(&mut generate.prompts), generate.choices, generate.streams);
    let tickets = app.admit(prompts.len() * choices)?;
    let admitted = Instant::now();
    let parsers: Vec<_> = prompts.iter().flat_map(|prompt| (0..choices).map(|_| parser(app, prompt))).collect();
    let names = names(generate.prompt_field, prompts.len());
    let tickets = find_breakers(app, tickets, &mut generate.common).await?;
    let (encoded, tickets) = encode_all(app, tickets, prompts, &names).await?;
    check_lengths(app, &generate, &encoded)?;
    let seeds: Vec<_> = encoded.iter().map(|_| generate.common.seed.unwrap_or_else(random_seed)).collect();
    let output = |(index, parser): (usize, _)| {
        let prompt = index / choices;
        ChoiceOutput {
            engine: app.served.engine.clone(),
            model: app.served.model.clone(),
            request_id: request_id.clone(),
            created: now(),
            prompt,
            seed: seeds[prompt],
            prompt_name: names[prompt].clone(),
            constraint_name: constraint_name.clone(),
            prompt_tokens: encoded[prompt].len(),
            first_token: encoded[prompt].first().copied().unwrap_or_default(),
            prompt_logprobs: Vec::new(),
            cached_tokens: 0,
            stop_strings: generate.common.options.stop.strings.clone(),
            index,
            tokens: Vec::new(),
            parts: Vec::new(),
            logprobs: (!streams).then(Vec::new),
            parser,
        }
    };
    let mut outputs: Vec<_> = parsers.into_iter().enumerate().map(output).collect();
    let prompts = encoded.into_iter().zip(seeds).collect();
    let submitted = submit(app, &generate, constraint, request_id.into(), admitted, prompts, tickets);
    let mut running = submitted.map_err(|failure| outputs[0].error(&failure))?;
    // The headers are sent once a sequence exists, so that an error before that has a status of its own. Tokens that
    // its forks have by then are left to the response.
    match running.next_of_first().await {
        Some(Update::Failed(failure)) => return Err(outputs[0].error(&failure)),
        Some(Update::Started(cached)) => outputs[0].cached_tokens = cached,
        _ => {}
    }
    if streams {
        return Ok(events(EventBody::new(running, outputs, generate.reply)));
    }
    whole(running, outputs, generate.reply, &generated).await
}

/// Checks what depends on the lengths of the prompts.
///
/// # Errors
/// 400 if the context has no room for the minimum of tokens, or there are too many log-probabilities.
fn check_lengths(app: &App, generate: &Generate, prompts: &[Vec<u32>]) -> Result<(), ApiError> {
    if let Some(least) = &generate.common.min_tokens {
        prompts.iter().try_for_each(|prompt| least.check(prompt.len(), app.served.context))?;
    }
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    check_logprobs(tokens.saturating_mul(generate.choices), generate.common.options.prompt_logprobs)
}

/// Maximum number of log-probabilities of prompts in a response, about 150 bytes each while it is written.
const MAX_PROMPT_LOGPROBS: usize = 4 << 20;

/// # Errors
/// 400 if those of so many tokens, with the `top` most probable ones of each, are too many.
fn check_logprobs(tokens: usize, top: Option<usize>) -> Result<(), ApiError> {
    let count = top.map_or(0, |top| tokens.saturating_mul(1 + top));
    if count <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let problem =
        format!("asks for {count} log-probabilities of prompts, a response has at most {MAX_PROMPT_LOGPROBS}");
    Err(ApiError::field("logprobs", problem + "; lower it or n, or send shorter or fewer prompts"))
}

/// Finds the tokens of the request's own sequence breakers of DRY, if it is on: a search of the vocabulary.
async fn find_breakers(app: &Arc<App>, tickets: Vec<Ticket>, common: &mut Common) -> Result<Vec<Ticket>, ApiError> {
    let (Some(strings), Some(dry)) = (common.breakers.take(), &mut common.options.sampling.dry) else {
        return Ok(tickets);
    };
    let found = app.run_blocking(tickets, "dry_sequence_breakers", move |served| {
        Ok(breakers(served.engine.tokenizer()?, strings.iter().map(String::as_str)))
    });
    let (breakers, tickets) = found.await?;
    dry.breakers = breakers;
    Ok(tickets)
}

/// Submits a job for every prompt, which comes with its seed.
fn submit(
    app: &App,
    generate: &Generate,
    constraint: Option<CompiledConstraint>,
    request_id: Arc<str>,
    admitted: Instant,
    prompts: Vec<(Vec<u32>, u64)>,
    tickets: Vec<Ticket>,
) -> Result<Running, Failure> {
    let (mut running, mut tickets) = (Running::default(), tickets.into_iter());
    for (prompt, seed) in prompts {
        let mut options = generate.common.options.clone();
        if generate.common.penalizes_output {
            options = output_penalties::apply(options, prompt.len());
        }
        if let Some(least) = &generate.common.min_tokens {
            least.apply(&mut options, prompt.len());
        }
        options.seed = seed;
        options.constraint = constraint.as_ref().map(|compiled| compiled.constraint().clone());
        let (mut others, more) = Running::choices(&options, tickets.by_ref().take(generate.choices).collect());
        running.append(more);
        let (choice, request_id, constraint) = (others.remove(0), request_id.clone(), constraint.clone());
        let job = Job { prompt: Arc::new(prompt), request_id, admitted, constraint, choice, others };
        app.worker.submit(job)?;
    }
    Ok(running)
}

/// The names of the prompts of a field.
fn names(field: &str, prompts: usize) -> Vec<String> {
    match prompts {
        1 => vec![field.to_owned()],
        _ => (0..prompts).map(|i| format!("{field}[{i}]")).collect(),
    }
}

/// The tokens of all prompts.
async fn encode_all(
    app: &Arc<App>,
    mut tickets: Vec<Ticket>,
    prompts: Vec<Prompt>,
    names: &[String],
) -> Result<(Vec<Vec<u32>>, Vec<Ticket>), ApiError> {
    let mut encoded = Vec::new();
    for (prompt, name) in prompts.into_iter().zip(names) {
        let (tokens, held) = app.run_blocking(tickets, name, move |served| prompt::tokens(served, prompt)).await?;
        tickets = held;
        encoded.push(tokens);
    }
    Ok((encoded, tickets))
}

/// The parser of a chat's reply.
fn parser(app: &App, prompt: &Prompt) -> Option<ReplyParser> {
    match prompt {
        Prompt::Chat(chat) => {
            app.served.engine.tokenizer().ok().map(|tokenizer| ReplyParser::new(tokenizer, &chat.options))
        }
        _ => None,
    }
}

/// Waits for all choices, and answers with one object. It is written on a thread of its own: with the log-probabilities
/// of long texts this takes seconds, which would delay the connections of the same thread.
async fn whole(
    mut running: Running,
    mut outputs: Vec<ChoiceOutput>,
    mut reply: Box<dyn Reply>,
    generated: &AtomicBool,
) -> Result<Response, ApiError> {
    let mut ended: Vec<Option<Ended>> = outputs.iter().map(|_| None).collect();
    while let Some((i, update)) = running.next().await {
        match update {
            Update::Started(cached) => outputs[i].cached_tokens = cached,
            Update::Piece(piece) => drop(outputs[i].add(&piece)),
            Update::Ended(end) => {
                outputs[i].finish();
                ended[i] = Some(*end);
            }
            Update::Failed(failure) => return Err(outputs[i].error(&failure)),
        }
    }
    generated.store(true, Ordering::Relaxed);
    let choices: Vec<_> = outputs.into_iter().zip(ended.into_iter().flatten()).collect();
    let written = tokio::task::spawn_blocking(move || json(&reply.whole(&choices))).await;
    written.map_err(|_| ApiError::internal())
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};

    use foretoken::Piece;
    use foretoken::chat::ReplyPart;
    use serde_json::Value;

    use super::*;

    /// Writes whether it is on another thread than this one, after the texts were said to be generated.
    struct Elsewhere(ThreadId, Arc<AtomicBool>);

    impl Reply for Elsewhere {
        fn piece(&mut self, _: &Piece, _: &[ReplyPart], _: &ChoiceOutput) -> String {
            String::new()
        }

        fn end(&mut self, _: &ChoiceOutput, _: &Ended) -> String {
            String::new()
        }

        fn whole(&mut self, _: &[(ChoiceOutput, Ended)]) -> Value {
            Value::from(thread::current().id() != self.0 && self.1.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn log_probabilities_of_prompts_have_a_maximum() {
        let most = MAX_PROMPT_LOGPROBS / 21;
        for (tokens, top, fits) in [
            (most, Some(20), true),
            (most + 1, Some(20), false),
            (MAX_PROMPT_LOGPROBS, Some(0), true),
            (usize::MAX, Some(1), false),
            (usize::MAX, None, true),
        ] {
            assert_eq!(check_logprobs(tokens, top).is_ok(), fits, "{tokens} tokens, {top:?}");
        }
    }

    #[tokio::test]
    async fn responses_are_not_written_on_the_threads_of_connections() {
        let generated = Arc::<AtomicBool>::default();
        let reply = Box::new(Elsewhere(thread::current().id(), generated.clone()));
        let response = whole(Running::default(), Vec::new(), reply, &generated).await.expect("a response");
        let body = axum::body::to_bytes(response.into_body(), 16).await.expect("a body");
        assert_eq!(body.as_ref(), b"true");
    }
}
