//! Keywords of JSON Schema whose values have schemas.

/// Maps of schemas.
pub(super) const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Lists of schemas.
pub(super) const LISTS: [&str; 4] = ["prefixItems", "allOf", "anyOf", "oneOf"];
/// Schemas.
pub(super) const ONES: [&str; 5] = ["items", "additionalItems", "additionalProperties", "not", "contains"];
