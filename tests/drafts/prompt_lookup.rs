//! Prompt lookup drafters: matching, majority votes, caps that grow back after a failure, and
//! learning of all emitted tokens, across rounds as well.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use foretoken::Isa;
use foretoken::kv::{KvCache, KvLayout, KvOptions};
use foretoken::sampler::{Sampler, Sampling};
use foretoken::speculative::{
    AcceptResult, Confidence, Context, Draft, DraftSampling, Drafter, DrafterKind, DrafterOptions, Drafters,
    NgramCache, NgramCacheDrafter, NgramCacheOptions, NgramMapK, NgramMapK4v, NgramMapOptions, NgramMod,
    NgramModOptions, NgramPool, NgramSimple, NgramSimpleOptions, Observed,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

thread_local! {
    /// What a context has and these drafters do not read: made once, as one test drafts 200 000 times.
    static UNREAD: (KvCache, Tensor, Sampler) = {
        let layout = KvLayout { stores: Vec::new(), store_of_layer: Vec::new(), inverse_frequencies: Vec::new() };
        (
            KvCache::new(layout, &KvOptions::default(), 8, Isa::best()).expect("a cache"),
            Tensor::zeros((1, 1), DType::F32, &Device::Cpu).expect("a tensor"),
            Sampler::new(Isa::best(), Sampling::default(), Vec::new()).expect("a sampler"),
        )
    };
}

/// A drafter's draft after `tokens`.
fn draft(drafter: &mut dyn Drafter, tokens: &[u32], most: usize) -> Vec<u32> {
    UNREAD.with(|(kv, hidden, sampler)| {
        let (drafts, confidence) = (DraftSampling::Greedy, Confidence::Omit);
        let context = Context { tokens, hidden, forced: &[], kv: kv.committed(), sampler, drafts, confidence };
        let (mut draft, mut rng) = (Draft::default(), StdRng::seed_from_u64(0));
        drafter.draft(&context, most, &mut draft, &mut rng).expect("a draft");
        assert!(draft.tokens.len() <= most && draft.probs.is_none());
        draft.tokens
    })
}

fn observe(drafter: &mut dyn Drafter, tokens: &[u32], own: Option<AcceptResult>) {
    drafter
        .observe(&Observed { tokens, first: 0, hidden: None, on_device: None, taps: &[], own })
        .expect("nothing that can fail");
}

fn accept_result(drafted: usize, accepted: usize) -> Option<AcceptResult> {
    Some(AcceptResult { drafted, accepted })
}

fn map(n: usize, m: usize, min_hits: usize) -> NgramMapOptions {
    NgramMapOptions { ngram_len: n, max_draft_tokens: m, min_hits }
}

/// Every drafter with short keys.
fn all() -> Vec<Box<dyn Drafter>> {
    vec![
        Box::new(NgramSimple::new(NgramSimpleOptions { ngram_len: 3, max_draft_tokens: 6 })),
        Box::new(NgramMapK::new(map(3, 6, 1))),
        Box::new(NgramMapK4v::new(map(3, 6, 1))),
        Box::new(NgramMod::new(
            NgramModOptions { ngram_len: 3, min_draft_tokens: 1, max_draft_tokens: 6 },
            Arc::new(NgramPool::default()),
        )),
        Box::new(NgramCacheDrafter::new(NgramCacheOptions { max_draft_tokens: 6, ..NgramCacheOptions::default() })),
    ]
}

#[test]
fn what_was_written_once_is_drafted() {
    let text: Vec<u32> = (10..40).collect();
    let asked = [&text[..], &[14, 15, 16]].concat();
    for mut drafter in all() {
        drafter.begin(&asked);
        assert_eq!(draft(&mut *drafter, &asked, 64), [17, 18, 19, 20, 21, 22], "{}", drafter.kind());
        assert_eq!(draft(&mut *drafter, &asked, 2), [17, 18], "{}", drafter.kind());
        assert_eq!(draft(&mut *drafter, &asked, 0), [0; 0], "{}", drafter.kind());
    }
    // No draft after an unseen n-gram, and none after too short a match. (The cache needs only one token.)
    for unknown in [&[1, 2, 3][..], &[14, 2, 16], &[16], &[]] {
        for mut drafter in all() {
            let asked = [&text[..], unknown].concat();
            drafter.begin(&asked);
            let drafted = draft(&mut *drafter, &asked, 64);
            assert!(drafted.is_empty() || drafter.kind() == DrafterKind::NgramCache, "{}: {drafted:?}", drafter.kind());
        }
    }
}

/// Tokens that arrive one by one, or a few at a time, are learnt like those of a prompt.
#[test]
fn n_grams_are_learnt_across_rounds() {
    let text: Vec<u32> = (10..40).collect();
    for step in [1, 2, 5] {
        for mut drafter in all() {
            drafter.begin(&text[..1]);
            let mut written = 1;
            while written < text.len() {
                written = (written + step).min(text.len());
                observe(&mut *drafter, &text[..written], None);
            }
            let asked = [&text[..], &[14, 15, 16]].concat();
            for end in text.len() + 1..=asked.len() {
                observe(&mut *drafter, &asked[..end], None);
            }
            let drafted = draft(&mut *drafter, &asked, 4);
            assert_eq!(drafted, [17, 18, 19, 20], "{}, {step} at a time", drafter.kind());
        }
    }
}

/// A new sequence that is shorter than the last one is learnt.
#[test]
fn a_shorter_sequence_is_learnt() {
    let long: Vec<u32> = (100..400).collect();
    let text: Vec<u32> = (10..40).chain([14, 15, 16]).collect();
    for mut drafter in all() {
        drafter.begin(&long);
        drafter.begin(&text);
        assert_eq!(draft(&mut *drafter, &text, 3), [17, 18, 19], "{}", drafter.kind());
    }
}

/// A period shorter than the draft is continued.
#[test]
fn a_short_period_goes_on() {
    let text: Vec<u32> = [7, 8].repeat(4);
    let (mut simple, mut map) =
        (NgramSimple::new(NgramSimpleOptions { ngram_len: 3, max_draft_tokens: 6 }), NgramMapK::new(map(3, 6, 1)));
    map.begin(&text);
    for drafter in [&mut simple as &mut dyn Drafter, &mut map] {
        assert_eq!(draft(drafter, &text, 64), [7, 8, 7, 8, 7, 8], "{}", drafter.kind());
    }
}

/// The documented minimum is respected: the draft is what that many occurrences have in common.
#[test]
fn min_hits_are_honoured() {
    let key = [1, 2, 3];
    let once = [&key[..], &[50, 51, 52, 53], &key].concat();
    let twice = [&key[..], &[50, 51, 52, 53], &key, &[50, 51, 90, 91], &key].concat();
    for (hits, in_once, in_twice) in
        [(1, &[50, 51, 52, 53][..], &[50, 51, 90, 91][..]), (2, &[], &[50, 51]), (3, &[], &[])]
    {
        let mut drafter = NgramMapK::new(map(3, 4, hits));
        drafter.begin(&once);
        assert_eq!(draft(&mut drafter, &once, 64), in_once, "{hits} hits");
        drafter.begin(&twice);
        assert_eq!(draft(&mut drafter, &twice, 64), in_twice, "{hits} hits");
    }
    let mut voting = NgramMapK4v::new(map(3, 4, 2));
    voting.begin(&once);
    assert_eq!(draft(&mut voting, &once, 64), [0; 0]);
}

/// A cap falls to the accepted length, is never 0, and grows back.
#[test]
fn caps_grow_back() {
    let text: Vec<u32> = (10..60).chain([14, 15, 16]).collect();
    let drafters: [Box<dyn Drafter>; 2] =
        [Box::new(NgramMapK::new(map(3, 16, 1))), Box::new(NgramMapK4v::new(map(3, 16, 1)))];
    for mut drafter in drafters {
        drafter.begin(&text);
        let mut lengths = Vec::new();
        for accepted in [0, 1, 2, 4, 3, 4, 8, 16, 16] {
            let drafted = draft(&mut *drafter, &text, 64).len();
            lengths.push(drafted);
            observe(&mut *drafter, &text, accept_result(drafted, accepted.min(drafted)));
        }
        assert_eq!(lengths, [16, 1, 2, 4, 8, 4, 8, 16, 16], "{}", drafter.kind());
    }
}

/// The largest caps double without overflow: one of 0 would end the drafts of its key.
#[test]
fn the_largest_caps_stay() {
    let text: Vec<u32> = (10..60).chain([14, 15, 16]).collect();
    for most in [1 << (usize::BITS - 1), usize::MAX] {
        let mut drafter = NgramMapK::new(map(3, most, 1));
        drafter.begin(&text);
        for _ in 0..3 {
            assert_eq!(draft(&mut drafter, &text, 8).len(), 8, "{most}");
            observe(&mut drafter, &text, accept_result(8, 8));
        }
    }
}

/// The majority continuation is drafted, not the latest.
#[test]
fn the_voted_continuation_is_drafted() {
    let key = [1, 2, 3];
    let (often, seldom) = ([50, 51, 52], [60, 61, 62]);
    let text = [&key[..], &often, &key, &often, &key, &seldom, &key].concat();
    let mut drafter = NgramMapK4v::new(map(3, 3, 1));
    drafter.begin(&text);
    assert_eq!(draft(&mut drafter, &text, 64), often);
    // One more for the other: two to two is not a majority.
    let text = [&text[..], &seldom, &key].concat();
    drafter.begin(&text);
    assert_eq!(draft(&mut drafter, &text, 64), [0; 0]);
}

/// Four continuations are counted; a fifth replaces the rarest.
#[test]
fn the_rarest_continuation_is_forgotten() {
    let key = [1, 2];
    let mut text = Vec::new();
    for (value, times) in [(50, 6), (51, 1), (52, 1), (53, 1), (54, 1), (55, 1)] {
        (0..times).for_each(|_| text.extend([1, 2, value, value]));
    }
    text.extend(key);
    let mut drafter = NgramMapK4v::new(map(2, 2, 1));
    drafter.begin(&text);
    assert_eq!(draft(&mut drafter, &text, 64), [50, 50]);
}

/// A different n-gram does not match, however full the table, and short finds count.
#[test]
fn a_collision_proposes_nothing() {
    let pool = Arc::new(NgramPool::default());
    let options = NgramModOptions { ngram_len: 4, min_draft_tokens: 1, max_draft_tokens: 8 };
    let mut rng = StdRng::seed_from_u64(9);
    let text: Vec<u32> = (0..900_000).map(|_| rng.random_range(0..200_000)).collect();
    let mut writer = NgramMod::new(options, pool.clone());
    writer.begin(&text);
    // A fifth of the slots is taken, so tens of thousands of these keys collide with another's entry.
    let mut reader = NgramMod::new(options, pool);
    let junk = (0..200_000)
        .filter(|_| {
            let key: [u32; 4] = std::array::from_fn(|_| rng.random_range(300_000..400_000));
            !draft(&mut reader, &key, 64).is_empty()
        })
        .count();
    assert_eq!(junk, 0, "drafts after n-grams that were never written");
    let at = text.len() - 100;
    assert_eq!(
        draft(&mut reader, &text[at..at + 4], 64),
        text[at + 4..at + 12],
        "what one session wrote, another finds"
    );
}

#[test]
fn the_pool_needs_as_many_in_a_row_as_it_is_told() {
    let text: Vec<u32> = (10..20).collect();
    for (min, drafted) in [(1, 3), (3, 3), (4, 0)] {
        let mut drafter =
            NgramMod::new(NgramModOptions { ngram_len: 3, min_draft_tokens: min, max_draft_tokens: 8 }, Arc::default());
        drafter.begin(&text);
        assert_eq!(draft(&mut drafter, &[14, 15, 16], 64).len(), drafted, "at least {min}");
    }
}

/// The static cache drafts if the others have no match and is weighted in if they do; the dynamic
/// one has a stricter threshold.
#[test]
fn three_caches_answer_in_turn() {
    let learnt = |text: &[u32], longest| {
        let mut cache = NgramCache::default();
        cache.learn(text, 0, longest);
        Arc::new(cache)
    };
    let corpus = learnt(&[1, 2, 30, 1, 2, 30, 1, 2, 31], 2);
    let earlier = learnt(&[5, 6, 7, 40, 5, 6, 7, 40, 5, 6, 7, 40, 8, 9, 41], 4);
    let options = NgramCacheOptions { max_draft_tokens: 1, corpus: Some(corpus), earlier: Some(earlier) };
    let mut drafter = NgramCacheDrafter::new(options);
    let mut next = |text: &[u32]| {
        drafter.begin(&[]);
        drafter.begin(text);
        draft(&mut drafter, text, 8)
    };
    assert_eq!(next(&[90, 1, 2]), [30], "the corpus alone");
    assert_eq!(next(&[5, 6, 7]), [40], "an earlier text, often enough");
    assert_eq!(next(&[8, 9]), [0; 0], "an earlier text, once");
    assert_eq!(next(&[1, 2, 77, 80, 1, 2, 77, 81, 1, 2]), [77], "the context before both");
    assert_eq!(next(&[1, 2, 31, 81, 1, 2, 30, 82, 1, 2]), [30], "of two in the context the corpus's favourite");
}

#[test]
fn caches_are_saved_and_loaded() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("static.ngrams");
    let mut cache = NgramCache::default();
    cache.learn(&[1, 2, 3, 1, 2, 3, 1, 2, 4], 0, 4);
    cache.save(&path).expect("a file");
    assert_eq!(NgramCache::load(&path).expect("the same"), cache);
    let whole = std::fs::read(&path).expect("a file");
    for len in 0..whole.len() {
        std::fs::write(&path, &whole[..len]).expect("a file");
        let complaint = NgramCache::load(&path).expect_err("cut short").to_string();
        assert!(complaint.contains("static.ngrams") && complaint.contains("again"), "{len} bytes: {complaint}");
    }
    // A count beyond the file's size is refused.
    let mut greedy = whole.clone();
    greedy[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, greedy).expect("a file");
    assert!(NgramCache::load(&path).expect_err("too many").to_string().contains("18446744073709551615 entries"));
    std::fs::write(&path, [&whole[..], &[0]].concat()).expect("a file");
    NgramCache::load(&path).expect_err("a byte too many");
    assert!(NgramCache::load(directory.path().join("none")).is_err());
    let complaint = NgramCache::load("/dev/null").expect_err("a device").to_string();
    assert_eq!(complaint, "/dev/null: is not a regular file; an n-gram cache is expected here");

    // Counts of any size are compared.
    let mut most = whole.clone();
    most[16..].chunks_exact_mut(24).for_each(|entry| entry[20..].fill(0xff));
    std::fs::write(&path, most).expect("a file");
    let most = Arc::new(NgramCache::load(&path).expect("counts"));
    let options = NgramCacheOptions { max_draft_tokens: 1, corpus: Some(most.clone()), earlier: Some(most) };
    let mut drafter = NgramCacheDrafter::new(options);
    drafter.begin(&[9, 1, 2]);
    assert_eq!(draft(&mut drafter, &[9, 1, 2], 8), [3], "of equals the lowest id");

    let mut both = cache.clone();
    both.merge(&cache);
    let mut twice = NgramCache::default();
    (0..2).for_each(|_| twice.learn(&[1, 2, 3, 1, 2, 3, 1, 2, 4], 0, 4));
    assert_eq!(both, twice);
}

#[test]
fn drafters_are_named() {
    let list: Drafters = "ngram-mod,mtp".parse().expect("a list");
    let Drafters::Priority(list) = list else { panic!("{list:?}") };
    assert_eq!(list.iter().map(DrafterOptions::kind).collect::<Vec<_>>(), [DrafterKind::NgramMod, DrafterKind::Mtp]);
    assert_eq!("auto".parse::<Drafters>().expect("auto"), Drafters::Auto);
    assert!("ngram-mod:n=16,ngram-mod:n=8".parse::<Drafters>().is_ok(), "two sets of parameters");
    let one: DrafterOptions = "ngram-map-k:n=8:m=24:hits=2".parse().expect("a drafter");
    assert_eq!(one, DrafterOptions::NgramMapK(map(8, 24, 2)));
    for (text, about) in [
        ("ngram-mood", &["\"ngram-mood\"", "ngram-mod", "draft-model", "ngram-cache", "auto"][..]),
        ("", &["not a drafter", "mtp"]),
        ("mtp,,mtp", &["not a drafter"]),
        ("mtp,ngram-mod,mtp", &["mtp is listed twice"]),
        ("ngram-mod:n=16,ngram-mod:n=16", &["ngram-mod is listed twice"]),
        ("mtp:n=3", &["no parameter", "\"n\""]),
        ("ngram-simple:hits=3", &["\"hits\"", "n, m"]),
        ("ngram-map-k:hits=17", &["hits is 17", "at most 16"]),
        ("ngram-mod:max=1", &["min is 2", "at most max", "is 1"]),
        ("auto,mtp", &["\"auto\"", "auto alone"]),
        ("ngram-simple:n", &["must be a number"]),
        ("ngram-simple:n=-1", &["-1", "must be a number"]),
        ("ngram-simple:m=0", &["m is 0", "at least 1"]),
    ] {
        let complaint = text.parse::<Drafters>().expect_err(text).to_string();
        assert!(about.iter().all(|part| complaint.contains(part)), "{text:?}: {complaint}");
        assert_eq!(complaint.lines().count(), 1);
    }
    for kind in DrafterKind::named() {
        assert_eq!(kind.name().parse::<DrafterOptions>().expect("a name").kind(), kind);
    }
}
