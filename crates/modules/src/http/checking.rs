//! Common part of health checks in http: the service, and a client with connections of its own, which may be kept from
//! one check to the next.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_config::Diagnostic;
use gale_engine::configuration::{Builder, Configuration, ScopeId, ServerId};
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::request::configuration::HttpConfiguration;
use gale_http::request::own::{OwnRequest, OwnRequests};
use gale_http_upstream::client::{Answer, ClientConnection, ClientError, ClientRequest, Patience};
use gale_http_upstream::settings::UpstreamSettings;
use gale_http_upstream::{Http2Client, Http2Request, PassingTls};
use gale_runtime::{Bytes, ConnectOptions, Moment, SocketAddress, now};
use gale_upstream::{Check, CheckId, CheckedPeer, UpstreamId};
use gale_worker::Worker;
use gale_worker::service::{Context, Service, ServiceSpec};

use crate::shared::health_check::{Asks, CheckLog, Failed, Rules, run};

/// A check of the peers of a location's group: its request, and the judgement of responses.
pub(crate) trait Question: Send + Sync + 'static {
    /// Returns the parameters that all checks have.
    fn rules(&self) -> &Rules;

    /// Returns the server and the scope of the check.
    fn location(&self) -> (ServerId, ScopeId);

    /// Returns the name of the `match` block; empty for none.
    fn matches(&self) -> &BStr {
        BStr::new("")
    }

    fn ask(
        &self,
        worker: &Rc<Worker>,
        peer: &CheckedPeer,
        request: &mut OwnRequest,
        kept: &mut Option<Kept>,
    ) -> impl Future<Output = Result<(), Failure>>;
}

/// Reason why a check failed.
pub(crate) enum Failure {
    /// There is no response.
    Client(ClientError),
    /// The request cannot be built.
    Request(String),
    /// The response does not match.
    Answer(Failed),
}

/// Adds a check of this group.
pub(crate) fn add<Q: Question>(builder: &mut Builder, group: UpstreamId, question: Q) -> Result<(), Diagnostic> {
    let Rules { before, span, .. } = *question.rules();
    let id = builder.http_mut().upstreams.add_check(group, before, span);
    let name = format!("health check {} of http upstreams", id.0 + 1);
    builder.add_service(ServiceSpec::per_process(name, HealthCheck { id, question }), span)
}

struct HealthCheck<Q> {
    id: CheckId,
    question: Q,
}

impl<Q: Question> Service for HealthCheck<Q> {
    async fn run(context: Context<HealthCheck<Q>>) {
        let Some(configuration) = context.configuration::<Configuration>() else { return };
        let settings = context.settings();
        let http: Arc<HttpConfiguration> = configuration.protocol().expect("a part of an http block");
        let (server, scope) = settings.question.location();
        let asks = Checks {
            check: http.upstreams.check(settings.id).clone(),
            requests: OwnRequests::new(context.worker(), configuration, server, scope),
            worker: Rc::clone(context.worker()),
            settings,
        };
        drop(http);
        run(&context, asks).await;
    }
}

/// State that the checks of a service share.
struct Checks<Q> {
    settings: Arc<HealthCheck<Q>>,
    check: Check,
    requests: OwnRequests,
    worker: Rc<Worker>,
}

impl<Q: Question> Asks for Checks<Q> {
    type Kept = Option<Kept>;

    fn check(&self) -> &Check {
        &self.check
    }

    fn rules(&self) -> &Rules {
        self.settings.question.rules()
    }

    async fn ask(&self, peer: &CheckedPeer, kept: &mut Option<Kept>) {
        let question = &self.settings.question;
        let mut request = self.requests.begin();
        let result = question.ask(&self.worker, peer, &mut request, kept).await;
        let (log, matches) = (&request.scope().error_log, question.matches());
        let log = CheckLog { log, check: &self.check, peer, matches };
        let result = match result {
            Ok(()) => Ok(()),
            // This local error says nothing about the peer.
            Err(Failure::Client(ClientError::NoConnections)) => return self.worker.complain_of_connections(),
            Err(Failure::Request(error)) => {
                return log.write(Level::Error, &format_args!("{error} while preparing a request to an upstream"));
            }
            Err(Failure::Client(error)) => Err(Failed { text: error.to_string(), action: error.step().text() }),
            Err(Failure::Answer(failed)) => Err(failed),
        };
        log.note(result, question.rules().thresholds);
    }
}

/// A connection kept between checks, and the time of its creation.
pub(crate) struct Kept {
    connection: Connection,
    since: Moment,
}

enum Connection {
    Http1(ClientConnection),
    Http2(Http2Client),
}

/// The request to a peer.
pub(crate) enum Asking {
    Http1(ClientRequest),
    Http2 {
        head: Http2Request,
        body: Option<Bytes>,
        /// Maximum length of the response's head, in bytes.
        head_max: usize,
        /// Maximum length of the body that is kept, in bytes.
        body_max: usize,
    },
}

/// Connection settings of a check.
pub(crate) struct Way<'w> {
    pub worker: &'w Rc<Worker>,
    pub address: SocketAddress,
    pub options: ConnectOptions,
    /// Bytes sent first, in the clear: the header of the PROXY protocol, or nothing.
    pub header: Vec<u8>,
    pub tls: Option<PassingTls>,
    pub patience: Patience,
    /// Maximum age of a connection that is reused.
    pub keepalive_time: Duration,
}

/// Returns the timeouts of the settings.
pub(crate) fn patience(settings: &UpstreamSettings) -> Patience {
    let (send, read) = (*settings.exchange.send_timeout.get(), *settings.exchange.read_timeout.get());
    Patience { send, read, whole: send.saturating_add(read) }
}

/// Returns the TLS settings for a peer, whose name in the URL is `host`.
pub(crate) fn tls(request: &Request, settings: &UpstreamSettings, host: &[u8]) -> PassingTls {
    let mut tls = PassingTls::new(settings, host);
    tls.evaluate(request, settings);
    tls
}

impl Way<'_> {
    /// Sends the request to the peer, on the kept connection if that can be reused.
    ///
    /// # Errors
    /// The reason why there is no response.
    pub async fn ask(&self, asking: &Asking, kept: &mut Option<Kept>) -> Result<Answer, ClientError> {
        let is_fresh = |kept: &Kept| now().since(kept.since) < self.keepalive_time && kept.connection.is_idle();
        let mut used = kept.take().filter(is_fresh);
        let (answer, connection, since) = loop {
            let is_reused = used.is_some();
            let Kept { connection, since } = match used.take() {
                Some(kept) => kept,
                None => Kept { connection: self.open(asking).await?, since: now() },
            };
            match connection.ask(asking, self.patience).await {
                Ok((answer, connection)) => break (answer, connection, since),
                // The server may have closed the kept connection meanwhile.
                Err(ClientError::Closed(_) | ClientError::Failed(..)) if is_reused => {}
                Err(error) => return Err(error),
            }
        };
        *kept = connection.filter(|_| !self.keepalive_time.is_zero()).map(|connection| Kept { connection, since });
        Ok(answer)
    }

    async fn open(&self, asking: &Asking) -> Result<Connection, ClientError> {
        let header = self.header.clone();
        let opened =
            ClientConnection::open(self.worker, &self.address, &self.options, header, self.tls.as_ref()).await?;
        Ok(match asking {
            Asking::Http1(_) => Connection::Http1(opened),
            Asking::Http2 { head_max, .. } => {
                Connection::Http2(Http2Client::begin(self.worker, &self.address, opened, *head_max))
            }
        })
    }
}

impl Connection {
    fn is_idle(&self) -> bool {
        match self {
            Connection::Http1(connection) => connection.is_idle(),
            Connection::Http2(connection) => connection.is_idle(),
        }
    }

    /// Returns the response, and the connection if it can be reused.
    async fn ask(self, asking: &Asking, patience: Patience) -> Result<(Answer, Option<Connection>), ClientError> {
        match (self, asking) {
            (Connection::Http1(connection), Asking::Http1(request)) => {
                let (answer, connection) = connection.ask(request, patience).await?;
                Ok((answer, connection.map(Connection::Http1)))
            }
            (Connection::Http2(connection), Asking::Http2 { head, body, body_max, .. }) => {
                let answer = connection.ask(head, body.clone(), *body_max, patience).await?;
                Ok((answer, Some(Connection::Http2(connection))))
            }
            (Connection::Http1(_) | Connection::Http2(_), _) => unreachable!("a check has one version"),
        }
    }
}
