//! Every `f32` kernel on every instruction set, at every tail length, against the scalar reference, and the scalar
//! reference against `f64`.
//!
//! Every slice that a kernel gets is a separate allocation: `guarded_ends.rs` and `guarded_starts.rs` run
//! these tests with inaccessible memory around every allocation.

use foretoken_kernels::attention::{KvBlock, OnlineSoftmax, Query, Scratch, attend_block, finish, merge};
use foretoken_kernels::gemm::{PreparedRows, matmul};
use foretoken_kernels::norm::{AfterNorm, rms_norm};
use foretoken_kernels::{ColumnsMut, Elements, Isa, activation, rope, vocabulary};
use half::{bf16, f16};

/// A small deterministic generator.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// Asserts that every entry is within `tolerance * scale` of the expected value.
fn close(what: &str, got: &[f32], want: &[f64], scale: f64, tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= tolerance * scale, "{what}: entry {i} is {got}, not {want}");
    }
}

/// Lengths around every tail of every lane width, and a few long ones.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=33).chain([47, 64, 65, 100, 256, 257])
}

#[test]
fn matmul_is_the_sum_of_products() {
    let mut noise = Noise(1);
    for inputs in lengths() {
        for (rows, outputs) in
            [(1, 1), (1, 9), (2, 4), (3, 8), (4, 8), (5, 13), (7, 9), (9, 7), (16, 8), (18, 5), (33, 70)]
        {
            let (x, w) = (noise.vec(rows * inputs), noise.vec(outputs * inputs));
            let halves: Vec<f16> = w.iter().map(|w| f16::from_f32(*w)).collect();
            let bf16s: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            for weight in [Elements::F32(&w), Elements::F16(&halves), Elements::Bf16(&bf16s)] {
                let mut wide = vec![0.0; w.len()];
                weight.widen(&mut wide);
                let want: Vec<f64> = (0..rows * outputs)
                    .map(|i| {
                        let (x, w) = (&x[i / outputs * inputs..], &wide[i % outputs * inputs..]);
                        (0..inputs).map(|k| f64::from(x[k]) * f64::from(w[k])).sum()
                    })
                    .collect();
                for isa in Isa::available() {
                    let mut y = vec![f32::NAN; rows * outputs];
                    let element = weight.element_type();
                    let mut words = vec![7; PreparedRows::scratch_len(isa, element, rows, inputs)];
                    let prepared = PreparedRows::new(isa, element, &x, inputs, &mut words);
                    let (left, right) = ColumnsMut::new(&mut y, rows, outputs).split_at(outputs / 2);
                    matmul(isa, prepared, weight, left);
                    matmul(isa, prepared, weight, right);
                    close(&format!("{} {rows}x{inputs}x{outputs}", isa.name()), &y, &want, inputs as f64, 1.2e-7);

                    // A row computed alone has the same bits.
                    let mut alone = vec![f32::NAN; outputs];
                    let last = x[(rows - 1) * inputs..].to_vec();
                    let mut words = vec![7; PreparedRows::scratch_len(isa, element, 1, inputs)];
                    let last = PreparedRows::new(isa, element, &last, inputs, &mut words);
                    matmul(isa, last, weight, ColumnsMut::new(&mut alone, 1, outputs));
                    assert_eq!(alone, y[(rows - 1) * outputs..], "{} {rows}x{inputs}x{outputs}", isa.name());
                }
            }
        }
    }
}

#[test]
fn matmul_without_rows_or_columns_does_nothing() {
    let w = [1.0; 2 * 32];
    let (halves, bf16s) = ([f16::ONE; 2 * 32], [bf16::ONE; 2 * 32]);
    for weight in [Elements::F32(&w), Elements::F16(&halves), Elements::Bf16(&bf16s)] {
        for isa in Isa::available() {
            let prepared = PreparedRows::new(isa, weight.element_type(), &[], 32, &mut []);
            matmul(isa, prepared, weight, ColumnsMut::new(&mut [], 0, 2));
            let (x, mut y) = ([1.0; 32], [7.0; 2]);
            let mut words = vec![0; PreparedRows::scratch_len(isa, weight.element_type(), 1, 32)];
            let prepared = PreparedRows::new(isa, weight.element_type(), &x, 32, &mut words);
            matmul(isa, prepared, weight, ColumnsMut::new(&mut y, 1, 2).split_at(0).0);
            assert_eq!(y, [7.0; 2], "{}", isa.name());
        }
    }
}

#[test]
fn norms_agree_with_the_formula() {
    let mut noise = Noise(2);
    for width in lengths() {
        let (x, residual, weight) = (noise.vec(3 * width), noise.vec(3 * width), noise.vec(width));
        for weight in [None, Some(&weight[..])] {
            for add in [false, true] {
                let want: Vec<f64> = (0..3 * width)
                    .map(|i| {
                        let row = &x[i / width * width..][..width];
                        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                        let norm = f64::from(x[i]) / (mean + 1e-6).sqrt();
                        let norm = norm * weight.map_or(1.0, |weight| f64::from(weight[i % width]));
                        if add { (f64::from(residual[i]) + norm) * 0.75 } else { norm }
                    })
                    .collect();
                for isa in Isa::available() {
                    let mut y = vec![f32::NAN; x.len()];
                    let after = match add {
                        true => AfterNorm::AddTo { residual: &residual, scale: 0.75 },
                        false => AfterNorm::Write,
                    };
                    rms_norm(isa, &x, width, weight, 1e-6, after, &mut y);
                    close(&format!("norm {} {width}", isa.name()), &y, &want, 4.0, 2e-7);
                }
            }
        }
    }
}

#[test]
fn rotary_embedding_rotates_its_pairs_only() {
    let mut noise = Noise(3);
    for (pairs, head_dim) in (0..=40).flat_map(|pairs| [(pairs, 84), (pairs, 2 * pairs.max(1))]) {
        let angles = noise.vec(pairs);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let x = noise.vec(2 * head_dim);
        let mut want: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for head in want.chunks_mut(head_dim) {
            for i in 0..pairs {
                let (a, b) = (head[i], head[i + head_dim / 2]);
                let (cos, sin) = (f64::from(cos[i]), f64::from(sin[i]));
                (head[i], head[i + head_dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        for isa in Isa::available() {
            let mut y = x.clone();
            rope::rotate(isa, &mut y, head_dim, &cos, &sin);
            close(&format!("rope {} {pairs}", isa.name()), &y, &want, 2.0, 1.2e-7);
        }
    }
}

#[test]
fn k_eq_v_keys_are_weighted_and_rotated() {
    let mut noise = Noise(6);
    for head_dim in lengths() {
        let (rows, pairs) = (3, head_dim / 2);
        let (x, weight) = (noise.vec(rows * head_dim), noise.vec(head_dim));
        let (cos, sin) = (noise.vec(rows * pairs), noise.vec(rows * pairs));
        let halves: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
        let bf16s: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        for values in [Elements::F32(&x), Elements::F16(&halves), Elements::Bf16(&bf16s)] {
            let mut wide = vec![0.0; x.len()];
            values.widen(&mut wide);
            let mut want: Vec<f64> =
                wide.iter().enumerate().map(|(i, x)| f64::from(*x) * f64::from(weight[i % head_dim])).collect();
            for (row, want) in want.chunks_mut(head_dim).enumerate() {
                for pair in 0..pairs {
                    let (a, b) = (want[pair], want[pair + head_dim / 2]);
                    let (cos, sin) = (f64::from(cos[row * pairs + pair]), f64::from(sin[row * pairs + pair]));
                    (want[pair], want[pair + head_dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
                }
            }
            for isa in Isa::available() {
                let mut keys = vec![f32::NAN; x.len()];
                rope::k_eq_v(isa, values, &weight, &cos, &sin, &mut keys);
                close(&format!("keys {} {head_dim}", isa.name()), &keys, &want, 2.0, 2e-7);
            }
        }
    }
}

#[test]
fn pointwise_functions_are_accurate() {
    let gelu = |x: f64| 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh());
    for len in lengths() {
        let mut noise = Noise(len as u64);
        let gate: Vec<f32> = noise.vec(len).iter().map(|x| x * 12.0).collect();
        let up = noise.vec(len);
        let gated: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| gelu(f64::from(*g)) * f64::from(*u)).collect();
        let capped: Vec<f64> = gate.iter().map(|x| 30.0 * (f64::from(*x) / 30.0).tanh()).collect();
        for isa in Isa::available() {
            let mut y = gate.clone();
            activation::Gate::GeluTanh.apply(isa, &mut y, &up);
            close(&format!("gelu {} {len}", isa.name()), &y, &gated, 12.0, 3e-7);
            let mut y = gate.clone();
            activation::soft_cap(isa, &mut y, 30.0);
            close(&format!("cap {} {len}", isa.name()), &y, &capped, 30.0, 3e-7);
        }
    }
}

#[test]
fn attention_is_a_softmax_weighted_sum() {
    let mut noise = Noise(4);
    for head_dim in [4, 16, 30, 64, 128, 256, 512].into_iter().chain(1..=34) {
        for queries in [1, 2, 4, 5, 8] {
            let len = 37;
            let (k, v) = (noise.vec(len * head_dim), noise.vec(len * head_dim));
            let q: Vec<Vec<f32>> =
                (0..queries).map(|_| noise.vec(head_dim).iter().map(|q| q * 3.0).collect()).collect();
            let visible = |query: usize| query..len - (queries - query);
            let want: Vec<f64> = (0..queries)
                .flat_map(|query| {
                    let dot = |j: usize| -> f64 {
                        (0..head_dim).map(|i| f64::from(q[query][i]) * f64::from(k[j * head_dim + i])).sum()
                    };
                    let scores: Vec<f64> = visible(query).map(dot).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    let v = &v;
                    (0..head_dim)
                        .map(move |i| {
                            let weighted = scores.iter().zip(visible(query));
                            weighted.map(|(s, j)| (s - max).exp() / total * f64::from(v[j * head_dim + i])).sum()
                        })
                        .collect::<Vec<f64>>()
                })
                .collect();
            for isa in Isa::available() {
                // Two blocks into one softmax, and one block each into two that are merged.
                for cut in [0, 11, len] {
                    let mut running = vec![OnlineSoftmax::EMPTY; queries];
                    let mut output = vec![vec![0.0; head_dim]; queries];
                    let (mut later, mut later_output) = (running.clone(), output.clone());
                    for (tile, apart) in [(0..cut, false), (cut..len, cut == 11)] {
                        let (running, output) = match apart {
                            true => (&mut later, &mut later_output),
                            false => (&mut running, &mut output),
                        };
                        let mut states: Vec<_> = running
                            .iter_mut()
                            .zip(output)
                            .enumerate()
                            .map(|(i, (running, output))| {
                                let seen = visible(i);
                                let start = seen.start.clamp(tile.start, tile.end) - tile.start;
                                let end = seen.end.clamp(tile.start, tile.end) - tile.start;
                                Query { query: &q[i], quantized: None, visible: start..end, softmax: running, output }
                            })
                            .collect();
                        let rows = tile.start * head_dim..tile.end * head_dim;
                        let (k, v) = (k[rows.clone()].to_vec(), v[rows].to_vec());
                        let (keys, values) = (Elements::F32(&k), Elements::F32(&v));
                        let (mut scores, mut weights) = (vec![0.0; Scratch::len(len)], vec![0.0; Scratch::len(len)]);
                        let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
                        attend_block(
                            isa,
                            KvBlock { keys: keys.into(), values: values.into(), head_dim },
                            &mut states,
                            &mut scratch,
                        );
                    }
                    for i in 0..queries {
                        merge(isa, &mut running[i], &mut output[i], later[i], &later_output[i]);
                        finish(isa, running[i], &mut output[i]);
                    }
                    let what = format!("attend {} {head_dim} {queries} {cut}", isa.name());
                    close(&what, &output.concat(), &want, 1.0, 1e-5);
                }
            }
        }
    }
}

#[test]
fn a_query_has_the_same_bits_in_any_batch() {
    let mut noise = Noise(5);
    for (head_dim, half) in (1..=18).chain([30, 64, 128]).flat_map(|head_dim| [(head_dim, true), (head_dim, false)]) {
        let (len, count) = (37, 21);
        let (k, v) = (noise.vec(len * head_dim), noise.vec(len * head_dim));
        let halves = [&k, &v].map(|x| -> Vec<f16> { x.iter().map(|x| f16::from_f32(*x)).collect() });
        let bf16s = [&k, &v].map(|x| -> Vec<bf16> { x.iter().map(|x| bf16::from_f32(*x)).collect() });
        let q: Vec<Vec<f32>> = (0..count).map(|_| noise.vec(head_dim).iter().map(|q| q * 3.0).collect()).collect();
        let attend = |isa: Isa, first: usize, last: usize| -> Vec<Vec<f32>> {
            let count = last - first;
            let (mut running, mut output) = (vec![OnlineSoftmax::EMPTY; count], vec![vec![0.0; head_dim]; count]);
            let mut states: Vec<_> = (running.iter_mut().zip(&mut output).enumerate())
                .map(|(i, (running, output))| {
                    let query = &q[first + i];
                    Query { query, quantized: None, visible: 0..len - (first + i) % 3, softmax: running, output }
                })
                .collect();
            let (mut scores, mut weights) = (vec![0.0; Scratch::len(len)], vec![0.0; Scratch::len(len)]);
            let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
            let [keys, values] = match half {
                true => halves.each_ref().map(|x| Elements::F16(x).into()),
                false => bf16s.each_ref().map(|x| Elements::Bf16(x).into()),
            };
            attend_block(isa, KvBlock { keys, values, head_dim }, &mut states, &mut scratch);
            output
        };
        for isa in Isa::available() {
            let all = attend(isa, 0, count);
            for (first, last) in [(0, 1), (3, 4), (0, 4), (2, 7), (1, 9), (5, 17), (20, 21)] {
                let some = attend(isa, first, last);
                assert_eq!(some, all[first..last], "{} {head_dim} {first}..{last}", isa.name());
            }
        }
    }
}

/// A product that underflows is a zero of its sign; added to a value that the query does not see, times 0, it is +0.0.
#[test]
fn a_zero_has_the_same_sign_in_any_batch() {
    let head_dim = 21;
    let rows = |first: [f32; 3]| Vec::from_iter(first.iter().flat_map(|x| vec![*x; head_dim]));
    let (k, v) = (rows([0.0, 63.0, 0.0]), rows([-1e-20, -0.0, 1.0]));
    let mut q = vec![0.0; head_dim];
    q[0] = 1.0;
    for isa in Isa::available() {
        let attend = |ends: &[usize]| -> Vec<u32> {
            let (mut running, mut output) =
                (vec![OnlineSoftmax::EMPTY; ends.len()], vec![vec![0.0; head_dim]; ends.len()]);
            let mut states: Vec<_> = (running.iter_mut().zip(&mut output).zip(ends))
                .map(|((softmax, output), end)| Query { query: &q, quantized: None, visible: 0..*end, softmax, output })
                .collect();
            let (mut scores, mut weights) = (vec![0.0; Scratch::len(3)], vec![0.0; Scratch::len(3)]);
            let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
            let [keys, values] = [&k, &v].map(|x| Elements::F32(x).into());
            attend_block(isa, KvBlock { keys, values, head_dim }, &mut states, &mut scratch);
            finish(isa, running[0], &mut output[0]);
            output[0].iter().map(|x| x.to_bits()).collect()
        };
        assert_eq!(attend(&[2]), attend(&[2, 3]), "{}", isa.name());
    }
}

/// Also where blocks of scores are skipped, with equal scores, NaN, zeros of both signs, and few or
/// many of them asked for.
#[test]
fn top_k_is_the_start_of_a_sort() {
    for len in lengths().chain([1000, 5000]) {
        let mut x = Noise(len as u64).vec(len);
        x[len / 3] = 2.0;
        x[len - 1] = 2.0;
        let mut coarse: Vec<f32> = x.iter().map(|x| (x * 4.0).round() * 0.5).collect();
        coarse[len / 2] = f32::NAN;
        coarse[len / 5] = f32::NEG_INFINITY;
        // Negative NaN, the processors' own, are less than all numbers.
        let mut most_nan = vec![-f32::NAN; len];
        most_nan[len - 1] = 1.0;
        for (x, k) in [&x, &coarse, &most_nan].into_iter().flat_map(|x| [0, 1, 5, 64, 700, usize::MAX].map(|k| (x, k)))
        {
            let mut top = Vec::new();
            vocabulary::top_k(x, k, &mut top);
            let mut want: Vec<u32> = (0..len as u32).collect();
            want.sort_by(|a, b| x[*b as usize].total_cmp(&x[*a as usize]).then(a.cmp(b)));
            want.truncate(k);
            assert_eq!(top, want, "{k} of {len}");
        }
    }
}

/// The same bits for a logit wherever it stands in the row.
#[test]
fn softmax_weights_are_exponentials() {
    for (isa, len) in Isa::available().flat_map(|isa| lengths().map(move |len| (isa, len))) {
        let mut logits: Vec<f32> = Noise(len as u64).vec(len).iter().map(|x| 30.0 * x).collect();
        logits[len / 2] = f32::NEG_INFINITY;
        logits[len / 3] = -200.0;
        let max = vocabulary::maximum(&logits);
        assert_eq!(max, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        for temperature in [0.5, 1.0, 7.0] {
            let weights = vocabulary::softmax_weights(isa, &logits, max, temperature);
            for (i, logit) in logits.iter().enumerate() {
                let exponent = f64::from(logit - max) / f64::from(temperature);
                let want = exponent.exp();
                let zero = exponent < -87.0 && weights[i] == 0.0;
                assert!(zero || (weights[i] - want).abs() <= 2e-5 * want, "{} {logit} of {len}", isa.name());
                assert_eq!(vocabulary::softmax_weights(isa, &[*logit], max, temperature), [weights[i]]);
            }
            let (sum, want) = (vocabulary::sum(&weights), weights.iter().sum::<f64>());
            assert!((sum - want).abs() <= 1e-12 * want);
        }
    }
}
