//! Tokens by spelling and by id, in one string.

use std::borrow::Cow;
use std::fmt;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Tokens, each with an id of its own. Ids need not be consecutive.
pub(crate) struct Vocabulary {
    spellings: String,
    /// Ascending ids.
    entries: Vec<Entry>,
    /// Indices of `entries`, by spelling.
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

#[derive(Clone, Copy)]
struct Entry {
    start: usize, // in `spellings`
    end: usize,
    id: u32,
}

/// Two tokens with one spelling or one id.
#[derive(Debug)]
pub(crate) enum Repeated {
    /// Both ids.
    Spelling(String, u32, u32),
    Id(u32),
}

impl Vocabulary {
    /// # Errors
    /// If a spelling or an id is there twice.
    pub(crate) fn new<'a>(tokens: impl IntoIterator<Item = (&'a str, u32)>) -> Result<Self, Repeated> {
        let (mut spellings, mut entries) = (String::new(), Vec::new());
        for (token, id) in tokens {
            entries.push(Entry::append(&mut spellings, token, id));
        }
        Self::of(spellings, entries)
    }

    fn of(spellings: String, mut entries: Vec<Entry>) -> Result<Self, Repeated> {
        entries.sort_unstable_by_key(|entry| entry.id);
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(Repeated::Id(pair[0].id));
        }
        let hasher = DefaultHashBuilder::default();
        let spelling = |index: &u32| entries[*index as usize].spelling(&spellings);
        let hash = |index: &u32| hasher.hash_one(spelling(index));
        let mut table = HashTable::with_capacity(entries.len());
        for (index, entry) in (0..).zip(&entries) {
            let same = |other: &u32| spelling(other) == spelling(&index);
            if let Some(first) = table.find(hash(&index), same) {
                return Err(Repeated::Spelling(spelling(&index).into(), entries[*first as usize].id, entry.id));
            }
            table.insert_unique(hash(&index), index, hash);
        }
        Ok(Self { spellings, entries, table, hasher })
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        let same = |index: &u32| self.entries[*index as usize].spelling(&self.spellings) == token;
        let index = self.table.find(self.hasher.hash_one(token), same)?;
        Some(self.entries[*index as usize].id)
    }

    pub(crate) fn token(&self, id: u32) -> Option<&str> {
        let index = self.entries.binary_search_by_key(&id, |entry| entry.id).ok()?;
        Some(self.entries[index].spelling(&self.spellings))
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Ascending ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        self.entries.iter().map(|entry| (entry.spelling(&self.spellings), entry.id))
    }
}

impl Entry {
    /// Appends the token to the spellings.
    fn append(spellings: &mut String, token: &str, id: u32) -> Self {
        let start = spellings.len();
        spellings.push_str(token);
        Self { start, end: spellings.len(), id }
    }

    fn spelling(self, spellings: &str) -> &str {
        &spellings[self.start..self.end]
    }
}

impl fmt::Display for Repeated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spelling(token, first, second) => write!(f, "ids {first} and {second} are both {token:?}"),
            Self::Id(id) => write!(f, "two tokens have id {id}"),
        }
    }
}

/// From a JSON object of ids by token.
impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tokens;
        impl<'de> Visitor<'de> for Tokens {
            type Value = Vocabulary;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of token ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
                let (mut spellings, mut entries) = (String::new(), Vec::new());
                while let Some((Text(token), id)) = map.next_entry()? {
                    entries.push(Entry::append(&mut spellings, &token, id));
                }
                Vocabulary::of(spellings, entries).map_err(A::Error::custom)
            }
        }
        deserializer.deserialize_map(Tokens)
    }
}

/// A JSON string, borrowed if it has no escapes.
#[derive(Deserialize)]
pub(super) struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);
