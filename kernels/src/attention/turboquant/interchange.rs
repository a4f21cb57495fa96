//! The blocks of llama.cpp's TurboQuant forks: 128 values as their caches and session files store them.
//!
//! | type | bytes | fields |
//! |---|---|---|
//! | `turbo2` | 34 | norm; 32 bytes of 2-bit codes, the first value lowest |
//! | `turbo3` | 50 | norm; 32 bytes with the lower 2 bits as `turbo2`; 16 bytes with the upper bit, the first value lowest |
//! | `turbo4`, `tbq4` | 66 | norm; 64 bytes of 4-bit codes, the first value lowest |
//! | `turbo4-legacy` | 68 | norm; 2 unused bytes; 64 bytes as `turbo4`, for another table |
//!
//! The norm is an `f16`, little endian: the norm of the values over that of their centroids.

use half::f16;

use super::codebook::{CENTROIDS_TURBO2, CENTROIDS_TURBO3, CENTROIDS_TURBO4, CodeFormat};
use super::quantizer::{NonFinite, quantize};
use super::rotation::{RotationGroups, rotate, rotate_back};
use super::side::Side;
use crate::isa::Isa;

/// Values of a block.
pub const BLOCK_LEN: usize = 128;

/// A block type. Names and identifiers differ between forks; the bytes decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockType {
    /// 34 bytes.
    Turbo2,
    /// 50 bytes.
    Turbo3,
    /// 66 bytes.
    Turbo4,
    /// 68 bytes with the table of early implementations, whose squared error is twice as large. Read only.
    Turbo4Legacy,
}

/// The table of early implementations.
const CENTROIDS_TURBO4_LEGACY: [f32; 16] = [
    -0.173_926, -0.117_195, -0.089_527, -0.068_756, -0.051_262, -0.035_597, -0.020_989, -0.006_938, 0.006_938,
    0.020_989, 0.035_597, 0.051_262, 0.068_756, 0.089_527, 0.117_195, 0.173_926,
];

impl BlockType {
    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Turbo2 => 34,
            Self::Turbo3 => 50,
            Self::Turbo4 => 66,
            Self::Turbo4Legacy => 68,
        }
    }

    /// The format with the same codes; `None` for [`BlockType::Turbo4Legacy`].
    pub const fn format(self) -> Option<CodeFormat> {
        match self {
            Self::Turbo2 => Some(CodeFormat::Turbo2),
            Self::Turbo3 => Some(CodeFormat::Turbo3),
            Self::Turbo4 => Some(CodeFormat::Turbo4),
            Self::Turbo4Legacy => None,
        }
    }

    const fn centroids(self) -> &'static [f32] {
        match self {
            Self::Turbo2 => &CENTROIDS_TURBO2,
            Self::Turbo3 => &CENTROIDS_TURBO3,
            Self::Turbo4 => &CENTROIDS_TURBO4,
            Self::Turbo4Legacy => &CENTROIDS_TURBO4_LEGACY,
        }
    }
}

/// Why a block cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockError {
    /// A value is infinite or NaN.
    NonFinite(NonFinite),
    /// The type is read only.
    ReadOnly(BlockType),
}

impl std::fmt::Display for BlockError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NonFinite(error) => error.fmt(f),
            Self::ReadOnly(_) => {
                f.write_str("turbo4-legacy blocks are read only, because their table doubles the error; write turbo4")
            }
        }
    }
}

impl std::error::Error for BlockError {}

const GROUPS: RotationGroups = RotationGroups::of(BLOCK_LEN).expect("a block is one group");

/// Writes 128 values (not rotated) as a block of `out.len() == block_type.bytes()`.
///
/// # Errors
/// If a value is infinite or NaN, or the type is [`BlockType::Turbo4Legacy`].
///
/// # Panics
/// If `out` has a different length.
pub fn encode_block(
    isa: Isa,
    block_type: BlockType,
    values: &[f32; BLOCK_LEN],
    out: &mut [u8],
) -> Result<(), BlockError> {
    assert_eq!(out.len(), block_type.bytes(), "block: wrong length");
    let format = block_type.format().ok_or(BlockError::ReadOnly(block_type))?;
    NonFinite::check(values, BLOCK_LEN).map_err(BlockError::NonFinite)?;
    let mut rotated = *values;
    rotate(isa, &mut rotated, GROUPS);
    let mut codes = [0; BLOCK_LEN];
    let norm = quantize(format, Side::Keys, &rotated, &mut codes);
    out[..2].copy_from_slice(&norm.to_le_bytes());
    pack(block_type, &codes, &mut out[2..]);
    Ok(())
}

/// Reads a block's 128 values, rotated back.
///
/// # Panics
/// If `block` is not `block_type.bytes()` long.
pub fn decode_block(isa: Isa, block_type: BlockType, block: &[u8], values: &mut [f32; BLOCK_LEN]) {
    assert_eq!(block.len(), block_type.bytes(), "block: wrong length");
    let norm = f16::from_le_bytes([block[0], block[1]]).to_f32();
    let codes = unpack(block_type, &block[2..]);
    for (value, code) in values.iter_mut().zip(codes) {
        *value = norm * block_type.centroids()[usize::from(code)];
    }
    rotate_back(isa, values, GROUPS);
}

fn pack(block_type: BlockType, codes: &[u8; BLOCK_LEN], out: &mut [u8]) {
    out.fill(0);
    for (j, code) in codes.iter().enumerate() {
        match block_type {
            BlockType::Turbo2 => out[j / 4] |= code << (2 * (j % 4)),
            BlockType::Turbo3 => {
                out[j / 4] |= (code & 3) << (2 * (j % 4));
                out[32 + j / 8] |= (code >> 2) << (j % 8);
            }
            BlockType::Turbo4 | BlockType::Turbo4Legacy => out[j / 2] |= code << (4 * (j % 2)),
        }
    }
}

fn unpack(block_type: BlockType, bytes: &[u8]) -> [u8; BLOCK_LEN] {
    std::array::from_fn(|j| match block_type {
        BlockType::Turbo2 => bytes[j / 4] >> (2 * (j % 4)) & 3,
        BlockType::Turbo3 => bytes[j / 4] >> (2 * (j % 4)) & 3 | (bytes[32 + j / 8] >> (j % 8) & 1) << 2,
        BlockType::Turbo4 => bytes[j / 2] >> (4 * (j % 2)) & 15,
        BlockType::Turbo4Legacy => bytes[2 + j / 2] >> (4 * (j % 2)) & 15,
    })
}
