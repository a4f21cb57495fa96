//! API keys.

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use subtle::{Choice, ConstantTimeEq};

/// The accepted keys; without any, no key is needed.
#[derive(Clone, Default)]
pub(crate) struct ApiKeys(Vec<Padded>);

/// What precedes the key in `Authorization`, in any case.
const BEARER: &[u8] = b"bearer ";
/// Maximum bytes of a key.
const MAX_KEY: usize = 512;

/// A key padded with zeros, and its length: comparing two takes the same time whatever their lengths.
#[derive(Clone)]
struct Padded([u8; MAX_KEY], u64);

impl Padded {
    /// `None` if the key is too long.
    fn new(key: &[u8]) -> Option<Self> {
        let mut padded = [0; MAX_KEY];
        padded.get_mut(..key.len())?.copy_from_slice(key);
        Some(Self(padded, key.len() as u64))
    }
}

impl ApiKeys {
    /// # Errors
    /// If a key is empty or too long.
    pub fn new(keys: Vec<String>) -> anyhow::Result<Self> {
        let padded = |key: &String| Padded::new(key.as_bytes()).filter(|_| !key.is_empty());
        let keys: Option<_> = keys.iter().map(padded).collect();
        keys.map(Self).ok_or_else(|| anyhow::anyhow!("an API key is empty, or longer than {MAX_KEY} bytes"))
    }

    /// Whether the headers have an accepted key: `Authorization: Bearer KEY`, or Anthropic's
    /// `x-api-key: KEY`. The comparison takes constant time.
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
        let bearer = header(AUTHORIZATION.as_str()).and_then(|value| {
            let (scheme, key) = value.split_at_checked(BEARER.len())?;
            scheme.eq_ignore_ascii_case(BEARER).then_some(key)
        });
        let mut found = Choice::from(0);
        for given in [bearer, header("x-api-key")].into_iter().flatten().filter_map(Padded::new) {
            for key in &self.0 {
                found |= key.0.ct_eq(&given.0) & key.1.ct_eq(&given.1);
            }
        }
        found.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_at_most_the_maximum_of_bytes() {
        let longest = "k".repeat(MAX_KEY);
        let longer = format!("{longest}k");
        let keys = ApiKeys::new(vec![longest.clone()]).expect("the longest key");
        let admits = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().expect("a header"));
            keys.admit(&headers)
        };
        assert_eq!([&*longest, &longest[1..], &*longer].map(admits), [true, false, false]);
        assert!(ApiKeys::new(vec![longer]).is_err() && ApiKeys::new(vec![String::new()]).is_err());
    }
}
