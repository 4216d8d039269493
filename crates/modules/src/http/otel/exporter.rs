//! `otel_exporter { … }`: the collector of traces, and the service that sends them, one for each event loop.
//!   endpoint ADDRESS;                 [http[s]://]HOST[:PORT] or unix:PATH for gRPC; with a path, OTLP over HTTP
//!   interval TIME;                    5s
//!   batch_size N;                     512
//!   batch_count N;                    4
//!   header NAME VALUE;
//!   trusted_certificate FILE;
//! (<https://nginx.org/en/docs/ngx_otel_module.html#otel_exporter>)
//!
//! A batch is sent when it is full, or at the interval. At most one is in flight, for at most ten seconds; a batch is
//! sent a second time only if the collector had closed the connection. Failures are logged once per interval.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use bstr::{BStr, BString, ByteSlice};
use gale_base::log_level::Level;
use gale_config::server_address::ServerAddress;
use gale_config::{Diagnostic, Setting, Span, Statement, Word, values};
use gale_engine::configuration::Builder;
use gale_engine::virtual_servers::TlsClientDraft;
use gale_http::configuration::builder::InHttp;
use gale_protocol::request::{KnownHeader, Scheme};
use gale_runtime::{Moment, now, sleep, timeout};
use gale_tls::TlsClient;
use gale_tls::settings::{TlsClientSettings, Versions};
use gale_worker::service::{Context, Service, ServiceSpec};
use gale_worker::totals_by_worker;

use super::collector::{Collector, Taken};
use super::messages::{
    ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans, utf8,
};
use super::queue::{EXPORTED, Limits, Queue, SPANS};
use crate::shared::check_row;

/// Default port of OTLP over gRPC; over TLS gRPC's default is that of HTTPS.
const PORT_DEFAULT: u16 = 4317;

const INTERVAL_DEFAULT: Duration = Duration::from_secs(5);
const BATCH_SIZE_DEFAULT: u64 = 512;
const BATCH_COUNT_DEFAULT: u64 = 4;

/// Maximum number of certificates between the collector's and a trusted one.
const VERIFY_DEPTH: u64 = 10;

/// Time that a stopping service spends on requests in flight and waiting spans; it is given five seconds.
const END_TIME_MAX: Duration = Duration::from_secs(4);

/// Interval at which a stopping service checks for them.
const END_INTERVAL: Duration = Duration::from_millis(50);

/// The complete settings.
pub(super) struct Exporter {
    pub endpoint: Endpoint,
    pub limits: Limits,
    pub headers: Vec<(String, String)>,
    interval: Duration,
    resource: Resource,
}

/// Address of the collector.
#[derive(Clone)]
pub(super) struct Endpoint {
    pub address: ServerAddress,
    /// Host and port: `Host`, `:authority`.
    pub authority: String,
    /// Path of OTLP over HTTP; `None` for gRPC.
    pub path: Option<String>,
    /// TLS settings, once their files have been read.
    pub tls: Option<Arc<OnceLock<Arc<TlsClient>>>>,
}

/// The block while it is parsed.
#[derive(Default)]
pub(super) struct Draft {
    endpoint: Setting<Word>,
    interval: Setting<Duration>,
    batch_size: Setting<u64>,
    batch_count: Setting<u64>,
    trusted_certificate: Setting<Word>,
    headers: Vec<(String, String)>,
    span: Option<Span>,
    parsed: Option<Endpoint>,
}

/// Parses `otel_exporter { … }`.
pub(super) fn exporter_block(builder: &mut Builder, statement: &Statement) -> Result<Draft, Diagnostic> {
    let mut draft = Draft { span: Some(statement.span), ..Draft::default() };
    for row in statement.body() {
        draft.take(builder, row)?;
    }
    let missing = || {
        let end = statement.block_end.unwrap_or(statement.span);
        Diagnostic::emerg("\"otel_exporter\" requires \"endpoint\"").at(end)
    };
    let word = draft.endpoint.take().ok_or_else(missing)?;
    let mut endpoint = Endpoint::parse(&word.text).map_err(|why| match why {
        "" => missing(),
        why => Diagnostic::emerg(format!("{why} in \"{}\"", word.text)).at(word.span),
    })?;
    if let Some(tls) = &mut endpoint.tls {
        let settings = tls_settings(endpoint.path.is_none(), draft.trusted_certificate.take());
        let client = Arc::clone(tls);
        builder.http_mut().tls_clients.push(TlsClientDraft { settings, prefix: "otel_exporter", client });
    }
    builder.reach.connects_to_any_port("otel_exporter");
    draft.parsed = Some(endpoint);
    Ok(draft)
}

impl Draft {
    fn take(&mut self, builder: &mut Builder, row: &Statement) -> Result<(), Diagnostic> {
        check_row(row)?;
        let wrong = |what: &str| row.error(format!("\"{}\" directive of \"otel_exporter\" {what}", row.name.text));
        match (&**row.name.text, row.args.as_slice()) {
            (b"endpoint", [word]) => set(&mut self.endpoint, row, Some(word.clone())),
            (b"interval", [_]) => set(&mut self.interval, row, values::time_ms(row).ok()),
            (b"batch_size", [_]) => set(&mut self.batch_size, row, positive_size(row)),
            (b"batch_count", [_]) => set(&mut self.batch_count, row, positive_size(row)),
            (b"trusted_certificate", [_]) => {
                let path = crate::shared::ssl::path(builder, row)?;
                self.trusted_certificate.set(path, Some(row.span));
                Ok(())
            }
            (b"header", [name, value]) => {
                let name = name.text.to_str_lossy().to_ascii_lowercase();
                if !is_header_name(&name) {
                    return Err(wrong("has invalid header name"));
                }
                if !value.text.iter().all(|byte| matches!(byte, b' '..=b'~')) {
                    return Err(wrong("has invalid header value"));
                }
                self.headers.push((name, value.text.to_str_lossy().into_owned()));
                Ok(())
            }
            (b"endpoint" | b"interval" | b"batch_size" | b"batch_count" | b"trusted_certificate" | b"header", _) => {
                let name = &row.name.text;
                Err(row.error(format!("invalid number of arguments in \"{name}\" directive of \"otel_exporter\"")))
            }
            _ => Err(row.error(format!("unknown directive \"{}\" in \"otel_exporter\"", row.name.text))),
        }
    }

    /// Completes the settings at the end of the http block, and adds the service that uses them. `service_name` is the
    /// value of `otel_service_name`, and whether it was configured.
    pub fn complete(
        mut self,
        attributes: &[(BString, BString)],
        service_name: (&BStr, bool),
        builder: &mut Builder,
    ) -> Result<Arc<Exporter>, Diagnostic> {
        let mut of_resource: BTreeMap<String, String> =
            attributes.iter().map(|(name, value)| (utf8(name), utf8(value))).collect();
        let (name, is_written) = service_name;
        if is_written || !of_resource.contains_key(SERVICE_NAME) {
            of_resource.insert(SERVICE_NAME.to_owned(), utf8(name));
        }
        let attributes = of_resource.iter().map(|(name, value)| KeyValue::text(name, value.as_bytes())).collect();
        let number = |setting: &mut Setting<u64>, default| {
            usize::try_from(setting.take().unwrap_or(default)).unwrap_or(usize::MAX)
        };
        let exporter = Arc::new(Exporter {
            endpoint: self.parsed.expect("set when the block was read"),
            limits: Limits {
                batch_size: number(&mut self.batch_size, BATCH_SIZE_DEFAULT),
                batch_count: number(&mut self.batch_count, BATCH_COUNT_DEFAULT),
            },
            headers: self.headers,
            // With zero the exporter would run all the time.
            interval: self.interval.take().unwrap_or(INTERVAL_DEFAULT).max(Duration::from_millis(1)),
            resource: Resource { attributes },
        });
        let service = ServiceSpec::per_worker("otel exporter", ExportService(Arc::clone(&exporter)));
        builder.add_service(service, self.span.expect("set when the block was read"))?;
        Ok(exporter)
    }
}

const SERVICE_NAME: &str = "service.name";

fn set<T>(setting: &mut Setting<T>, row: &Statement, value: Option<T>) -> Result<(), Diagnostic> {
    let wrong = |what| Err(row.error(format!("\"{}\" directive of \"otel_exporter\" {what}", row.name.text)));
    match value {
        _ if setting.is_set() => wrong("is duplicate"),
        None => wrong("invalid value"),
        Some(value) => {
            setting.set(value, Some(row.span));
            Ok(())
        }
    }
}

fn positive_size(row: &Statement) -> Option<u64> {
    values::size(row).ok().filter(|&size| size > 0)
}

/// Returns `true` for a name that gRPC allows and that does not affect the framing.
fn is_header_name(name: &str) -> bool {
    let is_framing = matches!(
        KnownHeader::from_name(name.as_bytes()),
        Some(
            KnownHeader::Connection
                | KnownHeader::ContentLength
                | KnownHeader::ContentType
                | KnownHeader::Host
                | KnownHeader::Te
                | KnownHeader::TransferEncoding
                | KnownHeader::Upgrade
        )
    );
    let is_part = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    !name.is_empty() && name.bytes().all(is_part) && !is_framing && !name.starts_with("grpc-")
}

/// Returns the TLS settings; as with gRPC, the collector's certificate is always verified.
fn tls_settings(offers_http2: bool, trusted_certificate: Option<Word>) -> TlsClientSettings {
    TlsClientSettings {
        versions: Setting::of(Versions { tls12: true, tls13: true }),
        ciphers: Setting::of(BString::from("DEFAULT")),
        tells_name: Setting::of(true),
        verifies: Setting::of(true),
        verify_depth: Setting::of(VERIFY_DEPTH),
        trusted_certificate: trusted_certificate.map_or_else(Setting::new, Setting::of),
        trusts_system: true,
        reuses_sessions: Setting::of(true),
        offers_http2,
        ..TlsClientSettings::default()
    }
}

impl Endpoint {
    /// Parses an endpoint. The error describes the fault; it is empty if there is no host.
    fn parse(text: &[u8]) -> Result<Endpoint, &'static str> {
        if !text.iter().all(u8::is_ascii_graphic) {
            return Err("invalid endpoint");
        }
        let (is_tls, rest) = match (strip_scheme(text, b"https://"), strip_scheme(text, b"http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => (false, text),
        };
        let is_unix = rest.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"unix:"));
        let path = rest.find_byte(b'/').filter(|_| !is_unix);
        let (server, path) = rest.split_at(path.unwrap_or(rest.len()));
        if server.is_empty() {
            return Err("");
        }
        let port = match (is_tls, path) {
            (true, _) => Scheme::Https.default_port(),
            (false, b"") => PORT_DEFAULT,
            (false, _) => Scheme::Http.default_port(),
        };
        let address = ServerAddress::parse(server, port)?;
        let authority = match &address {
            ServerAddress::Inet(address) => address.to_string(),
            ServerAddress::Host(host, port) => format!("{host}:{port}"),
            ServerAddress::Unix(_) => "localhost".to_owned(),
        };
        let path = (!path.is_empty()).then(|| String::from_utf8_lossy(path).into_owned());
        Ok(Endpoint { address, authority, path, tls: is_tls.then(Arc::default) })
    }

    /// Returns the name that the certificate must match.
    pub fn name(&self) -> String {
        match &self.address {
            ServerAddress::Inet(address) => address.ip().to_string(),
            ServerAddress::Host(host, _) => host.clone(),
            ServerAddress::Unix(_) => "localhost".to_owned(),
        }
    }
}

fn strip_scheme<'t>(text: &'t [u8], scheme: &[u8]) -> Option<&'t [u8]> {
    let (start, rest) = text.split_at_checked(scheme.len())?;
    start.eq_ignore_ascii_case(scheme).then_some(rest)
}

impl Exporter {
    /// Returns the message with these spans.
    fn message(&self, spans: Vec<Vec<u8>>) -> ExportTraceServiceRequest {
        let scope = InstrumentationScope { name: "gale".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
        let resource = Some(self.resource.clone());
        ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { resource, scope_spans }] }
    }
}

struct ExportService(Arc<Exporter>);

impl Service for ExportService {
    async fn run(context: Context<ExportService>) {
        let export = Export::new(context);
        let context = &export.context;
        let overdue = async {
            context.stopping().await;
            sleep(END_TIME_MAX).await;
        };
        either(export.run(), overdue).await;
        export.end();
    }

    /// Always continues, with the connection and the waiting spans.
    fn continues(&self, _earlier: &ExportService) -> bool {
        true
    }
}

/// Completes when one of the futures does.
async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Pending => other.as_mut().poll(context),
        Poll::Ready(()) => Poll::Ready(()),
    })
    .await;
}

/// Exporter of one event loop.
struct Export {
    context: Context<ExportService>,
    queue: Rc<Queue>,
    /// Number of spans in the batch in flight.
    under_way: Cell<usize>,
    told: Told,
}

/// Times of log messages, which are limited to one per interval.
#[derive(Default)]
struct Told {
    failed_at: Cell<Option<Moment>>,
    dropped_at: Cell<Option<Moment>>,
    dropped: Cell<u64>,
}

impl Export {
    fn new(context: Context<ExportService>) -> Export {
        let queue = Queue::of(context.worker());
        // After a panic the batch in flight is still marked as taken.
        queue.sent();
        Export { context, queue, under_way: Default::default(), told: Told::default() }
    }

    async fn run(&self) {
        let mut collector = Collector::default();
        let mut due = now() + self.settings().interval;
        loop {
            let is_last = self.context.is_stopping() && !has_requests();
            let is_due = is_last || self.wait(due).await;
            // At the interval one incomplete batch is sent; spans that arrive meanwhile wait for the next.
            let mut takes_any = is_due;
            while self.queue.has_full(self.settings().limits) || std::mem::take(&mut takes_any) {
                self.send_batch(&mut collector).await;
            }
            if is_due {
                due = now() + self.settings().interval;
            }
            if is_last {
                return;
            }
        }
    }

    /// Sends the oldest batch, if there is one.
    async fn send_batch(&self, collector: &mut Collector) {
        let settings = self.settings();
        if !collector.is_of(&settings) {
            // New settings: the next failure is logged at once, so that the effect of the change can be seen.
            *collector = Collector::of(&settings);
            self.told.failed_at.set(None);
        }
        if let Some(batch) = self.queue.take() {
            self.under_way.set(batch.spans.len());
            let sent = collector.send(&self.context, &settings, settings.message(batch.spans)).await;
            self.note(&settings, sent);
        }
        self.tell_dropped(settings.interval);
    }

    fn settings(&self) -> Arc<Exporter> {
        Arc::clone(&self.context.settings().0)
    }

    /// Waits for a full batch, for new settings, or for the end of the interval. Returns `false` if only a full batch
    /// is to be sent.
    async fn wait(&self, due: Moment) -> bool {
        let limits = self.settings().limits;
        if self.context.is_stopping() {
            // The service stops soon, so incomplete batches are sent, too.
            let _ = timeout(END_INTERVAL, self.queue.filled(limits)).await;
            return true;
        }
        let news = either(self.queue.filled(limits), self.context.changed());
        let _ = self.context.unless_stopping(timeout(due.since(now()), news)).await;
        !self.queue.has_full(limits)
    }

    /// Counts and logs the result of the batch in flight.
    fn note(&self, settings: &Exporter, sent: Result<Taken, String>) {
        self.queue.sent();
        let count = self.under_way.take();
        let (rejected, failure) = match sent {
            Ok(Taken { rejected: 0, .. }) => (0, None),
            Ok(Taken { rejected, message }) => (usize::try_from(rejected).unwrap_or(count).min(count), Some(message)),
            Err(why) => (count, Some(why)),
        };
        SPANS.own().add(EXPORTED, (count - rejected) as u64);
        if rejected > 0 {
            self.queue.count_dropped(rejected);
        }
        if let Some(why) = failure
            && is_time(&self.told.failed_at, settings.interval)
        {
            self.log(Level::Error, &format_args!("OTel export failure: {why}"));
        }
    }

    fn tell_dropped(&self, interval: Duration) {
        let dropped = self.queue.dropped();
        if dropped != self.told.dropped.get() && is_time(&self.told.dropped_at, interval) {
            self.told.dropped.set(dropped);
            self.log(Level::Notice, &format_args!("OTel dropped records: {dropped}"));
        }
    }

    /// Drops and counts everything that was not sent.
    fn end(&self) {
        self.queue.sent();
        self.queue.count_dropped(self.under_way.take());
        self.queue.clear();
        self.tell_dropped(Duration::ZERO);
    }

    fn log(&self, level: Level, message: &dyn Display) {
        self.context.worker().error_log().write(level, None, message);
    }
}

/// Returns `true`, and restarts the interval, if it is over.
fn is_time(last: &Cell<Option<Moment>>, interval: Duration) -> bool {
    let now = now();
    let is_time = last.get().is_none_or(|last| now.since(last) >= interval);
    if is_time {
        last.set(Some(now));
    }
    is_time
}

/// Returns `true` if requests are in flight on this event loop: their spans are still to come.
fn has_requests() -> bool {
    let own = gale_runtime::worker();
    totals_by_worker().iter().any(|(worker, totals)| *worker == own && totals.reading + totals.writing > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Result<(bool, String, Option<String>), &'static str> {
        let endpoint = Endpoint::parse(text.as_bytes())?;
        Ok((endpoint.tls.is_some(), endpoint.authority, endpoint.path))
    }

    #[test]
    fn endpoints_speak_grpc_unless_they_have_a_path() {
        let grpc = |is_tls, authority: &str| Ok((is_tls, authority.to_owned(), None));
        assert_eq!(shown("localhost:4317"), grpc(false, "localhost:4317"));
        assert_eq!(shown("127.0.0.1"), grpc(false, "127.0.0.1:4317"));
        assert_eq!(shown("HTTP://[::1]:1"), grpc(false, "[::1]:1"));
        assert_eq!(shown("https://a.example"), grpc(true, "a.example:443"));
        assert_eq!(shown("unix:/run/collector.sock"), grpc(false, "localhost"));
        let http = |is_tls, authority: &str, path: &str| Ok((is_tls, authority.to_owned(), Some(path.to_owned())));
        assert_eq!(shown("http://a.example:4318/v1/traces"), http(false, "a.example:4318", "/v1/traces"));
        assert_eq!(shown("https://a.example/x?y"), http(true, "a.example:443", "/x?y"));
        assert_eq!(shown("http://a.example/"), http(false, "a.example:80", "/"));
    }

    #[test]
    fn endpoints_that_are_none_are_refused() {
        for text in ["", "http://", "https:///v1/traces"] {
            assert_eq!(shown(text), Err(""), "{text}");
        }
        assert_eq!(shown("a b"), Err("invalid endpoint"));
        assert_eq!(shown("http://a/\r\nx"), Err("invalid endpoint"));
        assert_eq!(shown("a:x"), Err("invalid port"));
        assert_eq!(shown("[::1"), Err("invalid host"));
    }

    #[test]
    fn names_of_fields_are_those_of_grpc() {
        assert!(["authorization", "x-api-key", "a_b.c", "user-agent"].iter().all(|name| is_header_name(name)));
        for name in ["", "a b", "a:b", ":path", "\u{e9}", "content-length", "te", "grpc-timeout", "host"] {
            assert!(!is_header_name(name), "{name}");
        }
    }
}
