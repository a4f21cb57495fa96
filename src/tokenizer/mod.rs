//! Text to tokens, and streaming decoding of tokens to text.

mod bpe;
pub(crate) mod control_names;
mod file;
mod vocabulary;

use std::fmt::Display;
use std::path::Path;

use tokenizers::{AddedVocabulary, Encoding, Model, OffsetType, PreTokenizer, Token};

use crate::checkpoint::{refuse_placeholder, regular_file};
use crate::{Error, Result};
pub use bpe::{Bpe, BpeTokenizer};
pub(crate) use bpe::{BpeOptions, Merges};
use control_names::ControlNames;
pub(crate) use file::Tokens;
pub(crate) use vocabulary::{Repeated, Vocabulary};

/// A checkpoint's tokenizer.
pub struct Tokenizer {
    inner: BpeTokenizer,
    bos: Option<u32>,
    control: ControlNames,
    /// The added tokens, control tokens not matched.
    text_only: AddedVocabulary,
    spelling: Spelling,
    longest: usize,
}

/// How the vocabulary spells a text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// Spaces are `\u{2581}`.
    Spaces,
    /// Every byte is a printable character.
    Bytes,
}

/// Gemma's beginning-of-text token.
const BOS: &str = "<bos>";

impl Tokenizer {
    /// Reads `tokenizer.json`; its ids must be below `vocab_size`.
    ///
    /// # Errors
    /// If the file is missing, malformed or of a kind that is not implemented, or an id is outside the model's
    /// vocabulary.
    pub fn read(path: impl AsRef<Path>, vocab_size: usize) -> Result<Self> {
        let path = path.as_ref();
        let json = read_json(path)?;
        let inner = file::tokenizer(&json).map_err(|error| match error.downcast::<file::NotImplemented>() {
            Ok(refused) => {
                let file::NotImplemented { field, problem } = *refused;
                let problem = format!("{problem}; use the tokenizer.json published with the model");
                Error::Unsupported { path: Some(path.to_owned()), what: field, problem }
            }
            Err(error) => not_a_tokenizer(path, error),
        })?;
        Self::new(inner, path, vocab_size)
    }

    /// The underlying pipeline.
    #[cfg(feature = "constraint")]
    pub(crate) fn inner(&self) -> &BpeTokenizer {
        &self.inner
    }

    /// Wraps the tokenizer of the file `path`; its ids must be below `vocab_size`.
    ///
    /// # Errors
    /// If an id is outside the model's vocabulary.
    pub fn new(inner: BpeTokenizer, path: impl AsRef<Path>, vocab_size: usize) -> Result<Self> {
        let last = spellings(&inner).max_by_key(|(_, id)| *id);
        if let Some((token, id)) = last.filter(|(_, id)| *id as usize >= vocab_size) {
            let problem = format!("token {token:?} has id {id}, but the model's vocabulary has {vocab_size} entries");
            return Err(Error::file(path, format!("{problem}; use the tokenizer that came with the checkpoint")));
        }
        let bos = inner.token_to_id(BOS);
        let added = inner.get_added_vocabulary();
        let control = added.get_added_tokens_decoder().iter().filter(|(_, token)| token.special);
        let control = ControlNames::new(control.map(|(id, token)| (token.content.clone(), *id)));
        let mut text_only = added.clone();
        text_only.set_encode_special_tokens(true);
        // A space as a character of its own, or as a byte.
        let spelling = match inner.token_to_id("\u{2581}") {
            None if inner.token_to_id("\u{120}").is_some() => Spelling::Bytes,
            _ => Spelling::Spaces,
        };
        let longest = spellings(&inner).map(|(token, _)| token.len()).max().unwrap_or(0).max(1);
        Ok(Self { inner, bos, control, text_only, spelling, longest })
    }

    /// The tokens of `text`, raw or a rendered chat. They begin with exactly one `<bos>`, whether or not
    /// the tokenizer's post-processor adds one and the text begins with one. A vocabulary without
    /// `<bos>` gets what its post-processor adds.
    ///
    /// # Errors
    /// If the text is empty, or cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Err(Error::argument("prompt", "is empty; give some text to continue"));
        }
        let encoding = self.inner.encode_fast(text, false).map_err(|e| Error::Tokenizer(e.to_string()))?;
        self.with_one_bos(encoding.get_ids())
    }

    /// The token that [`Tokenizer::encode`] puts before every text, if any.
    pub fn bos(&self) -> Option<u32> {
        let first = |add_special: bool| Some(*self.inner.encode_fast("a", add_special).ok()?.get_ids().first()?);
        self.bos.or_else(|| first(true).filter(|id| first(false) != Some(*id)))
    }

    /// The tokens of a text, as [`Tokenizer::encode`] begins them.
    fn with_one_bos(&self, ids: &[u32]) -> Result<Vec<u32>> {
        let Some(bos) = self.bos else {
            let tokens = ids.iter().map(|id| Token::new(*id, String::new(), (0, 0))).collect();
            let encoding = self.inner.post_process(Encoding::from_tokens(tokens, 0), None, true);
            return Ok(encoding.map_err(|e| Error::Tokenizer(e.to_string()))?.get_ids().to_vec());
        };
        let own = ids.iter().take_while(|id| **id == bos).count();
        Ok(std::iter::once(bos).chain(ids[own..].iter().copied()).collect())
    }

    /// As [`Tokenizer::encode`], of a text in which `mark` is inside every name of a control token that is to be text
    /// ([`ControlNames::mark`]). Names without it are control tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub(crate) fn encode_marked(&self, text: &str, mark: char) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Err(Error::argument("prompt", "is empty; give some text to continue"));
        }
        let mut ids = Vec::new();
        for (text, control) in self.control.split(text) {
            ids.extend(self.encode_text(&text.replace(mark, ""))?);
            ids.extend(control);
        }
        self.with_one_bos(&ids)
    }

    /// The tokens of `text`, none of which is a control token, and without `<bos>`: names of control tokens are text.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        // The pipeline of `encode_fast` with another set of added tokens.
        let mut pieces = self.text_only.extract_and_normalize(self.inner.get_normalizer(), text);
        let split = self.inner.get_pre_tokenizer().map_or(Ok(()), |splitter| splitter.pre_tokenize(&mut pieces));
        let model = self.inner.get_model();
        let encoding = split
            .and_then(|()| pieces.tokenize(|piece| model.tokenize(piece.get())))
            .and_then(|()| pieces.into_encoding(None, 0, OffsetType::None));
        Ok(encoding.map_err(|e| Error::Tokenizer(e.to_string()))?.get_ids().to_vec())
    }

    /// The names of the control tokens.
    pub(crate) fn control_names(&self) -> &ControlNames {
        &self.control
    }

    /// Whether the token is a control token, whose name is not part of a decoded text.
    pub fn is_control(&self, id: u32) -> bool {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    /// The text of `ids`, without special tokens.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(|e| Error::Tokenizer(e.to_string()))
    }

    /// The token with that id, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes of a token in a text, whatever the vocabulary's spelling; they need not be whole characters. For an
    /// added token, its name; for an unknown id, none.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.token(id) else { return Vec::new() };
        let is_added = || self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id);
        match self.spelling {
            Spelling::Spaces => match byte_token(&token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
            Spelling::Bytes if is_added() => token.into_bytes(),
            Spelling::Bytes => {
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of_character).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
        }
    }

    /// Bytes of the longest token, as the vocabulary spells it: an upper bound of the text bytes of any token.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// The ids of all tokens whose text contains `part`, ascending; none for an empty `part`. Spaces and bytes match
    /// however the vocabulary spells them.
    pub fn ids_with(&self, part: &str) -> Vec<u32> {
        let spelled = match self.spelling {
            Spelling::Spaces => part.replace(' ', "\u{2581}"),
            Spelling::Bytes => part.bytes().map(byte_character).collect(),
        };
        let contains = |token: &str| match byte_token(token).filter(|_| self.spelling == Spelling::Spaces) {
            Some(byte) => part.as_bytes() == [byte],
            None => token.contains(&spelled),
        };
        let with = self.spellings().filter(|(token, _)| !part.is_empty() && contains(token));
        let mut ids: Vec<u32> = with.map(|(_, id)| id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// All tokens with their ids, as the vocabulary spells them. An added token may be there twice.
    pub(crate) fn spellings(&self) -> impl Iterator<Item = (&str, u32)> {
        spellings(&self.inner)
    }

    /// The id of a token, by its exact string.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}

impl Tokens {
    /// Reads the tokens of `tokenizer.json`, without its merges.
    ///
    /// # Errors
    /// If the file is missing, or is not JSON with tokens of distinct ids.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        file::tokens(&read_json(path)?).map_err(|error| not_a_tokenizer(path, error))
    }
}

/// The contents of the `tokenizer.json` at `path`.
fn read_json(path: &Path) -> Result<Vec<u8>> {
    regular_file(path, "a tokenizer.json")?;
    let json = std::fs::read(path).map_err(Error::io(path))?;
    refuse_placeholder(path, &json).map(|()| json)
}

fn not_a_tokenizer(path: &Path, error: impl Display) -> Error {
    Error::file(path, format!("is not a tokenizer: {error}; download it again"))
}

/// See [`Tokenizer::spellings`].
fn spellings(inner: &BpeTokenizer) -> impl Iterator<Item = (&str, u32)> {
    let added = inner.get_added_vocabulary().get_added_tokens_decoder();
    inner.get_model().vocabulary().iter().chain(added.iter().map(|(id, token)| (token.content.as_str(), *id)))
}

/// `NN` of the byte-fallback token `<0xNN>`.
pub(crate) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

/// Whether byte-level vocabularies spell the byte with its own Latin-1 character.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..)
}

/// The character that byte-level vocabularies spell a byte with (GPT-2): itself if it is printable in Latin-1, else the
/// next one from U+0100 on.
fn byte_character(byte: u8) -> char {
    match is_printable(byte) {
        true => char::from(byte),
        false => {
            char::from_u32(0x100 + (0..byte).filter(|byte| !is_printable(*byte)).count() as u32).unwrap_or_default()
        }
    }
}

/// The inverse of [`byte_character`].
fn byte_of_character(character: char) -> Option<u8> {
    match u8::try_from(character) {
        Ok(byte) => Some(byte).filter(|byte| is_printable(*byte)),
        Err(_) => {
            let place = u32::from(character).checked_sub(0x100)?;
            (0..=u8::MAX).filter(|byte| !is_printable(*byte)).nth(place as usize)
        }
    }
}

/// Decodes a stream of tokens into whole characters.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    context: Vec<u32>,    // tokens decoded together: leading spaces depend on the previous token
    context_text: String, // their text, and what was returned of the held ones'
    held: Vec<u32>,       // tokens of which the last end within a character
    begun: Vec<u8>,       // its bytes
}

/// The bytes at the end that begin a character.
fn begun_character(bytes: &[u8]) -> &[u8] {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    match std::str::from_utf8(last) {
        Err(error) if error.error_len().is_none() => last,
        _ => &[],
    }
}

impl StreamDecoder {
    /// The text completed by `id`; empty inside a character.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        let own = if tokenizer.is_control(id) { Vec::new() } else { tokenizer.token_bytes(id) };
        let bytes = [self.begun.as_slice(), &own].concat();
        let breaks = |error: std::str::Utf8Error| error.valid_up_to() == 0 && error.error_len().is_some();
        let is_broken = !self.begun.is_empty() && std::str::from_utf8(&bytes).is_err_and(breaks);
        let mut new = if is_broken { self.finish(tokenizer)? } else { String::new() };
        self.held.push(id);
        self.begun = begun_character(&bytes).to_vec();
        let text = tokenizer.decode(&self.all())?;
        if self.begun.is_empty() {
            return Ok(new + &self.take(tokenizer, text)?);
        }
        // A token may complete one character and begin the next.
        let complete = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if let Some(more) = complete.strip_prefix(&self.context_text).filter(|more| !more.is_empty()) {
            new += more;
            self.context_text = complete.to_owned();
        }
        Ok(new)
    }

    /// The remaining text; an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = tokenizer.decode(&self.all())?;
        self.take(tokenizer, text)
    }

    fn all(&self) -> Vec<u32> {
        self.context.iter().chain(&self.held).copied().collect()
    }

    fn take(&mut self, tokenizer: &Tokenizer, text: String) -> Result<String> {
        // A run of byte tokens is decoded as a whole, so an invalid byte would change characters already returned: only
        // the new part is replaced by U+FFFD.
        let new = match text.strip_prefix(&self.context_text) {
            Some(new) => new.to_owned(),
            None => tokenizer.decode(&self.held)?,
        };
        self.context = std::mem::take(&mut self.held);
        self.begun.clear();
        self.context_text = tokenizer.decode(&self.context)?;
        Ok(new)
    }
}
