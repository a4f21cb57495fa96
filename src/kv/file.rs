//! A cache as bytes: what is needed to go on from its committed positions.

use std::io::{self, Read, Write};

use super::KvCache;
use super::store::Store;

impl KvCache {
    /// Writes the pages that hold the committed positions. How many bytes that are follows from the options and the
    /// length: [`KvCache::bytes_at`], less the angles of derived keys.
    pub(crate) fn write_to(&self, to: &mut impl Write) -> io::Result<()> {
        let stores = self.stores.iter();
        stores.flat_map(|store| store.pieces(self.len)).try_for_each(|piece| to.write_all(piece.as_slice()))
    }

    /// Bytes that [`KvCache::write_to`] writes at `len` committed positions.
    pub(crate) fn written_bytes(&self, len: usize) -> usize {
        self.stores.iter().map(|store| store.bytes_at(len)).fold(0, usize::saturating_add)
    }

    /// Fills an empty cache of the same layout and options with what [`KvCache::write_to`] wrote at `len` positions.
    ///
    /// # Errors
    /// If memory does not reach, in one of `io`'s; or those of `from`.
    pub(crate) fn read_from(&mut self, len: usize, from: &mut impl Read) -> io::Result<()> {
        for store in &mut self.stores {
            store.reserve(&mut self.arena, len).map_err(io::Error::other)?;
            store.pieces_mut(len).into_iter().try_for_each(|piece| from.read_exact(piece.as_mut_slice()))?;
        }
        if self.stores.iter().any(Store::derives_keys) {
            self.angles.reserve(&mut self.arena, len).map_err(io::Error::other)?;
        }
        self.len = len;
        Ok(())
    }

    /// The same for a cache whose rows are on a device, and there already.
    pub(crate) fn count(&mut self, len: usize) {
        self.len = len;
    }
}
