//! Detects unknown names similar to a requested one: a damaged or misspelled field would silently have its default.

use std::collections::BTreeSet;

/// Shorter names may legitimately differ in one letter (`top_h`).
const SHORTEST: usize = 8;
/// Maximum changed bytes in one place: a damaged byte, or one that has become an escape.
const CHANGED: usize = 2;
/// Token ids and flags legitimately differ in one letter (`eos`, `eoi`, `bos`).
const OF_TOKENS: [&str; 2] = ["_token_id", "_token"];

/// The first of `names` that was not requested, and the absent name that it resembles.
pub(super) fn misspelt<'a>(looked_for: &'a BTreeSet<String>, names: &BTreeSet<&'a str>) -> Option<(&'a str, &'a str)> {
    let absent = || looked_for.iter().map(String::as_str).filter(|name| !names.contains(name));
    let unknown = names.iter().filter(|name| !looked_for.contains(**name));
    unknown.copied().find_map(|name| Some((name, absent().find(|absent| reads_like(name, absent))?)))
}

fn reads_like(name: &str, absent: &str) -> bool {
    if absent.len() < SHORTEST || OF_TOKENS.iter().any(|suffix| absent.ends_with(suffix)) {
        return false;
    }
    let (name, absent) = (name.as_bytes(), absent.as_bytes());
    let same = |(a, b): &(&u8, &u8)| a == b;
    let front = name.iter().zip(absent).take_while(same).count();
    let back = name[front..].iter().rev().zip(absent[front..].iter().rev()).take_while(same).count();
    name.len().max(absent.len()) <= front + back + CHANGED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_place_is_a_misspelling() {
        let looked_for: BTreeSet<String> =
            ["hidden_size", "eos_token_id", "top_k", "head_dim"].map(String::from).into();
        let found = |name: &'static str| misspelt(&looked_for, &[name, "head_dim"].into()).map(|(_, name)| name);
        for name in ["hidden_sizf", "Hidden_size", "hidd\n_size", "hidden_siz", "hidden__size"] {
            assert_eq!(found(name), Some("hidden_size"), "{name}");
        }
        // An id of another token, a short name, a present name, other words.
        for name in ["eoi_token_id", "top_p", "head_dims", "hidden_act", "hidden_size"] {
            assert_eq!(found(name), None, "{name}");
        }
    }
}
