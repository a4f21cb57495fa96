//! Python's methods and functions, and Jinja's filters, where minijinja's differ or are missing.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error as TemplateError, ErrorKind, State, Value, filters, functions};
use minijinja_contrib::pycompat;

use super::slices;

/// Maximum indentation, batch size, field width and slice count in templates: minijinja allocates them
/// unchecked and panics or aborts if memory is short.
pub(super) const MAX_COUNT: usize = 1 << 16;

/// Maximum bytes that `indent` adds: as much as a template may write.
const MAX_INDENTATION: usize = 64 << 20;

type Result<T> = std::result::Result<T, TemplateError>;

pub(super) fn wrong(problem: impl Into<String>) -> TemplateError {
    TemplateError::new(ErrorKind::InvalidOperation, problem.into())
}

/// Calls a method that the value itself does not have.
pub(super) fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value> {
    let own = match (value.kind(), value.as_str()) {
        (_, Some(text)) => of_string(text, name, arguments),
        (ValueKind::Map, _) if name == "copy" => from_args(arguments).map(|()| Some(value.clone())),
        (ValueKind::Seq | ValueKind::Iterable, _) => of_list(value, name, arguments),
        _ => Ok(None),
    };
    let result = match own {
        Ok(Some(result)) => return Ok(result),
        Ok(None) => pycompat::unknown_method_callback(state, value, name, arguments),
        Err(error) => Err(error),
    };
    // minijinja's errors about arguments do not name the method.
    result.map_err(|error| match error.kind() {
        ErrorKind::UnknownMethod => error,
        kind => {
            let detail = error.detail().map_or_else(|| kind.to_string(), str::to_owned);
            wrong(format!("{}.{name}(): {detail}", value.kind()))
        }
    })
}

/// Whitespace to Python's `str` methods.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// A method of a string; `None` if it is not one of these.
fn of_string(text: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>> {
    let is_of = |chars: Option<&str>| {
        let chars: Option<Vec<char>> = chars.map(|chars| chars.chars().collect());
        move |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c))
    };
    Ok(Some(match name {
        "strip" => from_args(arguments).map(|(chars,)| text.trim_matches(is_of(chars)).into())?,
        "lstrip" => from_args(arguments).map(|(chars,)| text.trim_start_matches(is_of(chars)).into())?,
        "rstrip" => from_args(arguments).map(|(chars,)| text.trim_end_matches(is_of(chars)).into())?,
        "split" | "rsplit" => {
            let (separator, limit) = split_arguments(arguments)?;
            Value::from(split(text, separator.as_deref(), limit, name == "rsplit"))
        }
        "splitlines" => {
            let (given, keywords): (Option<bool>, Kwargs) = from_args(arguments)?;
            let keep = keywords.get::<Option<bool>>("keepends")?.or(given).unwrap_or(false);
            keywords.assert_all_used()?;
            lines(text).map(|line| if keep { line } else { without_end(line) }).collect()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            if separator.is_empty() {
                return Err(wrong("the separator is empty"));
            }
            let is_first = name == "partition";
            let parts = if is_first { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = parts.map(|(left, right)| [left, separator, right]);
            let parts = parts.unwrap_or(if is_first { [text, "", ""] } else { ["", "", text] });
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            from_args(arguments).map(|(with,): (&str,)| text.strip_prefix(with).unwrap_or(text).into())?
        }
        "removesuffix" => {
            from_args(arguments).map(|(with,): (&str,)| text.strip_suffix(with).unwrap_or(text).into())?
        }
        "index" => {
            let (part,): (&str,) = from_args(arguments)?;
            let at = text.find(part).ok_or_else(|| wrong("the text does not occur"))?;
            text[..at].chars().count().into()
        }
        "title" => from_args(arguments).map(|()| title(text).into())?,
        "ljust" | "rjust" | "zfill" => justify(text, name, arguments)?.into(),
        slices::METHOD => {
            let chars: Vec<char> = text.chars().collect();
            slice(chars.len(), arguments)?.map(|at| chars[at]).collect::<String>().into()
        }
        _ => return Ok(None),
    }))
}

/// A method of a list; `None` if it is not one of these.
fn of_list(list: &Value, name: &str, arguments: &[Value]) -> Result<Option<Value>> {
    Ok(Some(match name {
        "copy" => from_args(arguments).map(|()| list.clone())?,
        "index" => {
            let (item,): (&Value,) = from_args(arguments)?;
            list.try_iter()?.position(|own| own == *item).ok_or_else(|| wrong("the item does not occur"))?.into()
        }
        slices::METHOD => {
            let items: Vec<Value> = list.try_iter()?.collect();
            let items: Vec<Value> = slice(items.len(), arguments)?.map(|at| items[at].clone()).collect();
            if list.is_tuple() { Value::from(Tuple::from(items)) } else { items.into() }
        }
        _ => return Ok(None),
    }))
}

/// The indices of the slice whose start, stop and step are the arguments.
fn slice(len: usize, arguments: &[Value]) -> Result<impl Iterator<Item = usize> + use<>> {
    let (start, stop, step): (Option<i64>, Option<i64>, Option<i64>) = from_args(arguments)?;
    match step.unwrap_or(1) {
        0 => Err(wrong("the step of a slice must not be 0")),
        step => Ok(slices::indices(len, [start, stop], step)),
    }
}

/// `sep` and `maxsplit`, by position or keyword.
fn split_arguments(arguments: &[Value]) -> Result<(Option<String>, Option<usize>)> {
    let (separator, limit, keywords): (Option<Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = keywords.get::<Option<Value>>("sep")?.or(separator).filter(|separator| !separator.is_none());
    let limit = keywords.get::<Option<i64>>("maxsplit")?.or(limit);
    keywords.assert_all_used()?;
    let separator = separator.map(|separator| match separator.as_str() {
        None => Err(wrong("the separator is not a string")),
        Some("") => Err(wrong("the separator is empty")),
        Some(separator) => Ok(separator.to_owned()),
    });
    Ok((separator.transpose()?, limit.and_then(|limit| usize::try_from(limit).ok())))
}

/// Python's `split`, or `rsplit` if it begins at the end.
fn split(text: &str, separator: Option<&str>, limit: Option<usize>, from_end: bool) -> Vec<Value> {
    let pieces = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let mut parts: Vec<&str> = match (separator, from_end) {
        (Some(separator), false) => text.splitn(pieces, separator).collect(),
        (Some(separator), true) => text.rsplitn(pieces, separator).collect(),
        (None, _) => words(text, pieces, from_end),
    };
    if from_end {
        parts.reverse();
    }
    parts.into_iter().map(Value::from).collect()
}

/// Words, at most `pieces`: the last of them is the rest. In reverse if they are taken from the end.
fn words(text: &str, pieces: usize, from_end: bool) -> Vec<&str> {
    let trim = |text| match from_end {
        true => str::trim_end_matches(text, is_space),
        false => str::trim_start_matches(text, is_space),
    };
    let (mut words, mut rest) = (Vec::new(), trim(text));
    while !rest.is_empty() {
        let parts = match from_end {
            true => rest.rsplit_once(is_space).map(|(more, word)| (word, more)),
            false => rest.split_once(is_space),
        };
        let (word, more) = parts.filter(|_| words.len() + 1 < pieces).unwrap_or((rest, ""));
        words.push(word);
        rest = trim(more);
    }
    words
}

fn ends_line(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Lines with their ends, as in `str.splitlines`.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end =
            rest.char_indices().find(|(_, c)| ends_line(*c)).map(|(at, end)| match rest[at..].starts_with("\r\n") {
                true => at + 2,
                false => at + end.len_utf8(),
            });
        let (line, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(line).filter(|line| !line.is_empty())
    })
}

fn without_end(line: &str) -> &str {
    line.strip_suffix("\r\n").or_else(|| line.strip_suffix(ends_line)).unwrap_or(line)
}

/// Python's `str.title`: a letter after anything but a letter is upper case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        in_word = c.is_alphabetic();
    }
    out
}

/// The text, filled to a width.
fn justify(text: &str, name: &str, arguments: &[Value]) -> Result<String> {
    arguments.iter().try_for_each(check_count)?;
    let (width, fill): (usize, Option<char>) = from_args(arguments)?;
    let missing = width.saturating_sub(text.chars().count());
    let filling = |fill: char| fill.to_string().repeat(missing);
    Ok(match (name, text.strip_prefix(['+', '-'])) {
        ("ljust", _) => format!("{text}{}", filling(fill.unwrap_or(' '))),
        ("rjust", _) => format!("{}{text}", filling(fill.unwrap_or(' '))),
        (_, Some(number)) => format!("{}{}{number}", &text[..1], filling('0')),
        (_, None) => format!("{}{text}", filling('0')),
    })
}

/// The filter `trim`.
pub(super) fn trim(value: Value, chars: Option<String>) -> Value {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).into(),
        None => text.trim_matches(is_space).into(),
    }
}

/// The filters `length` and `count`: an undefined value has no elements.
pub(super) fn length(value: Value) -> Result<usize> {
    if value.is_undefined() { Ok(0) } else { filters::length(&value) }
}

/// The filter `first`.
pub(super) fn first(value: Value) -> Result<Value> {
    if value.is_undefined() { Ok(value) } else { filters::first(&value) }
}

/// The filter `last`.
pub(super) fn last(value: Value) -> Result<Value> {
    if value.is_undefined() { Ok(value) } else { filters::last(value) }
}

/// The filter `items`: an undefined value has none.
pub(super) fn items(value: Value) -> Result<Value> {
    if value.is_undefined() { Ok(Vec::<Value>::new().into()) } else { filters::items(&value) }
}

/// The filter `indent(width=4, first=false, blank=false)`, whose width may be a text.
pub(super) fn indent(value: Value, given: Rest<Value>, keywords: Kwargs) -> Result<String> {
    let argument = |at: usize, name: &str| -> Result<Option<Value>> {
        Ok(keywords.get::<Option<Value>>(name)?.or_else(|| given.get(at).cloned()))
    };
    let [width, first, blank] = [argument(0, "width")?, argument(1, "first")?, argument(2, "blank")?];
    keywords.assert_all_used()?;
    let indent = match &width {
        None => "    ".to_owned(),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width.clone())?),
        },
    };
    let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned) + "\n";
    if indent.len().saturating_mul(lines(&text).count()) > MAX_INDENTATION {
        return Err(wrong(format!("indent: the indentation is larger than {MAX_INDENTATION} bytes")));
    }
    let mut out = String::new();
    for (i, line) in lines(&text).map(without_end).enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        out.push_str(if if i == 0 { first } else { blank || !line.is_empty() } { &indent } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// `dict(mapping or pairs, **fields)`.
pub(super) fn dict(value: Option<Value>, fields: Kwargs) -> Result<Value> {
    let of_pairs = value.filter(|value| !value.is_undefined()).map(|value| match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let pair = |pair: Value| Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
            Ok(Value::from_pairs(value.try_iter()?.map(pair).collect::<Result<Vec<_>>>()?))
        }
        ValueKind::Map => Ok(value),
        kind => Err(wrong(format!("dict(): {kind} is neither an object nor a list of pairs"))),
    });
    functions::dict(of_pairs.transpose()?, fields)
}

pub(super) fn too_large() -> TemplateError {
    wrong(format!("a count or width is larger than {MAX_COUNT}"))
}

/// Checks the arguments of a filter with a count, positional or by keyword.
pub(super) fn check_count(argument: &Value) -> Result<()> {
    if argument.is_kwargs() {
        return argument.try_iter()?.try_for_each(|key| check_count(&argument.get_item(&key)?));
    }
    match argument.is_integer() && argument.as_usize().is_none_or(|count| count > MAX_COUNT) {
        true => Err(too_large()),
        false => Ok(()),
    }
}
