//! The packed order: sixteen output rows interleaved, so that one vector register meets one group of four inputs.
//!
//! A *panel* is 16 consecutive output rows. Block `b` of a panel is the 16 rows' blocks `b`, as many bytes as they had,
//! field after field in the file's order; inside a field the rows alternate every `unit` bytes. A field at byte `o` of a
//! GGUF block therefore starts at byte `16 o` of a packed block. The unit is 4 bytes for weights, so that 64 consecutive
//! bytes are four inputs of 16 rows, and 2 bytes for the `f16` scales.
//!
//! Rows after the last whole panel stay as they were: the kernels interleave those blocks on the stack. So a packed matrix
//! is exactly as long as the file's, and a range of panels occupies the same bytes before and after.
//!
//! Apart from the order only two things change: Q8_0's bytes are stored plus 128 (the dot-product instructions want one
//! unsigned side), and the fifth bits of Q5_0 and Q5_1 are transposed ([`spread_bits`]).

use super::{PackedMatrix, WeightType, block};
use std::ops::Range;

/// Output rows per panel: the `i32` lanes of a 64-byte register.
pub const PANEL_ROWS: usize = 16;

/// The longest block in bytes (Q6_K).
const MAX_BLOCK_BYTES: usize = 210;

/// Room for one interleaved block of any type. Aligned, because kernels load whole registers from it.
#[repr(align(64))]
pub(super) struct PackedBlock(pub [u8; PANEL_ROWS * MAX_BLOCK_BYTES]);

impl PackedBlock {
    pub const fn new() -> Self {
        Self([0; PANEL_ROWS * MAX_BLOCK_BYTES])
    }
}

/// What happens to a unit on its way.
#[derive(Clone, Copy)]
enum Change {
    None,
    /// Adds 128 to every byte.
    Bias,
    /// [`spread_bits`].
    Bits,
}

/// A field of a block: its bytes and how they are interleaved.
struct Field {
    range: Range<usize>,
    unit: usize,
    change: Change,
}

const fn field(start: usize, end: usize, unit: usize) -> Field {
    Field { range: start..end, unit, change: Change::None }
}

const fn changed(start: usize, end: usize, change: Change) -> Field {
    Field { range: start..end, unit: 4, change }
}

const fn fields(weight_type: WeightType) -> &'static [Field] {
    match weight_type {
        WeightType::Q4_0 | WeightType::IQ4_NL => const { &[field(0, 2, 2), field(2, 18, 4)] },
        WeightType::Q4_1 => const { &[field(0, 4, 2), field(4, 20, 4)] },
        WeightType::Q5_0 => const { &[field(0, 2, 2), changed(2, 6, Change::Bits), field(6, 22, 4)] },
        WeightType::Q5_1 => const { &[field(0, 4, 2), changed(4, 8, Change::Bits), field(8, 24, 4)] },
        WeightType::Q8_0 => const { &[field(0, 2, 2), changed(2, 34, Change::Bias)] },
        WeightType::Q2_K => const { &[field(0, 80, 4), field(80, 84, 2)] },
        WeightType::Q3_K => const { &[field(0, 108, 4), field(108, 110, 2)] },
        WeightType::Q4_K => const { &[field(0, 4, 2), field(4, 144, 4)] },
        WeightType::Q5_K => const { &[field(0, 4, 2), field(4, 176, 4)] },
        // Scales by single bytes: 16 of them widen in one instruction, where picking them out of words takes two more each.
        WeightType::Q6_K => const { &[field(0, 192, 4), field(192, 208, 1), field(208, 210, 2)] },
    }
}

/// Moves bit `4 g + i` of a word to bit `8 i + g`: the fifth bits of the four inputs of group `g` then lie at the same
/// place of four bytes, where one shift and one mask reach them.
pub(super) fn spread_bits(word: u32) -> u32 {
    let mut spread = 0;
    for i in 0..4 {
        for g in 0..8 {
            spread |= (word >> (4 * g + i) & 1) << (8 * i + g);
        }
    }
    spread
}

/// The inverse of [`spread_bits`].
fn gather_bits(word: u32) -> u32 {
    let mut gathered = 0;
    for i in 0..4 {
        for g in 0..8 {
            gathered |= (word >> (8 * i + g) & 1) << (4 * g + i);
        }
    }
    gathered
}

/// Interleaves one block of up to 16 rows. `row(l)` gives lane `l`'s block, or nothing: such lanes keep what they had.
#[inline(always)]
pub(super) fn interleave<'a>(weight_type: WeightType, row: impl Fn(usize) -> Option<&'a [u8]>, out: &mut [u8]) {
    let out = &mut out[..PANEL_ROWS * weight_type.block_bytes()];
    for lane in 0..PANEL_ROWS {
        let Some(block) = row(lane) else { continue };
        for Field { range, unit, change } in fields(weight_type) {
            let source = &block[range.clone()];
            let target = &mut out[PANEL_ROWS * range.start..PANEL_ROWS * range.end];
            match unit {
                1 => copy_units::<1>(source, target, lane, |x| x),
                2 => copy_units::<2>(source, target, lane, |x| x),
                _ => match change {
                    Change::None => copy_units::<4>(source, target, lane, |x| x),
                    Change::Bias => copy_units::<4>(source, target, lane, |x| x.map(|b| b ^ 0x80)),
                    Change::Bits => {
                        copy_units::<4>(source, target, lane, |x| spread_bits(u32::from_le_bytes(x)).to_le_bytes());
                    }
                },
            }
        }
    }
}

#[inline(always)]
fn copy_units<const N: usize>(source: &[u8], target: &mut [u8], lane: usize, change: impl Fn([u8; N]) -> [u8; N]) {
    let (source, _) = source.as_chunks::<N>();
    let (target, _) = target.as_chunks_mut::<N>();
    for (unit, target) in source.iter().zip(target.chunks_exact_mut(PANEL_ROWS)) {
        target[lane] = change(*unit);
    }
}

/// The inverse of [`interleave`] for one lane.
pub(super) fn extract(weight_type: WeightType, packed: &[u8], lane: usize, out: &mut [u8]) {
    for Field { range, unit, change } in fields(weight_type) {
        let source = &packed[PANEL_ROWS * range.start..PANEL_ROWS * range.end];
        for (k, out) in out[range.clone()].chunks_exact_mut(*unit).enumerate() {
            out.copy_from_slice(&source[(k * PANEL_ROWS + lane) * unit..][..*unit]);
            match change {
                Change::None => {}
                Change::Bias => out.iter_mut().for_each(|b| *b ^= 0x80),
                Change::Bits => {
                    let word = u32::from_le_bytes([out[0], out[1], out[2], out[3]]);
                    out.copy_from_slice(&gather_bits(word).to_le_bytes());
                }
            }
        }
    }
}

/// Packs whole rows from a file's order into the packed order.
///
/// * `source`: rows `first..` of a matrix with `inputs` columns, where `first` is a multiple of [`PANEL_ROWS`], so that
///   threads can share the work by panels. Only the matrix's last part may end inside a panel.
/// * `destination`: as many bytes; they belong where the rows were. 64-byte alignment of the matrix is worth having.
///
/// # Panics
/// If `source` is not whole rows or the lengths differ.
pub fn pack(weight_type: WeightType, inputs: usize, source: &[u8], destination: &mut [u8]) {
    assert_eq!(source.len(), destination.len(), "pack: lengths differ");
    let row_bytes = weight_type.row_bytes(inputs).expect("pack: rows are not whole blocks");
    if row_bytes == 0 {
        return;
    }
    assert_eq!(source.len() % row_bytes, 0, "pack: not whole rows");
    let panel_bytes = PANEL_ROWS * row_bytes;
    let mut targets = destination.chunks_exact_mut(panel_bytes);
    let mut sources = source.chunks_exact(panel_bytes);
    for (source, target) in (&mut sources).zip(&mut targets) {
        pack_panel(weight_type, source, target);
    }
    targets.into_remainder().copy_from_slice(sources.remainder());
}

fn pack_panel(weight_type: WeightType, source: &[u8], target: &mut [u8]) {
    // One copy of the loop per type: with constant fields the units become single moves.
    macro_rules! of {
        ($($name:ident)*) => {
            match weight_type {
                $(WeightType::$name => {
                    let bytes = const { WeightType::$name.block_bytes() };
                    let row_bytes = source.len() / PANEL_ROWS;
                    for (b, out) in target.chunks_exact_mut(PANEL_ROWS * bytes).enumerate() {
                        let row = |lane: usize| Some(&source[lane * row_bytes + b * bytes..][..bytes]);
                        interleave(WeightType::$name, row, out);
                    }
                })*
            }
        };
    }
    of!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL);
}

/// Expands row `row` of a packed matrix, as an embedding lookup needs it; the values are [`super::dequantize_row`]'s.
///
/// # Panics
/// If there is no such row or `out` is not `inputs` long.
pub fn dequantize_packed_row(matrix: &PackedMatrix<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), matrix.inputs(), "dequantize: a row is `inputs` long");
    let weight_type = matrix.weight_type();
    let mut bytes = [0; MAX_BLOCK_BYTES];
    for (b, out) in out.chunks_exact_mut(weight_type.block_len()).enumerate() {
        let bytes = &mut bytes[..weight_type.block_bytes()];
        file_block(matrix, row, b, bytes);
        let block = block::Block::new(weight_type, bytes);
        out.iter_mut().enumerate().for_each(|(i, out)| *out = block.value(i));
    }
}

/// Copies block `b` of row `row` as the file had it.
pub(super) fn file_block(matrix: &PackedMatrix<'_>, row: usize, b: usize, out: &mut [u8]) {
    let block_bytes = matrix.weight_type().block_bytes();
    match matrix.panel(row / PANEL_ROWS) {
        Panel::Packed(panel) => {
            let packed = &panel[b * PANEL_ROWS * block_bytes..][..PANEL_ROWS * block_bytes];
            extract(matrix.weight_type(), packed, row % PANEL_ROWS, out);
        }
        Panel::Rows(rows) => {
            let start = row % PANEL_ROWS * matrix.row_bytes() + b * block_bytes;
            out.copy_from_slice(&rows[start..][..block_bytes]);
        }
    }
}

/// A panel's bytes.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// Sixteen rows, interleaved.
    Packed(&'a [u8]),
    /// The fewer rows at the end, in the file's order.
    Rows(&'a [u8]),
}
