//! Attention of queries over one block of keys and values: checks, and the order of scores, softmax and values.

use crate::attention::exact;
use crate::attention::query::{KvBlock, KvRows, QUERY_BLOCK, Query, Scratch};
use crate::attention::softmax_weights::softmax_weights;
use crate::attention::turboquant::{check, scores, scores_transposed, values};
use crate::element::Elements;
use crate::isa::Isa;

/// Adds a block's keys and values to every query's attention.
///
/// # Panics
/// If a length does not match, a query sees keys outside the block, or is not quantized for quantized keys.
pub fn attend_block(isa: Isa, block: KvBlock<'_>, queries: &mut [Query<'_>], scratch: &mut Scratch<'_>) {
    let KvBlock { keys, values, head_dim } = block;
    let len = keys.count(head_dim);
    assert_eq!(len, values.count(head_dim), "attend: keys and values differ in length");
    let Scratch { scores: score_rows, weights } = scratch;
    assert!(score_rows.len().min(weights.len()) >= Scratch::len(len), "attend: scratch too short");
    for q in queries.iter() {
        assert!(
            q.query.len() == head_dim && q.output.len() == head_dim,
            "attend: query or output length is not head_dim"
        );
        assert!(q.visible.end <= len, "attend: a query sees keys outside the block");
    }
    match &keys {
        KvRows::Exact(_) => {}
        KvRows::Quantized(page) => check::keys(page, head_dim, queries),
        KvRows::KEqV { rotary, values } => check::k_eq_v(rotary, values, head_dim, queries),
    }
    match &values {
        KvRows::Exact(_) => {}
        KvRows::Quantized(page) => check::values(page, head_dim),
        KvRows::KEqV { .. } => panic!("attend: KEqV rows are keys, not values"),
    }
    for queries in queries.chunks_mut(QUERY_BLOCK) {
        let (mut first, mut last) = (len, 0);
        for query in queries.iter().filter(|query| !query.visible.is_empty()) {
            first = first.min(query.visible.start);
            last = last.max(query.visible.end);
        }
        if first >= last {
            continue;
        }
        let range = first..last;
        match keys {
            KvRows::Quantized(page) => scores::key_scores(isa, &page, queries, range.clone(), score_rows),
            KvRows::KEqV { rotary, values } => {
                scores::key_scores(isa, &rotary, queries, range.clone(), score_rows);
                let from = rotary.layout().head_dim();
                scores_transposed::add_key_scores(isa, &values, from, queries, range.clone(), score_rows);
            }
            KvRows::Exact(Elements::F32(k)) => exact::key_scores(isa, k, head_dim, queries, range.clone(), score_rows),
            KvRows::Exact(Elements::F16(k)) => exact::key_scores(isa, k, head_dim, queries, range.clone(), score_rows),
            KvRows::Exact(Elements::Bf16(k)) => exact::key_scores(isa, k, head_dim, queries, range.clone(), score_rows),
        }
        // Quantized values read the weights of the whole page.
        let weighed = if matches!(values, KvRows::Quantized(_)) { 0..len } else { range.clone() };
        softmax_weights(isa, len, queries, weighed, score_rows, weights);
        match values {
            KvRows::Quantized(page) => values::add_values(isa, &page, queries, range, weights),
            KvRows::KEqV { .. } => {}
            KvRows::Exact(Elements::F32(v)) => exact::add_values(isa, v, head_dim, queries, range, weights),
            KvRows::Exact(Elements::F16(v)) => exact::add_values(isa, v, head_dim, queries, range, weights),
            KvRows::Exact(Elements::Bf16(v)) => exact::add_values(isa, v, head_dim, queries, range, weights),
        }
    }
}
