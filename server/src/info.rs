//! Models, health, version, metrics, and the responses of routes that do not exist.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::body::drop_body;
use crate::reply;

/// With OpenAI's fields and Anthropic's.
fn model(app: &App) -> Value {
    json!({
        "id": app.served.model,
        "object": "model",
        "created": app.created,
        "owned_by": "foretoken",
        "max_model_len": app.served.context,
        "type": "model",
        "display_name": app.served.model,
        "created_at": "1970-01-01T00:00:00Z", // the release date is unknown
        "lifecycle": "active",
    })
}

/// `GET /v1/models`, as one page.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    reply::json(&json!({
        "object": "list",
        "data": [model(&app)],
        "first_id": app.served.model,
        "last_id": app.served.model,
        "has_more": false,
    }))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn one_model(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    // A path that is not UTF-8 is refused.
    if !id.is_ok_and(|Path(id)| id == app.served.model) {
        let message = format!("model not found; this server serves {:?}", app.served.model);
        return Err(ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found"));
    }
    Ok(reply::json(&model(&app)))
}

/// `GET /health`: 200 while requests are accepted and can be served.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if app.stopping.load(Ordering::Acquire) {
        return Err(ApiError::stopping());
    }
    if !app.worker.is_alive() {
        return Err(ApiError::engine_stopped(StatusCode::SERVICE_UNAVAILABLE));
    }
    if app.worker.has_lost_device() {
        return Err(ApiError::device_lost());
    }
    Ok(reply::json(&json!({"status": "ok"})))
}

/// `GET /version`, as vLLM's.
pub(crate) async fn version() -> Response {
    reply::json(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.text(&app.served.model, &app.served.engine);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings(request: Request) -> ApiError {
    drop_body(request).await;
    let message = "embeddings are not supported: this server has no embedding model";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message)
}

/// Unknown paths.
pub(crate) async fn not_found(request: Request) -> ApiError {
    drop_body(request).await;
    ApiError::new(StatusCode::NOT_FOUND, "not found; docs/server.md lists the routes")
}

/// Unknown methods of known paths.
pub(crate) async fn wrong_method(request: Request) -> ApiError {
    drop_body(request).await;
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method not allowed; the header `allow` names the one that is")
}
