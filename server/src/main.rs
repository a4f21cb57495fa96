//! Serves a model over HTTP: `cargo run --release -p foretoken-server`.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use foretoken::chat::ChatTemplate;
use foretoken::{Engine, PrefixCacheOptions, SchedulerOptions};
use foretoken_server::{GenerateDefaults, Server, ServerOptions};
use foretoken_tools::arguments;
use tracing::Level;

/// Serve a Gemma 4 and its assistant over HTTP, with OpenAI's, Anthropic's and llama.cpp's routes.
///
/// With nothing given, the demo pair in models/demo, which continues Rust, on http://127.0.0.1:8080.
///
/// Example: foretoken-server --model google/gemma-4-E2B-it --assistant google/gemma-4-E2B-it-assistant
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Address to listen on; 0.0.0.0 is every one of the machine.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port; 0 is any that is free.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Sequences that are decoded together.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Requests that may wait beside those; further ones are answered 429.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_queue: usize,
    /// Rows of a pass: what the rounds leave of it, prompts are read with.
    #[arg(long, value_name = "N", default_value_t = SchedulerOptions::default().max_rows)]
    max_rows: usize,
    /// How many times as long as usual passes may take that read a prompt beside other texts; 1 keeps those waiting the least.
    #[arg(long, value_name = "X", default_value_t = SchedulerOptions::default().prompt_slowdown)]
    prompt_slowdown: f64,
    /// Keep no states of prompts: every request computes its own whole.
    #[arg(long)]
    no_prefix_cache: bool,
    /// A folder for states of conversations that memory does not hold, in files that are deleted at the end. Default: they are dropped.
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    cache_dir: Option<PathBuf>,
    /// Bytes of K and V of all sequences together (CPU); G, M and K may follow the number. Default: no limit but each sequence's.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    kv_memory: Option<u64>,
    /// A key of which a request must have one; may be given several times. Visible to other users of the machine, unlike:
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// Keys in a file, a line each.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// A name by which requests may call a server on a loopback address, besides localhost; may be given several times.
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// The model's name in requests and answers. Default: that of its file or directory.
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// A chat template (Jinja) instead of the checkpoint's.
    #[arg(long, value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// Connections at a time; more wait until one is closed.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_connections: usize,
    /// Seconds after which a connection is closed on which a request does not arrive, or an answer is not taken.
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    idle_timeout: u64,
    /// Seconds that requests under way have after SIGTERM.
    #[arg(long, value_name = "S", default_value_t = 30)]
    drain_timeout: u64,
    /// What the log on stderr has: error, warn, info, debug, trace. Never what is in a request or an answer.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: Level,
    #[command(flatten)]
    load: arguments::Load,
    #[command(flatten)]
    drafting: arguments::Drafting,
    #[command(flatten)]
    kv: arguments::Kv,
    #[command(flatten)]
    text: TextDefaults,
}

/// What requests leave out.
#[derive(clap::Args)]
struct TextDefaults {
    /// Tokens to generate at most. Default: what the context has room for.
    #[arg(long)]
    max_tokens: Option<usize>,
    /// 0 takes the most probable token. Default: 0; of a chat, what the checkpoint's publisher says, as of top-k, top-p and
    /// min-p.
    #[arg(long)]
    temperature: Option<f32>,
    /// Keep the K most probable tokens. Default: all.
    #[arg(long)]
    top_k: Option<usize>,
    /// Keep the most probable tokens up to this sum of probabilities. Default: 1.
    #[arg(long)]
    top_p: Option<f32>,
    /// Keep tokens at least this probable relative to the best. Default: 0.
    #[arg(long)]
    min_p: Option<f32>,
    /// Seed of the draws. Default: another for every request.
    #[arg(long)]
    seed: Option<u64>,
}

/// The demo pair has no chat template: it continues text, and a chat with it is its messages, one behind the other.
const DEMO_TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
/// Of connections: what computes is the engine's.
const IO_THREADS: usize = 2;
/// Prompts that are tokenized at a time.
const TOKENIZER_THREADS: usize = 2;

fn main() -> ExitCode {
    foretoken_tools::run_service(serve)
}

fn serve(args: Args) -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(args.log_level).with_target(false).init();
    // A panic's message may contain what a client sent; its place does not.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        tracing::error!(place, "panic");
    }));
    let load = args.load.options(&args.drafting)?;
    let model = load.model.clone();
    let engine = Engine::load(&foretoken::EngineOptions { kv_memory: args.kv_memory, ..load })?;
    let options = options(&args, &engine, &model)?;
    let (host, has_key) = (args.host, !options.api_keys.is_empty());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .max_blocking_threads(TOKENIZER_THREADS)
        .enable_io()
        .enable_time()
        .build()?;
    runtime.block_on(async {
        let model = options.model.clone();
        let server = Server::bind(&engine, options).await?;
        if !host.is_loopback() && !has_key {
            tracing::warn!("whoever reaches {host} can use the server; give --api-key or --api-key-file");
        }
        let url = format!("http://{}", server.address());
        tracing::info!(url, model, context = server.context(), parallel = args.parallel, "listening");
        server.run(stop()?).await;
        tracing::info!("stopped");
        Ok(())
    })
}

fn options(args: &Args, engine: &Engine, model: &Path) -> Result<ServerOptions> {
    let is_demo = args.load.model.is_none();
    let file_name = model.file_stem().map_or_else(|| "gemma".into(), |name| name.to_string_lossy().into_owned());
    let named = if is_demo { "demo".into() } else { file_name };
    let template = match &args.chat_template_file {
        Some(path) => Some(std::fs::read_to_string(path).with_context(|| path.display().to_string())?),
        None => is_demo.then(|| DEMO_TEMPLATE.to_owned()),
    };
    let template = template.map(|source| ChatTemplate::new(source, "<bos>".into(), "<eos>".into())).transpose()?;
    let text = &args.text;
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
        defaults: GenerateDefaults {
            temperature: text.temperature,
            top_k: text.top_k,
            top_p: text.top_p,
            min_p: text.min_p,
            seed: text.seed,
            max_tokens: text.max_tokens,
            speculation: args.drafting.options(engine)?,
            logits_processor: None,
        },
        chat_template: template,
        api_keys: api_keys(args)?,
        allowed_hosts: args.allowed_host.clone(),
        max_connections: args.max_connections,
        idle_timeout: Duration::from_secs(args.idle_timeout),
        drain_timeout: Duration::from_secs(args.drain_timeout),
        ..ServerOptions::new(SocketAddr::new(args.host, args.port), args.alias.clone().unwrap_or(named))
    })
}

/// The keys of command line and file.
fn api_keys(args: &Args) -> Result<Vec<String>> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let file = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let before = keys.len();
        keys.extend(file.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
        // Without a key, everyone would be let in.
        ensure!(keys.len() > before, "{}: has no key; write one a line", path.display());
    }
    ensure!(keys.iter().all(|key| !key.is_empty()), "--api-key is empty; give a key, or leave it out");
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
    number.filter(|bytes| *bytes > 0).ok_or_else(|| format!("{text:?} is no number of bytes; write 2147483648 or 2G"))
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

/// Ready with Ctrl-C.
#[cfg(not(unix))]
fn stop() -> Result<impl Future<Output = ()>> {
    Ok(async {
        // Without the signal, the server runs until it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}
