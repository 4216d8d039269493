//! descriptors: no descriptor is left for the worker process.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{ask, get};
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS};
use crate::client::load::Connection;
use crate::servers::{SMALL_BODY, Setting};

pub const EXPERIMENT: Experiment = Experiment {
    name: "descriptors",
    does: "A worker process that may have 160 descriptors gets 400 connections, which stay for three seconds.",
    holds: "Established connections are answered meanwhile; new clients wait and are answered afterwards.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const DESCRIPTORS: u32 = 160;
const CONNECTIONS: usize = 400;
const ESTABLISHED: usize = 4;
const NEW_CLIENTS: usize = 10;
const FULL_TIME: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(20);

fn run(trial: &Trial) -> Result<Outcome, String> {
    let origin = Origin::plain()?;
    let limited = format!("ulimit -n {DESCRIPTORS} && exec \"$@\"");
    let setting = Setting {
        under: Some(["sh", "-c", &limited, "limited"].map(str::to_owned).to_vec()),
        server: format!("location /passed/ {{ proxy_pass http://{}; }}", origin.address),
        ..Setting::default()
    };
    let watched = trial.start(setting)?;
    let address = watched.address();
    let opened: Result<Vec<Connection>, _> = (0..ESTABLISHED).map(|_| Connection::open(address)).collect();
    let mut established = opened.map_err(|failure| format!("first connections: {failure:?}"))?;
    let tally = Tally::default();
    established.iter_mut().for_each(|connection| ask_small(connection, &tally));

    let idle: Vec<TcpStream> = (0..CONNECTIONS).filter_map(|_| TcpStream::connect(address).ok()).collect();
    let is_full = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..NEW_CLIENTS {
            scope.spawn(|| match ask(address, &get("/return"), LIMIT) {
                Ok(reply) if reply.status == 200 && reply.body == SMALL_BODY => tally.answered_late(),
                other => tally.lost(format!("new client: {other:?}")),
            });
        }
        for connection in &mut established {
            scope.spawn(|| {
                while is_full.load(Ordering::Relaxed) {
                    ask_small(connection, &tally);
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        }
        std::thread::sleep(FULL_TIME);
        drop(idle);
        is_full.store(false, Ordering::Relaxed);
    });
    drop(established);
    let path = "/passed/50000/1";
    tally.must_answer(Instant::now(), path, &ask(address, &get(path), LIMIT), &content(path));
    let mut outcome = watched.finish(&tally);
    outcome.check(outcome.longest_ms < WAIT_MAX_MS, "an established connection waits a second");
    Ok(outcome)
}

fn ask_small(connection: &mut Connection, tally: &Tally) {
    let begun = Instant::now();
    match connection.request("/return", false) {
        Ok(answer) if answer.status == 200 && answer.body == SMALL_BODY => tally.answered(begun),
        other => tally.lost(format!("established: {other:?}")),
    }
}
