//! Byte lanes: the integer vector operations of products with quantized weights, on top of [`Words`].

use crate::simd::words::Words;

/// An operation written once for all byte lanes; `dispatch.rs` evaluates it inside the instruction set's features.
pub(crate) trait PanelOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval<L: ByteLanes>(self, lanes: L);
}

/// The encoding of weight bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bytes {
    /// The weights plus their zero point, at most this value; shifted left if [`ByteLanes::ALL_BYTES`] makes that
    /// exact.
    Unsigned(u8),
    /// The weights plus 128.
    Biased,
    /// Indices `n` of sixteen levels: the weights plus 128 are `15 n` plus entry `n` of the table, at most 19. With
    /// [`ByteLanes::MASKS`].
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only read by AVX2
    Indices(&'static [u8; 16]),
}

/// [`Scale::offsets`]: minus a zero point times the sums of what it is multiplied by.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum Offsets {
    /// A word.
    Words,
    /// Two `i16`, for the two pairs of bytes of a word.
    Pairs,
}

/// The scale of the sums over a sub-block's weights.
#[derive(Clone, Copy)]
pub(crate) struct Scale<I> {
    pub by: I,
    /// Initial values of the sums, as [`ByteLanes::OFFSETS`]: the word of each row, shifted right.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only read by AVX-512 and AVX2
    pub offsets: Option<(*const i32, u32)>,
}

/// Operations of products with quantized weights. Every method is `#[inline(always)]`.
///
/// # Safety
/// As [`Words`].
pub(crate) trait ByteLanes: Words {
    /// Whether products with all unsigned bytes are exact. If so, the 128 of [`Bytes::Biased`] stays in the products,
    /// and sums start from -128 times the sum of `x`; if not, products use signed weights.
    const ALL_BYTES: bool;
    /// Rows that the registers hold, with an accumulator and a sum each.
    const MAX_ROWS: usize;
    /// Maximum number of rows for which a kernel over a single run of panels is compiled, in addition to the one over
    /// several runs.
    const SINGLE_STREAM_ROWS: usize = 0;
    /// What sums can start from instead of zero.
    const OFFSETS: Option<Offsets> = None;
    /// Whether [`ByteLanes::add_products`] is a compiler barrier. Without it, scales are not unrolled: the
    /// compiler would spill registers and take minutes.
    const BARRIERS: bool = false;
    /// Whether [`ByteLanes::add_masked`] is faster than [`ByteLanes::add_products`] with [`Bytes::Biased`],
    /// and so is the latter with [`Bytes::Indices`].
    const MASKS: bool = false;
    /// [`ByteLanes::centered_scale`] is multiplied by two to this power, where that saves an operation: 8 or 0.
    const CENTERED_UP: u32 = 0;
    /// A row's sums during accumulation, in an order that depends on the instruction set.
    type Sum: Copy;

    /// Evaluates an operation in a separate function.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn call<O: PanelOp>(self, op: O);

    /// All zeros.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn zero(self) -> Self::I;
    /// Writes `LANES` words.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn store_words(self, to: *mut u8, v: Self::I);
    /// Reads `LANES` signed bytes, one per word.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load_signed_bytes(self, from: *const u8) -> Self::I;
    /// Reads `LANES` unsigned bytes, one per word.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load_unsigned_bytes(self, from: *const u8) -> Self::I;

    /// Bitwise `a & b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise `a | b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// The larger of signed words.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn max_words(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shifts words left by `by` in -31..=31. The bits shifted in are unspecified.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn shift(self, a: Self::I, by: i32) -> Self::I;
    /// Shifts bytes left by `by` in -7..=7. The bits shifted in are unspecified.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn shift_bytes(self, a: Self::I, by: i32) -> Self::I {
        // SAFETY: the caller entered the features.
        unsafe { self.shift(a, by) }
    }
    /// Replaces bytes below 16 by the table's entries.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn lookup(self, table: &[u8; 16], a: Self::I) -> Self::I;
    /// Reinterprets the words as floats.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn as_float(self, a: Self::I) -> Self::V;

    /// Words within the range of `i16` as scales for [`ByteLanes::add_products`].
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn to_scale(self, words: Self::I) -> Self::I;
    /// Byte `b` of every word, unsigned, times `2^up` as a scale; `up` in 0..=8.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn byte_scale(self, words: Self::I, b: i32, up: i32) -> Self::I {
        // SAFETY: the caller entered the features.
        unsafe { self.to_scale(self.and(self.shift(words, up - 8 * b), self.splat_word(0xff << up))) }
    }
    /// Adds `by` to every scale.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn offset_scale(self, scale: Self::I, by: i16) -> Self::I {
        // SAFETY: the caller entered the features.
        unsafe { self.add_words(scale, self.splat_word(by.into())) }
    }
    /// Byte `b` of every word, below 64, less 32 and times `2^CENTERED_UP`, as a scale.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn centered_scale(self, words: Self::I, b: i32) -> Self::I {
        // SAFETY: the caller entered the features.
        unsafe { self.offset_scale(self.byte_scale(words, b, 0), -32) }
    }
    /// Two scales as the two `i16` of a word, `a` in the lower half: pairs for [`ByteLanes::add_pairs`].
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn pair_scales(self, a: Self::I, b: Self::I) -> Self::I;

    /// Sums of `R` rows that start from `from[r]` in every word.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn begin<const R: usize>(self, from: [i32; R]) -> [Self::Sum; R];
    /// Adds quads `g` and `g + 1` of the `quads` that share a scale, with `quad` = `(g, quads)`: for each word and row
    /// `r`, the dot product of the word's four bytes in `weights[i]` and the four signed bytes of word `x[i][r]`, times
    /// the scale. Calls are in order of `g`, up to the scale's last quads. Here and below, words of `x` are readable up
    /// to the next multiple of four rows if `R` is more than one.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_products<const R: usize>(
        self,
        sums: &mut [Self::Sum; R],
        bytes: Bytes,
        quad: (usize, usize),
        weights: [Self::I; 2],
        x: [*const i32; 2],
        scale: Option<Scale<Self::I>>,
    );
    /// With [`ByteLanes::MASKS`]: writes a quad of [`Bytes::Biased`] for [`ByteLanes::add_masked`], the magnitudes and
    /// a mask of the negative ones, two times `LANES` words. Returns `negative` plus the sums of the negative weights.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn store_masked(self, _to: *mut u8, _weights: Self::I, _negative: Self::I) -> Self::I {
        unreachable!("lanes with masks")
    }
    /// With [`ByteLanes::MASKS`]: as [`ByteLanes::add_products`], of quad `g` of those that [`ByteLanes::store_masked`]
    /// wrote from `from` on, one after the other; the scale's sums of negative weights follow them.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_masked<const R: usize>(
        self,
        _sums: &mut [Self::Sum; R],
        _from: *const u8,
        _quad: (usize, usize),
        _x: *const i32,
        _scale: Option<Scale<Self::I>>,
    ) {
        unreachable!("lanes with masks")
    }
    /// The sums, one word per lane.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn end<const R: usize>(self, sums: [Self::Sum; R]) -> [Self::I; R];
    /// Adds to each word, for row `r`, the dot product of its two `i16` in `pairs` and the two of the word `x[r]`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_pairs<const R: usize>(self, totals: &mut [Self::I; R], pairs: Self::I, x: *const i32);
    /// `a - b * by`, word by word.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn sub_product(self, a: Self::I, b: Self::I, by: i32) -> Self::I;

    /// The index of the first element whose magnitude has the bits `largest`, which must exist. Here and below, `x` has
    /// a multiple of 32 elements.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn first_of_magnitude(self, x: &[f32], largest: u32) -> usize;
    /// The nearest integers to `scale * x`, ties to even, within -127..=127.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn round_to_bytes(self, x: &[f32], scale: f32, out: &mut [u8]);
}
