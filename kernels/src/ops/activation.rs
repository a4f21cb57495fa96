//! Pointwise functions.

use std::marker::PhantomData;

use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// The function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The tanh form of GELU: `gelu_pytorch_tanh`.
    GeluTanh,
    /// `x sigmoid(x)`.
    Silu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
}

impl Gate {
    /// `gate[i] = f(gate[i]) * up[i]`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn apply(self, isa: Isa, gate: &mut [f32], up: &[f32]) {
        match self {
            Gate::GeluTanh => gated::<GeluTanh>(isa, gate, up),
            Gate::Silu => gated::<Silu>(isa, gate, up),
            Gate::Sigmoid => gated::<Sigmoid>(isa, gate, up),
        }
    }
}

/// `x[i] = cap * tanh(x[i] / cap)`.
pub fn soft_cap(isa: Isa, x: &mut [f32], cap: f32) {
    isa.run(SoftCap { x, cap });
}

/// A pointwise function.
pub(super) trait Pointwise {
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    unsafe fn of<L: Lanes>(l: L, x: L::V) -> L::V;
}

struct GeluTanh;

impl Pointwise for GeluTanh {
    #[inline(always)]
    unsafe fn of<L: Lanes>(l: L, x: L::V) -> L::V {
        // SAFETY: the caller entered the features. 0.044715 and sqrt(2 / pi) = 0.7978846: Hendrycks and Gimpel, 2016.
        unsafe {
            let cubic = l.fma(l.mul(x, x), l.mul(x, l.splat(0.044_715)), x);
            // (1 + tanh u) / 2 = 1 / (1 + e^-2u), without cancellation for tanh u near -1.
            let e = l.exp(l.mul(cubic, l.splat(-2.0 * 0.797_884_6)));
            l.div(x, l.add(l.splat(1.0), e))
        }
    }
}

pub(super) struct Silu;

impl Pointwise for Silu {
    #[inline(always)]
    unsafe fn of<L: Lanes>(l: L, x: L::V) -> L::V {
        // SAFETY: the caller entered the features.
        unsafe { l.div(x, l.add(l.splat(1.0), l.exp(l.sub(l.splat(0.0), x)))) }
    }
}

struct Sigmoid;

impl Pointwise for Sigmoid {
    #[inline(always)]
    unsafe fn of<L: Lanes>(l: L, x: L::V) -> L::V {
        // SAFETY: the caller entered the features.
        unsafe { l.div(l.splat(1.0), l.add(l.splat(1.0), l.exp(l.sub(l.splat(0.0), x)))) }
    }
}

fn gated<P: Pointwise>(isa: Isa, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate: lengths differ");
    isa.run(Gated::<P> { gate, up, activation: PhantomData });
}

struct Gated<'a, P> {
    gate: &'a mut [f32],
    up: &'a [f32],
    activation: PhantomData<P>,
}

impl<P: Pointwise> Op for Gated<'_, P> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let mut gate = self.gate.chunks_exact_mut(L::LANES);
        let mut up = self.up.chunks_exact(L::LANES);
        // SAFETY: `run` entered the features; chunks are `LANES` long, the remainders equally shorter.
        unsafe {
            for (gate, up) in gate.by_ref().zip(up.by_ref()) {
                let v = l.mul(P::of(l, l.load(gate.as_ptr())), l.load(up.as_ptr()));
                l.store(gate.as_mut_ptr(), v);
            }
            let (gate, up) = (gate.into_remainder(), up.remainder());
            if !gate.is_empty() {
                let x = l.load_part(gate.as_ptr(), gate.len());
                let v = l.mul(P::of(l, x), l.load_part(up.as_ptr(), up.len()));
                l.store_part(gate.as_mut_ptr(), v, gate.len());
            }
        }
    }
}

struct SoftCap<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl Op for SoftCap<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let mut x = self.x.chunks_exact_mut(L::LANES);
        // SAFETY: `run` entered the features; chunks are `LANES` long, the remainder shorter.
        unsafe {
            let (cap, inverse) = (l.splat(self.cap), l.splat(1.0 / self.cap));
            for x in x.by_ref() {
                l.store(x.as_mut_ptr(), l.mul(l.tanh(l.mul(l.load(x.as_ptr()), inverse)), cap));
            }
            let x = x.into_remainder();
            if !x.is_empty() {
                let v = l.mul(l.tanh(l.mul(l.load_part(x.as_ptr(), x.len()), inverse)), cap);
                l.store_part(x.as_mut_ptr(), v, x.len());
            }
        }
    }
}
