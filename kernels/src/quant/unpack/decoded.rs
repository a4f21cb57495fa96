//! Formats whose weights are points of a grid, or digits in base 3: blocks are decoded into memory, by the same code for
//! every instruction set, and the kernels read bytes from there. So all types with as many scales are one format to them.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::format::{BlockScales, Format};
#[cfg(target_arch = "x86_64")]
use super::iq3_vbmi;
use crate::quant::grids::{Row, ZERO_POINT, decode};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};
use crate::quant::packed_matrix::PackedMatrix;
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};
use half::f16;

/// A decoded block of a panel.
#[repr(C, align(64))]
pub(in crate::quant) struct Decoded {
    quads: [[MaybeUninit<[u8; 4]>; PANEL_ROWS]; 64],
    scales: [[MaybeUninit<i32>; PANEL_ROWS]; 16],
    d: [MaybeUninit<f32>; PANEL_ROWS],
}

/// Row `lane` of a packed block.
struct PackedRow<'a> {
    block: &'a [u8],
    lane: usize,
    decoded: &'a mut Decoded,
    /// Bytes before the words: the scale.
    begin: usize,
}

impl Row for PackedRow<'_> {
    #[inline(always)]
    fn word(&self, index: usize) -> u32 {
        let (words, _) = self.block[PANEL_ROWS * self.begin..].as_chunks();
        u32::from_le_bytes(words[index * PANEL_ROWS + self.lane])
    }
    #[inline(always)]
    fn scale(&self) -> f32 {
        f16::from_le_bytes(self.block.as_chunks().0[self.lane]).to_f32()
    }
    #[inline(always)]
    fn put_weights(&mut self, group: usize, bytes: u64) {
        let quads = &mut self.decoded.quads;
        quads[2 * group][self.lane].write((bytes as u32).to_le_bytes());
        quads[2 * group + 1][self.lane].write(((bytes >> 32) as u32).to_le_bytes());
    }
    #[inline(always)]
    fn put_d(&mut self, d: f32) {
        self.decoded.d[self.lane].write(d);
    }
    #[inline(always)]
    fn put_scale(&mut self, s: usize, scale: i8) {
        self.decoded.scales[s][self.lane].write(scale.into());
    }
}

/// Decodes a packed block of -1, 0 and 1: the quads are functions of words, and `scale` is the byte of the block's.
#[inline(always)]
fn decode_ternary(
    block: &[u8],
    decoded: &mut Decoded,
    scale: usize,
    quad: impl Fn(usize) -> (usize, u32),
    digits: impl Fn(u32, u32) -> u32,
) {
    let words: &[[[u8; 4]; PANEL_ROWS]] = block.as_chunks().0.as_chunks().0;
    for (q, quads) in decoded.quads.iter_mut().enumerate() {
        let (word, digit) = quad(q);
        for (quad, word) in quads.iter_mut().zip(words[word]) {
            quad.write((digits(u32::from_le_bytes(word), digit) + BEFORE_ZERO).to_le_bytes());
        }
    }
    let (halves, _) = block[PANEL_ROWS * scale..].as_chunks();
    for (d, half) in decoded.d.iter_mut().zip(halves) {
        d.write(f16::from_le_bytes(*half).to_f32());
    }
    decoded.scales[..8].fill([MaybeUninit::new(1); PANEL_ROWS]);
}

/// The bytes of the weight -1.
const BEFORE_ZERO: u32 = (ZERO_POINT as u32 - 1) * 0x0101_0101;

/// Words 0 to 7 and 8 to 15 have two bits each of four times 32 weights.
fn decode_tq2(block: &[u8], decoded: &mut Decoded) {
    let quad = |q: usize| (q / 32 * 8 + q % 8, q as u32 % 32 / 8);
    decode_ternary(block, decoded, 64, quad, |word, k| word >> (2 * k) & 0x0303_0303);
}

/// Words 0 to 7 have the digits of five times 32 weights, 8 to 11 of five times 16, and 12 of four times 4.
fn decode_tq1(block: &[u8], decoded: &mut Decoded) {
    let quad = |q: usize| match q {
        0..40 => (q % 8, q as u32 / 8),
        40..60 => (8 + q % 4, (q as u32 - 40) / 4),
        _ => (12, q as u32 - 60),
    };
    decode_ternary(block, decoded, 52, quad, |word, t| {
        // Two bytes at a time, in 16 bits each: `byte * 3^t`, then three times its lower byte.
        let digits = |bytes: u32| ((((bytes & 0x00ff_00ff) * 3u32.pow(t)) & 0x00ff_00ff) * 3) >> 8 & 0x0003_0003;
        digits(word) | digits(word >> 8) << 8
    });
}

/// Decodes some rows of a packed block; of -1, 0 and 1, all.
#[inline(never)]
fn decode_rows(weight_type: WeightType, block: &[u8], rows: Range<usize>, decoded: &mut Decoded) {
    // One loop per type: the type of the block is a constant in it.
    macro_rules! of {
        ($($name:ident)*) => {
            match weight_type {
                $(WeightType::$name => {
                    let block = &block[..const { PANEL_ROWS * WeightType::$name.block_bytes() }];
                    for lane in rows {
                        let begin = WeightType::$name.block_bytes() % 4;
                        decode(WeightType::$name, &mut PackedRow { block, lane, decoded, begin });
                    }
                })*
                WeightType::TQ1_0 => decode_tq1(block, decoded),
                _ => decode_tq2(block, decoded),
            }
        };
    }
    of!(IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S);
}

/// The types with a scale per `4 * QUADS` weights.
pub(in crate::quant) struct InMemory<const QUADS: usize>;

impl<const QUADS: usize> Format for InMemory<QUADS> {
    /// The longest of these types.
    const TYPE: WeightType = if QUADS == 8 { WeightType::IQ3_S } else { WeightType::IQ2_S };
    const QUADS_PER_SCALE: usize = QUADS;
    const ZERO_POINT: Option<u8> = Some(ZERO_POINT);
    const BYTES: Bytes = Bytes::Unsigned(ZERO_POINT + 43);
    const SLOW_TO_UNPACK: bool = true;
    type Cursor<L: ByteLanes> = *const u8;
    type Scratch = Decoded;
    const SCRATCH: Decoded = Decoded {
        quads: [[MaybeUninit::uninit(); _]; _],
        scales: [[MaybeUninit::uninit(); _]; _],
        d: [MaybeUninit::uninit(); _],
    };

    #[inline(always)]
    fn weight_type(weights: &PackedMatrix<'_>) -> WeightType {
        weights.weight_type()
    }
    #[inline(always)]
    unsafe fn prepare<L: ByteLanes>(
        l: L,
        of: WeightType,
        block: *const u8,
        rows: Range<usize>,
        scratch: &mut Decoded,
    ) -> *const u8 {
        #[cfg(target_arch = "x86_64")]
        if matches!(of, WeightType::IQ3_XXS | WeightType::IQ3_S) && l.has_byte_tables() {
            let quads = scratch.quads.as_mut_ptr().cast();
            let (scales, d) = (scratch.scales.as_mut_ptr().cast(), scratch.d.as_mut_ptr().cast());
            let decode = if of == WeightType::IQ3_S { iq3_vbmi::decode_s } else { iq3_vbmi::decode_xxs };
            // SAFETY: the lanes have the features; the caller gives a packed block of this type.
            unsafe { decode(block, quads, scales, d) };
            return (&raw const *scratch).cast();
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = l;
        // SAFETY: the caller gives a packed block of this type.
        let block = unsafe { std::slice::from_raw_parts(block, PANEL_ROWS * of.block_bytes()) };
        decode_rows(of, block, rows, scratch);
        (&raw const *scratch).cast()
    }
    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: `block` is a `Decoded`, in which `decode_rows` wrote these rows.
        unsafe {
            for s in 0..Self::SCALES {
                let from = block.add(std::mem::offset_of!(Decoded, scales) + 4 * (s * PANEL_ROWS + lane));
                scales.scales[s] = l.to_scale(l.load_words(from));
            }
            scales.d[0] = l.load(block.add(std::mem::offset_of!(Decoded, d)).cast::<f32>().add(lane));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> *const u8 {
        // SAFETY: `block` is a `Decoded`, which begins with the quads.
        unsafe { block.add(s * QUADS * QUAD_BYTES + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's; `decode_rows` wrote these rows.
        unsafe { l.load_words(from.add(g * QUAD_BYTES)) }
    }
}
