//! disk-full: the disk of caches, temporary files, uploads and logs has no room.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};

use super::exchange::{ask, get, put};
use super::isolation::Need;
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, Watched, each_in_threads, storage_on, text};
use super::{Experiment, slow_clients};
use crate::servers::Setting;

pub const EXPERIMENT: Experiment = Experiment {
    name: "disk-full",
    does: "The file system of the cache, the temporary files, the uploads and the access log is full, and then has \
           room again.",
    holds: "Cacheable responses are passed on; an upload is refused and leaves the file that was there; with room \
            again all is stored and logged.",
    needs: &[Need::Mounts],
    not_on_nginx: None,
    run,
};

const DISK_MIB: u32 = 16;
const LIMIT: Duration = Duration::from_secs(20);
const ROUNDS: usize = 40;
const THREADS: usize = 8;
const UPLOAD_BYTES: usize = 100_000;

fn run(trial: &Trial) -> Result<Outcome, String> {
    let disk = trial.folder("disk")?;
    let options = std::ffi::CString::new(format!("size={DISK_MIB}m,mode=777")).map_err(|error| error.to_string())?;
    mount("gale-campaign", &disk, "tmpfs", MountFlags::empty(), Some(&*options))
        .map_err(|error| format!("{}: {error}", disk.display()))?;
    fs::create_dir(disk.join("dav")).map_err(|error| error.to_string())?;
    let origin = Origin::plain()?;
    let mut watched = trial.start(setting(&disk, &origin))?;
    let tally = Tally::default();
    ask_well(&watched, &tally, "before");
    watched.read_again();

    let filler = disk.join("filler");
    // It ends where the room ends.
    let _ = fs::write(&filler, vec![0; (DISK_MIB as usize) << 20]);
    each_in_threads(THREADS, ROUNDS, |number| ask_full(&watched, &tally, number));

    fs::remove_file(&filler).map_err(|error| error.to_string())?;
    let logged = fs::metadata(disk.join("access.log")).map_or(0, |log| log.len());
    ask_well(&watched, &tally, "after");
    let is_logged =
        super::trial::wait_until(LIMIT, || fs::metadata(disk.join("access.log")).is_ok_and(|log| log.len() > logged));
    let hit = ask(watched.address(), &get("/cached/60000/after"), LIMIT)?;
    let mut outcome = watched.finish(&tally);
    outcome.check(hit.field("x-cache") == Some("HIT"), "with room again nothing is cached");
    outcome.check(is_logged, "with room again nothing is logged");
    Ok(outcome)
}

fn setting(disk: &Path, origin: &Origin) -> Setting {
    let (http, disk, origin) = (storage_on(disk), text(disk), origin.address);
    Setting {
        http,
        server: format!(
            "access_log {disk}/access.log; client_max_body_size 10m;
             location /cached/ {{ proxy_pass http://{origin}; proxy_cache cache; proxy_cache_valid 200 1h; \
             add_header X-Cache $upstream_cache_status; }}
             location /spilled/ {{ proxy_pass http://{origin}; proxy_buffer_size 4k; proxy_buffers 4 4k; \
             proxy_busy_buffers_size 8k; }}
             location /dav/ {{ root {disk}; dav_methods PUT; }}"
        ),
        ..Setting::default()
    }
}

/// Requests that must work while there is room.
fn ask_well(watched: &Watched, tally: &Tally, when: &str) {
    for path in [format!("/cached/60000/{when}"), format!("/spilled/6000000/{when}")] {
        let begun = Instant::now();
        tally.must_answer(begun, &path, &ask(watched.address(), &get(&path), LIMIT), &content(&path));
    }
    upload(watched, tally, "/dav/kept", when.as_bytes(), &[]);
    let begun = Instant::now();
    tally.must_answer(begun, "upload", &ask(watched.address(), &get("/dav/kept"), LIMIT), when.as_bytes());
}

/// Requests while there is no room.
fn ask_full(watched: &Watched, tally: &Tally, number: usize) {
    let (cached, spilled) = (format!("/cached/60000/{number}"), format!("/spilled/6000000/{number}"));
    let begun = Instant::now();
    tally.must_answer(begun, &cached, &ask(watched.address(), &get(&cached), LIMIT), &content(&cached));
    let begun = Instant::now();
    tally.may_end(begun, &spilled, &slow_clients::ask_slowly(watched.address(), &get(&spilled)), &content(&spilled));
    upload(watched, tally, &format!("/dav/{number}"), &content(&format!("/u/{UPLOAD_BYTES}/{number}")), &[]);
    let new = content(&format!("/u/{UPLOAD_BYTES}/kept"));
    upload(watched, tally, "/dav/kept", &new, b"before");
}

/// Uploads a file and looks at it: the new content if the answer says so, else the old one or nothing.
fn upload(watched: &Watched, tally: &Tally, path: &str, new: &[u8], old: &[u8]) {
    let begun = Instant::now();
    let answer = ask(watched.address(), &put(path, new), LIMIT);
    let found = ask(watched.address(), &get(path), LIMIT);
    match (answer, found) {
        (Ok(answer), Ok(found)) if answer.status < 300 => match found.status == 200 && found.body == new {
            true => tally.answered(begun),
            false => tally.wrong(format!("PUT {path}: {}, then GET: {}", answer.status, found.status)),
        },
        (_, Ok(found)) if found.status == 404 || (found.status == 200 && found.body == old) => tally.ended_by_fault(),
        (answer, found) => {
            let status = |reply: &Result<super::exchange::Reply, String>| match reply {
                Ok(reply) => format!("{}, {} bytes", reply.status, reply.body.len()),
                Err(error) => error.clone(),
            };
            tally.wrong(format!("PUT {path}: {}, then GET: {}", status(&answer), status(&found)));
        }
    }
}
