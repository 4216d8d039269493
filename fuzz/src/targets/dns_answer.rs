//! Answers of name servers: reading arbitrary bytes never panics, and accepted records match the question.

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some(([kind, is_tcp], bytes)) = data.split_first_chunk() else { return };
    gale_resolver::fuzzing::read_answer(*kind, is_tcp & 1 == 1, bytes);
}
