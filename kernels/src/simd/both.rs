//! Vectors in two registers.

/// Evaluates an expression for both registers, with the constant index `$i`.
macro_rules! both {
    (|$i:ident| $each:expr) => {
        [
            {
                const $i: usize = 0;
                $each
            },
            {
                const $i: usize = 1;
                $each
            },
        ]
    };
}
pub(crate) use both;
