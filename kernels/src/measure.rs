//! Measures this processor's upper bounds: read bandwidth and int8 multiply-adds.

use std::hint::black_box;

use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// Reads every byte once, except a few at the ends that do not fill a vector, and returns a value that depends on them,
/// so that nothing is optimised away. Length divided by time is the read bandwidth.
pub fn read_all(isa: Isa, data: &[u8]) -> f32 {
    struct Read<'a>(&'a [u8]);
    impl Op for Read<'_> {
        type Output = f32;
        #[inline(always)]
        fn eval<L: Lanes>(self, l: L) -> f32 {
            // Sequential streams: with one, the hardware prefetcher stops at every 4 KiB page boundary. An odd number:
            // addresses a power of two apart are 50 % slower on a Zen 4.
            const STREAMS: usize = 9;
            // SAFETY: any bytes are a valid `f32`.
            let (_, floats, _) = unsafe { self.0.align_to::<f32>() };
            let part = floats.len() / STREAMS / L::LANES * L::LANES;
            let start = floats.as_ptr();
            // SAFETY: `run` entered the features; every stream stays inside its part of the floats.
            unsafe {
                let mut max = [l.splat(f32::NEG_INFINITY); STREAMS];
                for i in (0..part).step_by(L::LANES) {
                    for (stream, max) in max.iter_mut().enumerate() {
                        *max = l.max(l.load(start.add(stream * part + i)), *max);
                    }
                }
                let mut all = max[0];
                for max in max {
                    all = l.max(max, all);
                }
                l.maximum(all)
            }
        }
    }
    isa.run(Read(data))
}

/// Multiplies and adds pairs of 8-bit integers in registers, 16 vectors per round, of AVX-512 with AMX. Returns the
/// number of multiply-adds and a value that depends on them; `None` for an instruction set without such an instruction.
pub fn int8_multiply_adds(isa: Isa, rounds: usize) -> Option<(u64, i32)> {
    /// `$dot` in 16 independent chains.
    #[allow(unused_macros)]
    macro_rules! chains {
        ($features:literal, $zero:expr, $bytes:expr, |$sum:ident, $x:ident| $dot:expr) => {{
            #[target_feature(enable = $features)]
            fn run(rounds: usize) -> (u64, i32) {
                let ($x, mut sums) = ($bytes, [$zero; 16]);
                for _ in 0..rounds {
                    for sum in &mut sums {
                        let $sum = *sum;
                        *sum = $dot;
                    }
                }
                let sums = black_box(sums);
                // SAFETY: a vector consists of words.
                (size_of_val(&sums) as u64 * rounds as u64, unsafe { *(&raw const sums).cast() })
            }
            // SAFETY: the `Isa` is only constructed if these features were detected.
            Some(unsafe { run(rounds) })
        }};
    }
    #[cfg(target_arch = "aarch64")]
    use std::arch::aarch64::*;
    #[cfg(target_arch = "x86_64")]
    use std::arch::x86_64::*;
    match isa {
        // Two instructions for 32 products; the sum is an operand of the product, so that it cannot be hoisted.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => {
            chains!("avx2", _mm256_setzero_si256(), _mm256_set1_epi8(black_box(3)), |sum, x| {
                _mm256_add_epi16(_mm256_maddubs_epi16(sum, x), x)
            })
        }
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni(_) => {
            chains!("avxvnni,avx2", _mm256_setzero_si256(), _mm256_set1_epi8(black_box(3)), |sum, x| {
                _mm256_dpbusd_avx_epi32(sum, x, x)
            })
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) | Isa::Amx(_) => {
            chains!("avx512f,avx512vnni", _mm512_setzero_si512(), _mm512_set1_epi8(black_box(3)), |sum, x| {
                _mm512_dpbusd_epi32(sum, x, x)
            })
        }
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot(_) | Isa::NeonI8mm(_) => {
            chains!("dotprod", vdupq_n_s32(0), vdupq_n_s32(black_box(0x0303_0303)), |sum, x| {
                // SAFETY: the function has the feature.
                unsafe { crate::simd::neon::pair::sdot::<0>(sum, vreinterpretq_s8_s32(x), x) }
            })
        }
        _ => None,
    }
}
