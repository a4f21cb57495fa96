//! The block formats in scalar code: the meaning of every byte of a GGUF block. The tests check everything else in
//! [`super`] against this file.

use crate::quant::grids::{self, Row};
use crate::quant::weight_type::WeightType;
use half::f16;

/// The sixteen levels of IQ4_NL.
pub(super) const IQ4_NL_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The sixteen levels of E2M1 (one sign, two exponent and one mantissa bit), doubled.
pub(super) const E2M1_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// One decoded block: weight `i` is `d[s] * scales[s] * quants[i] - dmin * mins[s]` with `s = i / sub_block`.
pub(super) struct Block {
    /// The integer weights, zero point subtracted. Blocks of 32 fill the first 32.
    pub quants: [i8; 256],
    /// Weights per scale: 16 or 32. (The one scale of ternary blocks is repeated.)
    pub sub_block: usize,
    /// The block's scale, for every sub-block; NVFP4's differ.
    pub d: [f32; 16],
    /// The sub-blocks' scales; 1 in blocks of 32.
    pub scales: [i8; 16],
    /// The scale of the mins; `-m` for Q4_1 and Q5_1, zero for formats without mins.
    pub dmin: f32,
    /// The sub-blocks' mins.
    pub mins: [u8; 16],
}

pub(super) fn half_at(bytes: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([bytes[offset], bytes[offset + 1]]).to_f32()
}

/// The 6-bit scale and min of sub-block `s` in the 12 bytes of Q4_K and Q5_K:
///
/// ```text
/// bytes 0..4    bits 0..6 scale s (s = 0..4),  bits 6..8 upper 2 bits of scale 4 + s
/// bytes 4..8    bits 0..6 min s,               bits 6..8 upper 2 bits of min 4 + s
/// bytes 8..12   low nibble of scale 4 + s,     high nibble: low 4 bits of min 4 + s
/// ```
fn six_bit_scale_and_min(bytes: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        (bytes[s] & 63, bytes[s + 4] & 63)
    } else {
        (bytes[s + 4] & 15 | (bytes[s - 4] >> 6) << 4, bytes[s + 4] >> 4 | (bytes[s] >> 6) << 4)
    }
}

/// The 6-bit scale of sub-block `s` in Q3_K's 12 bytes: low nibbles in bytes 0..8, pairs of high bits in bytes 8..12.
pub(super) fn q3_scale(bytes: &[u8], s: usize) -> i8 {
    let low = bytes[s % 8] >> (4 * (s / 8)) & 15;
    let high = bytes[8 + s % 4] >> (2 * (s / 4)) & 3;
    (low | high << 4) as i8 - 32
}

/// `2^(exponent - 127)`, halved because [`E2M1_LEVELS`] are doubled. All exponents are finite: 255 is not NaN in GGUF.
pub(super) fn half_power_of_two(exponent: u8) -> f32 {
    2f64.powi(i32::from(exponent) - 128) as f32 // exact, also where it is subnormal
}

/// The seven lower bits as an unsigned E4M3 of bias 7, halved because [`E2M1_LEVELS`] are doubled.
/// 0x7f, NaN in the OCP's E4M3, is 0; 0xff is not.
fn half_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (byte >> 3 & 15, f32::from(byte & 7));
    match (byte, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * 2f32.powi(-10),
        _ => (8.0 + mantissa) * 2f32.powi(i32::from(exponent) - 11),
    }
}

/// Digit `t`, counted from the most significant, of a byte that is a fraction in base 3: `byte /
/// 256 = 0.d0 d1 d2 d3 d4`.
fn trit(byte: u8, t: u32) -> u8 {
    let rest = byte.wrapping_mul(3u8.pow(t));
    ((u16::from(rest) * 3) >> 8) as u8
}

impl Block {
    /// Zero weights, and scales of 1.
    pub fn empty(weight_type: WeightType) -> Self {
        use WeightType::*;
        let sub_block = match weight_type {
            Q2_K | Q3_K | Q6_K | NVFP4 | IQ1_M | IQ2_XS | IQ2_S => 16,
            _ => 32,
        };
        Self { quants: [0; 256], sub_block, d: [0.0; 16], scales: [1; 16], dmin: 0.0, mins: [0; 16] }
    }

    /// Decodes one block of `weight_type`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the type's block.
    pub fn new(weight_type: WeightType, bytes: &[u8]) -> Self {
        use WeightType::*;
        let mut block = Self::empty(weight_type);
        match weight_type {
            Q4_0 => block.nibbles(bytes, &bytes[2..], |q| q as i8 - 8),
            IQ4_NL => block.nibbles(bytes, &bytes[2..], |q| IQ4_NL_LEVELS[usize::from(q)]),
            Q4_1 => block.nibbles(bytes, &bytes[4..], |q| q as i8),
            Q5_0 => block.nibbles_and_bits(bytes, &bytes[2..], 16),
            Q5_1 => block.nibbles_and_bits(bytes, &bytes[4..], 0),
            Q8_0 => {
                block.d = [half_at(bytes, 0); 16];
                block.quants.iter_mut().zip(&bytes[2..34]).for_each(|(q, b)| *q = *b as i8);
            }
            Q2_K => block.q2(bytes),
            Q3_K => block.q3(bytes),
            Q4_K | Q5_K => block.q4_or_q5(bytes, weight_type),
            Q6_K => block.q6(bytes),
            IQ4_XS => block.iq4_xs(bytes),
            MXFP4 => {
                block.nibbles(bytes, &bytes[1..], |q| E2M1_LEVELS[usize::from(q)]);
                block.d = [half_power_of_two(bytes[0]); 16];
            }
            NVFP4 => block.nvfp4(bytes),
            TQ1_0 => block.tq1(bytes),
            TQ2_0 => block.tq2(bytes),
            IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => {
                let Block { quants, d, scales, .. } = &mut block;
                grids::decode(weight_type, &mut Row { bytes, quants, d, scales });
            }
        }
        if matches!(weight_type, Q4_1 | Q5_1) {
            block.dmin = -half_at(bytes, 2);
            block.mins[0] = 1;
        }
        block
    }

    /// Blocks of 32: weight `i` in the low nibble of byte `i`, weight `16 + i` in the high one.
    fn nibbles(&mut self, bytes: &[u8], nibbles: &[u8], value: impl Fn(u8) -> i8) {
        self.d = [half_at(bytes, 0); 16];
        for (i, b) in nibbles[..16].iter().enumerate() {
            self.quants[i] = value(b & 15);
            self.quants[16 + i] = value(b >> 4);
        }
    }

    /// As [`Block::nibbles`], after a 32-bit word with the fifth bit of weight `i` at bit `i`.
    fn nibbles_and_bits(&mut self, bytes: &[u8], rest: &[u8], offset: i8) {
        let high = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
        self.nibbles(bytes, &rest[4..], |q| q as i8);
        for (i, q) in self.quants[..32].iter_mut().enumerate() {
            *q += 16 * (high >> i & 1) as i8 - offset;
        }
    }

    fn q2(&mut self, bytes: &[u8]) {
        let (scales, quants) = (&bytes[..16], &bytes[16..80]);
        self.d = [half_at(bytes, 80); 16];
        self.dmin = half_at(bytes, 82);
        for (s, both) in scales.iter().enumerate() {
            self.scales[s] = (both & 15) as i8;
            self.mins[s] = both >> 4;
        }
        for (i, q) in self.quants.iter_mut().enumerate() {
            *q = (quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8;
        }
    }

    fn q3(&mut self, bytes: &[u8]) {
        let (high, quants, scales) = (&bytes[..32], &bytes[32..96], &bytes[96..108]);
        self.d = [half_at(bytes, 108); 16];
        for (s, scale) in self.scales.iter_mut().enumerate() {
            *scale = q3_scale(scales, s);
        }
        for (i, q) in self.quants.iter_mut().enumerate() {
            let low = quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            *q = (low | (high[i % 32] >> (i / 32) & 1) << 2) as i8 - 4;
        }
    }

    /// The scales and mins of Q4_K and Q5_K, from a block's first 16 bytes.
    pub fn six_bit_scales(&mut self, bytes: &[u8]) {
        self.d = [half_at(bytes, 0); 16];
        self.dmin = half_at(bytes, 2);
        for s in 0..8 {
            let (scale, min) = six_bit_scale_and_min(&bytes[4..16], s);
            self.scales[s] = scale as i8;
            self.mins[s] = min;
        }
    }

    fn q4_or_q5(&mut self, bytes: &[u8], weight_type: WeightType) {
        self.six_bit_scales(bytes);
        let (high, quants) = match weight_type {
            WeightType::Q5_K => (Some(&bytes[16..48]), &bytes[48..176]),
            _ => (None, &bytes[16..144]),
        };
        for (i, q) in self.quants.iter_mut().enumerate() {
            let low = quants[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
            let bit = high.map_or(0, |high| high[i % 32] >> (i / 32) & 1);
            *q = (low | bit << 4) as i8;
        }
    }

    fn q6(&mut self, bytes: &[u8]) {
        let (low, high, scales) = (&bytes[..128], &bytes[128..192], &bytes[192..208]);
        self.d = [half_at(bytes, 208); 16];
        for (scale, s) in self.scales.iter_mut().zip(scales) {
            *scale = *s as i8;
        }
        for (i, q) in self.quants.iter_mut().enumerate() {
            let (half, quarter) = (i / 128, i % 128 / 32);
            let nibble = low[half * 64 + i % 64] >> (quarter / 2 * 4) & 15;
            let bits = high[half * 32 + i % 32] >> (quarter * 2) & 3;
            *q = (nibble | bits << 4) as i8 - 32;
        }
    }

    fn iq4_xs(&mut self, bytes: &[u8]) {
        let (high, low, quants) = (u16::from_le_bytes([bytes[2], bytes[3]]), &bytes[4..8], &bytes[8..136]);
        self.d = [half_at(bytes, 0); 16];
        for s in 0..8 {
            let scale = low[s / 2] >> (4 * (s % 2)) & 15 | ((high >> (2 * s) & 3) as u8) << 4;
            self.scales[s] = scale as i8 - 32;
        }
        for (i, q) in self.quants.iter_mut().enumerate() {
            *q = IQ4_NL_LEVELS[usize::from(quants[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15)];
        }
    }

    /// Four sub-blocks of 16: in each, weight `i` in the low nibble of byte `i`, weight `8 + i` in the high one.
    fn nvfp4(&mut self, bytes: &[u8]) {
        for (s, d) in self.d[..4].iter_mut().enumerate() {
            *d = half_e4m3(bytes[s]);
        }
        for (i, q) in self.quants[..64].iter_mut().enumerate() {
            *q = E2M1_LEVELS[usize::from(bytes[4 + i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15)];
        }
    }

    /// 32 bytes, 16 bytes and 4 bytes of digits: the first digit of each byte of a run, then the second of each, ...
    fn tq1(&mut self, bytes: &[u8]) {
        self.d = [half_at(bytes, 52); 16];
        for (run, first) in [(&bytes[..32], 0), (&bytes[32..48], 160), (&bytes[48..52], 240)] {
            for (i, q) in self.quants[first..].iter_mut().take(5 * run.len()).enumerate() {
                *q = trit(run[i % run.len()], (i / run.len()) as u32) as i8 - 1;
            }
        }
    }

    fn tq2(&mut self, bytes: &[u8]) {
        self.d = [half_at(bytes, 64); 16];
        for (i, q) in self.quants.iter_mut().enumerate() {
            *q = (bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8 - 1;
        }
    }

    /// The values of the block's first weights, as many as `out` has.
    pub fn values(&self, out: &mut [f32]) {
        let of_sub_blocks = out.chunks_mut(self.sub_block).zip(self.quants.chunks(self.sub_block));
        for (s, (out, quants)) in of_sub_blocks.enumerate() {
            // The product of the scales is exact: 11 bits by at most 8.
            let (scale, min) = (self.d[s] * f32::from(self.scales[s]), self.dmin * f32::from(self.mins[s]));
            out.iter_mut().zip(quants).for_each(|(out, q)| *out = scale * f32::from(*q) - min);
        }
    }
}

/// Dequantizes one row of GGUF blocks: the specification of each format.
///
/// * `bytes`: the row's blocks, `weight_type.row_bytes(out.len())` bytes.
///
/// # Panics
/// If `out` is not whole blocks or `bytes` has a different length.
pub fn dequantize_row(weight_type: WeightType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), weight_type.row_bytes(out.len()), "dequantize: wrong length of bytes");
    let blocks = bytes.chunks_exact(weight_type.block_bytes());
    for (bytes, out) in blocks.zip(out.chunks_exact_mut(weight_type.block_len())) {
        Block::new(weight_type, bytes).values(out);
    }
}
