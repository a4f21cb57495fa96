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

/// Decodes emitted tokens and detects stop conditions.
pub(crate) struct TextEnd {
    stop_tokens: Vec<u32>,
    stop_strings: Vec<String>,
    decoder: StreamDecoder,
    text: String,               // decoded, not emitted
    control: Vec<ControlToken>, // offsets in `text`
    pub ended: Option<FinishReason>,
}

impl TextEnd {
    pub fn new(stop: &Stop, end_of_generation: &[u32]) -> Self {
        let mut stop_tokens = stop.tokens.clone();
        if stop.end_of_generation == EndOfGeneration::Stops {
            stop_tokens.extend(end_of_generation);
        }
        let stop_strings = stop.strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self {
            stop_tokens,
            stop_strings,
            decoder: StreamDecoder::default(),
            text: String::new(),
            control: Vec::new(),
            ended: None,
        }
    }

    /// Decodes an emitted token; returns whether the text ends with it.
    pub fn push(&mut self, tokenizer: Option<&Tokenizer>, token: u32) -> Result<bool> {
        if let Some(tokenizer) = tokenizer {
            if tokenizer.is_control(token) {
                // Bytes of a character before it are not completed by bytes after it.
                self.text += &self.decoder.finish(tokenizer)?;
            }
            self.text += &self.decoder.push(tokenizer, token)?;
            if tokenizer.is_control(token) {
                self.control.push(ControlToken { id: token, at: self.text.len() });
            }
        }
        let found = self.stop_strings.iter().filter_map(|stop| self.text.find(stop)).min();
        if let Some(at) = found {
            self.text.truncate(at);
            self.control.retain(|control| control.at <= at);
            // What the decoder still holds comes after the stop string.
            self.decoder = StreamDecoder::default();
        }
        self.ended = match found {
            Some(_) => Some(FinishReason::StopString),
            None => self.stop_tokens.contains(&token).then_some(FinishReason::EndOfText),
        };
        Ok(self.ended.is_some())
    }

    /// The text that can be emitted, and its control tokens: everything at the end, else all but a possible prefix of a stop
    /// string.
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
        let keep = (0..self.text.len()).filter(|at| self.text.is_char_boundary(*at)).find(begins);
        let keep = keep.unwrap_or(self.text.len());
        let rest = self.text.split_off(keep);
        let (taken, mut held): (Vec<_>, Vec<_>) = self.control.iter().partition(|control| control.at <= keep);
        held.iter_mut().for_each(|control: &mut ControlToken| control.at -= keep);
        self.control = held;
        Ok((std::mem::replace(&mut self.text, rest), taken))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A control token within the bytes of a character: it stands after what was begun, and later bytes do not complete it.
    #[test]
    fn a_control_token_ends_a_character() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
        let tokenizer = Tokenizer::read(&path, 4096).expect("the demo model's");
        let id = |piece: &str| tokenizer.id(piece).expect("in the vocabulary");
        let mut end = TextEnd::new(&Stop::default(), &[]);
        for piece in ["<0xE2>", "<|channel>", "<0x82>", "<0xAC>"] {
            assert!(!end.push(Some(&tokenizer), id(piece)).expect("a token"));
        }
        let (text, control) = end.take(Some(&tokenizer), Some(FinishReason::MaxTokens)).expect("text");
        assert!(text.starts_with('\u{fffd}') && !text.contains('\u{20ac}'), "{text:?}");
        let at: Vec<_> = control.iter().map(|control| (control.id, control.at)).collect();
        assert_eq!(at, [(id("<|channel>"), '\u{fffd}'.len_utf8())]);
    }
}
