//! Cells that llama.cpp's server computes, for comparison.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;
use serde_json::json;

use crate::Args;
use crate::journal::Run;
use crate::matrix::{Cell, Plan};
use crate::ours::checksum;

/// A server with a model; stopped on drop if it was started here.
pub struct Llama {
    agent: ureq::Agent,
    url: String,
    started: Option<Started>,
}

struct Started {
    server: Child,
    log: PathBuf,
}

/// The fields of the `/completion` response that are used.
#[derive(Deserialize)]
struct Reply {
    /// Missing in the responses of ik_llama.cpp's server.
    tokens: Option<Vec<u32>>,
    timings: Timings,
}

#[derive(Default, Deserialize)]
struct Timings {
    prompt_n: usize,
    prompt_ms: f64,
    predicted_n: usize,
    predicted_ms: f64,
    #[serde(default)]
    draft_n: usize,
    #[serde(default)]
    draft_n_accepted: usize,
}

impl Llama {
    /// Starts a server with the plan's target, or uses the running one, and waits until it is ready.
    pub fn new(args: &Args, plan: &Plan, arguments: &str) -> Result<Self> {
        let config = ureq::Agent::config_builder()
            .proxy(None)
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_global(Some(Duration::from_secs(3600)));
        let agent = ureq::Agent::from(config.build());
        let mut llama = match (&args.llama_server, &args.llama_url) {
            (Some(server), _) => {
                let (started, url) = start(server, args, plan, arguments)?;
                Self { agent, url, started: Some(started) }
            }
            (None, url) => {
                let url = url.as_deref().unwrap_or_default().trim_end_matches('/').to_owned();
                Self { agent, url, started: None }
            }
        };
        llama.wait()?;
        Ok(llama)
    }

    fn wait(&mut self) -> Result<()> {
        const LONGEST: Duration = Duration::from_secs(600);
        let (health, begin) = (format!("{}/health", self.url), Instant::now());
        loop {
            let Err(error) = self.agent.get(&health).call() else { return Ok(()) };
            // 503: the model is being loaded.
            let loading = matches!(error, ureq::Error::StatusCode(503));
            let ended = self.started.as_mut().is_some_and(|s| s.server.try_wait().is_ok_and(|status| status.is_some()));
            if ended || (self.started.is_none() && !loading) || begin.elapsed() > LONGEST {
                return Err(self.failed(&error));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Measures a cell once: every prompt, greedily.
    pub fn run(&mut self, cell: &Cell, prompts: &[Vec<u32>], plan: &Plan, run: usize) -> Result<Run> {
        let (mut all, mut written) = (Timings::default(), Vec::new());
        let mut decoded = 0;
        for prompt in prompts {
            let reply = self.complete(prompt, plan.setting.max_tokens)?;
            let t = &reply.timings;
            decoded += t.predicted_n.saturating_sub(1);
            all.prompt_n += t.prompt_n;
            all.prompt_ms += t.prompt_ms;
            all.predicted_ms += t.predicted_ms;
            all.draft_n += t.draft_n;
            all.draft_n_accepted += t.draft_n_accepted;
            written.extend(reply.tokens.as_deref().map(checksum));
        }
        // A round emits its accepted drafts and one more token.
        let rounds = decoded.saturating_sub(all.draft_n_accepted);
        let a_second = |count: usize, ms: f64| if ms > 0.0 { 1e3 * count as f64 / ms } else { 0.0 };
        Ok(Run {
            setting: plan.setting.clone(),
            cell: cell.clone(),
            run,
            // The server's timer starts after the first token, so it does not count.
            tokens_per_second: a_second(decoded, all.predicted_ms),
            prefill_tokens_per_second: a_second(all.prompt_n, all.prompt_ms),
            rounds,
            tokens_per_round: decoded as f64 / rounds.max(1) as f64,
            drafted: all.draft_n,
            accepted: all.draft_n_accepted,
            drafted_at: Vec::new(),
            accepted_at: Vec::new(),
            draft_ms: None,
            verify_ms: None,
            weights_gb_per_second: None,
            read_gb_per_second: None,
            kv_bytes: None,
            peak_rss_bytes: None,
            written,
        })
    }

    fn complete(&mut self, prompt: &[u32], tokens: usize) -> Result<Reply> {
        let request = json!({
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": true,
            "cache_prompt": false,
            "return_tokens": true,
        });
        let reply = self.agent.post(format!("{}/completion", self.url)).send_json(&request);
        let reply = reply.and_then(|mut reply| reply.body_mut().read_json::<Reply>()).map_err(|e| self.failed(&e))?;
        let got = reply.timings.predicted_n;
        ensure!(got == tokens, "llama.cpp's server at {}: got {got} tokens instead of {tokens}", self.url);
        Ok(reply)
    }

    /// The error, with the last line of the server log.
    fn failed(&mut self, error: &ureq::Error) -> anyhow::Error {
        let mut message = format!("llama.cpp's server at {}: {error}", self.url);
        if let Some(Started { server, log }) = &mut self.started {
            if let Ok(Some(status)) = server.try_wait() {
                message += &format!("; it exited ({status})");
            }
            let words = std::fs::read(&*log).unwrap_or_default();
            let words = String::from_utf8_lossy(&words);
            let last = words.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
            message += &format!("; last line of {}: {}", log.display(), last.trim());
        }
        anyhow!(message)
    }
}

impl Drop for Llama {
    fn drop(&mut self) {
        if let Some(Started { server, .. }) = &mut self.started {
            // It may already have exited.
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

fn start(path: &Path, args: &Args, plan: &Plan, arguments: &str) -> Result<(Started, String)> {
    // The port is free now; if another process takes it first, the server exits with an error in its log.
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr())?.port();
    let deepest = plan.cells.iter().map(|(cell, _)| cell.prompt.0).max().unwrap_or(0) + args.max_tokens;
    let number = args.llama_args.iter().position(|other| other == arguments).unwrap_or(0) + 1;
    let log = args.out.join(format!("llama-server-{number}.log"));
    let file = File::create(&log).with_context(|| log.display().to_string())?;
    let mut command = Command::new(path);
    command.arg("--model").arg(&plan.model).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
    // One sequence; drafts need positions after the last token.
    command.args(["--parallel", "1", "--ctx-size", &(deepest + 64).to_string()]);
    if let Some(threads) = args.threads {
        command.args(["--threads", &threads.to_string()]);
    }
    command.args(arguments.split_whitespace()).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let server = command.spawn().with_context(|| format!("{}: cannot be started", path.display()))?;
    Ok((Started { server, log }, format!("http://127.0.0.1:{port}")))
}
