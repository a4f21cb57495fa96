//! A sequence's work in a pass, and the rows that it takes.

use super::{Drafting, OtherSequences, Proposal, Scored};
use crate::Result;
use crate::kv::{Round, SequenceState};
use crate::model::OutputRows;

/// A sequence's work in a pass.
pub(crate) enum Work {
    /// Read some tokens of a prompt. After the last ones, a token is drawn. If others have `scored`, the
    /// log-probabilities of the tokens after them are reported.
    Prompt { ids: Vec<u32>, is_last: bool, scored: Option<Scored> },
    /// Verify a draft.
    Verify(Box<Proposal>),
}

/// The rows of a work: their tokens, and which of them have logits and hidden states.
pub(super) struct WorkRows {
    pub ids: Vec<u32>,
    pub logits: OutputRows,
    pub hidden: OutputRows,
}

impl Work {
    /// Rows of its pass.
    pub fn num_rows(&self) -> usize {
        match self {
            Work::Prompt { ids, .. } => ids.len(),
            Work::Verify(proposal) => 1 + proposal.planned_len,
        }
    }

    /// Its rows and tokens, as counted by other sequences' planners.
    pub fn counts(&self) -> OtherSequences {
        let rows = self.num_rows();
        match self {
            Work::Prompt { .. } => OtherSequences { rows, tokens: 0, prompt_rows: rows },
            Work::Verify(_) => OtherSequences { rows, tokens: 1, prompt_rows: 0 },
        }
    }

    /// Begins its round. Prompts are committed whole or not at all.
    pub(super) fn begin_round<'s>(&self, state: &'s mut SequenceState, rows: usize) -> Result<Round<'s>> {
        match self {
            Work::Prompt { .. } => state.begin_whole_round(rows),
            Work::Verify(_) => state.begin_round(rows),
        }
    }

    /// Its rows, and what it requests of them.
    pub(super) fn rows(&self, drafting: &Drafting) -> WorkRows {
        let (ids, logits, hidden) = match self {
            Work::Prompt { ids, is_last, scored } => {
                let logits = match scored {
                    Some(_) => OutputRows::All,
                    None if *is_last => OutputRows::Last,
                    None => OutputRows::None,
                };
                let hidden = if drafting.drafters.reads().hidden { OutputRows::All } else { logits };
                (ids.clone(), logits, hidden)
            }
            Work::Verify(proposal) => (drafting.rows(proposal), OutputRows::All, OutputRows::All),
        };
        WorkRows { ids, logits, hidden }
    }
}
