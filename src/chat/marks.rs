//! Marks control token names in message texts before rendering, so that they are not tokenized as
//! control tokens afterwards.

use std::collections::HashSet;

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::tokenizer::control_names::ControlNames;
use crate::{Error, Result};

/// The marks: private-use characters.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{10FFFD}';

/// Maximum nesting of values: JSON's limit, plus messages and tools around it.
const MAX_DEPTH: usize = 160;

/// The values with every control token name marked, and the mark; `None` if they contain no such name.
///
/// # Errors
/// If the text already contains all marks, or nests too deeply.
pub(super) fn mark(values: &[Value], names: &ControlNames) -> Result<Option<(Vec<Value>, char)>> {
    let mut found = Found { names, used: HashSet::new(), spelled: false };
    values.iter().try_for_each(|value| found.look(value, 0))?;
    if !found.spelled {
        return Ok(None);
    }
    let free = MARKS.into_iter().find(|mark| !found.used.contains(mark));
    let mark = free.ok_or_else(|| Error::Template("the messages have every private character of Unicode".into()))?;
    Ok(Some((values.iter().map(|value| marked(value, names, mark)).collect(), mark)))
}

struct Found<'n> {
    names: &'n ControlNames,
    /// Marks already present in the text.
    used: HashSet<char>,
    /// Whether it contains a name.
    spelled: bool,
}

impl Found<'_> {
    fn look(&mut self, value: &Value, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Error::Template(format!("the messages nest more than {MAX_DEPTH} levels")));
        }
        match value.kind() {
            ValueKind::String => {
                let text = value.as_str().unwrap_or_default();
                self.used.extend(text.chars().filter(|c| MARKS.contains(c)));
                self.spelled |= self.names.mark(text, *MARKS.start()).is_some();
            }
            ValueKind::Map => {
                for key in value.try_iter().into_iter().flatten() {
                    self.look(&key, depth + 1)?;
                    value.get_item(&key).map_or(Ok(()), |item| self.look(&item, depth + 1))?;
                }
            }
            ValueKind::Seq => {
                value.try_iter().into_iter().flatten().try_for_each(|item| self.look(&item, depth + 1))?;
            }
            _ => {}
        }
        Ok(())
    }
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
