//! The grids of GGUF's IQ1, IQ2 and IQ3 types, and the decoding of their blocks.
//!
//! A grid point is eight weights of three magnitudes (IQ1: of -1, 0 and 1), or four of eight. llama.cpp chose the
//! points by how often weights are near them; in IQ2 and IQ3_XXS, the sum of the magnitudes' indices is even. The
//! indices of a point are the digits of a number, the first one least significant, and points are sorted by that
//! number. So a grid is a bitmap over these numbers, here six bits per character from `0` on; the tests compare decoded
//! blocks with PyPI's gguf.
//!
//! Weights are bytes with [`ZERO_POINT`] added: `w` is `64 + w` and `-w` is `(64 + w) ^ 0x7f + 1`, so that the
//! signs of eight of them are applied in one word.

use crate::quant::weight_type::WeightType;
use half::f16;

/// Zero point of decoded bytes.
const ZERO_POINT: u8 = 64;

const IQ2_XXS_POINTS: &[u8] = br"
    EE15E11A15404@1A001000010105004000004000@11@15101@110151010400@1@000@100100001001A110A150001000100010000000040
    10000000000@11@0100101A00110100140100000001@00000000110A0@0001000000100004000001040000000000@11001000@0000A000
    000000001000000@00000005400010@050000000@0100000005000000000000@11001040000001000@0001000000000000000100010100
    0000010000000000000000000010000000@11A11141@11001001000@0A000@010001401000011010000010@00040100000000010000000
    00000@1100A000000001000000A0400000000@000001001A@1000001100010004000000010000000000@00000000000005000400000000
    000@00000010000001@@000001000000000100000000010000000000001100100010000100000@00000000010000100000A00000000000
    0005000000010000000000000000000004000000000000000000000000000000000005400@00004000010101000000000@00000000000@
    1A0010010000010000400000100@0001001000004000000000000010000000000000@00000000000011011000000@00040000001000000
    00@000000001004010000000000000@00000000000000000000000000000@0000000100000000000000000000000400000100@0000@000
    00000000010000000000000001000000000000000000000000000000000000000000010000000100000000000000000000000000
";
const IQ2_XS_POINTS: &[u8] = br"
    EEEEAEEA1EAA1@EEE1EA11A1100EA11@1A001400@EEA1EA51@1100EA11@11@01000@1104500001000EE1A@11101001D11001000@@00010
    01100000041@EEA1EA11D1100EA11@11001050@5100100100000EA11@A1011000@110010000000010100@0000000@1500101004000A000
    000040000000000@000000@EE11@11001001@1100110@000001004000001000A110@1000000001000@040000@0@0040000000004150100
    @000104000000000101000101000004500@EEA1EE1A@1100EA11@1100A004@150@100000000EAA1@11001010@110110000004014000110
    00000@1100A014000001@000110@000001000000000000EA11A11001000@1A005000000001000010000000D11@01001@00@01100000001
    100000@00000100@01010@010000@000040500000000000000000@000@110010140400@100000000000000001040000400104000000000
    000100A000000010000000000000@0000000040000000@00000000004000001400000EA11D11005000E51001@@0000001001000005001A
    1E0010010@000100001000000@00010000040000110@000405000140000000000000004000001140A11001040010001004000010000000
    0000400@000A0000111000000000@0000005000000@00000000000000@000000400000@000000000@00000100000550140000000100000
    0@@000004510040000100100000100000@00000000000000000000000@000100405100000001110000000050000000500000@004
";
const IQ2_S_POINTS: &[u8] = br"
    EEEEAEEAEEA1ADEEA1EAEAA1E@1EA11DEA00A414@EEAEEEEE@EAA1EEEAAEEA1EA11@EA00AA11@1100EAEADEEA1A010D1EA0AA11@01001@
    145010000@0@EEA5EAEEA5AA1EEEEAEEA1EA10@AA@1A@10@1100EAEAAEEA1EA11@EEA1EA11@1100AA11@11001000DEAA0EA11@1000EA11
    @110@000401100104000000EAEAD1E011410D1E@0E@11@11001404511000500AEAA1EA11@1100AA11@11041000@110010@000000A@10@1
    1000400D1100000000@000404000010500@EEE5EEEE@1AA1EAEE@EEA1EA11@1E11AA11@1000EEEEAEEA1EA11@EEA1EA11D1100EA11@110
    0100@@AEA1EA1101100EA11@11001040@1100100000000EAEEAEEA1EA10@EEA1EA11@1100AA11@110@1000@EEA1EA11@1100EA11@11001
    000@1104100000000EA11@11401000@110010000000010@000000@000A5EA1AA1101100EA11@110010@0011001040000@0AA11@1100100
    0@11001400104001000000000010@1100000@000101000400000000000004000000@0EAAA@1EA0A@10@AEA1EA10@110@AD10@11000000@
    EEA0EA11@1100EA11@11001400@110@100000000A@10@11000004@1000100@000000004000504004@AE11EA11@1100A@10@11400000@11
    00100000004EA11@11001040@11001000000A01000040010000@110410000000@10000@400000000000000000100A414D1100000440000
    100@000004404500004500A110010000@00110@0000000000000000@000000004001000000040000000100400005051000001004
";
const IQ3_XXS_POINTS: &[u8] = br"
    EXH12@000PR258B120101DQ05X8022082F0800000400800P@080X8800@0040000000P000@000A10080P00X@1:D1P100058@1000000P258
    @000004D00180@0040R00000@00000041001002020000000000001040000@1:DT040000XB124000PH058H1060800P0A0000000A0000020
    8000800P08000010000000000X0@000800002DP200@0P@@104P0@1000X@0P000400108008000000000@0020044404000P0000010010080
    00000200@0001P00:08200000000000010040P10@@008000080000@00000P0@00000208000100000000000PD0010000000400020001440
    0100P000001040000@0100000P0000@082000001400020000000000004000000@001000000040050@000080000P0000P00000010000011
    0000000000@000002000004000000080000002080000000PJ00@004000000@040000004000P@0004080P00040000P0080000@100100000
    00000400000000000000000
";
const IQ3_S_POINTS: &[u8] = br"
    WNe88DZ258i5STX8@0P84<JBR41Y:0@288B1:1A10:B08:1198001@105QPX00420Y00200108@50D4204100LaZ5850@901;5Q098@104D0T6
    1190B048I226Q00@@0X@10:@D400P098@108000000A20D0000:DP0P80044`ZEYH1ZD0PYD@RT8112000B2P21:0R08A92@Q2440@08809@R0
    0009@801060204@Q080000R000R0050210004X:1Z@Y088P:@X0010@045011@10100024QR1X880P022AP00@@408@1P@0401020040080000
    P20D0800000411ABP010@04Z01QPP800P2Q802108110Q25820000050040600080X0800000100020010040004201PP00001A@00AB0@@X21
    2@00000118021102000Q1080@80888101@0@00000@0@00P20000000040000@10400000000X20:00010@00480000400010011P@@010Q004
    000000002080010T0000100400P00004000000:0000000049050D0@@0048040P2000P419@008000@000@208000RP@000@000000@004000
    0@000800000010000000000
";
const IQ1_POINTS: &[u8] = br"
    EE2552Z02552553Z62RRRZ12Z0255255222A5EB550Z0222RH00222j0Z0:RkZZ2@Zj20820:X:S22:20552552R02552552:232H2:20Z2255
    25522B2E52550;23:8:J20Z@2ZZ::2Ro:28P2:00Z02QRZX02Z02R2KR@^jR:8:kJRRjZZj`gjZ[k^2j0^RX[bCkPT2820R02Z:Z[22:020XRB
    P;j>R0b:R2@P05XZ:R22R40552E522B2552E52:22<2Zj02Q222E2552R222E2552X22hRZP02:B20222::JR:0:[Z22522222325140552552
    :0255055@:22PR2Z22Q23550552R22552552R020RZZ008B4[R^R2Zj6ZZX2702Z022PR82@80220B02Zj`ZRZ23bRj:RjJOjR;j6ZB2[:Z:gR
    :B43Z02B424::Z22Z22b<;Z8RnZVPR>Z20P00X2Z820802jRR:::j2:P2:S2jj;^jjojR2j:RRPR:PRjR2@Xb803jCZjNon:XjBSnjgjjOoOoJ
    NOjjMJkObooJRnBTNh::24Zj[34Z:2bRj22jjojBBj3281Ra2JbSZ2T^202X2288^ZB0P02ZR2V2Bb2V8T2R20R20S0>102R020`VRZZj^2HZ_
    :2Zb20hJGj2dbV>422Q;Zj=:E4MY40P222PR222214:82ZJ>j:R<42J20R10::ZH24854550552[22552552Z22:ZNX2BX22552550:2255255
    0820:@R:208202RRPJ:j6^ZZ:P00R22:>bR422415525E2:2B552556Z02ZZR:02P22552552Z00552552R32R2Z062Z22Z:ZZ:2kR2XP:Z22:
    22XZ:P22X0@Z8:P8Pjk2XP;2:ZkBbjjojB:n^Z:8BQ2Jf2:<V3X22P22RXVH02R22XZZ[XZjRV:XRR02@02X::202j00552552Z2055255BZ60
    PBZ:02U204=@452R22552550022:8[b32000PZ:PR2j2RjR:002RD2XT>504aB5550550Z205525528B228RR20Q00550550Z0055255
";

/// The numbers of the points in a bitmap.
const fn points<const N: usize>(bitmap: &[u8]) -> [usize; N] {
    let (mut points, mut found, mut number, mut at) = ([0; N], 0, 0, 0);
    while at < bitmap.len() {
        // Skips line ends and indentation.
        if bitmap[at] >= b'0' {
            let mut bit = 0;
            while bit < 6 {
                if (bitmap[at] - b'0') >> bit & 1 == 1 {
                    points[found] = number;
                    found += 1;
                }
                number += 1;
                bit += 1;
            }
        }
        at += 1;
    }
    assert!(found == N);
    points
}

/// Points as bytes: the level of each digit, plus [`ZERO_POINT`].
const fn grid<const N: usize, const LEVELS: usize>(bitmap: &[u8], levels: [i8; LEVELS], digits: u32) -> [u64; N] {
    let (points, mut grid) = (points::<N>(bitmap), [0; N]);
    let mut i = 0;
    while i < N {
        let (mut rest, mut digit) = (points[i], 0);
        while digit < digits {
            let byte = (levels[rest % LEVELS] as u8).wrapping_add(ZERO_POINT);
            grid[i] |= (byte as u64) << (8 * digit);
            rest /= LEVELS;
            digit += 1;
        }
        i += 1;
    }
    grid
}

const fn low_words<const N: usize>(grid: [u64; N]) -> [u32; N] {
    let mut words = [0; N];
    let mut i = 0;
    while i < N {
        words[i] = grid[i] as u32;
        i += 1;
    }
    words
}

const IQ2_LEVELS: [i8; 3] = [8, 25, 43];
static IQ2_XXS: [u64; 256] = grid(IQ2_XXS_POINTS, IQ2_LEVELS, 8);
static IQ2_XS: [u64; 512] = grid(IQ2_XS_POINTS, IQ2_LEVELS, 8);
static IQ2_S: [u64; 1024] = grid(IQ2_S_POINTS, IQ2_LEVELS, 8);
/// Halved, for the scale doubled.
static IQ3_XXS: [u32; 256] = low_words(grid(IQ3_XXS_POINTS, [2, 6, 10, 14, 18, 22, 26, 31], 4));
static IQ3_S: [u32; 512] = low_words(grid(IQ3_S_POINTS, [1, 3, 5, 7, 9, 11, 13, 15], 4));
/// Times eight, with the scale divided by eight: all eight weights are offset by plus or minus an eighth.
static IQ1: [u64; 2048] = grid(IQ1_POINTS, [-8, 0, 8], 8);

/// 0x7f in the bytes whose bits are set.
static SIGNS: [u64; 256] = {
    let mut signs = [0; 256];
    let mut i = 0;
    while i < 8 * 256 {
        signs[i / 8] |= (0x7f * ((i as u64 / 8) >> (i % 8) & 1)) << (8 * (i % 8));
        i += 1;
    }
    signs
};

/// Seven sign bits, with an eighth bit for even parity.
static EVEN_SIGN_BITS: [u8; 128] = {
    let mut bits = [0; 128];
    let mut i = 0;
    while i < 128 {
        bits[i] = (i | (i.count_ones() as usize & 1) << 7) as u8;
        i += 1;
    }
    bits
};

/// [`SIGNS`] of [`EVEN_SIGN_BITS`].
static EVEN_SIGNS: [u64; 128] = {
    let mut signs = [0; 128];
    let mut i = 0;
    while i < 128 {
        signs[i] = SIGNS[EVEN_SIGN_BITS[i] as usize];
        i += 1;
    }
    signs
};

const ONES: u64 = 0x0101_0101_0101_0101;

fn with_signs(magnitudes: u64, signs: u64) -> u64 {
    (magnitudes ^ signs) + (signs & ONES)
}

/// A row's block in file order, and what it is decoded to.
pub(super) struct Row<'a> {
    pub(super) bytes: &'a [u8],
    /// The weights.
    pub(super) quants: &'a mut [i8; 256],
    /// The block's scale, for every sub-block.
    pub(super) d: &'a mut [f32; 16],
    /// The sub-blocks' scales: of 16 weights each, or of 32.
    pub(super) scales: &'a mut [i8; 16],
}

impl Row<'_> {
    /// Four bytes; the first word follows the scale of two bytes that types other than IQ1_M begin with.
    fn word(&self, index: usize) -> u32 {
        // All fields except the scale are whole words.
        let words = &self.bytes[self.bytes.len() % 4..];
        u32::from_le_bytes(words.as_chunks().0[index])
    }
    /// That scale; not called for IQ1_M.
    fn scale(&self) -> f32 {
        f16::from_le_bytes([self.bytes[0], self.bytes[1]]).to_f32()
    }
    /// Takes weights `8 group..8 group + 8`, each plus [`ZERO_POINT`].
    fn put_weights(&mut self, group: usize, bytes: u64) {
        for (q, byte) in self.quants[8 * group..].iter_mut().zip(bytes.to_le_bytes()) {
            *q = byte.wrapping_sub(ZERO_POINT) as i8;
        }
    }
}

/// Decodes a row's block.
#[inline(always)]
pub(super) fn decode(weight_type: WeightType, row: &mut Row<'_>) {
    match weight_type {
        WeightType::IQ2_XXS => iq2_xxs(row),
        WeightType::IQ2_XS => iq2_xs(row),
        WeightType::IQ2_S => iq2_s(row),
        WeightType::IQ3_XXS => iq3_xxs(row),
        WeightType::IQ3_S => iq3_s(row),
        WeightType::IQ1_S => iq1_s(row),
        WeightType::IQ1_M => iq1_m(row),
        _ => unreachable!("the caller passes types with a grid"),
    }
}

/// Byte `i` of a word.
#[inline(always)]
fn byte(word: u32, i: usize) -> usize {
    (word >> (8 * i) & 0xff) as usize
}

/// Nibble `i` of the field that begins at word `first`.
#[inline(always)]
fn nibble(row: &Row<'_>, first: usize, i: usize) -> u32 {
    row.word(first + i / 8) >> (4 * (i % 8)) & 15
}

/// The scale whose bits are these: `2 bits + 1`.
#[inline(always)]
fn odd(bits: u32) -> i8 {
    (2 * bits + 1) as i8
}

/// Two words per 32 weights: four indices; four times seven signs and four bits of scale.
#[inline(always)]
fn iq2_xxs(row: &mut Row<'_>) {
    *row.d = [0.125 * row.scale(); 16];
    for s in 0..8 {
        let (indices, rest) = (row.word(2 * s), row.word(2 * s + 1));
        for i in 0..4 {
            let signs = EVEN_SIGNS[(rest >> (7 * i) & 127) as usize];
            row.put_weights(4 * s + i, with_signs(IQ2_XXS[byte(indices, i)], signs));
        }
        row.scales[s] = odd(rest >> 28);
    }
}

/// 32 pairs of nine bits of index and seven signs, then 16 scales of four bits.
#[inline(always)]
fn iq2_xs(row: &mut Row<'_>) {
    *row.d = [0.125 * row.scale(); 16];
    for s in 0..16 {
        let pairs = row.word(s);
        for i in 0..2 {
            let pair = (pairs >> (16 * i)) as usize;
            let signs = EVEN_SIGNS[pair >> 9 & 127];
            row.put_weights(2 * s + i, with_signs(IQ2_XS[pair & 511], signs));
        }
        row.scales[s] = odd(nibble(row, 16, s));
    }
}

/// 32 lower bytes of indices, 32 times eight signs, 32 upper pairs of bits, 16 scales of four bits.
#[inline(always)]
fn iq2_s(row: &mut Row<'_>) {
    *row.d = [0.125 * row.scale(); 16];
    for k in 0..8 {
        let (lower, signs, upper) = (row.word(k), row.word(8 + k), byte(row.word(16 + k / 4), k % 4));
        for i in 0..4 {
            let index = byte(lower, i) | (upper >> (2 * i) & 3) << 8;
            row.put_weights(4 * k + i, with_signs(IQ2_S[index], SIGNS[byte(signs, i)]));
        }
    }
    for s in 0..16 {
        row.scales[s] = odd(nibble(row, 18, s));
    }
}

/// 64 indices, then a word per 32 weights: four times seven signs and four bits of scale.
#[inline(always)]
fn iq3_xxs(row: &mut Row<'_>) {
    *row.d = [0.5 * row.scale(); 16];
    for s in 0..8 {
        let (indices, rest) = ([row.word(2 * s), row.word(2 * s + 1)], row.word(16 + s));
        for i in 0..4 {
            let point = |half: usize| u64::from(IQ3_XXS[byte(indices[i / 2], i % 2 * 2 + half)]);
            let signs = EVEN_SIGNS[(rest >> (7 * i) & 127) as usize];
            row.put_weights(4 * s + i, with_signs(point(0) | point(1) << 32, signs));
        }
        row.scales[s] = odd(rest >> 28);
    }
}

/// 64 lower bytes of indices, their 64 upper bits, 32 times eight signs, 8 scales of four bits.
#[inline(always)]
fn iq3_s(row: &mut Row<'_>) {
    *row.d = [row.scale(); 16];
    for s in 0..8 {
        let (lower, signs) = ([row.word(2 * s), row.word(2 * s + 1)], row.word(18 + s));
        let upper = byte(row.word(16 + s / 4), s % 4);
        for i in 0..4 {
            let index = |half: usize| byte(lower[i / 2], i % 2 * 2 + half) | (upper >> (2 * i + half) & 1) << 8;
            let point = |half: usize| u64::from(IQ3_S[index(half)]);
            row.put_weights(4 * s + i, with_signs(point(0) | point(1) << 32, SIGNS[byte(signs, i)]));
        }
        row.scales[s] = odd(nibble(row, 26, s));
    }
}

/// A point of IQ1, offset by plus or minus an eighth.
#[inline(always)]
fn iq1_point(index: usize, less: bool) -> u64 {
    if less { IQ1[index] - ONES } else { IQ1[index] + ONES }
}

/// 32 lower bytes of indices; 16 bits per 32 weights: four times three upper bits, three of scale,
/// and whether an eighth is subtracted.
#[inline(always)]
fn iq1_s(row: &mut Row<'_>) {
    *row.d = [0.125 * row.scale(); 16];
    for s in 0..8 {
        let (lower, rest) = (row.word(s), row.word(8 + s / 2) >> (16 * (s % 2)) & 0xffff);
        for i in 0..4 {
            let upper = (rest >> (3 * i) & 7) as usize;
            row.put_weights(4 * s + i, iq1_point(byte(lower, i) | upper << 8, rest >> 15 == 1));
        }
        row.scales[s] = odd(rest >> 12 & 7);
    }
}

/// 32 lower bytes of indices; 32 nibbles: three upper bits and whether an eighth is subtracted; four times 16 bits:
/// four scales of three bits and four bits of the block's.
#[inline(always)]
fn iq1_m(row: &mut Row<'_>) {
    let pairs = [row.word(12), row.word(13)];
    let quarter = |k: usize| pairs[k / 2] >> (16 * (k % 2)) & 0xffff;
    let bits = (0..4).fold(0, |bits, k| bits | (quarter(k) >> 12) << (4 * k));
    *row.d = [0.125 * f16::from_bits(bits as u16).to_f32(); 16];
    for k in 0..8 {
        let (lower, rest) = (row.word(k), row.word(8 + k / 2) >> (16 * (k % 2)));
        for i in 0..4 {
            let rest = (rest >> (4 * i)) as usize;
            row.put_weights(4 * k + i, iq1_point(byte(lower, i) | (rest & 7) << 8, rest & 8 != 0));
        }
    }
    for s in 0..16 {
        row.scales[s] = odd(quarter(s / 4) >> (3 * (s % 4)) & 7);
    }
}
