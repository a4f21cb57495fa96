//! Recoded blocks: the packed form of types whose bits are arranged anew.
//!
//! Grids: a weight is one of a few integers, *levels*. Grids are looked up once, when weights are packed; a block then
//! has each weight's level index, so that a product unpacks bits and looks up one byte, as for other types.
//!
//! Three, five and six bits: in files, Q3_K, Q5_0, Q5_1, Q5_K and Q6_K have some bits of a weight in one plane and the
//! others in another, which takes 4.5 operations per quad; some planes would also be read back and
//! forth, which hardware prefetchers do not follow. In words that have all bits of 32 weights,
//! three bits take 2.4 operations, five or six 3.
//!
//! The block of one row, before `pack.rs` interleaves it with those of other rows:
//!
//! ```text
//!                        bytes: d       scales         offsets   weights                  total    bits per weight
//! IQ3_XXS, IQ3_S         4 (f32)        4              -         8 x 16, four bits        136      4.25
//! IQ2_XXS                4 (f32)        4              -         8 x 12, three bits       104      3.25
//! IQ2_XS, IQ2_S, IQ1_M   4 (f32)        8              -         8 x 12, three bits       108      3.38
//! IQ1_S                  4 (f32)        4              4         2 x 32, two bits          76      2.38
//! TQ1_0, TQ2_0           2 (f16), last  -              -         2 x 32, two bits          66      2.06
//! Q3_K                   2 (f16)        12, as in files  -       8 x 12, three bits       110      3.44
//! Q5_K                   4, 12: d, dmin, scales and mins, as in files   8 x 20, five bits  176      5.50
//! Q6_K                   2 (f16)        16, 8 bits     -         8 x 24, six bits         210      6.56
//! Q5_0, Q5_1             2, 4: d and m, as in files              20, five bits         22, 24      5.50, 6.00
//! ```
//!
//! * Scales of grids: nibble `s` is `b` of scale `s`, which is `2 b + 1`.
//! * Four bits: 16 bytes per 32 weights, weight `i` in the low nibble of byte `i` and `16 + i` in
//!   the high one, as IQ4_XS.
//! * Three bits: three words per 32 weights, byte `j` of each with weight `j` of eight quads. The first four quads
//!   are in words 0 and 1, the others in 1 and 2:
//!
//! ```text
//! bits     0 1 2    3 4 5    6 7
//! word 0   quad 0   quad 1   lower two bits of quad 3
//! word 1   quad 2   quad 4   upper bit of quad 3, upper bit of quad 7
//! word 2   quad 5   quad 6   lower two bits of quad 7
//! ```
//!
//! * Five bits: five words per 32 weights. Byte `j` of word `t` has weight `j` of quad `t` in its lower five bits, and
//!   above them the lower three of quad `4 + t`; the upper two are bits `2 t` of word 4.
//! * Six bits: six words per 32 weights. Byte `j` of word `t` has weight `j` of quad `t` in its lower six bits, and
//!   above them the lower two of quad `4 + t`; the upper four are nibble `t % 2` of word `4 + t / 2`.
//! * Two bits: 32 bytes per 128 weights, weight `i` in bits `2 (i / 32)` of byte `i % 32`, as TQ2_0 in files.
//! * IQ1_S: -1, 0 and 1 have level indices 0 to 2, and all weights of a scale are offset by an eighth up or down: in
//!   eighths, index `t` is `8 t - 9`, or two more if bit `s` of each of the offsets' four bytes is set, for scale `s`.
//!
//! With grids, `d` is the product of the block's scale and a power of two, which may be outside the range of `f16`;
//! four bytes also keep packed blocks on cache lines.

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

/// How levels are stored.
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

/// Whether a weight has five or six bits.
const fn has_five_or_six_bits(weight_type: WeightType) -> bool {
    matches!(weight_type, WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q5_K | WeightType::Q6_K)
}

/// Whether packed blocks of the type are recoded.
pub(super) const fn is_recoded(weight_type: WeightType) -> bool {
    coding(weight_type).is_some() || has_five_or_six_bits(weight_type)
}

/// Byte offset of the weights' bits, after the scales and the offsets.
pub(super) const fn weights_at(weight_type: WeightType) -> usize {
    use WeightType::*;
    match weight_type {
        IQ3_XXS | IQ3_S | IQ2_XXS => 8,
        TQ1_0 | TQ2_0 => 0,
        Q5_0 => 2,
        Q5_1 => 4,
        Q3_K => 14,
        Q5_K => 16,
        Q6_K => 18,
        _ => 12,
    }
}

/// Byte offset of TQ1_0's and TQ2_0's scale.
pub(super) const TERNARY_SCALE: usize = 64;

/// Encodes a GGUF block as a recoded block.
///
/// # Panics
/// If the type has none, or a slice is shorter than the type's block.
#[inline(always)]
pub(super) fn encode(weight_type: WeightType, file: &[u8], out: &mut [u8]) {
    match weight_type {
        WeightType::Q3_K => return encode_q3_k(file, out),
        WeightType::Q6_K => return encode_q6_k(file, out),
        WeightType::Q5_0 | WeightType::Q5_1 => return encode_q5(weights_at(weight_type), file, out),
        WeightType::Q5_K => return encode_q5_k(file, out),
        _ => {}
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

/// As [`encode`], of Q3_K.
#[inline(always)]
fn encode_q3_k(file: &[u8], out: &mut [u8]) {
    let (scales, weights) = out.split_at_mut(weights_at(WeightType::Q3_K));
    scales[..2].copy_from_slice(&file[108..110]);
    scales[2..].copy_from_slice(&file[96..108]);
    let words = words::<24>(file);
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
    put_words(out, words);
}

/// As [`encode`], of Q5_0 or Q5_1: after the scales, a word with the fifth bit of weight `i` at bit `i`, then nibbles.
#[inline(always)]
fn encode_q5(scales: usize, file: &[u8], out: &mut [u8]) {
    out[..scales].copy_from_slice(&file[..scales]);
    let [upper, lower @ ..] = words::<5>(&file[scales..]);
    let out = out[scales..].first_chunk_mut().expect("a block");
    put_five_bits(out, |q| {
        // Bit `i` of the nibble to bit `8 i`.
        let fifth = ((upper >> (4 * q) & 15) * 0x0020_4081) & 0x0101_0101;
        lower[q % 4] >> (q / 4 * 4) & 0x0f0f_0f0f | fifth << 4
    });
}

/// As [`encode`], of Q5_K.
#[inline(always)]
fn encode_q5_k(file: &[u8], out: &mut [u8]) {
    let (scales, weights) = out.split_at_mut(weights_at(WeightType::Q5_K));
    scales.copy_from_slice(&file[..scales.len()]);
    let words = words::<40>(&file[scales.len()..]);
    let (upper, lower) = words.split_at(8);
    for (s, out) in weights.as_chunks_mut().0.iter_mut().take(8).enumerate() {
        put_five_bits(out, |q| lower[s / 2 * 8 + q] >> (s % 2 * 4) & 0x0f0f_0f0f | (upper[q] >> s & 0x0101_0101) << 4);
    }
}

/// As [`encode`], of Q6_K.
#[inline(always)]
fn encode_q6_k(file: &[u8], out: &mut [u8]) {
    let (scales, weights) = out.split_at_mut(weights_at(WeightType::Q6_K));
    scales[..2].copy_from_slice(&file[208..210]);
    scales[2..].copy_from_slice(&file[192..208]);
    let words = words::<48>(file);
    let (lower, upper) = words.split_at(32);
    for (k, out) in weights.as_chunks_mut::<24>().0.iter_mut().take(8).enumerate() {
        let (half, quarter) = (k / 4, k % 4);
        let quad = |q: usize| {
            let bits = lower[half * 16 + quarter % 2 * 8 + q] >> (quarter / 2 * 4) & 0x0f0f_0f0f;
            bits | (upper[half * 8 + q] >> (2 * quarter) & 0x0303_0303) << 4
        };
        let mut words = [0; 6];
        for t in 0..4 {
            let next = quad(4 + t);
            words[t] = quad(t) | (next & 0x0303_0303) << 6;
            words[4 + t / 2] |= (next >> 2 & 0x0f0f_0f0f) << (t % 2 * 4);
        }
        put_words(out, words);
    }
}

/// Eight quads, five bits in each byte.
#[inline(always)]
fn put_five_bits(out: &mut [u8; 20], quad: impl Fn(usize) -> u32) {
    let mut words = [0; 5];
    for t in 0..4 {
        let next = quad(4 + t);
        words[t] = quad(t) | (next & 0x0707_0707) << 5;
        words[4] |= (next >> 3 & 0x0303_0303) << (2 * t);
    }
    put_words(out, words);
}

/// The first words of a block, as an array: together with loops of a known length (`take(8)`), no index is
/// checked, which would take 1.4 to 2.5 times as long.
fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    bytes.as_chunks().0.first_chunk::<N>().expect("a block").map(u32::from_le_bytes)
}

fn put_words<const N: usize>(out: &mut [u8], words: [u32; N]) {
    out.as_chunks_mut().0.iter_mut().zip(words).for_each(|(out, word)| *out = word.to_le_bytes());
}

/// Two bits of each weight.
#[inline(always)]
fn put_pairs(quants: &[[i8; 32]], out: &mut [u8], pair: impl Fn(i8) -> u8) {
    for (quants, out) in quants.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        *out = std::array::from_fn(|i| (0..4).fold(0, |byte, k| byte | pair(quants[k][i]) << (2 * k)));
    }
}

/// Decodes a recoded block.
///
/// # Panics
/// As [`encode`].
pub(super) fn decode(weight_type: WeightType, bytes: &[u8]) -> Block {
    let (scales, weights) = bytes.split_at(weights_at(weight_type));
    if has_five_or_six_bits(weight_type) {
        return decode_five_or_six_bits(weight_type, scales, weights);
    }
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

/// As [`decode`], of five or six bits.
fn decode_five_or_six_bits(weight_type: WeightType, scales: &[u8], weights: &[u8]) -> Block {
    let mut block = Block::empty(weight_type);
    for (i, q) in block.quants[..weight_type.block_len()].iter_mut().enumerate() {
        let (t, first) = (i / 4 % 4, i % 32 < 16);
        let word = |words: usize, k: usize| weights[4 * (i / 32 * words + k) + i % 4];
        let bits = match (weight_type, first) {
            (WeightType::Q6_K, true) => word(6, t) & 63,
            (WeightType::Q6_K, false) => word(6, t) >> 6 | (word(6, 4 + t / 2) >> (t % 2 * 4) & 15) << 2,
            (_, true) => word(5, t) & 31,
            (_, false) => word(5, t) >> 5 | (word(5, 4) >> (2 * t) & 3) << 3,
        };
        let zero_point = match weight_type {
            WeightType::Q6_K => 32,
            WeightType::Q5_0 => 16,
            _ => 0,
        };
        *q = bits as i8 - zero_point;
    }
    if weight_type == WeightType::Q5_K {
        block.six_bit_scales(scales);
    } else {
        block.d = [half_at(scales, 0); 16];
    }
    if weight_type == WeightType::Q5_1 {
        block.dmin = -half_at(scales, 2);
        block.mins[0] = 1;
    }
    if weight_type == WeightType::Q6_K {
        block.scales = std::array::from_fn(|s| scales[2 + s] as i8);
    }
    block
}
