//! Routes that say what is served and how it is: models, health, metrics, and what is not there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::reply;

fn model(app: &App) -> Value {
    json!({
        "id": app.model,
        "object": "model",
        "created": app.created,
        "owned_by": "foretoken",
        "max_model_len": app.context,
    })
}

/// `GET /v1/models`.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    reply::json(&json!({"object": "list", "data": [model(&app)]}))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn one_model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    if id != app.model {
        let message = format!("model: is not served here; {:?} is", app.model);
        return Err(ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found"));
    }
    Ok(reply::json(&model(&app)))
}

/// `GET /health`: 200 while requests are taken.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if app.stopping.load(Ordering::Acquire) {
        return Err(ApiError::stopping());
    }
    if !app.worker.is_alive() {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the engine thread has ended; start the server anew",
        ));
    }
    Ok(reply::json(&json!({"status": "ok"})))
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.text(&app.model, &app.engine);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings() -> ApiError {
    let message = "embeddings are not implemented: a Gemma 4 generates text; take a server with an embedding model";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message)
}

/// Any other path.
pub(crate) async fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "there is no such route; docs/server.md has a list of those there are")
}

/// Another method of a path.
pub(crate) async fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "the route has another method; the header `allow` names it")
}
