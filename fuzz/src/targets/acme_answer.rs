//! Answers of ACME issuers: JSON, URLs, times and fields. Texts for the log are one line, and a URL that was read is
//! read again.

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    gale_modules::http::acme::fuzzing::read_answer(data);
}
