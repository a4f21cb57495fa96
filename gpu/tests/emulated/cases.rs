//! The cases, and shared helpers.

use super::device::Device;

/// Runs a case on a device.
type Run = dyn Fn(&mut dyn Device) -> Result<(), String> + Send + Sync;

/// One comparison with the CPU.
pub struct Case {
    /// Its name.
    pub name: String,
    /// The sources whose code it runs.
    pub sources: &'static [&'static str],
    /// Runs it; the error says what differs or failed.
    pub run: Box<Run>,
}

impl Case {
    pub fn new(
        name: impl Into<String>,
        sources: &'static [&'static str],
        run: impl Fn(&mut dyn Device) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), sources, run: Box::new(run) }
    }

    /// Whether it runs code of this source.
    pub fn reads(&self, file: &str) -> bool {
        self.sources.contains(&file)
    }
}

/// All cases but the small ones.
pub fn all() -> Vec<Case> {
    use super::{attention, delta_net, matmul, merge, steps};
    [matmul::all(), attention::all(), steps::all(), merge::all(), delta_net::all()].into_iter().flatten().collect()
}

/// A few fast cases that reach every line.
pub fn small() -> Vec<Case> {
    use super::{attention, delta_net, matmul, merge, steps};
    let cases = [matmul::small(), attention::small(), steps::small(), merge::small(), delta_net::small()];
    cases.into_iter().flatten().collect()
}

/// Pseudo-random numbers.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    /// Approximately Gaussian.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.uniform()).sum::<f32>() * 0.7
    }
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

/// An error with the first element whose bits differ.
pub fn same_bits(what: &str, got: &[f32], want: &[f32]) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    let differs = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
    differs.map_or(Ok(()), |i| Err(format!("{what}: element {i} of {} is {}, not {}", got.len(), got[i], want[i])))
}

/// An error with the first element that differs.
pub fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    let differs = got.iter().zip(want).position(|(a, b)| a != b);
    differs.map_or(Ok(()), |i| Err(format!("{what}: element {i} of {} is {:?}, not {:?}", got.len(), got[i], want[i])))
}

/// An error with the first element that differs by more than `tolerance` times the largest expected magnitude.
pub fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-30f32, |a, x| a.max(x.abs()));
    let far = |(a, b): (&f32, &f32)| a.is_nan() || (a - b).abs() > tolerance * largest;
    let differs = got.iter().zip(want).position(far);
    differs.map_or(Ok(()), |i| Err(format!("{what}: element {i} of {} is {}, not {}", got.len(), got[i], want[i])))
}
