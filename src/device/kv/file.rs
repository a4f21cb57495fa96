//! K and V on the device in the CPU's file format (`crate::kv`, `write_to`): the pages of the committed positions,
//! store by store, keys before values, exact rows before quantized ones, each in slot order.
//!
//! Pages have the CPU's bytes with one exception: with K = V and both exact, the file has V alone, in the model's
//! channel order. Loading computes K from V; the CPU computes it at every read.

use std::io::{self, Read, Write};

use foretoken_kernels::{ElementType, Isa};

use super::recomputed_keys::RecomputedKeys;
use super::{DeviceKv, Store};
use crate::device::launcher::Launcher;
use crate::device::pages::Page;
use crate::device::temporaries::Temporaries;
use crate::kv::PAGE;
use crate::nn::Rotary;

/// A page written to files.
struct FilePage<'a> {
    store: &'a Store,
    slot: usize,
    page: &'a Page,
}

impl DeviceKv {
    /// Writes the pages of the positions below `end`, as many bytes as the CPU's cache has of them.
    ///
    /// # Errors
    /// Those of `to`, or the device's inside an `io::Error`.
    pub fn write_to(&self, end: usize, to: &mut impl Write) -> io::Result<()> {
        for FilePage { store, page, .. } in self.file_pages(end) {
            let mut page = page.read().map_err(io::Error::other)?;
            if let Some(RecomputedKeys { rotary_first: Some(rotary_first), .. }) = &store.recomputed_keys {
                let mut values = store.values.element.read(&page);
                rotary_first.restore(&mut values);
                page = narrowed(store.values.element, &values);
            }
            to.write_all(&page)?;
        }
        Ok(())
    }

    /// Fills an empty cache of the same layout and options from [`DeviceKv::write_to`]'s output for
    /// the positions below `end`.
    ///
    /// # Errors
    /// If the device is out of memory, or those of `from`.
    pub fn read_from(&mut self, end: usize, from: &mut impl Read) -> io::Result<()> {
        let launcher = Launcher::new(Temporaries::new(self.memory.device().clone()));
        self.reserve(&launcher, 0, end).map_err(io::Error::other)?;
        let rotary = Rotary::new(self.plan.inverse_frequencies.clone(), Isa::best());
        for FilePage { store, slot, page: to } in self.file_pages(end) {
            let mut page = vec![0; to.bytes()];
            from.read_exact(&mut page)?;
            if let Some(recomputed_keys) = &store.recomputed_keys {
                let mut values = store.values.element.read(&page);
                // Layers with K = V have no window: slot and page index are equal.
                let mut keys = recomputed_keys.keys(&rotary.angles((slot * PAGE..).take(PAGE)), &values);
                if let Some(rotary_first) = &recomputed_keys.rotary_first {
                    (keys, values) = (rotary_first.rotary_keys(&keys), rotary_first.reorder(&values));
                    page = narrowed(store.values.element, &values);
                }
                let of_keys = &self.pages[store.keys.exact.index][slot];
                of_keys.write(&narrowed(store.values.element, &keys)).map_err(io::Error::other)?;
            }
            to.write(&page).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// The pages of the positions below `end`, in file order.
    fn file_pages(&self, end: usize) -> impl Iterator<Item = FilePage<'_>> {
        self.plan.stores.iter().flat_map(move |store| {
            let keys = store.recomputed_keys.is_none().then_some(&store.keys);
            let tables =
                keys.into_iter().chain([&store.values]).flat_map(move |storage| storage.held(end, store.zones));
            tables.flat_map(move |(table, held)| {
                let pages = self.pages[table.index][..held].iter().enumerate();
                pages.map(|(slot, page)| FilePage { store, slot, page })
            })
        })
    }
}

fn narrowed(element: ElementType, rows: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; element.size() * rows.len()];
    element.write(rows, &mut bytes);
    bytes
}
