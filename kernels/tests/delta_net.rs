//! The gated delta net's kernels on every instruction set: bit-exact against plain loops in the same order, at every
//! tail, and those against `f64`.

use foretoken_kernels::Isa;
use foretoken_kernels::activation::Gate;
use foretoken_kernels::delta_net::{HeadRows, advance, convolve, l2_normalize, outputs, replay, scratch_len};

/// Numbers from -1 to 1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= tolerance, "{what}: entry {i} is {got}, not {want}");
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// One head: the recurrence as the paper has it, in any float type.
macro_rules! plain_recurrence {
    ($name:ident, $float:ty) => {
        fn $name(state: &mut [$float], key_dim: usize, rows: HeadRows<'_>, keep: usize) -> Vec<$float> {
            let value_dim = state.len() / key_dim;
            let mut y = Vec::new();
            for row in 0..keep {
                let at = |column: usize| <$float>::from(rows.x[row * rows.stride + column]);
                let (decay, beta) = (<$float>::from(rows.decay[row]), <$float>::from(rows.beta[row]));
                for column in 0..value_dim {
                    let mut known: $float = 0.0;
                    for i in 0..key_dim {
                        known += state[i * value_dim + column] * at(rows.key + i);
                    }
                    let delta = beta * (at(rows.value + column) - decay * known);
                    let mut output: $float = 0.0;
                    for i in 0..key_dim {
                        let s = &mut state[i * value_dim + column];
                        *s = decay * *s + at(rows.key + i) * delta;
                        output += *s * at(rows.query + i);
                    }
                    y.push(output);
                }
            }
            y
        }
    };
}

plain_recurrence!(plain_f32, f32);
plain_recurrence!(plain_f64, f64);

#[test]
fn the_recurrence_has_the_bits_of_plain_loops() {
    for (case, (key_dim, value_dim)) in
        [(1, 1), (8, 8), (16, 24), (5, 17), (128, 128), (12, 67), (3, 31), (7, 130)].into_iter().enumerate()
    {
        let (count, stride) = (6, 2 * key_dim + value_dim + 3);
        let mut x = noise(case as u64, count * stride);
        for row in x.chunks_exact_mut(stride) {
            l2_normalize(&mut row[1..1 + key_dim], key_dim, 0.5);
            l2_normalize(&mut row[1 + key_dim..1 + 2 * key_dim], key_dim, 1.0);
        }
        let gates = noise(99, 2 * count).iter().map(|x| 0.5 + 0.5 * x).collect::<Vec<_>>();
        let (decay, beta) = gates.split_at(count);
        let (query, key, value) = (1, 1 + key_dim, 2 + 2 * key_dim);
        let of = |from: usize, to: usize| HeadRows {
            x: &x[from * stride..to * stride],
            stride,
            query,
            key,
            value,
            decay: &decay[from..to],
            beta: &beta[from..to],
        };
        let start = noise(1000 + case as u64, key_dim * value_dim);
        let mut end = start.clone();
        let want = plain_f32(&mut end, key_dim, of(0, count), count);
        let mut exact: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
        close("f64", &want, &plain_f64(&mut exact, key_dim, of(0, count), count), 1e-5);

        for isa in Isa::available() {
            let what = format!("{key_dim} x {value_dim} on {}", isa.name());
            let mut scratch = vec![f32::NAN; scratch_len(key_dim)];
            let mut y = vec![f32::NAN; count * value_dim];
            outputs(isa, &start, key_dim, of(0, count), &mut scratch, &mut y);
            assert_eq!(bits(&y), bits(&want), "{what}: outputs");
            for keep in 0..=count {
                let mut state = start.clone();
                let mut y = vec![f32::NAN; keep * value_dim];
                advance(isa, &mut state, key_dim, of(0, keep), &mut scratch, &mut y);
                let mut kept = start.clone();
                plain_f32(&mut kept, key_dim, of(0, keep), keep);
                assert_eq!(bits(&state), bits(&kept), "{what}: {keep} rows kept");
                assert_eq!(bits(&y), bits(&want[..keep * value_dim]), "{what}: outputs of {keep} rows kept");
                state.copy_from_slice(&start);
                advance(isa, &mut state, key_dim, of(0, keep), &mut scratch, &mut []);
                assert_eq!(bits(&state), bits(&kept), "{what}: {keep} rows kept, without outputs");
                let mut rest = vec![f32::NAN; (count - keep) * value_dim];
                outputs(isa, &state, key_dim, of(keep, count), &mut scratch, &mut rest);
                assert_eq!(bits(&rest), bits(&want[keep * value_dim..]), "{what}: outputs after {keep} rows");
                state.copy_from_slice(&start);
                rest.fill(f32::NAN);
                replay(isa, &mut state, key_dim, [of(0, keep), of(keep, count)], &mut scratch, &mut rest);
                assert_eq!(bits(&state), bits(&kept), "{what}: {keep} rows replayed");
                assert_eq!(bits(&rest), bits(&want[keep * value_dim..]), "{what}: outputs after {keep} rows replayed");
            }
        }
    }
}

#[test]
fn the_convolution_is_causal_and_the_same_everywhere() {
    for channels in (1..=33).chain([64, 67, 100]) {
        let taps = 4;
        let (x, weight) = (noise(7, 9 * channels), noise(8, taps * channels));
        let rows: Vec<&[f32]> = x.chunks_exact(channels).collect();
        let want: Vec<f64> = (0..rows.len() - 3)
            .flat_map(|row| (0..channels).map(move |channel| (row, channel)))
            .map(|(row, channel)| {
                let product = |tap: usize| {
                    f64::from(weight[tap * channels + channel]) * f64::from(x[(row + tap) * channels + channel])
                };
                silu((0..taps).map(product).sum())
            })
            .collect();
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut y = vec![f32::NAN; want.len()];
            convolve(isa, &rows, &weight, channels, &mut y);
            close("convolve", &y, &want, 1e-6);
            let mut last = vec![f32::NAN; channels];
            convolve(isa, &rows[5..], &weight, channels, &mut last);
            assert_eq!(bits(&last), bits(&y[5 * channels..]), "{channels} channels on {}: a row alone", isa.name());
            let first = first.get_or_insert_with(|| bits(&y));
            assert_eq!(&bits(&y), first, "{channels} channels on {}", isa.name());
        }
    }
}

#[test]
fn gates_match_the_formulas_at_every_tail() {
    for len in (1..=33).chain([64, 100]) {
        let x: Vec<f32> = noise(3, len).iter().map(|x| 30.0 * x).collect();
        let up = noise(4, len);
        for isa in Isa::available() {
            let (mut silu_of, mut sigmoid_of) = (x.clone(), x.clone());
            Gate::Silu.apply(isa, &mut silu_of, &up);
            Gate::Sigmoid.apply(isa, &mut sigmoid_of, &up);
            let pairs = || x.iter().zip(&up).map(|(x, up)| (f64::from(*x), f64::from(*up)));
            close("silu", &silu_of, &pairs().map(|(x, up)| silu(x) * up).collect::<Vec<_>>(), 1e-5);
            let want: Vec<f64> = pairs().map(|(x, up)| up / (1.0 + (-x).exp())).collect();
            close("sigmoid", &sigmoid_of, &want, 1e-6);
        }
    }
    let mut extreme = [f32::MIN, -200.0, 200.0, f32::MAX];
    for isa in Isa::available() {
        Gate::Sigmoid.apply(isa, &mut extreme.clone(), &[1.0; 4]);
        Gate::Silu.apply(isa, &mut extreme, &[1.0; 4]);
        assert!(extreme.iter().all(|x| x.is_finite()), "{extreme:?} on {}", isa.name());
    }
}

#[test]
fn normalized_vectors_have_the_norm() {
    for width in 1..=40 {
        let mut x = noise(5, 3 * width);
        let want: Vec<f64> = x
            .chunks_exact(width)
            .flat_map(|run| {
                let sum: f64 = run.iter().map(|x| f64::from(*x).powi(2)).sum();
                run.iter().map(move |x| f64::from(*x) * 0.25 / (sum + 1e-6).sqrt()).collect::<Vec<_>>()
            })
            .collect();
        l2_normalize(&mut x, width, 0.25);
        close("l2_normalize", &x, &want, 1e-7);
    }
}
