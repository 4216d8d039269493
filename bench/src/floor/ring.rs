//! Floor with io_uring, in the fastest form that was found.
//!
//! Keep-alive connections use multishot accept into direct descriptors, multishot receive, and queued sends. Short
//! connections use a chain of receive, send and close, which has no completion unless it fails.

use std::io;
use std::net::TcpListener;
use std::os::fd::AsRawFd;

use io_uring::types::Fd;

use super::Mode;
use crate::ring::{Kind, Ring};

pub fn serve(listener: &TcpListener, mode: Mode, answer: &'static [u8]) -> io::Result<()> {
    let mut ring = Ring::new(descriptors_max())?;
    let listener = Fd(listener.as_raw_fd());
    let mut completions = Vec::new();
    ring.accept_all(listener)?;
    loop {
        ring.wait(&mut completions)?;
        for completion in completions.drain(..) {
            match (completion.kind, mode) {
                (Kind::Accept, _) => {
                    if !completion.goes_on {
                        ring.accept_all(listener)?;
                    }
                    let Ok(connection) = u32::try_from(completion.result) else {
                        continue;
                    };
                    match mode {
                        Mode::KeepAlive => ring.receive_all(connection)?,
                        Mode::Close => ring.receive_send_close(connection, answer)?,
                    }
                }
                (Kind::Receive, Mode::KeepAlive) if completion.result > 0 => {
                    if !completion.goes_on {
                        ring.receive_all(completion.connection)?;
                    }
                    ring.send(completion.connection, answer)?;
                }
                // The last operation of a failed chain: closes the connection.
                (Kind::Receive, Mode::KeepAlive) | (Kind::Close, Mode::Close) => ring.close(completion.connection)?,
                // A failure, which the receive or close reports, too.
                _ => {}
            }
        }
    }
}

/// Returns the size of the table of direct descriptors, which the kernel limits to the process's descriptor limit.
pub(super) fn descriptors_max() -> u32 {
    const ENOUGH: u64 = 1 << 15;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(ENOUGH, |limit| limit.min(ENOUGH)) as u32
}
