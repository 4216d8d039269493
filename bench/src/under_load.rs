//! under_load: common parts of `reload` and `respawn`: a server with clients that check every answer.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::client::load::{Load, Totals};
use crate::options::Options;
use crate::report::Document;
use crate::servers::{POLL_INTERVAL, Program, Running, Setting};

/// Time limit for a number of answers. A slower server is considered broken.
const ANSWERS_TIME_LIMIT: Duration = Duration::from_secs(60);

/// A server under load. Dropping it stops the load first, then the server.
pub struct UnderLoad {
    pub load: Load,
    pub server: Running,
}

impl UnderLoad {
    /// Starts the load. The server is not pinned: it shares the machine with its clients.
    pub fn start(options: &Options, server: Running) -> UnderLoad {
        UnderLoad { load: Load::start(&server.address, options.keepalive_clients, options.short_clients), server }
    }

    /// Waits until the clients have received this many more correct answers.
    pub fn wait_for_answers(&self, answers: u64) -> Result<(), String> {
        let (target, deadline) = (self.load.answered() + answers, Instant::now() + ANSWERS_TIME_LIMIT);
        while self.load.answered() < target {
            if Instant::now() >= deadline {
                return Err(self.failed(&format!("answers too slowly: {:?}", self.load.totals())));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns an error message with the end of the server's log.
    pub fn failed(&self, what: &str) -> String {
        format!("{} {what}\n{}", self.server.label, self.server.error_log_end())
    }
}

/// Starts a server that is not pinned to a core.
pub fn start_unpinned(program: &Program) -> Result<Running, String> {
    program.start(Setting::default())
}

pub trait Outcome: Serialize {
    fn markdown(&self) -> String;
    /// Returns true if all absolute requirements are met.
    fn holds(&self) -> bool;
}

/// Measures the chosen servers, or Gale, and combines the results in one document.
pub fn measure_each<O: Outcome>(
    options: &Options,
    name: &'static str,
    title: &str,
    measure_one: fn(&Options, &Program) -> Result<O, String>,
) -> Measured {
    let programs = options.servers(Some(&["gale"]))?;
    let mut outcomes = Vec::new();
    for program in &programs {
        eprintln!("{}:", program.label);
        outcomes.push(measure_one(options, program)?);
    }
    let body: String = outcomes.iter().map(|outcome| format!("{}\n\n", outcome.markdown().trim_end())).collect();
    let holds = outcomes.iter().all(O::holds);
    Ok((Document::new(name, title, &programs, &body, &outcomes)?, holds))
}

/// Describes the load, followed by an empty line.
pub fn load_markdown(load: &Totals) -> String {
    let mut text = format!(
        "Load: {} requests over kept-alive connections, {} over short ones, {} failed; {} closes announced by the \
         server; longest answer {:.1} ms.\n\n",
        load.keepalive_requests, load.short_requests, load.failed, load.announced_closes, load.longest_ms
    );
    for (kind, count) in &load.failures {
        text.push_str(&format!("- {kind}: {count}\n"));
    }
    if !load.failures.is_empty() {
        text.push('\n');
    }
    text
}
