//! References (`$ref`) within a JSON schema's document: lookup, and replacement of escaped ones.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::keywords::MAPS;

/// The keys from the document's root to a reference's target; `None` if that is in another document.
fn keys(reference: &str) -> Option<impl Iterator<Item = &str>> {
    let path = reference.strip_prefix('#').map(|path| if path == "/" { "" } else { path })?;
    (path.is_empty() || path.starts_with('/')).then(|| path.split('/').skip(1))
}

/// A reference's target, as llguidance finds it: without escapes, and only in the same document.
pub(crate) fn lookup<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    keys(reference)?.try_fold(root, |part, key| match part {
        Value::Array(list) => list.get(key.parse::<usize>().ok()?),
        part => part.get(key),
    })
}

/// As [`lookup`], but every place has one spelling: an index has no leading zeros or sign.
pub(super) fn lookup_mut<'a>(root: &'a mut Value, reference: &str) -> Option<&'a mut Value> {
    keys(reference)?.try_fold(root, |part, key| match part {
        Value::Array(list) => list.get_mut(key.parse::<usize>().ok().filter(|index| index.to_string() == key)?),
        part => part.get_mut(key),
    })
}

/// Keys of a reference that may lead to something: JSON is read to 127 levels, which rewriting at most triples.
const MAX_KEYS: usize = 512;

/// Whether a reference has so many keys that no document has them all. Looking for each of its beginnings would take
/// time quadratic in its length.
pub(super) fn is_too_deep(reference: &str) -> bool {
    reference.matches('/').count() > MAX_KEYS
}

/// Rewrites references without escapes. Schemas in whose path a key has a `/`, `~` or `%` are copied to `$defs`.
#[derive(Default)]
pub(super) struct Unescaped {
    /// The copies, by the JSON pointers of the original schemas.
    copies: HashMap<String, String>,
    places: HashSet<String>,
    /// Bytes of the copies.
    copied: usize,
}

/// Limit in bytes of copies: the originals may overlap.
const COPIED: usize = 1 << 20;

impl Unescaped {
    /// `reference` without escapes; `None` if it has none, or refers to nothing, or the copies exceed their limit.
    pub fn of(&mut self, root: &mut Value, reference: &str) -> Option<String> {
        let pointer = reference.strip_prefix('#').filter(|path| path.contains(['%', '~']))?;
        let pointer = percent_decoded(pointer).filter(|pointer| !is_too_deep(pointer))?;
        if let Some(copy) = self.copies.get(&pointer) {
            return Some(copy.clone());
        }
        let is_in_copy = |(at, _): (usize, &str)| self.is_copy(&format!("#{}", &pointer[..at]));
        if self.is_copy(&format!("#{pointer}")) || pointer.match_indices('/').any(is_in_copy) {
            return None;
        }
        let target = root.pointer(&pointer)?;
        let keys: Vec<_> = pointer.split('/').map(|key| key.replace("~1", "/").replace("~0", "~")).collect();
        if keys.iter().all(|key| !key.contains(['/', '~', '%'])) {
            return Some(format!("#{}", keys.join("/")));
        }
        // Once the limit is exceeded, no target is measured any more: all references may have one large target.
        if self.copied <= COPIED {
            self.copied += target.to_string().len();
        }
        if self.copied > COPIED {
            return None;
        }
        let target = target.clone();
        let definitions = root.as_object_mut()?.entry("$defs").or_insert_with(|| json!({})).as_object_mut()?;
        let mut name = keys.last()?.replace(['/', '~', '%'], "_");
        while definitions.contains_key(&name) {
            name.push('_');
        }
        let copy = format!("#/$defs/{name}");
        definitions.insert(name, target);
        self.places.insert(copy.clone());
        self.copies.insert(pointer, copy.clone());
        Some(copy)
    }

    /// Whether the schema at `place` is such a copy.
    pub fn is_copy(&self, place: &str) -> bool {
        self.places.contains(place)
    }
}

/// A URI's fragment; `None` if it is not UTF-8.
fn percent_decoded(fragment: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), fragment.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|digits| *first == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let decoded = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(decoded.unwrap_or(*first));
        rest = if decoded.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).ok()
}

/// Calls `work` on every reference in `schema`; parts that no keyword has as a schema count, values
/// of `const` and `enum` do not.
pub(crate) fn each(schema: &mut Value, work: &mut impl FnMut(&mut String)) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(|schema| each(schema, work)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), value) {
                    ("$ref", Value::String(reference)) => work(reference),
                    ("const" | "enum", _) => {}
                    (key, Value::Object(schemas)) if MAPS.contains(&key) => {
                        schemas.values_mut().for_each(|schema| each(schema, work));
                    }
                    (_, schema) => each(schema, work),
                }
            }
        }
        _ => {}
    }
}

/// Redirects every reference by a pointer in the document to its new place, the key `inside`.
pub(crate) fn move_inside(schema: &mut Value, inside: &str) {
    each(schema, &mut |reference| {
        if let Some(path) = reference.strip_prefix('#').filter(|path| path.is_empty() || path.starts_with('/')) {
            *reference = format!("#/{inside}{}", path.trim_end_matches('/'));
        }
    });
}
