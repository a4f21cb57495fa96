//! Chat templates render what transformers renders: `chat_templates/golden.json` is made by `chat_templates/generate.py`
//! from the templates and cases beside it.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use foretoken::chat::{
    ChatOptions, ChatTemplate, Content, GenerationPrompt, Json, Message, Part, Role, Thinking, ToolCall,
};
use foretoken::{Error, Result};
use serde_json::Value;

/// 2026-03-05 14:07:09, as in `generate.py`.
const NOW: Duration = Duration::from_secs(1_772_719_629);

fn read(file: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/chat_templates").join(file);
    std::fs::read_to_string(path).expect(file)
}

fn template(source: &str) -> Result<ChatTemplate> {
    ChatTemplate::new(source.into(), "<bos>".into(), "<eos>".into())
}

fn render(source: &str, messages: &[Message]) -> Result<String> {
    template(source)?.render(messages, &ChatOptions::default())
}

#[track_caller]
fn refused<T>(result: Result<T>, about: &[&str]) {
    let Err(error) = result else { panic!("accepted; an error with {about:?} was expected") };
    let message = error.to_string();
    assert!(message.lines().count() == 1 && message.len() < 600, "not one line: {message:?}");
    about.iter().for_each(|part| assert!(message.contains(part), "{message:?} does not say {part:?}"));
}

/// A case as the renderer takes it.
fn case(fields: Vec<(String, Json)>) -> (String, Result<Vec<Message>>, ChatOptions) {
    let (mut name, mut messages) = (String::new(), Ok(Vec::new()));
    let mut options = ChatOptions { now: Some(SystemTime::UNIX_EPOCH + NOW), ..ChatOptions::default() };
    for (field, value) in fields {
        match field.as_str() {
            "name" => name = value.as_str().expect("a name").to_owned(),
            "messages" => messages = Message::list(&value),
            "tools" => options.tools = value.into_list().expect("a list"),
            "variables" => options.variables = value.into_fields().expect("an object"),
            "thinking" => options.thinking = if value == Json::from(true) { Thinking::On } else { Thinking::Off },
            "add_generation_prompt" => {
                assert_eq!(value, Json::from(false));
                options.generation_prompt = GenerationPrompt::Omit;
            }
            "templates" => {}
            other => panic!("{other}"),
        }
    }
    (name, messages, options)
}

#[test]
fn templates_render_what_transformers_renders() {
    let golden: Value = serde_json::from_str(&read("golden.json")).expect("JSON");
    let cases = Json::parse(&read("cases.json")).and_then(Json::into_list).expect("a list");
    let cases: Vec<_> = cases.into_iter().map(|fields| case(fields.into_fields().expect("an object"))).collect();
    let mut rendered = 0;
    for (name, results) in golden.as_object().expect("an object") {
        let template = template(&read(&format!("{name}.jinja"))).expect(name);
        for (of, want) in results.as_object().expect("an object") {
            let (_, messages, options) = cases.iter().find(|(case, ..)| case == of).expect(of);
            let got = template.render(messages.as_ref().expect(of), options);
            match want["error"].as_str() {
                Some(error) => refused(got, &["chat template", error]),
                None => assert_eq!(got.expect(of), want.as_str().expect("a prompt"), "{name}: {of}"),
            }
            rendered += 1;
        }
    }
    assert_eq!(rendered, 63, "cases of all templates");
}

/// Messages made in Rust are those read from JSON.
#[test]
fn messages_are_those_of_json() {
    let arguments = r#"{"zone": "UTC", "at": [1, 2.5]}"#;
    let json = r#"[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": null, "thinking": "r", "tool_calls": [{"id": "1", "function": {"name": "now",
        "arguments": "{\"zone\": \"UTC\", \"at\": [1, 2.5]}"}}]}, {"role": "tool", "tool_call_id": "1", "name": "now",
        "content": "12:00"}, {"role": "developer", "content": "d", "custom": {"b": 1, "a": 2}}]"#;
    let read = Message::list(&Json::parse(json).expect("JSON")).expect("messages");
    let call = ToolCall { id: Some("1".into()), name: "now".into(), arguments: Json::parse(arguments).expect("JSON") };
    let custom = Json::parse(r#"{"b": 1, "a": 2}"#).expect("JSON");
    let made = [
        Message::system("s"),
        Message::new(Role::User, Content::Parts(vec![Part::Text("a".into())])),
        Message { reasoning: Some("r".into()), tool_calls: vec![call], ..Message::assistant("") },
        Message::tool("1", "now", "12:00"),
        Message { extra: vec![("custom".into(), custom)], ..Message::new(Role::Developer, "d") },
    ];
    assert_eq!(read, made);
    let all = "{{ messages | tojson }}";
    let want = concat!(
        r#"[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}, "#,
        r#"{"role": "assistant", "content": "", "reasoning_content": "r", "thinking": "r", "reasoning": "r", "#,
        r#""tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "#,
        r#"{"zone": "UTC", "at": [1, 2.5]}}}]}, "#,
        r#"{"role": "tool", "content": "12:00", "tool_call_id": "1", "name": "now"}, "#,
        r#"{"role": "developer", "content": "d", "custom": {"b": 1, "a": 2}}]"#,
    );
    assert_eq!(render(all, &made).expect("a prompt"), want);
}

#[test]
fn messages_that_are_not_read_are_refused_by_name() {
    let list = |json: &str| Message::list(&Json::parse(json).expect("JSON"));
    let parts =
        |kind: &str| format!(r#"[{{"role": "user", "content": "a"}}, {{"role": "user", "content": [{kind}]}}]"#);
    for kind in ["image_url", "image", "audio", "video"] {
        let part = format!(r#"{{"type": "text", "text": ""}}, {{"type": "{kind}"}}"#);
        refused(list(&parts(&part)), &["messages: [1].content[1]", kind, "not implemented", "use text"]);
    }
    for (json, about) in [
        ("{}", "must be a list"),
        ("[7]", "[0]: is not an object"),
        (r#"[{"content": "a"}]"#, "[0].role: is \"\", must be one of system, developer, user, assistant, tool"),
        (r#"[{"role": "model", "content": "a"}]"#, "[0].role: is \"model\""),
        (r#"[{"role": "user", "content": 7}]"#, "[0].content: is neither a string nor a list"),
        (r#"[{"role": "user", "content": ["a"]}]"#, "[0].content[0]"),
        (r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "[0].content[0]: has no text"),
        (r#"[{"role": "tool", "tool_call_id": 7}]"#, "[0].tool_call_id: is not a string"),
        (r#"[{"role": "assistant", "tool_calls": [{"function": {}}]}]"#, "[0].tool_calls[0]: has no name"),
    ] {
        refused(list(json), &["messages", about]);
    }
    refused(Json::parse(&"[".repeat(100_000)), &["JSON", "cannot be parsed"]);
    let options = |tools: &str, name: &str| ChatOptions {
        tools: vec![Json::parse(tools).expect("JSON")],
        variables: vec![(name.into(), Json::from(true))],
        ..ChatOptions::default()
    };
    let template = template("").expect("a template");
    refused(template.render(&[], &options("[]", "x")), &["tools[0] is not an object"]);
    for name in ["messages", "tools", "enable_thinking", "add_generation_prompt"] {
        refused(template.render(&[], &options("{}", name)), &["variables", name, "a dedicated option"]);
    }
}

/// Filters and functions besides those of Jinja.
#[test]
fn functions_that_transformers_or_others_add() {
    let prompt = |source: &str| render(source, &[Message::user("Hi")]);
    assert_eq!(
        prompt(r#"{{ ('{"b": [1.50], "a": "é"}' | fromjson) | tojson }}"#).unwrap(),
        r#"{"b": [1.5], "a": "é"}"#
    );
    assert_eq!(prompt(r#"{{ fromjson('[1]')[0] }}"#).unwrap(), "1");
    refused(prompt("{{ '{' | fromjson }}"), &["chat template", "fromjson"]);
    refused(prompt("{{ raise_exception('not so') }}"), &["chat template", "not so"]);
    refused(prompt("{{ strftime_now('%Q') }}"), &["chat template", "strftime_now"]);
    refused(prompt("{{ undefined_variable | tojson }}"), &["chat template", "tojson", "undefined"]);
    refused(prompt("{{ [1] | tojson(sorted=true) }}"), &["chat template", "sorted"]);
    // Without a time of the caller's, the clock's.
    let year: i32 = prompt("{{ strftime_now('%Y') }}").unwrap().parse().expect("a year");
    assert!(year >= 2026, "{year}");
    assert!(prompt("a{%- generation -%} b {%- endgeneration %}{% generated %}").is_err(), "another tag");
    assert_eq!(prompt("a{%- generation -%} b {%- endgeneration %} c").unwrap(), "ab c");
    // Python's: none is not, and lines end in one way.
    let iterable =
        "{{ [none is iterable, 1 is iterable, 'a' is iterable, [] is iterable, {} is iterable, x is iterable] }}";
    assert_eq!(prompt(iterable).unwrap(), "[False, False, True, True, True, True]");
    assert_eq!(prompt("a\r\n{{ 'b' }}\rc").unwrap(), "a\nb\nc");
}

/// A template ends, whatever it says.
#[test]
fn hostile_templates_are_refused() {
    let start = std::time::Instant::now();
    let prompt = |source: &str| render(source, &[Message::user("x".repeat(1 << 16))]);
    let loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
    refused(prompt(loops), &["chat template", "too many instructions"]);
    let output = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}";
    refused(prompt(output), &["chat template", "larger than 64 MiB"]);
    let calls = "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    assert!(matches!(prompt(calls), Err(Error::Template(_))));
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}";
    refused(prompt(nested), &["chat template", "nests more than"]);
    for (counts, about) in [
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range has too many elements"),
        ("{% set x = 'x' * 10 ** 10 %}", "repeated string is too large"),
        ("{% set x = ['x'] * 10 ** 10 %}", "repeated sequence is too large"),
    ] {
        refused(prompt(counts), &["chat template", about]);
    }
    println!("{:?}", start.elapsed());
    // Long conversations are none of these.
    let long = vec![Message::user("Hello"); 20_000];
    let turns =
        "{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content | trim }}<turn|>\n{% endfor %}";
    assert_eq!(render(turns, &long).expect("a prompt").len(), 20_000 * "<|turn>user\nHello<turn|>\n".len());
}
