//! Connects to a chosen server, including the TLS handshake, for every protocol. Failures are logged.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::variables::subject::Subject;
use gale_runtime::{ConnectError, ConnectOptions, ConnectStep, Connecting, SocketAddress, Stream, Timer};
use gale_tls::{TlsClient, TlsFailure, TlsStream};
use gale_worker::traffic::{Handshakes, Shaken};

/// Activity named in messages.
pub const CONNECTING: &str = "connecting to upstream";

/// Activity named in messages.
pub const SHAKING_HANDS: &str = "SSL handshaking to upstream";

/// Reason why a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The server did not answer in time.
    TimedOut,
    /// The server refused or is unreachable.
    Refused,
    /// This machine cannot connect; another server would not help.
    Local,
}

/// Connects to a server for a subject; messages call the server `name`.
///
/// # Errors
/// Why the connection failed.
pub async fn connect<S: Subject>(
    subject: &S,
    options: &ConnectOptions,
    address: &SocketAddress,
    name: &str,
) -> Result<Stream, ConnectFailure> {
    let connecting = begin(subject, options, address, name)?;
    finish(subject, connecting, address, name).await
}

/// Begins to connect to a server, as [`connect`] does; done at once if nothing has to be awaited.
///
/// # Errors
/// Why the connection failed.
pub fn begin<S: Subject>(
    subject: &S,
    options: &ConnectOptions,
    address: &SocketAddress,
    name: &str,
) -> Result<Connecting, ConnectFailure> {
    options.begin(address).map_err(|failed| not_connected(subject, address, name, &failed))
}

/// Completes a connection that [`begin`] has begun.
///
/// # Errors
/// Why the connection failed.
pub async fn finish<S: Subject>(
    subject: &S,
    connecting: Connecting,
    address: &SocketAddress,
    name: &str,
) -> Result<Stream, ConnectFailure> {
    connecting.finish().await.map_err(|failed| not_connected(subject, address, name, &failed))
}

fn not_connected<S: Subject>(
    subject: &S,
    address: &SocketAddress,
    name: &str,
    failed: &ConnectError,
) -> ConnectFailure {
    if failed.error.kind() == io::ErrorKind::TimedOut {
        log_timeout(subject, CONNECTING);
        return ConnectFailure::TimedOut;
    }
    let (step, error) = (failed.step, OsErrorText(&failed.error));
    // As in nginx a local failure is worse than an unavailable server.
    let level = match (failed.step, failed.error.kind()) {
        (ConnectStep::Connect, io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => Level::Crit,
        (ConnectStep::Connect, _) => Level::Error,
        _ => Level::Crit,
    };
    let is_unix = address.inet().is_none() && failed.step == ConnectStep::Connect;
    let (to, name) = if is_unix { (" to ", name) } else { ("", "") };
    subject.log(level, format_args!("{step}{to}{name} failed {error} while {CONNECTING}"));
    match failed.step {
        ConnectStep::Connect => ConnectFailure::Refused,
        _ => ConnectFailure::Local,
    }
}

/// Performs the handshake with the server of this name within `timeout`, and counts its outcome.
///
/// # Errors
/// The handshake timed out or failed.
pub async fn shake_hands<S: Subject>(
    subject: &S,
    client: &TlsClient,
    name: &[u8],
    stream: Stream,
    timeout: Duration,
    figures: &Handshakes,
) -> Result<TlsStream, ConnectFailure> {
    let failed = |failure: TlsFailure| {
        figures.count(failure.outcome());
        failure.unverified().into_iter().for_each(|reason| figures.count_unverified(reason));
        if failure == TlsFailure::WrongName {
            let name = BStr::new(name);
            subject.log(Level::Error, format_args!("{failure} \"{name}\" while {SHAKING_HANDS}"));
        } else {
            let level = if failure.is_usual() { Level::Error } else { Level::Crit };
            subject.log(level, format_args!("{failure} while {SHAKING_HANDS}"));
        }
        ConnectFailure::Refused
    };
    let stream = TlsStream::connect(stream, client, name).map_err(failed)?;
    let mut patience = Timer::after(timeout);
    let shaken = poll_fn(|context| match stream.poll_handshake(context) {
        Poll::Ready(shaken) => Poll::Ready(Some(shaken)),
        Poll::Pending => patience.poll_expired(context).map(|()| None),
    });
    match shaken.await {
        Some(Ok(())) => {
            figures.count(if stream.is_resumed() { Shaken::Resumed } else { Shaken::Full });
            Ok(stream)
        }
        Some(Err(failure)) => Err(failed(failure)),
        None => {
            figures.count(Shaken::TimedOut);
            log_timeout(subject, SHAKING_HANDS);
            Err(ConnectFailure::TimedOut)
        }
    }
}

/// Logs a timeout of the server.
pub fn log_timeout<S: Subject>(subject: &S, action: &str) {
    subject.log(Level::Error, format_args!("upstream timed out (110: Connection timed out) while {action}"));
}
