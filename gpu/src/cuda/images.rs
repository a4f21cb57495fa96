//! The compiled kernels, a file per source: see `build.rs`.

include!(concat!(env!("OUT_DIR"), "/images.rs"));
