//! The launcher of kernels: runs or records them.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use foretoken_gpu::plan::merge::Mergeable;
use foretoken_gpu::{Launch, LaunchError, Params};

use super::temporaries::Temporaries;
use super::{AnyLaunch, Device, Recording};
use crate::Result;

/// Runs launches, or records them for replay, merged where there is a kernel for that.
pub(crate) struct Launcher {
    /// The memory of results.
    pub temporaries: Arc<Temporaries>,
    recorded: Option<RefCell<Vec<Recorded>>>,
}

/// A recorded launch, and what the next one may be merged with.
struct Recorded {
    launch: AnyLaunch,
    mergeable: Option<Mergeable>,
}

impl Launcher {
    /// A launcher that runs every launch on the device of `temporaries`.
    pub fn new(temporaries: Arc<Temporaries>) -> Self {
        Self { temporaries, recorded: None }
    }

    /// A launcher that records until [`Launcher::finish`].
    pub fn recorder(temporaries: Arc<Temporaries>) -> Self {
        Self { temporaries, recorded: Some(RefCell::default()) }
    }

    pub fn device(&self) -> &dyn Device {
        self.temporaries.device()
    }

    /// Runs or records a launch, in order.
    ///
    /// # Errors
    /// If the plan was rejected, or the driver fails.
    pub fn run<P: Params>(&self, plan: Result<Launch<P>, LaunchError>) -> Result<()> {
        match plan {
            Ok(launch) => self.run_any(AnyLaunch::new(&launch), &launch),
            Err(problem) => Err(super::launch_error(self.device(), "a launch", &problem)),
        }
    }

    /// [`Launcher::run`] of a launch of any kernel, compiled once.
    fn run_any(&self, launch: AnyLaunch, typed: &dyn Any) -> Result<()> {
        if let Some(recorded) = &self.recorded {
            self.record(&mut recorded.borrow_mut(), launch, Mergeable::of(typed));
            return Ok(());
        }
        self.temporaries.release();
        self.launch_now(&launch)
    }

    fn launch_now(&self, launch: &AnyLaunch) -> Result<()> {
        // SAFETY: all callers are in this library and pass slices of buffers owned by their models and
        // sequences. Buffers are freed through the device, which waits for running kernels. Page tables
        // are written before the rows that use them.
        unsafe { self.device().launch(launch) }
    }

    /// Runs the recorded launches once.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn launch(&self) -> Result<()> {
        let mut recorded = self.recorded.iter().flat_map(RefCell::take);
        recorded.try_for_each(|recorded| self.launch_now(&recorded.launch))
    }

    /// The recorded launches.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn finish(&self) -> Result<Box<dyn Recording>> {
        let recorded = self.recorded.as_ref().map(RefCell::borrow);
        let launches = recorded.iter().flat_map(|recorded| recorded.iter()).map(|recorded| recorded.launch);
        self.device().record(&launches.collect::<Vec<_>>())
    }

    /// Appends a launch, or merges it with the last one.
    fn record(&self, recorded: &mut Vec<Recorded>, launch: AnyLaunch, mergeable: Option<Mergeable>) {
        let last = recorded.last().and_then(|last| last.mergeable);
        // The second of two merged launches writes nothing that the first reads: temporaries that were dropped
        // since the first are not taken again yet.
        let Some(merged) = last.zip(mergeable).and_then(|(last, next)| last.merged(&next)) else {
            self.temporaries.release();
            return recorded.push(Recorded { launch, mergeable });
        };
        let launch = match &merged {
            Mergeable::Norm(launch) => AnyLaunch::new(launch),
            Mergeable::Gate(launch) => AnyLaunch::new(launch),
            Mergeable::Quantize(launch) => AnyLaunch::new(launch),
            Mergeable::Combine(launch) => AnyLaunch::new(launch),
            Mergeable::Rows(launch) => AnyLaunch::new(launch),
            Mergeable::MatMul(launch) => AnyLaunch::new(launch),
            Mergeable::MatMulFloat(launch) => AnyLaunch::new(launch),
        };
        recorded.pop();
        recorded.push(Recorded { launch, mergeable: Some(merged) });
    }
}
