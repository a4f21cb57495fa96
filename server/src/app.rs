//! The state that all routes share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::extract::FromRequestParts;
use foretoken::Engine;
use foretoken::chat::ChatTemplate;
use hyper::StatusCode;
use hyper::http::request::Parts;
use tokio::sync::watch;

use crate::api_error::ApiError;
use crate::auth::ApiKeys;
use crate::compiler::Compilers;
use crate::defaults::GenerateDefaults;
use crate::fields::Fields;
use crate::hosts::Hosts;
use crate::job::Ticket;
use crate::metrics::Metrics;
use crate::worker::Worker;

pub(crate) struct App {
    pub engine: Engine,
    pub worker: Worker,
    pub compilers: Compilers,
    pub metrics: Arc<Metrics>,
    /// The model's name in requests and answers.
    pub model: String,
    /// When the server was started, in Unix time.
    pub created: u64,
    /// Maximum tokens of a sequence.
    pub context: usize,
    pub parallel: usize,
    pub defaults: GenerateDefaults,
    /// Overrides the checkpoint's.
    pub chat_template: Option<ChatTemplate>,
    pub api_keys: ApiKeys,
    pub hosts: Hosts,
    /// Set when shutdown begins.
    pub stopping: AtomicBool,
    /// Becomes true when requests that are not answered yet get an error.
    pub aborting: watch::Sender<bool>,
}

impl App {
    /// Reserves as many places in the queue.
    ///
    /// # Errors
    /// 429 if fewer are free.
    pub fn admit(&self, places: usize) -> Result<Vec<Ticket>, ApiError> {
        self.worker.admit(places).ok_or_else(|| {
            self.metrics.refused();
            ApiError::queue_full(self.worker.limit())
        })
    }

    /// Does work whose time depends on the text of the field `field` on a thread of its own, not on those of
    /// connections. It is not cancelled if the client disconnects, and holds the request's places until it is done:
    /// so its queue is bounded as that of requests is.
    ///
    /// # Errors
    /// Those of the work.
    pub async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        places: Vec<Ticket>,
        field: &str,
        work: impl FnOnce(&Self) -> foretoken::Result<T> + Send + 'static,
    ) -> Result<(T, Vec<Ticket>), ApiError> {
        let app = self.clone();
        let done = tokio::task::spawn_blocking(move || (work(&app), places)).await;
        let (result, places) = done.map_err(|_| ApiError::internal())?;
        Ok((result.map_err(|error| ApiError::of(&error, field))?, places))
    }

    /// The template of chats.
    ///
    /// # Errors
    /// If there is none, or it does not compile.
    pub fn template(&self) -> foretoken::Result<&ChatTemplate> {
        self.chat_template.as_ref().map_or_else(|| self.engine.chat_template(), Ok)
    }

    /// # Errors
    /// If a request with so many choices of all prompts can never be admitted.
    pub fn check_places(&self, fields: &Fields, choices: usize) -> Result<(), ApiError> {
        let limit = self.worker.limit();
        if choices <= limit {
            return Ok(());
        }
        let problem =
            format!("needs {choices} places, but the queue has {limit}; send fewer prompts, or raise --max-queue");
        Err(fields.error("prompt", problem))
    }

    /// Takes the optional field `model`.
    ///
    /// # Errors
    /// 404 if it is another model's name.
    pub fn check_model(&self, fields: &mut Fields) -> Result<(), ApiError> {
        match fields.string("model")? {
            Some(model) if !model.is_empty() && model != self.model => {
                let problem = format!("model not found; this server serves {:?} (the field is optional)", self.model);
                let error = fields.error("model", problem).with_code("model_not_found");
                Err(ApiError { status: StatusCode::NOT_FOUND, ..error })
            }
            _ => Ok(()),
        }
    }
}

/// The request's id, set by the middleware.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub String);

impl<S: Sync> FromRequestParts<S> for RequestId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get().cloned().ok_or_else(ApiError::internal)
    }
}
