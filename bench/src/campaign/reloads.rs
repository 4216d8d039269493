//! reloads, bad-reloads, upgrades: the configuration and the program are replaced under load.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Experiment;
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, Watched, wait_until};
use crate::client::load::{self, Load};
use crate::process::Process;
use crate::reload;
use crate::servers::{Running, Setting, send_signal};

pub const RELOADS: Experiment = Experiment {
    name: "reloads",
    does: "400 reloads (`--reloads`) follow each other under load, each when the one before has taken effect.",
    holds: "Each takes effect, and a connection opened before the first works after the last.",
    needs: &[],
    not_on_nginx: None,
    run: reloads,
};

pub const BAD_RELOADS: Experiment = Experiment {
    name: "bad-reloads",
    does: "100 reloads of configurations that are wrong in ten ways, under load, and then a right one.",
    holds: "Each is refused with a line of the log, the old configuration goes on, and the right one takes effect.",
    needs: &[],
    not_on_nginx: None,
    run: bad_reloads,
};

pub const UPGRADES: Experiment = Experiment {
    name: "upgrades",
    does: "The program is replaced 100 times (`--upgrades`; USR2, then QUIT for the old one) under load.",
    holds: "Each new program serves and each old one ends.",
    needs: &[],
    not_on_nginx: Some("nginx is upgraded as a daemon only, and the harness runs it in the foreground"),
    run: upgrades,
};

/// A reload or an upgrade that has no effect by then has none.
const LIMIT: Duration = Duration::from_secs(15);
const BAD_RELOADS_COUNT: usize = 100;
/// Growth of the first reloads: memory that the allocator keeps for the next one.
const EARLY_GROWTH_MIB_MAX: f64 = 4.0;
/// Growth of the last ones, which would go on for ever.
const LATE_GROWTH_MIB_MAX: f64 = 0.5;

fn reloads(trial: &Trial) -> Result<Outcome, String> {
    let course = reload::measure_one(trial.options, trial.program)?;
    let tally = Tally::default();
    tally.add_load(&course.load, false);
    let mib = |kib: u64| kib as f64 / 1024.0;
    let mut outcome = Outcome {
        before_mib: mib(course.memory_before.pss_kib),
        after_mib: mib(course.memory_after.pss_kib),
        ..tally.outcome()
    };
    outcome.lost += u64::from(course.failed_probes);
    // The share that `bench reload` allows is less than a megabyte of a small server.
    for check in course.checks.iter().filter(|check| !check.what.starts_with("memory")) {
        outcome.check(check.holds, format!("not so: {}", check.what));
    }
    let early = outcome.after_mib - outcome.before_mib;
    outcome.check(early <= EARLY_GROWTH_MIB_MAX, format!("{early:.1} MiB more than before"));
    if let Some((reloads, kib)) = course.late_memory() {
        let late = outcome.after_mib - mib(kib);
        outcome.check(late <= LATE_GROWTH_MIB_MAX, format!("{late:.1} MiB more than after {reloads} reloads"));
        outcome.notes.push(format!("{early:.1} MiB more than before, {late:.1} more than after {reloads} reloads"));
    }
    outcome.notes.push(format!(
        "{} reloads in {:.0} s, {:.0} ms to the effect (median)",
        course.reloads_done, course.seconds, course.effect_ms.median
    ));
    Ok(outcome)
}

/// Mistakes at the level of the http block.
const MISTAKES: [&str; 10] = [
    "no_such_directive on;",
    "include no-such-file;",
    "keepalive_timeout soon;",
    "server { listen 127.0.0.1:99999; }",
    "server { listen 127.0.0.1:1 ssl; ssl_certificate no-such.pem; ssl_certificate_key no-such.key; }",
    "server { location ~ ( { } }",
    "server { access_log no/such/folder/access.log; }",
    "upstream empty { }",
    "server { location /a { } location /a { } }",
    "server { ",
];

fn bad_reloads(trial: &Trial) -> Result<Outcome, String> {
    let watched = trial.start(Setting::default())?;
    let load = Load::start(watched.address(), trial.options.keepalive_clients, trial.options.short_clients);
    let refused = refuse_all(&watched.server);
    let good =
        watched.server.reload(1).is_ok() && wait_until(LIMIT, || generation(&watched.server).as_deref() == Some("1"));
    let tally = Tally::default();
    tally.add_load(&load.stop(), false);
    let mut outcome = watched.finish(&tally);
    if let Err(error) = refused {
        outcome.check(false, error);
    }
    outcome.check(good, "the right configuration has no effect afterwards");
    Ok(outcome)
}

/// Reloads one wrong configuration after the other.
fn refuse_all(server: &Running) -> Result<(), String> {
    let path = server.directory().join("server.conf");
    let right = fs::read_to_string(&path).map_err(|error| error.to_string())?;
    let refusals = || server.error_log().matches("[emerg]").count();
    for number in 0..BAD_RELOADS_COUNT {
        let mistake = MISTAKES[number % MISTAKES.len()];
        let before = refusals();
        // A generation of its own, so that one that is taken is noticed.
        let wrong = right.replace("access_log off;", &format!("access_log off; {mistake}"));
        let wrong = wrong.replace("return 200 \"0\";", "return 200 \"wrong\";");
        fs::write(&path, wrong).map_err(|error| error.to_string())?;
        send_signal(server.root, Signal::HUP)?;
        if !wait_until(LIMIT, || refusals() > before) {
            return Err(format!("nothing is logged for `{mistake}`"));
        }
        if generation(server).as_deref() != Some("0") {
            return Err(format!("the configuration with `{mistake}` is in force"));
        }
    }
    Ok(())
}

fn generation(server: &Running) -> Option<String> {
    let body = load::request_once(&server.address, "/generation", LIMIT).ok()?;
    String::from_utf8(body).ok()
}

fn upgrades(trial: &Trial) -> Result<Outcome, String> {
    let mut watched = trial.start(Setting::default())?;
    // A program that took over has inherited its sockets: it is not as one that has opened them.
    upgrade(&mut watched)?;
    watched.read_after_work()?;
    let load = Load::start(watched.address(), trial.options.keepalive_clients, trial.options.short_clients);
    let begun = Instant::now();
    let mut done = 0;
    let mut stopped_by = None;
    while done < trial.options.upgrades && stopped_by.is_none() {
        match upgrade(&mut watched) {
            Ok(()) => done += 1,
            Err(error) => stopped_by = Some(format!("upgrade {}: {error}", done + 1)),
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let tally = Tally::default();
    tally.add_load(&load.stop(), false);
    let mut outcome = watched.finish(&tally);
    if let Some(error) = stopped_by {
        outcome.check(false, error);
    }
    outcome.notes.push(format!("{done} upgrades in {seconds:.0} s"));
    Ok(outcome)
}

/// Starts the new program, and ends the old one when the new one has written its number.
fn upgrade(watched: &mut Watched) -> Result<(), String> {
    let pid_file = watched.server.directory().join("server.pid");
    let old = watched.server.root;
    send_signal(old, Signal::USR2)?;
    let mut new = None;
    let is_there = wait_until(LIMIT, || {
        let number = fs::read_to_string(&pid_file).ok().and_then(|text| text.trim().parse().ok());
        new = number.and_then(Process::find).filter(|process| *process != old && has_worker(*process));
        new.is_some()
    });
    let new = new.filter(|_| is_there);
    let new = new.ok_or_else(|| format!("no new program; the log ends with {:?}", watched.server.error_log_end()))?;
    send_signal(old, Signal::QUIT)?;
    watched.server.root = new;
    // The new one takes no signal to be replaced as long as the old one is its parent, which a process of several
    // threads may be for a moment longer than its first thread lives.
    match wait_until(LIMIT, || !old.is_alive() && !old.children().contains(&new)) {
        true => Ok(()),
        false => Err("the old program does not end".to_owned()),
    }
}

fn has_worker(master: Process) -> bool {
    !master.children().is_empty()
}
