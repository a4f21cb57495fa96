// Wide: the sum of two floats, the second at most half a unit in the last place of the first. Used in norms, because Metal has no
// doubles, and consumer GPUs execute them at 1/64 of the float rate; and for all doubles in Metal.
//
// Operations have a relative error of 2^-45 in a float's range. Squares overflow beyond 1e19 and lose bits below 1e-12.
// The sums are those of Dekker and Knuth, and rely on each operation being rounded.
#pragma once

struct Wide {
    float high, low;
};

INLINE Wide wide(float x) { return {x, 0.0f}; }
INLINE float narrow(Wide x) { return x.high; }

// a + b exactly, for |a| >= |b|; and for any two.
INLINE Wide sum_of_falling(float a, float b) {
    float sum = add(a, b);
    return {sum, sub(b, sub(sum, a))};
}
INLINE Wide sum_of(float a, float b) {
    float sum = add(a, b), other = sub(sum, a);
    return {sum, add(sub(a, sub(sum, other)), sub(b, other))};
}

INLINE Wide operator-(Wide x) { return {-x.high, -x.low}; }
// Symmetric, so that two lanes that add each other's values get the same bits.
INLINE Wide operator+(Wide a, Wide b) {
    Wide high = sum_of(a.high, b.high), low = sum_of(a.low, b.low);
    high = sum_of_falling(high.high, add(high.low, low.high));
    return sum_of_falling(high.high, add(high.low, low.low));
}
INLINE Wide operator-(Wide a, Wide b) { return a + -b; }
INLINE Wide operator*(Wide a, Wide b) {
    float product = mul(a.high, b.high), rest = fmaf(a.high, b.high, -product);
    return sum_of_falling(product, add(rest, add(mul(a.high, b.low), mul(a.low, b.high))));
}
INLINE Wide operator/(Wide a, Wide b) {
    float quotient = a.high / b.high;
    Wide rest = a - b * wide(quotient);
    return sum_of_falling(quotient, rest.high / b.high);
}
INLINE Wide sqrt(Wide x) {
    float root = sqrtf(x.high);
    if (!(root > 0)) return wide(root);
    Wide rest = x - wide(root) * wide(root);
    return sum_of_falling(root, rest.high / mul(2, root));
}
// 1 / sqrt(sum / count + eps), within 2^-40 before it is rounded: a step of Newton's method, whose error term is exact, in place of
// wide divisions and roots, which are ten times as long. `inverse` is 1 / count.
INLINE float inverse_root_mean(Wide sum, float count, float inverse, float eps) {
    float quotient = mul(sum.high, inverse), rest = mul(add(fmaf(-quotient, count, sum.high), sum.low), inverse);
    Wide mean = sum_of(quotient, eps);
    mean.low = add(mean.low, rest);
    float root = inverse_sqrt(mean.high), product = mul(mean.high, root);
    rest = fmaf(mean.low, root, fmaf(mean.high, root, -product));
    float error = fmaf(-rest, root, fmaf(-product, root, 1.0f));
    return fmaf(mul(root, 0.5f), error, root);
}
INLINE Wide add(Wide a, Wide b) { return a + b; }
INLINE Wide mul(Wide a, Wide b) { return a * b; }
INLINE bool operator>(Wide a, Wide b) { return a.high > b.high || (a.high == b.high && a.low > b.low); }
INLINE bool operator>=(Wide a, Wide b) { return !(b > a); }

INLINE Wide shuffle(Wide x, int lane) { return {shuffle(x.high, lane), shuffle(x.low, lane)}; }
INLINE Wide shuffle_xor(Wide x, int mask) { return {shuffle_xor(x.high, mask), shuffle_xor(x.low, mask)}; }

// The sum over groups of `lanes` lanes, a power of two, of numbers that are not negative; every lane of a group gets the same bits.
// Low parts are added beside the high ones, so that a step waits for one addition.
INLINE Wide sum_over(Wide x, int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        Wide sum = sum_of(x.high, shuffle_xor(x.high, mask));
        x = {sum.high, add(add(x.low, shuffle_xor(x.low, mask)), sum.low)};
    }
    return sum_of_falling(x.high, x.low);
}

#ifndef DOUBLES
typedef Wide Exact;
INLINE Exact exact(float x) { return wide(x); }
#endif
