//! Keywords of JSON Schema.

/// Maps of schemas.
pub(super) const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Lists of schemas.
pub(super) const LISTS: [&str; 4] = ["prefixItems", "allOf", "anyOf", "oneOf"];
/// Schemas.
pub(super) const ONES: [&str; 5] = ["items", "additionalItems", "additionalProperties", "not", "contains"];

/// Keywords that llguidance does not implement.
pub(crate) const UNIMPLEMENTED: [&str; 16] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Keywords that it implements. Others say nothing about values.
pub(crate) const IMPLEMENTED: [&str; 27] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
];

/// Keywords that llguidance merges with nothing.
pub(super) const ANNOTATIONS: [&str; 16] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
    "x-guidance",
];

/// Whether a key may say something about values or schemas; others have no effect.
pub(super) fn is_keyword(key: &str) -> bool {
    [&IMPLEMENTED[..], &UNIMPLEMENTED, &ANNOTATIONS].iter().any(|keywords| keywords.contains(&key))
}
