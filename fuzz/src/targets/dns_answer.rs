//! Answers of name servers: reading arbitrary bytes never panics, and accepted records match the question.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, bool, &[u8])| {
    let (kind, is_tcp, bytes) = input;
    gale_resolver::fuzzing::read_answer(kind, is_tcp, bytes);
});
