//! Patterns of JSON schemas: ECMA-262's syntax, translated to that of the crate `regex`, which llguidance reads.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// `\s` and its complement, as items of a class.
const SPACE: &str = r"\t-\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}";
const NO_SPACE: &str = concat!(
    r"\x00-\x08\x0e-\x1f\x21-\x9f\xa1-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}",
    r"\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-\x{10ffff}"
);
const NO_LINE_END: &str = r"[^\n\r\x{2028}\x{2029}]";
const ANY: &str = r"[\x00-\x{10ffff}]";
const NONE: &str = r"[^\x00-\x{10ffff}]";
/// The name of a group that llguidance reads as look-ahead, in the notations that the crate has.
const STOP: [&str; 2] = ["?<stop>", "?P<stop>"];
/// Escapes of several characters.
const SETS: [&str; 8] = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\p", r"\P"];

/// Translates a schema's `pattern` and the names of its `patternProperties`. What was translated
/// already does not change.
pub(super) fn translate(fields: &mut Map<String, Value>) {
    if let Some(Value::String(pattern)) = fields.get_mut("pattern") {
        *pattern = translated(pattern);
    }
    let Some(Value::Object(properties)) = fields.get_mut("patternProperties") else { return };
    // Names that became equal. Their schemas are in one list: all names can become equal, too many to nest.
    let mut equal = HashSet::new();
    for (name, schema) in std::mem::take(properties) {
        let name = translated(&name);
        let Some(known) = properties.get_mut(&name) else {
            properties.insert(name, schema);
            continue;
        };
        if equal.insert(name) {
            *known = json!({"allOf": [known.take()]});
        }
        if let Some(all) = known.get_mut("allOf").and_then(Value::as_array_mut) {
            all.push(schema);
        }
    }
}

/// What precedes an item of a class.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    /// A character, which may begin a range.
    Character,
    /// The hyphen of a range.
    Range,
    Other,
}

/// Differs in `.`, `\s`, groups named `stop`, and in classes, where `[`, `&&`, `--` and `~~` have no meaning. What the
/// crate has not (look-around, references) is left to it to refuse.
fn translated(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let (mut rest, mut class) = (pattern, None);
    while !rest.is_empty() {
        let item = take(&mut rest);
        class = match class {
            None => translate_outside(item, &mut rest, &mut out),
            Some(before) => translate_in_class(item, before, rest, &mut out),
        };
    }
    out
}

/// Translates an item outside of classes. If a class begins with it, returns what precedes its first item.
fn translate_outside(item: &str, rest: &mut &str, out: &mut String) -> Option<Before> {
    match item {
        "." => *out += NO_LINE_END,
        r"\s" => *out += &format!("[{SPACE}]"),
        r"\S" => *out += &format!("[^{SPACE}]"),
        "(" => {
            for name in STOP {
                if let Some(after) = rest.strip_prefix(name) {
                    *out += "(?:";
                    *rest = after;
                    return None;
                }
            }
            *out += item;
        }
        "[" => {
            for (empty, meaning) in [("]", NONE), ("^]", ANY)] {
                if let Some(after) = rest.strip_prefix(empty) {
                    *out += meaning;
                    *rest = after;
                    return None;
                }
            }
            out.push('[');
            if rest.starts_with('^') {
                *out += take(rest);
            }
            return Some(Before::Other);
        }
        _ => *out += item,
    }
    None
}

/// Translates an item of a class. Returns what precedes the next one; `None` if the class ends with it.
fn translate_in_class(item: &str, before: Before, rest: &str, out: &mut String) -> Option<Before> {
    let ends_class = rest.starts_with(']') || SETS.iter().any(|set| rest.starts_with(set));
    let class = match item {
        "]" => None,
        "-" if before == Before::Character && !ends_class => Some(Before::Range),
        _ if SETS.contains(&item) || before == Before::Range => Some(Before::Other),
        _ => Some(Before::Character),
    };
    *out += match item {
        "-" if class == Some(Before::Range) => "-",
        "-" => r"\-",
        "[" => r"\[",
        "&" => r"\&",
        "~" => r"\~",
        r"\b" => r"\x08",
        r"\s" => SPACE,
        r"\S" => NO_SPACE,
        _ => item,
    };
    class
}

/// Takes a character, or a backslash and the character after it.
fn take<'a>(rest: &mut &'a str) -> &'a str {
    let count = if rest.starts_with('\\') { 2 } else { 1 };
    let (item, after) = rest.split_at(rest.chars().take(count).map(char::len_utf8).sum());
    *rest = after;
    item
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_ecma_has() {
        let all =
            ["a", "b", "-", "[", "]", "&", "~", "a]", "[]", "é", "\r", "\n", "\u{feff}", "\u{85}", "\u{8}", "5", "z"];
        for (pattern, want) in [
            ("[[a]", &["a", "["][..]),
            ("[[a]]", &["a]", "[]"]),
            ("[a&&b]", &["a", "b", "&"]),
            ("[+--b]", &["b", "-"]),
            ("[--a]", &["a", "-", "[", "]", "5"]),
            ("[a-]", &["a", "-"]),
            (r"[\d-z]", &["-", "5", "z"]),
            (r"[a-\d]", &["a", "-", "5"]),
            ("[a-b-z]", &["a", "b", "-", "z"]),
            ("[~~&]", &["&", "~"]),
            ("[^]", &["a", "b", "-", "[", "]", "&", "~", "é", "\r", "\n", "\u{feff}", "\u{85}", "\u{8}", "5", "z"]),
            ("[]", &[]),
            (".", &["a", "b", "-", "[", "]", "&", "~", "é", "\u{feff}", "\u{85}", "\u{8}", "5", "z"]),
            (r"\s", &["\r", "\n", "\u{feff}"]),
            (r"[\s\b]", &["\r", "\n", "\u{feff}", "\u{8}"]),
            (r"[^\S\n]", &["\r", "\u{feff}"]),
            (r"[^\s\w]", &["-", "[", "]", "&", "~", "\u{85}", "\u{8}"]),
            (r"\[\]|\.|é", &["[]", "é"]),
        ] {
            let expression = translated(pattern);
            assert_eq!(translated(&expression), expression, "translated again: {pattern}");
            let expression = regex::Regex::new(&format!("^(?:{expression})$")).expect(pattern);
            let matched: Vec<_> = all.into_iter().filter(|text| expression.is_match(text)).collect();
            assert_eq!(matched, want, "{pattern}");
        }
        assert_eq!(
            translated(r"^(?<start>a)(?<stop>b)[(?<stop>]\((?P<stop>c)$"),
            r"^(?<start>a)(?:b)[(?<stop>]\((?:c)$"
        );
        for left in ["^(?<n>a|b)+?$", r"\u00e9\/\-", r"[\u00e0-\u00ff]", "(?=a)", "a{2,3}", "\\"] {
            assert_eq!(translated(left), left);
        }
    }

    #[test]
    fn names_that_become_equal_are_merged() {
        // In ascending order, which is also that of maps that do not keep the order of insertion.
        let mut schema = json!({"patternProperties": {r"[\~]": {"maxLength": 1}, "[~]": {"type": "string"}}});
        translate(schema.as_object_mut().expect("an object"));
        let want = json!({"patternProperties": {r"[\~]": {"allOf": [{"maxLength": 1}, {"type": "string"}]}}});
        assert_eq!(schema, want);
    }

    /// Schemas are visited recursively: the depth of a document must not grow with the number of its names.
    #[test]
    fn names_that_become_equal_are_not_nested() {
        let names = (0..1 << 10).map(|spelling: u32| {
            let character = |i: u32| if spelling >> i & 1 == 1 { r"\~" } else { "~" };
            format!("[{}]", (0..10).map(character).collect::<String>())
        });
        let properties: Map<_, _> = names.zip(0..).map(|(name, i)| (name, json!({"maxLength": i}))).collect();
        let mut schema = json!({"patternProperties": properties});
        translate(schema.as_object_mut().expect("an object"));
        let merged = &schema["patternProperties"][format!("[{}]", r"\~".repeat(10))]["allOf"];
        let lengths = merged.as_array().expect("a list").iter().filter_map(|schema| schema["maxLength"].as_u64());
        let mut lengths: Vec<u64> = lengths.collect();
        lengths.sort_unstable();
        assert!(lengths.into_iter().eq(0..1 << 10));
    }
}
