//! Groups of panels: their results before they are stored.

use std::mem::MaybeUninit;

use crate::quant::activations::PASS_ROWS;
use crate::quant::layout::PANEL_ROWS;

/// Panels whose results are stored together, row by row. Rows of `y` are often a multiple of 4 KiB apart, which is one
/// set of the L1 cache: stored panel by panel they would evict each other.
pub(super) const PANEL_GROUP: usize = 4;

/// Results of a group of panels: `(panels, rows, outputs)`. Those of the rows of a pass are initialised: to clear all
/// takes 3 % of the time of 16 rows.
pub(super) type Results = [[[MaybeUninit<f32>; PANEL_ROWS]; PASS_ROWS]; PANEL_GROUP];
