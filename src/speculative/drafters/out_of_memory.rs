//! Replaces a drafter whose memory the target needs, and drafts nothing.

use crate::speculative::{DraftCost, Drafter, DrafterKind, Reads};

/// Drafts nothing.
pub(in crate::speculative) struct OutOfMemory {
    pub kind: DrafterKind,
    pub reads: Reads, // unchanged: a pass in progress may have requested them
}

impl Drafter for OutOfMemory {
    fn kind(&self) -> DrafterKind {
        self.kind
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }

    fn reads(&self) -> Reads {
        self.reads.clone()
    }
}
