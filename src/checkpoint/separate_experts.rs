//! Experts with a tensor per matrix: `X.experts.7.gate_proj.weight`, `up_proj` and `down_proj` instead of the stacks
//! `X.experts.gate_up_proj` and `X.experts.down_proj`.

use super::expected::Expected;
use super::files::Checkpoint;

/// The place of a matrix in its stack.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Index of the matrix.
    pub index: usize,
    /// Matrices per expert.
    pub per_expert: usize,
}

/// The matrices of an expert in the stack `name`, in order.
pub(super) fn parts(name: &str) -> &'static [&'static str] {
    if name.ends_with("gate_up_proj") { &["gate_proj", "up_proj"] } else { &["down_proj"] }
}

/// The names of the matrices of the stack `name` of `count` experts, expert by expert.
pub(super) fn matrices(name: &str, count: usize) -> impl Iterator<Item = String> {
    let (module, stack) = name.rsplit_once('.').unwrap_or(("", name));
    (0..count).flat_map(move |expert| parts(stack).iter().map(move |part| format!("{module}.{expert}.{part}.weight")))
}

/// The stack of the matrix `name`, and the place there; `None` if it is not that of a single expert.
pub(super) fn place(name: &str) -> Option<(String, Place)> {
    let (module, part) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let (module, digits) = module.rsplit_once('.')?;
    let expert: u32 = digits.parse().ok()?;
    // Canonical, so that no two names denote one matrix.
    if !module.ends_with(".experts") || expert.to_string() != digits {
        return None;
    }
    ["gate_up_proj", "down_proj"].into_iter().find_map(|stack| {
        let (of, per_expert) = (parts(stack).iter().position(|own| *own == part)?, parts(stack).len());
        Some((format!("{module}.{stack}"), Place { index: expert as usize * per_expert + of, per_expert }))
    })
}

impl Checkpoint {
    /// Whether the matrices of the stack `name` have a tensor each.
    pub(super) fn is_separate(&self, name: &str) -> bool {
        !self.has(name) && matrices(name, 1).any(|first| self.has(&first))
    }

    /// The tensors that a configuration implies, where stacks of separate experts are replaced by their matrices, up to
    /// the first that is missing: the number of experts is only a claim.
    pub(crate) fn with_separate_experts(&self, implied: Vec<Expected>) -> Vec<Expected> {
        let mut tensors = Vec::with_capacity(implied.len());
        for stack in implied {
            match stack.shape[..] {
                [count, outputs, inputs] if self.is_separate(&stack.name) => {
                    for name in matrices(&stack.name, count) {
                        let (is_last, rows) = (!self.has(&name), outputs / parts(&stack.name).len());
                        tensors.push(Expected { name, shape: vec![rows, inputs], kind: stack.kind });
                        if is_last {
                            break;
                        }
                    }
                }
                _ => tensors.push(stack),
            }
        }
        tensors
    }
}
