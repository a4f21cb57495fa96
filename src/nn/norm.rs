//! Root-mean-square norms.

use candle_core::Tensor;
use foretoken_kernels::Isa;
use foretoken_kernels::norm::{AfterNorm, rms_norm};

use super::{F32View, row_blocks, same_shape, tensor};
use crate::Result;

/// `norm(x) = x / sqrt(mean(x^2) + eps) * weight` over the last dimension (of `weight.len()`, or of `width` where
/// weightless). The factor is `weight`, not `1 + weight`.
#[derive(Clone)]
pub struct RmsNorm {
    weight: Option<Vec<f32>>, // (width)
    width: usize,
    eps: f32,
    isa: Isa,
}

impl RmsNorm {
    /// A norm with a weight `(width)`.
    pub fn new(weight: Vec<f32>, eps: f64, isa: Isa) -> Self {
        Self { width: weight.len(), weight: Some(weight), eps: eps as f32, isa }
    }

    /// A norm without a weight, over rows of `width`.
    pub fn weightless(width: usize, eps: f64, isa: Isa) -> Self {
        Self { weight: None, width, eps: eps as f32, isa }
    }

    /// The weight `(width)`, if there is one.
    pub fn weight(&self) -> Option<&[f32]> {
        self.weight.as_deref()
    }

    /// Width of the rows that it normalises.
    pub fn width(&self) -> usize {
        self.width
    }

    /// `norm(x)`, for every `width` consecutive elements of `x`; shaped as `x`.
    ///
    /// # Errors
    /// If the size of `x` is not a multiple of `width`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x_rows = self.checked(x)?;
        let y = row_blocks(x_rows.len() / self.width, self.width, |first, y| self.write(&x_rows, first, y));
        tensor(y, x.dims())
    }

    /// `(residual + norm(x)) * scale`: the post-norm of a branch.
    ///
    /// # Errors
    /// If the size of `x` is not a multiple of `width`, or `residual` is not shaped as `x`.
    pub fn add_to(&self, residual: &Tensor, x: &Tensor, scale: f32) -> Result<Tensor> {
        same_shape("rms_norm", residual, x)?;
        let (residual, view) = (F32View::new(residual)?, self.checked(x)?);
        let y = row_blocks(view.len() / self.width, self.width, |first, y| {
            let range = first * self.width..first * self.width + y.len();
            let after = AfterNorm::AddTo { residual: &residual[range.clone()], scale };
            rms_norm(self.isa, &view[range], self.width, self.weight.as_deref(), self.eps, after, y);
        });
        tensor(y, x.dims())
    }

    /// The epsilon added to the mean square.
    pub fn eps(&self) -> f32 {
        self.eps
    }

    /// [`RmsNorm::forward`] of the rows of `x` from `first` on, as many as `y` has.
    pub(super) fn write(&self, x: &[f32], first: usize, y: &mut [f32]) {
        let x = &x[first * self.width..][..y.len()];
        rms_norm(self.isa, x, self.width, self.weight.as_deref(), self.eps, AfterNorm::Write, y);
    }

    pub(super) fn checked<'a>(&self, x: &'a Tensor) -> Result<F32View<'a>> {
        let view = F32View::new(x)?;
        if !view.len().is_multiple_of(self.width) {
            let problem = format!("rms_norm: {:?} is not a multiple of {} elements", x.dims(), self.width);
            return Err(candle_core::Error::Msg(problem).into());
        }
        Ok(view)
    }
}
