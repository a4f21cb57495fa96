//! The planner on simulated machines: its bound, and what it does case by case.

mod bound;
mod rules;
mod simulation;
