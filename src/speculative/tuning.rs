//! The planner's constants.

/// The constants of [`Planner`](super::Planner) and [`Costs`](super::Costs), in one place so that what each of them buys
/// can be measured: `cargo test --release --test planner -- --ignored --nocapture ablation`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// What one more row, or a draft step, is taken to cost before it is measured, in plain steps.
    pub row_cost: f64,
    /// Standard error of the logarithm of a cost that was never measured, and of one measurement.
    pub unmeasured: f64,
    /// Standard errors beyond which a measurement is clipped, and accepted tokens are taken for a change of the text.
    pub outlier: f64,
    /// Measurements of which a median is taken: the first ones of a cost, and the newest rounds for the speed factor.
    pub median: usize,
    /// Measurements that the mean behind that median goes back to.
    pub history: usize,
    /// Probability that the first token of a model's draft is accepted, before any is observed.
    pub model_prior: f64,
    /// The same of a prompt lookup draft.
    pub lookup_prior: f64,
    /// The same of what a constraint forces.
    pub forced_prior: f64,
    /// Weight of that prior, and of a position as the prior of the next one, in observations.
    pub prior_weight: f64,
    /// Rounds that acceptance counts go back to.
    pub window: f64,
    /// Rounds in which a change is looked for.
    pub change_window: f64,
    /// Share of the acceptance counts that a change leaves.
    pub change_keep: f64,
    /// Standard errors between the estimate of a cost and its lower confidence bound.
    pub confidence: f64,
    /// Share of the time that drafts may cost that are verified to learn from them, and that plain steps may.
    pub exploration: f64,
    /// How many times as many rows as were ever measured may be verified.
    pub growth: usize,
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
            history: 64,
            model_prior: 0.75,
            lookup_prior: 0.5,
            forced_prior: 0.99,
            prior_weight: 4.0,
            window: 192.0,
            change_window: 12.0,
            change_keep: 0.1,
            confidence: 1.5,
            exploration: 0.008,
            growth: 2,
            loss: 0.02,
        }
    }
}
