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

/// Uninhabited.
pub(crate) enum ConstraintState {}

impl Compiler {
    pub fn touch(&self, _: &Constraint) -> bool {
        false
    }

    /// # Errors
    /// Always.
    pub fn state(&self, _: &Constraint, _: &Arc<Tokenizer>, _: usize, _: &[u32]) -> Result<ConstraintState> {
        let problem = "is not supported by this build; build with the cargo feature `constraint`".into();
        Err(Error::Unsupported { path: None, what: "constraint".into(), problem })
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
