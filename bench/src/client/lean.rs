//! lean: a client that needs less CPU time than the servers, so that with one core each the server is the limit.
//!
//! It sends one request at a time on each keep-alive connection. The first response of a connection is checked in full;
//! of the others only the bytes are counted, so responses of varying length are refused. It uses io_uring like the
//! floor, with one system call for many requests.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use gale_base::histogram::FineHistogram;

use super::load::Connection;
use super::{Figures, Run};
use crate::ring::{Kind, Ring};

pub fn command(run: &Run, address: &str, connections: u32) -> Result<Vec<String>, String> {
    if run.is_short {
        return Err("the lean client keeps its connections".to_owned());
    }
    if run.certificate.is_some() {
        return Err("the lean client speaks in the clear".to_owned());
    }
    let own = std::env::current_exe().map_err(|error| format!("lean: {error}"))?;
    let own = own.to_str().ok_or("lean: our own path is no text")?;
    let (connections, seconds) = (connections.to_string(), run.run_time.as_secs().to_string());
    let words = [own, "lean", address, run.path, &connections, &seconds];
    Ok(words.iter().chain(run.headers).map(|&word| word.to_owned()).collect())
}

pub fn parse(text: &str) -> Option<Figures> {
    serde_json::from_str(text).ok().filter(|figures: &Figures| figures.requests > 0)
}

/// `lean ADDRESS PATH CONNECTIONS SECONDS [HEADER …]`: sends requests for this time and prints its figures.
pub fn main(args: &[String]) -> Result<(), String> {
    let usage = || "usage: gale-bench lean ADDRESS PATH CONNECTIONS SECONDS [HEADER ...]".to_owned();
    let [address, path, connections, seconds, headers @ ..] = args else {
        return Err(usage());
    };
    let connections: u32 = connections.parse().map_err(|_| usage())?;
    let seconds: u64 = seconds.parse().map_err(|_| usage())?;
    let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
    let peers = (0..connections).map(|_| Peer::open(address, &request)).collect::<Result<Vec<Peer>, String>>()?;
    let figures = ask(peers, request.into_bytes().leak(), Duration::from_secs(seconds));
    let figures = figures.map_err(|error| format!("lean: {error}"))?;
    println!("{}", serde_json::to_string(&figures).map_err(|error| error.to_string())?);
    Ok(())
}

/// A connection, and the number of bytes missing of its response.
struct Peer {
    stream: TcpStream,
    answer_bytes: usize,
    missing_bytes: usize,
    sent_ns: u64,
}

impl Peer {
    fn open(address: &str, request: &str) -> Result<Peer, String> {
        let answered = Connection::open(address).and_then(|mut connection| {
            let answer = connection.ask(request)?;
            Ok((answer, connection.into_stream()))
        });
        match answered {
            Ok((answer, (stream, answer_bytes))) if answer.status == 200 && !answer.closes => {
                Ok(Peer { stream, answer_bytes, missing_bytes: 0, sent_ns: 0 })
            }
            Ok((answer, _)) => Err(format!("lean: status {}", answer.status)),
            Err(failure) => Err(format!("lean: {failure:?}")),
        }
    }
}

fn ask(mut peers: Vec<Peer>, request: &'static [u8], run_time: Duration) -> io::Result<Figures> {
    let descriptors: Vec<RawFd> = peers.iter().map(|peer| peer.stream.as_raw_fd()).collect();
    let mut ring = Ring::new(descriptors.len() as u32)?;
    ring.use_descriptors(&descriptors)?;
    let begun = Instant::now();
    let mut now_ns = 0;
    for (number, peer) in peers.iter_mut().enumerate() {
        ring.receive_all(number as u32)?;
        ring.send(number as u32, request)?;
        peer.missing_bytes = peer.answer_bytes;
    }
    let latency = Latency::default();
    let mut totals = Totals::default();
    let mut completions = Vec::new();
    while u128::from(now_ns) < run_time.as_nanos() && totals.errors < peers.len() as u64 {
        ring.wait(&mut completions)?;
        now_ns = begun.elapsed().as_nanos() as u64;
        for completion in completions.drain(..) {
            let peer = &mut peers[completion.connection as usize];
            let received = usize::try_from(completion.result).unwrap_or(0);
            if completion.kind != Kind::Receive || received == 0 || received > peer.missing_bytes {
                // The connection ended, failed, or sent surplus bytes. It is not used again.
                totals.errors += u64::from(completion.kind == Kind::Receive);
                continue;
            }
            if !completion.goes_on {
                ring.receive_all(completion.connection)?;
            }
            peer.missing_bytes -= received;
            if peer.missing_bytes == 0 {
                totals.requests += 1;
                latency.record(now_ns - peer.sent_ns);
                peer.sent_ns = now_ns;
                peer.missing_bytes = peer.answer_bytes;
                ring.send(completion.connection, request)?;
            }
        }
    }
    Ok(latency.figures(totals, begun.elapsed()))
}

#[derive(Default)]
pub(super) struct Totals {
    pub requests: u64,
    pub errors: u64,
}

/// Latency, measured from the turn that sent a request to the turn in which its response was complete.
#[derive(Default)]
pub(super) struct Latency {
    histogram: FineHistogram,
}

impl Latency {
    pub fn record(&self, ns: u64) {
        self.histogram.record_ns(ns);
    }

    pub fn figures(&self, totals: Totals, elapsed: Duration) -> Figures {
        let snapshot = self.histogram.snapshot();
        let us = |duration: Duration| duration.as_secs_f64() * 1e6;
        let mean = us(snapshot.mean());
        // Precise to the width of a bucket.
        let squares: f64 = snapshot.buckets().map(|(most, count)| (us(most) - mean).powi(2) * count as f64).sum();
        Figures {
            requests: totals.requests,
            requests_per_second: totals.requests as f64 / elapsed.as_secs_f64(),
            errors: totals.errors,
            latency_mean_us: mean,
            latency_deviation_us: (squares / snapshot.count().max(1) as f64).sqrt(),
            latency_p50_us: us(snapshot.quantile(0.5)),
            latency_p99_us: us(snapshot.quantile(0.99)),
        }
    }
}
