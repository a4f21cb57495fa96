//! The state that all routes share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::extract::FromRequestParts;
use hyper::http::request::Parts;
use tokio::sync::watch;

use crate::api_error::ApiError;
use crate::auth::ApiKeys;
use crate::compiler::Compilers;
use crate::hosts::Hosts;
use crate::job::Ticket;
use crate::metrics::Metrics;
use crate::served::Served;
use crate::worker::Worker;

pub(crate) struct App {
    pub served: Served,
    pub worker: Worker,
    pub compilers: Compilers,
    pub metrics: Arc<Metrics>,
    /// When the server was started, in Unix time.
    pub created: u64,
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
        self.worker.admit(places).ok_or_else(|| ApiError::queue_full(self.worker.limit()))
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
        work: impl FnOnce(&Served) -> foretoken::Result<T> + Send + 'static,
    ) -> Result<(T, Vec<Ticket>), ApiError> {
        let app = self.clone();
        let done = tokio::task::spawn_blocking(move || (work(&app.served), places)).await;
        let (result, places) = done.map_err(|_| ApiError::internal())?;
        Ok((result.map_err(|error| ApiError::of(&error, field))?, places))
    }
}

/// What the middleware and a request's route share.
#[derive(Clone, Debug)]
pub(crate) struct RequestContext {
    pub id: String,
    /// Set when all texts of a response that is not streamed are generated: it is then written, even if the drain
    /// timeout ends.
    pub generated: Arc<AtomicBool>,
}

impl<S: Sync> FromRequestParts<S> for RequestContext {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get().cloned().ok_or_else(ApiError::internal)
    }
}
