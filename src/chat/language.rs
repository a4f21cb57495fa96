//! The template language as set up by transformers: Jinja's filters and tests, Python's methods and
//! JSON, and resource limits.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error as TemplateError, ErrorKind, State, Value, escape_formatter, filters};

use super::json::{self, Dumps};
use super::python::{self, MAX_COUNT, check_count, too_large, wrong};

/// Maximum instructions per rendering: a linear template executes a few hundred per message.
pub(super) const MAX_INSTRUCTIONS: u64 = 20_000_000;

/// An environment without a template.
///
/// # Errors
/// Syntax errors; the syntax is constant.
pub(super) fn environment() -> Result<Environment<'static>, TemplateError> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(MAX_INSTRUCTIONS));
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        if method == "format" {
            check_widths(value)?;
        }
        python::method(state, value, method, arguments)
    });
    for (name, filter) in [
        ("batch", Value::from_function(filters::batch)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(python::indent)),
        ("slice", Value::from_function(filters::slice)),
        ("tojson", Value::from_function(to_json)),
    ] {
        environment.add_filter(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            let (value, counts) = arguments.split_first().ok_or(ErrorKind::MissingArgument)?;
            match name {
                "format" => check_widths(value)?,
                _ => counts.iter().try_for_each(check_count)?,
            }
            filter.call(state, &arguments)
        });
    }
    // Python writes `1e+20`; minijinja would write all digits.
    environment.set_formatter(|out, state, value| match value.is_number() && !value.is_integer() {
        true => Ok(out.write_str(&json::repr(value))?),
        false => escape_formatter(out, state, value),
    });
    environment.add_filter("string", |value: Value| match value.is_number() && !value.is_integer() {
        true => json::repr(&value),
        false => value.to_string(),
    });
    environment.add_filter("trim", python::trim);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_filter("first", python::first);
    environment.add_filter("last", python::last);
    environment.add_filter("items", python::items);
    environment.add_function("dict", python::dict);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_filter("fromjson", from_json);
    environment.add_function("fromjson", from_json);
    environment
        .add_function("raise_exception", |message: String| -> Result<Value, TemplateError> { Err(wrong(message)) });
    // As in Jinja: anything with a length and an index.
    environment.add_test("sequence", |value: Value| {
        matches!(value.kind(), ValueKind::Undefined | ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    // As in Python, for the values that templates see: minijinja would also iterate over none.
    environment.add_test("iterable", |value: Value| {
        use ValueKind::{Iterable, Map, Plain, Seq, String, Undefined};
        matches!(value.kind(), Iterable | Map | Plain | Seq | String | Undefined) && value.try_iter().is_ok()
    });
    Ok(environment)
}

/// `strftime_now(format)`: the time `now`, in UTC, by the directives of C's `strftime`.
pub(super) fn strftime(now: SystemTime) -> Value {
    Value::from_function(move |format: String| {
        let time = jiff::Timestamp::try_from(now).map(|now| jiff::tz::Offset::UTC.to_datetime(now));
        let text = time.and_then(|time| jiff::fmt::strtime::format(directives(&format), time));
        text.map_err(|e| wrong(format!("strftime_now({format:?}): {e}")))
    })
}

/// The format with Python's directives for a time without a zone as those of jiff, which has other
/// locales and needs zones.
fn directives(format: &str) -> String {
    let (mut out, mut chars) = (String::new(), format.chars());
    while let Some(c) = chars.next() {
        match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some('c')) => out.push_str("%a %b %e %H:%M:%S %Y"),
            ('%', Some('x')) => out.push_str("%m/%d/%y"),
            ('%', Some('X')) => out.push_str("%H:%M:%S"),
            ('%', Some('f')) => out.push_str("%6f"),
            ('%', Some('Z' | 'z')) => {}
            (c, directive) => out.extend([Some(c), directive].into_iter().flatten()),
        }
    }
    out
}

/// `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`: Python's
/// `json.dumps`, without HTML escapes.
fn to_json(value: Value, given: Rest<Value>, keywords: Kwargs) -> Result<String, TemplateError> {
    let argument = |at: usize, name: &str| -> Result<Value, TemplateError> {
        let named = keywords.get::<Option<Value>>(name)?;
        Ok(named.or_else(|| given.get(at).cloned()).unwrap_or_else(|| Value::from(())))
    };
    let [ascii, indent, separators, sort] =
        [argument(0, "ensure_ascii")?, argument(1, "indent")?, argument(2, "separators")?, argument(3, "sort_keys")?];
    keywords.assert_all_used()?;
    let indent = match indent.kind() {
        ValueKind::None => None,
        ValueKind::String => indent.as_str().map(str::to_owned),
        ValueKind::Bool => Some(" ".repeat(indent.is_true().into())),
        _ => Some(" ".repeat(usize::try_from(indent)?)),
    };
    let separators = match separators.kind() {
        ValueKind::None => (if indent.is_none() { ", " } else { "," }.into(), ": ".into()),
        _ => (separators.get_item_by_index(0)?.to_string(), separators.get_item_by_index(1)?.to_string()),
    };
    Dumps { ensure_ascii: ascii.is_true(), indent, separators, sort_keys: sort.is_true() }.dump(&value)
}

fn from_json(text: String) -> Result<Value, TemplateError> {
    serde_json::from_str(&text).map_err(|e| wrong(format!("fromjson: {e}")))
}

/// Checks that widths and precisions in a format string are not too large.
fn check_widths(format: &Value) -> Result<(), TemplateError> {
    let numbers = format.as_str().unwrap_or_default().split(|c: char| !c.is_ascii_digit());
    let mut numbers = numbers.filter(|digits| !digits.is_empty());
    match numbers.any(|digits| digits.parse::<usize>().map_or(true, |number| number > MAX_COUNT)) {
        true => Err(too_large()),
        false => Ok(()),
    }
}
