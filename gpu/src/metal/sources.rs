//! The kernels' sources, written by `build.rs`.

include!(concat!(env!("OUT_DIR"), "/sources.rs"));
