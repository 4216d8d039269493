//! Tries servers until one is connected, then relays the session to it.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html#proxy_next_upstream>)

use std::sync::Arc;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::variables::subject::Subject;
use gale_runtime::{Moment, Output, Stream};
use gale_tls::TlsStream;
use gale_tls::Transport;
use gale_upstream::connecting::{self, CONNECTING, ConnectFailure, SHAKING_HANDS, shake_hands};
use gale_upstream::{Chosen, PassTarget, PeerName, Retry, Selection, without_port};
use gale_worker::CountedConnection;

use super::settings::ProxySettings;
use super::{datagrams, relay};
use crate::session::phases::LocalBoxFuture;
use crate::session::{self, Session};

/// A server that a session is connected to.
pub(super) struct Server {
    pub transport: Transport,
    /// PROXY protocol header that is still to be sent.
    pub header: Vec<u8>,
    /// The server as selected from its group.
    pub chosen: Chosen,
    pub counted: Option<CountedConnection>,
}

/// Reason why a connection could not be made.
pub(super) enum Failure {
    /// The server's fault; another server may be tried.
    OfServer,
    /// Another server would fail, too. Holds the status.
    Final(u16),
}

/// Passes a session to a server and returns its status. Failures are logged.
///
/// Connecting and relaying are boxed separately: a session may be idle for days, and the memory for connecting is not
/// needed then.
pub async fn pass_on(session: &mut Session, settings: &ProxySettings) -> u16 {
    // Taken from the session, so that its memory is freed when the server has received it.
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

/// Tries servers until one is connected. The error is the final status of the session.
async fn open(session: &Session, settings: &ProxySettings) -> Result<Connected, u16> {
    session.attempts.begin();
    let pass = settings.pass.as_ref().expect("a server with proxy_pass has a target");
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

pub(super) enum Connected {
    Stream(Server),
    Datagrams(datagrams::Server),
}

fn end_attempt(session: &Session) {
    session.attempts.last().end(gale_runtime::now());
}

/// Selection of servers for one session.
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

    /// Selects the next server. The error is the final status of the session.
    async fn next(&mut self) -> Result<Chosen, u16> {
        let started = gale_runtime::now();
        let chosen = match self.selection.next() {
            // Boxed, because only groups with a queue wait.
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

    /// Returns true if another server may be tried.
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
                // A failure costs only speed. Without TLS the relay sets it.
                let _ = stream.set_nodelay(true);
            }
            // Boxed to keep the future small for connections without TLS.
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

    /// Sends the PROXY protocol header in the clear, before the handshake.
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
        // The handshake has a time limit of its own, of the same length as that of connecting, as in nginx.
        let timeout = *self.settings.connect_timeout.get();
        match shake_hands(self.session, &client, without_port(&name), stream, timeout, chosen.handshakes()).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(_) => Err(Failure::OfServer),
        }
    }
}

/// Reserves a connection. At the limit, idle ones are closed for it, among them UDP sessions.
fn count_connection(session: &Session) -> Result<CountedConnection, Failure> {
    let worker = session.worker();
    CountedConnection::open(worker).ok_or_else(|| {
        worker.complain_of_connections();
        Failure::Final(session::SERVICE_UNAVAILABLE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn future_bytes<A, F: Future>(_function: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn future_of_connecting_is_small() {
        let bytes = future_bytes(|(session, settings)| open(session, settings));
        assert!(bytes <= 1024, "the future has {bytes} bytes");
    }
}
