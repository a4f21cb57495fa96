//! API keys.

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use subtle::ConstantTimeEq;

/// The keys of which a request must have one; without any, every request is let in.
#[derive(Clone, Default)]
pub(crate) struct ApiKeys(Vec<String>);

impl ApiKeys {
    pub fn new(keys: Vec<String>) -> Self {
        Self(keys)
    }

    /// Whether the headers have a key: `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`. Compared with all keys in
    /// a time that depends on lengths alone.
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
        let bearer = header(AUTHORIZATION.as_str()).and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
        });
        let given = [bearer, header("x-api-key")];
        let mut found = subtle::Choice::from(0);
        for given in given.into_iter().flatten() {
            for key in &self.0 {
                found |= key.as_bytes().ct_eq(given);
            }
        }
        found.into()
    }
}
