//! Parameters of a syslog server in the first line, lines of a log behind it: parameters are written back unchanged,
//! and each line is one message of a batch.

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let end = data.iter().position(|&byte| byte == b'\n').unwrap_or(data.len());
    gale_log::fuzzing::write_lines(&data[..end], data.get(end + 1..).unwrap_or_default());
}
