#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ecpool_fuzz::header::run(data));
