//! Stub of the compiler without the cargo feature `constraint`: no state is ever made.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::Constraint;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Whether a schema cannot be compiled, which is not known here.
pub(crate) fn refuses(_: &Value) -> bool {
    false
}

/// Refuses every constraint.
#[derive(Default)]
pub(crate) struct Compiler {}

/// A constraint compiled by an engine, which needs the cargo feature `constraint`.
#[derive(Clone, Debug)]
pub enum CompiledConstraint {}

/// Uninhabited.
pub(crate) enum ConstraintState {}

impl Compiler {
    pub fn cached(&self, _: &Constraint) -> Option<CompiledConstraint> {
        None
    }

    /// # Errors
    /// Always.
    pub fn compile(&self, _: &Constraint, _: &Arc<Tokenizer>, _: usize, _: &[u32]) -> Result<CompiledConstraint> {
        let problem = "is not supported by this build; build with the cargo feature `constraint`".into();
        Err(Error::Unsupported { path: None, what: "constraint".into(), problem })
    }
}

impl CompiledConstraint {
    /// What was compiled.
    pub fn constraint(&self) -> &Constraint {
        match *self {}
    }

    pub(crate) fn state(&self, _: usize) -> ConstraintState {
        match *self {}
    }
}

impl ConstraintState {
    pub fn is_complete(&self) -> bool {
        match *self {}
    }

    pub fn forced(&mut self, _: usize) -> Vec<u32> {
        match *self {}
    }

    pub fn valid(&mut self, _: &[u32]) -> usize {
        match *self {}
    }

    pub fn mask(&mut self, _: &[u32], _: &mut [f32]) -> Result<()> {
        match *self {}
    }

    pub fn read(&mut self, _: &[u32]) -> Result<bool> {
        match *self {}
    }

    pub fn time(&self) -> Duration {
        match *self {}
    }

    pub fn commit(&mut self) {
        match *self {}
    }
}
