//! Importance matrices: the mean squares of each matrix's inputs over some text, as collected by
//! llama.cpp's `llama-imatrix`; both of its file formats.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use foretoken_kernels::ElementType;

use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::regular_file;
use crate::{Error, Result};

/// Mean squares of matrices' inputs, by the matrices' GGUF names.
#[derive(Clone, Debug)]
pub struct Importance {
    path: PathBuf,
    entries: BTreeMap<String, Vec<f32>>,
}

/// Limits for the older format, whose counts are unchecked: above any model's matrices and row lengths.
const MAX_ENTRIES: usize = 1 << 18;

/// Weights with a scale of their own, at most.
const GROUP: usize = 32;
/// Range of the largest importance of a group: 2^-30 to 2^30.
const MIN_LARGEST: f32 = 1.0 / MAX_LARGEST;
const MAX_LARGEST: f32 = (1 << 30) as f32;

impl Importance {
    /// Reads the file `path`: GGUF, or the older `.dat`.
    ///
    /// # Errors
    /// If it is neither, or malformed, or has a value that is negative, NaN or infinite.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        regular_file(path, "an importance matrix")?;
        let mut magic = [0; 4];
        let mut file = std::fs::File::open(path).map_err(Error::io(path))?;
        let is_gguf = file.read_exact(&mut magic).is_ok() && magic == *b"GGUF";
        let mut entries = if is_gguf { gguf(path)? } else { legacy(path)? };
        let bad = entries.iter().find(|(_, values)| values.iter().any(|x| !x.is_finite() || *x < 0.0));
        if let Some((name, _)) = bad {
            let problem = "has an importance that is negative, NaN or infinite; collect the matrix again";
            return Err(Error::Tensor { path: path.to_owned(), tensor: name.clone(), problem: problem.into() });
        }
        entries.values_mut().for_each(|values| rescale(values));
        Ok(Self { path: path.to_owned(), entries })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of matrices.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The importances of the matrix, or stack of matrices, `name`: `count` times `inputs` values, or `None` if absent.
    pub(super) fn of(&self, name: &str, count: usize, inputs: usize) -> Result<Option<&[f32]>> {
        match self.entries.get(name) {
            Some(values) if values.len() != count * inputs => {
                let problem = format!(
                    "has {} importances, but {count} x {inputs} inputs; collect the matrix with this model",
                    values.len()
                );
                Err(Error::Tensor { path: self.path.clone(), tensor: name.to_owned(), problem })
            }
            values => Ok(values.map(Vec::as_slice)),
        }
    }
}

/// Scales groups of importances so that their products with weights, and the squares of those, are in the range of
/// single precision: the fit of a group depends only on the ratios between its importances.
fn rescale(values: &mut [f32]) {
    for group in values.chunks_mut(GROUP) {
        let max = group.iter().copied().fold(0.0, f32::max);
        let factor = max.clamp(MIN_LARGEST, MAX_LARGEST) / max;
        if max > 0.0 && factor != 1.0 {
            group.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// `NAME.in_sum2` has sums of squares, `NAME.counts` the number of summands: one value per matrix of a stack.
fn gguf(path: &Path) -> Result<BTreeMap<String, Vec<f32>>> {
    let gguf = Gguf::open(path)?;
    let floats = |name: &str| {
        let tensor = gguf.tensor(name)?.filter(|tensor| tensor.type_id == 0);
        let tensor = tensor.ok_or_else(|| gguf.error(name, "is missing or not F32; collect the matrix again"))?;
        Ok::<_, Error>(ElementType::F32.read(tensor.bytes.as_slice()))
    };
    let mut entries = BTreeMap::new();
    for sums in gguf.tensors().map(|tensor| tensor.name()) {
        let Some(name) = sums.strip_suffix(".in_sum2") else { continue };
        let (mut values, counts) = (floats(sums)?, floats(&format!("{name}.counts"))?);
        if values.len() % counts.len() != 0 {
            let problem = format!("has {} sums for {} counts; collect the matrix again", values.len(), counts.len());
            return Err(gguf.error(sums, problem));
        }
        let inputs = values.len() / counts.len();
        for (values, count) in values.chunks_exact_mut(inputs).zip(counts) {
            // An expert that no token used: uniform importance.
            values.iter_mut().for_each(|x| *x = if count > 0.0 { *x / count } else { 1.0 });
        }
        entries.insert(name.to_owned(), values);
    }
    match entries.is_empty() {
        true => Err(Error::file(path, "has no NAME.in_sum2, so it is not an importance matrix; collect one")),
        false => Ok(entries),
    }
}

/// A count; then for each matrix the length of its name, the name, the number of passes, the number
/// of values, the values.
fn legacy(path: &Path) -> Result<BTreeMap<String, Vec<f32>>> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let mut rest = &bytes[..];
    let malformed =
        || Error::file(path, "is not an importance matrix (neither GGUF nor the older format); collect one");
    let mut take = |len: usize| {
        let (taken, after) = rest.split_at_checked(len).ok_or_else(malformed)?;
        rest = after;
        Ok::<_, Error>(taken)
    };
    let size = |bytes: &[u8]| {
        let number = bytes.try_into().map(i32::from_le_bytes).map_err(|_| malformed())?;
        usize::try_from(number).map_err(|_| malformed())
    };
    let count = size(take(4)?)?;
    if count == 0 || count > MAX_ENTRIES {
        return Err(malformed());
    }
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        let len = size(take(4)?)?;
        let name = std::str::from_utf8(take(len)?).map_err(|_| malformed())?.to_owned();
        let passes = size(take(4)?)?.max(1) as f32;
        let len = size(take(4)?)?.checked_mul(4).ok_or_else(malformed)?;
        let values = take(len)?.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x) / passes).collect();
        entries.insert(name, values);
    }
    Ok(entries)
}
