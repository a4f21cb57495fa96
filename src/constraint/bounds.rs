//! Bounds of numbers as llguidance can enforce them: it reads them as 64-bit floats, whose integer
//! parts must be 64-bit integers.

use serde_json::{Map, Value, json};

/// The largest float below 2^63.
const LARGEST: f64 = 9_223_372_036_854_774_784.0;

/// 2^53, from which on not every integer is a float, and every float is an integer.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Distance from an excluded integer. llguidance accepts the integer if the other bound has the same integer part.
const STEP: f64 = 1e-9;

/// One end of a range.
#[derive(Clone, Copy)]
struct End {
    inclusive: &'static str,
    exclusive: &'static str,
    /// 1 if numbers are above it, -1 if they are below.
    sign: f64,
}

const ENDS: [End; 2] = [
    End { inclusive: "minimum", exclusive: "exclusiveMinimum", sign: 1.0 },
    End { inclusive: "maximum", exclusive: "exclusiveMaximum", sign: -1.0 },
];

/// Moves a schema's bounds inward to ones that llguidance enforces. Bounds that it cannot read stay.
pub(super) fn tighten(fields: &mut Map<String, Value>) {
    for (end, other) in [(ENDS[0], ENDS[1]), (ENDS[1], ENDS[0])] {
        end.read_flag(fields);
        if let Some(bound) = fields.get(end.inclusive) {
            let moved = end.clamp(end.at_least(bound));
            if let Some(moved) = moved.filter(|moved| !is_same(bound, *moved)) {
                fields.insert(end.inclusive.into(), number(moved));
            }
        }
        let Some(bound) = fields.get(end.exclusive) else { continue };
        let Some(float) = bound.as_f64() else { continue };
        if float.abs() >= EXACT {
            // llguidance adds 1 to it, which may round to the same float.
            let next = end.clamp(end.more_than(bound));
            let own = fields.get(end.inclusive).and_then(Value::as_f64);
            let stricter = next.map(|next| own.map_or(next, |own| end.inner(own, next)));
            fields.retain(|key, _| key != end.exclusive);
            fields.extend(stricter.map(|bound| (end.inclusive.to_owned(), number(bound))));
        } else if float.fract() == 0.0 && fields.get("type").is_none_or(|kind| kind != "integer") {
            let gap = [other.inclusive, other.exclusive]
                .into_iter()
                .filter_map(|key| Some((fields.get(key)?.as_f64()? - float) * end.sign))
                .fold(f64::INFINITY, f64::min);
            if gap > 0.0 {
                let moved = float + end.sign * STEP.min(gap / 2.0);
                let moved = if moved == float { end.next(float) } else { moved };
                fields.insert(end.exclusive.into(), number(moved));
            }
        }
    }
}

impl End {
    /// Replaces the flag that draft 4 has in the exclusive bound's place.
    fn read_flag(self, fields: &mut Map<String, Value>) {
        let Some(Value::Bool(excludes)) = fields.get(self.exclusive) else { return };
        match fields.get(self.inclusive).filter(|_| *excludes).cloned() {
            Some(bound) => drop(fields.insert(self.exclusive.into(), bound)),
            None => fields.retain(|key, _| key != self.exclusive),
        }
    }

    /// The next float on the inner side.
    fn next(self, float: f64) -> f64 {
        if self.sign > 0.0 { float.next_up() } else { float.next_down() }
    }

    /// The inner one of two bounds.
    fn inner(self, a: f64, b: f64) -> f64 {
        if self.sign > 0.0 { a.max(b) } else { a.min(b) }
    }

    /// How far a bound's float is on its inner side: below 0 if it was rounded outward.
    fn rounding(self, bound: &Value, float: f64) -> f64 {
        let exact = bound.as_i64().map(i128::from).or(bound.as_u64().map(i128::from));
        exact.map_or(0.0, |exact| (float as i128 - exact) as f64 * self.sign)
    }

    /// The outermost float that an inclusive bound allows.
    fn at_least(self, bound: &Value) -> Option<f64> {
        let float = bound.as_f64()?;
        Some(if self.rounding(bound, float) < 0.0 { self.next(float) } else { float })
    }

    /// The outermost float that an exclusive bound allows.
    fn more_than(self, bound: &Value) -> Option<f64> {
        let float = bound.as_f64()?;
        Some(if self.rounding(bound, float) > 0.0 { float } else { self.next(float) })
    }

    /// A bound within 64-bit integers, if it is not beyond them on the inner side.
    fn clamp(self, bound: Option<f64>) -> Option<f64> {
        bound.map(|bound| self.inner(bound, -LARGEST * self.sign))
    }
}

fn is_same(bound: &Value, moved: f64) -> bool {
    let whole = moved.fract() == 0.0 && bound.as_i64().is_some_and(|bound| i128::from(bound) == moved as i128);
    whole || (bound.is_f64() && bound.as_f64() == Some(moved))
}

/// An integer where it is one: errors show it.
fn number(float: f64) -> Value {
    if float.fract() == 0.0 && float.abs() <= LARGEST { json!(float as i64) } else { json!(float) }
}
