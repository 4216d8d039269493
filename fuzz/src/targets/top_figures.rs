//! JSON of nginx's commercial API, and of Gale's: `gale top` refuses it or draws it without control characters.

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        gale_top::fuzzing::draw(text);
    }
}
