//! Byte pair encoding over compact tables, as the model of the `tokenizers` crate's pipeline. That crate's own model
//! gives the same tokens, but for 262144 of them takes three times as long to load, and 80 MB more.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::ser::{Serialize, SerializeStruct, Serializer};
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{
    DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Token, TokenizerImpl,
};

use super::vocabulary::Vocabulary;

/// Normalizer, pre-tokenizer, model, post-processor, decoder.
pub type BpeTokenizer =
    TokenizerImpl<Bpe, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A byte-pair-encoding model.
pub struct Bpe {
    vocabulary: Vocabulary,
    merges: Merges,
    /// The tokens of all bytes that have one, for characters without one.
    bytes: [Option<u32>; 256],
    options: BpeOptions,
}

/// What else a tokenizer.json says of its model.
#[derive(Default)]
pub(crate) struct BpeOptions {
    /// The token of characters that have none, neither of their own nor for all of their bytes.
    pub unknown: Option<String>,
    /// Whether neighbouring unknown characters become one token.
    pub fuse_unknown: bool,
    pub byte_fallback: bool,
    /// Whether a piece that is a token is not merged from its characters.
    pub ignore_merges: bool,
}

/// Pairs of tokens that become one, best first.
#[derive(Default)]
pub(crate) struct Merges {
    of_pairs: hashbrown::HashMap<(u32, u32), Merge>,
    next_rank: u32,
    /// Buffer for the two tokens of a pair, joined.
    joined: String,
}

#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: u32,
}

impl Merges {
    pub(crate) fn with_capacity(merges: usize) -> Self {
        Self { of_pairs: hashbrown::HashMap::with_capacity(merges), ..Self::default() }
    }

    /// Adds the next best merge; `None` if one of the pair is empty, or it or the two joined are not a token.
    #[must_use]
    pub(crate) fn push(&mut self, vocabulary: &Vocabulary, left: &str, right: &str) -> Option<()> {
        if left.is_empty() || right.is_empty() {
            return None;
        }
        self.joined.clear();
        self.joined.push_str(left);
        self.joined.push_str(right);
        let pair = (vocabulary.id(left)?, vocabulary.id(right)?);
        let id = vocabulary.id(&self.joined)?;
        // Of a pair that is listed twice, the last rank.
        self.of_pairs.insert(pair, Merge { rank: self.next_rank, id });
        self.next_rank += 1;
        Some(())
    }
}

/// A token of the word that is being merged; those that remain are a doubly linked list.
#[derive(Clone, Copy)]
struct Piece {
    id: u32,
    bytes: u32, // 0 once it is a part of the previous one
    previous: u32,
    next: u32,
}

/// No piece.
const NONE: u32 = u32::MAX;

/// A word's pieces.
#[derive(Default)]
struct Word(Vec<Piece>);

impl Word {
    fn push(&mut self, id: u32, bytes: usize) {
        let at = self.0.len() as u32;
        if let Some(last) = self.0.last_mut() {
            last.next = at;
        }
        self.0.push(Piece { id, bytes: bytes as u32, previous: at.checked_sub(1).unwrap_or(NONE), next: NONE });
    }

    /// The merge of the piece at `at` with the next one, as it is queued: the best, then the leftmost, is first.
    fn queued(&self, merges: &Merges, at: u32) -> Option<Reverse<(u32, u32, u32)>> {
        let left = self.0.get(at as usize)?;
        let right = self.0.get(left.next as usize)?;
        let merge = merges.of_pairs.get(&(left.id, right.id))?;
        Some(Reverse((merge.rank, at, merge.id)))
    }

    /// Merges pairs, best first, until none is left.
    fn merge(&mut self, merges: &Merges) {
        let mut queue: BinaryHeap<_> = (0..self.0.len() as u32).filter_map(|at| self.queued(merges, at)).collect();
        while let Some(Reverse(merge)) = queue.pop() {
            let (_, at, id) = merge;
            // One of the two is a part of another piece by now.
            if self.0[at as usize].bytes == 0 || self.queued(merges, at) != Some(Reverse(merge)) {
                continue;
            }
            let right = self.0[at as usize].next;
            let Piece { bytes, next, .. } = self.0[right as usize];
            self.0[right as usize].bytes = 0;
            let merged = &mut self.0[at as usize];
            (merged.id, merged.bytes, merged.next) = (id, merged.bytes + bytes, next);
            let previous = merged.previous;
            if let Some(next) = self.0.get_mut(next as usize) {
                next.previous = at;
            }
            queue.extend([previous, at].into_iter().filter_map(|at| self.queued(merges, at)));
        }
    }
}

impl Bpe {
    pub(crate) fn new(vocabulary: Vocabulary, merges: Merges, options: BpeOptions) -> Self {
        let bytes = std::array::from_fn(|byte| vocabulary.id(&format!("<0x{byte:02X}>")));
        Self { vocabulary, merges, bytes, options }
    }

    pub(crate) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The characters of `text`, as tokens.
    fn word(&self, text: &str) -> tokenizers::Result<Word> {
        let mut word = Word(Vec::with_capacity(text.len()));
        // A token of unknown characters, until the next known one.
        let mut unknown: Option<(u32, usize)> = None;
        for (start, character) in text.char_indices() {
            let spelling = &text[start..][..character.len_utf8()];
            if let Some(id) = self.vocabulary.id(spelling) {
                if let Some((id, bytes)) = unknown.take() {
                    word.push(id, bytes);
                }
                word.push(id, spelling.len());
                continue;
            }
            let of_bytes = || spelling.bytes().map(|byte| self.bytes[usize::from(byte)]).collect::<Option<Vec<_>>>();
            if let Some(ids) = self.options.byte_fallback.then(of_bytes).flatten() {
                ids.into_iter().for_each(|id| word.push(id, 1));
                continue;
            }
            let Some(name) = &self.options.unknown else { continue };
            let id = self
                .vocabulary
                .id(name)
                .ok_or_else(|| format!("the unknown token {name:?} is not in the vocabulary"))?;
            let fused = match unknown {
                Some((_, bytes)) if self.options.fuse_unknown => bytes,
                Some((id, bytes)) => {
                    word.push(id, bytes);
                    0
                }
                None => 0,
            };
            unknown = Some((id, fused + spelling.len()));
        }
        if let Some((id, bytes)) = unknown {
            word.push(id, bytes);
        }
        Ok(word)
    }
}

/// Without the tables.
impl fmt::Debug for Bpe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, merges) = (self.vocabulary.len(), self.merges.of_pairs.len());
        f.debug_struct("Bpe").field("tokens", &tokens).field("merges", &merges).finish_non_exhaustive()
    }
}

impl Model for Bpe {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        if u32::try_from(text.len()).is_err() {
            return Err(format!("a text of {} bytes is too long", text.len()).into());
        }
        if self.options.ignore_merges
            && !text.is_empty()
            && let Some(id) = self.vocabulary.id(text)
        {
            return Ok(vec![Token::new(id, text.into(), (0, text.len()))]);
        }
        let mut word = self.word(text)?;
        word.merge(&self.merges);
        let mut end = 0;
        let left = word.0.into_iter().filter(|piece| piece.bytes > 0);
        let tokens = left.map(|piece| {
            let start = end;
            end += piece.bytes as usize;
            Token::new(piece.id, self.vocabulary.token(piece.id).unwrap_or_default().into(), (start, end))
        });
        Ok(tokens.collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.vocabulary.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.vocabulary.token(id).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.vocabulary.iter().map(|(token, id)| (token.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a model alone is not saved; save the tokenizer".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// As the `model` of a tokenizer.json.
impl Serialize for Bpe {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Tokens<'a>(&'a Vocabulary);
        impl Serialize for Tokens<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter())
            }
        }
        let mut merges: Vec<_> = self.merges.of_pairs.iter().collect();
        merges.sort_unstable_by_key(|(_, merge)| merge.rank);
        let token = |id: u32| self.vocabulary.token(id).unwrap_or_default();
        let merges: Vec<_> = merges.into_iter().map(|((left, right), _)| [token(*left), token(*right)]).collect();
        let mut model = serializer.serialize_struct("BPE", 10)?;
        model.serialize_field("type", "BPE")?;
        model.serialize_field("dropout", &None::<f32>)?;
        model.serialize_field("unk_token", &self.options.unknown)?;
        model.serialize_field("continuing_subword_prefix", &None::<&str>)?;
        model.serialize_field("end_of_word_suffix", &None::<&str>)?;
        model.serialize_field("fuse_unk", &self.options.fuse_unknown)?;
        model.serialize_field("byte_fallback", &self.options.byte_fallback)?;
        model.serialize_field("ignore_merges", &self.options.ignore_merges)?;
        model.serialize_field("vocab", &Tokens(&self.vocabulary))?;
        model.serialize_field("merges", &merges)?;
        model.end()
    }
}
