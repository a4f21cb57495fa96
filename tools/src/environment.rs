//! Directories, and the Hub's address and token, from environment variables, as huggingface_hub reads them.

use std::path::PathBuf;

/// The directory that Hugging Face's own tools use.
pub fn hub_cache() -> Option<PathBuf> {
    path_variable("HF_HUB_CACHE").or_else(|| Some(hub_home()?.join("hub")))
}

/// The Hub's address, if it is not the public one.
pub fn hub_endpoint() -> Option<String> {
    text_variable("HF_ENDPOINT")
}

/// Whether only the Hub's cache is used.
pub fn hub_offline() -> bool {
    text_variable("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value))
}

/// The Hub's token: the variable's, or that of `hf auth login`, wherever the cache is.
pub fn hub_token() -> Option<String> {
    let file =
        || std::fs::read_to_string(path_variable("HF_TOKEN_PATH").or_else(|| Some(hub_home()?.join("token")))?).ok();
    text_variable("HF_TOKEN").or_else(|| Some(file()?.trim().to_owned()).filter(|token| !token.is_empty()))
}

/// The commands' directory in the user's cache.
pub fn own_cache() -> Option<PathBuf> {
    Some(user_cache()?.join("foretoken"))
}

/// The directory of the Hub's files.
fn hub_home() -> Option<PathBuf> {
    path_variable("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")))
}

/// The user's directory of cached files.
fn user_cache() -> Option<PathBuf> {
    path_variable("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")))
}

/// The path in an environment variable, where `~` is the home directory.
fn path_variable(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from)?;
    match path.strip_prefix("~") {
        Ok(rest) => Some(std::env::home_dir()?.join(rest)),
        Err(_) => Some(path),
    }
}

/// The text in an environment variable, unless it is blank.
fn text_variable(name: &str) -> Option<String> {
    let text = std::env::var(name).ok()?.trim().to_owned();
    Some(text).filter(|text| !text.is_empty())
}

/// Whether the value of a boolean variable means true.
fn is_true(value: &str) -> bool {
    ["1", "true", "yes", "on"].iter().any(|on| value.eq_ignore_ascii_case(on))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_mean_true() {
        assert!(["1", "true", "TRUE", "Yes", "on"].iter().all(|value| is_true(value)));
        assert!(!["", "0", "false", "no", "off", "2", "11"].iter().any(|value| is_true(value)));
    }
}
