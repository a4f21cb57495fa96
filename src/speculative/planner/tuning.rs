//! The planner's constants.

/// The constants of [`Planner`](super::Planner) and [`Costs`](super::Costs), in one place for ablation: `cargo test
/// --release --test planner -- --ignored --nocapture ablation`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Assumed cost of one more row, or a draft step, before it is measured, in plain steps.
    pub row_cost: f64,
    /// Standard error of the log of a cost that was never measured, and of one measurement.
    pub unmeasured: f64,
    /// Standard errors beyond which a measurement is clipped, and accepted tokens count as a change point.
    pub outlier: f64,
    /// Measurements in a median: the first ones of a cost, and the last rounds for the speed factor.
    pub median: usize,
    /// Probability that the first token of a draft is accepted, before any is observed. A forced one always is.
    pub prior: f64,
    /// Weight of that prior, and of a position as the prior of the next one, in observations.
    pub prior_weight: f64,
    /// Positions of a draft with a count of accepted tokens of their own; deeper ones share the last.
    pub positions: usize,
    /// Window of the acceptance counts, in rounds, and of a cost's running mean after its median, in measurements.
    pub window: f64,
    /// Window of change point detection, in rounds.
    pub change_window: f64,
    /// Share of the acceptance counts kept after a change point.
    pub change_keep: f64,
    /// Standard errors between the estimate of a cost and its lower confidence bound.
    pub confidence: f64,
    /// Share of the time for probing drafts, and for plain steps.
    pub exploration: f64,
    /// Maximum rows to verify, as a multiple of the most ever measured.
    pub growth: usize,
    /// Rows that may be verified before that many were measured.
    pub first_rows: usize,
    /// Share of plain decoding's time that may be lost.
    pub loss: f64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            row_cost: 0.08,
            unmeasured: 0.2,
            outlier: 2.5,
            median: 5,
            prior: 0.75,
            prior_weight: 4.0,
            positions: 10,
            window: 192.0,
            change_window: 12.0,
            change_keep: 0.1,
            confidence: 1.5,
            exploration: 0.008,
            growth: 2,
            first_rows: 4,
            loss: 0.02,
        }
    }
}
