//! respawn: the worker process is killed under load; how long until somebody is served again?
//!
//! The time runs from before the SIGKILL until a new connection, opened after the process is known to be gone, has
//! got a correct answer. What fails meanwhile is counted: requests that the killed process had taken must fail.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Serialize;

use crate::Measured;
use crate::load::{self, Load, Totals};
use crate::options::Options;
use crate::process::Process;
use crate::report::{self, Document};
use crate::servers::{POLL_INTERVAL, Program, Running, SMALL_BODY, Setting, send_signal};

const RESPAWN_TIME_LIMIT: Duration = Duration::from_secs(30);
/// What the issue asks for.
const SERVED_AGAIN_MAX_MS: f64 = 1000.0;
/// Correct answers between two kills, so that each meets a server at work.
const ANSWERS_BETWEEN: u64 = 5_000;

#[derive(Debug, Serialize)]
struct Outcome {
    server: String,
    kills: Vec<Kill>,
    load: Totals,
}

#[derive(Debug, Serialize)]
struct Kill {
    /// From the signal until the process was gone, and until a request was answered.
    gone_ms: f64,
    served_ms: f64,
    /// Requests of the load that failed around it.
    failed: u64,
    /// Attempts of the harness that failed before one was answered.
    failed_probes: u32,
}

/// Measures every chosen server; Gale when none is chosen.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["gale"]))?;
    let mut outcomes = Vec::new();
    for program in &programs {
        eprintln!("{}: {} kills", program.label, options.rounds);
        outcomes.push(measure_one(options, program)?);
    }
    let holds = outcomes.iter().all(|o| o.kills.iter().all(|kill| kill.served_ms <= SERVED_AGAIN_MAX_MS));
    let body: String = outcomes.iter().map(Outcome::markdown).collect();
    Ok((Document::new("respawn", "Worker process killed under load", &programs, &body, &outcomes)?, holds))
}

fn measure_one(options: &Options, program: &Program) -> Result<Outcome, String> {
    let setting = Setting { is_short: false, core: None, floor_body_bytes: SMALL_BODY.len() };
    let server = program.start(setting)?;
    let load = Load::start(&server.address, options.keepalive_clients, options.short_clients);
    let mut kills = Vec::new();
    for _ in 0..options.rounds {
        wait_for_answers(&server, &load, ANSWERS_BETWEEN)?;
        let before = load.totals().failed;
        let mut kill = kill_worker(&server)?;
        // By now every client has met the new worker or failed on the old one.
        wait_for_answers(&server, &load, ANSWERS_BETWEEN)?;
        kill.failed = load.totals().failed - before;
        eprintln!("  served again after {:.1} ms", kill.served_ms);
        kills.push(kill);
    }
    Ok(Outcome { server: program.label.clone(), kills, load: load.stop() })
}

fn kill_worker(server: &Running) -> Result<Kill, String> {
    let worker = worker_of(server)?;
    let begun = Instant::now();
    let elapsed_ms = || begun.elapsed().as_secs_f64() * 1000.0;
    let within_limit = |what: &str| {
        if begun.elapsed() < RESPAWN_TIME_LIMIT {
            return Ok(());
        }
        Err(format!("{}: {what} within {RESPAWN_TIME_LIMIT:?}\n{}", server.label, server.error_log_end()))
    };
    send_signal(worker, Signal::KILL)?;
    while worker.is_alive() {
        within_limit("the worker is not gone")?;
        std::thread::yield_now();
    }
    let gone_ms = elapsed_ms();
    let mut failed_probes = 0;
    while load::request_once(&server.address, "/return", RESPAWN_TIME_LIMIT).as_deref() != Ok(SMALL_BODY) {
        within_limit("nobody is served")?;
        failed_probes += 1;
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(Kill { gone_ms, served_ms: elapsed_ms(), failed: 0, failed_probes })
}

/// The master's child that has worked most: helpers have done next to nothing.
fn worker_of(server: &Running) -> Result<Process, String> {
    let children = server.root.children();
    let worker = children.into_iter().filter(|child| child.is_alive()).max_by_key(|child| child.cpu_time());
    worker.ok_or_else(|| format!("{} has no worker process", server.label))
}

fn wait_for_answers(server: &Running, load: &Load, answers: u64) -> Result<(), String> {
    let (target, deadline) = (load.answered() + answers, Instant::now() + RESPAWN_TIME_LIMIT);
    while load.answered() < target {
        if Instant::now() >= deadline {
            return Err(format!(
                "{} answers too slowly: {:?}\n{}",
                server.label,
                load.totals(),
                server.error_log_end()
            ));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

impl Outcome {
    fn markdown(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .kills
            .iter()
            .enumerate()
            .map(|(index, kill)| {
                vec![
                    (index + 1).to_string(),
                    format!("{:.1}", kill.gone_ms),
                    format!("{:.1}", kill.served_ms),
                    kill.failed.to_string(),
                    kill.failed_probes.to_string(),
                ]
            })
            .collect();
        let header = ["kill", "gone after ms", "served again after ms", "failed requests", "failed probes"];
        let mut text = format!("## {}\n\n{}\n", self.server, report::table(&header, &rows));
        text.push_str(&format!(
            "Load: {} requests over kept-alive connections, {} over short ones, {} failed; longest answer {:.1} ms.\n\n",
            self.load.keepalive_requests, self.load.short_requests, self.load.failed, self.load.longest_ms
        ));
        for (kind, count) in &self.load.failures {
            text.push_str(&format!("- {kind}: {count}\n"));
        }
        text
    }
}
