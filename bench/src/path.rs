//! path: HTTP/1 and HTTP/2 over a path with delay: throughput of a large body in each direction, fairness among streams
//! that begin together, and precedence of an urgent stream.
//!
//! Between client and server is a relay that delays every byte by 25 ms in each direction. It holds all data in flight,
//! so that transfers are limited by the windows of HTTP/2 and not by socket buffers. The client is curl; for concurrent
//! streams it is our own, which sets the priority of each.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::backend::Bulk;
use crate::case::in_turn;
use crate::client::http2;
use crate::options::Options;
use crate::process;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Setting};

const DELAY: Duration = Duration::from_millis(25);
const PIECE_BYTES: usize = 64 * 1024;
/// Pieces in flight in one direction: a gigabyte per second for four delays.
const PIECES_MAX: usize = 2048;
const LARGE_BYTES: u64 = 1 << 30;
/// nginx has a window of 64 KiB for a body, so it receives these at a megabyte per second.
const UPLOAD_BYTES: u64 = 64 << 20;
const SHARED_BYTES: u64 = 16 << 20;
const STREAMS: usize = 16;

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Sample>,
}

#[derive(Clone, Debug, Serialize)]
struct Sample {
    down_http1: f64,
    down_http2: f64,
    up_http1: f64,
    up_http2: f64,
    /// For streams that begin together: time of the first to finish divided by that of the last.
    evenness: f64,
    /// Time of an urgent stream among them divided by that of the last.
    urgent: f64,
}

/// Measures nginx and Gale with each driver.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let sample = measure_one(options, program).map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("path: {} round {round}: {sample:?}", program.label);
        Ok(sample)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let spread = |row: &Row, figure: fn(&Sample) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("download HTTP/1, MB/s", &|row| spread(row, |sample| sample.down_http1)),
            ("HTTP/2", &|row| spread(row, |sample| sample.down_http2)),
            ("upload HTTP/1, MB/s", &|row| spread(row, |sample| sample.up_http1)),
            ("HTTP/2", &|row| spread(row, |sample| sample.up_http2)),
            ("16 streams: first by last", &|row| spread(row, |sample| sample.evenness)),
            ("urgent by last", &|row| spread(row, |sample| sample.urgent)),
        ],
    );
    let body = format!(
        "{} rounds; median (least – greatest). 1 GiB in one download, 64 MiB in one upload; {STREAMS} \
         files of 16 MiB at once; the last column is the time of a file asked for with `priority: u=0` beside fifteen \
         with `u=6`. 50 ms there and back.\n\n{table}",
        options.idle_rounds
    );
    Ok((Document::new("path", "A path with a delay", &programs, &body, &rows)?, true))
}

fn measure_one(options: &Options, program: &Program) -> Result<Sample, String> {
    let sink = Bulk { sends: 0, taken_per_second: None }.start().map_err(|error| format!("sink: {error}"))?;
    let server = format!(
        "location = /upload {{ client_max_body_size 0; proxy_request_buffering off; proxy_http_version 1.1; \
         proxy_pass http://{sink}; }}"
    );
    let setting =
        Setting { http: "http2 on;".to_owned(), server, cores: Some(vec![options.server_core]), ..Setting::default() };
    let running = program.start(setting)?;
    let html = running.html();
    for (name, bytes) in [("large", LARGE_BYTES), ("sent", UPLOAD_BYTES), ("shared", SHARED_BYTES)] {
        // Holes in a file are served from the page cache like other data.
        let made = std::fs::File::create(html.join(name)).and_then(|file| file.set_len(bytes));
        made.map_err(|error| format!("{name}: {error}"))?;
    }
    let relay = delay(&running.address).map_err(|error| format!("relay: {error}"))?;
    let url = |path: &str| format!("http://{relay}{path}");
    let sent = html.join("sent");
    let sent = sent.to_str().ok_or("a path that is no text")?;
    let once = |version: &str, words: &[&str]| -> Result<f64, String> {
        let mut all = vec![version, "-o", "/dev/null", "-w", "%{http_code} %{speed_download} %{speed_upload}\n"];
        all.extend(words);
        let text = curl(options, &all)?;
        let mut figures = text.split_whitespace();
        if figures.next() != Some("200") {
            return Err(format!("curl: {text}"));
        }
        let speeds: f64 = figures.filter_map(|figure| figure.parse::<f64>().ok()).sum();
        Ok(speeds / 1e6)
    };
    // A first request puts them into memory.
    for path in ["large", "shared"] {
        once("--http1.1", &[&format!("http://{}/{path}", running.address)])?;
    }
    let [http1, http2] = ["--http1.1", "--http2-prior-knowledge"];
    let mut urgent_last = ["u=6"; STREAMS];
    urgent_last[STREAMS - 1] = "u=0";
    Ok(Sample {
        down_http1: once(http1, &[&url("/large")])?,
        down_http2: once(http2, &[&url("/large")])?,
        up_http1: once(http1, &["-H", "Expect:", "-T", sent, &url("/upload")])?,
        up_http2: once(http2, &["-H", "Expect:", "-T", sent, &url("/upload")])?,
        evenness: share(&together(relay, ["u=3, i"; STREAMS])?, least),
        urgent: share(&together(relay, urgent_last)?, |times| times[STREAMS - 1]),
    })
}

fn least(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Returns one of the times divided by the maximum.
fn share(times: &[f64], one: impl Fn(&[f64]) -> f64) -> f64 {
    one(times) / times.iter().copied().fold(f64::MIN_POSITIVE, f64::max)
}

/// Returns the seconds that each stream took.
fn together(relay: SocketAddr, priorities: [&str; STREAMS]) -> Result<Vec<f64>, String> {
    let times = http2::together(&relay.to_string(), "/shared", &priorities, SHARED_BYTES);
    let times = times.map_err(|error| format!("{STREAMS} streams: {error}"))?;
    Ok(times.iter().map(Duration::as_secs_f64).collect())
}

fn curl(options: &Options, words: &[&str]) -> Result<String, String> {
    let mut command = Command::new("curl");
    command.args(["-s", "-S", "--max-time", "120"]).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = process::spawn_pinned(&mut command, &[options.client_core])?;
    let output = child.wait_with_output().map_err(|error| format!("curl: {error}"))?;
    if !output.status.success() {
        return Err(format!("curl: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Starts a relay that delays all data. It runs until the program ends.
fn delay(server: &str) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let server = server.to_owned();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(backend) = TcpStream::connect(&server) else { continue };
            let _ = (client.set_nodelay(true), backend.set_nodelay(true));
            let Ok((to_client, to_backend)) = client.try_clone().and_then(|own| Ok((own, backend.try_clone()?))) else {
                continue;
            };
            one_way(client, to_backend);
            one_way(backend, to_client);
        }
    });
    Ok(address)
}

fn one_way(mut from: TcpStream, mut to: TcpStream) {
    let (pieces, due) = mpsc::sync_channel::<(Instant, Vec<u8>)>(PIECES_MAX);
    std::thread::spawn(move || {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from.read(&mut piece) {
            if pieces.send((Instant::now() + DELAY, piece[..count].to_vec())).is_err() {
                break;
            }
        }
    });
    std::thread::spawn(move || {
        while let Ok((at, piece)) = due.recv() {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
