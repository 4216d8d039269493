//! respawn: time until requests are served again after the worker process was killed under load.
//!
//! The time begins before the SIGKILL. It ends when a new connection, opened after the process is known to be gone, has
//! received a correct answer. Failed requests are counted: those that the killed process had accepted must fail.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Serialize;

use crate::Measured;
use crate::client::load::{self, Totals};
use crate::options::Options;
use crate::process::Process;
use crate::report;
use crate::servers::{POLL_INTERVAL, Program, Running, SMALL_BODY, send_signal};
use crate::under_load::{self, UnderLoad};

const RESPAWN_TIME_LIMIT: Duration = Duration::from_secs(30);
/// Limit for the time without service.
const SERVED_AGAIN_MAX_MS: f64 = 1000.0;
/// Correct answers between two kills, so that each hits a working server.
const ANSWERS_BETWEEN: u64 = 5_000;

#[derive(Debug, Serialize)]
struct Outcome {
    server: String,
    kills: Vec<Kill>,
    load: Totals,
}

#[derive(Debug, Serialize)]
struct Kill {
    /// Time from the signal until the process was gone, and until a request was answered.
    gone_ms: f64,
    served_ms: f64,
    /// Failed requests of the load around the kill.
    failed: u64,
    /// Failed attempts of the harness before the first answer.
    failed_probes: u32,
}

/// Measures the chosen servers, or Gale.
pub fn measure(options: &Options) -> Measured {
    under_load::measure_each(options, "respawn", "Worker process killed under load", measure_one)
}

fn measure_one(options: &Options, program: &Program) -> Result<Outcome, String> {
    let under_load = UnderLoad::start(options, under_load::start_unpinned(program)?);
    let mut kills = Vec::new();
    for _ in 0..options.rounds {
        under_load.wait_for_answers(ANSWERS_BETWEEN)?;
        let before = under_load.load.totals().failed;
        let mut kill = kill_worker(&under_load)?;
        // By now every client uses the new worker process or has failed on the old one.
        under_load.wait_for_answers(ANSWERS_BETWEEN)?;
        kill.failed = under_load.load.totals().failed - before;
        eprintln!("  served again after {:.1} ms", kill.served_ms);
        kills.push(kill);
    }
    let UnderLoad { load, server } = under_load;
    let load = load.stop();
    drop(server);
    Ok(Outcome { server: program.label.clone(), kills, load })
}

fn kill_worker(under_load: &UnderLoad) -> Result<Kill, String> {
    let server = &under_load.server;
    let worker = worker_of(server).ok_or_else(|| under_load.failed("has no worker process"))?;
    let begun = Instant::now();
    let elapsed_ms = || begun.elapsed().as_secs_f64() * 1000.0;
    let within_limit = |what: &str| {
        if begun.elapsed() < RESPAWN_TIME_LIMIT {
            return Ok(());
        }
        Err(under_load.failed(&format!("{what} within {RESPAWN_TIME_LIMIT:?}")))
    };
    send_signal(worker, Signal::KILL)?;
    while worker.is_alive() {
        within_limit("has a worker that is not gone")?;
        std::thread::yield_now();
    }
    let gone_ms = elapsed_ms();
    let mut failed_probes = 0;
    while load::request_once(&server.address, "/return", RESPAWN_TIME_LIMIT).as_deref() != Ok(SMALL_BODY) {
        within_limit("does not serve")?;
        failed_probes += 1;
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(Kill { gone_ms, served_ms: elapsed_ms(), failed: 0, failed_probes })
}

/// Returns the master's child with the most CPU time; helpers use almost none.
pub fn worker_of(server: &Running) -> Option<Process> {
    let children = server.root.children();
    children.into_iter().filter(|child| child.is_alive()).max_by_key(|child| child.cpu_time())
}

impl under_load::Outcome for Outcome {
    fn holds(&self) -> bool {
        self.kills.iter().all(|kill| kill.served_ms <= SERVED_AGAIN_MAX_MS)
    }

    fn markdown(&self) -> String {
        let numbered: Vec<(usize, &Kill)> = self.kills.iter().enumerate().collect();
        type Numbered<'a> = (usize, &'a Kill);
        let table = report::table_of(
            &numbered,
            &[
                ("kill", &|(index, _): &Numbered| (index + 1).to_string()),
                ("gone after ms", &|(_, kill)| format!("{:.1}", kill.gone_ms)),
                ("served again after ms", &|(_, kill)| format!("{:.1}", kill.served_ms)),
                ("failed requests", &|(_, kill)| kill.failed.to_string()),
                ("failed probes", &|(_, kill)| kill.failed_probes.to_string()),
            ],
        );
        format!("## {}\n\n{table}\n{}", self.server, under_load::load_markdown(&self.load))
    }
}
