//! Codes against independent references: blocks of llama.cpp's TurboQuant forks written by an independent script
//! (`scripts/turbo_golden.py`), and the known errors of the formats on Gaussian data.

use foretoken_kernels::Isa;
use foretoken_kernels::attention::turboquant::{
    CodeFormat, PAGE_TOKENS, Page, PageLayout, PageMut, RotationGroups, Side, decode_page, encode_page, rotate,
};
use half::f16;

const GOLDEN: &str = include_str!("turbo_golden.txt");

/// Values of a published block.
const BLOCK_LEN: usize = 128;

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// The script's input vectors.
fn vector(seed: u64) -> Box<[f32; BLOCK_LEN]> {
    let mut state = seed;
    Box::new(std::array::from_fn(|i| {
        let value = (splitmix(&mut state) >> 40) as f32 / (1u64 << 22) as f32 - 2.0;
        let value = if seed % 2 == 1 && i % 4 == 0 { value + 1.5 } else { value };
        value * 2.0f32.powi((seed % 5) as i32 - 2)
    }))
}

/// Two normal deviates (Box and Muller).
fn normals(state: &mut u64) -> [f32; 2] {
    let mut uniform = || ((splitmix(state) >> 40) as f32 + 0.5) / (1u64 << 24) as f32;
    let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f32::consts::TAU * uniform());
    [radius * angle.cos(), radius * angle.sin()]
}

fn gaussian(state: &mut u64, len: usize) -> Vec<f32> {
    (0..len / 2).flat_map(|_| normals(state)).collect()
}

/// The norm and the codes of a published block in hexadecimal: the norm as `f16`, little endian; 2 bits of every code, or
/// the 4 of `turbo4`, the first value lowest; then the upper bits of `turbo3`.
fn unpacked(format: CodeFormat, hex: &str) -> (f16, Vec<usize>) {
    let byte = |i: usize| usize::from(u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap());
    let two = |j: usize| byte(2 + j / 4) >> (2 * (j % 4)) & 3;
    let code = |j: usize| match format {
        CodeFormat::Turbo2 => two(j),
        CodeFormat::Turbo3 => two(j) | (byte(2 + 32 + j / 8) >> (j % 8) & 1) << 2,
        _ => byte(2 + j / 2) >> (4 * (j % 2)) & 15,
    };
    (f16::from_bits((byte(0) | byte(1) << 8) as u16), (0..BLOCK_LEN).map(code).collect())
}

#[test]
fn pages_have_the_codes_and_norms_of_published_blocks() {
    let groups = RotationGroups::of(BLOCK_LEN).unwrap();
    for (format, most) in [(CodeFormat::Turbo2, 0.2), (CodeFormat::Turbo3, 0.06), (CodeFormat::Turbo4, 0.02)] {
        let blocks: Vec<_> = GOLDEN
            .lines()
            .filter_map(|line| line.strip_prefix(format.name())?.trim_start().split_once(' '))
            .map(|(seed, hex)| (seed.parse::<u64>().unwrap(), unpacked(format, hex)))
            .collect();
        assert!((30..=PAGE_TOKENS).contains(&blocks.len()), "{format:?}: {} golden blocks", blocks.len());
        let mut values = vec![0.0; PAGE_TOKENS * BLOCK_LEN];
        for (row, (seed, _)) in values.chunks_exact_mut(BLOCK_LEN).zip(&blocks) {
            row.copy_from_slice(&*vector(*seed));
        }
        for (isa, side) in Isa::available().flat_map(|isa| [(isa, Side::Keys), (isa, Side::Values)]) {
            let mut rows = values.clone();
            rotate(isa, &mut rows, groups);
            let decoded = round_trip(isa, format, side, BLOCK_LEN, &rows);
            let decoded = decoded.chunks_exact(BLOCK_LEN).zip(rows.chunks_exact(BLOCK_LEN));
            for ((seed, (norm, codes)), (decoded, row)) in blocks.iter().zip(decoded) {
                let (scale, levels) = (norm.to_f32() * format.unit(), format.levels().unwrap());
                let expected: Vec<_> = codes.iter().map(|code| scale * f32::from(levels[*code])).collect();
                assert_eq!(decoded, expected, "{} {format:?} {side:?} {seed}", isa.name());
                let square = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                let difference: Vec<f32> = row.iter().zip(decoded).map(|(a, b)| a - b).collect();
                let error = square(&difference) / square(row);
                assert!(error < most, "{format:?} {seed}: {error}");
            }
        }
    }
}

/// Decoded rows of a page.
fn round_trip(isa: Isa, format: CodeFormat, side: Side, head_dim: usize, rows: &[f32]) -> Vec<f32> {
    let layout = PageLayout::new(format, side, RotationGroups::of(head_dim).unwrap());
    let (mut codes, mut scales) = (vec![0; layout.code_bytes()], vec![f16::ZERO; layout.scales()]);
    let mut mean = vec![f16::ZERO; layout.mean()];
    let memory = PageMut { codes: &mut codes, scales: &mut scales, mean: &mut mean };
    encode_page(isa, layout, rows, memory).unwrap();
    let mut decoded = vec![0.0; rows.len()];
    decode_page(&Page::new(layout, &codes, &scales, &mean), &mut decoded);
    decoded
}

#[test]
fn errors_on_gaussian_data_are_the_known_ones() {
    // Lloyd-Max with one matched scale per 128: .1189, .0339, .0092, .00241, .00063; with least squares .1153 at 2
    // bits; ggml's q4_0 .00739, q8_0 2.9e-5. Subtracting a mean over 128 tokens removes 1/128 of the energy.
    let centred = 1.0 - 1.0 / 128.0;
    let known = [
        (CodeFormat::Tqc2, Side::Keys, 0.1189 * centred),
        (CodeFormat::Tqc2, Side::Values, 0.1153),
        (CodeFormat::Tqc3, Side::Keys, 0.0339 * centred),
        (CodeFormat::Tqc3, Side::Values, 0.0336),
        (CodeFormat::Tqc4, Side::Keys, 0.0092 * centred),
        (CodeFormat::Tqc4, Side::Values, 0.0092),
        (CodeFormat::Tqc5, Side::Keys, 0.00241 * centred),
        (CodeFormat::Tqc5, Side::Values, 0.00241),
        (CodeFormat::Tqc6, Side::Keys, 0.00065 * centred),
        (CodeFormat::Tqc6, Side::Values, 0.00065),
        (CodeFormat::Turbo2, Side::Keys, 0.1189),
        (CodeFormat::Turbo3, Side::Keys, 0.0339),
        (CodeFormat::Turbo4, Side::Values, 0.0092),
        (CodeFormat::Q4_0, Side::Values, 0.00739),
        (CodeFormat::Q8_0, Side::Keys, 2.9e-5),
    ];
    // 102,400 vectors of 128.
    let (mut state, mut energy, mut errors) = (42, 0.0, [0.0; 15]);
    for _ in 0..200 {
        let rows = gaussian(&mut state, PAGE_TOKENS * 512);
        energy += rows.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        for ((format, side, _), error) in known.iter().zip(&mut errors) {
            let decoded = round_trip(Isa::best(), *format, *side, 512, &rows);
            *error += rows.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>();
        }
    }
    let mut wrong = Vec::new();
    for ((format, side, known), error) in known.into_iter().zip(errors) {
        let error = error / energy;
        if (error / known - 1.0).abs() > 0.02 {
            wrong.push(format!("{format:?} {side:?}: {error}, not {known}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_constant_part_of_the_keys_costs_no_precision() {
    // A bias of eight times the noise, heavy-tailed over channels; errors are relative to the noise alone.
    let (head_dim, mut state) = (128, 7);
    let heavy: Vec<f32> = gaussian(&mut state, head_dim).iter().map(|x| x * x * x).collect();
    let length = heavy.iter().map(|x| x * x).sum::<f32>().sqrt();
    let bias: Vec<f32> = heavy.iter().map(|x| x / length * 8.0 * (head_dim as f32).sqrt()).collect();
    let error = |format: CodeFormat| {
        let mut state = 8;
        let (mut error, mut energy) = (0.0, 0.0);
        for _ in 0..8 {
            let noise = gaussian(&mut state, PAGE_TOKENS * head_dim);
            let mut rows: Vec<f32> = noise.iter().enumerate().map(|(i, x)| x + bias[i % head_dim]).collect();
            rotate(Isa::best(), &mut rows, RotationGroups::of(head_dim).unwrap());
            let decoded = round_trip(Isa::best(), format, Side::Keys, head_dim, &rows);
            // An error common to all tokens is subtracted: the softmax is invariant to it.
            for channel in 0..head_dim {
                let of =
                    |token: usize| f64::from(rows[token * head_dim + channel] - decoded[token * head_dim + channel]);
                let common = (0..PAGE_TOKENS).map(of).sum::<f64>() / PAGE_TOKENS as f64;
                error += (0..PAGE_TOKENS).map(|token| (of(token) - common).powi(2)).sum::<f64>();
            }
            energy += noise.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        }
        error / energy
    };
    let (tqc4, turbo4) = (error(CodeFormat::Tqc4), error(CodeFormat::Turbo4));
    assert!(tqc4 < 0.013, "tqc4: {tqc4}");
    assert!(turbo4 > 0.3, "turbo4, which has no mean: {turbo4}");
}
