//! Prefix cache: a prompt continues from the longest cached prefix of it.
//!
//! A cached prefix is a fork of a session. It shares pages with the sequence that wrote them (for sliding layers those
//! of the window at that length), and the recurrent state. It also serves a prompt that has only its first tokens, if
//! it can be truncated to them ([`Session::rewind`]). A sequence that continues from it has the bits of one that read
//! the whole prompt.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::prefix_files::PrefixFiles;
use crate::engine::Engine;
use crate::kv::{KvOptions, exclusive_bytes};
use crate::session::Session;
use crate::{Error, Result};

/// A pass over a prompt ends early only for a cached prefix that saves this many tokens: the additional pass reads the
/// weights once more, which for E2B takes as long as 16 tokens of a prompt.
pub(super) const MIN_SAVED_TOKENS: usize = 32;

/// Tokens at the end of a chat's prompt that the prompt of the next turn may lack, because templates omit the reasoning
/// of earlier turns: Qwen3.5's prompts end with `<think>`, `\n\n`, `</think>`, `\n\n`.
const REASONING_TOKENS: usize = 4;

/// Regular cuts of a prompt after which their distance doubles.
const CUTS: usize = 64;

/// Default of [`PrefixCacheOptions::max_bytes`] where the free memory is unknown.
const UNKNOWN_MEMORY_MAX_BYTES: u64 = 4 << 30;

/// How long a reading of the system's available memory is used. Reading it takes about 0.1 ms, a tenth of a small
/// model's pass.
const MEMORY_MAX_AGE: Duration = Duration::from_millis(100);

/// Options of a [`Scheduler`](crate::Scheduler)'s prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixCacheOptions {
    /// Tokens of a prompt between two of its first 64 cached prefixes; between the next 64 twice as many, then four
    /// times as many, and so on. A prompt that diverges from a cached one between two prefixes continues from the
    /// longer one, truncated, if [`Session::rewind`] can do that; else it computes the tokens after the shorter one
    /// again, and is cached at that place. A pass reads at most the tokens up to the next cached prefix. At least 1.
    /// Default: 256.
    pub interval: usize,
    /// Limit in bytes of the engine's pages in use, those of running sequences included, and of the prefixes' recurrent
    /// states and tokens, which are in no page and take at most half of it; beyond it the least recently used prefixes
    /// are dropped. Default: [`EngineOptions::kv_memory`](crate::EngineOptions), or half of the free memory, or 4 GiB
    /// where the system does not report it (other systems than Linux).
    pub max_bytes: Option<u64>,
    /// Directory in which dropped prefixes are saved as session files, except prefixes of other cached ones. On Unix
    /// only their owner can read them. The files are deleted with the scheduler, those of a killed process by the next
    /// scheduler. Default: none.
    pub directory: Option<PathBuf>,
    /// Limit in bytes of all such files together, beyond which the least recently used are deleted. A prefix whose K
    /// and V alone are more is not saved. Default: 8 GiB.
    pub max_file_bytes: u64,
}

impl Default for PrefixCacheOptions {
    fn default() -> Self {
        Self { interval: 256, max_bytes: None, directory: None, max_file_bytes: 8 << 30 }
    }
}

impl PrefixCacheOptions {
    /// Checks the ranges of the options, as [`Scheduler::add`](crate::Scheduler::add) does.
    ///
    /// # Errors
    /// If one is out of its range.
    pub fn check(&self) -> Result<()> {
        match self.interval {
            0 => Err(Error::argument("interval", "of the prefix cache is 0, must be at least 1")),
            _ => Ok(()),
        }
    }
}

/// Cached prefixes by their tokens.
pub(crate) struct PrefixCache {
    engine: Engine,
    options: PrefixCacheOptions,
    max_bytes: u64,
    prefixes: BTreeMap<Vec<u32>, CachedPrefix>,
    uses: u64,
    has_dropped: bool,                     // since `take_has_dropped`
    system_memory: Option<(Instant, u64)>, // when it was read; at least so much is left of it
    files: Option<PrefixFiles>,            // dropped after the prefixes
}

/// The state of a sequence after the tokens of its key.
struct CachedPrefix {
    storage: SessionStorage,
    formats: KvOptions,
    used: u64,
    origin: Origin,
}

/// The sequence that a cached prefix was forked from, at that time.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Origin {
    /// It continues: a longer prefix of it is or will be cached.
    Running,
    Ended,
}

enum SessionStorage {
    Memory(Session),
    /// A session that can be truncated to `shortest` tokens.
    File {
        path: PathBuf,
        bytes: u64,
        shortest: usize,
    },
}

impl PrefixCache {
    pub fn new(engine: &Engine, options: PrefixCacheOptions) -> Self {
        let pages = engine.pages();
        let max_bytes = options.max_bytes.or(pages.limit());
        let max_bytes = max_bytes.unwrap_or_else(|| default_max_bytes(pages.available_memory()));
        let files = options.directory.as_ref().and_then(|directory| {
            let problem = |error| tracing::warn!(path = %directory.display(), %error, "no prefixes can be saved");
            PrefixFiles::new(directory).map_err(problem).ok()
        });
        Self {
            engine: engine.clone(),
            options,
            max_bytes,
            prefixes: BTreeMap::new(),
            uses: 0,
            has_dropped: false,
            system_memory: None,
            files,
        }
    }

    /// # Errors
    /// If an option is out of its range.
    pub fn check(&self) -> Result<()> {
        self.options.check()
    }

    /// A session with the longest prefix of `prompt` that a cached one has or can be truncated to, in the formats and
    /// with the limits of `like`; at least one token of the prompt is left to read. Older prefixes are dropped for one
    /// that is in a file.
    pub fn find(&mut self, like: &Session, prompt: &[u32]) -> Option<Session> {
        self.uses += 1;
        loop {
            let (key, len) = self.longest_prefix(like, prompt)?;
            let prefix = self.prefixes.get_mut(&key)?;
            prefix.used = self.uses;
            let needed = like.kv().bytes_at(key.len()) as u64;
            let fork = prefix.session(&self.engine, &key).and_then(|session| session.fork_like(like));
            match fork.and_then(|mut fork| fork.rewind(len).map(|()| fork)) {
                Ok(found) => return Some(found),
                // The file is in memory now, and its context turned out too short.
                Err(Error::Context { .. }) if !prefix.serves(like) => {}
                Err(Error::Memory { .. }) if self.may_free(needed) && self.drop_oldest_before(self.uses) => {}
                Err(error) => {
                    tracing::warn!(%error, "a cached prefix cannot be used");
                    if matches!(error, Error::Memory { .. }) {
                        return None;
                    }
                    self.prefixes.remove(&key);
                }
            }
        }
    }

    /// The cached prefix with the most tokens of `prompt` without its last one, of those that serve `like`, and how
    /// many it is truncated to. Of several, one in memory is preferred, then one that is not truncated.
    fn longest_prefix(&self, like: &Session, prompt: &[u32]) -> Option<(Vec<u32>, usize)> {
        let prompt = &prompt[..prompt.len().checked_sub(1)?.min(like.kv().max_context())];
        let is_usable = |key: &[u32], prefix: &CachedPrefix, len| prefix.has_state_at(len, key) && prefix.serves(like);
        let usable_len = |(key, prefix): (&Vec<u32>, &CachedPrefix)| {
            let len = shared(key, prompt);
            is_usable(key, prefix, len).then_some(len)
        };
        // The farther a key is from `prompt` in the map, the fewer tokens it shares with it.
        let below = self.prefixes.range::<[u32], _>(up_to(prompt)).rev().find_map(usable_len);
        let above = self.prefixes.range::<[u32], _>((Bound::Excluded(prompt), Bound::Unbounded)).find_map(usable_len);
        let len = below.max(above)?;
        // Those with the same tokens are in sequence, the shortest first.
        let from = self.prefixes.range::<[u32], _>((Bound::Included(&prompt[..len]), Bound::Unbounded));
        let mut usable = from
            .take_while(|(key, _)| key.starts_with(&prompt[..len]))
            .filter(|(key, prefix)| is_usable(key, prefix, len));
        let in_memory = usable.clone().find(|(_, prefix)| prefix.in_memory().is_some());
        in_memory.or_else(|| usable.next()).map(|(key, _)| (key.clone(), len))
    }

    /// Lengths, ascending, at which a sequence is cached that continues from `session`, with the first tokens of
    /// `prompt`: at regular intervals, where the prompt diverges from cached ones, and at its end. A recurrent state
    /// cannot be truncated, and is cached before the reasoning that a chat's prompt ends with.
    pub fn cuts(&self, session: &Session, prompt: &[u32]) -> Vec<usize> {
        let from = session.tokens().len();
        let below = self.prefixes.range::<[u32], _>(up_to(prompt)).next_back();
        let above = self.prefixes.range::<[u32], _>((Bound::Excluded(prompt), Bound::Unbounded)).next();
        let diverges_at = below.into_iter().chain(above).map(|(key, _)| shared(key, prompt)).max().unwrap_or(0);
        let mut cuts: Vec<_> = regular_cuts(self.options.interval).take_while(|cut| *cut < prompt.len()).collect();
        let before = cuts.iter().rev().find(|cut| **cut <= diverges_at).map_or(0, |cut| *cut);
        if diverges_at >= from.max(before) + MIN_SAVED_TOKENS {
            cuts.push(diverges_at);
        }
        cuts.retain(|cut| *cut > from && cut + MIN_SAVED_TOKENS <= prompt.len());
        cuts.sort_unstable();
        cuts.dedup();
        let last = cuts.last().map_or(from, |cut| *cut);
        let reasoning = if session.has_recurrent() { REASONING_TOKENS } else { 0 };
        let ends_early = last + MIN_SAVED_TOKENS + reasoning <= prompt.len();
        cuts.push(prompt.len() - if ends_early { reasoning } else { 0 });
        cuts
    }

    /// Caches a sequence up to its last read token. One that continues shares its pages with the cached prefix, which
    /// is not dropped here and not saved.
    pub fn insert(&mut self, session: &mut Session, origin: Origin) {
        let len = session.decoder().state.len();
        let key = session.tokens()[..len].to_vec();
        self.uses += 1;
        let used = self.uses;
        let formats = session.kv_options().without_limits();
        if let Some(prefix) = self.prefixes.get_mut(&key).filter(|prefix| prefix.serves(session)) {
            (prefix.used, prefix.origin) = (used, origin);
        } else if !key.is_empty() {
            match session.fork_read() {
                Ok(fork) => {
                    let storage = SessionStorage::Memory(fork);
                    self.prefixes.insert(key, CachedPrefix { storage, formats, used, origin });
                }
                Err(error) => tracing::warn!(%error, "a prefix cannot be cached"),
            }
        }
        let dropped_before = if origin == Origin::Running { used } else { u64::MAX };
        while self.is_full() && self.drop_oldest_before(dropped_before) {}
    }

    /// Drops prefixes until `bytes` are available under the limit of the engine's pages, or of the system, or as many
    /// as all prefixes together can free.
    pub fn drop_until_available(&mut self, bytes: u64) {
        if bytes == 0 || self.prefixes.is_empty() {
            return;
        }
        if let Some((read, left)) = &mut self.system_memory
            && read.elapsed() < MEMORY_MAX_AGE
            && *left >= bytes
        {
            *left -= bytes;
            return;
        }
        let available = |cache: &Self| cache.engine.pages().available_memory();
        let Some(before) = available(self) else { return };
        let left = before.checked_sub(bytes);
        self.system_memory = left.filter(|_| self.engine.pages().limit().is_none()).map(|left| (Instant::now(), left));
        if left.is_some() {
            return;
        }
        // Part of what is needed suffices for some of the sequences.
        let reachable =
            if self.holds_uncounted() { bytes } else { bytes.min(before.saturating_add(self.reclaimable())) };
        while available(self).is_some_and(|available| available < reachable) && self.drop_oldest() {}
    }

    /// Bytes of the pages that only cached prefixes hold: those that are free once all are dropped.
    pub fn reclaimable(&self) -> u64 {
        exclusive_bytes(self.prefixes.values().filter_map(CachedPrefix::in_memory).flat_map(Session::held_pages))
    }

    /// Whether prefixes may hold memory that [`PrefixCache::reclaimable`] does not count: recurrent states on a device,
    /// which are not in the pool.
    fn holds_uncounted(&self) -> bool {
        let mut sessions = self.prefixes.values().filter_map(CachedPrefix::in_memory);
        self.engine.parts.models.is_some() && sessions.any(|session| session.recurrent_bytes() > 0)
    }

    /// Whether dropping prefixes may make `bytes` available.
    fn may_free(&self, bytes: u64) -> bool {
        let available = self.engine.pages().available_memory();
        self.holds_uncounted()
            || available.is_none_or(|available| available.saturating_add(self.reclaimable()) >= bytes)
    }

    /// Drops the least recently used prefix in memory if dropping prefixes may free memory; returns whether it did.
    pub fn drop_for_memory(&mut self) -> bool {
        let may_free = self.holds_uncounted() || self.engine.pages().limit().is_none() || self.reclaimable() > 0;
        may_free && self.drop_oldest()
    }

    /// The same for a session with these options, which takes `needed` bytes for a given context.
    pub fn drop_for_session(&mut self, options: &KvOptions, needed: Option<u64>) -> bool {
        match needed.filter(|_| options.max_context.is_some()) {
            Some(needed) => {
                let is_allowed = options.memory.is_none_or(|memory| needed <= memory);
                is_allowed && self.may_free(needed) && self.drop_oldest()
            }
            None => self.drop_for_memory(),
        }
    }

    /// Drops the least recently used prefix in memory, or writes it to a file; `false` if there is none.
    pub fn drop_oldest(&mut self) -> bool {
        self.drop_oldest_before(u64::MAX)
    }

    /// The same, of prefixes last used before `used`.
    fn drop_oldest_before(&mut self, used: u64) -> bool {
        let oldest = self.take_oldest(|prefix| prefix.in_memory().is_some() && prefix.used < used);
        let Some((key, prefix)) = oldest else { return false };
        self.has_dropped = true;
        let next = self.prefixes.range::<[u32], _>((Bound::Excluded(&key[..]), Bound::Unbounded)).next();
        if next.is_none_or(|(next, _)| !next.starts_with(&key)) && prefix.origin == Origin::Ended {
            self.save(key, prefix);
        }
        true
    }

    /// Keeps a prefix in a file, if there is a directory for it and it is within the limit of all files, and deletes
    /// files beyond that.
    fn save(&mut self, key: Vec<u32>, mut prefix: CachedPrefix) {
        let storage = &mut prefix.storage;
        let (Some(files), SessionStorage::Memory(session)) = (&mut self.files, storage) else { return };
        // All other files would be deleted for it, and then its own.
        if session.kv().written_bytes(key.len()) as u64 > self.options.max_file_bytes {
            return;
        }
        let path = files.next();
        match session.save_private(&path).and_then(|()| std::fs::metadata(&path).map_err(Error::io(&path))) {
            Ok(metadata) => {
                let lengths = (0..=key.len()).rev();
                let shortest = lengths.take_while(|len| session.can_rewind(*len)).last().unwrap_or(key.len());
                prefix.storage = SessionStorage::File { path, bytes: metadata.len(), shortest };
                self.prefixes.insert(key, prefix);
            }
            Err(error) => tracing::warn!(%error, "a cached prefix cannot be saved"),
        }
        while self.file_bytes() > self.options.max_file_bytes
            && self.take_oldest(|prefix| prefix.in_memory().is_none()).is_some()
        {}
    }

    /// Whether any prefix was dropped since the last call: there may be memory then for sequences that wait for it.
    pub fn take_has_dropped(&mut self) -> bool {
        std::mem::take(&mut self.has_dropped)
    }

    fn take_oldest(&mut self, of: impl Fn(&CachedPrefix) -> bool) -> Option<(Vec<u32>, CachedPrefix)> {
        let oldest = self.prefixes.iter().filter(|(_, prefix)| of(prefix)).min_by_key(|(_, prefix)| prefix.used);
        let key = oldest?.0.clone();
        self.prefixes.remove_entry(&key)
    }

    /// Whether a limit of the options is exceeded.
    fn is_full(&self) -> bool {
        // The tokens are in the key and in the session.
        let own = |(key, prefix): (&Vec<u32>, &CachedPrefix)| {
            prefix.in_memory().map_or(0, |session| session.recurrent_bytes() + 8 * key.len())
        };
        let own = self.prefixes.iter().map(own).sum::<usize>() as u64;
        own > self.max_bytes / 2 || self.engine.pages().held() + own > self.max_bytes
    }

    fn file_bytes(&self) -> u64 {
        self.prefixes
            .values()
            .map(|prefix| if let SessionStorage::File { bytes, .. } = prefix.storage { bytes } else { 0 })
            .sum()
    }
}

impl CachedPrefix {
    /// The session; `None` if it is in a file.
    fn in_memory(&self) -> Option<&Session> {
        match &self.storage {
            SessionStorage::Memory(session) => Some(session),
            SessionStorage::File { .. } => None,
        }
    }

    /// Whether a fork can have the formats and the context of `like`; the context of one in a file is known once it is
    /// read.
    fn serves(&self, like: &Session) -> bool {
        let is_long_enough = |session: &Session| session.max_fork_context() >= like.kv().max_context();
        self.in_memory().is_none_or(is_long_enough) && self.formats == like.kv_options().without_limits()
    }

    /// Whether a fork can have the state after the first `len` tokens of `key`, the tokens of this prefix. It is not
    /// truncated to fewer than `MIN_SAVED_TOKENS`, as all prompts of a chat template begin with a few equal tokens.
    fn has_state_at(&self, len: usize, key: &[u32]) -> bool {
        let can_rewind = || match &self.storage {
            SessionStorage::Memory(session) => session.can_rewind(len),
            SessionStorage::File { shortest, .. } => len >= *shortest,
        };
        len == key.len() || len >= MIN_SAVED_TOKENS && can_rewind()
    }

    /// The session of `tokens`, read back if it is in a file.
    fn session(&mut self, engine: &Engine, tokens: &[u32]) -> Result<&mut Session> {
        if let SessionStorage::File { path, .. } = &self.storage {
            let session = engine.read_session(path)?;
            if session.tokens() != tokens {
                return Err(Error::file(
                    path,
                    "was replaced by another session; use a separate directory for each scheduler",
                ));
            }
            self.storage = SessionStorage::Memory(session);
        }
        match &mut self.storage {
            SessionStorage::Memory(session) => Ok(session),
            SessionStorage::File { .. } => unreachable!("it was read above"),
        }
    }
}

impl Drop for SessionStorage {
    fn drop(&mut self) {
        if let Self::File { path, .. } = self
            && let Err(error) = std::fs::remove_file(&*path)
        {
            tracing::warn!(path = %path.display(), %error, "a cached prefix's file could not be deleted");
        }
    }
}

/// The default limit without one of the pages: half of the `available` memory.
fn default_max_bytes(available: Option<u64>) -> u64 {
    available.map_or(UNKNOWN_MEMORY_MAX_BYTES, |bytes| bytes / 2)
}

/// Multiples of `interval`: the first [`CUTS`], then as many of twice the distance, and so on, because every cached
/// prefix has a copy of its tokens.
fn regular_cuts(interval: usize) -> impl Iterator<Item = usize> {
    let next = move |(cut, n): &(usize, usize)| Some((cut.saturating_add(interval << (n / CUTS).min(32)), n + 1));
    std::iter::successors(Some((interval, 1)), next).map(|(cut, _)| cut)
}

fn up_to(tokens: &[u32]) -> (Bound<&[u32]>, Bound<&[u32]>) {
    (Bound::Unbounded, Bound::Included(tokens))
}

/// Leading tokens that two sequences have in common.
pub(super) fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_limited_where_memory_is_unknown() {
        assert_eq!(default_max_bytes(Some(10 << 30)), 5 << 30);
        assert_eq!(default_max_bytes(None), 4 << 30);
    }

    #[test]
    fn shared_tokens_end_at_the_first_that_differs() {
        let a: Vec<u32> = (0..192).collect();
        for at in [0, 1, 63, 64, 65, 128, a.len() - 1] {
            let mut b = a.clone();
            b[at] += 1;
            assert_eq!((shared(&a, &b), shared(&b, &a), shared(&a[..at], &a)), (at, at, at));
        }
        assert_eq!((shared(&a, &a), shared(&a, &[]), shared(&[], &a)), (a.len(), 0, 0));
    }

    #[test]
    fn the_distance_of_cuts_doubles() {
        let cuts: Vec<_> = regular_cuts(10).take(3 * CUTS).collect();
        assert_eq!((cuts[0], cuts[1], cuts[CUTS - 1]), (10, 20, 640));
        assert_eq!((cuts[CUTS], cuts[2 * CUTS - 1]), (660, 640 + 20 * CUTS));
        assert_eq!((cuts[2 * CUTS], cuts[3 * CUTS - 1]), (640 + 20 * CUTS + 40, 640 + 60 * CUTS));
        assert_eq!(regular_cuts(usize::MAX).take_while(|cut| *cut < usize::MAX).count(), 0);
    }
}
