//! names: thousands of servers with a certificate each: duration of `-t`, start and reload, memory per certificate, and
//! latency for a client meanwhile.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::case::in_turn;
use crate::certificate;
use crate::client::load;
use crate::memory::Memory;
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{POLL_INTERVAL, Program, Running, Setting, free_port};

const NAMES: usize = 5000;
/// Consecutive reloads, while a client sends requests.
const RELOADS: u32 = 5;
const TIME_LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Readings>,
}

#[derive(Clone, Debug, Serialize)]
struct Readings {
    check_s: f64,
    start_s: f64,
    /// Median time until a new connection gets the new configuration.
    reload_s: f64,
    /// PSS of all processes above that of the same server without certificates, per certificate.
    name_kib: f64,
    name_kib_later: f64,
    /// Longest time for two bytes over a new connection during reloads.
    wait_max_ms: f64,
}

/// Certificates in a folder, which is removed on drop.
struct Certificates(PathBuf);

impl Certificates {
    fn make() -> Result<Certificates, String> {
        let directory = std::env::temp_dir().join(format!("gale-bench-{}-names", std::process::id()));
        fs::create_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let made = Certificates(directory);
        for number in 0..NAMES {
            let (chain, key) = certificate::texts(&[name(number)])?;
            let path = |kind: &str| made.0.join(format!("{number}.{kind}"));
            let written = fs::write(path("pem"), chain).and_then(|()| fs::write(path("key"), key));
            written.map_err(|error| format!("{}: {error}", made.0.display()))?;
        }
        Ok(made)
    }

    fn servers(&self, port: u16) -> String {
        let directory = self.0.display();
        let server = |number: usize| {
            format!(
                "server {{ listen 127.0.0.1:{port} ssl; server_name {}; ssl_certificate {directory}/{number}.pem; \
                 ssl_certificate_key {directory}/{number}.key; return 200 {number}; }}\n",
                name(number)
            )
        };
        (0..NAMES).map(server).collect()
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn name(number: usize) -> String {
    format!("n{number}.example")
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let certificates = Certificates::make()?;
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let readings = measure_one(program, &certificates).map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("names: {} round {round}: {readings:?}", program.label);
        Ok(readings)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let spread = |row: &Row, figure: fn(&Readings) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("-t, s", &|row| spread(row, |readings| readings.check_s)),
            ("start, s", &|row| spread(row, |readings| readings.start_s)),
            ("reload, s", &|row| spread(row, |readings| readings.reload_s)),
            ("KiB a name", &|row| spread(row, |readings| readings.name_kib)),
            ("after reloads", &|row| spread(row, |readings| readings.name_kib_later)),
            ("longest wait, ms", &|row| spread(row, |readings| readings.wait_max_ms)),
        ],
    );
    let body = format!(
        "{NAMES} servers with a certificate (P-256) and a file for it each; {} rounds; \
         median (least – greatest). Memory: PSS of all processes above that of the same server without them. The \
         longest wait of a client that asks for two bytes over new connections, one after the other, while {RELOADS} \
         reloads follow each other; server and client on both cores.\n\n{table}",
        options.idle_rounds
    );
    Ok((Document::new("names", "Servers with a certificate each", &programs, &body, &rows)?, true))
}

fn measure_one(program: &Program, certificates: &Certificates) -> Result<Readings, String> {
    let pss = |server: &Running| Memory::read(&server.root.tree()).pss_kib as f64;
    let bare = pss(&program.start(Setting::default())?);
    let setting = Setting { http: certificates.servers(free_port()?), ..Setting::default() };
    let begun = Instant::now();
    let server = program.start(setting)?;
    let start_s = begun.elapsed().as_secs_f64();
    let name_kib = (pss(&server) - bare) / NAMES as f64;
    let begun = Instant::now();
    check(program, &server)?;
    let check_s = begun.elapsed().as_secs_f64();
    let is_over = AtomicBool::new(false);
    let (reloads, wait_max) = std::thread::scope(|scope| {
        let probe = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::Acquire) {
                let begun = Instant::now();
                load::request_once(&server.address, "/return", TIME_LIMIT).map_err(|failure| format!("{failure:?}"))?;
                longest = longest.max(begun.elapsed());
                std::thread::sleep(POLL_INTERVAL);
            }
            Ok::<_, String>(longest)
        });
        let reloads: Result<Vec<f64>, String> = (1..=RELOADS).map(|generation| reload(&server, generation)).collect();
        is_over.store(true, Ordering::Release);
        (reloads, probe.join().expect("it does not panic"))
    });
    Ok(Readings {
        check_s,
        start_s,
        reload_s: Spread::of(reloads?).median,
        name_kib,
        name_kib_later: (pss(&server) - bare) / NAMES as f64,
        wait_max_ms: wait_max?.as_secs_f64() * 1e3,
    })
}

fn check(program: &Program, server: &Running) -> Result<(), String> {
    let prefix = server.directory();
    let mut command = Command::new(&program.binary);
    command.arg("-t").arg("-p").arg(prefix).arg("-c").arg(prefix.join("server.conf"));
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("-t: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("-t: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// Returns the seconds until a new connection gets the new configuration.
fn reload(server: &Running, generation: u32) -> Result<f64, String> {
    let begun = Instant::now();
    server.reload(generation)?;
    loop {
        let answer = load::request_once(&server.address, "/generation", TIME_LIMIT);
        if answer.is_ok_and(|body| body == generation.to_string().as_bytes()) {
            return Ok(begun.elapsed().as_secs_f64());
        }
        if begun.elapsed() >= TIME_LIMIT {
            return Err(format!("reload {generation} has no effect"));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
