//! Conversion between file order and the packed order of [`super::layout`].

use std::ops::Range;

use crate::quant::layout::{MAX_BLOCK_BYTES, PANEL_ROWS};
use crate::quant::recode::{encode, is_recoded};
use crate::quant::weight_type::WeightType;

/// How packing changes a unit.
#[derive(Clone, Copy)]
enum Change {
    None,
    /// Adds 128 to every byte.
    AddBias,
    /// 0x7f to 0 in every byte. NVFP4 has two encodings of scale zero; extraction always gives 0.
    OneZero,
}

/// A field of a row's block: its bytes, the bytes of an interleaved unit, and their change.
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

/// The fields of a block in the order of [`super::layout`].
const fn fields(weight_type: WeightType) -> &'static [Field] {
    match weight_type {
        WeightType::Q4_0 | WeightType::IQ4_NL => const { &[field(0, 2, 2), field(2, 18, 4)] },
        WeightType::Q4_1 => const { &[field(0, 4, 2), field(4, 20, 4)] },
        WeightType::Q5_0 => const { &[field(0, 2, 2), field(2, 22, 4)] },
        WeightType::Q5_1 => const { &[field(0, 4, 2), field(4, 24, 4)] },
        WeightType::Q8_0 => const { &[field(0, 2, 2), changed(2, 34, Change::AddBias)] },
        WeightType::Q2_K => const { &[field(0, 80, 4), field(80, 84, 2)] },
        WeightType::Q3_K => const { &[field(0, 2, 2), field(2, 110, 4)] },
        WeightType::Q4_K => const { &[field(0, 4, 2), field(4, 144, 4)] },
        WeightType::Q5_K => const { &[field(0, 4, 2), field(4, 176, 4)] },
        // Scales in units of 1 byte: 16 of them widen in one instruction; extracting them from
        // words takes two more each.
        WeightType::Q6_K => const { &[field(0, 2, 2), field(2, 18, 1), field(18, 210, 4)] },
        WeightType::IQ4_XS => const { &[field(0, 2, 2), field(2, 4, 1), field(4, 136, 4)] },
        WeightType::MXFP4 => const { &[field(0, 1, 1), field(1, 17, 4)] },
        WeightType::NVFP4 => const { &[changed(0, 4, Change::OneZero), field(4, 36, 4)] },
        WeightType::TQ1_0 | WeightType::TQ2_0 => const { &[field(64, 66, 2), field(0, 64, 4)] },
        WeightType::IQ1_S => const { &[field(0, 76, 4)] },
        WeightType::IQ2_XXS => const { &[field(0, 104, 4)] },
        WeightType::IQ1_M | WeightType::IQ2_XS | WeightType::IQ2_S => const { &[field(0, 108, 4)] },
        WeightType::IQ3_XXS | WeightType::IQ3_S => const { &[field(0, 136, 4)] },
    }
}

/// Interleaves one block of up to 16 rows. `row(l)` is lane `l`'s block, recoded if the type is; lanes without
/// a row keep their bytes.
#[inline(always)]
pub(super) fn interleave<'a>(weight_type: WeightType, row: impl Fn(usize) -> Option<&'a [u8]>, out: &mut [u8]) {
    let out = &mut out[..PANEL_ROWS * weight_type.packed_block_bytes()];
    for lane in 0..PANEL_ROWS {
        let Some(block) = row(lane) else { continue };
        let mut at = 0;
        for Field { range, unit, change } in fields(weight_type) {
            let source = &block[range.clone()];
            let target = &mut out[at..][..PANEL_ROWS * range.len()];
            at += target.len();
            match unit {
                1 => copy_units::<1>(source, target, lane, |x| x),
                2 => copy_units::<2>(source, target, lane, |x| x),
                _ => match change {
                    Change::None => copy_units::<4>(source, target, lane, |x| x),
                    Change::AddBias => copy_units::<4>(source, target, lane, |x| x.map(|b| b ^ 0x80)),
                    Change::OneZero => {
                        copy_units::<4>(source, target, lane, |x| x.map(|b| if b == 0x7f { 0 } else { b }));
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
    let mut at = 0;
    for Field { range, unit, change } in fields(weight_type) {
        let source = &packed[at..][..PANEL_ROWS * range.len()];
        at += source.len();
        for (k, out) in out[range.clone()].chunks_exact_mut(*unit).enumerate() {
            out.copy_from_slice(&source[(k * PANEL_ROWS + lane) * unit..][..*unit]);
            match change {
                Change::None | Change::OneZero => {}
                Change::AddBias => out.iter_mut().for_each(|b| *b ^= 0x80),
            }
        }
    }
}

/// Packs whole rows from file order into the packed order.
///
/// * `source`: rows `first..` of a matrix with `inputs` columns, where `first` is a multiple of [`PANEL_ROWS`], so that
///   threads can share the work by panels. Only the matrix's last part may end inside a panel.
/// * `destination`: [`WeightType::packed_row_bytes`] for each of these rows. The matrix should be aligned
///   to 64 bytes: a vector is then one cache line.
///
/// # Panics
/// If `source` is not whole rows or `destination` does not have the packed length.
pub fn pack(weight_type: WeightType, inputs: usize, source: &[u8], destination: &mut [u8]) {
    let sizes = weight_type.row_bytes(inputs).zip(weight_type.packed_row_bytes(inputs));
    let (row_bytes, packed_row_bytes) = sizes.expect("pack: rows are not whole blocks");
    let rows = source.len() / row_bytes.max(1);
    assert_eq!(source.len(), rows * row_bytes, "pack: source is not whole rows");
    assert_eq!(destination.len(), rows * packed_row_bytes, "pack: wrong length of destination");
    if row_bytes == 0 {
        return;
    }
    let mut targets = destination.chunks_exact_mut(PANEL_ROWS * packed_row_bytes);
    let mut sources = source.chunks_exact(PANEL_ROWS * row_bytes);
    for (source, target) in (&mut sources).zip(&mut targets) {
        pack_panel(weight_type, source, target);
    }
    let (source, target) = (sources.remainder(), targets.into_remainder());
    if is_recoded(weight_type) {
        let blocks = source.chunks_exact(weight_type.block_bytes());
        for (block, out) in blocks.zip(target.chunks_exact_mut(weight_type.packed_block_bytes())) {
            encode(weight_type, block, out);
        }
    } else {
        target.copy_from_slice(source);
    }
}

fn pack_panel(weight_type: WeightType, source: &[u8], target: &mut [u8]) {
    // One loop per type: with constant fields, copies of units become single moves.
    macro_rules! of {
        ($($name:ident)*) => {
            match weight_type {
                $(WeightType::$name => {
                    let bytes = const { WeightType::$name.block_bytes() };
                    let packed_bytes = const { WeightType::$name.packed_block_bytes() };
                    let row_bytes = source.len() / PANEL_ROWS;
                    let mut blocks = [[0; MAX_BLOCK_BYTES]; PANEL_ROWS];
                    for (b, out) in target.chunks_exact_mut(PANEL_ROWS * packed_bytes).enumerate() {
                        let row = |lane: usize| &source[lane * row_bytes + b * bytes..][..bytes];
                        if const { is_recoded(WeightType::$name) } {
                            for (lane, block) in blocks.iter_mut().enumerate() {
                                encode(WeightType::$name, row(lane), &mut block[..packed_bytes]);
                            }
                            interleave(WeightType::$name, |lane| Some(&blocks[lane][..packed_bytes]), out);
                        } else {
                            interleave(WeightType::$name, |lane| Some(row(lane)), out);
                        }
                    }
                })*
            }
        };
    }
    of!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4 TQ1_0 TQ2_0
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S);
}
