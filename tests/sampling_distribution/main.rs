//! Sampling with drafts draws from the target's own distribution. Synthetic models over a tiny vocabulary, whose exact
//! distribution is known, test the pure functions; the engine itself is compared with plain sampling.

#[path = "../cases/mod.rs"]
mod cases;
mod penalties;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeInclusive;

use foretoken::sampler::{Distribution, Dry, Penalties, Sampler, Xtc};
use foretoken::speculative::{
    BlockSize, Costs, Draft, DraftSampling, DrafterKind, DrafterOptions, Drafters, Machine, NgramMapOptions,
    NgramSimpleOptions, accept,
};
use foretoken::{
    DraftPipeline, Engine, EngineOptions, GenerateOptions, Isa, Sampling, SessionOptions, Speculation,
    SpeculationOptions,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Normal deviate that a correct sampler exceeds once in ten thousand tests. Seeds are fixed, so a
/// passing test always passes.
const LIMIT: f64 = 3.72;

/// Wilson and Hilferty's normal deviate of a chi-square statistic: 0 is the expectation, [`LIMIT`] one in 10^4.
fn deviate(chi_square: f64, degrees: f64) -> f64 {
    let spread = 2.0 / (9.0 * degrees);
    ((chi_square / degrees).cbrt() - (1.0 - spread)) / spread.sqrt()
}

/// The deviation of `counts` from `probabilities`. Cells too rare for the statistic are merged.
fn goodness_of_fit<K: Ord>(counts: &BTreeMap<K, usize>, probabilities: &BTreeMap<K, f64>) -> f64 {
    let draws = counts.values().sum::<usize>() as f64;
    assert!(counts.keys().all(|outcome| probabilities.contains_key(outcome)), "an impossible outcome was drawn");
    let mut rest = (0.0, 0.0);
    let (mut chi_square, mut cells) = (0.0, 0.0);
    let mut add = |observed: f64, expected: f64| {
        chi_square += (observed - expected).powi(2) / expected;
        cells += 1.0;
    };
    for (outcome, probability) in probabilities {
        let (observed, expected) = (counts.get(outcome).map_or(0.0, |n| *n as f64), probability * draws);
        if expected >= 5.0 {
            add(observed, expected);
        } else {
            rest = (rest.0 + observed, rest.1 + expected);
        }
    }
    if rest.1 > 0.0 {
        add(rest.0, rest.1);
    }
    deviate(chi_square, cells - 1.0)
}

/// The deviation of two samples of equal size from a common distribution.
fn two_samples<K: Ord + Clone>(a: &BTreeMap<K, usize>, b: &BTreeMap<K, usize>) -> f64 {
    let (mut chi_square, mut cells, mut rest) = (0.0, 0.0, (0.0, 0.0));
    let mut add = |a: f64, b: f64| {
        chi_square += (a - b).powi(2) / (a + b);
        cells += 1.0;
    };
    let outcomes: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    for outcome in outcomes {
        let count = |counts: &BTreeMap<K, usize>| counts.get(outcome).map_or(0.0, |n| *n as f64);
        if count(a) + count(b) >= 10.0 {
            add(count(a), count(b));
        } else {
            rest = (rest.0 + count(a), rest.1 + count(b));
        }
    }
    if rest.0 + rest.1 > 0.0 {
        add(rest.0, rest.1);
    }
    deviate(chi_square, cells - 1.0)
}

fn sampling(temperature: f32, top_k: Option<usize>, top_p: f32, min_p: f32) -> Sampling {
    Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() }
}

fn penalized(temperature: f32) -> Sampling {
    let penalties = Penalties { repeat: 1.5, frequency: 0.5, presence: 0.5, last_n: Some(2) };
    let dry = Dry { allowed_length: 1, ..Dry::default() };
    Sampling { penalties, dry: Some(dry), temperature, ..Sampling::default() }
}

/// Each filter alone, and all together; penalties, whose rows depend on the drafts before them.
fn samplings() -> [Sampling; 10] {
    [
        penalized(1.0),
        Sampling { top_k: Some(6), ..penalized(0.8) },
        Sampling { top_n_sigma: Some(1.0), ..sampling(1.0, None, 1.0, 0.0) },
        Sampling { typical_p: 0.7, xtc: Some(Xtc::default()), ..sampling(1.0, None, 1.0, 0.0) },
        sampling(1.0, None, 1.0, 0.0),
        sampling(0.6, None, 1.0, 0.0),
        sampling(1.0, Some(4), 1.0, 0.0),
        sampling(1.3, None, 0.8, 0.0),
        sampling(1.0, None, 1.0, 0.15),
        sampling(1.2, Some(6), 0.9, 0.05),
    ]
}

/// Drafts, and the target's distributions before and after each.
type Round = (Draft, Vec<Distribution>);

/// Two models that agree in part: logits that depend on all previous tokens.
struct Models {
    vocabulary: usize,
    sampler: Sampler,
    target: HashMap<Vec<u32>, Distribution>,
    drafter: HashMap<Vec<u32>, (u32, Distribution)>,
    /// By the text with the drafts, their number, and whether they are drawn.
    rounds: HashMap<(Vec<u32>, usize, bool), Round>,
}

impl Models {
    fn new(vocabulary: usize, sampling: Sampling) -> Self {
        let sampler = Sampler::new(Isa::best(), sampling, Vec::new()).expect("parameters in range");
        Self { vocabulary, sampler, target: HashMap::new(), drafter: HashMap::new(), rounds: HashMap::new() }
    }

    fn logits(&self, prefix: &[u32], salt: u64, spread: f32) -> Vec<f32> {
        let seed = prefix.iter().fold(salt, |seed, token| seed.wrapping_mul(1_000_003) + u64::from(*token) + 1);
        let mut rng = StdRng::seed_from_u64(seed);
        (0..self.vocabulary).map(|_| spread * rng.random_range(-1.0..1.0)).collect()
    }

    fn target(&mut self, prefix: &[u32]) -> Distribution {
        if let Some(known) = self.target.get(prefix) {
            return known.clone();
        }
        let mut logits = self.logits(prefix, 1, 3.0);
        self.sampler.penalize(prefix, &mut logits).expect("no error");
        let distribution = self.sampler.distribution(None, &logits).expect("finite logits");
        self.target.insert(prefix.to_vec(), distribution.clone());
        distribution
    }

    /// The drafter's best token and its distribution: the target's logits, disturbed.
    fn drafter(&mut self, prefix: &[u32]) -> &(u32, Distribution) {
        if !self.drafter.contains_key(prefix) {
            let (target, noise) = (self.logits(prefix, 1, 3.0), self.logits(prefix, 2, 1.5));
            let logits: Vec<f32> = target.iter().zip(noise).map(|(a, b)| a + b).collect();
            let best = self.sampler.most_probable(None, &logits).expect("finite logits");
            let distribution = self.sampler.distribution(None, &logits).expect("finite logits");
            self.drafter.insert(prefix.to_vec(), (best, distribution));
        }
        &self.drafter[prefix]
    }

    /// The exact probabilities of all texts of `tokens` tokens.
    fn exact(&mut self, tokens: usize) -> BTreeMap<Vec<u32>, f64> {
        let mut texts = BTreeMap::from([(Vec::new(), 1.0)]);
        for _ in 0..tokens {
            let mut longer = BTreeMap::new();
            for (text, probability) in texts {
                let next = self.target(&text);
                for token in 0..self.vocabulary as u32 {
                    let conditional = next.probability(token);
                    if conditional > 0.0 {
                        longer.insert([&text[..], &[token]].concat(), probability * conditional);
                    }
                }
            }
            texts = longer;
        }
        texts
    }

    /// One round: up to `num_drafts` drafts and the token that follows the accepted ones.
    fn round(
        &mut self,
        prefix: &[u32],
        num_drafts: usize,
        drafts: DraftSampling,
        rng: &mut StdRng,
    ) -> (Vec<u32>, usize) {
        let mut text = prefix.to_vec();
        for _ in 0..num_drafts {
            let (best, distribution) = self.drafter(&text);
            let token = match drafts {
                DraftSampling::Greedy => *best,
                DraftSampling::Sampled => distribution.sample(rng),
            };
            text.push(token);
        }
        let round = (text, num_drafts, drafts == DraftSampling::Sampled);
        if !self.rounds.contains_key(&round) {
            let (text, _, drawn) = &round;
            let target_probs = (prefix.len()..=text.len()).map(|len| self.target(&text[..len])).collect();
            let probs = (prefix.len()..text.len()).map(|len| self.drafter(&text[..len]).1.clone());
            let probs = drawn.then(|| probs.collect());
            let draft = Draft { tokens: text[prefix.len()..].to_vec(), probs, ..Draft::default() };
            self.rounds.insert(round.clone(), (draft, target_probs));
        }
        let (draft, target_probs) = &self.rounds[&round];
        let accepted = accept(draft, target_probs, rng);
        let mut emitted = draft.tokens[..accepted.count].to_vec();
        emitted.push(accepted.next);
        (emitted, accepted.count)
    }
}

#[test]
fn drafts_leave_the_targets_distribution() {
    const DRAWS: usize = 100_000;
    // Pairs over twelve tokens, triples over eight: few enough texts that each occurs often.
    for (sampling, (vocabulary, tokens)) in samplings().into_iter().zip([(12, 2), (8, 3)].into_iter().cycle()) {
        let mut models = Models::new(vocabulary, sampling.clone());
        let exact = models.exact(tokens);
        assert!((exact.values().sum::<f64>() - 1.0).abs() < 1e-9);
        for (num_drafts, drafts) in
            (1..=3).flat_map(|k| [DraftSampling::Greedy, DraftSampling::Sampled].map(|drafts| (k, drafts)))
        {
            let mut rng = StdRng::seed_from_u64(num_drafts as u64);
            let mut counts = BTreeMap::new();
            let (mut drafted, mut accepted) = (0, 0);
            for _ in 0..DRAWS {
                let mut text = Vec::new();
                while text.len() < tokens {
                    let (emitted, count) = models.round(&text, num_drafts, drafts, &mut rng);
                    text.extend(emitted);
                    drafted += num_drafts;
                    accepted += count;
                }
                text.truncate(tokens);
                *counts.entry(text).or_insert(0) += 1;
            }
            let fit = goodness_of_fit(&counts, &exact);
            let what = format!("{sampling:?}, {num_drafts} {drafts:?} drafts");
            println!("{what}: {accepted} of {drafted} accepted, deviate {fit:.2}");
            assert!(fit < LIMIT, "{what}: deviate {fit}");
            // Acceptance and rejection are both frequent enough to be tested.
            assert!((drafted / 20..drafted * 19 / 20).contains(&accepted), "{what}: {accepted} of {drafted} accepted");
        }
    }
}

/// The statistic detects a wrong rule: accepting a draft whenever its target probability is
/// positive is a small mistake.
#[test]
fn a_wrong_rule_would_be_seen() {
    let mut models = Models::new(12, sampling(1.0, Some(4), 1.0, 0.0));
    let exact = models.exact(1);
    let mut rng = StdRng::seed_from_u64(0);
    let (target, (_, drafter)) = (models.target(&[]), models.drafter(&[]).clone());
    let (mut right, mut wrong) = (BTreeMap::new(), BTreeMap::new());
    for _ in 0..100_000 {
        let draft = drafter.sample(&mut rng);
        let possible = target.probability(draft) > 0.0;
        *wrong.entry(vec![if possible { draft } else { target.sample(&mut rng) }]).or_insert(0) += 1;
        *right.entry(vec![target.sample(&mut rng)]).or_insert(0) += 1;
    }
    let (right, wrong) = (goodness_of_fit(&right, &exact), goodness_of_fit(&wrong, &exact));
    assert!(right < LIMIT && wrong > 10.0 * LIMIT, "right rule {right}, wrong rule {wrong}");
}

/// A draft with target probability 0 is never accepted, one with probability 1 always is, and a
/// rejected one-hot draft is never its own correction.
#[test]
fn the_rule_at_its_edges() {
    let mut rng = StdRng::seed_from_u64(5);
    let target = [Distribution::new(vec![(3, 1.0), (7, 1.0)]), Distribution::certain(9)];
    let mut kept = 0;
    for _ in 0..1000 {
        let accepted = accept(&Draft { tokens: vec![4], ..Draft::default() }, &target, &mut rng);
        assert!(accepted.count == 0 && [3, 7].contains(&accepted.next), "{accepted:?}");
        let accepted = accept(&Draft { tokens: vec![3], ..Draft::default() }, &target, &mut rng);
        assert_eq!(accepted.next, if accepted.count == 1 { 9 } else { 7 });
        kept += accepted.count;
        let same = Draft { tokens: vec![3], probs: Some(vec![target[0].clone()]), ..Draft::default() };
        assert_eq!(accept(&same, &target, &mut rng).count, 1, "equal distributions accept everything");
    }
    assert!((400..600).contains(&kept), "a draft of probability one half was kept {kept} times in 1000");
}

fn normalise(rows: &mut [(u32, f64)]) {
    let total: f64 = rows.iter().map(|(_, p)| p).sum();
    rows.iter_mut().for_each(|(_, p)| *p /= total);
}

/// Probabilities at another temperature.
fn heated(rows: &[(u32, f64)], temperature: f64) -> Vec<(u32, f64)> {
    let most = rows.iter().map(|(_, p)| p.ln()).fold(f64::NEG_INFINITY, f64::max);
    let mut heated: Vec<_> = rows.iter().map(|(id, p)| (*id, ((p.ln() - most) / temperature).exp())).collect();
    normalise(&mut heated);
    heated
}

/// The definition, step by step and in f64: softmax, each filter on the renormalised rest, and the temperature.
fn by_definition(sampling: &Sampling, suppressed: &[u32], ids: &[u32], logits: &[f32]) -> BTreeMap<u32, f64> {
    let allowed: Vec<_> = ids.iter().zip(logits).filter(|(id, _)| !suppressed.contains(id)).collect();
    let values = || allowed.iter().map(|(_, logit)| f64::from(**logit));
    let (max, count) = (values().fold(f64::NEG_INFINITY, f64::max), allowed.len() as f64);
    let mean = values().sum::<f64>() / count;
    let deviation = (values().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
    let within = |x: f64| sampling.top_n_sigma.is_none_or(|n| x >= max - f64::from(n) * deviation);
    let rows = allowed.iter().map(|(id, logit)| (**id, f64::from(**logit))).filter(|(_, logit)| within(*logit));
    let mut rows: Vec<(u32, f64)> = rows.map(|(id, logit)| (id, (logit - max).exp())).collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    rows.truncate(sampling.top_k.unwrap_or(rows.len()));
    normalise(&mut rows);
    if sampling.typical_p < 1.0 {
        let entropy: f64 = rows.iter().map(|(_, p)| -p * p.ln()).sum();
        rows.sort_by(|a, b| (-a.1.ln() - entropy).abs().total_cmp(&(-b.1.ln() - entropy).abs()));
        let mut before = 0.0;
        rows.retain(|(_, p)| {
            before += p;
            before - p <= f64::from(sampling.typical_p)
        });
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        normalise(&mut rows);
    }
    let mut before = 0.0;
    rows.retain(|(_, p)| {
        before += p;
        before - p < f64::from(sampling.top_p)
    });
    normalise(&mut rows);
    let least = f64::from(sampling.min_p) * rows[0].1;
    rows.retain(|(_, p)| *p >= least);
    normalise(&mut rows);
    let all = heated(&rows, sampling.temperature.into());
    let Some(xtc) = sampling.xtc else { return all.into_iter().collect() };
    // Either all of them, or only the last of the top choices.
    let top = rows.iter().filter(|(_, p)| *p >= f64::from(xtc.threshold)).count();
    let rest: BTreeMap<u32, f64> =
        heated(&rows[top.saturating_sub(1)..], sampling.temperature.into()).into_iter().collect();
    let applies = f64::from(xtc.probability);
    all.into_iter()
        .map(|(id, p)| (id, (1.0 - applies) * p + applies * rest.get(&id).copied().unwrap_or_default()))
        .collect()
}

#[test]
fn filters_are_the_definitions() {
    let mut rng = StdRng::seed_from_u64(6);
    for case in 0..6000 {
        let vocabulary = rng.random_range(1..40);
        let logits: Vec<f32> = (0..vocabulary).map(|_| rng.random_range(-8.0..8.0)).collect();
        // Separate ids, as from a drafter's head that scores a part of the vocabulary.
        let ids: Vec<u32> = (0..vocabulary).map(|i| if case % 2 == 0 { i } else { 3 * (vocabulary - i) }).collect();
        let suppressed: Vec<u32> = ids.iter().copied().skip(1).filter(|_| rng.random_range(0..10) == 0).collect();
        let mut rarely = || rng.random_range(0..4) == 0;
        let (sigma, typical, xtc) = (rarely(), rarely(), rarely());
        let sampling = Sampling {
            temperature: rng.random_range(0.3..2.0),
            top_k: rng.random::<bool>().then(|| rng.random_range(1..50)),
            top_p: if rng.random() { 1.0 } else { rng.random_range(0.05..1.0) },
            min_p: if rng.random() { 0.0 } else { rng.random_range(0.0..0.5) },
            top_n_sigma: sigma.then(|| rng.random_range(0.1..2.0)),
            typical_p: if typical { rng.random_range(0.05..1.0) } else { 1.0 },
            xtc: xtc.then(|| Xtc { probability: rng.random_range(0.0..1.0), threshold: rng.random_range(0.0..0.5) }),
            ..Sampling::default()
        };
        let sampler = Sampler::new(Isa::best(), sampling.clone(), suppressed.clone()).expect("parameters in range");
        let got = sampler.distribution((case % 2 == 1).then_some(&ids), &logits).expect("finite logits");
        let want = by_definition(&sampling, &suppressed, &ids, &logits);
        let what = format!("case {case}: {sampling:?}, {suppressed:?} suppressed");
        for id in 0..=3 * vocabulary {
            let (got, want) = (got.probability(id), want.get(&id).copied().unwrap_or(0.0));
            assert!((got - want).abs() < 1e-5, "{what}: token {id} has {got}, not {want}");
        }
        // Greedy is the limit of small temperatures, under the same suppression; a typical token need not be it.
        let greedy = Sampler::new(Isa::best(), Sampling::default(), suppressed.clone()).expect("parameters in range");
        let best = greedy.most_probable((case % 2 == 1).then_some(&ids), &logits).expect("finite logits");
        assert!((got.probability(best) > 0.0 || typical) && !suppressed.contains(&best), "{what}");
    }
}

/// Top choices are excluded with the configured probability, and the least probable of them stays.
#[test]
fn top_choices_are_excluded() {
    let logits = [0.4_f32, 0.3, 0.2, 0.1].map(f32::ln);
    let probabilities = |probability, threshold| {
        let xtc = Some(Xtc { probability, threshold });
        let sampling = Sampling { temperature: 1.0, xtc, ..Sampling::default() };
        let sampler = Sampler::new(Isa::best(), sampling, Vec::new()).expect("parameters in range");
        let distribution = sampler.distribution(None, &logits).expect("finite logits");
        [0, 1, 2, 3].map(|id| (distribution.probability(id) * 1e4).round() / 1e4)
    };
    assert_eq!(probabilities(1.0, 0.25), [0.0, 0.5, 0.3333, 0.1667]);
    assert_eq!(probabilities(1.0, 0.15), [0.0, 0.0, 0.6667, 0.3333]);
    assert_eq!(probabilities(1.0, 0.05), [0.0, 0.0, 0.0, 1.0]);
    assert_eq!(probabilities(1.0, 0.45), [0.4, 0.3, 0.2, 0.1]);
    assert_eq!(probabilities(0.5, 0.25), [0.2, 0.4, 0.2667, 0.1333]);
    assert_eq!(probabilities(0.0, 0.25), [0.4, 0.3, 0.2, 0.1]);
    assert_eq!(probabilities(1.0, 0.0), [0.0, 0.0, 0.0, 1.0]);
}

/// A threshold of 0 leaves the least probable of the tokens that are possible at all, however improbable it is.
#[test]
fn excluded_tokens_are_no_top_choices() {
    let xtc = Some(Xtc { probability: 1.0, threshold: 0.0 });
    let sampling = Sampling { temperature: 0.5, xtc, ..Sampling::default() };
    let sampler = Sampler::new(Isa::best(), sampling, vec![1]).expect("parameters in range");
    let distribution = sampler.distribution(None, &[0.0, -300.0, -200.0, f32::NEG_INFINITY]).expect("finite logits");
    assert_eq!(distribution, Distribution::certain(2));
}

#[test]
fn equal_logits_keep_the_lowest_ids() {
    let sampler = Sampler::new(Isa::best(), sampling(1.0, Some(2), 1.0, 0.0), Vec::new()).expect("parameters in range");
    let distribution = sampler.distribution(None, &[0.0, 1.0, 1.0, 1.0]).expect("finite logits");
    let probabilities: Vec<f64> = (0..4).map(|id| distribution.probability(id)).collect();
    assert_eq!(probabilities, [0.0, 0.5, 0.5, 0.0]);
    assert_eq!(sampler.most_probable(None, &[1.0, 3.0, 3.0]).expect("finite logits"), 1);
    // In long rows as well, with ids in any order.
    let descending: Vec<u32> = (0..3000).rev().collect();
    assert_eq!(sampler.most_probable(Some(&descending), &[1.0; 3000]).expect("finite logits"), 0);
    let mut damaged = vec![0.0; 3000];
    (damaged[7], damaged[2500]) = (5.0, f32::NAN);
    assert!(sampler.most_probable(None, &damaged).is_err(), "NaN among logits below the largest");
}

/// With `top_k`, the largest logits in order of id have the distribution of all: what is read from a device.
#[test]
fn the_largest_logits_are_enough() {
    let mut rng = StdRng::seed_from_u64(9);
    for (temperature, top_k) in [(0.7, 1), (1.0, 5), (1.5, 64)] {
        let sampling = Sampling { typical_p: 0.9, ..sampling(temperature, Some(top_k), 0.95, 0.02) };
        let sampler = Sampler::new(Isa::best(), sampling, Vec::new()).expect("a sampler");
        for _ in 0..20 {
            // Quarters: some are equal.
            let logits: Vec<f32> = (0..300).map(|_| rng.random_range(-40..40) as f32 / 4.0).collect();
            let mut order: Vec<u32> = (0..300).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            let mut largest = order[..64].to_vec();
            largest.sort_unstable();
            let of: Vec<f32> = largest.iter().map(|id| logits[*id as usize]).collect();
            let all = sampler.distribution(None, &logits).expect("a distribution");
            assert_eq!(sampler.distribution(Some(&largest), &of).expect("a distribution"), all);
        }
    }
}

/// Draws from a [`Distribution`] have its probabilities, also of more tokens than are added up at once.
#[test]
fn draws_follow_the_distribution() {
    let mut rng = StdRng::seed_from_u64(7);
    for tokens in [10, 600] {
        let total = f64::from(tokens * (tokens + 1) / 2);
        let distribution = Distribution::new((0..tokens).map(|id| (id * 3, f64::from(id + 1))).collect());
        let exact: BTreeMap<u32, f64> = (0..tokens).map(|id| (id * 3, f64::from(id + 1) / total)).collect();
        let mut counts = BTreeMap::new();
        (0..100_000).for_each(|_| *counts.entry(distribution.sample(&mut rng)).or_insert(0) += 1);
        let fit = goodness_of_fit(&counts, &exact);
        assert!(fit < LIMIT, "{tokens} tokens: deviate {fit}");
    }
}

/// Costs at which drafts pay off, measured so often that the few rounds of a text change no choice.
fn costs(machine: &Machine) -> Costs {
    let mut costs = Costs::new(machine.clone());
    for rows in (1..=8).cycle().take(8 * 64) {
        costs.verified(0, rows, 10.0 + 0.1 * rows as f64);
        costs.drafted(DrafterKind::Mtp, 1, 0.1);
    }
    costs
}

/// The first tokens of `seeds` generations, and the share of drafts that were accepted; NaN without drafts.
fn texts(
    engine: &Engine,
    prompt: &[u32],
    options: &GenerateOptions,
    seeds: std::ops::Range<u64>,
) -> (BTreeMap<Vec<u32>, usize>, f64) {
    let mut counts = BTreeMap::new();
    let (mut drafted, mut accepted) = (0, 0);
    let costs = costs(engine.costs().machine());
    for seed in seeds {
        // What a text measures is not for the next one.
        engine.set_costs(costs.clone()).expect("this machine's");
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let options = GenerateOptions { seed, ..options.clone() };
        let mut generation = session.generate(prompt, &options).expect("a generation");
        let ids: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
        drafted += generation.statistics().drafted;
        accepted += generation.statistics().accepted;
        *counts.entry(ids).or_insert(0) += 1;
    }
    (counts, accepted as f64 / drafted as f64)
}

struct Pair {
    engine: Engine,
    prompt: Vec<u32>,
    /// The share of drafts that may be accepted.
    accepted: RangeInclusive<f64>,
}

impl Pair {
    fn load(case: &cases::Case) -> Engine {
        let options = EngineOptions::new(case.path.join("target")).with_assistant(case.path.join("assistant"));
        Engine::load(&EngineOptions { threads: Some(1), ..options }).expect("an engine")
    }

    /// The demo pair, whose weights are trained.
    fn demo(prompt: &str, accepted: RangeInclusive<f64>) -> Self {
        let engine = Self::load(&cases::demo());
        let prompt = engine.tokenizer().and_then(|tokenizer| tokenizer.encode(prompt)).expect("tokens");
        Self { engine, prompt, accepted }
    }

    /// The first tokens with greedy and with drawn drafts, against those without.
    fn same_distribution(&self, sampling: Sampling, max_tokens: usize, seeds: u64) {
        let with =
            |speculation| GenerateOptions { max_tokens, sampling: sampling.clone(), speculation, ..Default::default() };
        let (plain, _) = texts(&self.engine, &self.prompt, &with(Speculation::Off), 0..seeds);
        assert!(plain.len() > 4, "{plain:?} is too few texts for a comparison");
        for (n, drafts) in (1..).zip([DraftSampling::Greedy, DraftSampling::Sampled]) {
            let speculation = Speculation::With(SpeculationOptions { drafts, ..SpeculationOptions::mtp(4) });
            let (speculative, rate) = texts(&self.engine, &self.prompt, &with(speculation), n * seeds..(n + 1) * seeds);
            let fit = two_samples(&plain, &speculative);
            println!("{drafts:?}: {} texts, {rate:.2} accepted, deviate {fit:.2}", speculative.len());
            assert!(fit < LIMIT, "{drafts:?}: deviate {fit}");
            assert!(self.accepted.contains(&rate), "{drafts:?}: {rate} accepted");
        }
        // Mixtures, by a planner, and drafted ahead.
        let lookups = [
            DrafterOptions::NgramMapK(NgramMapOptions { ngram_len: 1, max_draft_tokens: 3, min_hits: 1 }),
            DrafterOptions::NgramSimple(NgramSimpleOptions { ngram_len: 1, max_draft_tokens: 2 }),
        ];
        let mixture = Vec::from_iter(lookups.into_iter().chain([DrafterOptions::Mtp]));
        for (n, (drafters, block, pipeline)) in (3..).zip([
            (Drafters::Priority(mixture.clone()), BlockSize::Fixed(3), DraftPipeline::Ahead),
            (Drafters::Best(mixture.clone()), BlockSize::Fixed(3), DraftPipeline::InTurn),
            (Drafters::Best(mixture), BlockSize::Measured, DraftPipeline::InTurn),
        ]) {
            let what = format!("{block:?}, {pipeline:?}");
            let options =
                SpeculationOptions { drafters, block, pipeline, drafts: DraftSampling::Sampled, ..Default::default() };
            let speculation = Speculation::With(options);
            let (mixed, rate) = texts(&self.engine, &self.prompt, &with(speculation), n * seeds..(n + 1) * seeds);
            let fit = two_samples(&plain, &mixed);
            println!("mixture, {what}: {} texts, {rate:.2} accepted, deviate {fit:.2}", mixed.len());
            assert!(fit < LIMIT, "mixture, {what}: deviate {fit}");
            assert!(self.accepted.contains(&rate), "mixture, {what}: {rate} accepted");
        }
    }
}

/// Weights are random: nearly all drafts are rejected.
#[test]
fn the_engine_samples_as_without_drafts() {
    let case = cases::named("edge");
    let prompt = case.ids("input_ids")[..6].to_vec();
    let pair = Pair { engine: Pair::load(&case), prompt, accepted: 0.0..=0.05 };
    pair.same_distribution(sampling(1.0, Some(5), 1.0, 0.0), 3, 2000);
}

/// Penalties and DRY see the drafts before a row: the distribution is still that of plain decoding.
#[test]
fn the_engine_samples_as_without_drafts_under_penalties() {
    let pair = Pair::demo("impl<T> From<T> for T { impl<T> From", 0.2..=0.9);
    pair.same_distribution(Sampling { top_k: Some(5), xtc: Some(Xtc::default()), ..penalized(1.0) }, 3, 500);
}

/// The same with trained weights, so that most drafts are accepted.
#[test]
fn the_engine_samples_as_without_drafts_where_they_are_accepted() {
    let pair = Pair::demo("impl<T> From<", 0.5..=0.99);
    pair.same_distribution(sampling(1.0, Some(5), 1.0, 0.0), 3, 500);
}
