//! cache-million: a cache with a million entries: memory, first hit after a kill, effect of loading on other clients,
//! and a purge of a tenth of the entries by tag.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Serialize;

use super::programs;
use crate::Measured;
use crate::client::swarm::{self, Got, Swarm};
use crate::memory::Memory;
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{Kind, POLL_INTERVAL, Program, Running, Setting, send_signal};

const FILL_CONNECTIONS: usize = 64;
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Time that other clients are observed after the start.
const WATCHED: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    entries: usize,
    stored_per_second: f64,
    /// PSS of all processes above that of an empty cache, per entry.
    bytes_per_entry: f64,
    /// Time from the restart after the kill to the first hit.
    first_hit_ms: f64,
    /// Requests for two bytes every 20 ms: at rest, and while entries are loaded.
    probe_alone: Got,
    probe_loading: Got,
    /// Gale only; the others do not purge by tag.
    purge_ms: Option<f64>,
    hit_after_purge: Option<bool>,
}

/// Folder of the cache. It outlives the servers.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn measure(options: &Options) -> Measured {
    let programs = programs(options)?;
    // Removed only after the last measurement, because ext4 searches long for an inode where many were just freed.
    let mut folders = Vec::new();
    let mut rows = Vec::new();
    for program in &programs {
        let row = measure_one(options, program, &mut folders).map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("cache-million: {row:?}");
        rows.push(row);
    }
    let or_dash = |figure: Option<f64>| figure.map_or("–".to_owned(), |figure| format!("{figure:.1}"));
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("entries", &|row| row.entries.to_string()),
            ("stored/s", &|row| format!("{:.0}", row.stored_per_second)),
            ("bytes of memory an entry", &|row| format!("{:.0}", row.bytes_per_entry)),
            ("first hit after kill -9, ms", &|row| format!("{:.0}", row.first_hit_ms)),
            ("probe p99 ms, at rest / loading", &|row| {
                format!("{:.2} / {:.2}", row.probe_alone.p99_ms, row.probe_loading.p99_ms)
            }),
            ("longest ms", &|row| format!("{:.1} / {:.1}", row.probe_alone.max_ms, row.probe_loading.max_ms)),
            ("purge of a tenth by tag, ms", &|row| or_dash(row.purge_ms)),
        ],
    );
    let body = format!(
        "Responses of 2 bytes under as many keys, stored one after the other over {FILL_CONNECTIONS} connections by \
         one worker. Then all processes are killed and restarted on the same directory: the time until one of the keys \
         is served from the cache (`X-Cache: HIT`), and the latency of a probe for two bytes every 20 ms in the {} s \
         after that.\n\n{table}",
        WATCHED.as_secs()
    );
    let holds = rows.iter().all(|row| row.hit_after_purge != Some(true));
    Ok((Document::new("cache-million", "A cache with a million entries", &programs, &body, &rows)?, holds))
}

fn measure_one(options: &Options, program: &Program, folders: &mut Vec<Folder>) -> Result<Row, String> {
    let entries = options.experiment.cache_entries;
    let name = format!("gale-bench-cache-{}-{}", std::process::id(), folders.len());
    let folder = options.experiment.directory.join(name);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    folders.push(Folder(folder.clone()));
    let setting = || setting(options, program, &folder);
    let running = program.start(setting())?;
    let empty = Memory::read(&running.root.tree());
    let per_second = fill(&running, entries)?;
    let full = Memory::read(&running.root.tree());
    // The journal is written in the background.
    std::thread::sleep(Duration::from_secs(2));
    for process in running.root.tree() {
        send_signal(process, Signal::KILL)?;
    }
    drop(running);
    let begun = Instant::now();
    let running = program.start(setting())?;
    let (probe_loading, first_hit) = std::thread::scope(|scope| {
        let probe = scope.spawn(|| watch(&running));
        let hit = first_hit(&running, entries / 2, begun);
        (probe.join().expect("the probe does not panic"), hit)
    });
    let probe_alone = watch(&running)?;
    let (mut purge_ms, mut hit_after_purge) = (None, None);
    if program.kind == Kind::Gale {
        let begun = Instant::now();
        let answer = ask(&running, "PURGE /entry HTTP/1.1\r\nX-Purge-Tags: tenth")?;
        purge_ms = Some(begun.elapsed().as_secs_f64() * 1e3);
        if !answer.starts_with("HTTP/1.1 204") {
            return Err(format!("the purge was answered with {answer}"));
        }
        hit_after_purge = Some(is_hit(&running, 0)?);
        if !is_hit(&running, 1)? {
            return Err("what has another tag was purged".to_owned());
        }
    }
    Ok(Row {
        server: program.label.clone(),
        entries,
        stored_per_second: per_second,
        bytes_per_entry: (full.pss_kib as f64 - empty.pss_kib as f64) * 1024.0 / entries as f64,
        first_hit_ms: first_hit?.as_secs_f64() * 1e3,
        probe_alone,
        probe_loading: probe_loading?,
        purge_ms,
        hit_after_purge,
    })
}

fn setting(options: &Options, program: &Program, folder: &Path) -> Setting {
    let purge = match program.kind {
        Kind::Gale => {
            "proxy_cache_purge $purge; proxy_cache_purge_tags $http_x_purge_tags; proxy_cache_tag_header Surrogate-Key;"
        }
        _ => "",
    };
    let (folder, origin) = (folder.display(), folder.with_extension("socket"));
    let origin = origin.display();
    // A killed server leaves its socket behind.
    let _ = std::fs::remove_file(origin.to_string());
    Setting {
        cores: Some(vec![options.server_core]),
        http: format!(
            "proxy_cache_path {folder} levels=1:2 keys_zone=cache:256m max_size=100g inactive=10h use_temp_path=off;\n\
             map $arg_n $tag {{ ~0$ tenth; default rest; }}\nmap $request_method $purge {{ PURGE 1; default 0; }}\n\
             upstream origin {{ server unix:{origin}; keepalive {FILL_CONNECTIONS}; }}\n\
             server {{ listen unix:{origin}; add_header Surrogate-Key $tag; return 200 ok; }}"
        ),
        server: format!(
            "location = /entry {{ proxy_pass http://origin; proxy_http_version 1.1; \
             proxy_set_header Connection \"\"; proxy_cache cache; proxy_cache_valid 200 10h; \
             proxy_cache_key $request_uri; add_header X-Cache $upstream_cache_status; {purge} }}"
        ),
        ..Setting::default()
    }
}

fn request(number: usize) -> String {
    format!("GET /entry?n={number} HTTP/1.1\r\nHost: bench\r\n\r\n")
}

/// Requests each key once. Returns the rate per second.
fn fill(running: &Running, entries: usize) -> Result<f64, String> {
    let (begun, ends, mut next) = (Instant::now(), AtomicBool::new(false), 0);
    let mut ask = |_: usize| {
        let number = next;
        next += 1;
        if number >= entries {
            ends.store(true, Ordering::Relaxed);
        }
        request(number.min(entries - 1))
    };
    let got = Swarm {
        address: &running.address,
        connections: FILL_CONNECTIONS,
        request: &mut ask,
        warm_up: Duration::ZERO,
        run_time: Duration::from_secs(600),
        ends: &ends,
        bytes_per_second: None,
        asks_every: Duration::ZERO,
        certificate: None,
    }
    .run()?;
    if got.errors > 0 || !ends.load(Ordering::Relaxed) {
        return Err(format!("the cache was not filled: {got:?}"));
    }
    Ok(entries as f64 / begun.elapsed().as_secs_f64())
}

fn is_hit(running: &Running, number: usize) -> Result<bool, String> {
    let answer = ask(running, request(number).lines().next().unwrap_or_default())?;
    Ok(answer.to_ascii_lowercase().contains("x-cache: hit"))
}

/// Sends a request over a new connection and returns the whole response.
fn ask(running: &Running, lines: &str) -> Result<String, String> {
    let asked = TcpStream::connect(&running.address).and_then(|mut stream| {
        stream.set_read_timeout(Some(TIME_LIMIT))?;
        write!(stream, "{lines}\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    asked.map_err(|error| format!("{lines}: {error}"))
}

/// Requests different keys until one is a hit: a missed key is stored, and would be a hit the next time.
fn first_hit(running: &Running, from: usize, begun: Instant) -> Result<Duration, String> {
    for number in from.. {
        if is_hit(running, number)? {
            break;
        }
        if begun.elapsed() > TIME_LIMIT {
            return Err("there is no hit".to_owned());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(begun.elapsed())
}

fn watch(running: &Running) -> Result<Got, String> {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let probe = scope.spawn(|| swarm::probe(&running.address, "/return", Duration::ZERO, &ends));
        std::thread::sleep(WATCHED);
        ends.store(true, Ordering::Relaxed);
        probe.join().expect("the probe does not panic")
    })
}
