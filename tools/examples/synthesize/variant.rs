//! The variants of every family.

use anyhow::Result;
use clap::ValueEnum;

use super::shape::Shape;
use super::{Args, File, gemma4, qwen35};

#[derive(Clone, Copy, ValueEnum)]
pub enum Variant {
    E2b,
    E4b,
    #[value(name = "12b")]
    B12,
    #[value(name = "26b")]
    B26,
    #[value(name = "31b")]
    B31,
    #[value(name = "qwen-0.8b")]
    Qwen0_8b,
    #[value(name = "qwen-9b")]
    Qwen9b,
    #[value(name = "qwen-27b")]
    Qwen27b,
    #[value(name = "qwen-35b-a3b")]
    Qwen35bA3b,
}

impl Variant {
    /// The files to write for it.
    pub fn files(self, args: &Args) -> Result<Vec<File>> {
        let name = self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned());
        match self {
            Self::E2b => gemma4::files(args, &name, Shape::e2b()),
            Self::E4b => gemma4::files(args, &name, Shape::e4b()),
            Self::B12 => gemma4::files(args, &name, Shape::b12()),
            Self::B26 => gemma4::files(args, &name, Shape::b26()),
            Self::B31 => gemma4::files(args, &name, Shape::b31()),
            Self::Qwen0_8b => qwen35::files(args, &name, qwen35::Shape::b0_8()),
            Self::Qwen9b => qwen35::files(args, &name, qwen35::Shape::b9()),
            Self::Qwen27b => qwen35::files(args, &name, qwen35::Shape::b27()),
            Self::Qwen35bA3b => qwen35::files(args, &name, qwen35::Shape::b35_a3()),
        }
    }
}
