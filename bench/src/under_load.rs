//! under_load: what `reload` and `respawn` have in common: a server with clients that check every answer.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::client::load::{Load, Totals};
use crate::options::Options;
use crate::report::Document;
use crate::servers::{POLL_INTERVAL, Program, Running, Setting};

/// A server that takes longer for the answers that are waited for does not work.
const ANSWERS_TIME_LIMIT: Duration = Duration::from_secs(60);

/// Both end when this is dropped, the load first.
pub struct UnderLoad {
    pub load: Load,
    pub server: Running,
}

impl UnderLoad {
    /// The server is not pinned: it shares the machine with its clients.
    pub fn start(options: &Options, server: Running) -> UnderLoad {
        UnderLoad { load: Load::start(&server.address, options.keepalive_clients, options.short_clients), server }
    }

    /// Until the clients have had so many more correct answers.
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

    /// An error with the end of the server's log.
    pub fn failed(&self, what: &str) -> String {
        format!("{} {what}\n{}", self.server.label, self.server.error_log_end())
    }
}

/// A server that a program was started as.
pub fn start_unpinned(program: &Program) -> Result<Running, String> {
    program.start(Setting::default())
}

/// What was found of one server.
pub trait Outcome: Serialize {
    fn markdown(&self) -> String;
    /// Whether everything absolute is as it must be.
    fn holds(&self) -> bool;
}

/// Measures every chosen server, Gale when none is chosen, and puts the outcomes into one document.
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

/// What the load met, and an empty line.
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
