//! IQ3_XXS and IQ3_S in AVX-512 with VBMI: tables of bytes in registers instead of loads from the grid.
//!
//! A word of indices is four quads of a row, so a vector is 64 quads. Their four weights come from a table each: 256 entries
//! are two permutations of two registers. Four vectors, one of first weights, one of second, .. are interleaved to quads.

use std::arch::x86_64::*;

use crate::quant::grids::{EVEN_SIGN_BITS, IQ3_S, IQ3_XXS, ZERO_POINT};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};

#[repr(align(64))]
struct Tables<const N: usize>([[u8; N]; 4]);

/// The first, second, .. weights of a grid's points.
const fn tables<const N: usize>(grid: &[u32; N]) -> Tables<N> {
    let mut tables = [[0; N]; 4];
    let mut i = 0;
    while i < 4 * N {
        tables[i % 4][i / 4] = grid[i / 4].to_le_bytes()[i % 4];
        i += 1;
    }
    Tables(tables)
}

static XXS: Tables<256> = tables(&IQ3_XXS);
static S: Tables<512> = tables(&IQ3_S);

/// A byte in each of the four words of 16 bytes: `bytes[4 w + b]` for byte `b` of word `w`.
#[target_feature(enable = "avx512f,avx512bw")]
fn in_words(bytes: [u8; 16]) -> __m512i {
    // SAFETY: 16 bytes are read.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// Transposes the 4 x 4 bytes of 16: byte `4 j + i` is byte `j` of word `i`.
const TRANSPOSED: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// Byte `byte` of each word in all its bytes.
const fn repeated(byte: u8) -> [u8; 16] {
    let mut all = [0; 16];
    let mut i = 0;
    while i < 16 {
        all[i] = (i as u8 & !3) + byte;
        i += 1;
    }
    all
}

/// Bit `4 half + j` in bytes `4 j..4 j + 4`.
const BITS: [[u8; 16]; 2] = [
    [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8],
    [16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64, 128, 128, 128, 128],
];

/// The entries at the bytes of `index`.
///
/// # Safety
/// `table` has 256 bytes, aligned to 64.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn look_up(table: *const u8, index: __m512i) -> __m512i {
    // SAFETY: as the caller's.
    unsafe {
        let [a, b, c, d] = table.cast::<[__m512i; 4]>().read();
        let (low, high) = (_mm512_permutex2var_epi8(a, index, b), _mm512_permutex2var_epi8(c, index, d));
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
    }
}

/// Four quads of 16 rows: `weights[p]` has weight `p` of quad `j` of row `4 c + i` in byte `4 j + i` of 16 bytes `c`.
#[target_feature(enable = "avx512f,avx512bw")]
fn quads(weights: [__m512i; 4]) -> [__m512i; 4] {
    let [w, x, y, z] = weights;
    let (a, b) = (_mm512_unpacklo_epi8(w, x), _mm512_unpackhi_epi8(w, x));
    let (c, d) = (_mm512_unpacklo_epi8(y, z), _mm512_unpackhi_epi8(y, z));
    [_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)]
}

/// Writes four quads with their signs: `signs` has those of quads 0 and 1 in byte `2 half` of each word, of 2 and 3 in the
/// next.
///
/// # Safety
/// `to` has room for four quads.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store(quads: [__m512i; 4], signs: __m512i, half: usize, to: *mut u8) {
    for (j, quad) in quads.into_iter().enumerate() {
        let bytes = _mm512_shuffle_epi8(
            signs,
            in_words(const { [repeated(0), repeated(1), repeated(2), repeated(3)] }[2 * half + j / 2]),
        );
        let bits = _mm512_set1_epi32(if j % 2 == 0 { 0x0804_0201 } else { 0x8040_2010u32 as i32 });
        let negative = _mm512_test_epi8_mask(bytes, bits);
        let signed = _mm512_mask_sub_epi8(quad, negative, _mm512_set1_epi8((2 * ZERO_POINT) as i8), quad);
        // SAFETY: as the caller's.
        unsafe { _mm512_storeu_si512(to.add(j * QUAD_BYTES).cast(), signed) }
    }
}

/// # Safety
/// `block` is a packed block of IQ3_XXS; `quads` has room for 64 quads, `scales` for 8 times 16, and `to_d` for 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,f16c")]
pub(super) unsafe fn decode_xxs(block: *const u8, to: *mut u8, scales: *mut i32, to_d: *mut f32) {
    // SAFETY: as the caller's; the block is 16 scales, 16 words of indices and 8 words of signs and scales.
    unsafe {
        let d = _mm512_cvtph_ps(_mm256_loadu_si256(block.cast()));
        _mm512_storeu_ps(to_d, _mm512_mul_ps(d, _mm512_set1_ps(0.5)));
        let words = block.add(2 * PANEL_ROWS);
        let even = EVEN_SIGN_BITS.as_ptr();
        let even = [_mm512_loadu_si512(even.cast()), _mm512_loadu_si512(even.add(64).cast())];
        // Seven bits from bit 0, 7, 14 and 21 of each word.
        let sevens = _mm512_set1_epi64(0x352e_2720_150e_0700);
        for s in 0..8 {
            let rest = _mm512_loadu_si512(words.add((16 + s) * QUAD_BYTES).cast());
            let bits = _mm512_srli_epi32::<28>(rest);
            let scale = _mm512_add_epi32(_mm512_add_epi32(bits, bits), _mm512_set1_epi32(1));
            _mm512_storeu_si512(scales.add(s * PANEL_ROWS).cast(), scale);
            let signs = _mm512_permutex2var_epi8(even[0], _mm512_multishift_epi64_epi8(sevens, rest), even[1]);
            for half in 0..2 {
                let index = _mm512_loadu_si512(words.add((2 * s + half) * QUAD_BYTES).cast());
                let index = _mm512_shuffle_epi8(index, in_words(TRANSPOSED));
                let mut weights = [index; 4];
                for (weights, table) in weights.iter_mut().zip(&XXS.0) {
                    *weights = look_up(table.as_ptr(), index);
                }
                store(quads(weights), signs, half, to.add((8 * s + 4 * half) * QUAD_BYTES));
            }
        }
    }
}

/// # Safety
/// As [`decode_xxs`], of IQ3_S.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,f16c")]
pub(super) unsafe fn decode_s(block: *const u8, to: *mut u8, scales: *mut i32, to_d: *mut f32) {
    // SAFETY: as the caller's; the block is 16 scales, 16 words of lower bytes of indices, 2 of their upper bits, 8 of signs
    // and one of scales.
    unsafe {
        _mm512_storeu_ps(to_d, _mm512_cvtph_ps(_mm256_loadu_si256(block.cast())));
        let word = |n: usize| _mm512_loadu_si512(block.add(2 * PANEL_ROWS + n * QUAD_BYTES).cast());
        let nibbles = word(26);
        for s in 0..8 {
            let nibble =
                _mm512_and_si512(_mm512_srlv_epi32(nibbles, _mm512_set1_epi32(4 * s as i32)), _mm512_set1_epi32(15));
            let scale = _mm512_add_epi32(_mm512_add_epi32(nibble, nibble), _mm512_set1_epi32(1));
            _mm512_storeu_si512(scales.add(s * PANEL_ROWS).cast(), scale);
            // The upper bits of eight quads, a byte per row, four times: once for each quad of a word of indices.
            let upper = _mm512_srlv_epi32(word(16 + s / 4), _mm512_set1_epi32(8 * (s as i32 % 4)));
            let upper = _mm512_shuffle_epi8(upper, in_words([0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12]));
            for (half, bits) in BITS.into_iter().enumerate() {
                let index = _mm512_shuffle_epi8(word(2 * s + half), in_words(TRANSPOSED));
                let beyond = _mm512_test_epi8_mask(upper, in_words(bits));
                let mut weights = [index; 4];
                for (weights, table) in weights.iter_mut().zip(&S.0) {
                    let (low, high) = (look_up(table.as_ptr(), index), look_up(table.as_ptr().add(256), index));
                    *weights = _mm512_mask_blend_epi8(beyond, low, high);
                }
                store(quads(weights), word(18 + s), half, to.add((8 * s + 4 * half) * QUAD_BYTES));
            }
        }
    }
}
