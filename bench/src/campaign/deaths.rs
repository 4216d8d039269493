//! deaths: the worker process is killed again and again under load.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Experiment;
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS};
use crate::client::load::Load;
use crate::respawn;
use crate::servers::{Setting, send_signal};

pub const EXPERIMENT: Experiment = Experiment {
    name: "deaths",
    does: "The worker process is killed (SIGKILL) every 500 ms, 20 times, under load.",
    holds: "Only requests of connections that the dead process had are ended, no connection is refused, and no client \
            waits a second.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const KILLS: u32 = 20;
const INTERVAL: Duration = Duration::from_millis(500);

fn run(trial: &Trial) -> Result<Outcome, String> {
    let options = trial.options;
    let watched = trial.start(Setting::default())?;
    let load = Load::start(watched.address(), options.keepalive_clients, options.short_clients);
    let begun = Instant::now();
    let mut kills = 0;
    for number in 1..=KILLS {
        std::thread::sleep((INTERVAL * number).saturating_sub(begun.elapsed()));
        // It may not have been started again yet.
        if let Some(worker) = respawn::worker_of(&watched.server) {
            kills += u32::from(send_signal(worker, Signal::KILL).is_ok());
        }
    }
    std::thread::sleep(INTERVAL);
    let tally = Tally::default();
    tally.add_load(&load.stop(), true);
    let mut outcome = watched.finish(&tally);
    let clients = (options.keepalive_clients + options.short_clients) as u64;
    outcome.check(kills == KILLS, format!("only {kills} processes could be killed"));
    outcome.check(
        outcome.ended_by_fault <= u64::from(KILLS) * clients,
        format!("more requests ended than {clients} clients had under way"),
    );
    outcome.check(outcome.longest_ms < WAIT_MAX_MS, "a client waits a second");
    Ok(outcome)
}
