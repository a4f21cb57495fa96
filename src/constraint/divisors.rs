//! A bound on divisors: `multipleOf` N compiles to an automaton with a state for every remainder.

use serde_json::{Map, Value};

use super::ConstraintLimits;
use super::schema::first;

/// Checks the divisors of a document, and of schemas that hold beside each other their least common multiple.
///
/// # Errors
/// The path of a divisor, or of the document, and the problem.
pub(super) fn check(schema: &Value, limits: &ConstraintLimits) -> Result<(), (String, String)> {
    let most = limits.divisor;
    let too_large = |fields: &Map<String, Value>| {
        let number = fields.get("multipleOf").filter(|number| divisor(number).is_some_and(|divisor| divisor > most))?;
        Some(format!("has multipleOf {number}, whose digits may be at most {most}; use a smaller divisor"))
    };
    if let Some(found) = first(schema, &too_large) {
        return Err(found);
    }
    let merges = |fields: &Map<String, Value>| {
        let holds_beside = fields.contains_key("allOf") || fields.contains_key("$ref") && fields.len() > 1;
        holds_beside.then(String::new)
    };
    if first(schema, &merges).is_some() {
        let multiple = common_multiple(schema);
        if multiple > most {
            let problem = format!(
                "has allOf or $ref beside other keywords, and multipleOf with the least common multiple {multiple}, at most {most} \
                 is allowed; use smaller divisors"
            );
            return Err(("#".into(), problem));
        }
    }
    Ok(())
}

/// The least common multiple of all divisors.
fn common_multiple(value: &Value) -> u64 {
    let of_all = |values: &mut dyn Iterator<Item = &Value>| values.map(common_multiple).fold(1, least_common_multiple);
    match value {
        Value::Array(list) => of_all(&mut list.iter()),
        Value::Object(fields) => {
            let own = fields.get("multipleOf").and_then(divisor).unwrap_or(1);
            least_common_multiple(own, of_all(&mut fields.values()))
        }
        _ => 1,
    }
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut gcd, mut rest) = (a, b);
    while rest != 0 {
        (gcd, rest) = (rest, gcd % rest);
    }
    (a / gcd.max(1)).saturating_mul(b)
}

/// The digits of a positive number as an integer, without a decimal point: 25 of 0.25.
fn divisor(number: &Value) -> Option<u64> {
    let number = number.as_number()?;
    let text = number.to_string();
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, ""));
    if !exponent.is_empty() && number.as_f64()? >= 1.0 {
        return Some(number.as_f64()? as u64);
    }
    let digits = match digits.split_once('.') {
        Some((whole, fraction)) => format!("{whole}{}", fraction.trim_end_matches('0')),
        None => digits.to_owned(),
    };
    Some(digits.trim_start_matches('-').parse().unwrap_or(u64::MAX).max(1))
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
        ] {
            assert_eq!(check(&schema, &limits), Ok(()), "{schema}");
        }
        for (schema, place) in [
            (json!({"items": {"multipleOf": 10_001}}), "#/items"),
            (json!({"multipleOf": 1e300}), "#"),
            (json!({"multipleOf": 1.00001}), "#"),
            (json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}), "#"),
            (json!({"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "multipleOf": 1009}), "#"),
        ] {
            assert_eq!(check(&schema, &limits).map_err(|(place, _)| place), Err(place.to_owned()), "{schema}");
        }
    }
}
