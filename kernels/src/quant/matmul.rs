//! The product of activations and a packed matrix: checks, and the choice of a kernel.

use crate::columns::{ColumnsMut, WrittenColumns};
use crate::isa::Isa;
use crate::quant::activations::{ActivationLayout, Activations, has_tiles};
#[cfg(target_arch = "x86_64")]
use crate::quant::amx;
use crate::quant::packed_matrix::PackedMatrix;
use crate::quant::{scalar, vector};

/// `y[r][j] = sum_i x[r][i] * weights[j][i]` for all the columns `j` that `y` holds, which are
/// overwritten and returned.
///
/// * `x`: `(rows, inputs)`, quantized, where `rows` is `y`'s.
/// * `y`: `(rows, outputs)`.
///
/// Threads divide a matrix by columns; ranges should start at multiples of
/// [`PANEL_ROWS`](super::PANEL_ROWS), or a panel is computed twice.
///
/// # Panics
/// If the shapes do not match, or `x` has other blocks than the type needs, or is in tiles without AMX or for a type
/// that AMX does not multiply (NVFP4).
pub fn matmul<'y>(
    isa: Isa,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    mut y: ColumnsMut<'y>,
) -> WrittenColumns<'y> {
    check(weights, x);
    let has_tiles = isa.has_tiles() && has_tiles(weights.weight_type());
    assert!(
        has_tiles || x.format().layout == ActivationLayout::RowBlocks,
        "matmul: {} has no tiles for it",
        isa.name()
    );
    assert_eq!(x.rows(), y.rows(), "matmul: x and y differ in rows");
    assert!(y.range().end <= weights.outputs(), "matmul: the weight has too few rows");
    if !y.range().is_empty() && y.rows() != 0 {
        write(isa, weights, x, y.reborrow());
    }
    // SAFETY: every kernel writes all columns of all rows; there may be none.
    unsafe { y.assume_written() }
}

fn write(isa: Isa, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    match (x.format().layout, isa) {
        #[cfg(target_arch = "x86_64")]
        (ActivationLayout::Tiles, Isa::Amx(isa)) => amx::matmul(isa, weights, x, y),
        (ActivationLayout::Tiles, _) => unreachable!("`matmul` refuses it"),
        (ActivationLayout::RowBlocks, _) => match isa.vectors() {
            Some(isa) => vector::matmul(isa, weights, x, y),
            None => scalar::matmul(weights, x, y),
        },
    }
}

/// `out[k] = sum_i x[i] * weights[indices[k]][i]`, with the bits that [`matmul`] gives.
///
/// A panel's 16 rows are always computed together: consecutive `indices` in one panel cost one panel.
///
/// # Panics
/// If the shapes do not match, `x` does not have exactly one row, in row blocks, or an index is not below `outputs`.
pub fn dot_rows(isa: Isa, weights: &PackedMatrix<'_>, indices: &[u32], x: &Activations<'_>, out: &mut [f32]) {
    check(weights, x);
    assert_eq!(x.rows(), 1, "dot_rows: x is not one row");
    assert_eq!(x.format().layout, ActivationLayout::RowBlocks, "dot_rows: x is in tiles");
    assert_eq!(indices.len(), out.len(), "dot_rows: lengths differ");
    assert!(indices.iter().all(|i| (*i as usize) < weights.outputs()), "dot_rows: index out of range");
    match isa.vectors() {
        Some(isa) => vector::dot_rows(isa, weights, indices, x, out),
        None => scalar::dot_rows(weights, indices, x, out),
    }
}

fn check(weights: &PackedMatrix<'_>, x: &Activations<'_>) {
    assert_eq!(x.inputs(), weights.inputs(), "matmul: x and the weight differ in inputs");
    let expected = weights.weight_type().activation_type();
    assert_eq!(x.format().blocks, expected, "matmul: x is quantized for another weight type");
}
