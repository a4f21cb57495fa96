//! Operations on rows between the matrix products: norm, rotary embedding, activations, the gated delta net, top-k over
//! the vocabulary.

pub mod activation;
pub mod delta_net;
pub mod norm;
pub mod rope;
pub mod vocabulary;
