//! cache-disks: a cache on three disks. Hits in memory are measured together with hits on disk that saturate the disks.
//! Then one disk hangs, which should not affect the shares of the other two.
//!
//! Hits are requested at a fixed rate by clients with priority over everything else: on a machine with all cores busy,
//! a closed loop of hits would measure how clients and server share them. Two figures show the remaining disturbance:
//! the time that the server's loops waited for a core, and the number of hits that reached the backend, since a hit in
//! memory needs neither disk nor backend.
//!
//! The disks are loop devices with a file system each, whose reads are limited by a control group, since a machine
//! rarely has three real ones. A hanging disk is one with a limit of a byte per second.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::programs;
use crate::Measured;
use crate::client::swarm::{self, Got, Swarm};
use crate::options::Options;
use crate::process;
use crate::report::{self, Document};
use crate::servers::{Program, Running, Setting};
use crate::thread_pools::confine::{self, Cage, Device, SmallDisk};
use crate::thread_pools::data_set::Random;
use crate::thread_pools::{get, is_event_loop, stalls};

const DISKS: usize = 3;
const OBJECT_BYTES: usize = 1 << 20;
/// Objects on each disk; together three times the memory.
const OBJECTS: usize = 512;
const MEMORY_BYTES: u64 = 512 << 20;
const DISK_BYTES_PER_SECOND: u64 = 30 << 20;
/// Rate of a hanging disk, in bytes per second.
const HUNG: u64 = 1;
const COLD_CONNECTIONS: usize = 20;
/// Minimum interval between requests of a connection. Together they ask for more than a disk can deliver, but for less
/// than server and backend could transfer with the CPU if no disk were used.
const COLD_EVERY: Duration = Duration::from_millis(400);
const WARM_UP: Duration = Duration::from_secs(2);

/// Results of one disk's clients: for one object in memory, and for all objects.
#[derive(Clone, Copy, Debug, Serialize)]
struct Share {
    hot: Got,
    cold: Option<Got>,
}

/// Results of a run for all clients, and figures about the machine and the backend.
#[derive(Debug, Serialize)]
struct Phase {
    shares: Vec<Share>,
    /// Backend requests for objects in memory.
    hot_at_backend: u64,
    /// Share of time that the server's loops were ready and waited for a core.
    waited_for_core: f64,
}

impl Phase {
    /// Hits in memory of the first disk.
    fn hot(&self) -> Got {
        self.shares[0].hot
    }

    /// Hits on the first disk, which does not hang.
    fn cold(&self, figure: fn(&Got) -> f64) -> f64 {
        self.shares[0].cold.as_ref().map_or(f64::NAN, figure)
    }

    /// Hits on the last disk.
    fn hung(&self, figure: fn(&Got) -> f64) -> f64 {
        self.shares[DISKS - 1].cold.as_ref().map_or(f64::NAN, figure)
    }
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    alone: Phase,
    saturated: Phase,
    /// With the last disk hanging.
    hung: Phase,
    stalls: Vec<String>,
}

/// Dropped in this order: the control group must be empty, the disks unmounted.
struct Site {
    cage: Cage,
    disks: Vec<SmallDisk>,
    devices: Vec<Device>,
    directory: PathBuf,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.disks.clear();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

pub fn measure(options: &Options) -> Measured {
    let programs = programs(options)?;
    let origin = Origin::start().map_err(|error| format!("backend: {error}"))?;
    let mut rows = Vec::new();
    let mut notes = String::new();
    for program in &programs {
        let site = Site::build(options)?;
        notes = site.cage.left_out.iter().map(|sentence| format!("**Left out.** {sentence}\n\n")).collect();
        let row = measure_one(options, program, &site, &origin)?;
        eprintln!("cache-disks: {row:?}");
        rows.push(row);
    }
    let three =
        |row: &Row, figure: fn(&Phase) -> String| [&row.alone, &row.saturated, &row.hung].map(figure).join(", ");
    let hot = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("hit in memory, p99 ms: alone", &|row| format!("{:.1}", row.alone.hot().p99_ms)),
            ("disks saturated", &|row| format!("{:.1}", row.saturated.hot().p99_ms)),
            ("one disk hangs", &|row| format!("{:.1}", row.hung.hot().p99_ms)),
            ("of the disk that hangs", &|row| format!("{:.1}", row.hung.shares[DISKS - 1].hot.p99_ms)),
            ("its longest", &|row| format!("{:.0}", row.hung.shares[DISKS - 1].hot.max_ms)),
            ("at the backend: alone, saturated, hangs", &|row| three(row, |phase| phase.hot_at_backend.to_string())),
            ("loops waited for a core", &|row| three(row, |phase| format!("{:.0} %", phase.waited_for_core * 100.0))),
            ("stalls logged", &|row| row.stalls.len().to_string()),
        ],
    );
    let cold = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("another disk, requests/s: before", &|row| {
                format!("{:.1}", row.saturated.cold(|got| got.requests_per_second))
            }),
            ("while one hangs", &|row| format!("{:.1}", row.hung.cold(|got| got.requests_per_second))),
            ("p99 ms: before", &|row| format!("{:.0}", row.saturated.cold(|got| got.p99_ms))),
            ("while one hangs ", &|row| format!("{:.0}", row.hung.cold(|got| got.p99_ms))),
            ("share of the disk that hangs, requests/s", &|row| {
                format!("{:.1}", row.hung.hung(|got| got.requests_per_second))
            }),
            ("p50 ms", &|row| format!("{:.0}", row.hung.hung(|got| got.p50_ms))),
            ("longest ms", &|row| format!("{:.0}", row.hung.hung(|got| got.max_ms))),
            ("broken off", &|row| format!("{:.0}", row.hung.hung(|got| got.errors as f64))),
        ],
    );
    let body = format!(
        "{notes}Three disks, each with a cache and a pool of 16 threads. Disks are loop devices, held to {} MiB/s \
         each; a disk that hangs gives a byte a second, for {} s, and begins while requests are in flight. \
         {OBJECTS} objects of 1 MiB on each, {} MiB of memory for server and page cache; the backend sends strong \
         entity tags and parts. On each disk one object is in memory, for which clients of real-time priority ask 50 \
         times a second, and {COLD_CONNECTIONS} connections request any object, one after the other and at most every \
         {} ms: more than the disk can read. {} workers, and all of this on the same cores.\n\n{hot}\n\
         Requests for objects on the disks:\n\n{cold}",
        DISK_BYTES_PER_SECOND >> 20,
        hang_time(options).as_secs(),
        MEMORY_BYTES >> 20,
        COLD_EVERY.as_millis(),
        options.experiment.workers
    );
    Ok((Document::new("cache-disks", "Three disks with a cache each", &programs, &body, &rows)?, true))
}

fn hang_time(options: &Options) -> Duration {
    options.run_time.max(Duration::from_secs(30))
}

impl Site {
    fn build(options: &Options) -> Result<Site, String> {
        let directory = options.experiment.directory.join(format!("gale-bench-disks-{}", std::process::id()));
        std::fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let mut site = Site { cage: Cage::default(), disks: Vec::new(), devices: Vec::new(), directory };
        let bytes = (OBJECTS * OBJECT_BYTES) as u64 * 3 / 2;
        for number in 1..=DISKS {
            let disk = SmallDisk::named(&site.directory, &format!("disk{number}"), bytes)?;
            site.devices.extend(confine::device_of(&disk.mount_point));
            site.disks.push(disk);
        }
        site.cage = Cage::build(MEMORY_BYTES, &site.devices, DISK_BYTES_PER_SECOND);
        Ok(site)
    }

    fn setting(&self, options: &Options, origin: &Origin) -> Setting {
        let pools: String = (1..=DISKS).map(|number| format!("thread_pool pool_{number} threads=16;\n")).collect();
        let paths: String = (1..)
            .zip(&self.disks)
            .map(|(number, disk)| {
                format!(
                    "proxy_cache_path {}/cache levels=1:2 keys_zone=cache_{number}:64m max_size=100g inactive=10h \
                     use_temp_path=off;\n",
                    disk.mount_point.display()
                )
            })
            .collect();
        Setting {
            workers: options.experiment.workers,
            under: Some(self.cage.words()),
            blocks: pools,
            // By name rather than hash, so that clients know which disk they ask for.
            http: format!("{paths}map $uri $disk {{ ~^/disk1/ 1; ~^/disk2/ 2; default 3; }}"),
            server: format!(
                "location /disk {{ proxy_pass http://{}; proxy_cache_key $request_uri; \
                 proxy_cache cache_$disk; proxy_cache_valid 200 10h; aio threads=pool_$disk; sendfile on; \
                 sendfile_max_chunk 512k; }}",
                origin.address
            ),
            ..Setting::default()
        }
    }
}

fn measure_one(options: &Options, program: &Program, site: &Site, origin: &Origin) -> Result<Row, String> {
    let server = program.start(site.setting(options, origin))?;
    fill(&server)?;
    let (calm, hung_device) = (|| Ok(()), *site.devices.last().ok_or("the disks are no devices")?);
    let alone = run(&server, origin, options.run_time, false, calm)?;
    let saturated = run(&server, origin, options.run_time, true, calm)?;
    let hang = || site.cage.hold_reads(hung_device, HUNG);
    let hung = run(&server, origin, hang_time(options), true, hang);
    site.cage.hold_reads(hung_device, DISK_BYTES_PER_SECOND)?;
    Ok(Row { server: program.label.clone(), alone, saturated, hung: hung?, stalls: stalls(&server.error_log()) })
}

/// Requests each object once, so that all are stored.
fn fill(server: &Running) -> Result<(), String> {
    let (ends, mut next) = (AtomicBool::new(false), 0);
    let mut ask = |_: usize| {
        if next + 1 >= DISKS * OBJECTS {
            ends.store(true, Ordering::Relaxed);
        }
        let request = get(&path(next % DISKS, next / DISKS));
        next = (next + 1).min(DISKS * OBJECTS - 1);
        request
    };
    let swarm = Swarm {
        address: &server.address,
        connections: 8,
        request: &mut ask,
        warm_up: Duration::ZERO,
        run_time: Duration::from_secs(300),
        ends: &ends,
        bytes_per_second: None,
        asks_every: Duration::ZERO,
        certificate: None,
    };
    let got = swarm.run()?;
    if got.errors > 0 { Err(format!("the caches were not filled: {got:?}")) } else { Ok(()) }
}

fn path(disk: usize, object: usize) -> String {
    format!("/disk{}/{object}", disk + 1)
}

/// Runs clients of one object on every disk and, `with_cold`, clients of all objects. `then` is called when all of them
/// count.
fn run(
    server: &Running,
    origin: &Origin,
    run_time: Duration,
    with_cold: bool,
    then: impl FnOnce() -> Result<(), String>,
) -> Result<Phase, String> {
    let (ends, hot_end) = (AtomicBool::new(false), AtomicBool::new(false));
    let address = server.address.as_str();
    let (threads, asked) = (loops(server), origin.hot.load(Ordering::Relaxed));
    let shares = std::thread::scope(|scope| {
        let hot: Vec<_> = (0..DISKS)
            .map(|disk| {
                let (path, hot_end) = (path(disk, 0), &hot_end);
                scope.spawn(move || swarm::prompt_probe(address, &path, OBJECT_BYTES, WARM_UP, hot_end))
            })
            .collect();
        let cold = |disk: usize| {
            let ends = &ends;
            move || {
                let mut random = Random(0x2545_f491_4f6c_dd1d + disk as u64);
                let mut any = move |_: usize| get(&path(disk, 1 + random.below(OBJECTS - 1)));
                Swarm {
                    address,
                    connections: COLD_CONNECTIONS,
                    request: &mut any,
                    warm_up: WARM_UP,
                    run_time,
                    ends,
                    bytes_per_second: None,
                    asks_every: COLD_EVERY,
                    certificate: None,
                }
                .run()
            }
        };
        let cold: Vec<_> = (0..DISKS).map(|disk| with_cold.then(|| scope.spawn(cold(disk)))).collect();
        std::thread::sleep(WARM_UP);
        let happened = then();
        std::thread::sleep(run_time);
        hot_end.store(true, Ordering::Relaxed);
        let ended = "a client does not panic";
        let cold: Vec<_> = cold.into_iter().map(|cold| cold.map(|cold| cold.join().expect(ended))).collect();
        let hot: Vec<_> = hot.into_iter().map(|hot| hot.join().expect(ended)).collect();
        happened?;
        let share = |(hot, cold): (Result<Got, String>, Option<Result<Got, String>>)| {
            Ok::<_, String>(Share { hot: hot?, cold: cold.transpose()? })
        };
        hot.into_iter().zip(cold).map(share).collect::<Result<Vec<Share>, String>>()
    })?;
    let spent = loops(server).into_iter().filter_map(|(id, thread)| Some(thread.since(*threads.get(&id)?)));
    let (ran, waited) = spent.fold((Duration::ZERO, Duration::ZERO), |(ran, waited), thread| {
        (ran + thread.cpu_time, waited + thread.run_delay)
    });
    let waited_for_core = waited.as_secs_f64() / (ran + waited).as_secs_f64().max(f64::MIN_POSITIVE);
    Ok(Phase { shares, hot_at_backend: origin.hot.load(Ordering::Relaxed) - asked, waited_for_core })
}

/// Returns the scheduling figures of the server's event loops.
fn loops(server: &Running) -> process::Threads {
    let mut loops = process::Threads::new();
    for process in server.root.tree() {
        let names = process.thread_states();
        let is_loop =
            |id: &u32| names.iter().any(|(own, name, _)| own == id && is_event_loop(process, server.root, name));
        loops.extend(process.threads().into_iter().filter(|(id, _)| is_loop(id)));
    }
    loops
}

/// The backend: a body of [`OBJECT_BYTES`] with a strong entity tag for every request, and ranges of it.
struct Origin {
    address: SocketAddr,
    /// Requests for objects that are in the servers' memory.
    hot: Arc<AtomicU64>,
}

impl Origin {
    /// Starts the backend, which runs until the program ends, with a thread for each connection.
    fn start() -> std::io::Result<Origin> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let origin = Origin { address: listener.local_addr()?, hot: Arc::default() };
        let hot = Arc::clone(&origin.hot);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hot = Arc::clone(&hot);
                // The thread ends with an error if the proxy closes.
                std::thread::spawn(move || serve(stream, &hot));
            }
        });
        Ok(origin)
    }
}

fn serve(mut stream: TcpStream, hot: &AtomicU64) -> std::io::Result<()> {
    static BODY: [u8; OBJECT_BYTES] = [b'x'; OBJECT_BYTES];
    let mut piece = vec![0; 4096];
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read(&mut piece)? {
                0 => return Ok(()),
                count => head.extend_from_slice(&piece[..count]),
            }
        }
        let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let target = head.split(' ').nth(1).unwrap_or_default();
        hot.fetch_add(u64::from(target.ends_with("/0")), Ordering::Relaxed);
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let range = field("range:").filter(|_| field("if-range:") == Some("\"1\""));
        let part = range.and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            let end = if last.is_empty() { OBJECT_BYTES } else { last.parse::<usize>().ok()? + 1 };
            let first = first.parse::<usize>().ok()?;
            (first < end && end <= OBJECT_BYTES).then_some(first..end)
        });
        let (status, content_range) = match &part {
            Some(part) => (
                "206 Partial Content",
                format!("Content-Range: bytes {}-{}/{OBJECT_BYTES}\r\n", part.start, part.end - 1),
            ),
            None => ("200 OK", String::new()),
        };
        let part = part.unwrap_or(0..OBJECT_BYTES);
        let length = part.len();
        write!(stream, "HTTP/1.1 {status}\r\nETag: \"1\"\r\n{content_range}Content-Length: {length}\r\n")?;
        // A proxy that uses HTTP/1.0 would wait for the end of the connection.
        let closes = head.lines().next().is_some_and(|line| line.ends_with("http/1.0"));
        write!(stream, "{}\r\n", if closes { "Connection: close\r\n" } else { "" })?;
        stream.write_all(&BODY[part])?;
        if closes {
            return Ok(());
        }
    }
}
