//! Answers of name servers: whatever comes is read without a panic, and what comes of it fits the question.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, bool, &[u8])| {
    let (kind, is_tcp, bytes) = input;
    gale_engine::resolver::fuzzing::read_answer(kind, is_tcp, bytes);
});
