//! http2-attacks: the attacks of `bench floods`, and the state of the server afterwards.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::Experiment;
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS};
use crate::floods::{self, ATTACKERS, ATTACKS, Waits};
use crate::memory;

pub const EXPERIMENT: Experiment = Experiment {
    name: "http2-attacks",
    does: "Four clients each do every attack of `bench floods` for two seconds: rapid reset, MadeYouReset, floods of \
           PING, SETTINGS, WINDOW_UPDATE, PRIORITY, empty DATA and CONTINUATION, an HPACK bomb, open-and-drop, zero \
           windows, bodies that stop.",
    holds: "A bystander is answered within a second each time.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const TIME: Duration = Duration::from_secs(2);
/// Buffers of hundreds of streams that are kept for the next ones, in MiB.
const GROWTH_MIB_MAX: f64 = 48.0;

fn run(trial: &Trial) -> Result<Outcome, String> {
    let watched = trial.start(floods::setting())?;
    let tally = Tally::default();
    let (mut worst, mut most_kib) = ((0.0, ""), 0);
    for attack in ATTACKS {
        let (is_over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let server = &watched.server;
        let (waits, most) = std::thread::scope(|scope| {
            for _ in 0..ATTACKERS {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        // The server ends it: that is what is to happen.
                        let _ = floods::attack_once(server, attack, &is_over, &sent);
                    }
                });
            }
            let most = scope.spawn(|| memory::most_pss_kib(server.root, &is_over));
            let waits = Waits::of(&server.address, TIME);
            is_over.store(true, Ordering::Relaxed);
            (waits, most.join().unwrap_or(0))
        });
        let waits = waits.map_err(|error| format!("{}: {error}", attack.name))?;
        if waits.longest_ms() > worst.0 {
            worst = (waits.longest_ms(), attack.name);
        }
        most_kib = most_kib.max(most);
        tally.add_waits(&waits);
    }
    let mut outcome = watched.finish_within(&tally, GROWTH_MIB_MAX);
    outcome.check(worst.0 < WAIT_MAX_MS, format!("the bystander waits {:.0} ms during \"{}\"", worst.0, worst.1));
    outcome.notes.push(format!("longest wait during \"{}\"; {} MiB at most", worst.1, most_kib / 1024));
    Ok(outcome)
}
