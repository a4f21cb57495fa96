//! Backs off a draft model after consecutive rejections.

/// Pauses a draft model after consecutive drafts without an accepted token; prompt lookup continues. Repeated
/// pauses double in length, until a token is accepted.
#[derive(Clone, Debug)]
pub(super) struct Streak {
    limit: usize,
    failed: usize,
    pause: usize,      // rounds left of this pause
    next_pause: usize, // in rounds
}

/// The longest pause, in rounds.
const MAX_PAUSE: usize = 32;

impl Streak {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, failed: 0, pause: 0, next_pause: 1 }
    }

    /// Whether the model is paused in the next round.
    pub(super) fn is_paused(&self) -> bool {
        self.pause > 0
    }

    /// Records a round, and how many tokens of the model's draft were accepted, if it had one.
    pub(super) fn observe(&mut self, accepted: Option<usize>) {
        self.pause = self.pause.saturating_sub(1);
        match accepted {
            None => {}
            Some(0) => {
                self.failed += 1;
                if self.failed >= self.limit {
                    (self.failed, self.pause) = (0, self.next_pause);
                    self.next_pause = (2 * self.next_pause).min(MAX_PAUSE);
                }
            }
            Some(_) => (self.failed, self.next_pause) = (0, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_a_token_is_accepted() {
        let mut streak = Streak::new(2);
        let mut pause_after = |accepted: [usize; 2]| {
            accepted.iter().for_each(|accepted| streak.observe(Some(*accepted)));
            std::iter::from_fn(|| streak.is_paused().then(|| streak.observe(None))).count()
        };
        assert_eq!([0; 8].map(|_| pause_after([0, 0])), [1, 2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(pause_after([0, 3]), 0);
        assert_eq!(pause_after([0, 0]), 1);
    }
}
