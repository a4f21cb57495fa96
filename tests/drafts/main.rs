//! Drafts of every kind: prompt lookup, built centroids, drafting ahead, and drafts that fail.

mod built_centroids;
#[path = "../cases/mod.rs"]
mod cases;
#[path = "../changed_model/mod.rs"]
mod changed_model;
#[path = "../demo_pair/mod.rs"]
mod demo_pair;
mod failing_drafts;
#[path = "../given/mod.rs"]
mod given;
mod pipeline;
mod prompt_lookup;
#[path = "../slow_drafter/mod.rs"]
mod slow_drafter;
