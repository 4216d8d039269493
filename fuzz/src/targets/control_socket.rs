//! The control socket from both sides: an order in pieces to a master, and an answer to `gale reload`.

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some((&size, bytes)) = data.split_first() else { return };
    gale_process::fuzzing::read_order(bytes, usize::from(size).max(1));
    gale_process::fuzzing::read_answer(bytes);
}
