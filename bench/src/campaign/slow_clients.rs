//! slow-clients: thousands of clients whose requests come a byte at a time.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Experiment;
use super::exchange::{Reply, connect, read_reply};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS};
use crate::client::idle;
use crate::client::load::Connection;
use crate::floods::Waits;
use crate::memory;
use crate::servers::{Setting, file_body};

pub const EXPERIMENT: Experiment = Experiment {
    name: "slow-clients",
    does: "10,000 clients (`--slow-clients`) send their requests a byte at a time, all at once.",
    holds: "Each is answered, and a bystander is answered within a second meanwhile.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const REQUEST: &[u8] = b"GET /file HTTP/1.1\r\nHost: b\r\n\r\n";
const PAUSE: Duration = Duration::from_millis(50);
const LIMIT: Duration = Duration::from_secs(20);
/// Buffers of thousands of connections that are kept for the next ones, in MiB.
const GROWTH_MIB_MAX: f64 = 48.0;

fn run(trial: &Trial) -> Result<Outcome, String> {
    let count = trial.options.experiment.slow_clients;
    // A busy machine sends slowly, too.
    let http = "client_header_timeout 10m;".to_owned();
    let watched = trial.start(Setting { connections_max: count + 1000, http, ..Setting::default() })?;
    let tally = Tally::default();
    let (is_over, root) = (AtomicBool::new(false), watched.server.root);
    let (sent, waits, most_kib) = std::thread::scope(|scope| {
        let most = scope.spawn(|| memory::most_pss_kib(root, &is_over));
        let bystander = scope.spawn(|| Waits::until(watched.address(), &is_over));
        let sent = send_slowly(&watched.server.socket_address(), count);
        is_over.store(true, Ordering::Relaxed);
        (sent, bystander.join(), most.join().unwrap_or(0))
    });
    let body = file_body();
    for client in sent? {
        let answer = Connection::over(client, LIMIT).and_then(|mut connection| connection.receive());
        match answer {
            Ok(answer) if answer.status == 200 && answer.body == body => tally.answered_late(),
            Ok(answer) => tally.wrong(format!("status {}, {} bytes", answer.status, answer.body.len())),
            Err(failure) => tally.lost(format!("{failure:?}")),
        }
    }
    let waits = waits.map_err(|_| "the bystander has failed".to_owned())?;
    tally.add_waits(&waits.map_err(|error| error.to_string())?);
    let mut outcome = watched.finish_within(&tally, GROWTH_MIB_MAX);
    outcome.check(outcome.longest_ms < WAIT_MAX_MS, "the bystander waits a second");
    outcome.notes.push(format!("{count} clients, {} MiB at most", most_kib / 1024));
    Ok(outcome)
}

fn send_slowly(address: &std::net::SocketAddr, count: usize) -> Result<Vec<TcpStream>, String> {
    let opened: Result<Vec<TcpStream>, String> =
        (0..count).map(|number| idle::open_from(idle::source(number), *address)).collect();
    let mut clients = opened?;
    for client in &clients {
        client.set_nodelay(true).map_err(|error| error.to_string())?;
    }
    for byte in REQUEST {
        for client in &mut clients {
            // One that was closed is found when its answer is read.
            let _ = client.write_all(&[*byte]);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(clients)
}

/// Asks, and reads nothing for a while: the answer fills all buffers on its way.
pub fn ask_slowly(address: &str, request: &[u8]) -> Result<Reply, String> {
    const READS_NOTHING: Duration = Duration::from_millis(200);
    const WINDOW_BYTES: usize = 128 * 1024;
    let mut stream = connect(address, LIMIT)?;
    // A window of few segments, or the kernel takes all of it.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&stream, WINDOW_BYTES);
    stream.write_all(request).map_err(|error| error.to_string())?;
    std::thread::sleep(READS_NOTHING);
    read_reply(&mut stream, LIMIT)
}
