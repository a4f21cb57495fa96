//! Quantization errors on synthetic keys, without a checkpoint.

use anyhow::{Context, Result};
use foretoken::Isa;
use foretoken::kv::CodeFormat;
use foretoken_kernels::attention::turboquant::{
    PAGE_TOKENS, Page, PageLayout, PageMut, RotationGroups, Side, decode_page, encode_page, rotate,
};
use foretoken_tools::println;
use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Width of the rows.
const WIDTH: usize = 128;

/// Pages per kind of rows.
const PAGES: usize = 64;

/// Kinds of keys: a Gaussian of unit variance and these parts.
const KINDS: [(&str, Kind); 5] = [
    ("gaussian", Kind { bias: 0.0, turning: 0.0, heavy: false }),
    ("bias 2", Kind { bias: 2.0, turning: 0.0, heavy: false }),
    ("bias 8", Kind { bias: 8.0, turning: 0.0, heavy: false }),
    ("heavy tails", Kind { bias: 0.0, turning: 0.0, heavy: true }),
    ("drifting bias 8", Kind { bias: 8.0, turning: 0.5, heavy: false }),
];

/// A constant part of `bias` times the Gaussian's length; the share `turning` of its energy rotates
/// once per 2048 positions.
struct Kind {
    bias: f64,
    turning: f64,
    heavy: bool,
}

/// Prints the squared error of every format on every kind, relative to the energy of the varying part.
pub fn print(isa: Isa) -> Result<()> {
    let names: Vec<_> = KINDS.iter().map(|(name, _)| format!(" {name:>16}")).collect();
    println!("{:<10}{}", "keys", names.concat());
    for format in CodeFormat::ALL {
        let error = |(_, kind): &(&str, Kind)| Ok(format!(" {:>16.6}", relative_error(isa, format, kind)?));
        let errors: Vec<_> = KINDS.iter().map(error).collect::<Result<_>>()?;
        println!("{:<10}{}", format.name(), errors.concat());
    }
    Ok(())
}

fn relative_error(isa: Isa, format: CodeFormat, kind: &Kind) -> Result<f64> {
    let groups = RotationGroups::of(WIDTH).context("a width of whole groups")?;
    let layout = PageLayout::new(format, Side::Keys, groups);
    let mut rng = StdRng::seed_from_u64(1);
    // A few channels carry most of the bias, as in trained models.
    let direction: Vec<f64> = (0..WIDTH).map(|_| normal(&mut rng).powi(3)).collect();
    let length = direction.iter().map(|x| x * x).sum::<f64>().sqrt();
    let size = kind.bias * (WIDTH as f64).sqrt() / length;

    let mut codes = vec![0; layout.code_bytes()];
    let mut scales = vec![f16::ZERO; layout.scales()];
    let mut mean = vec![f16::ZERO; layout.mean()];
    let (mut error, mut energy) = (0.0, 0.0);
    // An error common to all keys of a page shifts their scores equally and is not counted.
    for page in 0..PAGES {
        let mut rows = Vec::with_capacity(PAGE_TOKENS * WIDTH);
        for token in 0..PAGE_TOKENS {
            let angle = (page * PAGE_TOKENS + token) as f64 * std::f64::consts::TAU / 2048.0;
            for (i, direction) in direction.iter().enumerate() {
                let turned = if i % 2 == 0 { angle.cos() } else { angle.sin() } * std::f64::consts::SQRT_2;
                let constant = (1.0 - kind.turning).sqrt() + kind.turning.sqrt() * turned;
                let noise = if kind.heavy { heavy(&mut rng) } else { normal(&mut rng) };
                energy += noise * noise;
                rows.push((size * direction * constant + noise) as f32);
            }
        }
        rotate(isa, &mut rows, groups);
        let filled = PageMut { codes: &mut codes, scales: &mut scales, mean: &mut mean };
        encode_page(isa, layout, &rows, filled)?;
        let mut decoded = vec![0.0; rows.len()];
        decode_page(&Page::new(layout, &codes, &scales, &mean), &mut decoded);
        let differences: Vec<f64> = rows.iter().zip(&decoded).map(|(a, b)| f64::from(a - b)).collect();
        for channel in 0..WIDTH {
            let column = || differences.iter().skip(channel).step_by(WIDTH);
            let common = column().sum::<f64>() / PAGE_TOKENS as f64;
            error += column().map(|x| (x - common).powi(2)).sum::<f64>();
        }
    }
    Ok(error / energy)
}

/// A sample from the standard normal distribution (Box and Muller, 1958).
pub fn normal(rng: &mut StdRng) -> f64 {
    let (radius, angle): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// A sample of unit variance from Student's t-distribution with 5 degrees of freedom.
fn heavy(rng: &mut StdRng) -> f64 {
    let chi: f64 = (0..5).map(|_| normal(rng).powi(2)).sum();
    normal(rng) / (chi / 5.0).sqrt() / (5.0f64 / 3.0).sqrt()
}
