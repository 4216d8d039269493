//! Idle connections passed on by another worker process.

use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_process::{Arrivals, Arrived};
use gale_runtime::{Detached, Stream};
use gale_tls::Transport;
use gale_worker::Worker;

use super::acceptor::make_room;
use super::passing::resume_connection;

/// Connections taken before other loops and other work of this one get a turn.
const TAKEN_AT_ONCE: usize = 8;

/// Serves arriving connections until every process that could send some is gone.
pub async fn serve_arrivals(worker: Rc<Worker>, arrivals: Arrivals) {
    if let Err(error) = serve_all(&worker, &arrivals).await {
        let message = format!("idle connections cannot be taken over: {}", OsErrorText(&error));
        worker.error_log().write(Level::Error, None, &message);
    }
}

async fn serve_all(worker: &Rc<Worker>, arrivals: &Arrivals) -> io::Result<()> {
    // Only used to wait; the packets are not a stream.
    let waiting = Stream::from_fd(arrivals.as_fd().try_clone_to_owned()?)?;
    arrivals.announce();
    loop {
        poll_fn(|context| waiting.poll_readable(context)).await?;
        for _ in 0..TAKEN_AT_ONCE {
            match arrivals.take() {
                Ok(Some(arrived)) => serve(worker, arrived),
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => {
                    let message = format!("an idle connection could not be taken over: {}", OsErrorText(&error));
                    worker.error_log().write(Level::Error, None, &message);
                }
            }
        }
        gale_runtime::yield_now().await;
    }
}

fn serve(worker: &Rc<Worker>, Arrived { connection, note, received }: Arrived) {
    let stream = Detached::new(connection, received).attach();
    // A client that has left meanwhile has no address.
    let Ok(remote) = stream.peer_address() else { return };
    make_room(worker);
    resume_connection(worker, Transport::Plain(stream), remote, note);
}
