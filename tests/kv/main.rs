//! The KV cache: rounds, formats, V alone where K = V, and saved sessions.

#[path = "../cases/mod.rs"]
mod cases;
mod k_eq_v;
mod kv_formats;
mod kv_round;
mod session_file;
