//! first-byte: time to the first byte of a proxied response, with requests at a fixed rate.
//!
//! A closed loop would send fewer requests to a slow server. Here a request is due at fixed intervals on any idle
//! connection, and its latency counts from then, so the time without an idle connection counts, too. The client has
//! real-time priority on its core if permitted, since its own delays would be in every figure.

use std::io::Write;
use std::net::TcpStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use gale_base::histogram::FineHistogram;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::Serialize;

use crate::Measured;
use crate::backend::Backend;
use crate::burst::{pin, take_priority};
use crate::case::in_turn;
use crate::client::swarm::{body_missing, discard};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, SMALL_BODY, Setting};

const CONNECTIONS: usize = 64;
/// Responses and requests per second, far below the capacity of any of the servers.
const JOBS: [(&str, usize, u32); 2] = [("2 bytes", SMALL_BODY.len(), 5000), ("64 KiB", 64 << 10, 1000)];
/// Initial time that is not counted.
const WARM_UP_TIME: Duration = Duration::from_millis(500);
const RECEIVED_MAX: usize = 16 * 1024;

/// Times to the first byte.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    /// Broken connections and invalid responses.
    pub errors: u64,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    answer: &'static str,
    rate: u32,
    rounds: Vec<Sample>,
}

/// Measures all available proxies.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale", "haproxy", "h2o"]))?;
    let mut rows = Vec::new();
    for (answer, bytes, rate) in JOBS {
        let backend = Backend::start(options.client_core, bytes)?;
        let rounds = in_turn(options.rounds, &programs, |program, round| {
            let sample = measure_one(options, program, &backend, rate)?;
            eprintln!("first-byte: {} {answer} round {round}: {sample:?}", program.label);
            Ok(sample)
        })?;
        rows.extend(programs.iter().zip(rounds).map(|(program, rounds)| Row {
            server: program.label.clone(),
            answer,
            rate,
            rounds,
        }));
    }
    let spread = |row: &Row, figure: fn(&Sample) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let table = report::table_of(
        &rows,
        &[
            ("answer", &|row: &Row| row.answer.to_owned()),
            ("requests/s", &|row| row.rate.to_string()),
            ("server", &|row| row.server.clone()),
            ("p50 µs", &|row| spread(row, |sample| sample.p50_us)),
            ("p99 µs", &|row| spread(row, |sample| sample.p99_us)),
            ("longest µs", &|row| spread(row, |sample| sample.max_us)),
            ("errors", &|row| row.rounds.iter().map(|sample| sample.errors).sum::<u64>().to_string()),
        ],
    );
    let body = format!(
        "{} rounds of {} s; median (least – greatest). One worker; {CONNECTIONS} kept-alive connections; \
         requests are due at a fixed rate, and their times count from then on.\n\n{table}",
        options.rounds,
        options.run_time.as_secs()
    );
    let holds = rows.iter().all(|row| row.rounds.iter().all(|sample| sample.errors == 0));
    Ok((Document::new("first-byte", "Time to the first byte through a proxy", &programs, &body, &rows)?, holds))
}

fn measure_one(options: &Options, program: &Program, backend: &Rc<Backend>, rate: u32) -> Result<Sample, String> {
    let cores = Some(vec![options.server_core]);
    let running = program.start(Setting { cores, backend: Some(backend.port), ..Setting::default() })?;
    let (address, core, run_time) = (running.address.clone(), options.client_core, options.run_time);
    let client = std::thread::spawn(move || {
        pin(core)?;
        take_priority();
        ask(&address, "/proxied", rate, run_time).map_err(|error| format!("first-byte: {error}"))
    });
    client.join().map_err(|_| "first-byte: the client panicked".to_owned())?
}

/// A connection, with the due time of its request and the bytes missing of its response.
struct Peer {
    stream: TcpStream,
    due: Instant,
    head: Vec<u8>,
    missing: Option<u64>,
}

enum Received {
    Part,
    Whole,
}

/// Requests `path` at this rate, independent of the responses.
pub fn ask(address: &str, path: &str, rate: u32, run_time: Duration) -> std::io::Result<Sample> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n");
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut peers = Vec::with_capacity(CONNECTIONS);
    for number in 0..CONNECTIONS {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        epoll::add(&poll, &stream, epoll::EventData::new_u64(number as u64), epoll::EventFlags::IN)?;
        peers.push(Peer { stream, due: Instant::now(), head: Vec::new(), missing: None });
    }
    let mut idle: Vec<usize> = (0..CONNECTIONS).rev().collect();
    let (interval, begun, latency, mut errors) =
        (Duration::from_secs(1) / rate, Instant::now(), FineHistogram::default(), 0);
    let (counts_from, end) = (begun + WARM_UP_TIME, begun + WARM_UP_TIME + run_time);
    let mut due = begun;
    let mut events = Vec::with_capacity(CONNECTIONS);
    loop {
        let now = Instant::now();
        if now >= end {
            break;
        }
        while due <= now
            && let Some(number) = idle.pop()
        {
            peers[number].ask(&request, due)?;
            due += interval;
        }
        let wait = due.min(end).saturating_duration_since(Instant::now());
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        match epoll::wait(&poll, spare_capacity(&mut events), Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events.drain(..) {
            let number = event.data.u64() as usize;
            let peer = &mut peers[number];
            if peer.is_first_byte() && peer.due >= counts_from {
                latency.record(peer.due.elapsed());
            }
            match peer.receive() {
                Ok(Received::Part) => {}
                Ok(Received::Whole) => idle.push(number),
                Err(()) => {
                    errors += 1;
                    epoll::delete(&poll, &peer.stream)?;
                }
            }
        }
    }
    let snapshot = latency.snapshot();
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let of = |share: f64| us(snapshot.quantile(share));
    Ok(Sample { p50_us: of(0.5), p99_us: of(0.99), max_us: us(snapshot.max()), errors })
}

impl Peer {
    fn ask(&mut self, request: &str, due: Instant) -> std::io::Result<()> {
        (self.due, self.missing) = (due, None);
        self.head.clear();
        (&self.stream).write_all(request.as_bytes())
    }

    fn is_first_byte(&self) -> bool {
        self.head.is_empty()
    }

    /// Receives available bytes. Returns an error if the connection or the response is broken.
    fn receive(&mut self) -> Result<Received, ()> {
        loop {
            let missing = match self.missing {
                Some(0) => return Ok(Received::Whole),
                Some(missing) => match discard(&self.stream, usize::try_from(missing).unwrap_or(usize::MAX)) {
                    Ok(0) => return Err(()),
                    Ok(length) => Some(missing - length as u64),
                    Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Part),
                    Err(_) => return Err(()),
                },
                None => {
                    let mut part = [0; RECEIVED_MAX];
                    match recv(&self.stream, &mut part[..], RecvFlags::DONTWAIT) {
                        Ok((_, 0)) => return Err(()),
                        Ok((_, length)) => self.head.extend_from_slice(&part[..length]),
                        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Part),
                        Err(_) => return Err(()),
                    }
                    body_missing(&self.head)?
                }
            };
            self.missing = missing;
        }
    }
}
