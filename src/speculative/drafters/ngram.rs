//! Functions shared by the prompt lookup (n-gram) drafters.

use crate::speculative::AcceptResult;

/// A hash of an n-gram with good upper and lower bits (a multiply-and-fold step per token).
pub(super) fn hash(ngram: &[u32]) -> u64 {
    ngram.iter().fold(0x9E37_79B9_7F4A_7C15, |hash: u64, token| {
        let product = u128::from(hash ^ u64::from(*token)).wrapping_mul(0xD6E8_FEB8_6659_FD93_A076_1D64_78BD_642F);
        (product as u64) ^ ((product >> 64) as u64)
    })
}

/// `count` tokens from `tokens[from..]` on. At the end of the history the copy continues in itself, so
/// that a short period is continued at any length.
pub(super) fn copy(tokens: &[u32], from: usize, count: usize) -> Vec<u32> {
    let mut copied: Vec<u32> = Vec::with_capacity(count);
    for i in from..from + count {
        copied.push(tokens.get(i).copied().unwrap_or_else(|| copied[i - tokens.len()]));
    }
    copied
}

/// Maximum tokens of a key's next draft, up to `most`, where `cap` was that of its last one: twice as many if all were
/// accepted, else one more than were. It is never 0, so a key that failed once is tried again with a single token.
pub(super) fn next_cap(cap: usize, AcceptResult { drafted, accepted }: AcceptResult, most: usize) -> usize {
    let cap = if accepted == drafted { cap.saturating_mul(2) } else { accepted + 1 };
    cap.min(most)
}
