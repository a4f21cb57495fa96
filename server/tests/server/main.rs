//! The server in this process, on a free port, with the demo pair.

mod bad_requests;
mod choices;
mod clients;
mod life;
mod qwen;
mod routes;
mod structured;
mod support;
mod texts;
mod tools;
