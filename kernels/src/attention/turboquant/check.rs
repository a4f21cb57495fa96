//! Compatibility checks of pages and queries.

use crate::attention::query::Query;
use crate::attention::turboquant::page::Page;
use crate::attention::turboquant::side::Side;

/// Panics unless `page` has keys for these queries.
pub(in crate::attention) fn keys(page: &Page<'_>, head_dim: usize, queries: &[Query<'_>]) {
    assert_eq!(
        (page.layout.side(), page.layout.head_dim()),
        (Side::Keys, head_dim),
        "attend: not a page of keys of this head_dim"
    );
    let fit = |query: &Query<'_>| query.quantized.is_some_and(|quantized| quantized.rotary.fits(page.layout));
    assert!(queries.iter().all(fit), "attend: a query is not quantized for these keys");
}

/// Panics unless `rotary` has the first channels of keys for these queries, and `values` the others.
pub(in crate::attention) fn k_eq_v(rotary: &Page<'_>, values: &Page<'_>, head_dim: usize, queries: &[Query<'_>]) {
    keys(rotary, rotary.layout.head_dim(), queries);
    self::values(values, head_dim);
    let starts_group = values.layout.scale_groups().any(|group| group.first == rotary.layout.head_dim());
    assert!(starts_group, "attend: the rotary channels do not end where a scale group of the values begins");
    let fit = |query: &Query<'_>| {
        query.quantized.and_then(|quantized| quantized.values).is_some_and(|query| query.fits(values.layout))
    };
    assert!(queries.iter().all(fit), "attend: a query is not quantized for these values");
}

/// Panics unless `page` has values of this width.
pub(in crate::attention) fn values(page: &Page<'_>, head_dim: usize) {
    assert_ne!(page.layout.side(), Side::Keys, "attend: values are a page of keys");
    assert_eq!(page.layout.head_dim(), head_dim, "attend: the page of values has a different head_dim");
}
