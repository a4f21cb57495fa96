//! The chat page at `/`, one file without external resources, and `/openapi.json`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};

use crate::app::App;
use crate::reply::json_text;

const PAGE: &str = include_str!("page.html");
/// The OpenAPI description of the routes.
const OPENAPI: &str = include_str!("openapi.json");
/// The properties that several of its schemas have, and what stands for them there.
const SHARED: [(&str, &str); 2] = [
    ("\"{generation}\": {}", include_str!("openapi_generation.json")),
    ("\"{formats}\": {}", include_str!("openapi_formats.json")),
];

/// `GET /`. The content security policy allows its own style and script by a nonce, and connections
/// to this server only.
pub(crate) async fn page() -> Response {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
    ];
    (headers, [(CONTENT_SECURITY_POLICY, policy)], PAGE.replace("{nonce}", &nonce)).into_response()
}

/// `GET /openapi.json`.
pub(crate) async fn openapi(State(app): State<Arc<App>>) -> Response {
    let mut text = OPENAPI.replace("{version}", env!("CARGO_PKG_VERSION"));
    for (place, object) in SHARED {
        let properties = object.trim().strip_prefix('{').and_then(|object| object.strip_suffix('}'));
        text = text.replace(place, properties.unwrap_or_default());
    }
    json_text(text.replace("\"{model}\"", &serde_json::json!(app.served.model).to_string()))
}
