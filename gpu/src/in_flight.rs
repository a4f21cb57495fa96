//! Batches of launches that a Metal device runs, and the first failure of any.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// A submitted batch.
pub(crate) trait Running {
    /// Waits for its end.
    fn finish(self) -> Result<(), String>;
}

/// The message of the first batch that failed. It is never cleared: what that batch should have written is undefined, and
/// any thread may read it.
pub(crate) type Failure = Arc<OnceLock<String>>;

/// Batches of one stream in the order of submission. The failure is shared by all streams of the device.
pub(crate) struct InFlight<R> {
    submitted: VecDeque<R>,
    failure: Failure,
}

impl<R: Running> InFlight<R> {
    pub fn new(failure: Failure) -> Self {
        Self { submitted: VecDeque::new(), failure }
    }

    /// Adds a batch, and waits for the oldest ones until at most `most` are left.
    ///
    /// # Errors
    /// If a batch of the device failed, now or before.
    pub fn push(&mut self, batch: R, most: usize) -> Result<(), String> {
        self.submitted.push_back(batch);
        self.shorten(most)
    }

    /// Waits for all batches.
    ///
    /// # Errors
    /// As [`InFlight::push`].
    pub fn wait(&mut self) -> Result<(), String> {
        self.shorten(0)
    }

    fn shorten(&mut self, most: usize) -> Result<(), String> {
        while self.submitted.len() > most {
            let Some(batch) = self.submitted.pop_front() else { break };
            if let Err(problem) = batch.finish() {
                self.failure.get_or_init(|| problem);
            }
        }
        self.check()
    }

    /// Fails the device, unless a batch has: launches that belong together were not all added.
    pub fn fail(&self, problem: String) {
        self.failure.get_or_init(|| problem);
    }

    /// # Errors
    /// If a batch of the device has failed.
    pub fn check(&self) -> Result<(), String> {
        check(&self.failure)
    }
}

/// # Errors
/// If a batch has failed.
pub(crate) fn check(failure: &OnceLock<String>) -> Result<(), String> {
    failure.get().map_or(Ok(()), |problem| Err(problem.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Batch(Result<(), &'static str>);

    impl Running for Batch {
        fn finish(self) -> Result<(), String> {
            self.0.map_err(Into::into)
        }
    }

    #[test]
    fn a_failure_is_reported_to_every_later_wait() {
        let failure = Failure::default();
        let [mut first, mut second] = [(); 2].map(|()| InFlight::new(failure.clone()));
        for result in [Ok(()), Err("a page fault"), Err("ignored"), Ok(())] {
            first.push(Batch(result), 4).expect("nothing was waited for");
        }
        second.push(Batch(Ok(())), 4).expect("nothing was waited for");
        // The first waits are those of other threads, which drop what they get.
        for _ in 0..3 {
            assert_eq!(first.wait().expect_err("a failure"), "a page fault");
        }
        assert_eq!(second.push(Batch(Ok(())), 4).expect_err("a failure"), "a page fault");
        // Not lost with its stream either.
        drop((first, second));
        assert_eq!(check(&failure).expect_err("a failure"), "a page fault");
    }

    #[test]
    fn launches_that_were_not_all_added_fail_the_device() {
        let failure = Failure::default();
        let [first, mut second] = [(); 2].map(|()| InFlight::<Batch>::new(failure.clone()));
        first.fail("half a recording".into());
        assert_eq!(first.check().expect_err("a failure"), "half a recording");
        assert_eq!(second.push(Batch(Ok(())), 4).expect_err("a failure"), "half a recording");
    }

    #[test]
    fn the_oldest_batches_are_waited_for_first() {
        let mut batches = InFlight::new(Failure::default());
        batches.push(Batch(Err("the oldest")), 1).expect("nothing was waited for");
        assert_eq!(batches.push(Batch(Err("the newest")), 1).expect_err("a failure"), "the oldest");
    }
}
