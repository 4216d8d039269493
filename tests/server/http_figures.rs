//! The API, the metrics and the dashboard's figures during reloads, an upgrade and a disk that hangs.
//! Each request is answered, each answer is well-formed, and no counter of a process decreases.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::support::fuse;
use crate::support::{Client, Driver, Server, Setup, has_own_mounts, http_configuration, wait_ended, with_each_driver};

with_each_driver!(
    figures_are_told_during_reloads,
    figures_are_told_during_an_upgrade,
    figures_are_told_beside_a_disk_that_hangs,
);

const SITE: &str = "server { listen %TCP%; status_zone site; location / { status_zone all; return 200 hello; }
     location /files/ { root %DIR%; aio threads; }
     location /api/ { api; } location /metrics { prometheus; } location /dashboard/ { dashboard; } }";

/// Threads that request all figures repeatedly while a test acts, and the number of rounds that were answered.
struct Watch<'w> {
    address: SocketAddr,
    rounds: &'w AtomicU64,
    is_over: &'w AtomicBool,
}

impl Watch<'_> {
    /// Waits for `count` more rounds.
    fn wait_rounds(&self, count: u64) {
        let wanted = self.rounds.load(Ordering::SeqCst) + count;
        while self.rounds.load(Ordering::SeqCst) < wanted {
            assert!(!self.is_over.load(Ordering::SeqCst), "whoever asks has found a fault");
            std::thread::yield_now();
        }
    }

    fn get(&self, path: &str) -> String {
        let response = Client::tcp(self.address).get(path);
        assert_eq!(response.status, 200, "{path}: {response:?}");
        response.text().to_owned()
    }

    /// Requests the figures until the test is over, and checks that no counter decreases.
    fn ask(&self) {
        let _end = EndOnDrop(self.is_over);
        // By process: the old and the new one answer at the same time.
        let mut known: BTreeMap<u64, BTreeMap<String, u64>> = BTreeMap::new();
        while !self.is_over.load(Ordering::SeqCst) {
            let figures: Value = serde_json::from_str(&self.get("/dashboard/figures")).expect("JSON");
            let pid = figures["nginx"]["pid"].as_u64().expect("a process");
            let mut counters = BTreeMap::new();
            for path in ["http/requests", "http/server_zones", "http/location_zones", "ssl"] {
                counters_of(path.to_owned(), &figures[path], &mut counters);
            }
            let of_loops = figures["gale/loops"].as_array().expect("a list").iter();
            let turns: u64 = of_loops.filter_map(|each| each["turns"].as_u64()).sum();
            assert!(turns > 0);
            let before = known.entry(pid).or_default();
            for (name, count) in counters {
                let last = before.insert(name.clone(), count).unwrap_or_default();
                assert!(count >= last, "{name} of {pid} went back from {last} to {count}");
            }
            for path in ["http/server_zones/site", "gale/devices", "gale/stalls", "gale/listeners", "nginx"] {
                let told: Result<Value, _> = serde_json::from_str(&self.get(&format!("/api/9/{path}")));
                assert!(told.is_ok(), "{path}: {told:?}");
            }
            check_metrics(&self.get("/metrics"));
            self.rounds.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Makes requests that are counted, over kept and over new connections.
    fn load(&self) {
        let _end = EndOnDrop(self.is_over);
        while !self.is_over.load(Ordering::SeqCst) {
            assert_eq!(self.get("/"), "hello");
        }
    }
}

struct EndOnDrop<'e>(&'e AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Collects every number that is not a gauge, by its path.
fn counters_of(path: String, value: &Value, counters: &mut BTreeMap<String, u64>) {
    match value {
        Value::Object(fields) => {
            let is_counter = |name: &str| !["current", "processing"].contains(&name);
            for (name, value) in fields.iter().filter(|(name, _)| is_counter(name)) {
                counters_of(format!("{path}/{name}"), value, counters);
            }
        }
        Value::Number(number) => {
            counters.insert(path, number.as_u64().expect("a counter"));
        }
        _ => panic!("{path} is no number: {value}"),
    }
}

/// Checks that each line is a comment or a sample, and that families are complete.
fn check_metrics(text: &str) {
    assert!(text.ends_with('\n') && text.contains("\ngale_http_server_zone_requests_total{zone=\"site\"} "), "{text}");
    for line in text.lines().filter(|line| !line.starts_with("# ")) {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        assert!(name.starts_with("gale_") && value.parse::<f64>().is_ok(), "{line}");
    }
    assert!(text.contains("\ngale_page_cache_looks_total{"), "the last family is there");
}

/// Calls `act` while other threads make requests and read the figures.
fn watched(server: &mut Server, act: impl FnOnce(&mut Server, &Watch<'_>)) {
    let (rounds, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let watch = Watch { address: server.directory.address(1), rounds: &rounds, is_over: &is_over };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(|| watch.ask()), scope.spawn(|| watch.load()), scope.spawn(|| watch.load())];
        let end = EndOnDrop(&is_over);
        act(server, &watch);
        drop(end);
        threads.into_iter().for_each(|thread| thread.join().expect("every answer has its form"));
    });
}

fn figures_are_told_during_reloads(driver: Driver) {
    let mut server = Setup::http(driver, SITE).start();
    watched(&mut server, |server, watch| {
        for generation in 0..5 {
            watch.wait_rounds(1);
            server.reload(&http_configuration(driver, &format!("{SITE} # {generation}\n")));
        }
        watch.wait_rounds(1);
    });
    server.stop();
}

fn figures_are_told_during_an_upgrade(driver: Driver) {
    let mut server = Setup::http(driver, SITE).start();
    let old = server.pid();
    let mut new = None;
    watched(&mut server, |server, watch| {
        watch.wait_rounds(1);
        kill_process(old, Signal::USR2).expect("it runs");
        server.wait_notified("READY=1");
        // The old and the new process both answer.
        watch.wait_rounds(3);
        new = Some(server.pid_in_file());
        kill_process(old, Signal::QUIT).expect("it runs");
        assert!(server.wait_exited().success(), "{server}");
        watch.wait_rounds(2);
    });
    let new = new.filter(|new| *new != old).expect("a new process");
    kill_process(new, Signal::QUIT).expect("it runs");
    assert!(wait_ended(new), "{server}");
    server.assert_nothing_left();
}

fn figures_are_told_beside_a_disk_that_hangs(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let Some(mounted) = fuse::FileSystem::mount() else { return };
    let text = SITE.replace("%DIR%", mounted.point().to_str().expect("text"));
    let text = text.replace("location /files/ {", "location /files/ { rewrite ^/files/(.*)$ /$1 break;");
    let mut server = Setup::http(driver, &text).start();
    assert_eq!(server.connect_tcp(1).get("/files/g").body, fuse::content());
    watched(&mut server, |server, watch| {
        // The read of this file hangs, and all three requests wait for it.
        let mut waiting: Vec<Client> = (0..3).map(|_| server.connect_tcp(1)).collect();
        for client in &mut waiting {
            client.send("GET /files/h HTTP/1.1\r\nHost: h\r\n\r\n");
        }
        mounted.wait_hanging();
        watch.wait_rounds(3);
        let figures: Value = serde_json::from_str(&watch.get("/dashboard/figures")).expect("JSON");
        let of_device = |device: &&Value| device["name"] == "gale-test";
        let devices = figures["gale/devices"].as_array().expect("a list");
        let device = devices.iter().find(of_device).unwrap_or_else(|| panic!("{devices:#?}"));
        assert_eq!(device["mounted_on"], mounted.point().to_str().expect("text"));
        assert!(device["tasks"]["running"].as_u64() > Some(0), "{device:#}");
        let metrics = watch.get("/metrics");
        assert!(metrics.contains("name=\"gale-test\",state=\"running\"}"), "{metrics}");
        // No event loop is blocked by them.
        let is_blocked = |stall: &&Value| stall["kind"] == "blocked" && stall["is_over"] == false;
        let stalls = figures["gale/stalls"].as_array().expect("a list");
        assert!(!stalls.iter().any(|stall| is_blocked(&stall)), "{stalls:#?}");
        drop(waiting);
    });
    drop(mounted);
    server.stop();
}
