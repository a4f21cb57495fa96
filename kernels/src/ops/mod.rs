//! Operations on rows between the matrix products: norm, rotary embedding, activations, choices over the vocabulary.

pub mod activation;
pub mod norm;
pub mod rope;
pub mod vocabulary;
