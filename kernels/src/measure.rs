//! What this processor can do at best, for reports that compare with it.

use crate::Isa;
use crate::lanes::{Lanes, Op};

/// Reads every byte once, as fast as the processor loads, and returns a value that depends on all of them (so that
/// nothing is optimised away). Divide the length by the time for the read bandwidth.
pub fn read_all(isa: Isa, data: &[u8]) -> f32 {
    struct Read<'a>(&'a [u8]);
    impl Op for Read<'_> {
        type Output = f32;
        #[inline(always)]
        fn eval<L: Lanes>(self, l: L) -> f32 {
            // Eight streams, one per 4 KiB page: one stream leaves the prefetcher idle at every page's end.
            const STREAMS: usize = 8;
            let part = self.0.len() / size_of::<f32>() / STREAMS / L::LANES * L::LANES;
            let start = self.0.as_ptr().cast::<f32>();
            // SAFETY: `run` entered the features; every stream stays inside its part; loads need no alignment.
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

/// Multiplies and adds `64 * 16 * rounds` pairs of 8-bit integers in registers and returns their number and a value that
/// depends on them; `None` for an instruction set that has no such instruction.
pub fn int8_multiply_adds(isa: Isa, rounds: usize) -> Option<(u64, i32)> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => {
            #[target_feature(enable = "avx512f,avx512vnni")]
            fn multiply_add(rounds: usize) -> i32 {
                use std::arch::x86_64::*;
                let (a, b) = (_mm512_set1_epi8(3), _mm512_set1_epi8(std::hint::black_box(-1)));
                let mut acc = [_mm512_setzero_si512(); 16];
                for _ in 0..rounds {
                    for acc in &mut acc {
                        *acc = _mm512_dpbusd_epi32(*acc, a, b);
                    }
                }
                let mut all = acc[0];
                for acc in acc {
                    all = _mm512_add_epi32(all, acc);
                }
                _mm512_reduce_add_epi32(all)
            }
            // SAFETY: an `Isa::Avx512` is only made where these features were found.
            Some((64 * 16 * rounds as u64, unsafe { multiply_add(rounds) }))
        }
        _ => None,
    }
}
