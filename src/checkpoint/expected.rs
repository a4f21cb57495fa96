//! The tensors that a configuration implies: a family lists them, `verify` and `convert` check them.

/// What a target's configuration implies.
pub(crate) struct Implied {
    /// The configuration in a few words.
    pub summary: String,
    pub vocab_size: usize,
    /// Tensors, with the checkpoint's prefixes.
    pub tensors: Vec<Expected>,
    /// Whether another tensor may be present, unused.
    pub is_known: Box<dyn Fn(&str) -> bool>,
}

/// The role of a tensor, which determines its checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A matrix, of any supported type.
    Matrix,
    /// A table whose rows are only looked up: likewise, but no separate scale is applied.
    Table,
    /// A vector: floating point.
    Vector,
    /// A vector of factors: all zeros would zero the model's output.
    Gain,
    /// Token ids.
    Ordering,
}

/// A required tensor; `name` is Hugging Face's, without the text model's prefix.
pub(crate) struct Expected {
    pub name: String,
    pub shape: Vec<usize>,
    pub kind: Kind,
}
