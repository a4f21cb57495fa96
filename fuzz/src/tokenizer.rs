//! Any bytes at all as tokenizer.json: text goes in and out, whole and in a stream, or reading says why not.

use super::{checked, file};
use foretoken::tokenizer::{StreamDecoder, Tokenizer};

const TARGET: &str = "tokenizer";

const TEXTS: [&str; 3] = ["a text, <bos> and more\n", " ▁größe 你好 \u{1F980}\0", "fn main() {}"];

/// Reads `data`.
pub fn read(data: &[u8]) {
    let Some(tokenizer) = checked(Tokenizer::read(file(TARGET, "tokenizer.json", data), 1 << 16)) else { return };
    for text in TEXTS {
        let Some(ids) = checked(tokenizer.encode(text)) else { continue };
        checked(tokenizer.decode(&ids));
        let mut stream = StreamDecoder::default();
        ids.iter().for_each(|id| drop(checked(stream.push(&tokenizer, *id))));
        checked(stream.finish(&tokenizer));
    }
    // Ids that no text gives, too.
    checked(tokenizer.decode(&[0, 1, 2, 3, 4, 1 << 15, u32::MAX]));
}
