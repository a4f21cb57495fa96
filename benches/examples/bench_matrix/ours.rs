//! Cells computed by foretoken.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::journal::{Run, Turn};
use crate::matrix::{Cell, Plan, Prompt};
use crate::{Args, machine, texts};
use anyhow::{Context, Result};
use foretoken::kv::KvOptions;
use foretoken::{
    EndOfGeneration, Engine, EngineOptions, GenerateOptions, Session, SessionOptions, Speculation, Statistics, Stop,
};
use foretoken_tools::{eprintln, measure, report};
use tempfile::TempDir;

/// Longer prompts are read once, and every cell continues from the saved session: reading 32 K tokens
/// takes longer than all measurements after them.
const DEEP: usize = 1024;

/// The directory of the saved sessions.
const SESSIONS: &str = "sessions.partial";

/// Row counts of v(B), measurements of each, and their depth.
const ROWS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
const REPEATS: usize = 3;
const BEHIND: usize = 64;

/// A loaded pair, its prompts, and the sessions that have read the deep ones.
pub struct Ours<'a> {
    args: &'a Args,
    plan: &'a Plan,
    text: &'a str,
    engine: Engine,
    prompts: HashMap<usize, Vec<Vec<u32>>>, // by their length
    folder: TempDir,
    deep: HashMap<(usize, usize, String), (PathBuf, f64)>, // tokens, index, K/V: the session and its prefill in tokens/s
}

impl<'a> Ours<'a> {
    /// Loads the pair.
    pub fn load(args: &'a Args, plan: &'a Plan, text: &'a str) -> Result<Self> {
        let engine = Engine::load(&EngineOptions {
            assistant: plan.assistant.clone(),
            threads: args.threads,
            isa: args.isa,
            quantize: args.quantize,
            ..EngineOptions::new(&plan.model)
        })?;
        // Of an interrupted run. No running one uses them: it would hold the journal's lock.
        let _ = std::fs::remove_dir_all(args.out.join(SESSIONS));
        let folder = tempfile::Builder::new().prefix(SESSIONS).rand_bytes(0).tempdir_in(&args.out);
        let folder = folder.with_context(|| format!("{}: a folder for sessions", args.out.display()))?;
        Ok(Self { args, plan, text, engine, prompts: HashMap::new(), folder, deep: HashMap::new() })
    }

    /// The ids of every prompt of a length.
    pub fn prompts(&mut self, prompt: Prompt) -> Result<Vec<Vec<u32>>> {
        if let Some(known) = self.prompts.get(&prompt.0) {
            return Ok(known.clone());
        }
        let prompts = texts::prompts(&self.engine, self.text, prompt, self.args.texts)?;
        Ok(self.prompts.entry(prompt.0).or_insert(prompts).clone())
    }

    /// Current bandwidth and cost of passes. Also a warm-up of packed weights, threads, and the processor's clock.
    pub fn turn(&self, run: usize) -> Result<Turn> {
        let curve = measure::curve(&self.engine, BEHIND, &ROWS, REPEATS)?;
        Ok(Turn {
            setting: self.plan.setting.clone(),
            run,
            threads: self.engine.threads(),
            read_gb_per_second: measure::read_bandwidth(&self.engine),
            step_bytes: self.engine.target().step_cost().bytes,
            verify_ms: curve.verify,
            draft_ms: curve.draft,
        })
    }

    /// Measures a cell once.
    pub fn run(&mut self, cell: &Cell, kv: &KvOptions, speculation: &Speculation, turn: &Turn) -> Result<Run> {
        let prompts = self.prompts(cell.prompt)?;
        let (mut all, mut written, mut kv_bytes, mut deep) = (Statistics::default(), Vec::new(), 0, None);
        machine::forget_peak();
        for (index, prompt) in prompts.iter().enumerate() {
            let (mut session, rest, prefill) = self.session(cell, index, prompt, kv)?;
            deep = deep.or(prefill);
            let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
            let options = GenerateOptions {
                max_tokens: self.args.max_tokens,
                // For simulated acceptance.
                seed: index as u64,
                speculation: speculation.clone(),
                simulate_acceptance: self.args.simulate_acceptance.clone(),
                stop,
                ..GenerateOptions::default()
            };
            let (ids, statistics) = measure::generate(&mut session, rest, &options)?;
            all.add(&statistics);
            kv_bytes = session.kv().bytes();
            written.push(checksum(&ids));
        }
        let read = (turn.step_bytes * all.rounds) as f64 / 1e9;
        let a_round = |time: std::time::Duration| 1e3 * time.as_secs_f64() / all.rounds.max(1) as f64;
        Ok(Run {
            setting: self.plan.setting.clone(),
            cell: cell.clone(),
            run: turn.run,
            tokens_per_second: all.decode_tokens_per_second(),
            prefill_tokens_per_second: deep.unwrap_or_else(|| all.prefill_tokens_per_second()),
            rounds: all.rounds,
            tokens_per_round: all.tokens_per_round(),
            drafted: all.drafted,
            accepted: all.accepted,
            draft_ms: Some(a_round(all.speculation.draft)),
            verify_ms: Some(a_round(all.speculation.verify)),
            weights_gb_per_second: Some(read / all.speculation.verify.as_secs_f64().max(1e-9)),
            read_gb_per_second: turn.read_gb_per_second,
            kv_bytes: Some(kv_bytes),
            peak_rss_bytes: report::peak_rss_bytes(),
            drafted_at: all.drafted_at,
            accepted_at: all.accepted_at,
            written,
        })
    }

    /// A session, the unread part of the prompt, and the prefill speed if the rest was read before.
    fn session<'p>(
        &mut self,
        cell: &Cell,
        index: usize,
        prompt: &'p [u32],
        kv: &KvOptions,
    ) -> Result<(Session, &'p [u32], Option<f64>)> {
        let options = SessionOptions { kv: kv.clone() };
        if prompt.len() <= DEEP {
            return Ok((self.engine.session(&options)?, prompt, None));
        }
        let (before, last) = prompt.split_at(prompt.len() - 1);
        let key = (prompt.len(), index, cell.kv.clone());
        if !self.deep.contains_key(&key) {
            eprintln!("reading {} tokens once, K/V {}", prompt.len(), cell.kv);
            let mut session = self.engine.session(&options)?;
            // Zero tokens: the saved session holds the prompt only.
            let nothing =
                GenerateOptions { max_tokens: 0, speculation: Speculation::Off, ..GenerateOptions::default() };
            let speed = session.generate(before, &nothing)?.statistics().prefill_tokens_per_second();
            let path = self.folder.path().join(format!("session-{}", self.deep.len()));
            session.save(&path)?;
            self.deep.insert(key.clone(), (path, speed));
        }
        let (path, speed) = &self.deep[&key];
        Ok((self.engine.load_session(path)?, last, Some(*speed)))
    }
}

/// Identifies a text.
pub fn checksum(ids: &[u32]) -> u32 {
    crc32fast::hash(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>())
}
