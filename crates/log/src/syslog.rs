//! Logs to a syslog server: each line is a message as in RFC 3164, in a datagram, or over TCP or TLS
//! (`syslog_stream.rs`).
//!   syslog:server=[tcp://|tls://]ADDRESS[,facility=NAME][,severity=NAME][,tag=TEXT][,nohostname]
//!          [,name=NAME][,trusted=FILE]
//! (<https://nginx.org/en/docs/syslog.html>)
//!
//! Lines wait in a bounded queue, and a separate thread sends them. If a (local) server accepts nothing, the thread
//! waits a moment; then lines are lost and counted, as with a file.

use std::fmt::{self, Write as _};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::server_address::ServerAddress;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::line_time::local_time;
use super::syslog_stream::Secure;
use super::writer::{LogWriter, Writers};

const PORT_DEFAULT: u16 = 514;

/// Default port over TLS. (RFC 5425 §4.1)
const TLS_PORT_DEFAULT: u16 = 6514;

/// Longest tag. (RFC 3164 §4.1.3)
const TAG_BYTES_MAX: usize = 32;

/// Longest message of an error log with its header, as in nginx.
const MESSAGE_BYTES_MAX: usize = 2048;

/// Longest wait for a local server that accepts nothing, once for each batch.
const SEND_TIMEOUT: Duration = Duration::from_millis(200);

const FACILITIES: [&str; 24] = [
    "kern", "user", "mail", "daemon", "auth", "intern", "lpr", "news", "uucp", "clock", "authpriv", "ftp", "ntp",
    "audit", "alert", "cron", "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7",
];

const SEVERITIES: [&str; 8] = ["emerg", "alert", "crit", "error", "warn", "notice", "info", "debug"];

/// Parameters after `syslog:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyslogSettings {
    /// The server.
    pub server: SyslogServer,
    /// The transport.
    pub carrier: Carrier,
    /// Name that the server's certificate has to match.
    pub name: Box<str>,
    /// File with the trusted CA certificates; without one the system's CA store is used.
    pub trusted: Option<PathBuf>,
    facility: u8,
    severity: u8,
    tag: Box<str>,
    has_hostname: bool,
}

/// Transport of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// UDP or a Unix datagram socket.
    #[default]
    Datagrams,
    /// `tcp://`
    Tcp,
    /// `tls://`
    Tls,
}

impl Carrier {
    fn scheme(self) -> &'static str {
        match self {
            Carrier::Datagrams => "",
            Carrier::Tcp => "tcp://",
            Carrier::Tls => "tls://",
        }
    }
}

/// A server as configured.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SyslogServer {
    /// An address.
    Inet(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// A host name, to be resolved.
    Host(String, u16),
}

impl SyslogSettings {
    /// Parses the parameters; `tag` is the default tag. Errors are nginx's messages.
    pub fn parse(text: &[u8], tag: &str) -> Result<SyslogSettings, String> {
        let (mut server, mut facility, mut severity, mut own_tag, mut has_hostname) = (None, None, None, None, true);
        let (mut name, mut trusted) = (None, None);
        for parameter in text.split_str(",") {
            if let Some(value) = parameter.strip_prefix(b"server=") {
                once(&mut server, "server", parse_server(value)?)?;
            } else if let Some(value) = parameter.strip_prefix(b"facility=") {
                once(&mut facility, "facility", number_of(value, &FACILITIES, "facility")?)?;
            } else if let Some(value) = parameter.strip_prefix(b"severity=") {
                once(&mut severity, "severity", number_of(value, &SEVERITIES, "severity")?)?;
            } else if let Some(value) = parameter.strip_prefix(b"tag=") {
                once(&mut own_tag, "tag", parse_tag(value)?)?;
            } else if let Some(value) = parameter.strip_prefix(b"name=") {
                once(&mut name, "name", parse_name(value)?)?;
            } else if let Some(value) = parameter.strip_prefix(b"trusted=") {
                once(&mut trusted, "trusted", PathBuf::from(text_of(value)?))?;
            } else if parameter == b"nohostname" {
                has_hostname = false;
            } else {
                return Err(format!("unknown syslog parameter \"{}\"", parameter.as_bstr()));
            }
        }
        let (server, carrier) = server.ok_or("no syslog server specified")?;
        if carrier != Carrier::Tls && (name.is_some() || trusted.is_some()) {
            return Err("syslog \"name\" and \"trusted\" are for a server with \"tls://\"".to_owned());
        }
        Ok(SyslogSettings {
            name: name.unwrap_or_else(|| server.host()),
            server,
            carrier,
            trusted,
            facility: facility.unwrap_or(23),
            severity: severity.unwrap_or(6),
            tag: own_tag.unwrap_or_else(|| tag.into()),
            has_hostname,
        })
    }

    /// Appends a message to a batch: its length, its header, and the text that `write` appends.
    pub(super) fn append_record(&self, severity: u8, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
        let start = out.len();
        out.extend_from_slice(&[0; LENGTH_BYTES]);
        let mut header = String::with_capacity(64);
        let time = local_time(super::now().0).syslog();
        // Writing to a string cannot fail.
        let _ = write!(header, "<{}>{time} ", u32::from(self.facility) * 8 + u32::from(severity));
        out.extend_from_slice(header.as_bytes());
        if self.has_hostname {
            out.extend_from_slice(gale_process::hostname());
            out.push(b' ');
        }
        out.extend_from_slice(self.tag.as_bytes());
        out.extend_from_slice(b": ");
        write(out);
        let length = u32::try_from(out.len() - start - LENGTH_BYTES).unwrap_or(u32::MAX);
        out[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    }
}

/// Form that can be parsed again, in another process.
impl fmt::Display for SyslogSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.carrier.scheme();
        match &self.server {
            SyslogServer::Inet(address) => write!(formatter, "server={scheme}{address}")?,
            SyslogServer::Unix(path) => write!(formatter, "server=unix:{}", path.display())?,
            SyslogServer::Host(host, port) => write!(formatter, "server={scheme}{host}:{port}")?,
        }
        if self.carrier == Carrier::Tls {
            write!(formatter, ",name={}", self.name)?;
        }
        if let Some(trusted) = &self.trusted {
            write!(formatter, ",trusted={}", trusted.display())?;
        }
        let facility = FACILITIES[usize::from(self.facility)];
        let severity = SEVERITIES[usize::from(self.severity)];
        write!(formatter, ",facility={facility},severity={severity},tag={}", self.tag)?;
        if self.has_hostname { Ok(()) } else { formatter.write_str(",nohostname") }
    }
}

fn once<T>(place: &mut Option<T>, name: &str, value: T) -> Result<(), String> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("duplicate syslog \"{name}\"")),
    }
}

fn number_of(text: &[u8], names: &[&str], what: &str) -> Result<u8, String> {
    let found = names.iter().position(|name| name.as_bytes() == text);
    found.map(|number| number as u8).ok_or_else(|| format!("unknown syslog {what} \"{}\"", text.as_bstr()))
}

/// Settings go to the worker process as text.
fn text_of(path: &[u8]) -> Result<&str, String> {
    path.to_str().map_err(|_| format!("syslog path \"{}\" is not UTF-8", path.as_bstr()))
}

fn parse_tag(text: &[u8]) -> Result<Box<str>, String> {
    if text.len() > TAG_BYTES_MAX {
        return Err("syslog tag length exceeds 32".to_owned());
    }
    match std::str::from_utf8(text) {
        Ok(tag) if text.iter().all(|&byte| byte.is_ascii_alphanumeric() || byte == b'_') => Ok(tag.into()),
        _ => Err("syslog \"tag\" only allows alphanumeric characters and underscore".to_owned()),
    }
}

fn parse_name(text: &[u8]) -> Result<Box<str>, String> {
    match text.to_str() {
        Ok(name) if !name.is_empty() => Ok(name.into()),
        _ => Err(format!("invalid syslog name \"{}\"", text.as_bstr())),
    }
}

fn parse_server(text: &[u8]) -> Result<(SyslogServer, Carrier), String> {
    let (carrier, rest, port_default) = match text {
        [b't', b'c', b'p', b':', b'/', b'/', rest @ ..] => (Carrier::Tcp, rest, PORT_DEFAULT),
        [b't', b'l', b's', b':', b'/', b'/', rest @ ..] => (Carrier::Tls, rest, TLS_PORT_DEFAULT),
        text => (Carrier::Datagrams, text, PORT_DEFAULT),
    };
    let wrong = |what| format!("{what} in syslog server \"{}\"", text.as_bstr());
    match ServerAddress::parse(rest, port_default).map_err(wrong)? {
        ServerAddress::Inet(address) => Ok((SyslogServer::Inet(address), carrier)),
        ServerAddress::Unix(_) if carrier != Carrier::Datagrams => Err(wrong("invalid host")),
        ServerAddress::Unix(path) => {
            text_of(path.as_os_str().as_bytes())?;
            Ok((SyslogServer::Unix(path), carrier))
        }
        ServerAddress::Host(host, port) => Ok((SyslogServer::Host(host, port), carrier)),
    }
}

impl SyslogServer {
    /// Default name for the server's certificate.
    fn host(&self) -> Box<str> {
        match self {
            SyslogServer::Inet(address) => address.ip().to_string().into(),
            SyslogServer::Unix(_) => Box::default(),
            SyslogServer::Host(host, _) => host.as_str().into(),
        }
    }
}

/// A server with the format of its messages.
#[derive(Clone, Debug)]
pub struct Syslog {
    settings: Arc<SyslogSettings>,
    writer: Arc<LogWriter>,
}

impl Syslog {
    /// The server of these settings, whose name was resolved. `secure` is for `tls://`.
    pub fn new(settings: SyslogSettings, secure: Option<Arc<dyn Secure>>) -> Syslog {
        let writer = Writers::of_process().syslog(&settings, secure);
        Syslog { settings: Arc::new(settings), writer }
    }

    /// Its settings.
    pub fn settings(&self) -> &SyslogSettings {
        &self.settings
    }

    /// Queue of its lines.
    pub fn writer(&self) -> &Arc<LogWriter> {
        &self.writer
    }

    /// Appends a line to a batch for [`Syslog::writer`].
    pub fn append_line(&self, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
        self.settings.append_record(self.settings.severity, out, write);
    }

    /// Longest line of an error log after its header, including its end.
    pub(super) fn error_line_max(&self) -> usize {
        let mut header = Vec::with_capacity(LENGTH_BYTES + 128);
        self.settings.append_record(0, &mut header, |_| {});
        // Names of severities and months have a fixed length; days and facilities have not.
        const SPARE: usize = 4;
        (LENGTH_BYTES + MESSAGE_BYTES_MAX).saturating_sub(header.len() + SPARE)
    }

    /// A line of an error log as a batch; the level is the severity.
    pub(super) fn error_batch(&self, level: Level, line: &str) -> Vec<u8> {
        let mut batch = Vec::with_capacity(line.len() + 64);
        let severity = number_of(level.name().as_bytes(), &SEVERITIES, "severity").unwrap_or(self.settings.severity);
        self.settings.append_record(severity, &mut batch, |out| {
            let room = (LENGTH_BYTES + MESSAGE_BYTES_MAX).saturating_sub(out.len());
            let line = line.trim_end_matches('\n').as_bytes();
            out.extend_from_slice(&line[..line.len().min(room)]);
        });
        batch
    }
}

/// Length of the prefix of each message in a batch.
pub(super) const LENGTH_BYTES: usize = 4;

pub(super) fn records(mut batch: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = batch.split_first_chunk::<LENGTH_BYTES>()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        batch = rest;
        Some(record)
    })
}

/// Connection to a server, used by one thread.
#[derive(Debug)]
pub(super) struct Peer {
    server: SyslogServer,
    socket: parking_lot::Mutex<Option<OwnedFd>>,
}

impl Peer {
    pub(super) fn new(server: SyslogServer) -> Peer {
        Peer { server, socket: parking_lot::Mutex::new(None) }
    }

    pub(super) fn name(&self) -> String {
        match &self.server {
            SyslogServer::Inet(address) => format!("syslog:server={address}"),
            SyslogServer::Unix(path) => format!("syslog:server=unix:{}", path.display()),
            SyslogServer::Host(host, _) => format!("syslog:server={host}"),
        }
    }

    /// Sends the messages of a batch. An error comes with the number of lost messages.
    pub(super) fn send_all(&self, batch: &[u8]) -> Result<(), (io::Error, u64)> {
        let mut lost = 0;
        let mut failure = None;
        let mut socket = self.socket.lock();
        for record in records(batch) {
            // A server that is absent or accepts nothing is not retried for the rest of the batch.
            if failure.as_ref().is_some_and(|error: &io::Error| error.raw_os_error() != Some(libc::EMSGSIZE)) {
                lost += 1;
                continue;
            }
            if let Err(error) = self.send(&mut socket, record) {
                lost += 1;
                failure = Some(error);
            }
        }
        failure.map_or(Ok(()), |error| Err((error, lost)))
    }

    fn send(&self, socket: &mut Option<OwnedFd>, record: &[u8]) -> io::Result<()> {
        let connected = match socket {
            Some(socket) => socket,
            None => socket.insert(self.connect()?),
        };
        let sent =
            rustix::io::retry_on_intr(|| rustix::net::send(&*connected, record, rustix::net::SendFlags::NOSIGNAL));
        match sent {
            Ok(_) => Ok(()),
            // The server was restarted, or an earlier datagram was refused.
            Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOTCONN | rustix::io::Errno::CONNRESET) => {
                *socket = None;
                let fresh = socket.insert(self.connect()?);
                rustix::net::send(&*fresh, record, rustix::net::SendFlags::NOSIGNAL)?;
                Ok(())
            }
            Err(error) => {
                *socket = None;
                Err(error.into())
            }
        }
    }

    fn connect(&self) -> io::Result<OwnedFd> {
        let open = |family| rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let socket = match &self.server {
            SyslogServer::Inet(address) => {
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let socket = open(family)?;
                rustix::net::connect(&socket, address)?;
                socket
            }
            SyslogServer::Unix(path) => {
                let socket = open(AddressFamily::UNIX)?;
                sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(SEND_TIMEOUT))?;
                rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
                socket
            }
            SyslogServer::Host(..) => return Err(io::ErrorKind::AddrNotAvailable.into()),
        };
        Ok(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        SyslogSettings::parse(text.as_bytes(), "gale").unwrap_err()
    }

    #[test]
    fn parameters_are_read_and_written_again() {
        let settings = SyslogSettings::parse(b"server=127.0.0.1", "gale").unwrap();
        assert_eq!(settings.server, SyslogServer::Inet("127.0.0.1:514".parse().unwrap()));
        assert_eq!((settings.facility, settings.severity, &*settings.tag), (23, 6, "gale"));
        for text in [
            "server=[::1]:12,facility=user,severity=alert,tag=x_1",
            "server=unix:/dev/log,facility=cron,severity=debug,tag=x,nohostname",
            "server=localhost:99,facility=kern,severity=emerg,tag=x",
        ] {
            assert_eq!(SyslogSettings::parse(text.as_bytes(), "gale").unwrap().to_string(), text);
        }
    }

    #[test]
    fn paths_that_are_no_text_are_refused() {
        for parameters in [&b"server=unix:/dev/\xff"[..], b"server=tls://a,trusted=/\xff"] {
            assert!(SyslogSettings::parse(parameters, "gale").unwrap_err().ends_with("is not UTF-8"));
        }
    }

    #[test]
    fn wrong_parameters_are_refused_in_nginx_s_words() {
        assert_eq!(error("facility=user"), "no syslog server specified");
        assert_eq!(error("server=127.0.0.1,server=127.0.0.1"), "duplicate syslog \"server\"");
        assert_eq!(error("server=127.0.0.1,facility=x"), "unknown syslog facility \"x\"");
        assert_eq!(error("server=127.0.0.1,severity=x"), "unknown syslog severity \"x\"");
        assert_eq!(
            error("server=127.0.0.1,tag=a-b"),
            "syslog \"tag\" only allows alphanumeric characters and underscore"
        );
        assert_eq!(error(&format!("server=127.0.0.1,tag={}", "a".repeat(33))), "syslog tag length exceeds 32");
        assert_eq!(error("server=127.0.0.1,x"), "unknown syslog parameter \"x\"");
        assert_eq!(error("server=127.0.0.1:x"), "invalid port in syslog server \"127.0.0.1:x\"");
    }

    #[test]
    fn a_message_has_the_form_of_rfc_3164() {
        let settings = SyslogSettings::parse(b"server=127.0.0.1,facility=user,tag=t,nohostname", "gale").unwrap();
        let mut batch = Vec::new();
        settings.append_record(3, &mut batch, |out| out.extend_from_slice(b"one"));
        settings.append_record(6, &mut batch, |out| out.extend_from_slice(b"two\n"));
        let found: Vec<String> = records(&batch).map(|record| String::from_utf8(record.to_vec()).unwrap()).collect();
        assert_eq!(found.len(), 2);
        assert!(found[0].starts_with("<11>") && found[0].ends_with(" t: one"), "{found:?}");
        assert_eq!(found[0].len(), "<11>Nov 21 20:00:00 t: one".len());
        assert!(found[1].starts_with("<14>") && found[1].ends_with(" t: two\n"), "{found:?}");
    }
}
