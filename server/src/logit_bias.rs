//! OpenAI's and llama.cpp's `logit_bias`.

use serde_json::Value;

use crate::api_error::Result;
use crate::fields::Fields;

/// Maximum number of tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Maximum size of a bias: no sum of biases and penalties is infinite.
const MAX_BIAS: f32 = 1e30;

/// Takes `logit_bias`: OpenAI's object of biases by token id, or llama.cpp's array of pairs, in
/// which `false` excludes a token.
pub(crate) fn logit_bias(fields: &mut Fields, vocab: usize) -> Result<Vec<(u32, f32)>> {
    let pairs: Vec<(Value, Value)> = match fields.value("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(biases)) => {
            let id = |id: &String| id.parse::<u32>().map_or(Value::Null, Value::from);
            biases.iter().map(|(token, bias)| (id(token), bias.clone())).collect()
        }
        Some(Value::Array(list)) => {
            let pair = |pair: &Value| (pair[0].clone(), if pair[2].is_null() { pair[1].clone() } else { Value::Null });
            list.iter().map(pair).collect()
        }
        Some(other) => return Err(fields.mismatch("logit_bias", &other, "an object or an array")),
    };
    fields.check_count("logit_bias", pairs.len(), "tokens", MAX_BIASES)?;
    let bias = |(id, bias): &(Value, Value)| {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
        let bias = match bias {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            Value::String(bias) => bias.parse::<f32>().ok().filter(|bias| bias.abs() <= MAX_BIAS),
            bias => bias.as_f64().map(|bias| bias as f32).filter(|bias| bias.abs() <= MAX_BIAS),
        };
        id.zip(bias).ok_or_else(|| {
            let range = format!("numbers between -{MAX_BIAS:e} and {MAX_BIAS:e}");
            fields.error("logit_bias", format!("must map token ids below {vocab} to {range}"))
        })
    };
    pairs.iter().map(bias).collect()
}
