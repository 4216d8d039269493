//! failing-calls, slow-disk: a disk in user space fails at its n-th call, or takes half a second for each.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Experiment;
use super::exchange::{Reply, ask, get, put};
use super::isolation::Need;
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, Watched, storage_on, text};
use crate::floods::Waits;
use crate::servers::Setting;
use crate::support::fuse::disk::{Condition, Disk};

pub const FAILING_CALLS: Experiment = Experiment {
    name: "failing-calls",
    does: "On the disk of files, cache, temporary files and uploads each of 60 calls in turn fails once: with EIO, and \
           with ENOSPC.",
    holds: "Cacheable responses are whole; files and uploads fail with an error or are right; the next request works.",
    needs: &[Need::Fuse],
    not_on_nginx: None,
    run: failing_calls,
};

pub const SLOW_DISK: Experiment = Experiment {
    name: "slow-disk",
    does: "For five seconds each call of the disk of files, cache and access log takes 500 ms more, while clients ask \
           for its files.",
    holds: "A bystander who needs nothing of that disk never waits as long as one call, and all others are \
            answered in the end.",
    needs: &[Need::Fuse],
    not_on_nginx: None,
    run: slow_disk,
};

const CALLS: u32 = 60;
const LIMIT: Duration = Duration::from_secs(60);
const FILE: &str = "/files/50000/file";

fn disk() -> Result<Disk, String> {
    Disk::mount().ok_or_else(|| "the disk cannot be mounted".to_owned())
}

fn setting(disk: &Path, origin: &Origin) -> Setting {
    let (http, disk, origin) = (storage_on(disk), text(disk), origin.address);
    Setting {
        http,
        server: format!(
            "access_log {disk}/access.log;
             location /files/ {{ root {disk}; }}
             location /cached/ {{ proxy_pass http://{origin}; proxy_cache cache; proxy_cache_valid 200 1h; }}
             location /dav/ {{ root {disk}; dav_methods PUT; }}"
        ),
        ..Setting::default()
    }
}

fn write_file(disk: &Path) -> Result<(), String> {
    let path = disk.join(&FILE[1..]);
    let parent = path.parent().ok_or("no folder")?;
    let written = fs::create_dir_all(parent).and_then(|()| fs::write(&path, content(FILE)));
    written.and_then(|()| fs::create_dir_all(disk.join("dav"))).map_err(|error| format!("{}: {error}", path.display()))
}

/// A server whose files are on a disk in user space, and whose disk has been used once. The disk goes last.
struct OnDisk {
    watched: Watched,
    tally: Tally,
    disk: Disk,
    _origin: Origin,
}

impl OnDisk {
    fn start(trial: &Trial) -> Result<OnDisk, String> {
        let disk = disk()?;
        write_file(&disk.point())?;
        let origin = Origin::plain()?;
        let mut watched = trial.start(setting(&disk.point(), &origin))?;
        let tally = Tally::default();
        ask_all(&watched, &tally, "first", Expect::Whole);
        watched.read_again();
        Ok(OnDisk { watched, tally, disk, _origin: origin })
    }
}

fn failing_calls(trial: &Trial) -> Result<Outcome, String> {
    let OnDisk { watched, tally, disk, _origin } = OnDisk::start(trial)?;
    for (errno, name) in [(Errno::IO, "EIO"), (Errno::NOSPC, "ENOSPC")] {
        for number in 1..=CALLS {
            disk.fail_call(Some(number), errno);
            ask_all(&watched, &tally, &format!("{name}{number}"), Expect::Faults);
            disk.fail_call(None, errno);
            ask_all(&watched, &tally, &format!("after{name}{number}"), Expect::Whole);
        }
    }
    let outcome = watched.finish(&tally);
    drop(disk);
    Ok(outcome)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    Whole,
    Faults,
}

/// A response that is stored and found, a file, and an upload.
fn ask_all(watched: &Watched, tally: &Tally, name: &str, expect: Expect) {
    let cached = format!("/cached/20000/{name}");
    for _ in 0..2 {
        let begun = Instant::now();
        tally.must_answer(begun, &cached, &ask(watched.address(), &get(&cached), LIMIT), &content(&cached));
    }
    let begun = Instant::now();
    let file = ask(watched.address(), &get(FILE), LIMIT);
    match expect {
        Expect::Whole => tally.must_answer(begun, FILE, &file, &content(FILE)),
        Expect::Faults => tally.may_end(begun, FILE, &file, &content(FILE)),
    }
    upload(watched, tally, name, expect);
}

/// An upload. Its answer must be true, and the file under its name is the new one, the old one or none.
fn upload(watched: &Watched, tally: &Tally, name: &str, expect: Expect) {
    let (path, new) = ("/dav/file", content(&format!("/u/20000/{name}")));
    let before = ask(watched.address(), &get(path), LIMIT);
    let begun = Instant::now();
    let answer = ask(watched.address(), &put(path, &new), LIMIT);
    let is_done = answer.as_ref().is_ok_and(|answer| answer.status < 300);
    let found = ask(watched.address(), &get(path), LIMIT);
    let holds = |reply: &Result<Reply, String>, body: &[u8]| {
        reply.as_ref().is_ok_and(|reply| reply.status == 200 && reply.is_whole && reply.body == body)
    };
    let is_old = matches!((&before, &found), (Ok(before), Ok(found)) if holds(&Ok(found.clone()), &before.body));
    let is_error = found.as_ref().map_or(true, |found| found.status >= 400 || !found.is_whole);
    match (is_done, holds(&found, &new)) {
        (true, true) => tally.answered(begun),
        // The call that fails may be one of the GET's.
        (_, false) if expect == Expect::Faults && is_error => tally.ended_by_fault(),
        (false, is_new) if is_new || is_old || expect == Expect::Faults && is_error => match expect {
            Expect::Whole => tally.lost(format!("PUT {name}: {:?}", answer.map(|answer| answer.status))),
            Expect::Faults => tally.ended_by_fault(),
        },
        _ => tally.wrong(format!(
            "PUT {name}: {:?}, then GET: {:?}",
            answer.map(|answer| answer.status),
            found.map(|found| (found.status, found.body.len()))
        )),
    }
}

fn slow_disk(trial: &Trial) -> Result<Outcome, String> {
    const DELAY: Duration = Duration::from_millis(500);
    const SLOW_TIME: Duration = Duration::from_secs(5);
    const CLIENTS: usize = 4;
    let OnDisk { watched, tally, disk, _origin } = OnDisk::start(trial)?;
    let is_over = AtomicBool::new(false);
    let waits = std::thread::scope(|scope| {
        disk.set(Condition::Slow(DELAY));
        let address = watched.address();
        for number in 0..CLIENTS {
            let (tally, is_over) = (&tally, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let path = if number.is_multiple_of(2) { FILE } else { "/cached/20000/first" };
                    match ask(address, &get(path), LIMIT) {
                        Ok(reply) if reply.is_whole && reply.body == content(path) => tally.answered_late(),
                        other => tally.must_answer(Instant::now(), path, &other, &content(path)),
                    }
                }
            });
        }
        let waits = Waits::of(address, SLOW_TIME);
        is_over.store(true, Ordering::Relaxed);
        disk.set(Condition::Well);
        waits
    });
    tally.add_waits(&waits.map_err(|error| format!("bystander: {error}"))?);
    let mut outcome = watched.finish(&tally);
    drop(disk);
    outcome.check(outcome.longest_ms < DELAY.as_secs_f64() * 1e3, "the bystander waits for the disk");
    Ok(outcome)
}
