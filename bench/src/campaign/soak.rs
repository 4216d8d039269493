//! soak: everything at once for a long time: load, a cache that is too small, clients that leave, reloads.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{ask, connect, get};
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::slow_clients::ask_slowly;
use super::trial::Trial;
use crate::client::load::Load;
use crate::servers::Setting;

pub const EXPERIMENT: Experiment = Experiment {
    name: "soak",
    does: "For a minute (`--hours N`): load, a cache of 4 MiB for 40 MiB, clients that leave, clients that read late, \
           a reload every three seconds.",
    holds: "Memory after the first quarter and at the end is the same but for 16 MiB.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const SHORT: Duration = Duration::from_secs(60);
const RELOAD_EVERY: Duration = Duration::from_secs(3);
const OBJECTS: usize = 1000;
const LIMIT: Duration = Duration::from_secs(20);

fn run(trial: &Trial) -> Result<Outcome, String> {
    let time = trial.options.soak_hours.map_or(SHORT, |hours| Duration::from_secs(3600) * hours);
    let origin = Origin::plain()?;
    let setting = Setting {
        workers: 2,
        http: "proxy_cache_path cache keys_zone=cache:1m max_size=4m;".to_owned(),
        server: format!(
            "location /cached/ {{ proxy_pass http://{0}; proxy_cache cache; proxy_cache_valid 200 1m; }}
             location /passed/ {{ proxy_pass http://{0}; }}",
            origin.address
        ),
        ..Setting::default()
    };
    let mut watched = trial.start(setting)?;
    let tally = Tally::default();
    let load = Load::start(watched.address(), 2, 2);
    let is_over = AtomicBool::new(false);
    let until_over = |work: &dyn Fn(usize)| {
        let mut number = 0;
        while !is_over.load(Ordering::Relaxed) {
            work(number);
            number += 1;
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let address = watched.address().to_owned();
    let reloaded = std::thread::scope(|scope| {
        scope.spawn(|| until_over(&|number| ask_cached(&address, number, &tally)));
        scope.spawn(|| until_over(&|number| ask_late(&address, number, &tally)));
        scope.spawn(|| until_over(&|number| leave(&address, number)));
        let begun = Instant::now();
        let mut generation = 0;
        let mut is_read = false;
        let mut result = Ok(());
        while begun.elapsed() < time && result.is_ok() {
            std::thread::sleep(RELOAD_EVERY);
            generation += 1;
            result = watched.server.reload(generation);
            if !is_read && begun.elapsed() > time / 4 {
                watched.read_memory_again();
                is_read = true;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        result.map(|()| generation)
    })?;
    tally.add_load(&load.stop(), false);
    let mut outcome = watched.finish(&tally);
    outcome.notes.push(format!("{reloaded} reloads in {} s", time.as_secs()));
    Ok(outcome)
}

/// An object that may have been evicted since.
fn ask_cached(address: &str, number: usize, tally: &Tally) {
    let path = format!("/cached/40000/{}", number * 7919 % OBJECTS);
    let begun = Instant::now();
    tally.must_answer(begun, &path, &ask(address, &get(&path), LIMIT), &content(&path));
}

/// A response that waits in a temporary file.
fn ask_late(address: &str, number: usize, tally: &Tally) {
    let path = format!("/passed/6000000/{number}");
    match ask_slowly(address, &get(&path)) {
        Ok(reply) if reply.is_whole && reply.body == content(&path) => tally.answered_late(),
        other => tally.must_answer(Instant::now(), &path, &other, &content(&path)),
    }
}

/// A client that asks and goes.
fn leave(address: &str, number: usize) {
    if let Ok(mut stream) = connect(address, LIMIT) {
        let request = get(&format!("/passed/500000/left{number}"));
        let _ = stream.write_all(&request[..request.len() - number % 5]);
    }
}
