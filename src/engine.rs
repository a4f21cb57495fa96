//! A loaded pair, ready to open sessions on.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use foretoken_kernels::Isa;
use parking_lot::Mutex;

use crate::chat::{ChatTemplate, Message, Thinking};
use crate::checkpoint::{Checkpoint, GenerationTokens, LoadOptions};
use crate::device::{self, Device};
use crate::gemma4::on_device::Models;
use crate::gemma4::{Assistant, Target};
use crate::options::{DeviceChoice, EngineOptions, SessionOptions};
use crate::session::Session;
use crate::speculative::{Costs, Machine, NgramPool, Sources, check_vocabulary};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// A target, its assistant, tokenizer and chat template, and the threads that compute. Cheap to clone; sessions of one
/// engine share it and may run from several threads.
#[derive(Clone)]
pub struct Engine {
    pub(crate) parts: Arc<Parts>,
}

pub(crate) struct Parts {
    pub(crate) sources: Sources,
    /// The pair on a device, where it computes there.
    pub(crate) models: Option<Arc<Models>>,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) chat: Option<ChatTemplate>,
    pub(crate) end_of_generation: Vec<u32>,
    pub(crate) suppressed: Vec<u32>,
    pub(crate) pool: rayon::ThreadPool,
    pub(crate) isa: Isa,
    /// What rounds cost, as the sessions have measured it.
    pub(crate) costs: Mutex<Costs>,
    pub(crate) sessions: AtomicU64,
}

/// Gemma 4's end-of-generation tokens by name: instruction-tuned checkpoints stop on all of them, whatever subset
/// their files list.
const END_OF_GENERATION: [&str; 3] = ["<eos>", "<turn|>", "<|tool_response>"];

/// More than any machine has, and few enough to start.
const MAX_THREADS: usize = 1024;

impl Engine {
    /// Loads what the options name.
    ///
    /// # Errors
    /// If a file is missing or malformed, a configuration asks for something that is not implemented, or the assistant
    /// does not fit the target.
    pub fn load(options: &EngineOptions) -> Result<Self> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        let threads = options.threads.unwrap_or_else(default_threads);
        if threads == 0 || threads > MAX_THREADS {
            let problem = format!("the number of threads is {threads}, must be from 1 to {MAX_THREADS}");
            return Err(Error::Input(format!("{problem}; leave it out for the physical cores")));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("foretoken-{i}"))
            .build()
            .map_err(|e| Error::Input(format!("{threads} threads cannot be started: {e}")))?;
        // Before anything is read: a device that is not there need not be waited for.
        let device = device::open(&options.device)?;
        let load = LoadOptions { isa, quantize: options.quantize, progress: options.progress.clone() };
        let checkpoint = Checkpoint::open(&options.model)?;
        // On the pool, because quantized weights are packed by all threads.
        let target = pool.install(|| Target::load(&checkpoint, load.clone()))?;
        let assistant = match &options.assistant {
            Some(path) => {
                let checkpoint = Checkpoint::open(path)?;
                Some(Arc::new(pool.install(|| Assistant::load(&checkpoint, &target, load.clone()))?))
            }
            None => None,
        };
        let tokenizer = checkpoint.tokenizer(target.config().vocab_size)?;
        let draft_model = match &options.draft_model {
            Some(path) => {
                let checkpoint = Checkpoint::open(path)?;
                let model = pool.install(|| Target::load(&checkpoint, load))?;
                let own = checkpoint.tokenizer(model.config().vocab_size)?;
                check_vocabulary((&target, tokenizer.as_ref()), (&model, own.as_ref()))?;
                Some(Arc::new(model))
            }
            None => None,
        };
        let GenerationTokens { end, suppressed } = checkpoint.generation_tokens()?;
        let mut end_of_generation = [target.config().eos_token_ids.clone(), end].concat();
        if let Some(tokenizer) = &tokenizer {
            end_of_generation.extend(END_OF_GENERATION.iter().filter_map(|name| tokenizer.id(name)));
        }
        end_of_generation.sort_unstable();
        end_of_generation.dedup();
        let upload = |device: Arc<dyn Device>| -> Result<_> {
            let pair = Models::upload(device.clone(), &target, assistant.as_deref(), &suppressed)?;
            let draft = draft_model.as_ref().map(|model| Models::upload(device, model, None, &suppressed));
            Ok((Arc::new(pair), draft.transpose()?.map(Arc::new)))
        };
        let (models, device_draft_model) = match (device.map(upload).transpose(), &options.device) {
            (Ok(models), _) => models.unzip(),
            (Err(error), DeviceChoice::Auto) => {
                tracing::warn!(%error, "the models do not run on the device; the CPU computes");
                (None, None)
            }
            (Err(error), _) => return Err(error),
        };
        tracing::info!(threads, isa = isa.name(), ?end_of_generation, "engine ready");
        let chat = checkpoint.chat_template()?;
        let machine = Machine {
            isa: models.as_ref().map_or_else(|| isa.name().into(), |models| models.device().name()),
            threads,
            step_bytes: target.step_cost().bytes,
            step_multiply_adds: target.step_cost().multiply_adds,
        };
        let (costs, sessions) = (Mutex::new(Costs::new(machine)), AtomicU64::new(0));
        let sources = Sources {
            target: Arc::new(target),
            assistant,
            draft_model,
            device_draft_model: device_draft_model.flatten(),
            pool: Arc::new(NgramPool::default()),
            isa,
        };
        let parts =
            Parts { sources, models, tokenizer, chat, end_of_generation, suppressed, pool, isa, costs, sessions };
        Ok(Self { parts: Arc::new(parts) })
    }

    /// Opens a session: an empty cache for one sequence.
    ///
    /// # Errors
    /// If an option is out of its range.
    pub fn session(&self, options: &SessionOptions) -> Result<Session> {
        Session::new(self.clone(), options)
    }

    /// The target.
    pub fn target(&self) -> &Target {
        &self.parts.sources.target
    }

    /// The assistant, if one was loaded.
    pub fn assistant(&self) -> Option<&Assistant> {
        self.parts.sources.assistant.as_deref()
    }

    /// The model of the drafter `draft-model`, if one was loaded.
    pub fn draft_model(&self) -> Option<&Target> {
        self.parts.sources.draft_model.as_deref()
    }

    /// What rounds cost here, as generations whose blocks are [`BlockSize::Measured`](crate::speculative::BlockSize::Measured)
    /// have measured it so far. Every new generation starts from it.
    pub fn costs(&self) -> Costs {
        self.parts.costs.lock().clone()
    }

    /// Starts from costs that were measured before: `Costs::load(path, engine.costs().machine())`.
    ///
    /// # Errors
    /// If they are another machine's or model's.
    pub fn set_costs(&self, costs: Costs) -> Result<()> {
        let mut own = self.parts.costs.lock();
        if costs.machine() != own.machine() {
            let problem = format!("the costs are those of {:?}, this is {:?}", costs.machine(), own.machine());
            return Err(Error::Input(problem));
        }
        *own = costs;
        Ok(())
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// If the checkpoint has none; token ids work without.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        let missing =
            || Error::Tokenizer("the checkpoint has no tokenizer.json; give token ids instead of text".into());
        self.parts.tokenizer.as_ref().ok_or_else(missing)
    }

    /// The tokens of a conversation under the checkpoint's own chat template, ready for the model's next turn.
    ///
    /// # Errors
    /// If the checkpoint has no template or tokenizer, or the template refuses the messages.
    pub fn encode_chat(&self, messages: &[Message], thinking: Thinking) -> Result<Vec<u32>> {
        let missing = || Error::Input("the checkpoint has no chat template; give a plain prompt instead".into());
        let rendered = self.parts.chat.as_ref().ok_or_else(missing)?.render(messages, thinking)?;
        self.tokenizer()?.encode_rendered(&rendered)
    }

    /// Tokens that end a text.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.parts.end_of_generation
    }

    /// Runs `work` on the engine's threads, as sessions do: for callers who drive [`Engine::target`] themselves.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.parts.pool.install(work)
    }

    /// The device that computes, if it is not the processor. [`Engine::target`] and [`Engine::assistant`] are the
    /// processor's all the same.
    pub fn device(&self) -> Option<String> {
        self.parts.models.as_ref().map(|models| models.device().name())
    }

    /// The instruction set that computes.
    pub fn isa(&self) -> Isa {
        self.parts.isa
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.parts.pool.current_num_threads()
    }
}

/// Physical cores, as far as affinity and the control group's quota let the process use them. A second thread on a core
/// brings nothing to kernels that wait for memory or keep the multipliers busy.
fn default_threads() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    num_cpus::get_physical().min(usable).max(1)
}
