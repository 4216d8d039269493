//! memory-limit: more is under way than a control group's memory holds.

use std::io::Write;
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{connect, get, read_reply};
use super::isolation::Need;
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, in_threads};
use crate::servers::Setting;
use crate::thread_pools::confine::Cage;

pub const EXPERIMENT: Experiment = Experiment {
    name: "memory-limit",
    does: "In a control group with 96 MiB, 64 clients ask for 4 MiB each through the proxy and read nothing for two \
           seconds.",
    holds: "Every response is whole, and no process is killed for lack of memory.",
    needs: &[Need::MemoryGroup],
    not_on_nginx: None,
    run,
};

const MEMORY_BYTES: u64 = 96 << 20;
const CLIENTS: usize = 64;
const READS_NOTHING: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);

fn run(trial: &Trial) -> Result<Outcome, String> {
    let cage = Cage::build(MEMORY_BYTES, &[], 0);
    if !cage.limits_memory {
        return Err(format!("memory is not limited: {}", cage.left_out.join(" ")));
    }
    let origin = Origin::plain()?;
    let setting = Setting {
        under: Some(cage.words()),
        server: format!("location /passed/ {{ proxy_pass http://{}; }}", origin.address),
        ..Setting::default()
    };
    let watched = trial.start(setting)?;
    let before = watched.server.root.tree();
    let tally = Tally::default();
    in_threads(CLIENTS, |number| {
        let path = format!("/passed/{}/{number}", 4 << 20);
        let reply = connect(watched.address(), LIMIT).and_then(|mut stream| {
            stream.write_all(&get(&path)).map_err(|error| error.to_string())?;
            std::thread::sleep(READS_NOTHING);
            read_reply(&mut stream, LIMIT)
        });
        tally.must_answer(Instant::now(), &path, &reply, &content(&path));
    });
    let survived = before.iter().all(|process| process.is_alive());
    let mut outcome = watched.finish_within(&tally, (MEMORY_BYTES >> 20) as f64 / 2.0);
    outcome.check(survived, "a process was killed");
    Ok(outcome)
}
