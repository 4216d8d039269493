//! tunnels: WebSockets through a proxy: memory per tunnel, and latency of an echo during repeated reloads, which all
//! tunnels must survive. (h2o is not reloaded, because that requires another program.)
//!
//! Each tunnel is opened as by a client and an application (a request with `Upgrade`, a 101) and has carried a message.
//! The measurement concerns the transport of bytes; WebSocket frames are not parsed, and proxies do not parse them
//! either.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gale_base::histogram::FineHistogram;
use serde::Serialize;

use crate::Measured;
use crate::application::{Application, Job};
use crate::case::in_turn;
use crate::client::load;
use crate::memory::Memory;
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Kind, POLL_INTERVAL, Program, Running, Setting};

const TUNNELS: usize = 5000;
/// Tunnels before the first reading. They trigger one-time allocations.
const WARM_UP_TUNNELS: usize = 100;
const RELOADS: u32 = 100;
/// Number of echoes without reloads.
const QUIET_ECHOES: usize = 20_000;
const MESSAGE_BYTES: usize = 64;
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Time after which a server that loses signals is signalled again.
const TELL_AGAIN_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Readings>,
}

#[derive(Debug, Clone, Serialize)]
struct Readings {
    /// Growth of the PSS of all processes, per tunnel.
    user_kib: f64,
    later_kib: f64,
    quiet: Echoes,
    under_reloads: Option<Echoes>,
    reloads: u32,
    /// Tunnels that were still open at the end.
    alive: usize,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Echoes {
    count: u64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

/// Measures nginx, Gale with each driver, haproxy and h2o.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale", "haproxy", "h2o"]))?;
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let readings = measure_one(options, program).map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("tunnels: {} round {round}: {:.2} KiB", program.label, readings.user_kib);
        Ok(readings)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let holds = rows.iter().flat_map(|row| &row.rounds).all(|readings| readings.alive == TUNNELS);
    let spread = |row: &Row, figure: fn(&Readings) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let under_reloads = |row: &Row, figure: fn(&Echoes) -> f64| {
        let figures: Vec<f64> =
            row.rounds.iter().filter_map(|round| round.under_reloads.as_ref().map(figure)).collect();
        if figures.is_empty() { "–".to_owned() } else { Spread::of(figures).to_string() }
    };
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("KiB a tunnel", &|row| spread(row, |readings| readings.user_kib)),
            ("idle, KiB", &|row| spread(row, |readings| readings.later_kib)),
            ("echo p50, µs", &|row| spread(row, |readings| readings.quiet.p50_us)),
            ("p99", &|row| spread(row, |readings| readings.quiet.p99_us)),
            ("reloading: p50", &|row| under_reloads(row, |echoes| echoes.p50_us)),
            ("p99", &|row| under_reloads(row, |echoes| echoes.p99_us)),
            ("longest, µs", &|row| under_reloads(row, |echoes| echoes.max_us)),
            ("reloads", &|row| spread(row, |readings| f64::from(readings.reloads))),
            ("alive", &|row| spread(row, |readings| readings.alive as f64)),
        ],
    );
    let body = format!(
        "{TUNNELS} WebSockets through one worker, {} rounds; median (least – greatest). Growth of the PSS of all \
         processes of the server for each tunnel, at once and after {} idle seconds; echoes of {MESSAGE_BYTES} bytes, \
         one at a time over all tunnels in turn, first with nothing else going on, then while {RELOADS} reloads pass, \
         one after the other.\n\n{table}",
        options.idle_rounds,
        options.idle_time.as_secs()
    );
    Ok((Document::new("tunnels", "WebSockets through a proxy", &programs, &body, &rows)?, holds))
}

fn measure_one(options: &Options, program: &Program) -> Result<Readings, String> {
    let echo = Application::start(Job::Echo).map_err(|error| format!("application: {error}"))?;
    let location = format!(
        "location = /tunnel {{ proxy_pass http://{}; proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; \
         proxy_set_header Connection upgrade; proxy_read_timeout 1h; }}",
        echo.address
    );
    let cores = Some(vec![options.server_core]);
    let setting = Setting {
        cores,
        server: location,
        backend: Some(echo.address.port()),
        reloads: true,
        connections_max: 2 * TUNNELS + 1024,
        ..Setting::default()
    };
    let server = program.start(setting)?;
    let open = |count: usize| (0..count).map(|_| open_tunnel(&server.address)).collect::<Result<Vec<_>, _>>();
    drop(open(WARM_UP_TUNNELS)?);
    let pss = || Memory::read(&server.root.tree()).pss_kib as f64;
    let before = pss();
    let mut tunnels = open(TUNNELS)?;
    let user_kib = (pss() - before) / TUNNELS as f64;
    std::thread::sleep(options.idle_time);
    let later_kib = (pss() - before) / TUNNELS as f64;
    let mut left = QUIET_ECHOES;
    let quiet = echo_while(&mut tunnels, || {
        left -= 1;
        left > 0
    })?;
    let (reloads, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
    let echo_under_reloads = |tunnels: &mut [TcpStream]| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for generation in 1..=RELOADS {
                    if let Err(error) = reload(&server, generation) {
                        eprintln!("note: {}: {error}\n{}", server.label, server.error_log_end());
                        break;
                    }
                    reloads.store(generation, Ordering::Relaxed);
                }
                is_over.store(true, Ordering::Release);
            });
            echo_while(tunnels, || !is_over.load(Ordering::Acquire))
        })
    };
    let is_reloaded = program.kind != Kind::H2o;
    let under_reloads = is_reloaded.then(|| echo_under_reloads(&mut tunnels)).transpose()?;
    let alive = tunnels.iter_mut().filter_map(|tunnel| echo_once(tunnel).ok()).count();
    Ok(Readings { user_kib, later_kib, quiet, under_reloads, reloads: reloads.into_inner(), alive })
}

/// Reloads, and waits until a new connection gets the new configuration.
fn reload(server: &Running, generation: u32) -> Result<(), String> {
    server.reload(generation)?;
    let deadline = Instant::now() + TIME_LIMIT;
    let mut told = Instant::now();
    loop {
        let answer = load::request_once(&server.address, "/generation", TIME_LIMIT);
        if answer.is_ok_and(|body| body == generation.to_string().as_bytes()) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(format!("reload {generation} has no effect"));
        }
        if server.loses_signals() && told.elapsed() >= TELL_AGAIN_AFTER {
            server.reload(generation)?;
            told = Instant::now();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn open_tunnel(address: &str) -> Result<TcpStream, String> {
    const REQUEST: &[u8] = b"GET /tunnel HTTP/1.1\r\nHost: bench\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
        Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    let fault = |error: std::io::Error| format!("opening a tunnel: {error}");
    let mut stream = TcpStream::connect(address).map_err(fault)?;
    stream.set_nodelay(true).map_err(fault)?;
    stream.set_read_timeout(Some(TIME_LIMIT)).map_err(fault)?;
    stream.write_all(REQUEST).map_err(fault)?;
    let mut head = Vec::new();
    let mut piece = [0; 512];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut piece).map_err(fault)? {
            0 => return Err("the tunnel was closed".to_owned()),
            count => head.extend_from_slice(&piece[..count]),
        }
    }
    if !head.starts_with(b"HTTP/1.1 101 ") {
        return Err(format!("no tunnel: {}", String::from_utf8_lossy(&head)));
    }
    echo_once(&mut stream).map_err(fault)?;
    Ok(stream)
}

fn echo_once(tunnel: &mut TcpStream) -> std::io::Result<()> {
    let (message, mut answer) = ([7; MESSAGE_BYTES], [0; MESSAGE_BYTES]);
    tunnel.write_all(&message)?;
    tunnel.read_exact(&mut answer)
}

/// Sends echoes over all tunnels in turn while `goes_on` returns true, at least once.
fn echo_while(tunnels: &mut [TcpStream], mut goes_on: impl FnMut() -> bool) -> Result<Echoes, String> {
    let latency = FineHistogram::default();
    let mut max_us = 0.0_f64;
    let (mut count, places) = (0, tunnels.len());
    loop {
        let tunnel = &mut tunnels[count as usize % places];
        let begun = Instant::now();
        echo_once(tunnel).map_err(|error| format!("echo over a tunnel: {error}"))?;
        let elapsed = begun.elapsed();
        latency.record_ns(elapsed.as_nanos() as u64);
        max_us = max_us.max(elapsed.as_secs_f64() * 1e6);
        count += 1;
        if !goes_on() {
            break;
        }
    }
    let snapshot = latency.snapshot();
    let us = |share: f64| snapshot.quantile(share).as_secs_f64() * 1e6;
    Ok(Echoes { count, p50_us: us(0.5), p99_us: us(0.99), max_us })
}
