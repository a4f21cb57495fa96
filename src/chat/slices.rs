//! Slices with a step, rewritten as calls of a method: minijinja 3.0.5 panics if an empty text is reversed, and takes
//! one element too many if a reversed slice ends at 0.

/// The method that takes start, stop and step of a slice.
pub(super) const METHOD: &str = "__slice__";

/// The source with `x[a:b:c]` as `x.__slice__(a, b, c)`, where parts that are absent are `none`.
pub(super) fn as_calls(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        rest = match tag.as_bytes().get(1) {
            Some(b'#') => copy(tag, tag.find("#}").map(|end| end + 2), &mut out),
            Some(b'%') if is_tag(tag, "raw") => copy(tag, end_of_raw(tag), &mut out),
            Some(b'%') => Expression::default().rewrite(tag, "%}", &mut out),
            Some(b'{') => Expression::default().rewrite(tag, "}}", &mut out),
            _ => copy(tag, Some(1), &mut out),
        };
    }
    out + rest
}

/// Copies `text` up to `end`, or all of it; returns the rest.
fn copy<'t>(text: &'t str, end: Option<usize>, out: &mut String) -> &'t str {
    let (text, rest) = text.split_at(end.unwrap_or(text.len()));
    out.push_str(text);
    rest
}

/// Whether `text` begins with the tag `{% name %}`.
fn is_tag(text: &str, name: &str) -> bool {
    let inside = text.strip_prefix("{%").and_then(|text| text.split_once("%}"));
    inside.is_some_and(|(inside, _)| inside.trim_matches(['-', '+']).trim() == name)
}

/// The beginning of the tag that ends the raw block at the start of `text`.
fn end_of_raw(text: &str) -> Option<usize> {
    text.match_indices("{%").map(|(at, _)| at).find(|at| is_tag(&text[*at..], "endraw"))
}

/// The open brackets of an expression.
#[derive(Default)]
struct Expression {
    open: Vec<Bracket>,
}

/// An open bracket, by positions in the output.
struct Bracket {
    is_square: bool,
    at: usize,
    colons: Vec<usize>,
}

impl Expression {
    /// Copies a tag that ends with `end`, with slices rewritten; returns the rest.
    fn rewrite<'t>(mut self, tag: &'t str, end: &str, out: &mut String) -> &'t str {
        let mut rest = copy(tag, Some(2), out);
        while let Some(c) = rest.chars().next() {
            if self.open.is_empty() && rest.starts_with(end) {
                return copy(rest, Some(2), out);
            }
            match c {
                '\'' | '"' => {
                    rest = copy(rest, end_of_string(rest, c), out);
                    continue;
                }
                '[' | '(' | '{' => self.open.push(Bracket { is_square: c == '[', at: out.len(), colons: Vec::new() }),
                ':' => {
                    if let Some(bracket) = self.open.last_mut() {
                        bracket.colons.push(out.len());
                    }
                }
                _ => {}
            }
            rest = copy(rest, Some(c.len_utf8()), out);
            if matches!(c, ']' | ')' | '}') {
                self.close(out);
            }
        }
        rest
    }

    /// Rewrites what the last bracket encloses if it is a slice with a step.
    fn close(&mut self, out: &mut String) {
        let Some(Bracket { is_square: true, at, colons }) = self.open.pop() else { return };
        let [first, second] = colons[..] else { return };
        let part = |part: &str| if part.trim().is_empty() { "none".to_owned() } else { part.to_owned() };
        let parts = [&out[at + 1..first], &out[first + 1..second], &out[second + 1..out.len() - 1]].map(part);
        out.truncate(at);
        out.push_str(&format!(".{METHOD}({})", parts.join(",")));
    }
}

/// The end of the string literal at the start of `text`, if it has one.
fn end_of_string(text: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let ends = *c == quote && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        ends
    });
    end.map(|(at, _)| at + 1)
}

/// The indices of Python's `[start:stop:step]` in a sequence of `len` elements; `step` is not 0.
pub(super) fn indices(len: usize, [start, stop]: [Option<i64>; 2], step: i64) -> impl Iterator<Item = usize> {
    let len = len as i64;
    let (lowest, highest) = if step < 0 { (-1, len - 1) } else { (0, len) };
    let place = |at: i64| if at < 0 { at.saturating_add(len).max(lowest) } else { at.min(highest) };
    let (first, last) = if step < 0 { (highest, lowest) } else { (lowest, highest) };
    let (start, stop) = (start.map_or(first, place), stop.map_or(last, place));
    let is_inside = move |at: &i64| if step < 0 { *at > stop } else { *at < stop };
    let next = move |at: &i64| at.checked_add(step).filter(is_inside);
    std::iter::successors(Some(start).filter(is_inside), next).filter_map(|at| usize::try_from(at).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_with_a_step_are_calls() {
        for (source, want) in [
            ("{{ x[::-1] }}", "{{ x.__slice__(none,none,-1) }}"),
            ("{% set a = m[1:][ 2 :n[0]: -1 ].b %}", "{% set a = m[1:].__slice__( 2 ,n[0], -1 ).b %}"),
            ("{{ x[y[::2]:z[1:2]:3] }}", "{{ x.__slice__(y.__slice__(none,none,2),z[1:2],3) }}"),
            ("{{ {'a': {'b': [1, 2]}}['a'][::1] }}", "{{ {'a': {'b': [1, 2]}}['a'].__slice__(none,none,1) }}"),
        ] {
            assert_eq!(as_calls(source), want);
        }
        for unchanged in [
            "a[::-1] { b[::1] }",
            "{# x[::-1] #}{{ '[::-1]' }}{{ \"\\\"[::-1]\" }}{{ x[1:-1] }}",
            "{%- raw -%}{{ x[::-1] }}{% x[::-1] %}{% endraw %}",
            "{{ x[::-1",
            "{{ 'x[::-1]",
            "{%",
            "{",
            "}}{{ é[a",
        ] {
            assert_eq!(as_calls(unchanged), unchanged);
        }
        assert_eq!(
            as_calls("{% raw %}{% endraw %}{{ x[::2] }}"),
            "{% raw %}{% endraw %}{{ x.__slice__(none,none,2) }}"
        );
    }
}
