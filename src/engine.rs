//! The engine: loaded models, thread pool and shared caches.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Once};

use foretoken_kernels::Isa;
use parking_lot::Mutex;

use crate::chat::{ChatOptions, ChatTemplate, Message};
use crate::checkpoint::{Checkpoint, LoadOptions};
use crate::constraint::{CompiledConstraint, Compiler, Constraint, ConstraintState};
use crate::device::{self, Models};
use crate::gemma4::{Assistant, Target};
use crate::kv::{KvOptions, PagePool};
use crate::loading::{self, ReadModels};
use crate::model::Model;
use crate::nn::with_team;
use crate::options::{EngineOptions, ModelOptions};
use crate::sampler::Sampling;
use crate::speculative::{BatchPlanner, Costs, Machine, Sources};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// A target, its drafters, tokenizer, chat template and thread pool. Cheap to clone; its sessions
/// may run from several threads.
#[derive(Clone)]
pub struct Engine {
    pub(crate) parts: Arc<Parts>,
}

/// Source of the models: errors about what is missing name where to add it.
#[derive(Clone, Copy)]
enum Origin {
    Checkpoint,
    /// [`Engine::from_model`].
    Caller,
}

pub(crate) struct Parts {
    origin: Origin,
    pub(crate) sources: Sources,
    /// The target and drafter on a device, if one is used.
    pub(crate) models: Option<Arc<Models>>,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) constraints: Compiler,
    /// The chat template, if there is one, or why it cannot be used.
    chat: Result<Option<ChatTemplate>, String>,
    pub(crate) end_of_generation: Vec<u32>,
    pub(crate) suppressed: Vec<u32>,
    sampling_defaults: Option<Sampling>,
    pub(crate) pool: rayon::ThreadPool,
    pub(crate) isa: Isa,
    /// Round costs, measured by the sessions.
    pub(crate) costs: Mutex<Costs>,
    /// Plans batches of this engine's sequences.
    pub(crate) batches: Mutex<BatchPlanner>,
    pub(crate) sessions: AtomicU64,
    /// Warns of the first session whose context is longer than the model was trained for.
    pub(crate) long_context: Once,
    /// Warns of the first session whose automatic context is shorter.
    short_context: Once,
}

impl Parts {
    /// Parts without a device, a tokenizer and the data of a checkpoint. `processor` names what measures round costs.
    fn new(sources: Sources, pool: rayon::ThreadPool, isa: Isa, processor: String) -> Self {
        let (threads, cost) = (pool.current_num_threads(), sources.model.step_cost());
        let machine = Machine { processor, threads, step_bytes: cost.bytes, step_multiply_adds: cost.multiply_adds };
        Self {
            origin: Origin::Caller,
            sources,
            models: None,
            tokenizer: None,
            constraints: Compiler::default(),
            chat: Ok(None),
            end_of_generation: Vec::new(),
            suppressed: Vec::new(),
            sampling_defaults: None,
            pool,
            isa,
            costs: Mutex::new(Costs::new(machine)),
            batches: Mutex::default(),
            sessions: AtomicU64::new(0),
            long_context: Once::new(),
            short_context: Once::new(),
        }
    }

    /// Warns, the first time, of an automatic context that is shorter than the model's. Of a scheduler's sessions only
    /// the extended context is known to be all that fits.
    pub(crate) fn warn_of_short_context(&self, options: &KvOptions, context: usize) {
        let trained = self.sources.model.max_position_embeddings();
        if context < trained && options.max_context.is_none() {
            self.short_context.call_once(|| {
                let what = "the model's context does not fit memory; using the largest that fits";
                tracing::warn!(model = trained, fits = context, "{what}");
            });
        }
    }

    /// As [`Engine::run`], on a thread of the pool.
    pub(crate) fn on_thread<R>(&self, passes: impl FnOnce() -> R) -> R {
        match &self.models {
            Some(_) => passes(),
            None => with_team(passes),
        }
    }
}

/// Maximum number of threads.
const MAX_THREADS: usize = 1024;

impl Engine {
    /// Loads the models of `options`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::File`], [`Error::Config`] or [`Error::Tensor`] if a file is missing or malformed;
    /// [`Error::Unsupported`] if one needs something that is not implemented; [`Error::AssistantMismatch`] or
    /// [`Error::DraftModelMismatch`] if the assistant or the draft model does not fit the target; [`Error::Device`] if
    /// there is no such device, or it fails; [`Error::Memory`] if memory is exhausted; [`Error::Argument`] if an option
    /// is out of its range; [`Error::Cancelled`] if the caller cancels it.
    pub fn load(options: &EngineOptions) -> Result<Self> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        let threads = options.threads.unwrap_or_else(default_threads);
        let pool = thread_pool(threads)?;
        // Before reading the files: a missing device is reported at once.
        let device = device::open(&options.device)?;
        let load = LoadOptions {
            isa,
            quantize: options.quantize,
            centroids: options.centroids.clone(),
            nextn: true,
            progress: options.progress.clone(),
            cancel: options.cancel.clone(),
        };
        let checkpoint = Checkpoint::open(&options.model)?;
        let tokens = checkpoint.generation_tokens()?;
        let (chat, sampling_defaults) = (chat_template(&checkpoint)?, checkpoint.sampling_defaults()?);
        // On the pool: all threads pack quantized weights.
        let read =
            pool.install(|| loading::read_with_fallback(options, &load, &checkpoint, device.as_ref(), &tokens))?;
        let ReadModels { sources, on_device: models, tokenizer, end_of_generation } = read;
        tracing::info!(threads, isa = isa.name(), ?end_of_generation, "engine ready");
        let processor = models.as_ref().map_or_else(|| isa.name().into(), |models| models.device().name());
        let parts = Parts {
            origin: Origin::Checkpoint,
            models,
            tokenizer: tokenizer.map(Arc::new),
            chat,
            end_of_generation,
            suppressed: tokens.suppressed,
            sampling_defaults,
            ..Parts::new(sources, pool, isa, processor)
        };
        Ok(Self { parts: Arc::new(parts) })
    }

    /// An engine for a caller's [`Model`], on the CPU.
    ///
    /// # Errors
    /// If the number of threads is not from 1 to 1024, or they cannot be started; if an end-of-generation token is
    /// outside the model's vocabulary.
    pub fn from_model(model: Arc<dyn Model>, options: ModelOptions) -> Result<Self> {
        let ModelOptions { threads, isa, kv_memory, tokenizer, chat_template, end_of_generation } = options;
        let (isa, vocab) = (isa.unwrap_or_else(Isa::best), model.vocab_size());
        if let Some(id) = end_of_generation.iter().find(|id| **id as usize >= vocab) {
            let problem = format!("token id {id} is outside the vocabulary of {vocab}; omit it");
            return Err(Error::argument("end_of_generation", problem));
        }
        let pool = thread_pool(threads.unwrap_or_else(default_threads))?;
        let parts = Parts {
            tokenizer: tokenizer.map(Arc::new),
            chat: Ok(chat_template),
            end_of_generation,
            ..Parts::new(Sources::new(model, PagePool::new(kv_memory)), pool, isa, isa.name().into())
        };
        Ok(Self { parts: Arc::new(parts) })
    }

    /// Whether the drafter `mtp` is available: an assistant is loaded, or the model has a NextN head.
    pub fn has_mtp(&self) -> bool {
        self.parts.sources.has_mtp()
    }

    /// Whether both are clones of one engine.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.parts, &other.parts)
    }

    /// The target.
    pub fn target(&self) -> &dyn Model {
        &*self.parts.sources.model
    }

    /// The target, if it is a Gemma 4.
    pub fn gemma4(&self) -> Option<&Target> {
        self.parts.sources.gemma4.as_deref()
    }

    /// The page pool of the sessions' K/V caches.
    pub fn pages(&self) -> &PagePool {
        &self.parts.sources.pages
    }

    /// The assistant, if one was loaded.
    pub fn assistant(&self) -> Option<&Assistant> {
        self.parts.sources.assistant.as_deref()
    }

    /// The model of the drafter `draft-model`, if one was loaded.
    pub fn draft_model(&self) -> Option<&dyn Model> {
        self.parts.sources.draft_model.as_ref().map(|draft| &*draft.0)
    }

    /// Round costs as measured so far by generations with
    /// [`BlockSize::Measured`](crate::speculative::BlockSize::Measured). New generations start from them.
    pub fn costs(&self) -> Costs {
        self.parts.costs.lock().clone()
    }

    /// Sets costs measured earlier: `Costs::load(path, engine.costs().machine())`.
    ///
    /// # Errors
    /// If they were measured on another machine or model.
    pub fn set_costs(&self, costs: Costs) -> Result<()> {
        let mut own = self.parts.costs.lock();
        if costs.machine() != own.machine() {
            let problem = format!("were measured on {}, this is {}; measure again", costs.machine(), own.machine());
            return Err(Error::argument("costs", problem));
        }
        *own = costs;
        Ok(())
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// If the checkpoint has none, or [`ModelOptions`] had none; token ids work without.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.shared_tokenizer().map(|tokenizer| &**tokenizer)
    }

    fn shared_tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        let missing = || {
            let problem = match self.parts.origin {
                Origin::Checkpoint => "the checkpoint has no tokenizer (tokenizer.json); use",
                Origin::Caller => "the engine was made without a tokenizer; set ModelOptions::tokenizer, or use",
            };
            Error::Tokenizer(format!("{problem} token ids instead of text"))
        };
        self.parts.tokenizer.as_ref().ok_or_else(missing)
    }

    /// Compiles a constraint and caches it for the generations that use it. It is cached for as long as the result is
    /// held.
    ///
    /// # Errors
    /// If it is malformed, no text satisfies it or it exceeds its limits (with the path in a JSON schema), the
    /// checkpoint has no tokenizer or its tokens cannot be mapped to bytes, memory is exhausted, or the cargo feature
    /// `constraint` is off.
    pub fn compile(&self, constraint: &Constraint) -> Result<CompiledConstraint> {
        let (vocab, end) = (self.target().vocab_size(), &self.parts.end_of_generation);
        self.parts.constraints.compile(constraint, self.shared_tokenizer()?, vocab, end)
    }

    /// A constraint that is cached, for which [`Engine::compile`] returns at once. It is then the last to be evicted
    /// from the cache.
    pub fn compiled(&self, constraint: &Constraint) -> Option<CompiledConstraint> {
        self.parts.constraints.cached(constraint)
    }

    /// The state of a constraint before the first token.
    ///
    /// # Errors
    /// As [`Engine::compile`].
    pub(crate) fn constraint(&self, constraint: &Constraint) -> Result<ConstraintState> {
        self.compile(constraint).map(|compiled| compiled.state(self.target().vocab_size()))
    }

    /// Encodes a conversation with the checkpoint's chat template.
    ///
    /// # Errors
    /// If the checkpoint has no template or tokenizer, the template refuses the messages, or an option cannot be used.
    pub fn encode_chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        self.chat_template()?.encode(self.tokenizer()?, messages, options)
    }

    /// The checkpoint's chat template, or that of [`ModelOptions`].
    ///
    /// # Errors
    /// If it has none, or it does not compile.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        let missing = || {
            let problem = match self.parts.origin {
                Origin::Checkpoint => "the checkpoint has no chat template; use",
                Origin::Caller => {
                    "the engine was made without a chat template; set ModelOptions::chat_template, or use"
                }
            };
            Error::Template(format!("{problem} a plain prompt instead"))
        };
        match &self.parts.chat {
            Ok(template) => template.as_ref().ok_or_else(missing),
            Err(problem) => Err(Error::Template(format!("{problem}; use a plain prompt, or another template"))),
        }
    }

    /// End-of-generation tokens.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.parts.end_of_generation
    }

    /// The publisher's sampling parameters; `None` if the checkpoint has none. They are never applied by default.
    pub fn sampling_defaults(&self) -> Option<&Sampling> {
        self.parts.sampling_defaults.as_ref()
    }

    /// Runs passes on the engine's thread pool, for callers that use [`Engine::target`] directly. Without a device, the
    /// other threads poll for the passes' parallel regions: other work that `passes` divides has one thread until they
    /// have polled for two milliseconds without any.
    pub fn run<R: Send>(&self, passes: impl FnOnce() -> R + Send) -> R {
        self.parts.pool.install(|| self.parts.on_thread(passes))
    }

    /// The device; `None` on the CPU. With a device [`Engine::target`] and [`Engine::assistant`] have
    /// no weights, and their passes return errors.
    pub fn device(&self) -> Option<String> {
        self.parts.models.as_ref().map(|models| models.device().name())
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.parts.isa
    }

    /// Threads of the pool.
    pub fn threads(&self) -> usize {
        self.parts.pool.current_num_threads()
    }
}

/// The chat template. One that does not compile does not prevent plain prompts: its problem is kept for chats.
///
/// # Errors
/// If a file is malformed.
fn chat_template(checkpoint: &Checkpoint) -> Result<Result<Option<ChatTemplate>, String>> {
    match ChatTemplate::of(checkpoint) {
        Err(Error::Template(problem)) => {
            tracing::warn!(path = %checkpoint.path().display(), problem, "the chat template cannot be used");
            Ok(Err(problem))
        }
        read => read.map(Ok),
    }
}

/// # Errors
/// If `threads` is 0 or too large, or the system refuses to start that many.
fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    if threads == 0 || threads > MAX_THREADS {
        let problem = format!("is {threads}, must be from 1 to {MAX_THREADS}");
        return Err(Error::argument("threads", format!("{problem}; omit it to use the physical cores")));
    }
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("foretoken-{i}"))
        // Without a handler, a panic in a job that nothing waits for ends the process. Its payload is leaked, because
        // dropping it could panic again.
        .panic_handler(std::mem::forget)
        .build()
        .map_err(|e| Error::argument("threads", format!("{threads} could not be started ({e}); use fewer threads")))
}

/// Physical cores, limited by affinity and the cgroup quota. SMT siblings do not help: the kernels
/// are bound by memory or by the multipliers.
pub fn default_threads() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    num_cpus::get_physical().min(usable).max(1)
}
