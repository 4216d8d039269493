//! cache-collapse: a hundred clients ask for an object that is not cached, from a backend that sends it slowly.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::case::in_turn;
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Kind, Program, Setting};

const CLIENTS: usize = 100;
const OBJECT_BYTES: u64 = 50 << 20;
const BACKEND_BYTES_PER_SECOND: u64 = 20_000_000;
/// Interval between the backend's writes.
const SLICE: Duration = Duration::from_millis(5);
const TIME_LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    /// Requests that reached the backend.
    fetches: u64,
    /// Time from the first client's first byte to the last client's first byte.
    last_first_byte_ms: f64,
    /// Time until every client has received everything.
    whole_s: f64,
    /// Clients with incomplete answers.
    errors: usize,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Sample>,
}

pub fn measure(options: &Options) -> Measured {
    let mut programs = options.servers(Some(&["nginx", "gale", "varnish"]))?;
    programs.retain(|program| matches!(program.kind, Kind::Nginx | Kind::Gale | Kind::Varnish));
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let sample = measure_one(program).map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("cache-collapse: {} round {round}: {sample:?}", program.label);
        Ok(sample)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let spread = |row: &Row, figure: fn(&Sample) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("fetches", &|row| spread(row, |sample| sample.fetches as f64)),
            ("last client's first byte after the first's, ms", &|row| spread(row, |sample| sample.last_first_byte_ms)),
            ("all have everything, s", &|row| spread(row, |sample| sample.whole_s)),
            ("errors", &|row| row.rounds.iter().map(|sample| sample.errors).sum::<usize>().to_string()),
        ],
    );
    let body = format!(
        "{} rounds; median (least – greatest). {CLIENTS} clients ask at once for an object of 50 MiB that is not in \
         the cache, of a backend that sends 20 MB/s (2.6 s); \
         `proxy_cache_lock on` with nginx's times, Varnish as it comes. \
         One worker.\n\n{table}",
        options.idle_rounds
    );
    let holds = rows.iter().all(|row| row.rounds.iter().all(|sample| sample.errors == 0));
    Ok((Document::new("cache-collapse", "Concurrent requests for an uncached object", &programs, &body, &rows)?, holds))
}

fn measure_one(program: &Program) -> Result<Sample, String> {
    let fault = |error: std::io::Error| format!("backend: {error}");
    let fetches = Arc::new(AtomicU64::new(0));
    let backend = backend(Arc::clone(&fetches)).map_err(fault)?;
    let running = program.start(Setting {
        http: "proxy_cache_path cache levels=1:2 keys_zone=cache:16m max_size=1g use_temp_path=off;".to_owned(),
        server: format!(
            "location = /object {{ proxy_pass http://{backend}; proxy_http_version 1.1; proxy_cache cache; \
             proxy_cache_valid 200 1h; proxy_cache_lock on; proxy_max_temp_file_size 0; }}"
        ),
        // Varnish does not know these directives.
        backend: (program.kind == Kind::Varnish).then_some(backend.port()),
        ..Setting::default()
    })?;
    let begun = Instant::now();
    let address = &running.address;
    let got: Vec<Option<(Instant, Instant)>> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(move || take(address).ok())).collect();
        clients.into_iter().map(|client| client.join().ok().flatten()).collect()
    });
    let whole: Vec<(Instant, Instant)> = got.iter().copied().flatten().collect();
    let nobody = || "no client received the object".to_owned();
    let first = whole.iter().map(|times| times.0).min().ok_or_else(nobody)?;
    let last = whole.iter().map(|times| times.0).max().ok_or_else(nobody)?;
    let end = whole.iter().map(|times| times.1).max().ok_or_else(nobody)?;
    Ok(Sample {
        fetches: fetches.load(Ordering::Relaxed),
        last_first_byte_ms: last.duration_since(first).as_secs_f64() * 1e3,
        whole_s: end.duration_since(begun).as_secs_f64(),
        errors: CLIENTS - whole.len(),
    })
}

/// Requests the object. Returns the times of its first and last byte.
fn take(address: &str) -> std::io::Result<(Instant, Instant)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.write_all(b"GET /object HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
    let mut piece = vec![0; 1 << 17];
    let mut taken = stream.read(&mut piece)? as u64;
    let first = Instant::now();
    loop {
        match stream.read(&mut piece)? as u64 {
            0 if taken > OBJECT_BYTES => return Ok((first, Instant::now())),
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => taken += count,
        }
    }
}

/// Starts a backend that counts its requests. It runs until the program ends.
fn backend(fetches: Arc<AtomicU64>) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let fetches = Arc::clone(&fetches);
            // The thread ends with an error if the proxy closes early.
            std::thread::spawn(move || send(stream, &fetches));
        }
    });
    Ok(address)
}

/// Serves one request on the connection.
fn send(mut stream: TcpStream, fetches: &AtomicU64) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut piece = vec![0; 4096];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut piece)? {
            0 => return Ok(()),
            count => head.extend_from_slice(&piece[..count]),
        }
    }
    fetches.fetch_add(1, Ordering::Relaxed);
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {OBJECT_BYTES}\r\nConnection: close\r\n\r\n")?;
    let (begun, mut sent) = (Instant::now(), 0);
    let piece = vec![b'x'; 1 << 20];
    while sent < OBJECT_BYTES {
        let due = (begun.elapsed().as_secs_f64() * BACKEND_BYTES_PER_SECOND as f64) as u64;
        let length = due.min(OBJECT_BYTES).saturating_sub(sent).min(piece.len() as u64);
        stream.write_all(&piece[..length as usize])?;
        sent += length;
        std::thread::sleep(SLICE);
    }
    Ok(())
}
