//! Models on a device, and what all their sequences share.

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::Device;
use super::buffer::Buffer;
use super::device_model::DeviceModel;
use super::kv::KvPlan;
use super::loaded::{DeviceAssistant, LoadedModels};
use super::ops::DeviceOps;
use super::pages::PageMemory;
use super::passes::Passes;
use super::recurrent::DeltaNets;
use super::sequence::Sequence;
use super::temporaries::activation_bytes;
use crate::Result;
use crate::gemma4::AssistantModel;
use crate::kv::{ExactZones, KvLayout, KvOptions, PagePool};

/// A target and its assistant, if any, on a device; shared by any number of sequences.
pub(crate) struct Models {
    pub(super) loaded: LoadedModels,
    plans: Mutex<Plans>,
    pages: Arc<PageMemory>,
    passes: Mutex<Passes>,
}

/// Minimum positions of page tables, if the model has as many: 64 KiB per table. Larger tables only
/// if the memory suffices for that many positions.
const MIN_TABLE_POSITIONS: usize = 1 << 20;

/// The plans of the sequences that exist.
#[derive(Default)]
struct Plans {
    used: Vec<Weak<KvPlan>>,
    made: u64,
}

impl Models {
    /// Takes a target and its assistant's weights and donors, loaded to `device` by
    /// [`DeviceDestination`](super::DeviceDestination). `suppressed` ids are never chosen. Pages take at most
    /// `kv_memory` bytes, by default what is free, less the part for activations.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(
        device: Arc<dyn Device>,
        target: Box<dyn DeviceModel>,
        assistant: Option<(AssistantModel<DeviceOps>, Vec<usize>)>,
        suppressed: &[u32],
        kv_memory: Option<u64>,
    ) -> Result<Self> {
        let suppressed = (!suppressed.is_empty()).then(|| Buffer::of(&*device, suppressed)).transpose()?;
        let assistant = assistant.map(|(model, donors)| DeviceAssistant { model, donors });
        let passes = Mutex::new(Passes::new(&device, &*target)?);
        let free = device.free_bytes()?;
        let limit = kv_memory.unwrap_or((free - activation_bytes(free)) as u64);
        let pages = Arc::new(PageMemory::new(device.clone(), PagePool::new(Some(limit))));
        tracing::info!(device = device.name(), "weights loaded to the device");
        let loaded = LoadedModels { device, target, assistant, suppressed };
        Ok(Self { loaded, plans: Mutex::default(), pages, passes })
    }

    /// Models of `other`, a head of this target or its draft model, that share its page memory.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn sharing_pages(&self, other: Box<dyn DeviceModel>, suppressed: &[u32]) -> Result<Self> {
        let (device, pages) = (self.device().clone(), self.pages.clone());
        let suppressed = (!suppressed.is_empty()).then(|| Buffer::of(&*device, suppressed)).transpose()?;
        let passes = Mutex::new(Passes::new(&device, &*other)?);
        let loaded = LoadedModels { device, target: other, assistant: None, suppressed };
        Ok(Self { loaded, plans: Mutex::default(), pages, passes })
    }

    /// Counts the pages of all sequences.
    pub fn pages(&self) -> &PagePool {
        self.pages.pool()
    }

    /// A sequence that continues `sequence`, which has `len` positions, independently. Pages are
    /// shared until either writes them.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn fork(&self, sequence: &mut Sequence, len: usize) -> Result<Sequence> {
        let mut passes = self.passes();
        passes.apply_committed(sequence, len)?;
        sequence.fork(passes.workspace.launcher())
    }

    /// The recurrent state of `sequence`, which has `len` positions, as values: of every delta net the
    /// matrices and the window. Empty without delta nets.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read_recurrent(&self, sequence: &mut Sequence, len: usize) -> Result<Vec<f32>> {
        self.passes().apply_committed(sequence, len)?;
        sequence.recurrent_mut().map_or(Ok(Vec::new()), |state| state.read())
    }

    /// Fills the recurrent state of an empty sequence from [`Models::read_recurrent`]'s values.
    /// Returns whether they fit.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn write_recurrent(&self, sequence: &mut Sequence, values: &[f32]) -> Result<bool> {
        sequence.recurrent_mut().map_or(Ok(values.is_empty()), |state| state.write(values))
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.loaded.device
    }

    /// The memory and recordings of passes. While the guard is held, the results of the last pass stay valid.
    pub(super) fn passes(&self) -> MutexGuard<'_, Passes> {
        self.passes.lock()
    }

    /// An empty sequence, and its context: `options.max_context`, or the largest up to `default` that fits memory. 1/16
    /// of the free memory is left for activations.
    ///
    /// # Errors
    /// If no kernel supports a K/V format, or the device is out of memory; nothing stays allocated then.
    pub fn sequence(&self, options: &KvOptions, default: usize) -> Result<(Sequence, usize)> {
        let (layout, nets) = (&self.loaded.target.kv_layout(), self.loaded.target.delta_nets());
        options.check(layout)?;
        let options = &within_context(options, default);
        let available = self.pages().available().unwrap_or(u64::MAX);
        let context = self.context(options, default, self.free(nets.as_ref())?.min(available))?;
        // The same page tables for all sequences, whatever memory is left for each, so that they share passes.
        let longest = options.max_context.unwrap_or(default).min(context.max(MIN_TABLE_POSITIONS));
        let plan = self.plan(layout, options, longest)?;
        let recurrent = self.passes().new_recurrent()?;
        Ok((Sequence::new(&self.pages, plan, self.loaded.hidden_size(), recurrent)?, context))
    }

    /// The largest context up to `default` that fits memory once no other sequence has pages.
    ///
    /// # Errors
    /// If no position fits, no kernel supports a K/V format, or the driver fails.
    pub fn longest_context(&self, options: &KvOptions, default: usize) -> Result<usize> {
        let free = self.free(None)?.saturating_add(self.pages().held());
        self.context(&within_context(options, default), default, free.min(self.pages().limit().unwrap_or(u64::MAX)))
    }

    /// The context of a sequence whose pages take at most `memory` bytes.
    fn context(&self, options: &KvOptions, default: usize, memory: u64) -> Result<usize> {
        let layout = self.loaded.target.kv_layout();
        let bytes_at = KvPlan::bytes_at(&**self.device(), &layout, options)?;
        let memory = options.memory.map_or(memory, |own| own.min(memory));
        KvOptions { memory: Some(memory), ..options.clone() }.context(default, bytes_at)
    }

    /// Free bytes, those that are allocated for pages as well, without those for activations and for a sequence's
    /// recurrent state.
    fn free(&self, nets: Option<&DeltaNets>) -> Result<u64> {
        let free = self.device().free_bytes()?.saturating_sub(nets.map_or(0, DeltaNets::bytes));
        Ok((free - activation_bytes(free) + self.pages.unused()) as u64)
    }

    /// The plan of sequences with these options, whose tables hold `context` positions.
    fn plan(&self, layout: &KvLayout, options: &KvOptions, context: usize) -> Result<Arc<KvPlan>> {
        let mut plans = self.plans.lock();
        plans.used.retain(|plan| plan.strong_count() > 0);
        let mut used = plans.used.iter().filter_map(Weak::upgrade);
        if let Some(plan) = used.find(|plan| plan.is_of(options, context)) {
            return Ok(plan);
        }
        drop(used);
        plans.made += 1;
        let plan = Arc::new(KvPlan::new(&**self.device(), layout, options, context, plans.made)?);
        plans.used.push(Arc::downgrade(&plan));
        Ok(plan)
    }
}

/// The options with no more rows of a round, and no longer exact tail, than positions: page tables have entries for all.
fn within_context(options: &KvOptions, default: usize) -> KvOptions {
    let most = options.max_context.unwrap_or(default);
    let exact = ExactZones { tail: options.exact.tail.min(most), ..options.exact };
    KvOptions { exact, max_round_rows: options.max_round_rows.min(most), ..options.clone() }
}
