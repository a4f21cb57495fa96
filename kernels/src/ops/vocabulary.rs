//! Top-k over a row of scores.

/// Indices of the `k` largest entries, largest first, ties by lower index, into `indices` (cleared first).
pub fn top_k(x: &[f32], k: usize, indices: &mut Vec<u32>) {
    let order = |a: &u32, b: &u32| x[*b as usize].total_cmp(&x[*a as usize]).then(a.cmp(b));
    indices.clear();
    indices.extend(0..x.len() as u32);
    if k < indices.len() {
        if k > 0 {
            indices.select_nth_unstable_by(k - 1, order);
        }
        indices.truncate(k);
    }
    indices.sort_unstable_by(order);
}
