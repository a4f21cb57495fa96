//! The planner on simulated machines: its bound, and its rules case by case.

mod ablation;
mod bound;
mod figures;
mod rules;
mod simulation;
