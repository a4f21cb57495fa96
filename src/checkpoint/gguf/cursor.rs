//! A bounds-checked reader of the header: every length is compared with the remaining bytes before use.

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The remaining bytes.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The bytes read since `start`.
    pub(super) fn since(&self, start: usize) -> Option<&'a [u8]> {
        self.bytes.get(start..self.at)
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let Some(taken) = self.rest().get(..len) else { return Err(self.too_short(len as u64)) };
        self.at += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N).ok()?.try_into().ok()
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes).ok_or_else(|| self.too_short(4))
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes).ok_or_else(|| self.too_short(8))
    }

    /// A count of entries of at least `min_bytes` each, limited by the remaining bytes.
    pub(super) fn count(&mut self, min_bytes: usize) -> Result<usize, String> {
        let count = self.u64()?;
        match usize::try_from(count).ok().filter(|count| *count <= self.rest().len() / min_bytes) {
            Some(count) => Ok(count),
            None => Err(format!("declares {count} entries, but only {} bytes follow", self.rest().len())),
        }
    }

    /// A length, and that many bytes of UTF-8.
    pub(super) fn string(&mut self) -> Result<&'a str, String> {
        let len = self.count(1)?;
        std::str::from_utf8(self.take(len)?).map_err(|_| "is not UTF-8".into())
    }

    fn too_short(&self, len: u64) -> String {
        format!("needs {len} bytes at byte {}, but the file ends {} bytes later", self.at, self.rest().len())
    }
}
