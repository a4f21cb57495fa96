//! Equally sized groups of nearby rows: balanced k-means by bisection.

use rayon::prelude::*;

/// Iterations that recompute the two halves of a set from their means.
const ROUNDS: usize = 3;
/// Rows summed by one thread at a time: sums do not depend on the number of threads.
const RUN: usize = 1024;
/// Values of a set that is copied out of the matrix, which is slower to read if quantized.
const COPIED: usize = 1 << 24;

/// A row of the matrix, written to a buffer of its width.
type Row<'a> = &'a (dyn Fn(u32, &mut [f32]) + Sync);

/// The rows `0..count`, ordered so that each run of `count / groups` is one group, and the mean of each group `(groups,
/// width)`. Independent of the number of threads.
///
/// `groups` is a power of two that divides `count`. A set is split at the median of its projections on the difference
/// of its halves' means, which assigns each row to the nearer mean as far as the sizes allow.
pub(crate) fn balanced_groups(count: usize, groups: usize, width: usize, row: Row<'_>) -> (Vec<u32>, Vec<f32>) {
    let mut rows: Vec<u32> = (0..count as u32).collect();
    divide(&mut rows, groups, width, row);
    let means = rows.par_chunks(count / groups).map(|group| mean(group, width, row));
    let means: Vec<Vec<f32>> = means.collect();
    (rows, means.concat())
}

/// Orders `rows` into `groups` groups.
fn divide(rows: &mut [u32], groups: usize, width: usize, row: Row<'_>) {
    if groups <= 1 {
        rows.sort_unstable();
        return;
    }
    bisect(rows, width, row);
    let (left, right) = rows.split_at_mut(rows.len() / 2);
    rayon::join(|| divide_copied(left, groups / 2, width, row), || divide_copied(right, groups / 2, width, row));
}

/// As [`divide`], copying the rows once they are few enough.
fn divide_copied(rows: &mut [u32], groups: usize, width: usize, row: Row<'_>) {
    let values = rows.len() * width;
    if groups <= 1 || values > COPIED || 2 * values <= COPIED {
        return divide(rows, groups, width, row);
    }
    let mut copy = vec![0.0; values];
    rows.iter().zip(copy.chunks_exact_mut(width)).for_each(|(index, out)| row(*index, out));
    let mut places: Vec<u32> = (0..rows.len() as u32).collect();
    let copied = |place: u32, out: &mut [f32]| out.copy_from_slice(&copy[place as usize * width..][..width]);
    divide(&mut places, groups, width, &copied);
    let ordered: Vec<u32> = places.iter().map(|place| rows[*place as usize]).collect();
    rows.copy_from_slice(&ordered);
}

/// Orders `rows` into two halves.
fn bisect(rows: &mut [u32], width: usize, row: Row<'_>) {
    let mut direction = first_direction(rows, width, row);
    let middle = rows.len() / 2;
    for _ in 0..ROUNDS {
        let mut keyed: Vec<(f32, u32)> = projections(rows, &direction, row);
        keyed.select_nth_unstable_by(middle, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        rows.iter_mut().zip(keyed).for_each(|(index, (_, of))| *index = of);
        // The halves are sets: sums are in row order.
        let (left, right) = rows.split_at_mut(middle);
        left.sort_unstable();
        right.sort_unstable();
        let (left, right) = (mean(left, width, row), mean(right, width, row));
        direction = right.iter().zip(&left).map(|(right, left)| right - left).collect();
    }
}

/// The direction from the mean to the row farthest from it.
fn first_direction(rows: &[u32], width: usize, row: Row<'_>) -> Vec<f32> {
    let mean = mean(rows, width, row);
    let of_run = |run: &[u32]| {
        let mut buffer = vec![0.0; width];
        let distance = |index: &u32| {
            row(*index, &mut buffer);
            (buffer.iter().zip(&mean).map(|(x, mean)| (x - mean) * (x - mean)).sum::<f32>(), *index)
        };
        run.iter().map(distance).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default()
    };
    let farthest: Vec<_> = rows.par_chunks(RUN).map(of_run).collect();
    let (_, farthest) = farthest.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    let mut direction = vec![0.0; width];
    row(farthest, &mut direction);
    direction.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
    direction
}

/// The dot product of each row with `direction`, and the row.
fn projections(rows: &[u32], direction: &[f32], row: Row<'_>) -> Vec<(f32, u32)> {
    let of_run = |run: &[u32]| -> Vec<(f32, u32)> {
        let mut buffer = vec![0.0; direction.len()];
        let project = |index: &u32| {
            row(*index, &mut buffer);
            (dot(&buffer, direction), *index)
        };
        run.iter().map(project).collect()
    };
    let runs: Vec<_> = rows.par_chunks(RUN).map(of_run).collect();
    runs.concat()
}

/// In sixteen lanes, so that the compiler vectorizes it.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

fn mean(rows: &[u32], width: usize, row: Row<'_>) -> Vec<f32> {
    let of_run = |run: &[u32]| {
        let (mut buffer, mut sum) = (vec![0.0; width], vec![0.0f32; width]);
        for index in run {
            row(*index, &mut buffer);
            sum.iter_mut().zip(&buffer).for_each(|(sum, x)| *sum += x);
        }
        sum
    };
    let runs: Vec<_> = rows.par_chunks(RUN).map(of_run).collect();
    let mut sum = vec![0.0f64; width];
    for run in runs {
        sum.iter_mut().zip(run).for_each(|(sum, x)| *sum += f64::from(x));
    }
    sum.into_iter().map(|x| (x / rows.len().max(1) as f64) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four shuffled clusters of eight rows in the plane: each becomes a group, and its mean is found.
    #[test]
    fn clusters_become_groups() {
        let at = |index: u32| {
            let cluster = index * 5 % 4;
            let (x, y) = [(0.0, 0.0), (10.0, 1.0), (0.0, 20.0), (11.0, 22.0)][cluster as usize];
            let near = (index * 7 % 8) as f32 / 16.0;
            (cluster, [x + near, y - near])
        };
        let row = |index: u32, out: &mut [f32]| out.copy_from_slice(&at(index).1);
        let (order, means) = balanced_groups(32, 4, 2, &row);
        let mut all = order.clone();
        all.sort_unstable();
        assert_eq!(all, (0..32).collect::<Vec<u32>>());
        for (group, mean) in order.chunks(8).zip(means.chunks(2)) {
            let cluster = at(group[0]).0;
            assert!(group.iter().all(|index| at(*index).0 == cluster), "{group:?}");
            let of = |axis: usize| group.iter().map(|index| at(*index).1[axis]).sum::<f32>() / 8.0;
            assert!((mean[0] - of(0)).abs() < 1e-5 && (mean[1] - of(1)).abs() < 1e-5, "{mean:?}");
        }
        // Identical rows are divided by index.
        let (order, _) = balanced_groups(8, 8, 2, &|_, out: &mut [f32]| out.fill(1.0));
        assert_eq!(order, (0..8).collect::<Vec<u32>>());
    }
}
