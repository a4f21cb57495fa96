//! Gemma 4's tool call syntax: `call:NAME{key:value,..}`, with strings between two `<|"|>` tokens. Keys are bare or
//! strings; other values are JSON's literals, `{..}` and `[..]`.

use super::json::Json;
use super::message::ToolCall;

/// Maximum nesting of arguments.
const MAX_DEPTH: usize = 100;

/// Parses the call in `text`, with `<|"|>` tokens at `quotes`, ascending; `None` if it is malformed. Bare values that
/// are not literals and values in JSON quotes are strings: models write both. A bare `None` is null, as Gemma 4's
/// templates write it in earlier calls.
pub(super) fn parse(text: &str, quotes: &[usize]) -> Option<ToolCall> {
    let mut cursor = Cursor { text, at: 0, quotes };
    cursor.skip_space();
    cursor.take("call:")?;
    let name = cursor.until(&['{'])?.trim().to_owned();
    if !is_name(&name) {
        return None;
    }
    let mut arguments = String::new();
    cursor.object(0, &mut arguments)?;
    cursor.skip_space();
    let all = cursor.at == text.len() && cursor.quotes.is_empty();
    let arguments = Json::parse(&arguments).ok().filter(|_| all)?;
    Some(ToolCall { id: None, name, arguments })
}

/// Whether a tool can be called by this name.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}

struct Cursor<'t> {
    text: &'t str,
    at: usize,
    /// Quotes not consumed yet.
    quotes: &'t [usize],
}

impl<'t> Cursor<'t> {
    /// The text up to the next quote.
    fn rest(&self) -> &'t str {
        &self.text[self.at..self.quotes.first().copied().unwrap_or(self.text.len())]
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn take(&mut self, token: &str) -> Option<()> {
        self.rest().starts_with(token).then(|| self.at += token.len())
    }

    /// Consumes a quote at the cursor.
    fn quote(&mut self) -> Option<()> {
        self.quotes = self.quotes.split_first().filter(|(at, _)| **at == self.at)?.1;
        Some(())
    }

    /// The text before the first of `ends`, which is not consumed.
    fn until(&mut self, ends: &[char]) -> Option<&'t str> {
        let text = &self.rest()[..self.rest().find(ends)?];
        self.at += text.len();
        Some(text)
    }

    /// A string between quotes.
    fn quoted(&mut self) -> Option<&'t str> {
        self.quote()?;
        let (end, rest) = self.quotes.split_first()?;
        let text = &self.text[self.at..*end];
        (self.at, self.quotes) = (*end, rest);
        Some(text)
    }

    /// A JSON string.
    fn json_string(&mut self) -> Option<String> {
        let mut strings = serde_json::Deserializer::from_str(self.rest()).into_iter::<String>();
        let string = strings.next()?.ok()?;
        self.at += strings.byte_offset();
        Some(string)
    }

    fn key(&mut self) -> Option<String> {
        if self.quotes.first() == Some(&self.at) {
            return self.quoted().map(str::to_owned);
        }
        if self.rest().starts_with('"') {
            return self.json_string();
        }
        let key = self.until(&[':', '{', '}', '[', ']', ','])?.trim();
        (!key.is_empty()).then(|| key.to_owned())
    }

    /// Appends the value at the cursor as JSON.
    fn value(&mut self, depth: usize, out: &mut String) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.skip_space();
        if self.quotes.first() == Some(&self.at) {
            let text = self.quoted()?;
            out.push_str(&string(text)?);
            return Some(());
        }
        match self.rest().chars().next()? {
            '{' => self.object(depth, out),
            '[' => self.array(depth, out),
            '"' => {
                let text = self.json_string()?;
                out.push_str(&string(&text)?);
                Some(())
            }
            _ => {
                let bare = match self.until(&[',', '}', ']', '{', '['])?.trim() {
                    "None" => "null",
                    bare => bare,
                };
                let is_literal = !bare.is_empty() && serde_json::from_str::<serde_json::Value>(bare).is_ok();
                match is_literal {
                    true => out.push_str(bare),
                    false if bare.is_empty() => return None,
                    false => out.push_str(&string(bare)?),
                }
                Some(())
            }
        }
    }

    fn object(&mut self, depth: usize, out: &mut String) -> Option<()> {
        self.items(['{', '}'], out, |cursor, out| {
            let key = cursor.key()?;
            out.push_str(&string(&key)?);
            cursor.skip_space();
            cursor.take(":")?;
            out.push(':');
            cursor.value(depth + 1, out)
        })
    }

    fn array(&mut self, depth: usize, out: &mut String) -> Option<()> {
        self.items(['[', ']'], out, |cursor, out| cursor.value(depth + 1, out))
    }

    fn items(
        &mut self,
        [open, close]: [char; 2],
        out: &mut String,
        mut item: impl FnMut(&mut Self, &mut String) -> Option<()>,
    ) -> Option<()> {
        let (mut buffer, mut end) = ([0; 4], [0; 4]);
        let (open, close) = (&*open.encode_utf8(&mut buffer), &*close.encode_utf8(&mut end));
        self.take(open)?;
        out.push_str(open);
        self.skip_space();
        if self.take(close).is_none() {
            loop {
                self.skip_space();
                item(self, out)?;
                self.skip_space();
                if self.take(close).is_some() {
                    break;
                }
                self.take(",")?;
                out.push(',');
            }
        }
        out.push_str(close);
        Some(())
    }
}

fn string(text: &str) -> Option<String> {
    serde_json::to_string(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call with `'` for `<|"|>`.
    fn call(text: &str) -> Option<(String, String)> {
        let (mut plain, mut quotes) = (String::new(), Vec::new());
        for piece in text.split_inclusive('\'') {
            plain += piece.trim_end_matches('\'');
            quotes.extend(piece.ends_with('\'').then_some(plain.len()));
        }
        parse(&plain, &quotes).map(|call| (call.name, call.arguments.to_string()))
    }

    #[test]
    fn calls_are_read() {
        for (text, arguments) in [
            ("call:f{}", "{}"),
            (" call:f{ }\n", "{}"),
            ("call:f{a:1,b:-2.5e3,c:true,d:null}", r#"{"a":1,"b":-2500.0,"c":true,"d":null}"#),
            ("call:f{b:'x',a:''}", r#"{"b":"x","a":""}"#),
            ("call:f{a:'{\"}[],:\\ \n'}", r#"{"a":"{\"}[],:\\ \n"}"#),
            ("call:f{a:{'x y':[1,'two',[]],z:{}}}", r#"{"a":{"x y":[1,"two",[]],"z":{}}}"#),
            ("call:f{ a : 'x' , b : [ 1 , 2 ] }", r#"{"a":"x","b":[1,2]}"#),
            ("call:f{a:None,b:[ None ],c:'None'}", r#"{"a":null,"b":[null],"c":"None"}"#),
            (r#"call:f{"a":"x\"}"}"#, r#"{"a":"x\"}"}"#),
            ("call:f{city:New York,at:12:30,n:1.}", r#"{"city":"New York","at":"12:30","n":"1."}"#),
        ] {
            assert_eq!(call(text), Some(("f".into(), arguments.into())), "{text}");
        }
        assert_eq!(call("call:a.b-c_d{}").map(|(name, _)| name).as_deref(), Some("a.b-c_d"));
        let deepest = format!("{}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
        assert_eq!(call(&format!("call:f{{a:{deepest}}}")), Some(("f".into(), format!("{{\"a\":{deepest}}}"))));
    }

    #[test]
    fn malformed_calls_are_none() {
        for text in [
            "",
            "call:f",
            "f{}",
            "call:{}",
            "call:a b{}",
            "call:f{a}",
            "call:f{a:}",
            "call:f{a:1",
            "call:f{a:'x}",
            "call:f{a:'x'y}",
            "call:f{a:1,}",
            "call:f{,}",
            "call:f{a:1}}",
            "call:f{a:1}'",
            "call:f{a:[1}",
            "call:f{a:x{}}",
            "call:'f'{}",
            &format!("call:f{{a:{}", "[".repeat(100_000)),
            &format!("call:f{{a:{}{}}}", "[".repeat(MAX_DEPTH + 1), "]".repeat(MAX_DEPTH + 1)),
        ] {
            assert_eq!(call(text), None, "{}", &text[..text.len().min(40)]);
        }
    }
}
