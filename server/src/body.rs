//! Reads the bodies of requests, with limits of size and time.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use hyper::body::Body as _;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, EXPECT};
use hyper::{HeaderMap, StatusCode};
use tokio::time::timeout;

use crate::api_error::ApiError;
use crate::fields::Fields;

/// Maximum bytes of a request's body.
const MAX_BODY: usize = 4 << 20;
/// Maximum bytes read of a body that is dropped, after which its connection is closed.
const MAX_DROPPED: usize = 64 << 20;
/// Time within which a body must be received.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

impl<S: Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    /// The JSON object in the body. The type must be `application/json`: a web page of another origin cannot send that
    /// without a CORS preflight, which this server does not answer.
    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let problem = if !is_json(request.headers()) {
            "content-type: must be application/json"
        } else if !is_identity(request.headers()) {
            "content-encoding: only identity is supported; send the body uncompressed"
        } else {
            return Fields::parse(&read(request, MAX_BODY).await?);
        };
        drop_body(request).await;
        Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, problem))
    }
}

/// Reads and drops the body of a request that is refused. If it was left unread, a client that is still sending would
/// have its connection reset before it reads the response. One that waits for `100 Continue` sends nothing.
pub(crate) async fn drop_body(request: Request) {
    if request.headers().contains_key(EXPECT) {
        return;
    }
    // An error is a body that is too long, late or ends early: the response is sent at once.
    let _ = read(request, 0).await;
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// Whether the body is sent as it is.
fn is_identity(headers: &HeaderMap) -> bool {
    headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity"))
}

/// The bytes of a body, at most `most`, within a limit of time.
async fn read(request: Request, most: usize) -> Result<Vec<u8>, ApiError> {
    timeout(BODY_TIMEOUT, bytes(request.into_body(), most)).await.unwrap_or_else(|_| {
        let message = format!("body: was not received within {} s", BODY_TIMEOUT.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
    })
}

/// As [`read`]. Bytes beyond `most` are read and dropped, up to a second limit, as [`drop_body`] does.
async fn bytes(mut body: Body, most: usize) -> Result<Vec<u8>, ApiError> {
    let (mut bytes, mut length) = (Vec::new(), 0);
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|_| ApiError::field("body", "ended early"))?;
        let data = frame.data_ref().map_or(&[][..], |data| data);
        length += data.len();
        match length {
            _ if length > MAX_DROPPED => break,
            _ if length > most => bytes = Vec::new(),
            _ => bytes.extend_from_slice(data),
        }
    }
    if length > most {
        let error = ApiError::field("body", format!("is longer than {most} bytes; shorten the prompt"));
        return Err(ApiError { status: StatusCode::PAYLOAD_TOO_LARGE, ..error });
    }
    Ok(bytes)
}
