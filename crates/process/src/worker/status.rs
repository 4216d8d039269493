//! The figures, told to whoever asks over the control socket.
//!
//! The master has passed on the socket. A thread of its own gathers the figures and sends them, so that neither the
//! control thread nor a loop waits for a long list or for a reader that is slow.

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

/// The most who are told at once: each holds the whole text.
const ASKING_MAX: usize = 4;

/// How long a reader may take for all of it.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// How much is sent between two looks at the time.
const PIECE_BYTES: usize = 64 * 1024;

/// How many are being told.
static ASKING: AtomicUsize = AtomicUsize::new(0);

/// One of those that are being told, until it is dropped.
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
    /// `socket` is none when this process had no room for its descriptor: who asks sees it closed.
    pub(super) fn tell_figures(&self, socket: Option<OwnedFd>) {
        let Some(socket) = socket else { return };
        let mut stream = UnixStream::from(socket);
        let Some(asker) = Asker::admit() else { return refuse(&mut stream, "too many requests at a time") };
        let (program, configuration) = (Arc::clone(&self.program), Arc::clone(&self.configuration));
        let tell = move || {
            let _asker = asker;
            let figures = program.figures(&configuration);
            // Not held for as long as somebody reads.
            drop(configuration);
            match figures {
                // Whoever has left hears nothing.
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
    // Fits into a fresh socket.
    let _ = send(stream, Ending::Refused, &format!("{why}\n"));
}

/// Sends an answer, unless that takes too long. The socket is set to wait, as it may not have been.
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
