#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| foretoken_fuzz::session_file::read(data));
