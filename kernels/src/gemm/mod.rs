//! Activations times the transpose of a floating-point weight matrix; with AMX, bf16 weights are multiplied without
//! conversion.

#[cfg(target_arch = "x86_64")]
mod amx;
mod vector;

use crate::columns::{ColumnsMut, WrittenColumns};
use crate::element::{ElementType, Elements};
use crate::isa::Isa;

/// Activations `(rows, inputs)`, prepared for one instruction set and element type of weights.
#[derive(Clone, Copy)]
pub struct PreparedRows<'a> {
    x: &'a [f32],
    inputs: usize,
    /// B tiles of `x` for AMX with bf16 weights; else empty.
    words: &'a [u32],
}

impl<'a> PreparedRows<'a> {
    /// Words of scratch that [`PreparedRows::new`] needs: zero except for AMX with bf16 weights.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub fn scratch_len(isa: Isa, weight: ElementType, rows: usize, inputs: usize) -> usize {
        match (isa, weight) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx(_), ElementType::Bf16) => amx::words(rows, inputs),
            _ => 0,
        }
    }

    /// Prepares `x`, `(rows, inputs)` row-major, once for all weights of a type. `scratch`:
    /// [`PreparedRows::scratch_len`] words.
    ///
    /// # Panics
    /// If a length does not match the shapes.
    pub fn new(isa: Isa, weight: ElementType, x: &'a [f32], inputs: usize, scratch: &'a mut [u32]) -> Self {
        let rows = x.len() / inputs.max(1);
        assert_eq!(x.len(), rows * inputs, "matmul: x is not (rows, inputs)");
        assert_eq!(
            scratch.len(),
            Self::scratch_len(isa, weight, rows, inputs),
            "matmul: scratch is not scratch_len() words"
        );
        #[cfg(target_arch = "x86_64")]
        if let (Isa::Amx(isa), ElementType::Bf16) = (isa, weight) {
            amx::split(isa, x, inputs, scratch);
        }
        Self { x, inputs, words: scratch }
    }

    /// `x` with the words that [`PreparedRows::new`] wrote for it earlier.
    pub fn from_words(x: &'a [f32], inputs: usize, words: &'a [u32]) -> Self {
        Self { x, inputs, words }
    }
}

/// `y[r][j] = sum_i x[r][i] * weight[j][i]` for all the columns `j` that `y` holds, which are overwritten and returned.
///
/// * `x`: prepared for `isa` and the type of `weight`; as many rows as `y`.
/// * `weight`: `(outputs, inputs)` row-major; `y` is `(rows, outputs)`.
///
/// The order of summation does not depend on the number of rows or columns: the bits of a row depend on that row only.
///
/// # Panics
/// If a length does not match the shapes.
pub fn matmul<'y>(isa: Isa, x: PreparedRows<'_>, weight: Elements<'_>, mut y: ColumnsMut<'y>) -> WrittenColumns<'y> {
    write(isa, x, weight, y.reborrow());
    // SAFETY: every kernel writes all columns of all rows.
    unsafe { y.assume_written() }
}

fn write(isa: Isa, x: PreparedRows<'_>, weight: Elements<'_>, y: ColumnsMut<'_>) {
    let PreparedRows { x, inputs, words } = x;
    assert_eq!(Some(x.len()), y.rows().checked_mul(inputs), "matmul: x is not (rows, inputs)");
    let needed = y.range().end.checked_mul(inputs);
    assert!(needed.is_some_and(|needed| needed <= weight.len()), "matmul: the weight has too few rows");
    let scratch = PreparedRows::scratch_len(isa, weight.element_type(), y.rows(), inputs);
    assert_eq!(words.len(), scratch, "matmul: x was prepared for another instruction set or weight type");
    if y.rows() == 0 || y.range().is_empty() {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx(isa), Elements::Bf16(w)) = (isa, weight)
        && inputs > 0
    {
        return amx::matmul(isa, words, inputs, w, y);
    }
    match weight {
        Elements::F32(w) => vector::matmul(isa, x, inputs, w, y),
        Elements::F16(w) => vector::matmul(isa, x, inputs, w, y),
        Elements::Bf16(w) => vector::matmul(isa, x, inputs, w, y),
    }
}
