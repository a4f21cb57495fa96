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

#[cfg(test)]
mod tests {
    use foretoken_kernels::Isa;
    use foretoken_kernels::attention::turboquant::CodeFormat;
    use half::f16;

    use super::*;
    use crate::Error;
    use crate::kv::{KvFormat, KvLayout, KvOptions, StoreLayout};

    /// A checksum does not say what the rows are. Those of the exact tail are quantized later.
    #[test]
    fn a_row_that_is_not_finite_is_an_error_once_its_page_is_quantized() {
        let store = StoreLayout { num_kv_heads: 1, head_dim: 16, window: None, k_eq_v: None };
        let layout = KvLayout { stores: vec![store], store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        let format = KvFormat::from(CodeFormat::Tqc4);
        let options = KvOptions { key: format, value: format, ..KvOptions::default() };
        let new = || KvCache::new(layout.clone(), &options, 4096, Isa::best()).expect("a cache");
        let write = |cache: &mut KvCache, rows: usize| {
            let (pool, zeros) = (cache.pool.clone(), vec![0.0; 16 * rows]);
            cache.stores[0].write(&pool, Isa::best(), 0, cache.len, &zeros, &zeros)
        };
        let (mut saved, mut loaded, mut file) = (new(), new(), Vec::<u8>::new());
        write(&mut saved, 600).expect("pages");
        saved.set_len(600, 600);
        saved.write_to(&mut file).expect("bytes");
        // Keys come first, row after row.
        file[5 * 32..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
        loaded.read_from(600, 600, &mut &file[..]).expect("the file's rows");
        write(&mut loaded, 39).expect("no page leaves the tail");
        let error = write(&mut loaded, 40).expect_err("the first page is quantized");
        assert!(matches!(error, Error::NotFinite { what: "K", layer: Some(0), position: Some(5), .. }), "{error}");
    }
}
