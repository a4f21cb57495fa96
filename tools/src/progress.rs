//! Progress of a long command, on a terminal.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A line on stderr with a progress bar, a percentage and the time left, erased when complete or dropped. Nothing is
/// written if stderr is not a terminal.
pub struct ProgressLine(Mutex<Line>);

struct Line {
    label: String,
    done: u64,
    total: u64,
    began: Instant,
    from: u64, // done when the timer began
    drawn: Option<Instant>,
    terminal: bool,
}

const BAR: usize = 40; // characters
const REDRAW: Duration = Duration::from_millis(100);

impl ProgressLine {
    /// A line that begins with `label` and ends at `total`, in any unit.
    pub fn new(label: &str, total: u64) -> Self {
        Self(Mutex::new(Line {
            label: label.into(),
            done: 0,
            total,
            began: Instant::now(),
            from: 0,
            drawn: None,
            terminal: stderr().is_terminal(),
        }))
    }

    /// `done` of `total`; a different total, or a call after the line was complete, restarts the timer.
    pub fn set(&self, done: u64, total: u64) {
        self.change(|line| {
            if line.total != total || line.done >= line.total {
                (line.began, line.from) = (Instant::now(), done);
            }
            (line.done, line.total) = (done, total);
        });
    }

    /// Adds `more` to the progress.
    pub fn add(&self, more: u64) {
        self.change(|line| line.done += more);
    }

    /// Replaces the label.
    pub fn label(&self, label: String) {
        self.change(|line| line.label = label);
    }

    fn change(&self, change: impl FnOnce(&mut Line)) {
        let mut line = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut line);
        line.draw();
    }
}

impl Line {
    /// Draws the line unless it was drawn too recently.
    fn draw(&mut self) {
        if self.done >= self.total {
            return self.erase();
        }
        if !self.terminal || self.drawn.is_some_and(|at| at.elapsed() < REDRAW) {
            return;
        }
        self.drawn = Some(Instant::now());
        let share = self.done as f64 / self.total as f64;
        let left = self.left(self.began.elapsed().as_secs_f64());
        let bar = "#".repeat((share * BAR as f64) as usize);
        // Failing to draw must not stop the command.
        let _ = write!(stderr(), "\r{} [{bar:-<BAR$}] {:.0} %, {left:.0} s left\x1b[K", self.label, 100.0 * share);
    }

    /// Seconds left, at the speed since the timer began `elapsed` seconds ago.
    fn left(&self, elapsed: f64) -> f64 {
        let share = self.done.saturating_sub(self.from) as f64 / self.total.saturating_sub(self.from) as f64;
        elapsed * (1.0 / share.max(1e-3) - 1.0)
    }

    fn erase(&mut self) {
        if self.drawn.take().is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.erase();
    }
}

/// A line on stderr that says what a command is doing, erased when it is dropped. Nothing is written if stderr is not a
/// terminal.
pub struct StatusLine {
    terminal: bool,
}

impl StatusLine {
    /// A line with this text.
    pub fn new(text: &str) -> Self {
        let line = Self { terminal: stderr().is_terminal() };
        line.set(text);
        line
    }

    /// Replaces the text.
    pub fn set(&self, text: &str) {
        if self.terminal {
            // Failing to draw must not stop the command.
            let _ = write!(stderr(), "\r{text}\x1b[K");
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.set("");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of an earlier download took none of the time.
    #[test]
    fn the_time_left_is_by_what_was_done_since_the_timer_began() {
        let left = |line: &ProgressLine, elapsed| line.0.lock().expect("no panic").left(elapsed);
        let line = ProgressLine::new("downloading", 0);
        line.set(900, 1000);
        line.set(950, 1000);
        assert_eq!(left(&line, 5.0), 5.0);
        // The next file is as long, and nothing of it is there.
        line.set(1000, 1000);
        line.set(0, 1000);
        line.set(250, 1000);
        assert_eq!((left(&line, 1.0), line.0.lock().expect("no panic").from), (3.0, 0));
        let line = ProgressLine::new("", 4);
        line.add(1);
        assert_eq!(left(&line, 2.0), 6.0);
    }
}
