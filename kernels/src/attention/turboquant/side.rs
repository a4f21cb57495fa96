//! Role of a page: keys, values, or both.

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 128;

/// The role of a page, which decides its layout and whether it has a mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Dot products with queries.
    Keys,
    /// Sums over tokens.
    Values,
    /// Both, of a layer whose K and V are one vector (`attention_k_eq_v`): laid out as values, quantized as keys.
    KEqV,
}
