//! Error and access logs: lines in nginx's form, or JSON objects, which a separate thread writes to files and syslog.
//!
//! Neither an event loop nor a supervising thread writes to a file. They append whole lines to the file's bounded
//! queue; a thread writes all gathered lines with one call. Lines that do not fit are dropped, counted and reported;
//! nothing waits for room. Only `emerg` waits briefly for the write, because the process may be ending.

mod about;
mod access;
#[doc(hidden)]
pub mod fuzzing;
mod json;
mod line_time;
mod named;
mod syslog;
mod syslog_stream;
mod writer;

use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

pub use about::{About, Describe, Fields};
pub use access::{AccessBuffers, Hold};
pub use json::JsonLine;
pub use line_time::{LocalTime, Zone, format_time, local_time};
pub use named::{NamedLine, OpenLogs, append_named};
pub use syslog::{Carrier, Syslog, SyslogServer, SyslogSettings};
pub use syslog_stream::{Channel, Secure};
pub use writer::{LogWriter, Writers};

use gale_base::log_level::{Level, LineForm};

use about::TextOf;

/// Longest line of an error log, in bytes; as in nginx, the rest is cut off.
const ERROR_LINE_MAX: usize = 2048;

/// Error logs of one scope, from its `error_log` directives.
#[derive(Debug)]
pub struct ErrorLog {
    destinations: Vec<Destination>,
    /// The least severe level that any destination accepts.
    level_max: Option<Level>,
}

/// One `error_log`.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The least severe level that it accepts.
    pub level: Level,
    /// Form of the lines.
    pub form: LineForm,
    /// Target of the lines.
    pub target: Target,
}

/// Target of messages.
#[derive(Clone, Debug)]
pub enum Target {
    /// Standard error.
    Stderr,
    /// A file.
    File(DeferredLog),
    /// A syslog server.
    Syslog(DeferredSyslog),
}

/// A syslog server whose name is resolved once the configuration is otherwise complete.
#[derive(Clone, Debug)]
pub struct DeferredSyslog(Arc<(SyslogSettings, OnceLock<Syslog>)>);

impl DeferredSyslog {
    /// The server of these settings.
    pub fn new(settings: SyslogSettings) -> DeferredSyslog {
        DeferredSyslog(Arc::new((settings, OnceLock::new())))
    }

    /// The settings, with the address in place of the name once that is known.
    pub fn settings(&self) -> &SyslogSettings {
        self.0.1.get().map_or(&self.0.0, Syslog::settings)
    }

    /// Completes it with the address of its name, if it has one, and with TLS, if it uses that.
    pub fn complete(&self, address: Option<SocketAddr>, secure: Option<Arc<dyn Secure>>) {
        let mut settings = self.0.0.clone();
        if let Some(address) = address {
            settings.server = SyslogServer::Inet(address);
        }
        // The first call counts.
        let _ = self.0.1.set(Syslog::new(settings, secure));
    }

    /// The server.
    ///
    /// # Panics
    /// Panics while the configuration is still being built.
    pub fn syslog(&self) -> &Syslog {
        self.0.1.get().expect("names are looked up once the configuration is built")
    }
}

/// Waits until all log lines are written, at most `time_max`.
pub fn finish(time_max: Duration) {
    let deadline = Instant::now() + time_max;
    named::finish(deadline);
    writer::finish(deadline);
}

/// A log file that is opened once the configuration is otherwise complete.
#[derive(Clone, Debug)]
pub struct DeferredLog(Arc<Deferred>);

#[derive(Debug)]
struct Deferred {
    path: PathBuf,
    gzip: AtomicU32,
    writer: OnceLock<Arc<LogWriter>>,
}

impl DeferredLog {
    /// The log at this path, not open yet.
    pub fn new(path: PathBuf) -> DeferredLog {
        DeferredLog(Arc::new(Deferred { path, gzip: AtomicU32::new(0), writer: OnceLock::new() }))
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Sets the compression level of the file.
    pub fn compress(&self, level: u32) {
        self.0.gzip.store(level, Ordering::Relaxed);
    }

    /// Sets the writer, once the file is open.
    pub fn set(&self, writer: Arc<LogWriter>) {
        writer.set_gzip(self.0.gzip.load(Ordering::Relaxed));
        // The first call counts; every clone asks for the same file.
        let _ = self.0.writer.set(writer);
    }

    /// The writer.
    ///
    /// # Panics
    /// Panics while the configuration is still being built.
    pub fn writer(&self) -> &Arc<LogWriter> {
        self.0.writer.get().expect("logs are open once the configuration is built")
    }
}

impl ErrorLog {
    /// A log with these destinations.
    pub fn new(destinations: Vec<Destination>) -> ErrorLog {
        let level_max = destinations.iter().map(|destination| destination.level).max();
        ErrorLog { destinations, level_max }
    }

    /// `true` if a message of this level would be written to any destination.
    pub fn takes(&self, level: Level) -> bool {
        self.level_max.is_some_and(|level_max| level <= level_max)
    }

    /// Writes one message; `connection` is the number that nginx writes after an asterisk.
    pub fn write(&self, level: Level, connection: Option<u64>, message: &dyn fmt::Display) {
        self.write_about(level, connection, message, &());
    }

    /// Writes one message with its subject. Marked cold because messages are rare: the compiler moves the code that
    /// leads here out of the usual path.
    #[cold]
    pub fn write_about(&self, level: Level, connection: Option<u64>, message: &dyn fmt::Display, about: &dyn About) {
        if !self.takes(level) {
            return;
        }
        let mut text = None;
        for Destination { target, form, .. } in self.destinations.iter().filter(|place| level <= place.level) {
            let line = match form {
                LineForm::Text => text
                    .get_or_insert_with(|| error_line(level, connection, &format_args!("{message}{}", TextOf(about)))),
                LineForm::Json => {
                    let bytes_max = match target {
                        Target::Syslog(server) => server.syslog().error_line_max(),
                        Target::File(_) | Target::Stderr => ERROR_LINE_MAX,
                    };
                    &mut json::error_line(level, connection, message, about, bytes_max)
                }
            };
            let batch;
            let (writer, bytes) = match target {
                Target::File(log) => (log.writer(), line.as_bytes()),
                Target::Stderr => (Writers::of_process().stderr(), line.as_bytes()),
                Target::Syslog(server) => {
                    batch = server.syslog().error_batch(level, line);
                    (server.syslog().writer(), &*batch)
                }
            };
            match level {
                Level::Emerg => writer.append_and_wait(bytes),
                _ => writer.append(bytes),
            }
        }
    }
}

impl gale_process::ErrorLog for ErrorLog {
    fn write(&self, level: Level, message: &str) {
        ErrorLog::write(self, level, None, &message);
    }
}

/// `2026/11/20 19:00:00 [error] 12#13: *5 message`
fn error_line(level: Level, connection: Option<u64>, message: &dyn fmt::Display) -> String {
    let mut line = String::with_capacity(256);
    let time = local_time(now().0);
    let thread = rustix::thread::gettid().as_raw_nonzero();
    let _ = write!(line, "{} [{}] {}#{thread}: ", time.error_log(), level.name(), std::process::id());
    if let Some(connection) = connection {
        let _ = write!(line, "*{connection} ");
    }
    let _ = write!(line, "{message}");
    if line.len() >= ERROR_LINE_MAX {
        let mut end = ERROR_LINE_MAX - 1;
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
    }
    // Client data must not look like another line, nor control a terminal.
    if line.contains(is_harmful) {
        line = line.replace(is_harmful, " ");
    }
    line.push('\n');
    line
}

fn is_harmful(character: char) -> bool {
    character.is_control() && character != '\t'
}

/// Seconds since 1970, and milliseconds.
fn now() -> (u64, u32) {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (time.as_secs(), time.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_nginx_s_form() {
        let line = error_line(Level::Error, Some(7), &"open() \x1b[2J\tfailed\nx");
        let (time, rest) = line.split_at(20);
        assert_eq!(time.matches('/').count(), 2);
        assert!(rest.starts_with("[error] "), "{line}");
        assert!(rest.contains(&format!(" {}#", std::process::id())), "{line}");
        assert!(rest.ends_with(": *7 open()  [2J\tfailed x\n"), "{line}");
    }

    #[test]
    fn a_long_line_is_cut_and_still_ends() {
        let line = error_line(Level::Error, None, &"é".repeat(4000));
        assert!(line.len() <= ERROR_LINE_MAX && line.ends_with('\n'));
    }

    #[test]
    fn levels_are_compared_with_every_target() {
        let destination = Destination { level: Level::Error, form: LineForm::Text, target: Target::Stderr };
        let log = ErrorLog::new(vec![destination]);
        assert!(log.takes(Level::Emerg) && log.takes(Level::Error) && !log.takes(Level::Warn));
        assert!(!ErrorLog::new(Vec::new()).takes(Level::Emerg));
    }
}
