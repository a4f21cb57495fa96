//! A cache as bytes: the pages of its committed positions.

use std::io::{self, Read, Write};

use super::cache::KvCache;
use super::pool::page_mut;
use super::store::Store;

impl KvCache {
    /// Writes the pages of the committed positions: [`KvCache::written_bytes`] bytes.
    pub(crate) fn write_to(&self, to: &mut impl Write) -> io::Result<()> {
        let stores = self.stores.iter();
        stores.flat_map(|store| store.pages(self.len)).try_for_each(|page| to.write_all(page.as_slice()))
    }

    /// Bytes that [`KvCache::write_to`] writes at `len` committed positions: [`KvCache::bytes_at`] without the angle
    /// table.
    pub(crate) fn written_bytes(&self, len: usize) -> usize {
        self.stores.iter().map(|store| store.bytes_at(len)).fold(0, usize::saturating_add)
    }

    /// Fills an empty cache of the same layout and options from [`KvCache::write_to`]'s output at `len` positions;
    /// those below `written` had been written then, committed or not.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory) inside an `io::Error`; or those of `from`.
    pub(crate) fn read_from(&mut self, len: usize, written: usize, from: &mut impl Read) -> io::Result<()> {
        for store in &mut self.stores {
            store.reserve(&self.pool, 0..len).map_err(io::Error::other)?;
            store.pages_mut(len).try_for_each(|page| from.read_exact(page_mut(page)))?;
        }
        if self.stores.iter().any(Store::derives_keys) {
            self.angles.reserve(&self.pool, len).map_err(io::Error::other)?;
        }
        self.set_len(len, written);
        Ok(())
    }

    /// Sets the length of a cache whose rows are already there or on a device; positions below `written` were written.
    pub(crate) fn set_len(&mut self, len: usize, written: usize) {
        (self.len, self.written) = (len, written.max(len));
    }
}
