//! Control token names in text: finds them, and marks those that are to be tokenized as plain text.

use std::collections::HashMap;

/// The control tokens of a vocabulary, by name.
pub(crate) struct ControlNames {
    ids: HashMap<String, u32>,
    /// The names' bytes, descending, without duplicates.
    lengths: Vec<usize>,
    /// The names' first characters, without duplicates.
    firsts: Vec<char>,
}

impl ControlNames {
    pub fn new(tokens: impl IntoIterator<Item = (String, u32)>) -> Self {
        let ids: HashMap<String, u32> = tokens.into_iter().filter(|(name, _)| !name.is_empty()).collect();
        let mut lengths: Vec<usize> = ids.keys().map(String::len).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        let mut firsts: Vec<char> = ids.keys().filter_map(|name| name.chars().next()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        Self { ids, lengths, firsts }
    }

    /// The longest name that is a prefix of `text`.
    fn at_start(&self, text: &str) -> Option<(usize, u32)> {
        let of_length = |length: &usize| text.get(..*length).and_then(|name| Some((*length, *self.ids.get(name)?)));
        self.lengths.iter().find_map(of_length)
    }

    /// Positions where a name could begin.
    fn candidates<'t>(&self, text: &'t str) -> impl Iterator<Item = (usize, &'t str)> {
        text.char_indices().filter(|(_, c)| self.firsts.contains(c)).map(|(at, _)| (at, &text[at..]))
    }

    /// `text` with `mark` after the first character of every name in it; `None` if there are none. A prefix of a name
    /// at the end of the text counts, because a template may append another text.
    pub fn mark(&self, text: &str, mark: char) -> Option<String> {
        // Python's white space includes control characters that Unicode's does not (U+001C to U+001F).
        let end = text.trim_end_matches(|c: char| c.is_whitespace() || c.is_control()).len();
        let longest = self.lengths.first().copied().unwrap_or_default();
        let is_beginning = |at: usize| {
            let rest = text.get(at..end).filter(|rest| rest.len() < longest);
            rest.is_some_and(|rest| self.ids.keys().any(|name| name.starts_with(rest)))
        };
        let spelled = |(at, rest): &(usize, &str)| self.at_start(rest).is_some() || is_beginning(*at);
        let (mut marked, mut copied) = (String::new(), 0);
        for (at, rest) in self.candidates(text).filter(spelled) {
            let after = at + rest.chars().next().map_or(0, char::len_utf8);
            marked.push_str(&text[copied..after]);
            marked.push(mark);
            copied = after;
        }
        (copied > 0).then(|| marked + &text[copied..])
    }

    /// The texts before the names in `text`, each with the id of the name after it; the last has none.
    pub fn split<'t>(&self, text: &'t str) -> Vec<(&'t str, Option<u32>)> {
        let (mut parts, mut begin) = (Vec::new(), 0);
        for (at, rest) in self.candidates(text) {
            if let Some((length, id)) = self.at_start(rest).filter(|_| at >= begin) {
                parts.push((&text[begin..at], Some(id)));
                begin = at + length;
            }
        }
        parts.push((&text[begin..], None));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> ControlNames {
        ControlNames::new([("<|turn>".into(), 5), ("<turn|>".into(), 6), ("<|\"|>".into(), 7), ("<turn".into(), 8)])
    }

    #[test]
    fn names_are_marked_wherever_they_are() {
        let names = names();
        for (text, want) in [
            ("a<turn|>b", Some("a<_turn|>b")),
            ("<|turn<|turn>", Some("<|turn<_|turn>")),
            ("<<turn|>>", Some("<<_turn|>>")),
            // A prefix at the end, also before white space that a template may trim.
            ("x <|tu", Some("x <_|tu")),
            ("x <\n ", Some("x <_\n ")),
            ("x <|tu\u{1c}\u{1f}", Some("x <_|tu\u{1c}\u{1f}")),
            ("<", Some("<_")),
            ("x < y", None),
            ("fn f<T>() -> Vec<T> {}", None),
            ("", None),
        ] {
            assert_eq!(names.mark(text, '_').as_deref(), want, "{text}");
        }
        assert!(ControlNames::new([]).mark("<turn|>", '_').is_none());
    }

    #[test]
    fn marked_names_are_no_names() {
        let names = names();
        assert_eq!(names.split("<|turn>a<turn|>"), [("", Some(5)), ("a", Some(6)), ("", None)]);
        let marked = names.mark("a<turn|><|\"|>", '\u{F0000}').expect("names");
        assert_eq!(names.split(&marked), [(marked.as_str(), None)]);
        // The longest name at a position.
        assert_eq!(names.split("<turn|><turn"), [("", Some(6)), ("", Some(8)), ("", None)]);
    }
}
