//! The statistics of the worker process, sent to clients of the control socket.
//!
//! The master passes on the client's socket. A separate thread collects and sends the statistics, so that neither the
//! control thread nor a loop waits for a long list or a slow reader.

use gale_base::log_level::Level;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Control;
use crate::control::Ending;
use crate::errors::errno_text;
use crate::program::Program;

/// Maximum number of simultaneous clients: each holds the whole text.
const ASKING_MAX: usize = 4;

/// Maximum time for a client to read the whole answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes sent between two checks of the deadline.
const PIECE_BYTES: usize = 64 * 1024;

/// Number of clients being answered.
static ASKING: AtomicUsize = AtomicUsize::new(0);

/// A client being answered; dropping it frees its place.
struct Asker;

impl Asker {
    fn admit() -> Option<Asker> {
        let has_room = ASKING.fetch_add(1, Ordering::Relaxed) < ASKING_MAX;
        let asker = Asker;
        has_room.then_some(asker)
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        ASKING.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<P: Program> Control<P> {
    /// Answers a client. `socket` is `None` if this process had no free descriptor for it: the client sees the
    /// connection closed.
    pub(super) fn tell_figures(&self, socket: Option<OwnedFd>) {
        let Some(socket) = socket else { return };
        let mut stream = UnixStream::from(socket);
        let Some(asker) = Asker::admit() else { return refuse(&mut stream, "too many requests at a time") };
        let (program, configuration) = (Arc::clone(&self.program), Arc::clone(&self.configuration));
        let tell = move || {
            let _asker = asker;
            let figures = program.figures(&configuration);
            // Released before sending, since the client may read slowly.
            drop(configuration);
            match figures {
                // A disconnected client is ignored.
                Some(text) => drop(send(&mut stream, Ending::Done, &text)),
                None => refuse(&mut stream, "this program provides none"),
            }
        };
        if let Err(error) = thread::Builder::new().name("status".into()).spawn(tell) {
            self.log.write(Level::Alert, &format!("pthread_create() failed{}", errno_text(&error)));
        }
    }
}

fn refuse(stream: &mut UnixStream, why: &str) {
    // Fits into the buffer of a fresh socket.
    let _ = send(stream, Ending::Refused, &format!("{why}\n"));
}

/// Sends an answer before the deadline, in blocking mode, which the socket may not have been in.
fn send(stream: &mut UnixStream, ending: Ending, text: &str) -> io::Result<()> {
    let until = Instant::now() + SEND_TIMEOUT;
    stream.set_nonblocking(false)?;
    for mut piece in std::iter::once(ending.line().as_bytes()).chain(text.as_bytes().chunks(PIECE_BYTES)) {
        while !piece.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_write_timeout(Some(left))?;
            match stream.write(piece) {
                Ok(sent) => piece = &piece[sent..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
