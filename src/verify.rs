//! Checks a target, an assistant, or a pair. All checks run, independent of each other; a failed
//! one names the tensor or field and the remedy.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use foretoken_kernels::quant::WeightType;
use rayon::prelude::*;
use serde::Serialize;

use crate::checkpoint::{
    Architecture, Checkpoint, Expected, Kind, RawTensor, TensorType, is_unneeded, survey, token_ordering,
};
use crate::gemma4::{AssistantConfig, check_pair, implied_of_assistant, is_assistants_table};
use crate::{
    Engine, EngineOptions, Error, GenerateOptions, Result, SessionOptions, Speculation, SpeculationOptions, family,
};

/// What to verify.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyOptions {
    /// The target's checkpoint.
    pub target: Option<PathBuf>,
    /// The assistant's.
    pub assistant: Option<PathBuf>,
    /// Prompt of the smoke run, if there is a tokenizer. Default: a few words.
    pub prompt: Option<String>,
    /// Threads of the smoke run. Default: as [`EngineOptions::threads`].
    pub threads: Option<usize>,
}

/// The subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// The target.
    Target,
    /// The assistant.
    Assistant,
    /// Both together.
    Pair,
}

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Passed.
    Passed,
    /// Works, with a warning.
    Warned,
    /// Failed.
    Failed,
}

/// A check, or one finding of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its subject.
    pub part: Part,
    /// Its name.
    pub check: &'static str,
    /// Its outcome.
    pub outcome: Outcome,
    /// The finding; if failed, the tensor or field and the remedy.
    pub detail: String,
}

/// Runs every check that the checkpoints allow. Reads all weights.
pub fn verify(options: &VerifyOptions) -> Vec<Finding> {
    let mut report = Report::default();
    let target = options.target.as_deref().and_then(|path| report.target(path));
    let assistant = options.assistant.as_deref().and_then(|path| report.assistant(path));
    if let (Some((target, vocab_size)), Some((assistant, own))) = (&target, &assistant) {
        report.pair(target, own);
        report.tokenizers(target, assistant, *vocab_size);
    }
    // A model that failed a check is not run.
    if let Some(path) = options.target.as_deref().filter(|_| report.sound()) {
        report.smoke(path, options);
    }
    report.0
}

#[derive(Default)]
struct Report(Vec<Finding>);

impl Report {
    fn sound(&self) -> bool {
        self.0.iter().all(|finding| finding.outcome != Outcome::Failed)
    }

    fn add(&mut self, part: Part, check: &'static str, outcome: Outcome, detail: impl Into<String>) {
        self.0.push(Finding { part, check, outcome, detail: detail.into() });
    }

    /// Records the check and returns its value.
    fn note<T>(
        &mut self,
        part: Part,
        check: &'static str,
        result: Result<T>,
        passed: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        match result {
            Ok(value) => {
                self.add(part, check, Outcome::Passed, passed(&value));
                Some(value)
            }
            Err(error) => {
                self.add(part, check, Outcome::Failed, error.to_string());
                None
            }
        }
    }

    /// The target, and the size of its vocabulary.
    fn target(&mut self, path: &Path) -> Option<(Checkpoint, usize)> {
        let part = Part::Target;
        let checkpoint = self.note(part, "file", Checkpoint::open(path), opened)?;
        let implied = self.note(part, "configuration", family::implied(&checkpoint), |of| of.summary.clone())?;
        let prefix = |prefix: &&str| match *prefix {
            "" => "have no prefix".to_owned(),
            prefix => format!("begin with {prefix:?}"),
        };
        self.note(part, "names", checkpoint.text_prefix(), prefix)?;
        let scales = self.tensors(part, &checkpoint, &implied.tensors, None);
        self.unused(part, &checkpoint, &implied.tensors, |name| scales.contains(name) || (implied.is_known)(name));
        self.tokenizer(part, &checkpoint, implied.vocab_size);
        Some((checkpoint, implied.vocab_size))
    }

    fn assistant(&mut self, path: &Path) -> Option<(Checkpoint, AssistantConfig)> {
        let part = Part::Assistant;
        let checkpoint = self.note(part, "file", Checkpoint::open_assistant(path), opened)?;
        let config = self.note(part, "configuration", checkpoint.assistant_config(), |config| {
            format!("{} layers, made for a hidden size of {}", config.text.layers.len(), config.backbone_hidden_size)
        })?;
        let expected = implied_of_assistant(&config);
        let scales = self.tensors(part, &checkpoint, &expected, Some(&config));
        self.unused(part, &checkpoint, &expected, |name| scales.contains(name) || is_assistants_table(name));
        self.tokenizer(part, &checkpoint, config.text.vocab_size);
        Some((checkpoint, config))
    }

    /// Checks presence, shape, type and values of every tensor. Returns the names of the separate scales of those that
    /// are sound.
    fn tensors(
        &mut self,
        part: Part,
        checkpoint: &Checkpoint,
        expected: &[Expected],
        of: Option<&AssistantConfig>,
    ) -> BTreeSet<String> {
        let examined = expected.par_iter().map(|expected| (expected, examine(checkpoint, expected, of)));
        let examined: Vec<_> = examined.collect();
        for (check, matches) in [("tensors", false), ("token_ordering", true)] {
            let of_check = || examined.iter().filter(|(expected, _)| (expected.kind == Kind::Ordering) == matches);
            let mut failed = 0;
            for (expected, problem) in of_check().filter_map(|(of, examined)| Some((of, examined.as_ref().err()?))) {
                let error = Error::Tensor {
                    path: checkpoint.path().to_owned(),
                    tensor: expected.name.clone(),
                    problem: problem.clone(),
                };
                self.add(part, check, Outcome::Failed, error.to_string());
                failed += 1;
            }
            let count = of_check().count();
            if failed == 0 && count > 0 {
                let what = if matches { "is a permutation".into() } else { format!("all valid: {count}") };
                self.add(part, check, Outcome::Passed, what);
            }
        }
        examined.into_iter().filter_map(|(_, scales)| scales.ok()).flatten().collect()
    }

    fn unused(&mut self, part: Part, checkpoint: &Checkpoint, expected: &[Expected], known: impl Fn(&str) -> bool) {
        let expected: BTreeSet<&str> = expected.iter().map(|tensor| tensor.name.as_str()).collect();
        let mut unused = checkpoint.names();
        unused.retain(|name| {
            // GGUF names lack `model.`; `rope_freqs` exists in GGUF only and is checked against the configuration.
            let is_expected = expected.contains(name.as_str()) || expected.contains(format!("model.{name}").as_str());
            !is_expected && name != "rope_freqs.weight" && !is_unneeded(name) && !known(name)
        });
        match unused.is_empty() {
            true => self.add(part, "unused", Outcome::Passed, "no unused tensors"),
            false => {
                let detail = format!("no module uses {}", unused.join(", "));
                self.add(part, "unused", Outcome::Warned, detail);
            }
        }
    }

    fn tokenizer(&mut self, part: Part, checkpoint: &Checkpoint, vocab_size: usize) {
        match checkpoint.tokenizer(vocab_size) {
            Ok(Some(_)) => self.add(part, "tokenizer", Outcome::Passed, "fits the vocabulary"),
            // An assistant reads its target's tokens.
            Ok(None) if part == Part::Assistant => {}
            Ok(None) => self.add(part, "tokenizer", Outcome::Warned, "is missing; only token ids can be used"),
            Err(error) => self.add(part, "tokenizer", Outcome::Failed, error.to_string()),
        }
    }

    fn pair(&mut self, target: &Checkpoint, assistant: &AssistantConfig) {
        let config = target.model_type().and_then(|name| match Architecture::of(&name).takes_assistants() {
            true => target.target_config(),
            false => Err(family::not_implemented("assistant", "omit it", target)),
        });
        let donors = config.and_then(|config| check_pair(assistant, &config));
        self.note(Part::Pair, "fit", donors, |donors| {
            format!("the assistant's layers read K and V of the target's layers {donors:?}")
        });
    }

    /// Compares the tokenizers of both, if both have one.
    fn tokenizers(&mut self, target: &Checkpoint, assistant: &Checkpoint, vocab_size: usize) {
        let of = |checkpoint: &Checkpoint| checkpoint.tokenizer(vocab_size).ok().flatten();
        let Some((a, b)) = of(target).zip(of(assistant)) else { return };
        let differs = (0..vocab_size as u32).find(|id| a.token(*id) != b.token(*id));
        match differs {
            None => self.add(Part::Pair, "tokenizers", Outcome::Passed, "have the same tokens"),
            Some(id) => {
                let token = |tokenizer: &crate::tokenizer::Tokenizer| tokenizer.token(id).unwrap_or("absent".into());
                let problem =
                    format!("token {id} is {:?} in the assistant's, {:?} in the target's", token(&b), token(&a));
                let remedy = "load the assistant published for this target";
                self.add(Part::Pair, "tokenizers", Outcome::Failed, format!("{problem}; {remedy}"));
            }
        }
    }

    /// Continues one prompt, with drafts if there is an assistant.
    fn smoke(&mut self, model: &Path, options: &VerifyOptions) {
        let part = if options.assistant.is_some() { Part::Pair } else { Part::Target };
        let run = || {
            let (assistant, threads) = (options.assistant.clone(), options.threads);
            let load = EngineOptions { assistant, threads, ..EngineOptions::new(model) };
            let engine = Engine::load(&load)?;
            let prompt = match engine.tokenizer() {
                Ok(tokenizer) => tokenizer.encode(options.prompt.as_deref().unwrap_or("The quick brown fox"))?,
                Err(_) => engine.target().bos_token_id().into_iter().chain(3..8).collect(),
            };
            // Fixed blocks: the planner would stop using a useless drafter.
            let speculation =
                if engine.has_mtp() { Speculation::With(SpeculationOptions::mtp(4)) } else { Speculation::Off };
            let generate = GenerateOptions { max_tokens: SMOKE_TOKENS, speculation, ..GenerateOptions::default() };
            let mut session = engine.session(&SessionOptions::default())?;
            let mut generation = session.generate(&prompt, &generate)?;
            generation.by_ref().try_for_each(|piece| piece.map(drop))?;
            Ok(generation.statistics().clone())
        };
        let Some(statistics) = self.note(part, "smoke run", run(), |s| format!("tokens: {}", s.generated_tokens))
        else {
            return;
        };
        if statistics.drafted > 0 {
            let rate = statistics.acceptance_rate();
            let detail = format!("{:.0} % accepted, drafts: {}", 100.0 * rate, statistics.drafted);
            match rate < POOR_ACCEPTANCE {
                true => {
                    let detail = format!(
                        "{detail}; if other prompts are no better, this is probably another target's assistant"
                    );
                    self.add(part, "acceptance", Outcome::Warned, detail);
                }
                false => self.add(part, "acceptance", Outcome::Passed, detail),
            }
        }
    }
}

/// Tokens of the smoke run.
const SMOKE_TOKENS: usize = 32;
/// Acceptance rate below which an assistant is assumed to be another target's.
const POOR_ACCEPTANCE: f64 = 0.1;

fn opened(checkpoint: &Checkpoint) -> String {
    format!("tensors: {}, bytes: {}", checkpoint.names().len(), checkpoint.bytes())
}

/// The names of a tensor's separate scales, or its problem.
fn examine(
    checkpoint: &Checkpoint,
    expected: &Expected,
    assistant: Option<&AssistantConfig>,
) -> Result<Vec<String>, String> {
    let tensor = match checkpoint.get(&expected.name) {
        Ok(Some(tensor)) => tensor,
        Ok(None) => return Err("is missing; download or convert the checkpoint again".into()),
        Err(Error::Tensor { problem, .. }) => return Err(problem),
        Err(error) => return Err(error.to_string()),
    };
    if !checkpoint.is_shape(&tensor.shape, &expected.shape) {
        return Err(wrong_shape(expected, &tensor, assistant));
    }
    if expected.kind == Kind::Ordering {
        return token_ordering(&tensor).map(|_| Vec::new());
    }
    match (expected.kind, tensor.dtype) {
        (_, TensorType::Float(_)) | (Kind::Matrix | Kind::Table, TensorType::Quantized(_)) => {}
        (Kind::Matrix | Kind::Table, other) => {
            return Err(format!("is {}, which is not supported; quantize it to another type", other.name()));
        }
        (_, other) => {
            return Err(format!(
                "is {}, must be floating point; convert or quantize the checkpoint again",
                other.name()
            ));
        }
    }
    let remedy = "download or convert the checkpoint again";
    let Some(survey) = survey(&tensor) else {
        return Err(format!("is not as long as its shape and type imply; {remedy}"));
    };
    if !survey.finite {
        return Err(format!("contains NaN or infinity; {remedy}"));
    }
    let dead = expected.kind == Kind::Gain || expected.name.ends_with("embed_tokens.weight");
    if survey.zero && dead {
        return Err(format!("is all zeros; {remedy}"));
    }
    scales(checkpoint, expected, &tensor)
}

/// The names of the separate scales of an NVFP4 matrix in a GGUF file, or the problem with one.
fn scales(checkpoint: &Checkpoint, expected: &Expected, tensor: &RawTensor) -> Result<Vec<String>, String> {
    let is_scaled = expected.kind == Kind::Matrix && tensor.dtype == TensorType::Quantized(WeightType::NVFP4);
    let Some(gguf) = checkpoint.gguf().filter(|_| is_scaled) else { return Ok(Vec::new()) };
    let count = if let [count, _, _] = expected.shape[..] { count } else { 1 };
    // Assistants' tensors are listed by their safetensors prefix.
    let name = expected.name.strip_prefix("model.").unwrap_or(&expected.name);
    match gguf.scales(name, count) {
        Ok(scales) => Ok(scales.tensors),
        Err(Error::Tensor { tensor, problem, .. }) => Err(format!("has the scale {tensor}, which {problem}")),
        Err(error) => Err(error.to_string()),
    }
}

/// The shape error of a tensor. An old converter wrote the target's embedding, with the target's
/// width, into assistants.
fn wrong_shape(expected: &Expected, tensor: &RawTensor, assistant: Option<&AssistantConfig>) -> String {
    let shapes = format!("has shape {:?}, the configuration implies {:?}", tensor.shape, expected.shape);
    let backbone = assistant.map(|config| config.backbone_hidden_size);
    let is_embedding = expected.name.ends_with("embed_tokens.weight");
    match is_embedding && tensor.shape.last().copied() == backbone {
        true => format!("{shapes}: it is the target's, a bug of an old converter; convert the assistant again"),
        false => format!("{shapes}; convert the checkpoint again"),
    }
}
