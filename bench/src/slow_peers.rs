//! slow-peers: 1 GiB through a proxy to a peer that receives more slowly than the other side sends: a download by a
//! slow client, and an upload to a slow backend.
//!
//! The surplus goes to a temporary file on a separate disk. A control group limits the rate of reads and the memory,
//! which is less than the size of the file. The results are the server's memory and the latency for another client
//! meanwhile.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size;
use serde::Serialize;

use crate::Measured;
use crate::backend::{Bulk, Pace};
use crate::case::in_turn;
use crate::client::swarm::{Got, WithoutCore, probe_loops};
use crate::memory::{self, Memory};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Setting};
use crate::thread_pools::confine::{self, Cage, SmallDisk};
use crate::thread_pools::waits::{self, Waits};
use crate::thread_pools::{event_loops, stalls};

const BODY_BYTES: u64 = 1 << 30;
/// Less than half of the disk's rate.
const TAKEN_PER_SECOND: u64 = 40_000_000;
const DISK_BYTES_PER_SECOND: u64 = 100 << 20;
/// For the temporary file and other files.
const DISK_BYTES: u64 = 3 << 30;
/// For server and page cache: a quarter of the body.
const MEMORY_BYTES: u64 = 256 << 20;
const PIECE_BYTES: usize = 256 * 1024;
/// Small, so that the server must store nearly everything that the client has not received.
const CLIENT_BUFFER_BYTES: usize = 64 * 1024;
const TIME_LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Round>,
}

#[derive(Debug, Serialize)]
struct Round {
    download: Transfer,
    upload: Transfer,
    stalls: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Transfer {
    seconds: f64,
    /// Maximum growth of the PSS of all processes.
    memory_mib: f64,
    probe: Got,
    /// Waits of the loops in the kernel of over 20 ms each.
    waits: BTreeMap<String, Waits>,
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let directory = options.experiment.directory.join(format!("gale-bench-slow-peers-{}", std::process::id()));
    std::fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let disk = SmallDisk::make(&directory, DISK_BYTES)?;
    let cage = Cage::build(MEMORY_BYTES, confine::device_of(&disk.mount_point).as_slice(), DISK_BYTES_PER_SECOND);
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let readings = measure_one(options, program, &cage, &disk);
        let readings = readings.map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("slow-peers: {} round {round}: {readings:?}", program.label);
        Ok(readings)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let notes: String = cage.left_out.iter().map(|sentence| format!("**Left out.** {sentence}\n\n")).collect();
    let body = format!(
        "{notes}{} rounds; median (least – greatest). 1 GiB to a peer that takes {} MB/s, one worker. Temporary files \
         are on a disk with a queue of 4 requests, limited to {} MiB/s of reads; {} MiB of memory for server and page \
         cache. A probe asks for two bytes every 20 ms. Memory is the maximum growth of the PSS of the server's \
         processes. The reasons for waits of the event loops come from the kernel stacks of their threads, sampled \
         every 5 ms. \"Of it no core\" is the part of the longest wait in which probe and loop were runnable, but had \
         no core (schedstat).\n\n{}",
        options.idle_rounds,
        TAKEN_PER_SECOND / 1_000_000,
        DISK_BYTES_PER_SECOND >> 20,
        MEMORY_BYTES >> 20,
        table(&rows)
    );
    let document = Document::new("slow-peers", "1 GiB to slow peers", &programs, &body, &rows)?;
    drop((cage, disk));
    let _ = std::fs::remove_dir_all(&directory);
    Ok((document, true))
}

fn table(rows: &[Row]) -> String {
    let spread = |row: &Row, figure: fn(&Round) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    report::table_of(
        rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("download, s", &|row| spread(row, |round| round.download.seconds)),
            ("memory, MiB", &|row| spread(row, |round| round.download.memory_mib)),
            ("probe p99, ms", &|row| spread(row, |round| round.download.probe.p99_ms)),
            ("longest, ms", &|row| spread(row, |round| round.download.probe.max_ms)),
            ("of it no core", &|row| without_core(row, |round| &round.download)),
            ("upload, s", &|row| spread(row, |round| round.upload.seconds)),
            ("memory, MiB", &|row| spread(row, |round| round.upload.memory_mib)),
            ("probe p99, ms", &|row| spread(row, |round| round.upload.probe.p99_ms)),
            ("longest, ms", &|row| spread(row, |round| round.upload.probe.max_ms)),
            ("of it no core", &|row| without_core(row, |round| &round.upload)),
            ("loops waited over 20 ms for", &|row| {
                let transfers = row.rounds.iter().flat_map(|round| [&round.download, &round.upload]);
                waits::text(&waits::together(transfers.map(|transfer| &transfer.waits)))
            }),
            ("stalls logged", &|row| row.rounds.iter().map(|round| round.stalls.len()).sum::<usize>().to_string()),
        ],
    )
}

/// Returns the time that the probe and the loop had no core during the longest wait of all rounds.
fn without_core(row: &Row, of: fn(&Round) -> &Transfer) -> String {
    let longest =
        row.rounds.iter().map(|round| &of(round).probe).max_by(|one, other| one.max_ms.total_cmp(&other.max_ms));
    let WithoutCore { probe_ms, loop_ms } = longest.map(|probe| probe.without_core).unwrap_or_default();
    format!("probe {probe_ms:.1}, loop {loop_ms:.1}")
}

fn measure_one(options: &Options, program: &Program, cage: &Cage, disk: &SmallDisk) -> Result<Round, String> {
    let fault = |error: std::io::Error| format!("backend: {error}");
    let quick = Bulk { sends: BODY_BYTES, taken_per_second: None }.start().map_err(fault)?;
    let slow = Bulk { sends: BODY_BYTES, taken_per_second: Some(TAKEN_PER_SECOND) }.start().map_err(fault)?;
    let files = disk.mount_point.display();
    let setting = Setting {
        cores: Some(vec![options.server_core]),
        under: Some(cage.words()),
        http: format!("proxy_temp_path {files}/proxy; client_body_temp_path {files}/body; client_max_body_size 0;"),
        server: format!(
            "location = /download {{ proxy_pass http://{quick}; }} location = /upload {{ proxy_pass http://{slow}; }}"
        ),
        ..Setting::default()
    };
    let server = program.start(setting)?;
    let before = Memory::read(&server.root.tree()).pss_kib;
    let transfer = |run: fn(&str) -> std::io::Result<()>| {
        let ends = AtomicBool::new(false);
        let loops = event_loops(server.root);
        std::thread::scope(|scope| {
            let probe = scope.spawn(|| probe_loops(&loops, &server.address, "/return", Duration::ZERO, &ends));
            let waits = scope.spawn(|| waits::watch(server.root, &ends));
            let most = scope.spawn(|| memory::most_pss_kib(server.root, &ends));
            let begun = Instant::now();
            let done = run(&server.address);
            let seconds = begun.elapsed().as_secs_f64();
            ends.store(true, Ordering::Relaxed);
            let ended = "a client does not panic";
            let (probe, waits) = (probe.join().expect(ended), waits.join().expect(ended));
            let most = most.join().expect(ended);
            done.map_err(|error| format!("{error}\n{}", server.error_log_end()))?;
            Ok::<_, String>(Transfer {
                seconds,
                memory_mib: most.saturating_sub(before) as f64 / 1024.0,
                probe: probe?,
                waits,
            })
        })
    };
    let (download, upload) = (transfer(download)?, transfer(upload)?);
    Ok(Round { download, upload, stalls: stalls(&server.error_log()) })
}

/// Receives the body at the rate of a slow client.
fn download(address: &str) -> std::io::Result<()> {
    let mut stream = connect(address)?;
    set_socket_recv_buffer_size(&stream, CLIENT_BUFFER_BYTES)?;
    stream.write_all(b"GET /download HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
    let (mut pace, mut piece, mut received) = (Pace::new(TAKEN_PER_SECOND), vec![0; PIECE_BYTES], 0);
    loop {
        match stream.read(&mut piece)? {
            // The head is included in `received`.
            0 if received > BODY_BYTES => return Ok(()),
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => {
                received += count as u64;
                pace.keep(count);
            }
        }
    }
}

/// Sends the body as fast as the server receives it, and waits for the answer.
fn upload(address: &str) -> std::io::Result<()> {
    let mut stream = connect(address)?;
    let head =
        format!("POST /upload HTTP/1.1\r\nHost: bench\r\nContent-Length: {BODY_BYTES}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    let piece = vec![0; PIECE_BYTES];
    for _ in 0..BODY_BYTES / PIECE_BYTES as u64 {
        stream.write_all(&piece)?;
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(std::io::Error::other(answer)) }
}

fn connect(address: &str) -> std::io::Result<TcpStream> {
    let address: SocketAddr = address.parse().map_err(std::io::Error::other)?;
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.set_write_timeout(Some(TIME_LIMIT))?;
    Ok(stream)
}
