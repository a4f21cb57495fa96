//! A generation: an iterator over rounds.

use std::borrow::BorrowMut;
use std::time::Instant;

use crate::engine::Engine;
use crate::not_started::NotStarted;
use crate::options::{DraftPipeline, GenerateOptions};
use crate::piece::Piece;
use crate::run::{Run, advance};
use crate::session::{Session, Statistics};
use crate::speculative::Cancel;
use crate::stop::FinishReason;
use crate::{Error, Result};

/// Yields a [`Piece`] per round, and nothing after the end or an error. What was yielded is part of the session, which
/// can be used again except after [`Error::Panic`].
///
/// It owns its session ([`Session::into_generation`], [`Generation::into_session`]) or borrows it
/// ([`Session::generate`]).
pub struct Generation<S: BorrowMut<Session> = Session> {
    session: Option<S>, // taken only by `into_session`
    run: Run,
}

impl<S: BorrowMut<Session>> Generation<S> {
    /// A generation whose prompt has not been read yet.
    pub(crate) fn new(mut session: S, prompt: &[u32], options: &GenerateOptions) -> Result<Self, (S, Error)> {
        match Run::new(session.borrow_mut(), prompt, 0, options) {
            Ok(run) => Ok(Self { session: Some(session), run }),
            Err(error) => Err((session, error)),
        }
    }

    /// Reads the prompt.
    ///
    /// # Errors
    /// If the model produced NaN or infinity, or memory is exhausted. The prompt is rolled back then.
    pub(crate) fn read_prompt(&mut self) -> Result<()> {
        let Some(session) = self.session.as_mut().map(BorrowMut::borrow_mut) else { return Ok(()) };
        let start = Instant::now();
        while self.run.is_reading() {
            if self.run.cancel.is_cancelled() {
                self.run.cancelled(session);
                return Ok(());
            }
            if let Err(error) = Error::catch(|| advance(&mut self.run, session, Instant::now())) {
                return self.run.fail(session, error).map(drop);
            }
        }
        self.run.statistics.prefill += start.elapsed();
        self.run.nothing_to_generate();
        Ok(())
    }

    /// Counts and times so far.
    pub fn statistics(&self) -> &Statistics {
        &self.run.statistics
    }

    /// Why it ended; `None` while it is running.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.run.finish_reason()
    }

    /// Stops this generation alone, from any thread: before the next chunk of the prompt, or before the next round.
    pub fn cancel_handle(&self) -> Cancel {
        self.run.cancel.clone()
    }

    fn piece(&mut self, requested: Instant) -> Result<Option<Piece>> {
        if self.run.is_reading() {
            self.read_prompt()?;
        }
        if self.run.finish_reason().is_some() {
            return Ok(None);
        }
        let Some(session) = self.session.as_mut().map(BorrowMut::borrow_mut) else { return Ok(None) };
        if self.run.cancel.is_cancelled() {
            return Ok(self.run.cancelled(session));
        }
        let piece = if self.run.has_first() {
            Error::catch(|| self.run.emit_first(session))?
        } else {
            let piece = Error::catch(|| advance(&mut self.run, session, requested));
            self.run.statistics.decode += requested.elapsed();
            piece?
        };
        if self.run.finish_reason().is_none() && self.run.pipeline == DraftPipeline::Ahead {
            let max_rows = self.run.max_rows(session.decoder());
            session.submit(max_rows, &self.run.cancel);
        }
        Ok(piece)
    }

    /// The next piece, whose time begins at `requested`.
    pub(crate) fn next_since(&mut self, requested: Instant) -> Option<Result<Piece>> {
        if self.run.finish_reason().is_some() {
            return self.run.take_error().map(Err);
        }
        match self.piece(requested) {
            Ok(piece) => piece.map(Ok),
            Err(error) => {
                let session = self.session.as_mut().map(BorrowMut::borrow_mut)?;
                Some(self.run.fail(session, error))
            }
        }
    }

    /// Cancels a draft that is being made, waits for the decoder, and records the end.
    fn end(&mut self) {
        if let Some(session) = self.session.as_mut().map(BorrowMut::borrow_mut) {
            session.cancel_draft();
            self.run.end(session);
        }
    }
}

impl Generation {
    /// The session, after the last round that was yielded. Waits for a draft that is being made
    /// ([`DraftPipeline::Ahead`]), which the next round uses.
    pub fn session(&mut self) -> &Session {
        // Only `into_session` takes it, and takes `self`.
        let session = self.session.as_mut().expect("the session is there until it is taken");
        session.wait();
        session
    }

    /// The session's engine.
    pub fn engine(&self) -> &Engine {
        self.session.as_ref().expect("the session is there until it is taken").engine()
    }

    /// The tasks that start when the draft ends for which the next piece, or the end, would wait; `None` if there is
    /// none.
    #[cfg(feature = "stream")]
    pub(crate) fn draft_continuations(&self) -> Option<crate::speculative::Continuations> {
        self.session.as_ref().and_then(Session::draft_continuations)
    }

    /// Ends the generation after the last round that it yielded, and returns the session.
    pub fn into_session(mut self) -> Session {
        self.end();
        self.session.take().expect("the session is there until it is taken")
    }
}

impl<S: BorrowMut<Session>> Iterator for Generation<S> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_since(Instant::now())
    }
}

impl<S: BorrowMut<Session>> Drop for Generation<S> {
    fn drop(&mut self) {
        self.end();
    }
}

impl Session {
    /// Appends `prompt` and generates. The prompt is processed before this returns; tokens are generated as the
    /// iterator is polled. Dropping it ends the generation after the last round that it yielded.
    ///
    /// # Errors
    /// If the prompt is empty, has ids outside the vocabulary or does not fit the context, an option is out of its
    /// range, the model produced NaN or infinity, or memory is exhausted. The prompt is rolled back then.
    pub fn generate(&mut self, prompt: &[u32], options: &GenerateOptions) -> Result<Generation<&mut Self>> {
        let mut generation = Generation::new(self, prompt, options).map_err(|(_, error)| error)?;
        generation.read_prompt()?;
        Ok(generation)
    }

    /// As [`Session::generate`], with a generation that owns the session, so that it can move to another
    /// thread. Its prompt is read with the first piece.
    ///
    /// # Errors
    /// As [`Session::generate`], for what is known before anything is computed; the session is returned with it.
    pub fn into_generation(self, prompt: &[u32], options: &GenerateOptions) -> Result<Generation, Box<NotStarted>> {
        let refused = |(session, error)| Box::new(NotStarted { session, error });
        Generation::new(self, prompt, options).map_err(refused)
    }
}
