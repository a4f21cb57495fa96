//! The rounds of a batch: rows of several sequences in one pass.

use candle_core::Tensor;

use super::attend::attend_sequences;
use super::round::{KvAccess, Round};
use crate::{Error, Result};

/// Rows to be computed in one pass: any number of sequences, any number of consecutive positions of each.
///
/// The bits of a row do not depend on the other rows of its batch.
#[derive(Default)]
pub struct Batch<'a> {
    ids: Vec<u32>,
    rounds: Vec<Round<'a>>,
}

impl<'a> Batch<'a> {
    /// No rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// The rows of one sequence; see [`Batch::push`].
    ///
    /// # Errors
    /// As [`Batch::push`].
    pub fn of(ids: &[u32], round: Round<'a>) -> Result<Self> {
        let mut batch = Self::new();
        batch.push(ids, round)?;
        Ok(batch)
    }

    /// Adds a segment: the rows of one sequence, whose tokens are `ids`, staged in `round`.
    ///
    /// # Errors
    /// If the ids and the round's rows differ in number.
    pub fn push(&mut self, ids: &[u32], round: Round<'a>) -> Result<()> {
        if ids.len() != round.rows() {
            return Err(Error::argument("ids", format!("{} ids for a round of {} rows", ids.len(), round.rows())));
        }
        self.ids.extend(ids);
        self.rounds.push(round);
        Ok(())
    }

    /// The tokens of all rows.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Rows of all segments.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// The segments' rounds.
    pub fn rounds(&self) -> &[Round<'a>] {
        &self.rounds
    }

    /// The rounds, to be committed or dropped.
    pub fn into_rounds(self) -> Vec<Round<'a>> {
        self.rounds
    }

    /// The position of every row.
    pub fn positions(&self) -> impl Iterator<Item = usize> + Clone {
        self.rounds.iter().flat_map(|round| round.position()..round.position() + round.rows())
    }

    /// K and V for a layer: all rows append; the rows selected by [`KvAccess::narrow`] attend (all, at first).
    pub fn kv(&mut self) -> BatchKv<'_, 'a> {
        let query_rows = self.rounds.iter().map(|round| (0..round.rows()).collect()).collect();
        BatchKv { rounds: &mut self.rounds, query_rows }
    }
}

/// The K and V of a batch's sequences.
pub struct BatchKv<'b, 'a> {
    rounds: &'b mut [Round<'a>],
    query_rows: Vec<Vec<usize>>, // per round: its rows that have queries, ascending
}

impl KvAccess for BatchKv<'_, '_> {
    fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        if let [only] = self.rounds {
            return only.append(layer, k, v);
        }
        let rows: usize = self.rounds.iter().map(|round| round.rows()).sum();
        if let Some(wrong) = [k, v].into_iter().find(|tensor| tensor.dims().first() != Some(&rows)) {
            let problem = format!("K or V of layer {layer} is {:?}, the batch has {rows} rows", wrong.dims());
            return Err(candle_core::Error::Msg(problem).into());
        }
        let mut first = 0;
        for round in self.rounds.iter_mut() {
            let rows = round.rows();
            round.append(layer, &k.narrow(0, first, rows)?, &v.narrow(0, first, rows)?)?;
            first += rows;
        }
        Ok(())
    }

    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor> {
        if let ([only], [query_rows]) = (&*self.rounds, &*self.query_rows) {
            return only.attend_rows(layer, q, query_rows);
        }
        let mut first = 0;
        let mut segments = Vec::with_capacity(self.rounds.len());
        for (round, query_rows) in self.rounds.iter().zip(&self.query_rows).filter(|(_, rows)| !rows.is_empty()) {
            segments.push((round, query_rows, q.narrow(0, first, query_rows.len())?));
            first += query_rows.len();
        }
        let keys =
            |(round, query_rows, _): &(&Round<'_>, &Vec<usize>, Tensor)| query_rows.len() * round.visible_keys(layer);
        attend_sequences(&segments, keys, |(round, query_rows, q)| round.attend_rows(layer, q, query_rows))
    }

    fn positions(&self) -> Vec<usize> {
        let rounds = self.rounds.iter().zip(&self.query_rows);
        rounds.flat_map(|(round, rows)| rows.iter().map(|row| round.position() + row)).collect()
    }

    fn narrow(&mut self, rows: &[usize]) -> Result<()> {
        let all: usize = self.rounds.iter().map(|round| round.rows()).sum();
        if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|last| *last >= all) {
            return Err(Error::argument("rows", format!("must be ascending and below {all}, the batch's rows")));
        }
        let (mut first, mut rows) = (0, rows.iter().copied().peekable());
        for (round, query_rows) in self.rounds.iter().zip(&mut self.query_rows) {
            let end = first + round.rows();
            query_rows.clear();
            query_rows.extend(std::iter::from_fn(|| rows.next_if(|row| *row < end)).map(|row| row - first));
            first = end;
        }
        Ok(())
    }

    fn for_rounds(&mut self, stage: &mut dyn FnMut(&mut Round<'_>) -> Result<()>) -> Result<()> {
        self.rounds.iter_mut().try_for_each(stage)
    }
}
