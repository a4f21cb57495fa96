//! A bound on divisors: `multipleOf` N compiles to an automaton with a state for every remainder.

use serde_json::{Map, Value};

use super::ConstraintLimits;
use super::keywords::ANNOTATIONS;
use super::schema::{SchemaProblem, first};

/// A divisor's digits as an integer, without the decimal point, and how many of them are decimals: 25 and 2 of 0.25.
struct Divisor {
    digits: u64,
    decimals: u32,
}

/// llguidance adds a digit times ten to the number of decimals to remainders, in 32 bits.
const MAX_DECIMALS: u32 = 8;

const MERGED: &str = "allOf; $ref, anyOf or oneOf beside other keywords; properties beside patternProperties";

/// Checks the divisors of a document, and if it merges schemas their least common multiple.
///
/// # Errors
/// The problem of a divisor, or of the document.
pub(super) fn check(schema: &Value, limits: &ConstraintLimits) -> Result<(), SchemaProblem> {
    let most = limits.divisor;
    let too_large = |fields: &Map<String, Value>| {
        let number = fields.get("multipleOf")?;
        let Divisor { digits, decimals } = divisor(number)?;
        if digits > most {
            return Some(format!("has multipleOf {number}, whose digits may be at most {most}; use a smaller divisor"));
        }
        (decimals > MAX_DECIMALS)
            .then(|| format!("has multipleOf {number}, at most {MAX_DECIMALS} decimals are supported; use fewer"))
    };
    if let Some(found) = first(schema, &too_large) {
        return Err(found);
    }
    if first(schema, &|fields: &Map<String, Value>| merges(fields).then(String::new)).is_none() {
        return Ok(());
    }
    let mut divisors = Vec::new();
    collect(schema, &mut divisors);
    let multiple = divisors.iter().map(|divisor| divisor.digits).fold(1, least_common_multiple);
    // llguidance multiplies two of their multiples in 32 bits, one of them in the decimals of the other.
    let decimals = || divisors.iter().map(|divisor| divisor.decimals);
    let scale = 10u64.pow(decimals().max().unwrap_or(0) - decimals().min().unwrap_or(0));
    let is_too_long = multiple.saturating_mul(multiple).saturating_mul(scale) > u64::from(u32::MAX);
    if multiple > most || is_too_long {
        let problem = format!(
            "has schemas that are merged ({MERGED}), and multipleOf with the least common multiple {multiple}; at most \
             {most} is allowed, whose square, in the finest decimals, has 32 bits; use smaller divisors"
        );
        return Err(SchemaProblem::of_root(problem));
    }
    Ok(())
}

/// Whether llguidance may merge schemas in one with these keywords: [`MERGED`].
fn merges(fields: &Map<String, Value>) -> bool {
    let has = |key: &str| fields.contains_key(key);
    let others = fields.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str())).count() > 1;
    has("allOf")
        || others && ["$ref", "anyOf", "oneOf"].into_iter().any(has)
        || has("properties") && has("patternProperties")
}

/// Adds the divisors in a value.
fn collect(value: &Value, to: &mut Vec<Divisor>) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| collect(value, to)),
        Value::Object(fields) => {
            to.extend(fields.get("multipleOf").and_then(divisor));
            fields.values().for_each(|value| collect(value, to));
        }
        _ => {}
    }
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut gcd, mut rest) = (a, b);
    while rest != 0 {
        (gcd, rest) = (rest, gcd % rest);
    }
    (a / gcd.max(1)).saturating_mul(b)
}

/// `None` if it is not a number.
fn divisor(number: &Value) -> Option<Divisor> {
    let number = number.as_number()?;
    let text = number.to_string();
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, ""));
    if !exponent.is_empty() && number.as_f64()? >= 1.0 {
        return Some(Divisor { digits: number.as_f64()? as u64, decimals: 0 });
    }
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}").trim_start_matches('-').parse().unwrap_or(u64::MAX).max(1);
    let decimals = fraction.len() as u32 + exponent.trim_start_matches('-').parse::<u32>().unwrap_or(0);
    Some(Divisor { digits, decimals })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn large_divisors_are_refused() {
        let limits = ConstraintLimits::default();
        for schema in [
            json!({"multipleOf": 10_000}),
            json!({"items": {"multipleOf": 0.01}, "multipleOf": 7}),
            json!({"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 1009}, "multipleOf": {"type": "string"}}}),
            json!({"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}),
            json!({"allOf": [{"multipleOf": 0.01}, {"multipleOf": 1000}]}),
            json!({"allOf": [{"multipleOf": 0.2525}]}),
            json!({"properties": {"a": {"multipleOf": 997}, "b": {"anyOf": [{"multipleOf": 1009}], "title": "B"}}}),
        ] {
            assert_eq!(check(&schema, &limits), Ok(()), "{schema}");
        }
        for (schema, place) in [
            (json!({"items": {"multipleOf": 10_001}}), "#/items"),
            (json!({"multipleOf": 1e300}), "#"),
            (json!({"multipleOf": 1.00001}), "#"),
            (json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}), "#"),
            (json!({"allOf": [{"multipleOf": 1e-6}, {"multipleOf": 9999}]}), "#"),
            (json!({"items": {"multipleOf": 3e-9}}), "#/items"),
            (json!({"multipleOf": 997, "anyOf": [{"multipleOf": 1009}]}), "#"),
            (json!({"properties": {"a": {"multipleOf": 997}}, "patternProperties": {"^a": {"multipleOf": 1009}}}), "#"),
            (json!({"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "multipleOf": 1009}), "#"),
        ] {
            let SchemaProblem { place: at, problem } = check(&schema, &limits).expect_err("a refusal");
            let of_merged = schema.get("items").is_none() && schema.as_object().is_some_and(merges);
            assert!(at == place && problem.contains(MERGED) == of_merged, "{schema}: {at} {problem}");
        }
    }
}
