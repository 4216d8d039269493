//! Queries a responder over HTTP (RFC 6960, appendix A): one request for each connection, which ends with the response.
//! Refuses responses of another type and those over `RESPONSE_MAX` bytes.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_protocol::ResponseFault;
use gale_protocol::http1::{ResponseHeadParser, ResponseParts, Status};
use gale_protocol::response::ResponseField;
use gale_resolver::ResolveError;
use gale_runtime::{Buffer, ConnectOptions, Output, SocketAddress, timeout};
use gale_worker::{CountedConnection, Worker};

use crate::base64;
use crate::staple::{Lookup, Responder};

/// Longest response with its head; a usual one has a few thousand bytes.
const RESPONSE_MAX: usize = 64 * 1024;

/// Size of one receive.
const RECEIVE_BYTES: usize = 8 * 1024;

/// Timeout of the whole query, as in nginx.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Why there is no response, in nginx's words.
#[derive(Debug)]
pub enum AskError {
    /// The responder's name could not be resolved.
    NotResolved(Box<str>, ResolveError),
    /// There is neither a resolver nor an address.
    NoResolver(Box<str>),
    /// The worker has reached its limit of connections.
    NoConnections,
    /// The connection could not be opened, or failed.
    Failed(&'static str, io::Error),
    /// The query timed out.
    TimedOut,
    /// The response is malformed HTTP.
    Malformed(ResponseFault),
    /// The status is not 200.
    Refused(u16),
    /// The content type is wrong.
    WrongType(Vec<u8>),
    /// The response is too long.
    TooLong,
    /// The connection ended before the response did.
    Closed,
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AskError::NotResolved(host, error) => write!(f, "{host} could not be resolved ({error})"),
            AskError::NoResolver(host) => write!(f, "no resolver defined to resolve {host}"),
            AskError::NoConnections => f.write_str("worker_connections are not enough"),
            AskError::Failed(step, error) => write!(f, "{step} failed {}", OsErrorText(error)),
            AskError::TimedOut => f.write_str("OCSP responder timed out"),
            AskError::Malformed(_) => f.write_str("OCSP responder sent invalid response"),
            AskError::Refused(status) => write!(f, "OCSP responder sent status {status}"),
            AskError::WrongType(kind) => {
                write!(f, "OCSP responder sent invalid \"Content-Type\" header: \"{}\"", kind.escape_ascii())
            }
            AskError::TooLong => f.write_str("OCSP responder sent too long response"),
            AskError::Closed => f.write_str("OCSP responder prematurely closed connection"),
        }
    }
}

impl std::error::Error for AskError {}

/// Sends a request to a responder and returns its response.
///
/// # Errors
/// Why there is no response.
pub async fn ask(
    worker: &Rc<Worker>,
    responder: &Responder,
    lookup: &Lookup,
    request: &[u8],
) -> Result<Vec<u8>, AskError> {
    let addresses = addresses(worker, responder, lookup).await?;
    let mut last = AskError::NoResolver(responder.host.clone());
    // Tries the next address if the connection fails, as in nginx.
    for address in addresses {
        match timeout(TIME_MAX, ask_at(worker, responder, address, request)).await {
            Err(_) => last = AskError::TimedOut,
            Ok(Err(error @ (AskError::Failed(..) | AskError::Closed))) => last = error,
            Ok(answer) => return answer,
        }
    }
    Err(last)
}

async fn addresses(worker: &Rc<Worker>, responder: &Responder, lookup: &Lookup) -> Result<Vec<SocketAddr>, AskError> {
    let with_port = |address: &IpAddr| SocketAddr::new(*address, responder.port);
    match (responder.host.trim_matches(['[', ']']).parse::<IpAddr>(), lookup) {
        (Ok(address), _) => Ok(vec![with_port(&address)]),
        (Err(_), Some((settings, time_max))) => {
            let resolved = worker.resolver(settings).resolve(responder.host.as_bytes(), *time_max).await;
            let resolved = resolved.map_err(|error| AskError::NotResolved(responder.host.clone(), error))?;
            Ok(resolved.found.iter().map(with_port).collect())
        }
        (Err(_), None) if responder.addresses.is_empty() => Err(AskError::NoResolver(responder.host.clone())),
        (Err(_), None) => Ok(responder.addresses.to_vec()),
    }
}

async fn ask_at(
    worker: &Rc<Worker>,
    responder: &Responder,
    address: SocketAddr,
    request: &[u8],
) -> Result<Vec<u8>, AskError> {
    let _counted = CountedConnection::open(worker).ok_or(AskError::NoConnections)?;
    let stream = ConnectOptions::default().connect(&SocketAddress::Inet(address)).await;
    let stream = stream.map_err(|failed| AskError::Failed("connect()", failed.error))?;
    let mut output = Output::new();
    output.push(head(responder, request).into_bytes());
    while !output.is_empty() {
        let sent = poll_fn(|context| stream.poll_send(context, &mut output)).await;
        sent.map_err(|error| AskError::Failed("send()", error))?;
    }
    let mut input = Buffer::new();
    loop {
        let received = poll_fn(|context| stream.poll_recv(context, &mut input, RECEIVE_BYTES)).await;
        let has_ended = received.map_err(|error| AskError::Failed("recv()", error))? == 0;
        if let Some(body) = body(input.readable(), has_ended)? {
            return Ok(body.to_vec());
        }
        if has_ended {
            return Err(AskError::Closed);
        }
        if input.len() > RESPONSE_MAX {
            return Err(AskError::TooLong);
        }
    }
}

/// A GET request. Its HTTP version has no chunked responses.
fn head(responder: &Responder, request: &[u8]) -> String {
    let mut target = String::from(&*responder.path);
    for digit in base64(request).chars() {
        match digit {
            '+' => target.push_str("%2B"),
            '/' => target.push_str("%2F"),
            '=' => target.push_str("%3D"),
            digit => target.push(digit),
        }
    }
    let Responder { host, port, .. } = responder;
    let port = if *port == 80 { String::new() } else { format!(":{port}") };
    format!("GET {target} HTTP/1.0\r\nHost: {host}{port}\r\n\r\n")
}

/// Body of a response, or `None` while it is incomplete.
fn body(input: &[u8], has_ended: bool) -> Result<Option<&[u8]>, AskError> {
    let mut parts = ResponseParts::default();
    let parsed = ResponseHeadParser::new(RESPONSE_MAX).parse(input, &mut parts).map_err(AskError::Malformed)?;
    let Status::Complete { consumed } = parsed else { return Ok(None) };
    if parts.status != 200 {
        return Err(AskError::Refused(parts.status));
    }
    let kind = parts.value(input, ResponseField::ContentType).unwrap_or_default();
    if !kind.eq_ignore_ascii_case(b"application/ocsp-response") {
        return Err(AskError::WrongType(kind.to_vec()));
    }
    let body = &input[consumed..];
    let length = parts.content_length.map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    Ok(match length {
        Some(length) => body.get(..length),
        None => has_ended.then_some(body),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_has_its_digits_escaped() {
        let responder = Responder { host: "o.net".into(), port: 8080, path: "/a/".into(), addresses: [].into() };
        assert_eq!(
            head(&responder, &[0xfb, 0xff, 0xfe, 0]),
            "GET /a/%2B%2F%2FAA%3D%3D HTTP/1.0\r\nHost: o.net:8080\r\n\r\n".replace("%2B%2F%2FAA", "%2B%2F%2F%2BAA")
        );
    }

    #[test]
    fn body_is_whole_by_its_length_or_the_end() {
        let head = "HTTP/1.1 200 OK\nContent-Type: application/ocsp-response\n";
        let of = |text: &str, has_ended| body(text.as_bytes(), has_ended).ok().flatten().map(<[u8]>::to_vec);
        assert_eq!(of(&format!("{head}\nabc"), false), None);
        assert_eq!(of(&format!("{head}\nabc"), true), Some(b"abc".to_vec()));
        assert_eq!(of(&format!("{head}Content-Length: 2\n\nabc"), false), Some(b"ab".to_vec()));
        assert_eq!(of(&format!("{head}Content-Length: 4\n\nabc"), true), None);
        assert!(matches!(body(b"HTTP/1.1 404 No\r\n\r\n", true), Err(AskError::Refused(404))));
        assert!(matches!(body(b"HTTP/1.1 200 OK\r\n\r\n", true), Err(AskError::WrongType(_))));
        assert!(matches!(body(b"nothing\r\n\r\n", true), Err(AskError::Malformed(_))));
    }
}
