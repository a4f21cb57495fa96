//! Stop conditions and incremental detokenization.

use crate::Result;
use crate::options::{EndOfGeneration, Stop};
use crate::piece::ControlToken;
use crate::tokenizer::{StreamDecoder, Tokenizer};

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// A token that ends the text.
    EndOfText,
    /// A string that ends the text.
    StopString,
    /// The constraint allows no further token.
    Constraint,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The context is full.
    Context,
    /// The generation was cancelled.
    Cancelled,
    /// An error, which was reported.
    Error,
}

impl FinishReason {
    /// Its name in traces and in the commands' JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfText => "end_of_text",
            Self::StopString => "stop_string",
            Self::Constraint => "constraint",
            Self::MaxTokens => "max_tokens",
            Self::Context => "context",
            Self::Cancelled => "cancelled",
            Self::Error => "error",
        }
    }
}

/// Decodes emitted tokens and detects stop conditions.
pub(crate) struct Detokenizer {
    stop_tokens: Vec<u32>,
    stop_strings: Vec<String>,
    /// Tokens whose text may have stop strings, and the bytes of `text` that are theirs.
    unsearched_tokens: usize,
    unsearched: usize,
    decoder: StreamDecoder,
    text: String,               // decoded, not emitted
    control: Vec<ControlToken>, // offsets in `text`
    pub ended: Option<FinishReason>,
}

impl Detokenizer {
    pub fn new(stop: &Stop, end_of_generation: &[u32]) -> Self {
        let mut stop_tokens = stop.tokens.clone();
        if stop.end_of_generation == EndOfGeneration::Stops {
            stop_tokens.extend(end_of_generation);
        }
        let stop_strings = stop.strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self {
            stop_tokens,
            stop_strings,
            unsearched_tokens: stop.min_tokens,
            unsearched: 0,
            decoder: StreamDecoder::default(),
            text: String::new(),
            control: Vec::new(),
            ended: None,
        }
    }

    /// Decodes an emitted token; returns whether the text ends with it. A stop token's text is not part of it, but the
    /// token is among the control tokens: a reply's syntax may know it (`</tool_call>`).
    pub fn push(&mut self, tokenizer: Option<&Tokenizer>, token: u32) -> Result<bool> {
        let stops = self.stop_tokens.contains(&token);
        if let Some(tokenizer) = tokenizer {
            let is_separate = stops || tokenizer.is_control(token);
            if is_separate {
                // Bytes of a character before it are not completed by bytes after it.
                self.text += &self.decoder.finish(tokenizer)?;
            }
            if !stops {
                self.text += &self.decoder.push(tokenizer, token)?;
            }
            if is_separate {
                self.control.push(ControlToken { id: token, at: self.text.len() });
            }
        }
        if self.unsearched_tokens > 0 {
            self.unsearched_tokens -= 1;
            self.unsearched = self.text.len();
        }
        let found = self.find();
        if let Some(at) = found {
            self.text.truncate(at);
            self.control.retain(|control| control.at <= at);
            // What the decoder still holds comes after the stop string.
            self.decoder = StreamDecoder::default();
        }
        self.ended = match found {
            Some(_) => Some(FinishReason::StopString),
            None => stops.then_some(FinishReason::EndOfText),
        };
        Ok(self.ended.is_some())
    }

    /// Where the first stop string begins that ends after the text that is not searched. None has a control token
    /// within it: the texts on both sides are separate.
    fn find(&self) -> Option<usize> {
        let ends = self.control.iter().map(|control| control.at).chain([self.text.len()]);
        let mut begin = 0;
        let mut parts = ends.map(|end| (std::mem::replace(&mut begin, end), end));
        parts.find_map(|(begin, end)| {
            let part = &self.text[begin..end];
            let find = |stop: &String| find_ending_after(part, stop, self.unsearched.saturating_sub(begin));
            self.stop_strings.iter().filter_map(find).min().map(|at| begin + at)
        })
    }

    /// The text that can be emitted, and its control tokens: everything at the end, else all but a possible prefix of a
    /// stop string, which no control token follows.
    pub fn take(
        &mut self,
        tokenizer: Option<&Tokenizer>,
        finish: Option<FinishReason>,
    ) -> Result<(String, Vec<ControlToken>)> {
        if finish.is_some() {
            if let Some(tokenizer) = tokenizer {
                self.text += &self.decoder.finish(tokenizer)?;
            }
            return Ok((std::mem::take(&mut self.text), std::mem::take(&mut self.control)));
        }
        let begins = |at: &usize| {
            let rest = &self.text[*at..];
            self.stop_strings.iter().any(|stop| stop.starts_with(rest))
        };
        let begin = self.control.last().map_or(0, |control| control.at);
        let keep = (begin..self.text.len()).filter(|at| self.text.is_char_boundary(*at)).find(begins);
        let keep = keep.unwrap_or(self.text.len());
        let rest = self.text.split_off(keep);
        self.unsearched = self.unsearched.saturating_sub(keep);
        Ok((std::mem::replace(&mut self.text, rest), std::mem::take(&mut self.control)))
    }
}

/// Where `stop` first begins in `text`, so that it ends after the first `bytes`.
fn find_ending_after(text: &str, stop: &str, bytes: usize) -> Option<usize> {
    let from = text.ceil_char_boundary((bytes + 1).saturating_sub(stop.len()));
    let text = &text[from..];
    // A search begins with time for all of `stop`, which may be far longer than a token's text.
    if text.len() < stop.len() { None } else { text.find(stop).map(|at| from + at) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer() -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
        Tokenizer::read(path, 4096).expect("the demo model's")
    }

    /// The reason declared after `reason`: a new one does not compile until it has a place here.
    fn next(reason: Option<FinishReason>) -> Option<FinishReason> {
        use FinishReason as R;
        match reason {
            None => Some(R::EndOfText),
            Some(R::EndOfText) => Some(R::StopString),
            Some(R::StopString) => Some(R::Constraint),
            Some(R::Constraint) => Some(R::MaxTokens),
            Some(R::MaxTokens) => Some(R::Context),
            Some(R::Context) => Some(R::Cancelled),
            Some(R::Cancelled) => Some(R::Error),
            Some(R::Error) => None,
        }
    }

    #[test]
    fn the_reasons_of_an_end_are_documented() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/commands.md");
        let page = std::fs::read_to_string(path).expect("the page");
        let (_, section) = page.split_once("### finish_reason\n").expect("the section");
        let lines = section.lines().take_while(|line| !line.starts_with('#'));
        let documented: Vec<_> = lines.filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
        let reasons = std::iter::successors(next(None), |reason| next(Some(*reason)));
        assert_eq!(documented, reasons.map(FinishReason::name).collect::<Vec<_>>());
    }

    /// A stop string is not found across a control token, before which nothing is held back.
    #[test]
    fn a_stop_string_has_no_control_token_within_it() {
        let tokenizer = tokenizer();
        let stop = Stop { strings: vec!["nan".into(), "}z".into()], ..Stop::default() };
        for (text, want, stops) in [
            ("xn<|channel>an", "xn|an", false),
            ("xna<|channel>n<channel|>y", "xna|n|y", false),
            ("{}<|channel>z", "{}|z", false),
            ("x<|channel>nany", "x|", true),
            ("xn<|channel>{}zy", "xn|{", true),
            ("xna<|channel>", "xna|", false),
        ] {
            for taken_at_once in [1, 2, 100] {
                let (written, finish) = write(&tokenizer, &stop, text, taken_at_once);
                let stopped = finish == Some(FinishReason::StopString);
                assert_eq!((written.as_str(), stopped), (want, stops), "{text:?}, {taken_at_once} at a time");
            }
        }
    }

    /// A stop string that ends within the text of the first tokens is text. One that only begins there ends the text.
    #[test]
    fn the_first_tokens_may_have_stop_strings() {
        let tokenizer = tokenizer();
        for (text, min_tokens, want, stops) in [
            ("xabyabz", 0, "x", true),
            ("xabyabz", 2, "x", true),
            ("xabyabz", 3, "xaby", true),
            ("xabyabz", 6, "xabyabz", false),
            ("aaaz", 2, "a", true),
            ("xab<|channel>abz", 3, "xab|", true),
            ("xab<|channel>abz", 5, "xab|", true),
            ("xab<|channel>abz", 6, "xab|abz", false),
        ] {
            let strings = if text.starts_with('a') { vec!["aa".into()] } else { vec!["ab".into()] };
            let stop = Stop { strings, min_tokens, ..Stop::default() };
            for taken_at_once in [1, 2, 3, 100] {
                let (written, finish) = write(&tokenizer, &stop, text, taken_at_once);
                let stopped = finish == Some(FinishReason::StopString);
                assert_eq!((written.as_str(), stopped), (want, stops), "{text:?}, {min_tokens}, {taken_at_once}");
            }
        }
    }

    /// The text that is emitted, with `|` for control tokens, and how it ended by itself.
    fn write(tokenizer: &Tokenizer, stop: &Stop, text: &str, taken_at_once: usize) -> (String, Option<FinishReason>) {
        let (mut end, mut written) = (Detokenizer::new(stop, &[]), String::new());
        for round in ids(tokenizer, text).chunks(taken_at_once) {
            let ends = round.iter().any(|token| end.push(Some(tokenizer), *token).expect("a token"));
            let (mut text, control) = end.take(Some(tokenizer), end.ended).expect("text");
            let is_last_control = round.last().is_some_and(|token| tokenizer.is_control(*token));
            assert!(ends || !is_last_control || end.text.is_empty(), "held: {:?}", end.text);
            control.iter().rev().for_each(|control| text.insert(control.at, '|'));
            written += &text;
            if ends {
                break;
            }
        }
        written += &end.take(Some(tokenizer), Some(FinishReason::MaxTokens)).expect("text").0;
        (written, end.ended)
    }

    /// The text's control tokens, by their names, and one token for each other character.
    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let id = |c: char| tokenizer.id(&c.to_string()).expect("in the vocabulary");
        let parts = tokenizer.control_names().split(text).into_iter();
        parts.flat_map(|(text, control)| text.chars().map(id).chain(control).collect::<Vec<_>>()).collect()
    }

    /// A stop token that is ordinary text: its text is not part of the text, its id is known.
    #[test]
    fn a_stop_token_that_is_text_is_among_the_control_tokens() {
        let tokenizer = tokenizer();
        let [a, stop] = ["a", "z"].map(|piece| tokenizer.id(piece).expect("in the vocabulary"));
        let half = tokenizer.id("<0xE2>").expect("in the vocabulary");
        for (before, text) in [(vec![a], "a"), (vec![a, half], "a\u{fffd}"), (vec![], "")] {
            let mut end = Detokenizer::new(&Stop { tokens: vec![stop], ..Stop::default() }, &[]);
            assert!(!before.iter().any(|token| end.push(Some(&tokenizer), *token).expect("a token")));
            assert!(end.push(Some(&tokenizer), stop).expect("a token"));
            let (written, control) = end.take(Some(&tokenizer), end.ended).expect("text");
            assert_eq!(written, text);
            assert_eq!(control, [ControlToken { id: stop, at: text.len() }]);
        }
    }

    /// A control token within the bytes of a character: it stands after what was begun, and later
    /// bytes do not complete it.
    #[test]
    fn a_control_token_ends_a_character() {
        let tokenizer = tokenizer();
        let id = |piece: &str| tokenizer.id(piece).expect("in the vocabulary");
        let mut end = Detokenizer::new(&Stop::default(), &[]);
        for piece in ["<0xE2>", "<|channel>", "<0x82>", "<0xAC>"] {
            assert!(!end.push(Some(&tokenizer), id(piece)).expect("a token"));
        }
        let (text, control) = end.take(Some(&tokenizer), Some(FinishReason::MaxTokens)).expect("text");
        assert!(text.starts_with('\u{fffd}') && !text.contains('\u{20ac}'), "{text:?}");
        let at: Vec<_> = control.iter().map(|control| (control.id, control.at)).collect();
        assert_eq!(at, [(id("<|channel>"), '\u{fffd}'.len_utf8())]);
    }
}
