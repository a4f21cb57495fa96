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
    assert_eq!(x.inputs(), weights.inputs(), "matmul: x and the weight differ in inputs");
    let expected = weights.weight_type().activation_type();
    assert_eq!(x.format().blocks, expected, "matmul: x is quantized for another weight type");
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
