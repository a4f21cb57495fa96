//! The router, and the middleware of all routes: request ids, authentication, errors, log.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, StatusCode};
use tokio::sync::watch;

use crate::answer::answer;
use crate::api_error::{Api, ApiError};
use crate::app::{App, RequestContext};
use crate::body::drop_body;
use crate::fields::Fields;
use crate::reply::Generate;
use crate::served::Served;
use crate::{anthropic, info, llama, openai_chat, openai_completions, openai_responses, page};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same in Anthropic's API, where its clients read it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Maximum bytes of a client's request id.
const MAX_REQUEST_ID: usize = 64;
/// Routes that need no API key: health checks have none, and the page asks for it.
const HEALTH: &str = "/health";
const V1_HEALTH: &str = "/v1/health";
const PAGE: &str = "/";

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(PAGE, get(page::page))
        .route("/openapi.json", get(page::openapi))
        .route("/v1/chat/completions", generates(openai_chat::request))
        .route("/chat/completions", generates(openai_chat::request))
        .route("/v1/completions", generates(openai_completions::request))
        .route("/completions", generates(openai_completions::request))
        .route("/v1/responses", generates(openai_responses::request))
        .route("/v1/embeddings", post(info::embeddings))
        .route("/v1/messages", generates(anthropic::request))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(info::models))
        .route("/models", get(info::models))
        .route("/v1/models/{*id}", get(info::one_model))
        .route("/completion", generates(llama::request))
        .route("/apply-template", post(llama::apply_template))
        .route("/tokenize", post(llama::tokenize))
        .route("/detokenize", post(llama::detokenize))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots))
        .route(HEALTH, get(info::health))
        .route(V1_HEALTH, get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/version", get(info::version))
        .method_not_allowed_fallback(info::wrong_method)
        .fallback(info::not_found)
        .layer(from_fn_with_state(app.clone(), middleware))
        .with_state(app)
}

/// A generating route, whose bodies `request` reads.
fn generates(request: fn(&Served, Fields) -> Result<Generate, ApiError>) -> MethodRouter<Arc<App>> {
    post(move |State(app): State<Arc<App>>, context: RequestContext, fields: Fields| async move {
        let generate = request(&app.served, fields)?;
        answer(&app, context, generate).await
    })
}

/// A request's line in the log, which is written when it is dropped: its route's pattern, and nothing of the path, the
/// headers or the body.
struct Logged {
    id: String,
    method: &'static str,
    route: String,
    began: Instant,
    /// The response's; without one the connection is closed.
    status: Option<u16>,
}

impl Drop for Logged {
    fn drop(&mut self) {
        let (request, method, route) = (&self.id, self.method, &self.route);
        let ms = self.began.elapsed().as_millis();
        match self.status {
            Some(status) => tracing::info!(request, method, route, status, ms, "answered"),
            None => tracing::info!(request, method, route, ms, "closed before the response"),
        }
    }
}

/// Gives the request an id, checks its API key, writes errors in the format of the request's API, and logs it.
async fn middleware(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(&request);
    let api = Api::of_request(request.uri().path(), request.headers());
    let route = request.extensions().get::<MatchedPath>().map_or("-", |path| path.as_str()).to_owned();
    let method = method_name(request.method());
    let mut logged = Logged { id: id.clone(), method, route: route.clone(), began, status: None };
    let generated = Arc::<AtomicBool>::default();
    request.extensions_mut().insert(RequestContext { id: id.clone(), generated: generated.clone() });
    let refused = refusal(&app, &route, request.headers());
    let mut response = match refused {
        Some(error) => {
            let _ = unless_aborted(&app.aborting, &generated, drop_body(request)).await;
            error.into_response()
        }
        None => unless_aborted(&app.aborting, &generated, next.run(request)).await.into_response(),
    };
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let allow = response.headers_mut().remove(hyper::header::ALLOW);
        response = error.response(api, &id);
        response.headers_mut().extend(allow.map(|allow| (hyper::header::ALLOW, allow)));
    }
    if response.status() == StatusCode::TOO_MANY_REQUESTS {
        app.metrics.refused();
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        if api == Api::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, value.clone());
        }
        response.headers_mut().insert(REQUEST_ID, value);
    }
    logged.status = Some(response.status().as_u16());
    drop(logged);
    response
}

/// What `work` returns.
///
/// # Errors
/// If the drain timeout ends before it: the request may be at any stage, from the upload of its body on. What is
/// `generated` is written nevertheless.
async fn unless_aborted<T>(
    aborting: &watch::Sender<bool>,
    generated: &AtomicBool,
    work: impl Future<Output = T>,
) -> Result<T, ApiError> {
    let mut aborting = aborting.subscribe();
    let aborted = async {
        let _ = aborting.wait_for(|aborting| *aborting).await;
        if generated.load(Ordering::Relaxed) {
            pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = aborted => Err(ApiError::stopping()),
    }
}

/// The error of a request that no route may see.
fn refusal(app: &App, route: &str, headers: &HeaderMap) -> Option<ApiError> {
    if !app.hosts.admit(headers) {
        let message = "host: not an allowed host name; use localhost or the server's address, or start it with --allowed-host NAME";
        return Some(ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed"));
    }
    if [HEALTH, V1_HEALTH, PAGE].contains(&route) {
        return None;
    }
    if !app.api_keys.admit(headers) {
        let message = "invalid or missing API key; send it as Authorization: Bearer KEY or x-api-key: KEY";
        return Some(ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key"));
    }
    app.stopping.load(Ordering::Acquire).then(ApiError::stopping)
}

/// A standard method's name; else `other`, since a method may be any text of the client's.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::HEAD => "HEAD",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        Method::CONNECT => "CONNECT",
        Method::TRACE => "TRACE",
        _ => "other",
    }
}

/// The client's id, if it is short and consists of letters, digits, '-', '_' and '.'; else a random one.
fn request_id(request: &Request) -> String {
    let plain = |id: &&str| {
        (1..=MAX_REQUEST_ID).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let given = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(plain);
    given.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_generated_is_written_after_the_drain() {
        let aborting = watch::Sender::new(true);
        for is_generated in [false, true] {
            let written = async {
                tokio::task::yield_now().await;
                7
            };
            let result = unless_aborted(&aborting, &AtomicBool::new(is_generated), written).await;
            assert_eq!(result.ok(), is_generated.then_some(7));
        }
    }

    #[test]
    fn the_log_has_standard_methods_only() {
        let name = |method: &str| method_name(&method.parse().expect("a method"));
        for standard in ["GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"] {
            assert_eq!(name(standard), standard);
        }
        assert_eq!([name("MY-SECRET"), name("get")], ["other"; 2]);
    }
}
