//! `gale health`: health check of a server, for containers that have no other HTTP client.
//!
//! Sends one HTTP/1.1 request without TLS; only the status line of the response matters.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Timeout of the whole check. Most container runtimes have a shorter one of their own.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the status line in bytes.
const STATUS_LINE_MAX: usize = 1024;
/// Address that `gale serve` and the container's configuration listen on.
const DEFAULT: &str = "127.0.0.1:8080/";

/// `gale health [ADDRESS][/PATH]`
#[derive(Debug, PartialEq, Eq)]
pub struct Health {
    server: Address,
    /// Begins with a slash, and contains no byte that would end the request line.
    path: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Address {
    /// A host name or an address, with a port.
    Tcp(String),
    Unix(PathBuf),
}

impl Health {
    /// Parses the words after the command; `None` requests help.
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Health>, String> {
        let mut target = None;
        for word in words {
            match word.as_bytes() {
                b"-h" | b"-?" | b"--help" => return Ok(None),
                option if option.starts_with(b"-") => {
                    return Err(format!("gale: invalid option: \"{}\"", word.to_string_lossy()));
                }
                _ if target.is_none() => target = Some(word),
                _ => return Err("gale: \"health\" takes one address".to_owned()),
            }
        }
        let target = target.unwrap_or_else(|| DEFAULT.into());
        let health = target.to_str().and_then(Health::of);
        health.map(Some).ok_or_else(|| format!("gale: invalid address \"{}\"", target.to_string_lossy()))
    }

    /// Parses `PORT` or `HOST:PORT`, either followed by an optional path, or `unix:FILE`, optionally followed by a
    /// colon and a path.
    fn of(target: &str) -> Option<Health> {
        if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let (server, path) = match target.strip_prefix("unix:") {
            Some(target) => {
                let (file, path) = target.split_once(':').unwrap_or((target, "/"));
                (Address::Unix(PathBuf::from(file).is_absolute().then(|| PathBuf::from(file))?), path)
            }
            None => {
                let (server, path) = target.split_at(target.find('/').unwrap_or(target.len()));
                let server = match server.parse::<u16>() {
                    Ok(port) => format!("127.0.0.1:{port}"),
                    Err(_) => server.rsplit_once(':')?.1.parse::<u16>().is_ok().then(|| server.to_owned())?,
                };
                (Address::Tcp(server), if path.is_empty() { "/" } else { path })
            }
        };
        path.starts_with('/').then(|| Health { server, path: path.to_owned() })
    }
}

/// Performs the check. The exit status is 0 if the response is not an error.
pub fn ask(health: &Health) -> ExitCode {
    match status_line(health) {
        Ok(line) if is_good(&line) => ExitCode::SUCCESS,
        Ok(line) => {
            eprintln!("gale: not healthy: \"{}\"", line.trim_end().escape_default());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("gale: not healthy: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns `true` for 2xx and 3xx.
fn is_good(line: &str) -> bool {
    let status = line.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5));
    status.and_then(|status| status.parse().ok()).is_some_and(|status: u16| (200..400).contains(&status))
}

fn status_line(health: &Health) -> io::Result<String> {
    let end = Instant::now() + TIMEOUT;
    let request = |host: &str| {
        format!("GET {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: gale-health\r\nConnection: close\r\n\r\n", health.path)
    };
    match &health.server {
        Address::Unix(path) => {
            let mut stream = UnixStream::connect(path)?;
            stream.set_write_timeout(Some(TIMEOUT))?;
            stream.write_all(request("localhost").as_bytes())?;
            first_line(|bytes| {
                stream.set_read_timeout(Some(time_left(end)?))?;
                stream.read(bytes)
            })
        }
        Address::Tcp(server) => {
            let mut stream = connect(server, end)?;
            stream.set_write_timeout(Some(time_left(end)?))?;
            stream.write_all(request(server).as_bytes())?;
            first_line(|bytes| {
                stream.set_read_timeout(Some(time_left(end)?))?;
                stream.read(bytes)
            })
        }
    }
}

/// Connects to the first address of the name that accepts a connection.
fn connect(server: &str, end: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in server.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, time_left(end)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn first_line(mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<String> {
    let mut line = Vec::new();
    while !line.contains(&b'\n') && line.len() < STATUS_LINE_MAX {
        let mut bytes = [0; STATUS_LINE_MAX];
        match read(&mut bytes) {
            Ok(0) => break,
            Ok(length) => line.extend_from_slice(&bytes[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    let length = line.iter().position(|&byte| byte == b'\n').unwrap_or(line.len());
    Ok(String::from_utf8_lossy(&line[..length]).into_owned())
}

fn time_left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_an_address_with_or_without_a_path() {
        let tcp =
            |server: &str, path: &str| Some(Health { server: Address::Tcp(server.to_owned()), path: path.to_owned() });
        let unix = |file: &str, path: &str| Some(Health { server: Address::Unix(file.into()), path: path.to_owned() });
        assert_eq!(Health::of("8081"), tcp("127.0.0.1:8081", "/"));
        assert_eq!(Health::of("8081/up?x"), tcp("127.0.0.1:8081", "/up?x"));
        assert_eq!(Health::of("[::1]:80/up"), tcp("[::1]:80", "/up"));
        assert_eq!(Health::of("localhost:80"), tcp("localhost:80", "/"));
        assert_eq!(Health::of("unix:/run/x.sock"), unix("/run/x.sock", "/"));
        assert_eq!(Health::of("unix:/run/x.sock:/up"), unix("/run/x.sock", "/up"));
        for wrong in
            ["", "/", "localhost", "65536", "a:b", "80/ x", "80/\r\n", "unix:", "unix:x", "unix:/x:up", "http://x/"]
        {
            assert_eq!(Health::of(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn answers_that_are_no_error_are_good() {
        for good in ["HTTP/1.1 200 OK", "HTTP/1.0 204", "HTTP/1.1 301 Moved Permanently"] {
            assert!(is_good(good), "{good}");
        }
        for bad in
            ["", "HTTP/1.1", "HTTP/1.1 503 Service Unavailable", "HTTP/1.1 404", "HTTP/1.1 \u{fffd}00", "SSH-2.0"]
        {
            assert!(!is_good(bad), "{bad}");
        }
    }
}
