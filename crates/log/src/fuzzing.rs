//! Body of the fuzz target `syslog`, which sees what is private; the program does not call it.

use super::syslog::{SyslogServer, SyslogSettings, records};

/// Parses parameters. Right ones stay the same in another process, and each line is one message that ends with it.
pub fn write_lines(parameters: &[u8], text: &[u8]) {
    let Ok(settings) = SyslogSettings::parse(parameters, "gale") else { return };
    // Names are resolved before: a host `unix` would become a path.
    if !matches!(settings.server, SyslogServer::Host(..)) {
        let again = SyslogSettings::parse(settings.to_string().as_bytes(), "other");
        assert_eq!(again.as_ref(), Ok(&settings), "{settings}");
    }
    let lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
    let mut batch = Vec::new();
    for line in &lines {
        settings.append_record(6, &mut batch, |out| out.extend_from_slice(line));
    }
    let messages: Vec<&[u8]> = records(&batch).collect();
    assert_eq!(messages.len(), lines.len());
    for (message, line) in messages.iter().zip(lines) {
        assert!(message.starts_with(b"<") && message.ends_with(line));
    }
}
