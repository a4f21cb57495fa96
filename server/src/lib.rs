//! An HTTP server for foretoken with OpenAI's, Anthropic's and llama.cpp's APIs and continuous batching.
//!
//! The binary `foretoken-server` runs a [`Server`]. One thread owns the library's [`Scheduler`](foretoken::Scheduler);
//! requests wait for it in a bounded queue, and it never waits for a client to read.

#![forbid(unsafe_code)]

mod answer;
mod anthropic;
mod api_error;
mod app;
mod auth;
mod body;
mod call_format;
mod compiler;
mod defaults;
mod events;
mod fields;
mod generate_options;
#[cfg(test)]
mod hostile_bodies;
mod hosts;
mod ignored;
mod info;
mod job;
mod llama;
mod logit_bias;
mod messages;
mod metrics;
mod min_tokens;
mod openai;
mod openai_chat;
mod openai_completions;
mod openai_responses;
mod output_penalties;
mod page;
mod processors;
mod prompt;
mod reply;
mod routes;
mod sampling;
mod served;
mod server;
mod socket;
mod speculation;
mod stop;
mod structured;
mod timings;
mod token_json;
mod tools;
mod worker;

pub use defaults::GenerateDefaults;
pub use server::{Server, ServerOptions};
