//! Functions shared by the prompt lookup (n-gram) drafters.

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

/// Maximum tokens of a draft: grows while all are accepted, falls to what was accepted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cap {
    tokens: usize,
}

impl Cap {
    pub(super) fn new(most: usize) -> Self {
        Self { tokens: most }
    }

    pub(super) fn tokens(self) -> usize {
        self.tokens
    }

    /// Doubles after a fully accepted draft, else falls to one more than were accepted. It is never 0, so a key that
    /// failed once is tried again with a single token.
    pub(super) fn learn(&mut self, drafted: usize, accepted: usize, most: usize) {
        self.tokens =
            if accepted == drafted { self.tokens.saturating_mul(2).min(most) } else { (accepted + 1).min(most) };
    }
}
