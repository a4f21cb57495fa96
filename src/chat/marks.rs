//! Marks control token names in message texts before rendering, so that they are not tokenized as
//! control tokens afterwards.

use std::collections::HashSet;

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::tokenizer::control_names::ControlNames;
use crate::{Error, Result};

/// The marks: private-use characters.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{10FFFD}';

/// The values with every control token name marked, and the mark; `None` if they contain no such name.
///
/// # Errors
/// If the text already contains all marks.
pub(super) fn mark(values: &[Value], names: &ControlNames) -> Result<Option<(Vec<Value>, char)>> {
    let free = unused(values)?;
    let mark = free.unwrap_or(*MARKS.start());
    let marked: Vec<Value> = values.iter().map(|value| marked(value, names, mark)).collect();
    match free {
        _ if marked == values => Ok(None),
        Some(mark) => Ok(Some((marked, mark))),
        None => Err(none_left()),
    }
}

/// A mark that the values do not contain; `None` if they contain all.
pub(super) fn unused(values: &[Value]) -> Result<Option<char>> {
    let text = serde_json::to_string(values).map_err(|e| Error::Template(e.to_string()))?;
    let used: HashSet<char> = text.chars().filter(|c| MARKS.contains(c)).collect();
    Ok(MARKS.into_iter().find(|mark| !used.contains(mark)))
}

pub(super) fn none_left() -> Error {
    Error::Template("the messages contain every private-use character; remove some".into())
}

fn marked(value: &Value, names: &ControlNames, mark: char) -> Value {
    match value.kind() {
        ValueKind::String => value.as_str().and_then(|text| names.mark(text, mark)).map_or(value.clone(), Value::from),
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let item = |key: &Value| marked(&value.get_item(key).unwrap_or_default(), names, mark);
            Value::from_pairs(keys.map(|key| (marked(&key, names, mark), item(&key))).collect::<Vec<_>>())
        }
        ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| marked(&item, names, mark)).collect(),
        _ => value.clone(),
    }
}
