//! Runs a session: PROXY protocol, phases, content, log. (<https://nginx.org/en/docs/stream/stream_processing.html>)

use std::future::{Future, poll_fn};
use std::rc::Rc;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::variables::subject::Subject;
use gale_worker::traffic::{Nanos, Served};

use super::listed::Listed;
use crate::session::phases::{Flow, Phase};
use crate::session::{self, Session};

/// A running session. Dropping it, for whatever reason, runs the log phase.
struct Running {
    session: Box<Session>,
    /// True once the session is in the active count of its server's zone.
    is_counted: bool,
    /// Declared last, so that the session is dropped before it leaves the table.
    _listed: Rc<Listed>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.session.client(), session::Client::Passed) {
            if self.session.status() == 0 {
                // Closed from outside: by `worker_shutdown_timeout`, or to make room.
                self.session.set_status(session::OK);
            }
            decide(&mut self.session, Phase::Log);
        }
        self.count_end();
    }
}

impl Running {
    /// Counts the session in its server's `status_zone`. Called when the server is known.
    fn count_begin(&mut self) {
        if let Some(zone) = &self.session.stream().server(self.session.server()).zone {
            self.is_counted = true;
            zone.traffic.begin();
        }
    }

    /// Counts the end of the session. A session whose connection was passed on counts as successful.
    fn count_end(&mut self) {
        if !self.is_counted {
            self.count_begin();
        }
        let Some(zone) = &self.session.stream().server(self.session.server()).zone else { return };
        let code = match self.session.status() {
            0 => session::OK,
            status => status,
        };
        zone.traffic.note(&Served {
            code: Some(code),
            received: self.session.received(),
            sent: self.session.sent(),
            first_byte: None,
            whole: Some(Nanos::between(self.session.connection.accepted, gale_runtime::now())),
        });
        zone.traffic.end();
    }
}

/// Runs a session to its end.
pub(super) fn run(session: Box<Session>, listed: Rc<Listed>) -> impl Future<Output = ()> {
    let mut running = Running { session, is_counted: false, _listed: listed };
    async move {
        let status = match advance(&mut running.session).await {
            Ok(()) => {
                running.count_begin();
                serve(&mut running.session).await
            }
            Err(status) => status,
        };
        running.session.set_status(status);
    }
}

/// Runs the phases before the content. The error is the final status of the session.
async fn advance(session: &mut Session) -> Result<(), u16> {
    if session.place().listening.proxy_protocol {
        Box::pin(session.read_proxy_header()).await?;
    }
    for phase in [Phase::PostAccept, Phase::PreAccess, Phase::Access] {
        if let Flow::Finish(status) = decide(session, phase) {
            return Err(status);
        }
    }
    if session.place().listening.ssl {
        Box::pin(session.shake_hands()).await?;
    }
    match decide(session, Phase::Preread) {
        Flow::NeedMore => Box::pin(preread(session)).await?,
        Flow::Finish(status) => return Err(status),
        Flow::Next | Flow::PhaseDone => {}
    }
    match decide(session, Phase::Start) {
        Flow::Finish(status) => Err(status),
        Flow::Next | Flow::PhaseDone | Flow::NeedMore => Ok(()),
    }
}

/// Runs the handlers of a phase. Returns `Next` if all of them did.
fn decide(session: &mut Session, phase: Phase) -> Flow {
    if session.scope().handlers[phase as usize].is_empty() {
        return Flow::Next;
    }
    let configuration = Rc::clone(session.configuration());
    let scope = configuration.stream().scope_of(session.server());
    for bound in &scope.handlers[phase as usize] {
        match bound.handler.decide(session, scope.conf(bound.module)) {
            Flow::Next => {}
            flow => return flow,
        }
    }
    Flow::Next
}

/// Reads the client's first bytes until the handlers have enough.
async fn preread(session: &mut Session) -> Result<(), u16> {
    let timeout = *session.core().preread_timeout.get();
    let reading = async {
        loop {
            let max = usize::try_from(*session.core().preread_buffer_size.get()).unwrap_or(usize::MAX);
            let room = max.saturating_sub(session.input.len());
            if room == 0 {
                session.log(Level::Error, format_args!("preread buffer full while prereading client data"));
                return Err(session::BAD_REQUEST);
            }
            match session.receive_ahead(room).await {
                Ok(0) => return Err(session::OK),
                Ok(_) => {}
                Err(error) => {
                    let error = OsErrorText(&error);
                    session.log(Level::Info, format_args!("recv() failed {error} while prereading client data"));
                    return Err(session::OK);
                }
            }
            match decide(session, Phase::Preread) {
                Flow::NeedMore => {}
                Flow::Finish(status) => return Err(status),
                Flow::Next | Flow::PhaseDone => return Ok(()),
            }
        }
    };
    gale_runtime::timeout(timeout, reading).await.unwrap_or(Err(session::OK))
}

/// Runs the content handler of the session's server.
async fn serve(session: &mut Session) -> u16 {
    let configuration = Rc::clone(session.configuration());
    let scope = configuration.stream().scope_of(session.server());
    match scope.content {
        Some((content, module)) => content.serve(session, scope.conf(module)).await,
        None => session::INTERNAL_SERVER_ERROR,
    }
}

impl Session {
    /// Receives at most `max` bytes and appends them to the input.
    async fn receive_ahead(&mut self, max: usize) -> std::io::Result<usize> {
        let mut input = std::mem::take(&mut self.input);
        let received = match self.transport() {
            Some(transport) => poll_fn(|context| transport.poll_recv(context, &mut input, max)).await,
            None => Ok(0),
        };
        self.input = input;
        if let Ok(count) = received {
            self.count_received(count);
        }
        received
    }
}
