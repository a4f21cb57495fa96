//! Backs off a draft model after consecutive rejections.

/// Pauses a draft model after consecutive drafts without an accepted token; prompt lookup continues. Repeated pauses double in
/// length, until a token is accepted.
#[derive(Clone, Debug)]
pub(super) struct Streak {
    limit: usize,
    failed: usize,
    rest: usize, // rounds left of this pause
    next: usize, // rounds of the next pause
}

/// The longest pause, in rounds.
const LONGEST_REST: usize = 32;

impl Streak {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, failed: 0, rest: 0, next: 1 }
    }

    pub(super) fn rests(&mut self) -> bool {
        let rests = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
        rests
    }

    pub(super) fn observe(&mut self, accepted: usize) {
        if accepted > 0 {
            (self.failed, self.next) = (0, 1);
            return;
        }
        self.failed += 1;
        if self.failed >= self.limit {
            (self.failed, self.rest) = (0, self.next);
            self.next = (2 * self.next).min(LONGEST_REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_until_something_is_accepted() {
        let mut streak = Streak::new(2);
        let mut rests_after = |accepted: [usize; 2]| {
            accepted.iter().for_each(|accepted| streak.observe(*accepted));
            (0..).take_while(|_| streak.rests()).count()
        };
        assert_eq!([0; 4].map(|_| rests_after([0, 0])), [1, 2, 4, 8]);
        assert_eq!(rests_after([0, 3]), 0);
        assert_eq!(rests_after([0, 0]), 1);
    }
}
