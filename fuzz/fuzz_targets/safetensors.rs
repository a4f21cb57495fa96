#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| foretoken_fuzz::safetensors::read(data));
