//! Directories and the Hub's token, from environment variables.

use std::path::PathBuf;

/// The directory that Hugging Face's own tools use.
pub fn hub_cache() -> Option<PathBuf> {
    path_variable("HF_HUB_CACHE").or_else(|| Some(hub_home()?.join("hub")))
}

/// The Hub's token: the variable's, or that of `hf auth login`, wherever the cache is.
pub fn hub_token() -> Option<String> {
    let variable = std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty());
    let file =
        || std::fs::read_to_string(path_variable("HF_TOKEN_PATH").or_else(|| Some(hub_home()?.join("token")))?).ok();
    let token = variable.or_else(file)?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// The commands' directory in the user's cache.
pub fn own_cache() -> Option<PathBuf> {
    let directory = path_variable("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
    Some(directory.join("foretoken"))
}

/// The directory of the Hub's files.
fn hub_home() -> Option<PathBuf> {
    path_variable("HF_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface")))
}

/// The path in an environment variable.
fn path_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from)
}
