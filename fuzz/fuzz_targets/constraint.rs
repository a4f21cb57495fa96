#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| foretoken_fuzz::constraint::read(data));
