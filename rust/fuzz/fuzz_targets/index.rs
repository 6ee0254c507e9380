#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ecpool_fuzz::index::run(data));
