//! reload: many consecutive reloads under load, without failed requests, lost connections or growth of memory.
//!
//! Each reload writes a configuration with a new number and signals the master. It is complete when a new connection
//! gets that number. The next reload begins only then, without sleeping. A connection opened before the first reload is
//! used again after the last.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Measured;
use crate::client::load::{self, Connection, Totals};
use crate::memory::Memory;
use crate::options::Options;
use crate::report::{self, Spread};
use crate::servers::{POLL_INTERVAL, Program, Running};
use crate::under_load::{self, UnderLoad};

const RELOAD_TIME_LIMIT: Duration = Duration::from_secs(10);
/// Time for old worker processes to exit before memory is read.
const SETTLE_TIME_LIMIT: Duration = Duration::from_secs(20);
/// Answers before the first reading of memory. They trigger one-time allocations.
const WARM_UP_ANSWERS: u64 = 20_000;
const MEMORY_READINGS: u32 = 10;

#[derive(Debug, Serialize)]
pub struct Outcome {
    server: String,
    reloads_asked: u32,
    pub reloads_done: u32,
    stopped_by: Option<String>,
    /// Time from the signal to the new answer, in milliseconds.
    pub effect_ms: Spread,
    effect_p99_ms: f64,
    pub seconds: f64,
    pub load: Totals,
    /// Failed requests of the harness itself, which read the number.
    pub failed_probes: u32,
    /// Result of the connection opened before the first reload.
    old_connection: String,
    pub memory_before: Memory,
    pub memory_after: Memory,
    /// Number of reloads, and memory at that time.
    memory_course: Vec<(u32, Memory)>,
    memory_growth: f64,
    pub checks: Vec<Check>,
}

/// A requirement, and whether it holds.
#[derive(Debug, Serialize)]
pub struct Check {
    pub what: &'static str,
    pub holds: bool,
}

/// Measures the chosen servers, or Gale.
pub fn measure(options: &Options) -> Measured {
    under_load::measure_each(options, "reload", "Reloads in a row under load", measure_one)
}

pub fn measure_one(options: &Options, program: &Program) -> Result<Outcome, String> {
    let server = under_load::start_unpinned(program)?;
    let mut old_connection =
        Connection::open(&server.address).map_err(|failure| format!("first connection: {failure:?}"))?;
    old_connection.request("/return", false).map_err(|failure| format!("first request: {failure:?}"))?;

    let under_load = UnderLoad::start(options, server);
    under_load.wait_for_answers(WARM_UP_ANSWERS)?;
    let UnderLoad { load, server } = under_load;
    let memory_before = Memory::read(&server.root.tree());
    let begun = Instant::now();
    let mut course = Course::default();
    course.run(&server, options.reloads);
    let seconds = begun.elapsed().as_secs_f64();
    settle(&server, memory_before.processes);
    let memory_after = Memory::read(&server.root.tree());
    let load = load.stop();

    let old_connection = match old_connection.request("/generation", false) {
        Ok(answer) if answer.body == course.done.to_string().as_bytes() => "works".to_owned(),
        Ok(answer) => format!("answers {} {:?}", answer.status, String::from_utf8_lossy(&answer.body)),
        Err(failure) => format!("{failure:?}"),
    };
    let memory_growth = memory_after.growth_since(&memory_before);
    let checks = vec![
        Check { what: "every reload took effect", holds: course.done == options.reloads },
        Check { what: "no request failed", holds: load.failed == 0 && course.failed_probes == 0 },
        Check {
            what: "the connection opened before the first reload works after the last",
            holds: old_connection == "works",
        },
        Check { what: "memory grew by less than 10 %", holds: memory_growth < 0.10 },
        Check {
            what: "no descriptor was left open",
            holds: memory_after.descriptors <= memory_before.descriptors + options.short_clients,
        },
    ];
    let (effect_ms, effect_p99_ms) = course.effects();
    Ok(Outcome {
        server: program.label.clone(),
        reloads_asked: options.reloads,
        reloads_done: course.done,
        stopped_by: course.stopped_by,
        effect_ms,
        effect_p99_ms,
        seconds,
        load,
        failed_probes: course.failed_probes,
        old_connection,
        memory_before,
        memory_after,
        memory_course: course.memory,
        memory_growth,
        checks,
    })
}

impl Outcome {
    /// The lowest PSS in KiB between three fifths and four fifths of the reloads, and the number of reloads at that
    /// time. Each reading may have met two configurations; the lowest one is like that of a settled server.
    pub fn late_memory(&self) -> Option<(u32, u64)> {
        let late = self.reloads_asked * 3 / 5..=self.reloads_asked * 4 / 5;
        let readings = self.memory_course.iter().filter(|(reloads, _)| late.contains(reloads));
        readings.map(|&(reloads, memory)| (reloads, memory.pss_kib)).min_by_key(|&(_, kib)| kib)
    }
}

/// Waits until there are no more processes than before, or the time is up. Processes that remain then count.
fn settle(server: &Running, processes: usize) {
    let deadline = Instant::now() + SETTLE_TIME_LIMIT;
    while server.root.tree().len() > processes && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[derive(Debug, Default)]
struct Course {
    done: u32,
    effects: Vec<f64>,
    failed_probes: u32,
    memory: Vec<(u32, Memory)>,
    stopped_by: Option<String>,
}

impl Course {
    fn run(&mut self, server: &Running, reloads: u32) {
        let stride = (reloads / MEMORY_READINGS).max(1);
        for generation in 1..=reloads {
            if let Err(error) = self.reload(server, generation) {
                self.stopped_by = Some(format!("reload {generation}: {error}"));
                return;
            }
            self.done = generation;
            if generation % stride == 0 {
                self.memory.push((generation, Memory::read(&server.root.tree())));
                eprintln!("  {generation} reloads");
            }
        }
    }

    fn reload(&mut self, server: &Running, generation: u32) -> Result<(), String> {
        let begun = Instant::now();
        server.reload(generation)?;
        loop {
            match load::request_once(&server.address, "/generation", RELOAD_TIME_LIMIT) {
                Ok(body) if body == generation.to_string().as_bytes() => break,
                Ok(_) => {}
                Err(failure) => {
                    self.failed_probes += 1;
                    eprintln!("  reload {generation}: {failure:?}");
                }
            }
            if begun.elapsed() >= RELOAD_TIME_LIMIT {
                return Err(format!("no effect within {RELOAD_TIME_LIMIT:?}\n{}", server.error_log_end()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        self.effects.push(begun.elapsed().as_secs_f64() * 1000.0);
        Ok(())
    }

    /// Returns median, minimum and maximum, and the 99th percentile.
    fn effects(&self) -> (Spread, f64) {
        let mut sorted = self.effects.clone();
        sorted.sort_by(f64::total_cmp);
        let p99 = sorted.get((sorted.len() * 99 / 100).min(sorted.len().saturating_sub(1)));
        (Spread::of(self.effects.iter().copied()), p99.copied().unwrap_or(0.0))
    }
}

impl under_load::Outcome for Outcome {
    fn holds(&self) -> bool {
        self.checks.iter().all(|check| check.holds)
    }

    fn markdown(&self) -> String {
        let mut text = format!("## {}\n\n", self.server);
        for check in &self.checks {
            text.push_str(&format!("- {} {}\n", if check.holds { "holds:" } else { "**fails:**" }, check.what));
        }
        if let Some(error) = &self.stopped_by {
            text.push_str(&format!("\nStopped early: {error}\n"));
        }
        text.push_str(&format!(
            "\n{} of {} reloads in {:.1} s; from signal to effect {:.1} ms (median), {:.1} ms (p99), {:.1} ms (most). \
             The old connection: {}. {} requests of the harness itself failed.\n\n",
            self.reloads_done,
            self.reloads_asked,
            self.seconds,
            self.effect_ms.median,
            self.effect_p99_ms,
            self.effect_ms.greatest,
            self.old_connection,
            self.failed_probes,
        ));
        text.push_str(&under_load::load_markdown(&self.load));
        let mut readings = vec![("before".to_owned(), self.memory_before)];
        readings.extend(self.memory_course.iter().map(|(reloads, memory)| (format!("{reloads} reloads"), *memory)));
        readings.push(("after, settled".to_owned(), self.memory_after));
        type Reading = (String, Memory);
        let table = report::table_of(
            &readings,
            &[
                ("", &|(when, _): &Reading| when.clone()),
                ("processes", &|(_, memory)| memory.processes.to_string()),
                ("descriptors", &|(_, memory)| memory.descriptors.to_string()),
                ("RSS KiB", &|(_, memory)| memory.rss_kib.to_string()),
                ("PSS KiB", &|(_, memory)| memory.pss_kib.to_string()),
            ],
        );
        text.push_str(&format!("{table}\nGrowth (PSS): {:.1} %\n", self.memory_growth * 100.0));
        text
    }
}
