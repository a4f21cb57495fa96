//! Serves a model over HTTP: `cargo run --release -p foretoken-server`.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use foretoken::chat::ChatTemplate;
use foretoken::checkpoint::Checkpoint;
use foretoken::{Cancel, DraftPipeline, Engine, PrefixCacheOptions, Sampling, SchedulerOptions, Speculation};
use foretoken_server::{GenerateDefaults, Server, ServerOptions};
use foretoken_tools::prompt::TemplateVariables;
use foretoken_tools::sampling::{Chain, at_least_minus_one, unlimited_if_negative};
use foretoken_tools::{arguments, input};
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// glibc's allocator keeps what each thread freed: under mixed requests resident memory grew by 5 % in ten minutes,
/// with mimalloc 2 not at all (`benches/record/2026-11-25-epyc-zen4-2vcpu/soak.txt`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Serve a Gemma 4 or Qwen3.5 model over HTTP, with OpenAI's, Anthropic's and llama.cpp's APIs.
///
/// Without options, it serves the demo model in models/demo (Rust code completion) on http://127.0.0.1:8080.
///
/// What neither a chat's request nor an option sets of temperature, top-k, top-p, min-p, typical, XTC and the repeat
/// penalty has the checkpoint's defaults.
///
/// Example: foretoken-server --model google/gemma-4-E2B-it --assistant google/gemma-4-E2B-it-assistant
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Address to listen on; 0.0.0.0 listens on all interfaces.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 selects a free one.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Maximum number of requests that are decoded in parallel.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Maximum number of requests that wait in the queue; further ones get 429.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_queue: usize,
    /// Maximum rows per forward pass; rows not used by decoding are used for prefill.
    #[arg(long, value_name = "N", default_value_t = SchedulerOptions::default().max_rows)]
    max_rows: usize,
    /// Maximum slowdown of decoding while a prompt is prefilled: a pass may take up to X times as
    /// long. 1 prefills most slowly.
    #[arg(long, value_name = "X", default_value_t = SchedulerOptions::default().prompt_slowdown)]
    prompt_slowdown: f64,
    /// Disable the prefix cache.
    #[arg(long)]
    no_prefix_cache: bool,
    /// Existing directory for cached prefixes that do not fit in memory, up to 8 GiB; the files are deleted on exit,
    /// those of a killed server at the next start. Default: they are evicted.
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    cache_dir: Option<PathBuf>,
    /// Maximum bytes of the K/V cache of all requests together, with an optional suffix K, M or G. Default: unlimited;
    /// on a device, 15/16 of what is free after loading.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    kv_memory: Option<u64>,
    /// API key that requests must have; may be repeated. Other users of the machine can see it: prefer --api-key-file.
    /// Default: requests need none.
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with API keys, one per line.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Host name that requests to a loopback address may use, besides localhost; may be repeated.
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Model name in requests and responses. Default: the name of the model's file or directory.
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// File with a chat template (Jinja) that overrides the checkpoint's.
    #[arg(long, value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// Maximum number of open connections; more wait until one is closed.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_connections: usize,
    /// Seconds without a request, or without reading a response, after which a connection is closed.
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    idle_timeout: u64,
    /// Seconds that running requests have to finish after SIGTERM. The process ends at most 5 s later.
    #[arg(long, value_name = "S", default_value_t = 30)]
    drain_timeout: u64,
    /// Log level on stderr: error, warn, info, debug, trace. The log never contains text of requests or responses.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: Level,
    #[command(flatten)]
    load: arguments::Load,
    #[command(flatten)]
    drafting: arguments::Drafting,
    #[command(flatten)]
    kv: arguments::Kv,
    #[command(flatten)]
    defaults: RequestDefaults,
}

/// Defaults of what requests omit.
#[derive(clap::Args)]
#[command(next_help_heading = "Defaults of requests that set none")]
struct RequestDefaults {
    /// Maximum number of tokens to generate. Default: -1, up to the end of the context.
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, value_parser = at_least_minus_one())]
    max_tokens: Option<i64>,
    #[command(flatten)]
    chain: Chain,
    /// Seed of the draws. Default: a random one for every request.
    #[arg(long)]
    seed: Option<u64>,
    /// Variables for the chat template: a JSON object, such as {"enable_thinking": true}. The chat_template_kwargs of
    /// requests add to it.
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<TemplateVariables>,
}

impl RequestDefaults {
    /// The server's option.
    ///
    /// # Errors
    /// If DRY is enabled, and the checkpoint has no tokenizer.
    fn options(&self, engine: &Engine, speculation: Speculation) -> Result<GenerateDefaults> {
        let of_checkpoint = engine.sampling_defaults().cloned().unwrap_or_default();
        let TemplateVariables { thinking, others } = self.chat_template_kwargs.clone().unwrap_or_default();
        Ok(GenerateDefaults {
            sampling: self.chain.request_defaults(engine, &Sampling::default())?,
            chat_sampling: Some(self.chain.request_defaults(engine, &of_checkpoint)?),
            thinking: thinking.unwrap_or_default(),
            variables: others,
            seed: self.seed,
            max_tokens: self.max_tokens.map(unlimited_if_negative),
            speculation,
            logits_processor: None,
        })
    }
}

/// The demo model has no chat template, as it completes code: a chat is the concatenation of its messages.
const DEMO_TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
/// Threads for connections; the engine has threads of its own.
const IO_THREADS: usize = 2;
/// Maximum number of prompts that are tokenized at a time.
const TOKENIZER_THREADS: usize = 2;
/// Time to wait at exit for requests that are being tokenized, or for a load that is cancelled.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    foretoken_tools::run_service(serve)
}

fn serve(args: Args) -> Result<()> {
    start_log(args.log_level);
    // A panic's message may contain a client's text; its location does not.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        tracing::error!(place, "panic");
    }));
    let api_keys = check(&args)?;
    let (host, parallel, max_queue, has_key) = (args.host, args.parallel, args.max_queue, !api_keys.is_empty());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .max_blocking_threads(TOKENIZER_THREADS)
        .enable_io()
        .enable_time()
        .build()?;
    let served = runtime.block_on(async {
        let mut stop = pin!(stop()?);
        let cancel = Cancel::default();
        let of_load = cancel.clone();
        let loading = tokio::task::spawn_blocking(move || load(&args, api_keys, of_load));
        let (engine, options) = tokio::select! {
            loaded = loading => loaded??,
            () = &mut stop => {
                // A download ends with the process; the next start resumes it.
                cancel.cancel();
                tracing::info!("stopped while loading");
                return Ok(());
            }
        };
        let model = options.model.clone();
        let server = Server::bind(&engine, options).await?;
        if !host.to_canonical().is_loopback() && !has_key {
            tracing::warn!("no API key: anyone who can reach {host} can use the server; set --api-key-file");
        }
        let url = format!("http://{}", server.address());
        let kv_memory = engine.pages().limit();
        tracing::info!(url, model, context = server.context(), parallel, max_queue, kv_memory, "listening");
        server.run(stop).await;
        tracing::info!("stopped");
        Ok(())
    });
    // Tokenizing and downloads cannot be interrupted.
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    served
}

/// Downloads what is not cached, and loads it.
fn load(args: &Args, api_keys: Vec<String>, cancel: Cancel) -> Result<(Engine, ServerOptions)> {
    let load = args.load.options(&args.drafting)?;
    let model = load.model.clone();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), model = %model.display(), "loading");
    let engine = Engine::load(&foretoken::EngineOptions { kv_memory: args.kv_memory, cancel, ..load })?;
    let options = ServerOptions { api_keys, ..options(args, &engine, &model)? };
    Ok((engine, options))
}

/// Logs to stderr what this project's crates log up to `level`, and of others warnings and errors only: tokenizers'
/// traces contain the text of prompts.
fn start_log(level: Level) {
    let levels = Targets::new().with_default(level.min(Level::WARN)).with_target("foretoken", level);
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).with_target(false);
    // A line that cannot be written is lost: reporting that on stderr, which is the log, would panic.
    log.log_internal_errors(false).finish().with(levels).init();
}

/// Checks what can be wrong before a model is loaded, which takes long. Returns the API keys, whose file may be a pipe.
fn check(args: &Args) -> Result<Vec<String>> {
    ensure!(args.max_rows > 0, "--max-rows must be at least 1");
    ensure!(args.prompt_slowdown >= 1.0, "--prompt-slowdown must be at least 1");
    ensure!(args.max_connections > 0, "--max-connections must be at least 1");
    ensure!(args.defaults.max_tokens != Some(0), "--max-tokens must be at least 1, or -1 for no limit");
    ensure!(args.alias.as_ref().is_none_or(|name| !name.is_empty()), "--alias is empty; give a name, or omit it");
    for path in args.chat_template_file.iter().chain(&args.cache_dir) {
        std::fs::metadata(path).with_context(|| path.display().to_string())?;
    }
    args.drafting.check_dynamic()?;
    let api_keys = api_keys(args)?;
    let has_model = args.load.model.is_some() || foretoken_tools::demo("target").exists();
    ensure!(has_model, "the demo pair is not where the server was built; pass --model");
    let address = SocketAddr::new(args.host, args.port);
    std::net::TcpListener::bind(address).with_context(|| format!("{address}: pass another --port or --host"))?;
    Ok(api_keys)
}

fn options(args: &Args, engine: &Engine, model: &Path) -> Result<ServerOptions> {
    let is_demo = args.load.model.is_none();
    let name = match is_demo {
        true => "demo".into(),
        false => foretoken::checkpoint::model_name(model),
    };
    // Names of directories may contain dots (Qwen3.5-0.8B).
    let name = name.strip_suffix(".gguf").unwrap_or(&name).to_owned();
    let template = match &args.chat_template_file {
        Some(path) => Some(input::file(path)?),
        None => is_demo.then(|| DEMO_TEMPLATE.to_owned()),
    };
    let with_tokens = |source| ChatTemplate::with_tokens_of(&Checkpoint::open(model)?, source);
    let template = template.map(with_tokens).transpose()?;
    Ok(ServerOptions {
        parallel: args.parallel.into(),
        max_queue: args.max_queue,
        session: args.kv.options(),
        scheduler: SchedulerOptions {
            max_rows: args.max_rows,
            prompt_slowdown: args.prompt_slowdown,
            prefix_cache: (!args.no_prefix_cache)
                .then(|| PrefixCacheOptions { directory: args.cache_dir.clone(), ..PrefixCacheOptions::default() }),
        },
        defaults: args.defaults.options(engine, args.drafting.options(engine, DraftPipeline::InTurn)?)?,
        chat_template: template,
        allowed_hosts: args.allowed_host.clone(),
        max_connections: args.max_connections,
        idle_timeout: Duration::from_secs(args.idle_timeout),
        drain_timeout: Duration::from_secs(args.drain_timeout),
        ..ServerOptions::new(SocketAddr::new(args.host, args.port), args.alias.clone().unwrap_or(name))
    })
}

/// The keys of the command line and of the file.
fn api_keys(args: &Args) -> Result<Vec<String>> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let file = input::file(path)?;
        let before = keys.len();
        keys.extend(file.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
        // An empty list of keys would allow every request.
        ensure!(keys.len() > before, "{}: contains no API key; write one per line", path.display());
    }
    ensure!(keys.iter().all(|key| !key.is_empty()), "--api-key is empty; give a key, or omit it");
    Ok(keys)
}

/// A number of bytes: 2147483648, 2G.
fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    number
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("{text:?} is not a number of bytes; use a form such as 2147483648 or 2G"))
}

/// Ready with SIGTERM or SIGINT. A second one ends the process at once.
#[cfg(unix)]
fn stop() -> Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut either = async move || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(async move {
        either().await;
        tokio::spawn(async move {
            either().await;
            std::process::exit(1);
        });
    })
}

/// Ready with Ctrl-C. A second one ends the process at once.
#[cfg(not(unix))]
fn stop() -> Result<impl Future<Output = ()>> {
    async fn interrupt() {
        // Without the signal, the server runs until it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
    Ok(async {
        interrupt().await;
        tokio::spawn(async {
            interrupt().await;
            std::process::exit(1);
        });
    })
}

#[cfg(test)]
mod tests {
    use foretoken::EngineOptions;
    use foretoken::chat::{Json, Thinking};
    use foretoken::sampler::{Breakers, Penalties, Xtc};

    use super::*;

    fn defaults(more: &[&str]) -> RequestDefaults {
        Args::try_parse_from([&["foretoken-server"], more].concat()).unwrap_or_else(|error| panic!("{error}")).defaults
    }

    #[test]
    fn limits_have_the_defaults_of_the_library() {
        let args = Args::try_parse_from(["foretoken-server"]).unwrap_or_else(|error| panic!("{error}"));
        let own = ServerOptions::new(SocketAddr::new(args.host, args.port), "demo");
        let counts = (usize::from(args.parallel), args.max_queue, args.max_connections);
        assert_eq!(counts, (own.parallel, own.max_queue, own.max_connections));
        let timeouts = [args.idle_timeout, args.drain_timeout].map(Duration::from_secs);
        assert_eq!((timeouts, args.kv.options()), ([own.idle_timeout, own.drain_timeout], own.session));
    }

    /// The samplers of `generate`; those that are off keep their parameters for requests.
    #[test]
    fn defaults_of_requests() {
        let engine = Engine::load(&EngineOptions::new(foretoken_tools::demo("target"))).expect("the demo model");
        let options = |more: &[&str]| defaults(more).options(&engine, Speculation::Off).expect("defaults");
        let none = options(&[]);
        let dry = none.sampling.dry.clone().expect("DRY");
        assert_eq!((dry.multiplier, dry.base, dry.allowed_length, dry.last_n), (0.0, 1.75, 2, None));
        assert!(!dry.breakers.ids().is_empty());
        let xtc = Some(Xtc { probability: 0.0, ..Xtc::default() });
        assert_eq!(none.sampling, Sampling { dry: Some(dry), xtc, ..Sampling::default() });
        assert_eq!(
            (none.chat_sampling, none.thinking, none.variables),
            (Some(none.sampling), Thinking::Off, Vec::new())
        );

        let line = "--temp 0.8 --top-k 0 --top-p 0.9 --min-p 0.1 --typical 0.7 --top-n-sigma 2 --repeat-penalty 1.1 \
            --repeat-last-n -1 --presence-penalty 0.2 --frequency-penalty -0.3 --dry-multiplier 0.5 --dry-base 2 \
            --dry-allowed-length 3 --dry-penalty-last-n 99 --dry-sequence-breaker none --xtc-threshold 0.2 --seed 7 \
            --max-tokens 9";
        let all = options(&line.split_whitespace().collect::<Vec<_>>());
        let dry = foretoken::sampler::Dry {
            multiplier: 0.5,
            base: 2.0,
            allowed_length: 3,
            last_n: Some(99),
            breakers: Breakers::default(),
        };
        let want = Sampling {
            penalties: Penalties { repeat: 1.1, frequency: -0.3, presence: 0.2, last_n: None },
            dry: Some(dry),
            top_n_sigma: Some(2.0),
            top_k: None,
            typical_p: 0.7,
            top_p: 0.9,
            min_p: 0.1,
            xtc: Some(Xtc { probability: 0.0, threshold: 0.2 }),
            temperature: 0.8,
        };
        assert_eq!((&all.sampling, all.chat_sampling.as_ref()), (&want, Some(&want)));
        assert_eq!((all.seed, all.max_tokens), (Some(7), Some(9)));
        let unlimited = options(&["-n", "-1", "--top-k", "-1"]);
        assert_eq!((unlimited.max_tokens, unlimited.sampling.top_k), (Some(usize::MAX), None));

        let chats = options(&["--chat-template-kwargs", r#"{"enable_thinking": true, "x": [1]}"#]);
        let x = ("x".to_owned(), Json::parse("[1]").expect("JSON"));
        assert_eq!((chats.thinking, chats.variables), (Thinking::On, vec![x]));
    }
}
