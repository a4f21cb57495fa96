//! The planner on simulated machines: its bound, and what it does case by case.

mod ablation;
mod bound;
mod figures;
mod rules;
mod simulation;
