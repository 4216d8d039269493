//! handshakes: a client that opens a TLS connection for each request with X25519MLKEM768, which the TLS libraries of
//! wrk and h2load lack.
//!
//! It uses threads with blocking sockets. The server's name and certificate are verified; sessions are not resumed.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::Run;
use super::lean::{Latency, Totals};
use super::load::ANSWER_TIME_LIMIT;
use super::tls;

pub fn command(run: &Run, address: &str, connections: u32) -> Result<Vec<String>, String> {
    let certificate = run.certificate.ok_or("the client of handshakes speaks TLS only")?;
    let own = std::env::current_exe().map_err(|error| format!("handshakes: {error}"))?;
    let words = [&own.to_string_lossy(), "handshakes", address, run.path, &certificate.to_string_lossy()];
    let numbers = [connections.to_string(), run.run_time.as_secs().to_string()];
    Ok(words.into_iter().map(str::to_owned).chain(numbers).collect())
}

/// `handshakes ADDRESS PATH CERTIFICATE CONNECTIONS SECONDS`: sends requests for this time and prints its figures.
pub fn main(args: &[String]) -> Result<(), String> {
    let usage = || "usage: gale-bench handshakes ADDRESS PATH CERTIFICATE CONNECTIONS SECONDS".to_owned();
    let [address, path, certificate, connections, seconds] = args else { return Err(usage()) };
    let address: SocketAddr = address.parse().map_err(|_| usage())?;
    let connections: u32 = connections.parse().map_err(|_| usage())?;
    let run_time = Duration::from_secs(seconds.parse().map_err(|_| usage())?);
    let provider =
        CryptoProvider { kx_groups: vec![aws_lc_rs::kx_group::X25519MLKEM768], ..aws_lc_rs::default_provider() };
    let config = tls::configuration(provider, Path::new(certificate), None)?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");

    let begun = Instant::now();
    let asking = |_| {
        let (config, request) = (Arc::clone(&config), request.clone());
        thread::spawn(move || {
            let mut times = Vec::new();
            let mut errors = 0;
            while begun.elapsed() < run_time && errors < 100 {
                let asked = Instant::now();
                match ask(address, &config, request.as_bytes()) {
                    Ok(()) => times.push(asked.elapsed()),
                    Err(_) => errors += 1,
                }
            }
            (times, errors)
        })
    };
    let threads: Vec<_> = (0..connections).map(asking).collect();
    let latency = Latency::default();
    let mut totals = Totals::default();
    for thread in threads {
        let (times, errors) = thread.join().map_err(|_| "handshakes: a thread has failed")?;
        totals.requests += times.len() as u64;
        totals.errors += errors;
        times.iter().for_each(|time| latency.record(time.as_nanos() as u64));
    }
    let figures = latency.figures(totals, begun.elapsed());
    println!("{}", serde_json::to_string(&figures).map_err(|error| error.to_string())?);
    Ok(())
}

/// Opens a connection and reads a complete response with status 200.
fn ask(address: SocketAddr, config: &Arc<ClientConfig>, request: &[u8]) -> io::Result<()> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_TIME_LIMIT))?;
    let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
    let session = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
    let mut connection = StreamOwned::new(session, stream);
    connection.write_all(request)?;
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer)?;
    answer.starts_with(b"HTTP/1.1 200 ").then_some(()).ok_or_else(|| ErrorKind::InvalidData.into())
}
