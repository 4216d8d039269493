//! Tries servers until one is connected, and hands the session over to what carries it.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html#proxy_next_upstream>)

use std::sync::Arc;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::tls::TlsStream;
use gale_engine::transport::Transport;
use gale_engine::upstream::connecting::{self, CONNECTING, ConnectFailure, SHAKING_HANDS, shake_hands};
use gale_engine::upstream::{Chosen, PassTarget, PeerName, Retry, Selection, without_port};
use gale_engine::variables::subject::Subject;
use gale_engine::worker::CountedConnection;
use gale_runtime::{Moment, Output, Stream};

use super::settings::ProxySettings;
use super::{datagrams, relay};
use crate::session::phases::LocalBoxFuture;
use crate::session::{self, Session};

/// A server that a session is connected to.
pub(super) struct Server {
    /// The connection.
    pub transport: Transport,
    /// The header of the PROXY protocol that goes first, if it has not gone yet.
    pub header: Vec<u8>,
    /// Where the session belongs in its group.
    pub chosen: Chosen,
    pub counted: Option<CountedConnection>,
}

/// Why there is no connection to a server.
pub(super) enum Failure {
    /// Another one may be tried.
    OfServer,
    /// No other server would do better; this is the status.
    Final(u16),
}

/// Passes a session on; the result is its status. The error log knows what went wrong.
///
/// Both steps are in boxes of their own: a session may be idle for days, and needs nothing then of what connected it.
pub async fn pass_on(session: &mut Session, settings: &ProxySettings) -> u16 {
    // Once a server has it, its memory is free again.
    let input = std::mem::take(&mut session.input);
    let session: &Session = session;
    let carrying: LocalBoxFuture<'_, u16> = match Box::pin(open(session, settings)).await {
        Ok(Connected::Stream(server)) => Box::pin(relay::carry(session, settings, server, input)),
        Ok(Connected::Datagrams(outlet)) => Box::pin(datagrams::carry(session, settings, outlet)),
        Err(status) => return status,
    };
    let status = carrying.await;
    end_attempt(session);
    status
}

/// Tries servers until one is connected; the error is the status that the session ends with.
async fn open(session: &Session, settings: &ProxySettings) -> Result<Connected, u16> {
    session.attempts.begin();
    let pass = settings.pass.as_ref().expect("a server that passes sessions on says where");
    let Ok(target) = pass.resolve(session).await else { return Err(session::INTERNAL_SERVER_ERROR) };
    let mut attempts = Attempts::new(session, settings, target);
    loop {
        let chosen = attempts.next().await?;
        let passed = if session.datagrams().is_some() {
            datagrams::open(session, settings, chosen)
        } else {
            attempts.connect(chosen).await
        };
        let failed = match passed {
            Ok(connected) => return Ok(connected),
            Err(failed) => failed,
        };
        end_attempt(session);
        let (mut chosen, failure) = failed;
        chosen.note_served(&session.attempts.last().served());
        if let Failure::Final(status) = failure {
            return Err(status);
        }
        if chosen.fail() {
            let message = format_args!("upstream server temporarily disabled while {CONNECTING}");
            session.log(Level::Warn, message);
        }
        drop(chosen);
        if !attempts.may_go_on() {
            return Err(session::BAD_GATEWAY);
        }
    }
}

/// What a session goes on with.
pub(super) enum Connected {
    Stream(Server),
    Datagrams(datagrams::Server),
}

fn end_attempt(session: &Session) {
    session.attempts.last().end(gale_runtime::now());
}

/// The tries of one session.
struct Attempts<'s> {
    session: &'s Session,
    settings: &'s ProxySettings,
    target: PassTarget,
    selection: Selection,
    began: Moment,
}

impl<'s> Attempts<'s> {
    fn new(session: &'s Session, settings: &'s ProxySettings, target: PassTarget) -> Attempts<'s> {
        let mut selection = target.select(session);
        let tries_max = usize::try_from(*settings.next_upstream_tries.get()).unwrap_or(usize::MAX);
        if tries_max > 0 {
            selection.limit_tries(tries_max);
        }
        Attempts { session, settings, target, selection, began: gale_runtime::now() }
    }

    /// The next server; the error is the status that the session ends with.
    async fn next(&mut self) -> Result<Chosen, u16> {
        let started = gale_runtime::now();
        let chosen = match self.selection.next() {
            // Only a group with a queue pays for waiting.
            Err(_) if self.selection.can_wait() => Box::pin(self.selection.wait()).await,
            chosen => chosen,
        };
        match chosen {
            Ok(chosen) => {
                self.session.attempts.add(Arc::clone(chosen.shared_name()), started);
                Ok(chosen)
            }
            Err(none) => {
                self.session.attempts.add(PeerName::of_group(self.selection.group_name()), started);
                end_attempt(self.session);
                self.session.log(Level::Error, format_args!("{none} while {CONNECTING}"));
                Err(session::BAD_GATEWAY)
            }
        }
    }

    /// Whether another server is tried.
    fn may_go_on(&self) -> bool {
        let time_max = *self.settings.next_upstream_timeout.get();
        let is_in_time = time_max.is_zero() || gale_runtime::now().since(self.began) < time_max;
        if self.selection.tries_left() == 0 || !*self.settings.next_upstream.get() || !is_in_time {
            return false;
        }
        match self.selection.take_retry() {
            Retry::Granted => true,
            Retry::Refused { is_news } => {
                if is_news {
                    let group = self.selection.group_name();
                    let message =
                        format_args!("retry budget of upstream \"{group}\" is used up, no other server is tried");
                    self.session.log(Level::Warn, message);
                }
                false
            }
        }
    }

    async fn connect(&self, mut chosen: Chosen) -> Result<Connected, (Chosen, Failure)> {
        match self.connect_to(&mut chosen).await {
            Ok((transport, header, counted)) => {
                Ok(Connected::Stream(Server { transport, header, chosen, counted: Some(counted) }))
            }
            Err(failure) => Err((chosen, failure)),
        }
    }

    async fn connect_to(&self, chosen: &mut Chosen) -> Result<(Transport, Vec<u8>, CountedConnection), Failure> {
        let Attempts { session, settings, .. } = self;
        let counted = count_connection(session)?;
        let options = settings.connect_options(session);
        let stream = connecting::connect(*session, &options, chosen.address(), chosen.name()).await;
        let stream = stream.map_err(|failure| match failure {
            ConnectFailure::Local => Failure::Final(session::INTERNAL_SERVER_ERROR),
            ConnectFailure::TimedOut | ConnectFailure::Refused => Failure::OfServer,
        })?;
        let header = settings.proxy_header(session);
        let (transport, header) = if *settings.ssl.get() {
            if chosen.address().inet().is_some() && *session.core().tcp_nodelay.get() {
                // Whether the kernel waits for more is a matter of speed alone. In the clear the relay sees to it.
                let _ = stream.set_nodelay(true);
            }
            // In boxes of their own: what connects in the clear is small without them.
            Box::pin(self.send_header(&stream, header)).await?;
            (Transport::Tls(Box::pin(self.shake_hands(stream, chosen)).await?), Vec::new())
        } else {
            (Transport::Plain(stream), header)
        };
        let time = {
            let mut attempt = session.attempts.last();
            let time = gale_runtime::now().since(attempt.started);
            attempt.connect_time = Some(time);
            time
        };
        chosen.connected(time);
        chosen.note_connected(time);
        chosen.is_there();
        if session.scope().error_log.takes(Level::Info)
            && let Ok(local) = transport.local_address()
        {
            session.log_bare(Level::Info, format_args!("proxy {local} connected to {}", chosen.name()));
        }
        Ok((transport, header, counted))
    }

    /// The header goes in the clear, before the handshake.
    async fn send_header(&self, stream: &Stream, header: Vec<u8>) -> Result<(), Failure> {
        if header.is_empty() {
            return Ok(());
        }
        let length = header.len();
        let mut output = Output::new();
        output.push(header);
        let timeout = *self.settings.timeout.get();
        match gale_runtime::timeout(timeout, stream.send_all(&mut output)).await {
            Ok(Ok(())) => {
                self.session.attempts.last().bytes_sent += length as u64;
                Ok(())
            }
            Ok(Err(error)) => {
                let error = OsErrorText(&error);
                self.session.log(Level::Error, format_args!("send() failed {error} while {CONNECTING}"));
                Err(Failure::Final(session::OK))
            }
            Err(_) => {
                connecting::log_timeout(self.session, CONNECTING);
                Err(Failure::OfServer)
            }
        }
    }

    async fn shake_hands(&self, stream: Stream, chosen: &Chosen) -> Result<Box<TlsStream>, Failure> {
        let client = self.settings.tls_client(self.session).await.map_err(|failure| {
            self.session.log(Level::Error, format_args!("{failure} while {SHAKING_HANDS}"));
            Failure::Final(session::INTERNAL_SERVER_ERROR)
        })?;
        let name = self.settings.tls_name(self.session, self.target.name(self.session));
        // As in nginx this may take as long again as connecting.
        let timeout = *self.settings.connect_timeout.get();
        match shake_hands(self.session, &client, without_port(&name), stream, timeout, chosen.handshakes()).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(_) => Err(Failure::OfServer),
        }
    }
}

/// One more connection, if there may be one more.
fn count_connection(session: &Session) -> Result<CountedConnection, Failure> {
    let worker = session.worker();
    CountedConnection::open(worker).ok_or_else(|| {
        worker.complain_of_connections();
        Failure::Final(session::SERVICE_UNAVAILABLE)
    })
}
