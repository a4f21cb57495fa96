//! tokenizer.json of BPE tokenizers, over whole texts or bytes. The `tokenizers` crate panics on some malformed files,
//! so everything that it relies on is checked first.

use std::borrow::Cow;
use std::fmt;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

use super::bpe::{Bpe, BpeOptions, BpeTokenizer, Merges};
use super::vocabulary::{Text, Vocabulary};

/// A field whose value is not implemented: the file is valid.
#[derive(Debug)]
pub(super) struct NotImplemented {
    pub field: String,
    pub problem: String,
}

impl fmt::Display for NotImplemented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for NotImplemented {}

fn not_implemented(field: &str, problem: impl Into<String>) -> NotImplemented {
    NotImplemented { field: field.to_owned(), problem: problem.into() }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Truncation and padding are ignored. Unknown fields are errors: they could change the tokens, as
/// could a misspelled name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenizerFile<'a> {
    #[serde(default, rename = "version")]
    _version: IgnoredAny,
    #[serde(default, rename = "truncation")]
    _truncation: IgnoredAny,
    #[serde(default, rename = "padding")]
    _padding: IgnoredAny,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow)]
    model: Model<'a>,
}

#[derive(Deserialize)]
struct Added {
    id: Option<u32>,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Vocabulary,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

/// An entry of `merges`: `["left", "right"]`, or `"left right"`.
enum Merge<'a> {
    Pair(Cow<'a, str>, Cow<'a, str>),
    /// Of the list's format.
    Comment,
    Malformed,
}

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entry;
        impl<'de> Visitor<'de> for Entry {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge")
            }

            fn visit_str<E>(self, joined: &str) -> Result<Merge<'de>, E> {
                Ok(match joined.split_once(' ') {
                    _ if joined.starts_with("#version") => Merge::Comment,
                    Some((left, right)) => Merge::Pair(left.to_owned().into(), right.to_owned().into()),
                    None => Merge::Malformed,
                })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge<'de>, A::Error> {
                let mut next = || pair.next_element::<Text<'de>>();
                let (left, right) = (next()?, next()?);
                Ok(match (left, right, pair.next_element::<IgnoredAny>()?) {
                    (Some(left), Some(right), None) => Merge::Pair(left.0, right.0),
                    _ => Merge::Malformed,
                })
            }
        }
        deserializer.deserialize_any(Entry)
    }
}

const NORMALIZERS: [&str; 4] = ["Sequence", "Replace", "Prepend", "NFC"];
const PRE_TOKENIZERS: [&str; 4] = ["Sequence", "Split", "Metaspace", "ByteLevel"];
const POST_PROCESSORS: [&str; 3] = ["Sequence", "TemplateProcessing", "ByteLevel"];
const DECODERS: [&str; 7] = ["Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "ByteLevel"];

/// Parses the tokenizer in `json`.
///
/// # Errors
/// [`NotImplemented`], or if it is malformed.
pub(super) fn tokenizer(json: &[u8]) -> Result<BpeTokenizer, AnyError> {
    // Including the ignored fields.
    let text = std::str::from_utf8(json)?;
    // Another kind of model has other fields: its name is the better message.
    let file: TokenizerFile<'_> =
        serde_json::from_str(text).map_err(|error| other_kind(text).unwrap_or(error.into()))?;
    kinds("normalizer", &file.normalizer, "normalizers", &NORMALIZERS)?;
    kinds("pre_tokenizer", &file.pre_tokenizer, "pretokenizers", &PRE_TOKENIZERS)?;
    kinds("post_processor", &file.post_processor, "processors", &POST_PROCESSORS)?;
    kinds("decoder", &file.decoder, "decoders", &DECODERS)?;
    let mut tokenizer = BpeTokenizer::new(file.model.build()?);
    tokenizer.with_normalizer(serde_json::from_value::<Option<NormalizerWrapper>>(file.normalizer)?)?;
    tokenizer.with_pre_tokenizer(serde_json::from_value::<Option<PreTokenizerWrapper>>(file.pre_tokenizer)?);
    tokenizer.with_post_processor(serde_json::from_value::<Option<PostProcessorWrapper>>(file.post_processor)?);
    tokenizer.with_decoder(serde_json::from_value::<Option<DecoderWrapper>>(file.decoder)?);
    let declared: Vec<_> = file.added_tokens.iter().map(|added| (added.token.content.clone(), added.id)).collect();
    tokenizer.add_tokens(file.added_tokens.into_iter().map(|added| added.token))?;
    // Those that the model lacks are numbered in their order: a missing one would shift all after it.
    for (content, id) in declared {
        if let (Some(id), Some(own)) = (id, tokenizer.token_to_id(&content))
            && id != own
        {
            return Err(
                format!("added_tokens: {content:?} has id {id}, but by its place in the list it is {own}").into()
            );
        }
    }
    Ok(tokenizer)
}

/// The tokens of a tokenizer.json. Merges, splits and other fields are ignored.
#[derive(Deserialize)]
pub(crate) struct Tokens {
    #[serde(default)]
    added_tokens: Vec<AddedName>,
    model: ModelTokens,
}

#[derive(Deserialize)]
struct AddedName {
    id: Option<u32>,
    content: String,
}

#[derive(Deserialize)]
struct ModelTokens {
    vocab: Vocabulary,
}

/// # Errors
/// If it is not JSON with tokens of distinct ids.
pub(super) fn tokens(json: &[u8]) -> serde_json::Result<Tokens> {
    serde_json::from_slice(json)
}

impl Tokens {
    /// As [`Tokenizer::spellings`](super::Tokenizer::spellings), except added tokens that are declared without an id.
    pub(crate) fn spellings(&self) -> impl Iterator<Item = (&str, u32)> {
        let added = self.added_tokens.iter().filter_map(|added| Some((added.content.as_str(), added.id?)));
        self.model.vocab.iter().chain(added)
    }
}

/// The error for a model that is not BPE.
fn other_kind(text: &str) -> Option<AnyError> {
    #[derive(Deserialize)]
    struct File {
        model: Kind,
    }
    #[derive(Deserialize)]
    struct Kind {
        #[serde(rename = "type")]
        kind: String,
    }
    let File { model } = serde_json::from_str(text).ok()?;
    refuse_kind(Some(model.kind)).err().map(Into::into)
}

fn refuse_kind(kind: Option<String>) -> Result<(), NotImplemented> {
    match kind.filter(|kind| kind != "BPE") {
        None => Ok(()),
        Some(kind) => Err(not_implemented("model", format!("{kind:?} is not implemented; expected BPE"))),
    }
}

impl Model<'_> {
    fn build(self) -> Result<Bpe, AnyError> {
        refuse_kind(self.kind)?;
        let affixes = [
            ("model.continuing_subword_prefix", self.continuing_subword_prefix),
            ("model.end_of_word_suffix", self.end_of_word_suffix),
        ];
        for (name, affix) in affixes {
            if affix.is_some_and(|affix| !affix.is_empty()) {
                return Err(not_implemented(name, "is not implemented; it must be empty").into());
            }
        }
        if self.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err(not_implemented("model.dropout", "must be 0, because it makes tokens random").into());
        }
        let mut merges = Merges::with_capacity(self.merges.len());
        for (i, merge) in self.merges.into_iter().enumerate() {
            let merged = match merge {
                Merge::Comment => continue,
                Merge::Pair(left, right) => merges.push(&self.vocab, &left, &right),
                Merge::Malformed => None,
            };
            merged.ok_or_else(|| format!("model.merges: entry {i} is not a pair that forms a token"))?;
        }
        let options = BpeOptions {
            unknown: self.unk_token,
            fuse_unknown: self.fuse_unk,
            byte_fallback: self.byte_fallback,
            ignore_merges: self.ignore_merges,
        };
        Ok(Bpe::new(self.vocab, merges, options))
    }
}

/// Checks the type of a step, and of those in a sequence's list `nested`.
fn kinds(field: &str, step: &Value, nested: &str, known: &[&str]) -> Result<(), AnyError> {
    if step.is_null() {
        return Ok(());
    }
    let kind = step["type"].as_str().unwrap_or_default();
    if !known.contains(&kind) {
        let problem = format!("{kind:?} is not implemented; expected one of {}", known.join(", "));
        return Err(not_implemented(field, problem).into());
    }
    match kind {
        "Sequence" => {
            let steps = step[nested].as_array().ok_or_else(|| format!("{field}: {nested} must be a list"))?;
            steps.iter().try_for_each(|step| kinds(field, step, nested, known))
        }
        // `tokenizers` underflows on tokens with fewer characters.
        "Strip" if step["stop"] != 0 => Err(not_implemented(field, "Strip: stop must be 0").into()),
        "TemplateProcessing" => {
            template(step).map_err(|problem| format!("{field}: TemplateProcessing: {problem}").into())
        }
        _ => Ok(()),
    }
}

/// Checks that the single-text template has only the text and defined special tokens.
fn template(step: &Value) -> Result<(), String> {
    let pieces = step["single"].as_array().ok_or("single must be a list of pieces")?;
    for piece in pieces {
        let (sequence, special) = (&piece["Sequence"]["id"], piece["SpecialToken"]["id"].as_str());
        let described = special.is_some_and(|id| !step["special_tokens"][id].is_null());
        if sequence != "A" && !described {
            return Err(format!("{piece} of single is neither the text nor one of special_tokens"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::spellings;
    use super::*;

    #[test]
    fn tokens_are_read_without_merges() {
        let file = |merge: [&str; 2]| {
            let added = json!({"id": 3, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true});
            let model = json!({"type": "BPE", "vocab": {"b": 1, "a": 0, "ab": 2}, "merges": [merge]});
            json!({"added_tokens": [added], "model": model}).to_string()
        };
        let (sound, unsound) = (file(["a", "b"]), file(["b", "b"]));
        let whole = tokenizer(sound.as_bytes()).expect("a tokenizer");
        assert!(tokenizer(unsound.as_bytes()).is_err());
        for json in [sound, unsound] {
            assert!(tokens(json.as_bytes()).expect("tokens").spellings().eq(spellings(&whole)), "{json}");
        }
    }
}
