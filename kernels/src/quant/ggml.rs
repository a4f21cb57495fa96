//! The block formats in scalar code: what every byte of a GGUF block means. The tests check everything else in [`super`]
//! against this file.

use crate::quant::weight_type::WeightType;
use half::f16;

/// The sixteen levels of IQ4_NL.
pub(super) const IQ4_NL_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// One decoded block: weight `i` is `d * scales[s] * quants[i] - dmin * mins[s]` with `s = i / sub_block`.
pub(super) struct Block {
    /// The integer weights, zero point subtracted. Blocks of 32 fill the first 32.
    pub quants: [i8; 256],
    /// Weights per scale: 16 or 32.
    pub sub_block: usize,
    /// The block's scale.
    pub d: f32,
    /// The sub-blocks' scales; 1 in blocks of 32.
    pub scales: [i8; 16],
    /// The scale of the mins; `-m` for Q4_1 and Q5_1, zero for formats without mins.
    pub dmin: f32,
    /// The sub-blocks' mins.
    pub mins: [u8; 16],
}

fn half_at(bytes: &[u8], offset: usize) -> f32 {
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
fn q3_scale(bytes: &[u8], s: usize) -> i8 {
    let low = bytes[s % 8] >> (4 * (s / 8)) & 15;
    let high = bytes[8 + s % 4] >> (2 * (s / 4)) & 3;
    (low | high << 4) as i8 - 32
}

impl Block {
    /// Decodes one block of `weight_type`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the type's block.
    pub fn new(weight_type: WeightType, bytes: &[u8]) -> Self {
        let mut block = Self {
            quants: [0; 256],
            sub_block: if matches!(weight_type, WeightType::Q2_K | WeightType::Q3_K | WeightType::Q6_K) {
                16
            } else {
                32
            },
            d: 0.0,
            scales: [1; 16],
            dmin: 0.0,
            mins: [0; 16],
        };
        match weight_type {
            WeightType::Q4_0 => block.nibbles(bytes, &bytes[2..], |q| q as i8 - 8),
            WeightType::IQ4_NL => block.nibbles(bytes, &bytes[2..], |q| IQ4_NL_LEVELS[usize::from(q)]),
            WeightType::Q4_1 => block.nibbles(bytes, &bytes[4..], |q| q as i8),
            WeightType::Q5_0 => block.nibbles_and_bits(bytes, &bytes[2..], 16),
            WeightType::Q5_1 => block.nibbles_and_bits(bytes, &bytes[4..], 0),
            WeightType::Q8_0 => {
                block.d = half_at(bytes, 0);
                block.quants.iter_mut().zip(&bytes[2..34]).for_each(|(q, b)| *q = *b as i8);
            }
            WeightType::Q2_K => block.q2(bytes),
            WeightType::Q3_K => block.q3(bytes),
            WeightType::Q4_K | WeightType::Q5_K => block.q4_or_q5(bytes, weight_type),
            WeightType::Q6_K => block.q6(bytes),
        }
        if matches!(weight_type, WeightType::Q4_1 | WeightType::Q5_1) {
            block.dmin = -half_at(bytes, 2);
            block.mins[0] = 1;
        }
        block
    }

    /// Blocks of 32: weight `i` in the low nibble of byte `i`, weight `16 + i` in the high one.
    fn nibbles(&mut self, bytes: &[u8], nibbles: &[u8], value: impl Fn(u8) -> i8) {
        self.d = half_at(bytes, 0);
        for (i, b) in nibbles[..16].iter().enumerate() {
            self.quants[i] = value(b & 15);
            self.quants[16 + i] = value(b >> 4);
        }
    }

    /// As [`Block::nibbles`], behind a 32-bit word with the fifth bit of weight `i` at bit `i`.
    fn nibbles_and_bits(&mut self, bytes: &[u8], rest: &[u8], offset: i8) {
        let high = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
        self.nibbles(bytes, &rest[4..], |q| q as i8);
        for (i, q) in self.quants[..32].iter_mut().enumerate() {
            *q += 16 * (high >> i & 1) as i8 - offset;
        }
    }

    fn q2(&mut self, bytes: &[u8]) {
        let (scales, quants) = (&bytes[..16], &bytes[16..80]);
        self.d = half_at(bytes, 80);
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
        self.d = half_at(bytes, 108);
        for (s, scale) in self.scales.iter_mut().enumerate() {
            *scale = q3_scale(scales, s);
        }
        for (i, q) in self.quants.iter_mut().enumerate() {
            let low = quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            *q = (low | (high[i % 32] >> (i / 32) & 1) << 2) as i8 - 4;
        }
    }

    fn q4_or_q5(&mut self, bytes: &[u8], weight_type: WeightType) {
        self.d = half_at(bytes, 0);
        self.dmin = half_at(bytes, 2);
        for s in 0..8 {
            let (scale, min) = six_bit_scale_and_min(&bytes[4..16], s);
            self.scales[s] = scale as i8;
            self.mins[s] = min;
        }
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
        self.d = half_at(bytes, 208);
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

    /// The value of weight `i`.
    pub fn value(&self, i: usize) -> f32 {
        let s = i / self.sub_block;
        // The product of the scales is exact: 11 bits by at most 8.
        self.d * f32::from(self.scales[s]) * f32::from(self.quants[i]) - self.dmin * f32::from(self.mins[s])
    }
}

/// Expands one row from its GGUF blocks: the specification of each format.
///
/// * `bytes`: the row's blocks, `weight_type.row_bytes(out.len())` bytes.
///
/// # Panics
/// If `out` is not whole blocks or `bytes` has another length.
pub fn dequantize_row(weight_type: WeightType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), weight_type.row_bytes(out.len()), "dequantize: not a row of this length");
    let blocks = bytes.chunks_exact(weight_type.block_bytes());
    for (bytes, out) in blocks.zip(out.chunks_exact_mut(weight_type.block_len())) {
        let block = Block::new(weight_type, bytes);
        out.iter_mut().enumerate().for_each(|(i, out)| *out = block.value(i));
    }
}
