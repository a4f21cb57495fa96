//! The server in this process, on a free port, with the demo pair; and its command.

mod bad_requests;
mod choices;
mod clients;
#[cfg(unix)]
mod command;
mod life;
mod qwen;
mod routes;
mod structured;
mod support;
mod texts;
mod tools;
