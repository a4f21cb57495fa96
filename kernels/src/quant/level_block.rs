//! Level blocks: the packed form of grid, ternary and Q3_K blocks.
//!
//! A weight of these types is one of a few integers, *levels*. Grids are looked up once, when weights are packed; a
//! block then has each weight's level index, so that a product unpacks bits and looks up one byte, as for other types.
//! The block of one row, before `pack.rs` interleaves it with those of other rows:
//!
//! ```text
//!                        bytes: d       scales         offsets   level indices            total    bits per weight
//! IQ3_XXS, IQ3_S         4 (f32)        4              -         8 x 16, four bits        136      4.25
//! IQ2_XXS                4 (f32)        4              -         8 x 12, three bits       104      3.25
//! IQ2_XS, IQ2_S, IQ1_M   4 (f32)        8              -         8 x 12, three bits       108      3.38
//! Q3_K                   2 (f16)        12, as in files  -       8 x 12, three bits       110      3.44
//! IQ1_S                  4 (f32)        4              4         2 x 32, two bits          76      2.38
//! TQ1_0, TQ2_0           2 (f16), last  -              -         2 x 32, two bits          66      2.06
//! ```
//!
//! * Scales of grids: nibble `s` is `b` of scale `s`, which is `2 b + 1`.
//! * Four bits: 16 bytes per 32 weights, weight `i` in the low nibble of byte `i` and `16 + i` in the high one, as IQ4_XS.
//! * Three bits: three words per 32 weights, byte `j` of each with weight `j` of eight quads. The first four quads are in
//!   words 0 and 1, the others in 1 and 2:
//!
//! ```text
//! bits     0 1 2    3 4 5    6 7
//! word 0   quad 0   quad 1   lower two bits of quad 3
//! word 1   quad 2   quad 4   upper bit of quad 3, upper bit of quad 7
//! word 2   quad 5   quad 6   lower two bits of quad 7
//! ```
//!
//! * Two bits: 32 bytes per 128 weights, weight `i` in bits `2 (i / 32)` of byte `i % 32`, as TQ2_0 in files.
//! * IQ1_S: -1, 0 and 1 have level indices 0 to 2, and all weights of a scale are offset by an eighth up or down: in
//!   eighths, index `t` is `8 t - 9`, or two more if bit `s` of each of the offsets' four bytes is set, for scale `s`.
//!
//! With grids, `d` is the product of the block's scale and a power of two, which may be outside the range of `f16`; four
//! bytes also keep packed blocks on cache lines.
//!
//! In files, Q3_K has its upper bits in one plane and the lower ones in another. A product would read both back and forth,
//! which hardware prefetchers do not follow, and take 4.6 operations per quad; three bits take 2.4.

use crate::quant::ggml::{Block, half_at, q3_scale};
use crate::quant::weight_type::WeightType;

/// The levels of the types with four bits.
pub(super) const IQ3_XXS_LEVELS: [i8; 16] = [-31, -26, -22, -18, -14, -10, -6, -2, 2, 6, 10, 14, 18, 22, 26, 31];
pub(super) const IQ3_S_LEVELS: [i8; 16] = [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15];
/// The levels of the types with three bits; of grids, the last two are unused.
pub(super) const IQ2_LEVELS: [i8; 8] = [-43, -25, -8, 8, 25, 43, 0, 0];
pub(super) const IQ1_M_LEVELS: [i8; 8] = [-9, -7, -1, 1, 7, 9, 0, 0];
const Q3_K_LEVELS: [i8; 8] = [-4, -3, -2, -1, 0, 1, 2, 3];

/// Level indices by the levels' bytes.
const fn numbers<const N: usize>(levels: [i8; N]) -> [u8; 256] {
    let mut numbers = [0; 256];
    let mut i = 0;
    while i < N {
        numbers[levels[i] as u8 as usize] = i as u8;
        i += 1;
    }
    numbers
}

/// How the weights of a type are stored.
enum Coding {
    Four(&'static [i8; 16], &'static [u8; 256]),
    Three(&'static [i8; 8], &'static [u8; 256]),
    Eighths,
    Ternary,
}

const fn coding(weight_type: WeightType) -> Option<Coding> {
    use WeightType::*;
    macro_rules! of {
        ($coding:ident $levels:ident) => {
            Coding::$coding(const { &$levels }, const { &numbers($levels) })
        };
    }
    Some(match weight_type {
        IQ3_XXS => of!(Four IQ3_XXS_LEVELS),
        IQ3_S => of!(Four IQ3_S_LEVELS),
        IQ2_XXS | IQ2_XS | IQ2_S => of!(Three IQ2_LEVELS),
        IQ1_M => of!(Three IQ1_M_LEVELS),
        Q3_K => of!(Three Q3_K_LEVELS),
        IQ1_S => Coding::Eighths,
        TQ1_0 | TQ2_0 => Coding::Ternary,
        _ => return None,
    })
}

/// Whether packed blocks of the type are level blocks.
pub(super) const fn has_levels(weight_type: WeightType) -> bool {
    coding(weight_type).is_some()
}

/// Byte offset of the level indices, after the scale, the scales' bits and the offsets.
pub(super) const fn weights_at(weight_type: WeightType) -> usize {
    use WeightType::*;
    match weight_type {
        IQ3_XXS | IQ3_S | IQ2_XXS => 8,
        TQ1_0 | TQ2_0 => 0,
        Q3_K => 14,
        _ => 12,
    }
}

/// Byte offset of TQ1_0's and TQ2_0's scale.
pub(super) const TERNARY_SCALE: usize = 64;

/// Encodes a GGUF block as a level block.
///
/// # Panics
/// If the type has none, or a slice is shorter than the type's block.
#[inline(always)]
pub(super) fn encode(weight_type: WeightType, file: &[u8], out: &mut [u8]) {
    if weight_type == WeightType::Q3_K {
        return encode_q3_k(file, out);
    }
    let block = Block::new(weight_type, file);
    let (scales, weights) = out.split_at_mut(weights_at(weight_type));
    let quants = block.quants.as_chunks::<32>().0;
    match coding(weight_type).expect("a type with levels") {
        Coding::Four(_, numbers) => {
            let number = |q: i8| numbers[usize::from(q as u8)];
            for (q, out) in quants.iter().zip(weights.as_chunks_mut::<16>().0) {
                *out = std::array::from_fn(|i| number(q[i]) | number(q[16 + i]) << 4);
            }
        }
        Coding::Three(_, numbers) => {
            for (q, out) in quants.iter().zip(weights.as_chunks_mut::<12>().0) {
                let numbers = q.map(|q| numbers[usize::from(q as u8)]);
                put_quads(std::array::from_fn(|quad| u32::from_le_bytes(numbers.as_chunks().0[quad])), out);
            }
        }
        // `q + 9` is `8 t` or `8 t + 2`.
        Coding::Eighths => {
            let offsets = (0..8).fold(0, |offsets, s| offsets | (((quants[s][0] + 9) as u8 >> 1 & 1) << s));
            scales[8..].fill(offsets);
            put_pairs(quants, weights, |q| (q + 9) as u8 >> 3);
        }
        Coding::Ternary => {
            put_pairs(quants, weights, |q| (q + 1) as u8);
            let scale = file.len() - 2;
            weights[TERNARY_SCALE..].copy_from_slice(&file[scale..]);
            return;
        }
    }
    scales[..4].copy_from_slice(&block.d[0].to_le_bytes());
    let bits = |s: usize| block.scales[s] as u8 >> 1;
    for (i, out) in scales[4..][..128 / block.sub_block].iter_mut().enumerate() {
        *out = bits(2 * i) | bits(2 * i + 1) << 4;
    }
}

/// As [`encode`], a quad at a time: files of Q3_K are packed as fast as they are read.
fn encode_q3_k(file: &[u8], out: &mut [u8]) {
    let (scales, weights) = out.split_at_mut(weights_at(WeightType::Q3_K));
    scales[..2].copy_from_slice(&file[108..110]);
    scales[2..].copy_from_slice(&file[96..108]);
    let words = file.as_chunks().0.first_chunk::<24>().expect("a block").map(u32::from_le_bytes);
    let (upper, lower) = words.split_at(8);
    for (k, out) in weights.as_chunks_mut::<12>().0.iter_mut().take(8).enumerate() {
        let quad = |quad: usize| {
            let bits = lower[k / 4 * 8 + quad] >> (2 * (k % 4)) & 0x0303_0303;
            bits | (upper[quad] >> k & 0x0101_0101) << 2
        };
        put_quads(std::array::from_fn(quad), out);
    }
}

/// Eight quads, three bits in each byte.
#[inline(always)]
fn put_quads(q: [u32; 8], out: &mut [u8; 12]) {
    let (low, high) = (0x0303_0303, 0x0404_0404);
    let words = [
        q[0] | q[1] << 3 | (q[3] & low) << 6,
        q[2] | q[4] << 3 | (q[3] & high) << 4 | (q[7] & high) << 5,
        q[5] | q[6] << 3 | (q[7] & low) << 6,
    ];
    out.as_chunks_mut().0.iter_mut().zip(words).for_each(|(out, word)| *out = word.to_le_bytes());
}

/// Two bits of each weight.
#[inline(always)]
fn put_pairs(quants: &[[i8; 32]], out: &mut [u8], pair: impl Fn(i8) -> u8) {
    for (quants, out) in quants.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        *out = std::array::from_fn(|i| (0..4).fold(0, |byte, k| byte | pair(quants[k][i]) << (2 * k)));
    }
}

/// Decodes a level block.
///
/// # Panics
/// As [`encode`].
pub(super) fn decode(weight_type: WeightType, bytes: &[u8]) -> Block {
    let (scales, weights) = bytes.split_at(weights_at(weight_type));
    let pair = |i: usize| (weights[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3) as i8;
    let mut block = Block::empty(weight_type);
    let quant: &dyn Fn(usize) -> i8 = match coding(weight_type).expect("a type with levels") {
        Coding::Four(levels, _) => &|i| levels[usize::from(weights[i / 32 * 16 + i % 16] >> (4 * (i / 16 % 2)) & 15)],
        Coding::Three(levels, _) => &|i| {
            let word = |k: usize| weights[i / 32 * 12 + 4 * k + i % 4];
            let number = match i / 4 % 8 {
                0 => word(0),
                1 => word(0) >> 3,
                2 => word(1),
                3 => word(0) >> 6 | word(1) >> 4 & 4,
                4 => word(1) >> 3,
                5 => word(2),
                6 => word(2) >> 3,
                _ => word(2) >> 6 | word(1) >> 5 & 4,
            };
            levels[usize::from(number & 7)]
        },
        Coding::Eighths => &|i| 8 * pair(i) - 9 + 2 * (scales[8] >> (i / 32) & 1) as i8,
        Coding::Ternary => return Block::new(WeightType::TQ2_0, bytes),
    };
    for (i, q) in block.quants.iter_mut().enumerate() {
        *q = quant(i);
    }
    if weight_type == WeightType::Q3_K {
        block.d = [half_at(scales, 0); 16];
        block.scales = std::array::from_fn(|s| q3_scale(&scales[2..], s));
        return block;
    }
    block.d = [f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]); 16];
    for (s, scale) in block.scales[..256 / block.sub_block].iter_mut().enumerate() {
        *scale = (2 * (scales[4 + s / 2] >> (4 * (s % 2)) & 15) + 1) as i8;
    }
    block
}
