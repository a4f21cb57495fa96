//! Codes against independent references: blocks written by an independent script (`scripts/turbo_golden.py`), and the
//! known errors of the formats on Gaussian data.

use foretoken_kernels::Isa;
use foretoken_kernels::attention::turboquant::{
    BLOCK_LEN, BlockError, BlockType, CodeFormat, PAGE_TOKENS, Page, PageLayout, PageMut, RotationGroups, Side,
    decode_block, decode_page, encode_block, encode_page,
};
use half::f16;

const GOLDEN: &str = include_str!("turbo_golden.txt");

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

const TYPES: [(&str, BlockType); 3] =
    [("turbo2", BlockType::Turbo2), ("turbo3", BlockType::Turbo3), ("turbo4", BlockType::Turbo4)];

#[test]
fn blocks_have_the_bytes_of_the_published_layout() {
    for (name, block_type) in TYPES {
        let mut seen = 0;
        for line in GOLDEN.lines().filter(|line| line.starts_with(name)) {
            let fields: Vec<_> = line.split(' ').collect();
            let values = vector(fields[1].parse().unwrap());
            for isa in Isa::available() {
                let mut block = vec![0xff; block_type.bytes()];
                encode_block(isa, block_type, &values, &mut block).unwrap();
                let hex: String = block.iter().map(|b| format!("{b:02x}")).collect();
                assert_eq!(hex, fields[2], "{} {name} {}", isa.name(), fields[1]);

                let mut decoded = Box::new([f32::NAN; BLOCK_LEN]);
                decode_block(isa, block_type, &block, &mut decoded);
                let square = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                let difference: Vec<f32> = values.iter().zip(&*decoded).map(|(a, b)| a - b).collect();
                let error = square(&difference) / square(&*values);
                assert!(error < [0.0, 0.0, 0.2, 0.06, 0.02][block_type.format().unwrap().bits()], "{name}: {error}");
                // The stored norm preserves the length, to the precision of an f16.
                assert!((square(&*decoded) / square(&*values) - 1.0).abs() < 1.5e-3, "{name}");
            }
            seen += 1;
        }
        assert!(seen >= 30, "{name}: {seen} golden blocks");
    }
}

#[test]
fn non_finite_blocks_are_errors_and_legacy_blocks_are_read() {
    let mut values = vector(1);
    let mut block = [0; 68];
    let refused = encode_block(Isa::best(), BlockType::Turbo4Legacy, &values, &mut block);
    assert_eq!(refused, Err(BlockError::ReadOnly(BlockType::Turbo4Legacy)));

    // As turbo4 with 2 more bytes, and centroids of about .7 times the magnitude.
    let (mut now, mut legacy) = ([0.0; BLOCK_LEN], [0.0; BLOCK_LEN]);
    encode_block(Isa::best(), BlockType::Turbo4, &values, &mut block[2..]).unwrap();
    decode_block(Isa::best(), BlockType::Turbo4, &block[2..], &mut now);
    block.copy_within(2..4, 0);
    decode_block(Isa::best(), BlockType::Turbo4Legacy, &block, &mut legacy);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let cosine = dot(&now, &legacy) / (dot(&now, &now) * dot(&legacy, &legacy)).sqrt();
    let ratio = (dot(&legacy, &legacy) / dot(&now, &now)).sqrt();
    assert!(cosine > 0.995 && (0.6..0.75).contains(&ratio), "{cosine} {ratio}");

    values[77] = f32::NAN;
    match encode_block(Isa::best(), BlockType::Turbo3, &values, &mut block[..50]) {
        Err(BlockError::NonFinite(error)) => assert_eq!((error.row, error.channel), (0, 77)),
        other => panic!("{other:?}"),
    }
    for (name, block_type) in TYPES {
        let mut block = vec![0xff; block_type.bytes()];
        encode_block(Isa::best(), block_type, &[0.0; BLOCK_LEN], &mut block).unwrap();
        decode_block(Isa::best(), block_type, &block, &mut values);
        assert!(values.iter().all(|x| *x == 0.0), "{name}");
    }
}

/// Decoded rows of a page.
fn round_trip(format: CodeFormat, side: Side, head_dim: usize, rows: &[f32]) -> Vec<f32> {
    let layout = PageLayout::new(format, side, RotationGroups::of(head_dim).unwrap());
    let (mut codes, mut scales) = (vec![0; layout.code_bytes()], vec![f16::ZERO; layout.scales()]);
    let mut mean = vec![f16::ZERO; layout.mean()];
    let memory = PageMut { codes: &mut codes, scales: &mut scales, mean: &mut mean };
    encode_page(Isa::best(), layout, rows, memory).unwrap();
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
            let decoded = round_trip(*format, *side, 512, &rows);
            *error += rows.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>();
        }
    }
    let mut wrong = Vec::new();
    for ((format, side, known), error) in known.into_iter().zip(errors) {
        let error = error / energy;
        println!("{format:?} {side:?}: {error:.6} (known {known:.6})");
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
            foretoken_kernels::attention::turboquant::rotate(
                Isa::best(),
                &mut rows,
                RotationGroups::of(head_dim).unwrap(),
            );
            let decoded = round_trip(format, Side::Keys, head_dim, &rows);
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
    println!("tqc4 {tqc4:.4}, turbo4 {turbo4:.4}");
    assert!(tqc4 < 0.013, "tqc4: {tqc4}");
    assert!(turbo4 > 0.3, "turbo4, which has no mean: {turbo4}");
}
