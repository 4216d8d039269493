//! clocks: the time of day jumps, as it does when a machine's clock is set (libfaketime). The monotonic clock goes on.

use std::fs;
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{ask, get};
use super::isolation::{self, Need};
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS, text};
use crate::client::load::Load;
use crate::servers::Setting;

pub const EXPERIMENT: Experiment = Experiment {
    name: "clocks",
    does: "The time of day jumps by an hour, a day, a month and 40 years, forwards and backwards, under load and with \
           a cache (libfaketime).",
    holds: "No client waits a second, and stored responses stay right.",
    needs: &[Need::FakeTime],
    not_on_nginx: None,
    run,
};

const JUMPS: [&str; 10] = ["+0", "+1h", "-1h", "+1d", "-1d", "+30d", "-30d", "+14600d", "-7300d", "+0"];
/// How long each time lasts.
const TIME: Duration = Duration::from_millis(1500);
const LIMIT: Duration = Duration::from_secs(10);
/// nginx gives its workers no variable that is not named.
const VARIABLES: [&str; 4] = ["LD_PRELOAD", "FAKETIME_TIMESTAMP_FILE", "FAKETIME_NO_CACHE", "DONT_FAKE_MONOTONIC"];

fn run(trial: &Trial) -> Result<Outcome, String> {
    let library = isolation::fake_time_library().ok_or("no libfaketime")?;
    let time = trial.folder("time")?.join("time");
    let set = |jump: &str| fs::write(&time, format!("{jump}\n")).map_err(|error| error.to_string());
    set("+0")?;
    let values = [text(&library), text(&time), "1".to_owned(), "1".to_owned()];
    let mut under = vec!["env".to_owned()];
    under.extend(VARIABLES.iter().zip(&values).map(|(name, value)| format!("{name}={value}")));
    let origin = Origin::plain()?;
    let setting = Setting {
        under: Some(under),
        blocks: VARIABLES.map(|name| format!("env {name};")).join(" "),
        http: "proxy_cache_path cache keys_zone=cache:1m;".to_owned(),
        server: format!(
            "location /cached/ {{ proxy_pass http://{}; proxy_cache cache; proxy_cache_valid 200 10m; }}",
            origin.address
        ),
        ..Setting::default()
    };
    let watched = trial.start(setting)?;
    let tally = Tally::default();
    let load = Load::start(watched.address(), trial.options.keepalive_clients, trial.options.short_clients);
    let mut dates = Vec::new();
    for (number, jump) in JUMPS.iter().enumerate() {
        set(jump)?;
        let end = Instant::now() + TIME;
        let mut date = None;
        while Instant::now() < end {
            for path in ["/cached/20000/1".to_owned(), format!("/cached/20000/jump{number}")] {
                let begun = Instant::now();
                let reply = ask(watched.address(), &get(&path), LIMIT);
                tally.must_answer(begun, &format!("{path} at {jump}"), &reply, &content(&path));
                date = reply.ok().and_then(|reply| reply.field("date").map(str::to_owned));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        dates.extend(date);
    }
    tally.add_load(&load.stop(), false);
    let mut outcome = watched.finish(&tally);
    dates.sort();
    dates.dedup();
    outcome.check(dates.len() >= JUMPS.len() - 2, format!("the time of day does not jump: {dates:?}"));
    outcome.check(outcome.longest_ms < WAIT_MAX_MS, "a client waits a second");
    Ok(outcome)
}
