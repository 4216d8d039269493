//! Client of the collector: sends one message, over the previous connection if that can be reused.
//!
//! OTLP over gRPC uses HTTP/2, OTLP over HTTP uses HTTP/1.1
//! (<https://opentelemetry.io/docs/specs/otlp/>). An answer is bounded in size and time, and garbage is a failure.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use gale_config::server_address::ServerAddress;
use gale_http_upstream::client::{Answer, ClientError, ClientRequest, Patience};
use gale_http_upstream::{Http2Request, PassingTls};
use gale_protocol::http1::request_writer::{Unwritable, write_field};
use gale_protocol::request::Method;
use gale_runtime::{Bytes, ConnectOptions, SocketAddress};
use gale_worker::service::{Context, Service};
use prost::Message;

use super::exporter::{Endpoint, Exporter};
use super::messages::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use crate::http::checking::{Asking, Kept, Way};
use crate::http::lookup;

/// Path of the gRPC method.
const GRPC_PATH: &[u8] = b"/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// Length of a gRPC message's prefix: a compression flag, and the length.
const GRPC_PREFIX_BYTES: usize = 5;

/// Timeout of connecting, and of the TLS handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// Timeout of the response, in seconds: the default of OpenTelemetry's exporters.
const ANSWER_SECONDS_MAX: u64 = 10;
const PATIENCE: Patience = Patience {
    send: Duration::from_secs(ANSWER_SECONDS_MAX),
    read: Duration::from_secs(ANSWER_SECONDS_MAX),
    whole: Duration::from_secs(ANSWER_SECONDS_MAX),
};

/// Maximum age of a connection, as with `keepalive_time`.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(3600);

/// Maximum length of a response's head and of its body, which are short.
const HEAD_BYTES_MAX: usize = 16 * 1024;
const BODY_BYTES_MAX: usize = 16 * 1024;

/// Maximum number of a host's addresses that are tried.
const ADDRESSES_MAX: usize = 8;

/// Maximum length of a collector's text in the log, in bytes.
const TOLD_BYTES_MAX: usize = 200;

const USER_AGENT: &str = concat!("Gale/", env!("CARGO_PKG_VERSION"));

/// Result of a message.
pub(super) struct Taken {
    /// Number of spans that the collector rejected.
    pub rejected: u64,
    /// The collector's reason.
    pub message: String,
}

/// A collector with its connection.
#[derive(Default)]
pub(super) struct Collector {
    kept: Option<Kept>,
    /// Addresses of the collector; kept as long as it responds.
    addresses: Vec<SocketAddress>,
    /// Settings of this collector; with other settings a new one is made.
    settings: Weak<Exporter>,
}

impl Collector {
    /// Creates the collector of these settings.
    pub fn of(settings: &Arc<Exporter>) -> Collector {
        Collector { settings: Arc::downgrade(settings), ..Collector::default() }
    }

    /// Returns `true` if it belongs to these settings.
    pub fn is_of(&self, settings: &Arc<Exporter>) -> bool {
        std::ptr::eq(self.settings.as_ptr(), Arc::as_ptr(settings))
    }

    /// Sends a message with the protocol and fields of the settings.
    ///
    /// # Errors
    /// The reason why the collector has not accepted the message.
    pub async fn send<S: Service>(
        &mut self,
        context: &Context<S>,
        settings: &Exporter,
        message: ExportTraceServiceRequest,
    ) -> Result<Taken, String> {
        let asking = asking(settings, &message).map_err(|error| error.to_string())?;
        if self.addresses.is_empty() {
            self.addresses = addresses(context, &settings.endpoint).await?;
        }
        let mut result = Err("no address".to_owned());
        for address in &self.addresses {
            let way = way(context, settings, address)?;
            match way.ask(&asking, &mut self.kept).await {
                Ok(answer) => {
                    result = judge(settings, &answer);
                    break;
                }
                Err(error) => {
                    let is_connected = !matches!(error, ClientError::NotConnected(..));
                    result = Err(format!("{}, collector: {}", in_own_words(&error), settings.endpoint.authority));
                    if is_connected {
                        break;
                    }
                }
            }
        }
        if result.is_err() {
            self.addresses.clear();
        }
        result
    }
}

fn in_own_words(error: &ClientError) -> String {
    error.to_string().replace("upstream", "collector")
}

fn way<'c, S: Service>(
    context: &'c Context<S>,
    settings: &Exporter,
    address: &SocketAddress,
) -> Result<Way<'c>, String> {
    let tls = match &settings.endpoint.tls {
        None => None,
        Some(client) => {
            let client = client.get().map(Arc::clone).ok_or("TLS is not set up")?;
            Some(PassingTls { client, name: settings.endpoint.name().into_bytes().into(), certificate: None })
        }
    };
    Ok(Way {
        worker: context.worker(),
        address: address.clone(),
        options: ConnectOptions { timeout: Some(CONNECT_TIME_MAX), ..ConnectOptions::default() },
        header: Vec::new(),
        tls,
        patience: PATIENCE,
        keepalive_time: CONNECTION_TIME_MAX,
    })
}

async fn addresses<S: Service>(context: &Context<S>, endpoint: &Endpoint) -> Result<Vec<SocketAddress>, String> {
    Ok(match &endpoint.address {
        ServerAddress::Inet(address) => vec![SocketAddress::Inet(*address)],
        ServerAddress::Unix(path) => vec![SocketAddress::unix(path)],
        ServerAddress::Host(host, port) => {
            let name_servers = lookup::name_servers(context);
            let found = lookup::addresses(context.worker(), host, name_servers.as_ref()).await?;
            let found = found.into_iter().take(ADDRESSES_MAX);
            found.map(|address| SocketAddress::Inet(SocketAddr::new(address, *port))).collect()
        }
    })
}

fn asking(settings: &Exporter, message: &ExportTraceServiceRequest) -> Result<Asking, Unwritable> {
    let endpoint = &settings.endpoint;
    let Some(path) = &endpoint.path else {
        let scheme = if endpoint.tls.is_some() { "https" } else { "http" };
        let mut head = Http2Request::new(b"POST", scheme, endpoint.authority.as_bytes(), GRPC_PATH)?;
        head.push(b"content-type", b"application/grpc")?;
        head.push(b"te", b"trailers")?;
        head.push(b"grpc-timeout", format!("{ANSWER_SECONDS_MAX}S").as_bytes())?;
        push_headers(settings, |name, value| head.push(name, value))?;
        let body = Some(grpc_message(message));
        return Ok(Asking::Http2 { head, body, head_max: HEAD_BYTES_MAX, body_max: BODY_BYTES_MAX });
    };
    let mut text = format!("POST {path} HTTP/1.1\r\nHost: {}\r\n", endpoint.authority).into_bytes();
    write_field(&mut text, b"Content-Type", b"application/x-protobuf")?;
    write_field(&mut text, b"Content-Length", message.encoded_len().to_string().as_bytes())?;
    push_headers(settings, |name, value| write_field(&mut text, name, value))?;
    text.extend_from_slice(b"\r\n");
    append(&mut text, message);
    let (method, bytes) = (Method::Post, Bytes::from(text));
    Ok(Asking::Http1(ClientRequest { method, bytes, head_max: HEAD_BYTES_MAX, body_max: BODY_BYTES_MAX }))
}

/// Adds the configured header fields, and a `User-Agent` unless one is configured.
fn push_headers(
    settings: &Exporter,
    mut push: impl FnMut(&[u8], &[u8]) -> Result<(), Unwritable>,
) -> Result<(), Unwritable> {
    if !settings.headers.iter().any(|(name, _)| name == "user-agent") {
        push(b"user-agent", USER_AGENT.as_bytes())?;
    }
    settings.headers.iter().try_for_each(|(name, value)| push(name.as_bytes(), value.as_bytes()))
}

fn grpc_message(message: &ExportTraceServiceRequest) -> Bytes {
    let length = message.encoded_len();
    let mut text = Vec::with_capacity(GRPC_PREFIX_BYTES + length);
    text.push(0);
    text.extend_from_slice(&u32::try_from(length).expect("batches are bounded").to_be_bytes());
    append(&mut text, message);
    Bytes::from(text)
}

fn append(text: &mut Vec<u8>, message: &ExportTraceServiceRequest) {
    message.encode(text).expect("a vector grows");
}

/// Returns the result in the collector's response.
fn judge(settings: &Exporter, answer: &Answer) -> Result<Taken, String> {
    let status = answer.head.status;
    let response = if settings.endpoint.path.is_some() {
        if !(200..=299).contains(&status) {
            return Err(format!("unexpected status {status}"));
        }
        // The collector has accepted the message, even if the rest of its response is invalid.
        ExportTraceServiceResponse::decode(&*answer.body).unwrap_or_default()
    } else {
        if status != 200 {
            return Err(format!("unexpected status {status}"));
        }
        grpc_status(answer)?;
        grpc_response(&answer.body).ok_or("invalid response")?
    };
    let told = response.partial_success.unwrap_or_default();
    let rejected = u64::try_from(told.rejected_spans).unwrap_or(0);
    Ok(Taken { rejected, message: format!("{rejected} spans rejected ({})", shown(told.error_message.as_bytes())) })
}

fn grpc_status(answer: &Answer) -> Result<(), String> {
    // A response without a body has the status in its head.
    let trailers = answer.trailers.iter().map(|(name, value)| (&name[..], &value[..]));
    let fields = answer.head.fields.iter().map(|field| (&field.name[..], &field.value[..]));
    let all: Vec<(&[u8], &[u8])> = trailers.chain(fields).collect();
    let find = |wanted: &[u8]| all.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| *value);
    match find(b"grpc-status") {
        None => Err("no \"grpc-status\" in the response".to_owned()),
        Some(b"0") => Ok(()),
        Some(status) => {
            let message = find(b"grpc-message").unwrap_or_default();
            Err(format!("gRPC status {} ({})", shown(status), shown(message)))
        }
    }
}

fn grpc_response(body: &[u8]) -> Option<ExportTraceServiceResponse> {
    let (&[compressed, length @ ..], message) = body.split_first_chunk::<GRPC_PREFIX_BYTES>()?;
    let is_whole = compressed == 0 && u32::from_be_bytes(length) as usize == message.len();
    ExportTraceServiceResponse::decode(message).ok().filter(|_| is_whole)
}

/// Returns a collector's text for the log.
fn shown(text: &[u8]) -> String {
    text[..text.len().min(TOLD_BYTES_MAX)].escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_of_grpc_is_one_whole_message() {
        assert!(grpc_response(b"\0\0\0\0\0").is_some_and(|response| response.partial_success.is_none()));
        let response = grpc_response(b"\0\0\0\0\x04\x0a\x02\x08\x05").unwrap();
        assert_eq!(response.partial_success.unwrap().rejected_spans, 5);
        for broken in [&b""[..], b"\0\0\0\0", b"\x01\0\0\0\0", b"\0\0\0\0\x01", b"\0\0\0\0\0x", b"\0\0\0\0\x02\x0a\xff"]
        {
            assert!(grpc_response(broken).is_none(), "{broken:?}");
        }
    }

    #[test]
    fn words_of_a_collector_are_short_and_without_control_characters() {
        assert_eq!(shown(b"no\r\n\xff"), "no\\r\\n\\xff");
        assert_eq!(shown(&[b'x'; 1000]).len(), TOLD_BYTES_MAX);
    }
}
