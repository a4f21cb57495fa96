//! Constrained texts match their constraint, the same with and without speculation; unsatisfiable
//! constraints are rejected with their path.

mod cases;
mod given;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

use foretoken::chat::{CallChoice, ChatOptions, Json, ReasoningStart, ReplyParser, ReplyPart, Thinking};
use foretoken::rand::rngs::StdRng;
use foretoken::speculative::{
    BlockSize, Context, CustomDrafter, Draft, DraftCost, DraftSampling, Drafter, DrafterKind, DrafterOptions, Drafters,
};
use foretoken::{
    Constraint, ConstraintLimits, DraftPipeline, EndOfGeneration, Engine, EngineOptions, Error, FinishReason,
    GenerateOptions, LogitsProcessor, Piece, Sampling, Scheduler, SchedulerOptions, SequenceId, SessionOptions,
    Speculation, SpeculationOptions, Statistics, Stop,
};
use given::given;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// The demo pair.
static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let case = cases::demo();
    let options = EngineOptions::new(case.path.join("target")).with_assistant(case.path.join("assistant"));
    Engine::load(&options).expect("the demo pair")
});

/// Output of a generation.
#[derive(Clone, Debug, Default, PartialEq)]
struct Written {
    ids: Vec<u32>,
    text: String,
    finish: Option<FinishReason>,
}

fn prompt() -> Vec<u32> {
    ENGINE.tokenizer().and_then(|tokenizer| tokenizer.encode("/// The value as JSON:\nlet value = r#\"")).expect("ids")
}

fn write(options: &GenerateOptions) -> (Written, Statistics) {
    write_after(&prompt(), options)
}

fn write_after(prompt: &[u32], options: &GenerateOptions) -> (Written, Statistics) {
    let mut session = ENGINE.session(&SessionOptions::default()).expect("a session");
    let mut generation = session.generate(prompt, options).expect("a generation");
    let mut written = Written::default();
    for piece in generation.by_ref() {
        let piece = piece.expect("a piece");
        written.ids.extend(piece.tokens);
        written.text += &piece.text;
    }
    written.finish = generation.finish_reason();
    (written, generation.statistics().clone())
}

/// Tokens that a model drafted, and those of them that were accepted.
fn of_model(statistics: &Statistics) -> [usize; 2] {
    let model = statistics.speculation.drafters.iter().find(|drafter| drafter.kind == Some(DrafterKind::Mtp));
    model.map_or([0, 0], |drafter| [drafter.drafted, drafter.accepted])
}

fn sum(of: &mut [usize; 2], more: [usize; 2]) {
    of.iter_mut().zip(more).for_each(|(of, more)| *of += more);
}

fn plain(constraint: Constraint) -> GenerateOptions {
    let speculation = Speculation::Off;
    GenerateOptions { max_tokens: 600, constraint: Some(constraint), speculation, ..GenerateOptions::default() }
}

fn speculation(drafters: &str, block: BlockSize) -> Speculation {
    let drafters = drafters.parse::<Drafters>().expect("drafters");
    Speculation::With(SpeculationOptions { drafters, block, ..SpeculationOptions::default() })
}

/// Schemas with bounded texts: strings, lists and numbers are limited.
fn schemas() -> Vec<Value> {
    let word = r#"{"type": "string", "pattern": "^[a-z]{1,12}$"}"#;
    let small = r#"{"type": "integer", "minimum": 0, "maximum": 999}"#;
    let schemas = r##"[
        {"type": "boolean"},
        {"type": "null"},
        {"const": "a \"quoted\" <eos> text"},
        {"const": {"name": "fixed", "list": [1, 2.5, true, null]}},
        {"enum": ["red", "green", "blue"]},
        {"enum": [1, "one", [1], {"one": 1}, null]},
        {"type": "integer", "minimum": -5, "maximum": 5},
        {"type": "integer", "exclusiveMinimum": 10, "maximum": 1000, "multipleOf": 7},
        {"enum": [0.5, -2, 1e3]},
        {"type": "string", "maxLength": 24},
        {"type": "string", "minLength": 3, "maxLength": 8},
        {"type": "string", "pattern": "^[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})?$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "ipv4"},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        {"type": "array", "items": SMALL, "maxItems": 4},
        {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3},
        {"type": "array", "prefixItems": [WORD, SMALL], "items": false, "minItems": 2},
        {"type": "object", "additionalProperties": false},
        {"type": "object", "properties": {"name": WORD}, "required": ["name"], "additionalProperties": false},
        {"type": "object", "properties": {"zeta": SMALL, "alpha": WORD, "mid": {"type": "boolean"}},
            "required": ["zeta", "alpha", "mid"], "additionalProperties": false},
        {"type": "object", "properties": {"a": SMALL, "b": WORD}, "additionalProperties": false},
        {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": SMALL},
            "required": ["kind", "radius"], "additionalProperties": false},
        {"anyOf": [
            {"type": "object", "properties": {"kind": {"const": "circle"}, "r": SMALL}, "required": ["kind", "r"],
                "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"const": "square"}, "side": SMALL}, "required": ["kind", "side"],
                "additionalProperties": false}]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 5}]},
        {"$defs": {"point": {"type": "object", "properties": {"x": SMALL, "y": SMALL}, "required": ["x", "y"],
            "additionalProperties": false}},
            "type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3},
        {"type": "object", "properties": {"user": {"type": "object", "properties": {"id": SMALL, "tags":
            {"type": "array", "items": WORD, "maxItems": 2}}, "required": ["id", "tags"], "additionalProperties": false}},
            "required": ["user"], "additionalProperties": false},
        {"type": "object", "properties": {"unicode": {"enum": ["größe", "日本", "🦀"]}}, "required": ["unicode"],
            "additionalProperties": false},
        {"type": "object", "patternProperties": {"^x[0-9]$": SMALL}, "maxProperties": 1,
            "additionalProperties": false}
    ]"##;
    serde_json::from_str(&schemas.replace("WORD", word).replace("SMALL", small)).expect("JSON")
}

/// Checks with the crate jsonschema that a text is JSON under the schema.
fn check(schema: &Value, written: &Written) {
    let text = &written.text;
    assert!(
        matches!(written.finish, Some(FinishReason::Constraint | FinishReason::EndOfText)),
        "{schema}: {written:?}"
    );
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{schema}: {text:?}: {e}"));
    let validator = jsonschema::options().should_validate_formats(true).build(schema).expect("a schema");
    assert!(validator.is_valid(&value), "{schema}: {text}");
}

#[test]
fn every_text_is_valid_and_speculation_changes_none() {
    let mut of_all = [0, 0];
    for schema in schemas() {
        let options = plain(Constraint::json_schema(schema.to_string()));
        let (want, _) = write(&options);
        check(&schema, &want);
        for speculation in [
            speculation("mtp", BlockSize::Fixed(2)),
            speculation("mtp", BlockSize::Fixed(4)),
            speculation("mtp", BlockSize::Fixed(6)),
            speculation("ngram-map-k:n=1:m=8:hits=1,mtp", BlockSize::Fixed(3)),
            speculation("ngram-simple:n=2", BlockSize::Fixed(5)),
            Speculation::Auto,
        ] {
            let (got, statistics) = write(&GenerateOptions { speculation: speculation.clone(), ..options.clone() });
            assert_eq!(got, want, "{schema}, {speculation:?}");
            sum(&mut of_all, of_model(&statistics));
        }
        let ahead = SpeculationOptions { pipeline: DraftPipeline::Ahead, ..SpeculationOptions::default() };
        let (got, _) = write(&GenerateOptions { speculation: Speculation::With(ahead), ..options.clone() });
        assert_eq!(got, want, "{schema}, drafting ahead");
    }
    let [drafted, accepted] = of_all;
    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted} accepted");
}

/// Drafts a token that does not exist.
struct Absurd;

impl Drafter for Absurd {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn draft(&mut self, _: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> foretoken::Result<()> {
        draft.tokens.resize(most, u32::MAX - 1);
        Ok(())
    }
}

#[test]
fn drafts_outside_the_vocabulary_leave_the_text_as_it_is() {
    let options = plain(Constraint::json_schema(schemas()[0].to_string()));
    let (want, _) = write(&options);
    let drafters = Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("absurd", || Box::new(Absurd)))]);
    let block = BlockSize::Fixed(4);
    let speculation = Speculation::With(SpeculationOptions { drafters, block, ..SpeculationOptions::default() });
    let (got, _) = write(&GenerateOptions { speculation, ..options });
    assert_eq!(got, want);
}

/// The ids of letters, one each.
fn letters(text: &str) -> Vec<u32> {
    let tokenizer = ENGINE.tokenizer().expect("a tokenizer");
    text.chars().map(|letter| tokenizer.id(&letter.to_string()).expect("an id")).collect()
}

/// The tokens of a new session, and the error that ended them.
fn outcome(prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, Option<String>) {
    given::outcome(&mut ENGINE.session(&SessionOptions::default()).expect("a session"), prompt, options)
}

/// After some letters the parser has more items than its limit: the letters before it are written, drafted or not.
#[test]
fn accepted_drafts_before_an_exceeded_limit_are_kept() {
    let (prompt, text) = (prompt(), letters("abcdefghij"));
    let names: Vec<_> = (0..40).map(|i| format!("r{i}")).collect();
    let rules: String = (0..40).map(|i| format!("r{i}: L \"{i}\"\n")).collect();
    for letters in 3..=7 {
        let grammar = format!("start: {}wide\nwide: {}\n{rules}L: /[a-z]/\n", "L ".repeat(letters), names.join(" | "));
        let limits = ConstraintLimits { row_items: 30, ..ConstraintLimits::default() };
        let script: Arc<dyn LogitsProcessor> = Arc::new(Script(text.clone()));
        let options =
            GenerateOptions { logits_processor: Some(script), ..plain(Constraint::lark(grammar).with_limits(limits)) };
        let want = outcome(&prompt, &options);
        assert_eq!(want.0, text[..letters - 1], "{want:?}");
        assert!(want.1.as_ref().is_some_and(|error| error.contains("max is 30")), "{want:?}");
        for rows in 2..=6 {
            let (text, before) = (text.clone(), prompt.len());
            let speculation = given(rows, usize::MAX, move |tokens, most| {
                text[tokens.len() - before..].iter().copied().take(most).collect()
            });
            let with = GenerateOptions { speculation, ..options.clone() };
            assert_eq!(outcome(&prompt, &with), want, "{letters} letters, rounds of {rows} rows");
        }
    }
}

/// Checking drafts adds states to the lexer. Under no limit do the text, or where it ends, depend on that.
#[test]
fn rejected_drafts_neither_exceed_a_limit_nor_extend_it() {
    let (prompt, text) = (prompt(), letters(&"a".repeat(24)));
    let constraint = |lexer_states: usize| {
        let limits = ConstraintLimits { lexer_states, ..ConstraintLimits::default() };
        Constraint::regex("(a|x[pq]{40}y){30}").with_limits(limits)
    };
    let write = |lexer_states: usize, speculation: Speculation| {
        let script: Arc<dyn LogitsProcessor> = Arc::new(Script(text.clone()));
        let plain = plain(constraint(lexer_states));
        let options = GenerateOptions { max_tokens: 20, speculation, logits_processor: Some(script), ..plain };
        outcome(&prompt, &options)
    };
    let drafts = letters(&format!("x{}", "pq".repeat(7)));
    let drafted = given(16, usize::MAX, move |_, most| drafts.iter().copied().take(most).collect());
    let limits =
        std::iter::successors(Some(16usize), |limit| Some(limit + limit / 16)).take_while(|limit| *limit < 10_000);
    let (mut cut, mut complete) = (0, 0);
    for limit in limits.filter(|limit| ENGINE.compile(&constraint(*limit)).is_ok()) {
        let want = write(limit, Speculation::Off);
        assert_eq!(write(limit, drafted.clone()), want, "{limit} states");
        if want.1.is_none() {
            assert_eq!(want.0, text[..20], "{limit} states");
            complete += 1;
            if complete == 3 {
                break;
            }
        }
        cut += usize::from(want.1.is_some() && !want.0.is_empty());
    }
    assert!(cut > 0 && complete > 0, "{cut} limits cut the text, {complete} do not");
}

#[test]
fn what_is_forced_is_drafted_and_accepted() {
    let names = ["identifier", "description", "quantity", "available"];
    let properties: serde_json::Map<_, _> =
        names.iter().map(|name| (name.to_string(), json!({"type": "integer", "minimum": 0, "maximum": 9}))).collect();
    let schema = json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false});
    let limits = ConstraintLimits { json_whitespace: 0, ..ConstraintLimits::default() };
    let options = plain(Constraint::json_schema(schema.to_string()).with_limits(limits));
    let (want, alone) = write(&options);
    check(&schema, &want);
    assert!(!want.text.contains(' '), "{}", want.text);
    let speculation = speculation("mtp", BlockSize::Fixed(8));
    let (got, statistics) = write(&GenerateOptions { speculation, ..options });
    assert_eq!(got, want);
    let forced = statistics.speculation.drafters.iter().find(|drafter| drafter.kind == Some(DrafterKind::Forced));
    let forced = forced.expect("the drafter of forced tokens");
    assert!(forced.drafted > 10, "{statistics}");
    assert_eq!(forced.accepted, forced.drafted, "{statistics}");
    assert!(2 * statistics.rounds < alone.rounds, "{} rounds, {} without", statistics.rounds, alone.rounds);
}

#[test]
fn sampled_texts_are_valid() {
    let schemas = schemas();
    let mut of_all = HashMap::new();
    for (i, schema) in schemas.iter().enumerate() {
        let constraint = Constraint::json_schema(schema.to_string());
        for (seed, drafts) in [(1, DraftSampling::Greedy), (2, DraftSampling::Sampled), (3, DraftSampling::Sampled)] {
            let speculation = SpeculationOptions {
                drafters: "mtp".parse().expect("a drafter"),
                block: BlockSize::Fixed(2 + i % 5),
                drafts,
                ..SpeculationOptions::default()
            };
            let (written, statistics) = write(&GenerateOptions {
                sampling: Sampling { temperature: 1.0, top_p: 0.95, ..Sampling::default() },
                speculation: Speculation::With(speculation),
                seed,
                ..plain(constraint.clone())
            });
            check(schema, &written);
            sum(of_all.entry(format!("{drafts:?}")).or_default(), of_model(&statistics));
        }
    }
    assert_eq!(of_all.len(), 2);
    for (drafts, [drafted, accepted]) in of_all {
        assert!(0 < accepted && accepted < drafted, "{drafts}: {accepted} of {drafted} accepted");
    }
}

#[test]
fn sequences_in_one_batch_write_what_each_writes_alone() {
    let schemas = schemas();
    let option = |i: usize| {
        let block = BlockSize::Fixed(1 + i % 6);
        let mut options = plain(Constraint::json_schema(schemas[i].to_string()));
        options.speculation = if i.is_multiple_of(4) { Speculation::Off } else { speculation("mtp", block) };
        if i % 5 == 2 {
            options.constraint = None;
            options.max_tokens = 40;
        }
        options
    };
    let mut scheduler = Scheduler::new(&ENGINE, SchedulerOptions::default());
    let mut texts: HashMap<SequenceId, (usize, Written)> = HashMap::new();
    for i in 0..schemas.len() {
        let session = ENGINE.session(&SessionOptions::default()).expect("a session");
        let id = scheduler.add(session, &prompt(), &option(i)).expect("added");
        texts.insert(id, (i, Written::default()));
    }
    while scheduler.is_active() {
        for event in scheduler.step() {
            let (_, written) = texts.get_mut(&event.id).expect("a sequence");
            let piece = event.piece.expect("a piece");
            written.ids.extend(piece.tokens);
            written.text += &piece.text;
            written.finish = event.finish_reason;
        }
    }
    let mut of_all = [0, 0];
    for (id, (i, got)) in texts {
        sum(&mut of_all, of_model(scheduler.statistics(id).expect("a sequence")));
        assert_eq!(got, write(&option(i)).0, "{}", schemas[i]);
    }
    assert!(of_all.iter().all(|tokens| *tokens > 0), "{of_all:?} drafted and accepted");
}

/// Records the logits of every draw before the constraint.
#[derive(Debug, Default)]
struct Seen(Mutex<HashMap<Vec<u32>, Vec<f32>>>);

impl LogitsProcessor for Seen {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        self.0.lock().entry(tokens.to_vec()).or_insert_with(|| logits.to_vec());
        Ok(())
    }
}

/// Bits of a number: what the model drafts after the prompt is often allowed.
const NUM_BITS: usize = 4;

/// The probabilities of all numbers, from the logits and the digits alone.
fn numbers(seen: &HashMap<Vec<u32>, Vec<f32>>, tokens: &[u32], text: &str, p: f64, to: &mut HashMap<String, f64>) {
    if text.len() == NUM_BITS {
        *to.entry(text.to_owned()).or_default() += p;
        return;
    }
    // What was never drawn has negligible probability.
    let Some(logits) = seen.get(tokens) else { return };
    let tokenizer = ENGINE.tokenizer().expect("a tokenizer");
    let bits = |id: &u32| tokenizer.token(*id).filter(|token| token.bytes().all(|c| b"01".contains(&c)));
    let allowed = (0..logits.len() as u32).filter_map(|id| Some((id, bits(&id)?)));
    let allowed: Vec<_> = allowed.filter(|(_, token)| text.len() + token.len() <= NUM_BITS).collect();
    let total: f64 = allowed.iter().map(|(id, _)| f64::from(logits[*id as usize]).exp()).sum();
    for (id, token) in allowed {
        let p = p * f64::from(logits[id as usize]).exp() / total;
        numbers(seen, &[tokens, &[id]].concat(), &format!("{text}{token}"), p, to);
    }
}

#[test]
fn a_draw_is_from_the_target_s_distribution_over_what_is_allowed() {
    const DRAWS: usize = 1000;
    let tokenizer = ENGINE.tokenizer().expect("a tokenizer");
    let prompt = tokenizer.encode("const A: u8 = 0b0110_0").expect("ids");
    for drafts in [DraftSampling::Greedy, DraftSampling::Sampled] {
        let seen = Arc::new(Seen::default());
        let speculation = SpeculationOptions {
            drafters: "mtp".parse().expect("a drafter"),
            block: BlockSize::Fixed(3),
            drafts,
            ..SpeculationOptions::default()
        };
        let options = GenerateOptions {
            sampling: Sampling { temperature: 1.0, ..Sampling::default() },
            speculation: Speculation::With(speculation),
            logits_processor: Some(seen.clone()),
            ..plain(Constraint::regex(format!("[01]{{{NUM_BITS}}}")))
        };
        let (mut counts, mut of_all): (HashMap<String, usize>, _) = (HashMap::new(), [0, 0]);
        for seed in 0..DRAWS as u64 {
            let (written, statistics) = write_after(&prompt, &GenerateOptions { seed, ..options.clone() });
            sum(&mut of_all, of_model(&statistics));
            assert_eq!(written.finish, Some(FinishReason::Constraint));
            *counts.entry(written.text).or_default() += 1;
        }
        let [drafted, accepted] = of_all;
        println!("{drafts:?}: {accepted} of {drafted} accepted");
        assert!(0 < accepted && accepted < drafted, "{drafts:?}: {accepted} of {drafted} accepted");
        let mut want = HashMap::new();
        numbers(&seen.0.lock(), &prompt, "", 1.0, &mut want);
        assert!((want.values().sum::<f64>() - 1.0).abs() < 0.02, "{want:?}");
        // Pearson's statistic; numbers with fewer than five expected draws count as one.
        let (mut rare, mut statistic, mut cells) = ((0.0, 0.0), 0.0, 0.0f64);
        let mut add = |expected: f64, drawn: f64| {
            statistic += (drawn - expected).powi(2) / expected;
            cells += 1.0;
        };
        for word in counts.keys().chain(want.keys()).collect::<HashSet<_>>() {
            let expected = DRAWS as f64 * want.get(word).copied().unwrap_or(0.0);
            let drawn = counts.get(word).copied().unwrap_or(0) as f64;
            if expected < 5.0 {
                rare = (rare.0 + expected, rare.1 + drawn);
            } else {
                add(expected, drawn);
            }
        }
        if rare.0 > 1.0 {
            add(rare.0, rare.1);
        }
        // Five standard deviations beyond the mean of chi squared; the seeds are fixed.
        let bound = cells + 5.0 * (2.0 * cells).sqrt();
        assert!(cells > 3.0 && statistic < bound, "{drafts:?}: {statistic} of {cells} cells\n{want:?}\n{counts:?}");
    }
}

#[test]
fn expressions_and_grammars_are_followed() {
    let all = |constraint: Constraint| {
        let options = plain(constraint);
        let (want, _) = write(&options);
        for block in 2..=6 {
            let (got, _) =
                write(&GenerateOptions { speculation: speculation("mtp", BlockSize::Fixed(block)), ..options.clone() });
            assert_eq!(got, want, "blocks of {block}");
        }
        want
    };
    let written = all(Constraint::regex(r"v[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}(-(alpha|beta))?"));
    let version: Vec<_> = written.text.strip_prefix('v').expect("a v").split('-').collect();
    let numbers: Vec<u8> = version[0].split('.').map(|number| number.parse().expect("a number")).collect();
    assert_eq!(numbers.len(), 3, "{}", written.text);
    assert!(version.get(1).is_none_or(|name| ["alpha", "beta"].contains(name)), "{}", written.text);

    let sum =
        "start: term (\" + \" term){2}\nterm: NUMBER | \"(\" term \" * \" NUMBER \")\"\nNUMBER: /[1-9][0-9]{0,2}/\n";
    let written = all(Constraint::lark(sum));
    assert_eq!(written.text.split(" + ").count(), 3, "{}", written.text);
    assert_eq!(written.text.matches('(').count(), written.text.matches(')').count(), "{}", written.text);

    // The text may end only where the expression accepts; after it nothing can be emitted.
    let written = all(Constraint::regex("(yes|no)"));
    assert!(["yes", "no"].contains(&written.text.as_str()), "{}", written.text);
    assert_eq!(written.finish, Some(FinishReason::Constraint));
    let written = all(Constraint::regex("[0-9]{4}[0-9 ]{0,40}"));
    assert!(written.text.len() >= 4 && written.text[..4].bytes().all(|c| c.is_ascii_digit()), "{written:?}");
    assert_eq!(all(Constraint::regex("")).text, "");
}

#[test]
fn other_ends_of_a_text_hold() {
    let list = Constraint::json_schema(
        r#"{"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99},
        "minItems": 60, "maxItems": 60}"#,
    );
    for speculation in [Speculation::Off, speculation("mtp", BlockSize::Fixed(4))] {
        let options = GenerateOptions { speculation, ..plain(list.clone()) };
        let (whole, _) = write(&options);
        let (cut, _) = write(&GenerateOptions { max_tokens: 11, ..options.clone() });
        assert_eq!((cut.ids.as_slice(), cut.finish), (&whole.ids[..11], Some(FinishReason::MaxTokens)));
        let stop = Stop { strings: vec![",".into()], ..Stop::default() };
        let (stopped, _) = write(&GenerateOptions { stop, ..options.clone() });
        assert_eq!(Some(stopped.text.as_str()), whole.text.split(',').next());
        assert_eq!(stopped.finish, Some(FinishReason::StopString));
        // Nothing may follow the last bracket, even if the end is an ordinary token.
        let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
        assert_eq!(write(&GenerateOptions { stop, ..options }).0, whole);
    }
    // A session continues after a constrained text, with another constraint or none.
    let mut session = ENGINE.session(&SessionOptions::default()).expect("a session");
    for constraint in [Some(Constraint::regex("[ab]{4}")), None, Some(Constraint::regex("[0-9]{3}"))] {
        let options = GenerateOptions { max_tokens: 6, constraint: constraint.clone(), ..GenerateOptions::default() };
        let pieces: Result<Vec<_>, _> = session.generate(&prompt(), &options).expect("a generation").collect();
        let text: String = pieces.expect("pieces").into_iter().map(|piece| piece.text).collect();
        match constraint {
            Some(_) => assert!(text.len() >= 3 && text.bytes().all(|c| b"ab0123456789".contains(&c)), "{text:?}"),
            None => assert!(!text.is_empty()),
        }
    }
}

/// Excludes every token that has a digit.
#[derive(Debug)]
struct NoDigits;

impl LogitsProcessor for NoDigits {
    fn process(&self, _: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        let tokenizer = ENGINE.tokenizer()?;
        for (id, logit) in (0..).zip(logits) {
            if tokenizer.token(id).is_some_and(|token| token.contains(|c: char| c.is_ascii_digit())) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}

#[test]
fn it_composes_with_processors_and_penalties() {
    let options = GenerateOptions {
        logits_processor: Some(Arc::new(NoDigits)),
        sampling: Sampling {
            penalties: foretoken::sampler::Penalties { repeat: 1.3, frequency: 0.5, ..Default::default() },
            dry: Some(foretoken::sampler::Dry::default()),
            ..Sampling::default()
        },
        ..plain(Constraint::regex("[a-c0-9]{12}"))
    };
    let (want, _) = write(&options);
    assert!(want.text.len() == 12 && want.text.bytes().all(|c| b"abc".contains(&c)), "{want:?}");
    let (got, _) = write(&GenerateOptions { speculation: speculation("mtp", BlockSize::Fixed(4)), ..options.clone() });
    assert_eq!(got, want);

    let nothing = GenerateOptions { constraint: Some(Constraint::regex("[0-9]{12}")), ..options };
    let mut session = ENGINE.session(&SessionOptions::default()).expect("a session");
    let error = session.generate(&prompt(), &nothing).expect_err("an error");
    assert!(matches!(&error, Error::Argument { name: "constraint", .. }), "{error:?}");
    let simulated = GenerateOptions { simulate_acceptance: vec![0.5], ..plain(Constraint::regex("a")) };
    let error = session.generate(&prompt(), &simulated).expect_err("an error");
    assert!(error.to_string().starts_with("simulate_acceptance"), "{error}");
}

/// The error message of a rejected constraint.
fn refused(constraint: Constraint) -> String {
    let error = ENGINE.compile(&constraint).err().unwrap_or_else(|| panic!("{constraint:?} is accepted"));
    match error {
        Error::Argument { name: "constraint", problem } => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_satisfied_is_refused_by_its_place() {
    let cases = [
        (json!(false), "#: "),
        (json!({"type": "integer", "minimum": 5, "maximum": 3}), "#: "),
        (
            json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}},
            "required": ["a"]}),
            "#/properties/a: ",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strnig"}}}}),
            "#/properties/a/items: ",
        ),
        (
            json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"], "$defs": {"b":
            {"type": "integer", "minimum": 9, "maximum": 1}}}),
            "#/",
        ),
        (json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}), "#/properties/a: "),
        (json!({"type": "array", "items": {"$ref": "#name"}}), "#/items: Only absolute $ref's"),
        (json!({"x-guidance": {"coerce": true}, "properties": {"a": {"type": "integer"}}}), "#/x-guidance: "),
        // What is ignored in the whole is in a part: an option's keyword, and one that the draft does not have.
        (
            json!({"x-guidance": {"coerce_one_of": true}, "properties": {"a": {"oneOf": [{}, {}]}, "b": {"not": {}}}}),
            "#/properties/b: Unimplemented keys: [\"not\"]",
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {
                "a": {"type": "array", "unevaluatedItems": false}, "b": {"not": {}}}}),
            "#/properties/b: Unimplemented keys: [\"not\"]",
        ),
        (json!({"allOf": [{"type": "integer"}, {"type": "string"}]}), "#: "),
        (json!({"anyOf": [{"type": "integer", "uniqueItems": 3, "contains": true}]}), "#/anyOf/0: "),
        (json!({"type": "object", "properties": {"p": {"type": "string", "pattern": "(["}}}), "#/properties/p: "),
        (
            json!({"type": "object", "properties": {"p": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}),
            "#/properties/p: ",
        ),
        (json!([1]), "#: "),
        (
            json!({"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": false,
            "dependentRequired": {"a": ["b"]}}),
            "#: Unimplemented keys: [\"dependentRequired\"]; remove them, ",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 900_001}}}),
            "#/properties/a: ",
        ),
    ];
    for (schema, place) in cases {
        let problem = refused(Constraint::json_schema(schema.to_string()));
        assert!(problem.starts_with(place), "{schema}: {problem}");
        assert!(!problem.contains('\n') && problem.len() < 400, "{schema}: {problem}");
        println!("{problem}");
    }
    for (constraint, part) in [
        (Constraint::json_schema("{\"type\": "), "not valid JSON"),
        (Constraint::json_schema("[".repeat(100_000)), "not valid JSON"),
        (Constraint::regex("a(b"), "a(b"),
        (Constraint::regex(r"[^\s\S]"), "no text satisfies it; allow at least one"),
        (Constraint::lark(format!("start: {}\"a\"{}", "(".repeat(80_000), ")".repeat(80_000))), "500 nested brackets"),
        (Constraint::lark("start: missing\n"), "missing"),
        (Constraint::lark(""), ""),
        (
            Constraint::lark("root ::= \"a\""),
            "GBNF and EBNF (::=) are not supported; write a Lark grammar, a regular expression or a JSON schema (docs/",
        ),
    ] {
        let problem = refused(constraint.clone());
        println!("{problem}");
        assert!(problem.contains(part) && problem.len() < 600, "{constraint:?}: {problem}");
    }
}

#[test]
fn what_is_too_large_is_refused_and_disturbs_nobody() {
    let many: serde_json::Map<_, _> = (0..9000).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    let nested = (0..100).fold(json!({"type": "integer"}), |inner, _| json!({"anyOf": [inner, {"type": "null"}]}));
    let doubling = {
        let mut definitions = serde_json::Map::new();
        for i in 0..60 {
            let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            definitions.insert(format!("d{i}"), json!({"allOf": [next, next], "type": "object"}));
        }
        definitions.insert("d60".into(), json!({"type": "object"}));
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    // What refuses it; without, it compiles, and a text has a bounded cost.
    let bombs = [
        (
            json!({"type": "object", "properties": many}),
            Some("#: has 9000 optional properties, at most 500 are allowed"),
        ),
        (nested, Some("the schema is not valid JSON: recursion limit exceeded")),
        (doubling, None),
        (json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000}), None),
        (
            json!({"type": "array", "items": {"type": "array", "minItems": 9000, "maxItems": 9000}, "minItems": 9000}),
            None,
        ),
        (json!({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}), None),
        (
            json!({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "minLength": 90_000, "maxLength": 90_000}),
            Some("#: Unable to determine if regex is empty"),
        ),
        (json!({"type": "string", "minLength": 4_000_000_000u64}), None),
        (json!({"enum": (0..20_000).map(|i| format!("value {i}")).collect::<Vec<_>>()}), Some("has 268900 bytes")),
        (json!({"$ref": "#"}), Some("#: no text satisfies it")),
        (json!({"allOf": [{"$ref": "#"}]}), Some("#/allOf/0: Schema intersection stack level exceeded")),
        (json!({"not": {"not": {"not": {}}}}), Some("#/not/not: Unimplemented keys: [\"not\"]")),
        (json!({"const": "a".repeat(200_000)}), None),
        (json!({"type": "string", "pattern": "a?".repeat(50_000)}), Some("too many expressions constructed")),
        (json!({"type": "string", "pattern": format!("^{}$", "(a|b)".repeat(30_000))}), None),
    ];
    let limits = ConstraintLimits { lexer_states: 20_000, ..ConstraintLimits::default() };
    let chain: String = (0..15_000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let words = (0..30_000).map(|i| format!("w{i}")).collect::<Vec<_>>().join("|");
    let grammars = [
        (Constraint::lark(format!("start: r0\n{chain}r15000: \"a\"\n")), None),
        (Constraint::lark("start: start start | \"a\"\n"), None),
        (Constraint::lark("start: \"a\" start\n"), Some("Too many items (limit 50000; ")),
        (Constraint::lark(format!("start: {}\n", "\"a\"? ".repeat(40_000))), Some("grammar.symbols.len()")),
        (Constraint::regex("a".repeat(250_000)), None),
        (Constraint::regex("(a|b)*c".repeat(30_000)), None),
        (Constraint::regex(format!("({words})")), None),
        (Constraint::regex(format!("{}a{}", "(".repeat(200), ")*".repeat(200))), Some("invalid regex")),
    ];
    let bombs = bombs.map(|(schema, problem)| (Constraint::json_schema(schema.to_string()), problem));
    for (constraint, problem) in bombs.into_iter().chain(grammars) {
        let constraint = constraint.with_limits(limits.clone());
        let begin: String = format!("{constraint:?}").chars().take(100).collect();
        match problem {
            Some(part) => {
                let problem = refused(constraint);
                assert!(problem.contains(part), "{begin}: {problem}");
            }
            None => {
                ENGINE.compile(&constraint).unwrap_or_else(|error| panic!("{begin}: {error}"));
                let mut session = ENGINE.session(&SessionOptions::default()).expect("a session");
                let options = GenerateOptions { max_tokens: 24, ..plain(constraint) };
                let generation = session.generate(&prompt(), &options).expect("a generation");
                let pieces: Result<Vec<_>, _> = generation.collect();
                let pieces = pieces.unwrap_or_else(|error| panic!("{begin}: {error}"));
                assert!(!pieces.is_empty(), "{begin}");
            }
        }
    }
    let wide: serde_json::Map<_, _> = (0..600).map(|i| (format!("p{i}"), json!(true))).collect();
    let wide = json!({"type": "object", "properties": {"deep": {"type": "object", "properties": wide}}});
    let problem = refused(Constraint::json_schema(wide.to_string()));
    assert!(problem.starts_with("#/properties/deep: has 600 optional properties, at most 500"), "{problem}");
    // Other constraints still compile.
    check(&schemas()[0], &write(&plain(Constraint::json_schema(schemas()[0].to_string()))).0);
}

/// A tiny value of each limit refuses what its default allows, with an error that names the limit.
#[test]
fn every_limit_is_applied_and_named() {
    let words = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]+(foo|bar){3,9}$"}}});
    let both = json!({"type": "string", "allOf": [{"pattern": "^[a-d]x"}, {"pattern": "^([b-e]|[c-f])x"}]});
    let patterns = json!({"type": "object", "patternProperties": {"^a": {}, "^b": {}}});
    let cases = json!({"type": "object", "properties": {"a": {}}, "anyOf": [{"type": "object"}, {"type": "object"}]});
    let optional = json!({"type": "object", "properties": {"a": {}, "b": {}}});
    // What is forced is in ten rules.
    let forks: String = (0..10).map(|i| format!("r{i}: \"let \" \"mut \" \"value \" \"{i}\"\n")).collect();
    let names: Vec<_> = (0..10).map(|i| format!("r{i}")).collect();
    let forks = Constraint::lark(format!("start: {}\n{forks}", names.join(" | ")));
    let rules = Constraint::lark("start: x+\nx: a | b | c\na: \"a\"\nb: \"b\"\nc: \"c\"\n");
    let expression = Constraint::regex("[a-z]+(foo|bar){3,9}");
    let of = |schema: &Value| Constraint::json_schema(schema.to_string());
    let none = ConstraintLimits::default;
    for (limits, constraint, part) in [
        (ConstraintLimits { source_bytes: 20, ..none() }, of(&words), " bytes, at most 20 are allowed"),
        (ConstraintLimits { grammar_symbols: 3, ..none() }, of(&words), "grammar size (number of symbols) too big"),
        (ConstraintLimits { intersected: 1, ..none() }, of(&both), "intersects 2 regular expressions, at most 1 "),
        (ConstraintLimits { alternatives: 1, ..none() }, of(&both), "combinations of their alternatives, at most 1 "),
        (ConstraintLimits { divisor: 6, ..none() }, of(&json!({"multipleOf": 7})), "multipleOf 7, whose digits may be"),
        (ConstraintLimits { pattern_properties: 1, ..none() }, of(&patterns), "2 patternProperties, at most 1 "),
        (ConstraintLimits { merged_schemas: 1, ..none() }, of(&cases), "schemas, at most 1 are allowed"),
        (ConstraintLimits { compile_fuel: 10, ..none() }, of(&words), "lexer configuration (grammar) too big"),
        (ConstraintLimits { mask_fuel: 1, ..none() }, expression.clone(), "too many expressions constructed"),
        (ConstraintLimits { mask_items: 1, ..none() }, rules, "Too many items (limit 1; "),
        (ConstraintLimits { row_items: 4, ..none() }, of(&optional), "has 2 optional properties, at most 1 "),
        (ConstraintLimits { row_items: 4, ..none() }, forks, "items; max is 4;"),
        (ConstraintLimits { lexer_states: 1, ..none() }, expression, "too many states: "),
    ] {
        ENGINE.compile(&constraint).unwrap_or_else(|error| panic!("{constraint:?}: {error}"));
        let problem = refused(constraint.with_limits(limits.clone()));
        assert!(problem.contains(part) && !problem.contains('\n'), "{limits:?}: {problem}");
    }
}

/// The thread that compiles has a stack for the longest source.
#[test]
fn a_compiler_stack_beyond_memory_is_a_memory_error() {
    let limits = ConstraintLimits { source_bytes: 1 << 50, ..ConstraintLimits::default() };
    let error = ENGINE.compile(&Constraint::regex("a").with_limits(limits)).expect_err("no such memory");
    let Error::Memory { needed, .. } = &error else { panic!("{error}") };
    assert_eq!(*needed, Some(1 << 60), "{error}");
    assert!(error.to_string().ends_with("; free memory, or lower ConstraintLimits::source_bytes"), "{error}");
}

/// Asserts that schemas of `n` parts are accepted up to a limit: the problem of the first beyond it.
fn bounded(most: usize, of: impl Fn(usize) -> Constraint) -> String {
    ENGINE.compile(&of(most)).unwrap_or_else(|error| panic!("{most}: {error}"));
    refused(of(most + 1))
}

#[test]
fn what_is_intersected_and_merged_is_bounded() {
    let schema = |schema: Value| Constraint::json_schema(schema.to_string());
    let strings = |n: usize| {
        let patterns: Vec<_> = (1..=n).map(|i| json!({"pattern": format!("^a{{0,{i}}}$")})).collect();
        json!({"type": "string", "allOf": patterns})
    };
    let place = |constraint: Value, place: &str| {
        let problem = refused(schema(constraint));
        assert!(problem.starts_with(&format!("{place}: ")), "{problem}");
    };
    let problem = bounded(8, |n| schema(strings(n)));
    assert!(problem.starts_with("#: intersects 9 regular expressions, at most 8 are allowed; "), "{problem}");
    place(json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": strings(9)}}), "#/properties/b");
    let by_reference = json!({"type": "array", "items": {"$ref": "#/$defs/s"}, "$defs": {"s": strings(9)}});
    place(by_reference, "#/items");
    for union in ["anyOf", "oneOf"] {
        place(json!({union: [{"type": "integer"}, strings(9)]}), &format!("#/{union}/1"));
    }
    let both = json!({"allOf": [{"$ref": "#/$defs/s"}, strings(4)], "$defs": {"s": strings(5)}});
    place(both, "#");
    // Each has few, and no two are for one string.
    let apart: serde_json::Map<_, _> = (0..9).map(|i| (format!("p{i}"), strings(2))).collect();
    ENGINE.compile(&schema(json!({"type": "object", "properties": apart}))).expect("compiled");
    let terms = |n: usize| (1..=n).map(|i| format!("/a{{0,{i}}}/")).collect::<Vec<_>>().join(" & ");
    let problem = bounded(8, |n| Constraint::lark(format!("start: X\nX: {}\n", terms(n))));
    assert!(problem.starts_with("intersects 9 regular expressions, at most 8"), "{problem}");
    let problem = bounded(8, |n| Constraint::lark(format!("start: %json {}\n", strings(n))));
    assert!(problem.starts_with("%json #: intersects 9"), "{problem}");

    let problem = bounded(64, |n| {
        let patterns: serde_json::Map<_, _> = (0..n).map(|i| (format!("^p{i}$"), json!({"type": "integer"}))).collect();
        schema(json!({"type": "object", "properties": {"a": {"type": "object", "patternProperties": patterns}}}))
    });
    assert!(problem.starts_with("#/properties/a: has 65 patternProperties, at most 64 are allowed"), "{problem}");

    // Classes that overlap, each of which may be any place of a text.
    let classes = |n: usize| (1..=n).map(|i| format!("[a-{}]x{{{i}}}", char::from(b'a' + i as u8))).collect::<Vec<_>>();
    let pattern = |i: usize, n: usize| format!("y{{0,{i}}}({})", classes(n).join("|"));
    let overlapping = |terms: usize, n: usize| {
        let patterns: Vec<_> = (1..=terms).map(|i| json!({"pattern": pattern(i, n)})).collect();
        schema(json!({"type": "string", "allOf": patterns}))
    };
    let problem = refused(overlapping(6, 13));
    assert!(
        problem.starts_with("#: intersects 6 regular expressions with ") && problem.contains("most 65536"),
        "{problem}"
    );
    let two: Vec<_> = (1..3).map(|i| format!("/{}/", pattern(i, 5))).collect();
    let two = Constraint::lark(format!("start: X\nX: {}", two.join(" & ")));
    let at_most = |alternatives| ConstraintLimits { alternatives, ..ConstraintLimits::default() };
    let combinations = number_after(&refused(two.clone().with_limits(at_most(1))), "expressions with ");
    assert!((25..=64).contains(&combinations), "{combinations}");
    refused(two.clone().with_limits(at_most(combinations - 1)));
    ENGINE.compile(&two.with_limits(at_most(combinations))).unwrap_or_else(|error| panic!("{combinations}: {error}"));
}

fn number_after(text: &str, word: &str) -> u64 {
    let number = text.split_once(word).map_or("", |(_, after)| after).split(' ').next();
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{word:?} in {text:?}"))
}

#[test]
fn merged_schemas_are_bounded() {
    let object = |properties: usize, cases: usize| {
        let names: Vec<_> = (0..properties).map(|i| format!("p{i}")).collect();
        let properties: serde_json::Map<_, _> = names.iter().map(|name| (name.clone(), json!({}))).collect();
        let cases = vec![json!({"type": "object"}); cases];
        json!({"type": "object", "properties": properties, "required": names, "anyOf": cases})
    };
    let at_most = |merged_schemas| ConstraintLimits { merged_schemas, ..ConstraintLimits::default() };
    let few = Constraint::json_schema(object(5, 3).to_string());
    // Six schemas with each of three cases, and these.
    let problem = refused(few.clone().with_limits(at_most(20)));
    assert!(problem.starts_with("#: merges up to 21 schemas, at most 20 are allowed; "), "{problem}");
    ENGINE.compile(&few.with_limits(at_most(21))).expect("compiled");
    // Copies of a gigabyte, if they were merged.
    let many = object(2000, 2000);
    let bombs = [
        many.clone(),
        json!({"type": "array", "items": many}),
        json!({"allOf": [{"$ref": "#/$defs/o"}, {"anyOf": vec![json!({}); 40_000]}], "$defs": {"o": object(2000, 1)}}),
        json!({"allOf": [{"properties": {"a": {"$ref": "#/$defs/o"}}}, {"properties": {"a": {"anyOf": vec![json!({}); 40_000]}}}],
            "$defs": {"o": object(2000, 1)}}),
    ];
    for bomb in bombs {
        let problem = refused(Constraint::json_schema(bomb.to_string()));
        assert!(problem.contains("merges up to ") && problem.contains("at most 200000 are allowed"), "{problem}");
    }
    // Patterns, of which every merge compares all pairs.
    let patterns: serde_json::Map<_, _> = (0..64).map(|i| (format!("^[a-d]{{60}}{i:02}$"), json!({}))).collect();
    let patterns = json!({"patternProperties": patterns});
    let merges = |n: usize| {
        let list = vec![json!({"$ref": "#/$defs/p"}); n];
        Constraint::json_schema(json!({"type": "object", "$defs": {"p": patterns}, "allOf": list}).to_string())
    };
    let problem = refused(merges(350));
    assert!(problem.contains("merges up to "), "{problem}");
    ENGINE.compile(&merges(1)).expect("compiled");
    // A document that is a reference, with annotations: nothing is merged.
    let annotated = json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "x", "$ref": "#/$defs/o",
        "$defs": {"o": object(300, 1)}});
    ENGINE.compile(&Constraint::json_schema(annotated.to_string()).with_limits(at_most(310))).expect("compiled");
    // Schemas without a type are not cases: of their types, all but one merge to nothing.
    let untyped: Vec<_> = (0..12).map(|i| json!({"properties": {format!("p{i}"): {"minimum": i}}})).collect();
    ENGINE
        .compile(&Constraint::json_schema(json!({"type": "object", "allOf": untyped}).to_string()))
        .expect("compiled");
    // Cases that are merged with nothing, and values with their type.
    let values: Vec<_> = (0..3000).map(|i| format!("value {i}")).collect();
    let cases: Vec<_> = (0..100)
        .map(|i| {
            json!({"type": "object", "properties": {"k": {"const": i}, "p": {}, "q": {}},
        "required": ["k", "p", "q"]})
        })
        .collect();
    for schema in [json!({"type": "string", "enum": values}), json!({"type": "array", "items": {"anyOf": cases}})] {
        ENGINE.compile(&Constraint::json_schema(schema.to_string())).expect("compiled");
    }
}

#[test]
fn annotations_exclude_nothing() {
    for schema in [
        json!({"type": "string", "format": "cuid", "maxLength": 4}),
        json!({"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0}),
        json!({"format": "int32", "type": ["integer", "string"], "minimum": 0, "maximum": 9, "maxLength": 2}),
    ] {
        check(&schema, &write(&plain(Constraint::json_schema(schema.to_string()))).0);
    }
    let names = json!({"type": "object", "propertyNames": {"pattern": "^a"}});
    assert!(refused(Constraint::json_schema(names.to_string())).contains("propertyNames"));
}

/// Wants white space above all.
#[derive(Debug)]
struct Spaces;

impl LogitsProcessor for Spaces {
    fn process(&self, _: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        let tokenizer = ENGINE.tokenizer()?;
        for (id, logit) in (0..).zip(logits) {
            let text = tokenizer.decode(&[id])?;
            *logit += if !text.is_empty() && text.trim().is_empty() { 1000.0 } else { 0.0 };
        }
        Ok(())
    }
}

#[test]
fn white_space_is_at_most_a_character() {
    let names = ["a", "b", "c"];
    let properties: serde_json::Map<_, _> = names.iter().map(|name| (name.to_string(), json!({"enum": [1]}))).collect();
    let schema = json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false});
    let options = GenerateOptions {
        logits_processor: Some(Arc::new(Spaces)),
        ..plain(Constraint::json_schema(schema.to_string()))
    };
    let (written, _) = write(&options);
    check(&schema, &written);
    let longest = written.text.split(|c: char| !c.is_whitespace()).map(str::len).max();
    assert_eq!(longest, Some(1), "{:?}", written.text);
}

/// Has the model write a text, whatever its logits are.
#[derive(Debug)]
struct Script(Vec<u32>);

impl LogitsProcessor for Script {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        let written = (0..self.0.len()).rev().find(|n| tokens.ends_with(&self.0[..*n])).unwrap_or(0);
        logits.fill(f32::NEG_INFINITY);
        logits[self.0[written] as usize] = 0.0;
        Ok(())
    }
}

/// The demo Qwen3.5, in whose vocabulary tags are control tokens or text.
fn qwen(tags_are_control: bool) -> Engine {
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo-qwen");
    let directory = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"] {
        std::fs::copy(demo.join(file), directory.path().join(file)).expect("copied");
    }
    let text = std::fs::read_to_string(demo.join("tokenizer.json")).expect("a tokenizer");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    for token in tokenizer["added_tokens"].as_array_mut().expect("a list") {
        let is_tag = token["content"].as_str().is_some_and(|name| !name.starts_with("<|"));
        token["special"] = json!(tags_are_control || !is_tag);
    }
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    Engine::load(&EngineOptions::new(directory.path())).expect("an engine")
}

/// The pieces of `script` if a model that writes nothing else may write it, as a whole, under a constraint.
fn scripted(engine: &Engine, script: &str, constraint: &Constraint) -> Option<Vec<Piece>> {
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let ids = tokenizer.encode(script).expect("ids");
    let end = tokenizer.id("<|im_end|>").expect("an end");
    let script = Script([ids.as_slice(), &[end]].concat());
    let options = GenerateOptions { logits_processor: Some(Arc::new(script)), ..plain(constraint.clone()) };
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let prompt = tokenizer.encode("fn").expect("ids");
    // The first token may be excluded already.
    let mut generation = session.generate(&prompt, &options).ok()?;
    let written: Vec<_> = generation.by_ref().collect::<Result<_, _>>().ok()?;
    let is_whole = written.iter().flat_map(|piece| &piece.tokens).take(ids.len()).eq(&ids);
    let ends = matches!(generation.finish_reason(), Some(FinishReason::Constraint | FinishReason::EndOfText));
    (is_whole && ends).then_some(written)
}

/// Qwen3.5's reasoning, which the prompt begins, before JSON and other constraints; where its tags are control tokens,
/// and where they are text.
#[test]
fn reasoning_may_come_before_a_constraint() {
    for is_control in [true, false] {
        let engine = qwen(is_control);
        let tokenizer = engine.tokenizer().expect("a tokenizer");
        let text = Constraint::json_schema(
            r#"{"type":"object","properties":{"n":{"type":"integer","maximum":9}},"required":["n"],"additionalProperties":false}"#,
        );
        let thinking = ChatOptions { thinking: Thinking::On, ..ChatOptions::default() };
        let reply = text.after_reasoning(tokenizer, &thinking).expect("a grammar");
        assert_eq!(text.after_reasoning(tokenizer, &ChatOptions::default()).expect("a grammar"), text);
        let allows = |script: &str, constraint: &Constraint| scripted(&engine, script, constraint).is_some();
        let (thought, unthought) = ("Hm, {}?</think>\n\n{\"n\": 3}", "{\"n\": 3}");
        assert!(allows(thought, &reply), "{is_control}");
        assert!(!allows("Hm</think>\n\nthree", &reply), "{is_control}");
        assert!(!allows(thought, &text) && allows(unthought, &text), "{is_control}");

        // A template that opens it in any case, and one that leaves it to the model.
        let (always, never) = (ReasoningStart::Prompt, ReasoningStart::Reply);
        let with = |reasoning_start, thinking| ChatOptions { reasoning_start, thinking, ..ChatOptions::default() };
        let reply = |options| text.after_reasoning(tokenizer, &options).expect("a grammar");
        let reply_always = reply(with(always, Thinking::Off));
        assert!(allows(thought, &reply_always) && !allows(unthought, &reply_always), "{is_control}");
        assert_eq!(reply(with(never, Thinking::Off)), text);
        let reply_never = reply(with(never, Thinking::On));
        assert!(allows(unthought, &reply_never) && !allows(thought, &reply_never), "{is_control}");
        assert!(allows(&format!("<think>\n{thought}"), &reply_never), "{is_control}");
        assert!(!allows("<think>Hm</think>three", &reply_never), "{is_control}");

        let others = [
            (Constraint::regex("[ab]/\\/[cd]"), "a//d", "a/d"),
            (Constraint::lark("%llguidance {}\nstart: \"}\" reply\nreply: \"yes\" | \"no\" // either"), "}no", "no"),
        ];
        for (constraint, valid, invalid) in others {
            let reply = constraint.after_reasoning(tokenizer, &thinking).expect("a grammar");
            assert!(allows(valid, &constraint) && !allows(invalid, &constraint), "{is_control} {valid}");
            assert!(allows(&format!("Hm }} ?</think>\n\n{valid}"), &reply), "{is_control} {valid}");
            assert!(!allows(&format!("Hm }} ?</think>\n\n{invalid}"), &reply), "{is_control} {valid}");
        }
    }
}

/// An escape is no other name: every parser would read the later value.
#[test]
fn a_name_is_not_written_twice_with_escapes() {
    let engine = qwen(false);
    let named = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let allows =
        |schema: &Value, text: &str| scripted(&engine, text, &Constraint::json_schema(schema.to_string())).is_some();
    for text in [r#"{"n": 1}"#, r#"{"n": 1, "m": "x"}"#, r#"{"n": 1, "m\n\"": {"m": "\t"}}"#] {
        assert!(allows(&named, text), "{text}");
    }
    for text in [r#"{"n": 1, "\u006e": "x"}"#, r#"{"n": 1, "n": 2}"#, r#"{"n": 1, "m": {"\u006e": 2}}"#] {
        assert!(!allows(&named, text), "{text}");
    }
    // Where all names are known, or texts of the schema need them, escapes stay.
    let mut closed = named.clone();
    closed["additionalProperties"] = json!(false);
    closed["properties"]["s"] = json!({"type": "string"});
    assert!(allows(&closed, r#"{"n": 1, "s": "\u0001"}"#) && !allows(&named, r#"{"n": 1, "s": "\u0001"}"#));
    let required = json!({"type": "object", "required": ["n"], "additionalProperties": {"type": "integer"}});
    assert!(allows(&required, r#"{"n": 1, "m": 2}"#) && !allows(&required, r#"{"n": 1, "\u006e": 2}"#));
    let constant = json!({"type": "object", "properties": {"c": {"const": "\u{1}"}}, "required": ["c"]});
    assert!(allows(&constant, r#"{"c": "\u0001"}"#));
}

/// A call in Qwen3.5's syntax.
fn xml_call(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameter = |(key, value): &(&str, &str)| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let parameters: String = parameters.iter().map(parameter).collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

fn tool(name: &str, parameters: &Value) -> Json {
    let function = json!({"name": name, "parameters": parameters});
    Json::of(&json!({"type": "function", "function": function})).expect("JSON")
}

fn qwen_tools() -> Vec<Json> {
    let open = json!({"type": "object", "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w+", 3]},
        "count": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "name": {"type": ["string", "null"], "pattern": "^[a-z/]+", "maxLength": 5},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "either": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    }, "required": ["path"], "additionalProperties": false,
        "$defs": {"item": {"type": "object", "properties": {"x": {"type": "string", "maxLength": 2}}, "required": ["x"], "additionalProperties": false}}});
    vec![tool("open", &open), tool("any", &json!({"type": "object"}))]
}

/// Calls in XML under their schemas: what they are read as, and what cannot be written.
#[test]
fn calls_in_xml_follow_their_schemas() {
    for is_control in [true, false] {
        let engine = qwen(is_control);
        let tokenizer = engine.tokenizer().expect("a tokenizer");
        let options = ChatOptions { tools: qwen_tools(), ..ChatOptions::default() };
        let calls = |choice: &CallChoice| Constraint::tool_calls(tokenizer, &options, choice).expect("a grammar");
        let arguments = |script: &str, choice: &CallChoice| -> Option<Vec<String>> {
            let mut parser = ReplyParser::new(tokenizer, &options);
            let pieces = scripted(&engine, script, &calls(choice))?;
            let mut parts: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
            parts.extend(parser.finish());
            let arguments = parts.into_iter().filter_map(|part| match part {
                ReplyPart::ToolCall(call) => Some(call.arguments.to_string()),
                _ => None,
            });
            Some(arguments.collect())
        };
        let open = |parameters: &[(&str, &str)]| xml_call("open", &[&[("path", "a\n<b> </b>")], parameters].concat());
        let read = |more: &str| Some(vec![format!(r#"{{"path":"a\n<b> </b>"{more}}}"#)]);
        for (parameters, want) in [
            (&[][..], ""),
            (&[("mode", "w+"), ("count", "12")], r#","mode":"w+","count":12"#),
            (&[("count", "null"), ("name", "a/b1")], r#","count":null,"name":"a/b1""#),
            (&[("name", "null")], r#","name":null"#),
            (
                &[("list", r#"[{"x": "é"}, {"x": ""}]"#), ("either", "true")],
                r#","list":[{"x":"é"},{"x":""}],"either":true"#,
            ),
        ] {
            let script = open(parameters);
            assert_eq!(arguments(&script, &CallChoice::Required), read(want), "{script} {is_control}");
        }
        for (key, value) in [
            ("mode", "x"),
            ("count", "0"),
            ("count", "many"),
            ("name", "1"),
            ("name", "abcdef"),
            ("list", r#"[{"x": "abc"}]"#),
            ("either", "1.5"),
            ("other", "1"),
        ] {
            assert_eq!(arguments(&open(&[(key, value)]), &CallChoice::Required), None, "{key}: {value} {is_control}");
        }
        let any = || xml_call("any", &[("k", "v"), ("l", "")]);
        let two = format!("{}\n{}", any(), any());
        let want = || Some(vec![r#"{"k":"v","l":""}"#.to_owned(); 2]);
        assert_eq!(arguments(&two, &CallChoice::Required), want());
        let json = r#"{"type": "object", "additionalProperties": false}"#.to_owned();
        assert_eq!(arguments(&two, &CallChoice::OrJson(json.clone())), want());
        assert_eq!(arguments("{}", &CallChoice::OrJson(json)), Some(vec![]));
        let strict = CallChoice::Strict(vec!["open".into()]);
        assert_eq!(arguments(&format!("Well.\n{two}\n"), &strict), want());
        assert_eq!(arguments(&open(&[("mode", "x")]), &strict), None);
        for choice in [CallChoice::One, CallChoice::Named("any".into())] {
            assert_eq!(arguments(&two, &choice), None, "{choice:?}");
            assert_eq!(arguments(&any(), &choice).map(|calls| calls.len()), Some(1), "{choice:?}");
        }
        assert_eq!(arguments(&any(), &CallChoice::Named("open".into())), None);
        assert_eq!(arguments("Well.", &CallChoice::Required), None);
    }
}

/// What the syntax cannot hold a string to is refused, or widened.
#[test]
fn strings_in_xml_are_refused_or_widened() {
    let engine = qwen(false);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let mut chain = json!({"type": "integer"});
    for _ in 0..30 {
        chain = json!({"anyOf": [chain, {"$ref": "#/properties/v/anyOf/0"}]});
    }
    for schema in [
        json!({"type": "string", "format": "email"}),
        json!({"type": "string", "pattern": "^a|b$"}),
        json!({"type": "string", "pattern": "a(?=b)"}),
        json!({"minLength": 2}),
        chain,
    ] {
        let parameters = json!({"type": "object", "properties": {"v": schema}, "required": ["v"]});
        let options = ChatOptions { tools: vec![tool("f", &parameters)], ..ChatOptions::default() };
        let strict = Constraint::tool_calls(tokenizer, &options, &CallChoice::Required);
        assert!(strict.and_then(|calls| engine.compile(&calls)).is_err(), "{schema}");
        let wide = Constraint::tool_calls_widened(tokenizer, &options, &CallChoice::Required, &[]).expect("a grammar");
        assert!(scripted(&engine, &xml_call("f", &[("v", "any text")]), &wide).is_some(), "{schema}");
    }
}

/// Calls that a model samples are read back, and valid.
#[test]
fn sampled_calls_in_xml_are_valid() {
    let engine = qwen(true);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let schema = json!({"type": "object", "properties": {
        "s": {"type": "string", "minLength": 1, "maxLength": 12},
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
        "b": {"type": "boolean"},
        "e": {"type": ["string", "null"], "enum": ["fn", "let mut", null]},
        "l": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    }, "required": ["s", "e"], "additionalProperties": false});
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let options = ChatOptions { tools: vec![tool("f", &schema)], ..ChatOptions::default() };
    let calls = Constraint::tool_calls(tokenizer, &options, &CallChoice::One).expect("a grammar");
    let prompt = tokenizer.encode("fn main() {\n    ").expect("ids");
    let mut seen = HashSet::new();
    for seed in 0..20 {
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        let generate = GenerateOptions { sampling, seed, max_tokens: 300, ..plain(calls.clone()) };
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let mut parser = ReplyParser::new(tokenizer, &options);
        let pieces: Vec<_> =
            session.generate(&prompt, &generate).expect("begun").collect::<Result<_, _>>().expect("pieces");
        let parts: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
        let [ReplyPart::ToolCall(call)] = &*parts else { panic!("{parts:?}") };
        let arguments: Value = serde_json::from_str(&call.arguments.to_string()).expect("JSON");
        assert!(validator.is_valid(&arguments), "{arguments}");
        seen.insert(arguments.to_string());
    }
    assert!(seen.len() > 10, "{seen:?}");
}

/// Whether the model may write a text under a constraint, as the whole text.
fn allows(constraint: &Constraint, text: &str) -> bool {
    let ids = ENGINE.tokenizer().and_then(|tokenizer| tokenizer.encode(text)).expect("ids");
    let ids: Vec<_> = ids.into_iter().skip_while(|id| *id == 2).collect();
    let end = vec![1];
    let script = Script([ids.as_slice(), &end].concat());
    let options = GenerateOptions { logits_processor: Some(Arc::new(script)), ..plain(constraint.clone()) };
    let mut session = ENGINE.session(&SessionOptions::default()).expect("a session");
    let Ok(generation) = session.generate(&prompt(), &options) else { return false };
    let written: Result<String, _> = generation.map(|piece| piece.map(|piece| piece.text)).collect();
    written.is_ok_and(|written| written == text)
}

/// Asserts which texts a schema allows.
fn assert_allows(schema: Value, yes: &[&str], no: &[&str]) {
    let constraint = Constraint::json_schema(schema.to_string());
    ENGINE.compile(&constraint).unwrap_or_else(|error| panic!("{schema}: {error}"));
    for text in yes {
        assert!(allows(&constraint, text), "{schema} refuses {text}");
    }
    for text in no {
        assert!(!allows(&constraint, text), "{schema} allows {text}");
    }
}

#[test]
fn dates_and_times_exist() {
    let (days, no_days) = (
        ["\"2024-02-28\"", "\"0001-12-31\"", "\"1000-04-30\"", "\"0100-11-01\""],
        ["\"0000-01-01\"", "\"2023-02-29\"", "\"2023-04-31\"", "\"2023-13-01\"", "\"2023-01-00\""],
    );
    assert_allows(json!({"type": "string", "format": "date"}), &days, &no_days);
    let (times, no_times) =
        (["\"23:59:59Z\"", "\"00:00:00.5+23:59\""], ["\"23:59:60Z\"", "\"24:00:00Z\"", "\"10:00:00\""]);
    assert_allows(json!({"type": "string", "format": "time"}), &times, &no_times);
    let both = json!({"type": "string", "format": "date-time", "pattern": "^2"});
    let (yes, no) = (
        ["\"2023-02-28T23:59:59-01:30\"", "\"2023-12-31t00:00:00.125z\""],
        ["\"1023-02-28T23:59:59Z\"", "\"2023-02-29T23:59:59Z\"", "\"2023-02-28T23:59:60Z\"", "\"2023-02-28\""],
    );
    assert_allows(both, &yes, &no);
}

#[test]
fn exclusive_bounds_exclude_integers() {
    for (bounds, yes, no) in [
        (json!({"exclusiveMinimum": 0, "maximum": 0.5}), ["0.1", "0.5"], ["0", "0.0"]),
        (json!({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}), ["2.1", "2.4"], ["2", "2.5"]),
        (json!({"minimum": -0.9, "exclusiveMaximum": 0}), ["-0.1", "-0.9"], ["-0", "0"]),
        (json!({"exclusiveMinimum": -2.5, "exclusiveMaximum": -2}), ["-2.1", "-2.4"], ["-2", "-2.0"]),
        (json!({"minimum": 1, "exclusiveMinimum": true, "maximum": 1.5}), ["1.1", "1.5"], ["1", "1.0"]),
        (json!({"allOf": [{"exclusiveMinimum": 10}, {"maximum": 10.5}]}), ["10.1", "10.5"], ["10", "10.0"]),
        (json!({"exclusiveMinimum": 0}), ["0.1", "1000"], ["0", "0.0"]),
    ] {
        let mut schema = bounds;
        schema["type"] = json!("number");
        assert_allows(schema, &yes, &no);
    }
}

#[test]
fn large_numbers_are_exact_or_refused() {
    let integer = |least: i64, most: i64| json!({"type": "integer", "minimum": least, "maximum": most});
    assert_allows(
        integer(9_007_199_254_740_993, 9_007_199_254_740_997),
        &["9007199254740994", "9007199254740996"],
        &["9007199254740992", "9007199254740998"],
    );
    assert_allows(
        json!({"type": "integer", "exclusiveMinimum": 9_007_199_254_740_992i64, "maximum": 9_007_199_254_740_999i64}),
        &["9007199254740994", "9007199254740998"],
        &["9007199254740992", "9007199254741000"],
    );
    let edge = ["0", "-1", "9223372036854774784", "-9223372036854774784"];
    assert_allows(integer(i64::MIN, i64::MAX), &edge, &["9223372036854775808", "-9223372036854775809", "0.5"]);
    let unsigned = json!({"type": "integer", "minimum": 0, "maximum": u64::MAX});
    assert_allows(unsigned, &["0", "9223372036854774784"], &["-1", "18446744073709551616"]);
    for most in [f64::from(f32::MAX), f64::MAX, 1e18] {
        let number = json!({"type": "number", "minimum": -most, "maximum": most});
        assert_allows(number, &["0", "-12345.5", "999999999999999999"], &["null", "99999999999999999999"]);
    }
    assert_allows(json!({"const": 9_007_199_254_740_994i64}), &["9007199254740994"], &["9007199254740993"]);
    for constant in [
        json!({"const": 9_007_199_254_740_993i64}),
        json!({"enum": [1, {"a": [u64::MAX]}]}),
        json!({"const": i64::MIN}),
        json!({"enum": [-1e19], "type": "integer"}),
        json!({"const": 1u64 << 63, "type": "integer"}),
    ] {
        let schema = json!({"type": "object", "properties": {"a": constant}});
        let problem = refused(Constraint::json_schema(schema.to_string()));
        assert!(problem.starts_with("#/properties/a: has the constant "), "{problem}");
    }
    let grammar = r#"start: %json {"type": "integer", "minimum": -1e19, "maximum": -1e19}"#;
    let problem = refused(Constraint::lark(grammar));
    assert!(problem.starts_with("%json #: has maximum -1"), "{problem}");
}

#[test]
fn references_have_escapes() {
    let one = |reference: &str, definitions: Value| json!({"$ref": reference, "definitions": definitions});
    let boolean = json!({"type": "boolean"});
    for (reference, name) in [
        ("#/definitions/a~1b", "a/b"),
        ("#/definitions/a~0b", "a~b"),
        ("#/definitions/a~01b", "a~1b"),
        ("#/definitions/a%20b", "a b"),
        ("#/definitions/Foo%3CBar%3E", "Foo<Bar>"),
        ("#/definitions/Foo<Bar>", "Foo<Bar>"),
        ("#/definitions/%C3%BC%25", "ü%"),
    ] {
        assert_allows(one(reference, json!({name: boolean})), &["true", "false"], &["1", "\"true\""]);
    }
    // A schema that refers to itself, and one that no keyword has.
    let list = json!({"a/b": {"type": "array", "items": {"$ref": "#/definitions/a~1b"}, "maxItems": 1}});
    assert_allows(one("#/definitions/a~1b", list), &["[]", "[[]]"], &["[[], []]", "1"]);
    let elsewhere = json!({"$ref": "#/components/schemas/id", "components": {"schemas": {"id": {"type": "string",
        "format": "cuid"}}}});
    assert_allows(elsewhere, &["\"x\""], &["1"]);
    let problem = refused(Constraint::json_schema(one("#/definitions/a~1c", json!({"a/b": {}})).to_string()));
    assert!(problem.starts_with("#: "), "{problem}");
}

#[test]
fn cases_of_one_of_are_told_apart_by_a_property() {
    let case = |kind: &str, name: &str, schema: Value| {
        json!({"type": "object", "properties": {"kind": {"const": kind, "title": "Kind", "type": "string"}, name: schema},
            "required": [name, "kind"], "additionalProperties": false})
    };
    let union = json!({"oneOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Branch"}]});
    let schema = |root: &Value, branch: &Value| {
        json!({"type": "array", "items": root, "minItems": 1, "maxItems": 2, "$defs": {
            "Leaf": case("leaf", "n", json!({"type": "integer", "minimum": 0, "maximum": 9})),
            "Branch": case("branch", "of", branch.clone())}})
    };
    let leaf = json!({"$ref": "#/$defs/Leaf"});
    let flat = schema(&union, &leaf);
    check(&flat, &write(&plain(Constraint::json_schema(flat.to_string()))).0);
    let problem = refused(Constraint::json_schema(schema(&json!({"oneOf": [leaf, leaf]}), &leaf).to_string()));
    assert!(problem.starts_with("#/items: oneOf") && problem.ends_with("with different constants"), "{problem}");
    // Beside others: one that nothing refers to, whose cases overlap, and ones that llguidance compares.
    let mut mixed = schema(&union, &leaf);
    mixed["$defs"]["Unused"] = json!({"oneOf": [{"type": "string"}, {"maxLength": 3}]});
    let nested = json!({"oneOf": [{"oneOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "null"}]});
    mixed["items"] = json!({"oneOf": [union, {"type": "array", "items": nested}]});
    assert_allows(mixed.clone(), &[r#"[{"kind":"leaf","n":1}]"#, "[[1, null]]"], &["[null]", "[[[]]]"]);
    mixed["$defs"]["Unused"] = json!({});
    mixed["items"] = json!({"type": "object", "properties": {"a": union, "b": {"oneOf": [leaf, leaf]}}});
    let problem = refused(Constraint::json_schema(mixed.to_string()));
    assert!(problem.starts_with("#/items/properties/b: oneOf"), "{problem}");
    // Constants that the draft does not have.
    let old = json!({"$schema": "http://json-schema.org/draft-04/schema#", "oneOf": [{"const": "a"}, {"const": "b"}]});
    assert!(refused(Constraint::json_schema(old.to_string())).contains("oneOf"));
    // Words of other vocabularies, in schemas that refer to themselves.
    let mut tagged = union;
    tagged["discriminator"] = json!({"propertyName": "kind", "mapping": {"leaf": "#/$defs/Leaf"}});
    let nullable = json!({"$ref": "#/$defs/Branch", "nullable": true, "x-order": {"a": 1}, "enumNames": "x"});
    for branch in [tagged, nullable] {
        let schema = schema(&json!({"$ref": "#/$defs/Branch"}), &json!({"anyOf": [branch, {"type": "null"}]}));
        ENGINE
            .compile(&Constraint::json_schema(schema.to_string()))
            .unwrap_or_else(|error| panic!("{schema}: {error}"));
    }
}

#[test]
fn properties_are_not_counted_twice() {
    let of = |more: Value| {
        let mut schema = json!({"type": "object", "additionalProperties": {"type": "boolean"}});
        schema.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        schema
    };
    for schema in [
        of(json!({"minProperties": 2})),
        of(json!({"minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": false})),
        of(json!({"minProperties": 3, "required": ["a", "a"]})),
    ] {
        let problem = refused(Constraint::json_schema(json!({"type": "array", "items": schema}).to_string()));
        assert!(problem.starts_with("#/items: has minProperties "), "{problem}");
    }
    assert_allows(of(json!({"minProperties": 1})), &["{\"a\":true}"], &["{}"]);
    assert_allows(of(json!({"minProperties": 2, "required": ["a"]})), &["{\"a\":true,\"b\":true}"], &["{\"a\":true}"]);
}

#[test]
fn additional_items_follow_a_list_of_items() {
    let integer = json!({"type": "integer"});
    let list = |others: Value| json!({"type": "array", "items": [integer], "allOf": [{"minItems": 1}], "additionalItems": others});
    assert_allows(list(json!(false)), &["[1]"], &["[]", "[\"x\"]", "[1, \"x\"]"]);
    let day = json!({"type": "string", "format": "date"});
    assert_allows(list(day), &["[1]", "[1, \"2024-02-28\"]"], &["[1, 2]", "[1, \"0000-01-01\"]"]);
    // Of the draft that has `prefixItems`, it is no keyword.
    let tuple = json!({"type": "array", "prefixItems": [integer], "additionalItems": false});
    assert_allows(tuple, &["[1]", "[1, \"x\"]"], &["[\"x\"]"]);
}

#[test]
fn additional_properties_follow_those_of_patterns() {
    let schema = json!({"type": "object", "patternProperties": {"^x": {"type": "boolean"}}, "allOf": [{"minProperties": 1}],
        "additionalProperties": false});
    assert_allows(schema, &["{\"x\":true}"], &["{\"a\":true}", "{}"]);
}

/// A group's name has no effect.
#[test]
fn groups_have_any_name() {
    let range = json!({"type": "string", "pattern": "^(?<start>[0-9]+)-(?<stop>[0-9]+)$"});
    assert_allows(range, &["\"1-2\"", "\"10-20\""], &["\"1-\"", "\"1-2-3\""]);
}
