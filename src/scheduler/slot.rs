//! A sequence of a scheduler, its part of a pass, and its events.

use crate::options::GenerateOptions;
use crate::piece::Piece;
use crate::run::Run;
use crate::session::Session;
use crate::speculative::{Done, OtherSequences, Work};
use crate::stop::FinishReason;
use crate::{Error, Result};

/// A sequence of a [`Scheduler`](crate::Scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(super) u64);

/// Output of a step for one sequence.
#[derive(Debug)]
pub struct Event {
    /// The sequence.
    pub id: SequenceId,
    /// A round's piece, or the error that ended the generation.
    pub piece: Result<Piece>,
    /// Why the generation ended, in its last event; `None` in every event before. Text that was held back when an error
    /// ended it comes in an event without it, the error in the next one.
    pub finish_reason: Option<FinishReason>,
}

/// What a sequence waits for before it reads its prompt.
pub(super) struct Awaited {
    /// An earlier sequence, which reads the same tokens.
    pub reader: SequenceId,
    /// The length at which the reader is cached.
    pub len: usize,
    /// Those of its generation.
    pub options: GenerateOptions,
}

/// A sequence and its generation.
pub(super) struct Slot {
    pub id: SequenceId,
    pub session: Session,
    pub run: Run,
    /// What it waits for before it reads its prompt.
    pub awaited: Option<Awaited>,
    /// Its part of the pass that is being made.
    pub planned: Option<Work>,
    /// Whether memory was exhausted in its last step; it is retried when another sequence is removed or a cached prefix
    /// is dropped.
    pub waits: bool,
    /// A fork before the prompt's last token, until the step after the first piece: see
    /// [`Scheduler::keep_prompt`](crate::Scheduler::keep_prompt).
    pub kept: Option<Session>,
}

/// A sequence's part of a pass.
pub(super) struct PartDone {
    pub slot: usize,
    pub counts: OtherSequences,
    pub work: Option<Work>, // if it was not done
    pub done: Result<Done>,
}

impl Slot {
    /// Whether it has a part in the next pass.
    pub fn takes_part(&self) -> bool {
        self.run.finish_reason().is_none() && !self.waits && self.awaited.is_none()
    }

    /// Whether it has not read its sequence up to the length `len` of the prompt, and will. One that waits for memory may
    /// not.
    pub fn will_read(&self, len: usize) -> bool {
        self.run.finish_reason().is_none() && !self.waits && self.run.read() < len
    }

    /// Ends the generation.
    pub fn fail(&mut self, error: Error) -> Event {
        let failed = self.run.fail(&mut self.session, error);
        self.event(failed)
    }

    /// Forks the session if it is before the prompt's last token, and that was requested.
    pub fn keep_before_last(&mut self) {
        if self.run.kept_at == Some(self.session.decoder().state.len()) {
            let fork = self.session.fork_read();
            let fork = fork.inspect_err(|error| tracing::warn!(%error, "the state before a prompt's end is not kept"));
            self.kept = fork.ok();
        }
    }

    pub fn event(&self, piece: Result<Piece>) -> Event {
        Event { id: self.id, piece, finish_reason: self.run.finish_reason().filter(|_| !self.run.has_error()) }
    }
}
