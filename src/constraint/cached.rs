//! What an engine has compiled.

use super::Constraint;
use crate::engine::Engine;

impl Engine {
    /// Whether a constraint is compiled and cached, so that [`Engine::compile`] returns at once. It is then the last to be evicted
    /// from the cache.
    pub fn has_compiled(&self, constraint: &Constraint) -> bool {
        self.parts.constraints.keep(constraint)
    }
}
