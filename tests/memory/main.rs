//! Bounds of memory, which an allocator counts.

mod attention_memory;
#[path = "../counting/mod.rs"]
mod counting;
#[path = "../gguf_writer/mod.rs"]
mod gguf_writer;
mod large_vocabulary;
