//! K and V on the device in the CPU's files (`crate::kv`, `write_to`): the pages that hold the committed positions, store by
//! store, keys before values, exact rows before codes, each in the order of their slots.
//!
//! A page has the CPU's bytes, but for one kind: where K and V come from one vector and are exact, the file has V alone, in the
//! model's order of channels. The keys are made of it when they are loaded, as the CPU makes them whenever it reads them.

use std::io::{self, Read, Write};

use foretoken_kernels::{ElementType, Elements, Isa, rope};
use half::{bf16, f16};

use super::{DeviceKv, Store};
use crate::kv::{PAGE, Sharing};
use crate::nn::{Angles, Rotary};

/// Keys that are kept here and not in files.
pub(super) struct Derived {
    /// The weight of their norm: `(head_dim)`.
    pub(super) weight: Vec<f32>,
    /// How they are kept here; `None` is as the model has them.
    pub(super) sharing: Option<Sharing>,
}

/// A page that a file has.
struct Filed<'a> {
    store: &'a Store,
    slot: usize,
    address: u64,
    bytes: usize,
}

impl DeviceKv {
    /// Writes the pages that hold the positions below `end`: as many bytes as the CPU's cache has of them.
    ///
    /// # Errors
    /// Those of `to`, or the device's in one of them.
    pub fn write_to(&self, end: usize, to: &mut impl Write) -> io::Result<()> {
        for Filed { store, address, bytes, .. } in self.filed(end) {
            let mut page = self.arena.read(address, bytes).map_err(io::Error::other)?;
            if let Some(Derived { sharing: Some(sharing), .. }) = &store.derived {
                let mut values = widened(store.element, &page);
                sharing.restore(&mut values);
                page = narrowed(store.element, &values);
            }
            to.write_all(&page)?;
        }
        Ok(())
    }

    /// Fills an empty cache of the same layout and options with what was written of the positions below `end`.
    ///
    /// # Errors
    /// If the device has no more memory, or those of `from`.
    pub fn read_from(&mut self, end: usize, from: &mut impl Read) -> io::Result<()> {
        self.reserve(end).map_err(io::Error::other)?;
        let rotary = Rotary::new(self.inverse_frequencies.clone(), Isa::best());
        for Filed { store, slot, address, bytes } in self.filed(end) {
            let mut page = vec![0; bytes];
            from.read_exact(&mut page)?;
            if let Some(derived) = &store.derived {
                let mut values = widened(store.element, &page);
                // Such a layer sees all positions: its pages lie in the sequence's order.
                let mut keys = derived.keys(&rotary.angles(slot * PAGE, PAGE), &values);
                if let Some(sharing) = &derived.sharing {
                    (keys, values) = (sharing.own_keys(&keys), sharing.ordered(&values));
                    page = narrowed(store.element, &values);
                }
                let address = self.addresses[store.keys.exact.start + slot];
                self.arena.write(address, &narrowed(store.element, &keys)).map_err(io::Error::other)?;
            }
            self.arena.write(address, &page).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// The pages that hold the positions below `end`, in a file's order.
    fn filed(&self, end: usize) -> impl Iterator<Item = Filed<'_>> {
        self.stores.iter().flat_map(move |store| {
            let keys = store.derived.is_none().then_some(&store.keys);
            let tables = keys.into_iter().chain([&store.values]).flat_map(move |kept| kept.held(end, store.zones));
            tables.flat_map(move |(table, held)| {
                let addresses = self.addresses[table.start..][..held].iter().enumerate();
                addresses.map(|(slot, address)| Filed { store, slot, address: *address, bytes: table.page_bytes })
            })
        })
    }
}

impl Derived {
    /// The keys of a page, of its values `(heads, PAGE, head_dim)` and the angles of its positions.
    fn keys(&self, angles: &Angles, values: &[f32]) -> Vec<f32> {
        let mut keys = vec![0.0; values.len()];
        let head = PAGE * self.weight.len();
        for (values, keys) in values.chunks_exact(head).zip(keys.chunks_exact_mut(head)) {
            let values = Elements::F32(values);
            rope::keys_of_values(Isa::best(), values, &self.weight, angles.cos(), angles.sin(), keys);
        }
        keys
    }
}

fn widened(element: ElementType, page: &[u8]) -> Vec<f32> {
    match element {
        ElementType::F32 => page.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        ElementType::F16 => page.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        ElementType::Bf16 => page.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
    }
}

fn narrowed(element: ElementType, rows: &[f32]) -> Vec<u8> {
    match element {
        ElementType::F32 => rows.iter().flat_map(|x| x.to_le_bytes()).collect(),
        ElementType::F16 => rows.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        ElementType::Bf16 => rows.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}
