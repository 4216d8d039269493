//! The cache node with three disks (`examples/three-disks.conf`) under load, while each disk in turn is slow, full,
//! read-only, failing and hung, and recovers.
//!
//! Requests for the disk's share are always answered with the right bytes, from the disk or from the backend; those for
//! other shares are answered from their disks; no event loop blocks. A disk that has recovered caches its share again.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::fuse::disk::{Condition, Disk};
use crate::support::{
    Backend, Client, DEADLINE, Driver, Response, Server, Serving, Setup, has_own_mounts, with_each_driver,
};

with_each_driver!(
    slow_disk_delays_only_its_own_requests,
    a_full_disk_costs_its_share_only_storing,
    a_read_only_disk_costs_its_share_only_storing,
    a_disk_that_fails_has_its_share_answered_by_the_backend,
    a_disk_that_hangs_has_its_share_answered_by_the_backend,
);

const DISKS: usize = 3;

/// Objects of each size in the share of a disk.
const SMALL: usize = 4;
const LARGE: usize = 2;

/// Requests of a client for each object.
const ROUNDS: usize = 5;

const CLIENTS: usize = 2;

/// Duration of an operation on a slow disk.
const CRAWL: Duration = Duration::from_millis(20);

/// A hung disk blocks an operation for longer than this.
const LONG_WAIT_MS: u64 = 1000;

fn slow_disk_delays_only_its_own_requests(driver: Driver) {
    let Some(node) = Node::start(driver) else { return };
    node.each_disk_in_turn(Condition::Slow(CRAWL), |_, _| {});
    node.stop();
}

fn a_full_disk_costs_its_share_only_storing(driver: Driver) {
    let Some(node) = Node::start(driver) else { return };
    node.each_disk_in_turn(Condition::Full, |node, disk| {
        // Its stored objects are read as before.
        node.ask_for_all_of(disk, true);
        assert!(node.status(disk)["disk_errors"].as_u64() > Some(0));
    });
    node.server.wait_logged("No space left on device");
    node.stop();
}

fn a_read_only_disk_costs_its_share_only_storing(driver: Driver) {
    let Some(node) = Node::start(driver) else { return };
    node.each_disk_in_turn(Condition::ReadOnly, |node, disk| {
        node.ask_for_all_of(disk, true);
        assert!(node.status(disk)["disk_errors"].as_u64() > Some(0));
    });
    node.server.wait_logged("Read-only file system");
    node.stop();
}

fn a_disk_that_fails_has_its_share_answered_by_the_backend(driver: Driver) {
    let Some(node) = Node::start(driver) else { return };
    node.each_disk_in_turn(Condition::Failing, |node, disk| {
        assert!(node.status(disk)["disk_errors"].as_u64() > Some(0));
    });
    node.server.wait_logged("Input/output error");
    node.stop();
}

fn a_disk_that_hangs_has_its_share_answered_by_the_backend(driver: Driver) {
    let Some(node) = Node::start(driver) else { return };
    node.each_disk_in_turn(Condition::Hung, |node, disk| {
        let status = node.status(disk);
        assert_eq!(status["disk_answers"], false, "{status:#}");
        assert!(status["disk_timeouts"].as_u64() > Some(0) && node.disks[disk].waiting() > 0);
    });
    for disk in 1..=DISKS {
        node.server
            .wait_logged(&format!("cache \"cache_{disk}\" does not respond, requests are passed to the upstream"));
    }
    node.stop();
}

/// The server with its three disks. (The disks are dropped first: a process that waits for one cannot end.)
struct Node {
    disks: Vec<Disk>,
    server: Server,
    _backend: Serving,
    /// Paths that clients request, by the disk that caches them.
    shares: Vec<Vec<String>>,
}

impl Node {
    /// Starts the server and fills its caches. Returns `None` if no disks can be mounted.
    fn start(driver: Driver) -> Option<Node> {
        if !has_own_mounts() {
            return None;
        }
        let disks: Vec<Disk> = (0..DISKS).map(|_| Disk::mount()).collect::<Option<_>>()?;
        let backend = backend();
        let server = Setup::configuration(&configuration(driver, &disks, &backend)).start();
        server.wait_logged_times("0 entries", DISKS);
        let mut node = Node { disks, server, _backend: backend, shares: vec![Vec::new(); DISKS] };
        node.choose_objects();
        (0..DISKS).for_each(|disk| node.wait_cached(disk));
        Some(node)
    }

    /// Chooses this many objects of each size for each disk.
    fn choose_objects(&mut self) {
        for (kind, count) in [("small", SMALL), ("large", LARGE)] {
            let before: Vec<usize> = self.shares.iter().map(Vec::len).collect();
            for number in 0.. {
                let path = format!("/{kind}/{number}");
                let disk = self.ask(&mut self.server.connect(), &path).1;
                if self.shares[disk].len() < before[disk] + count {
                    self.shares[disk].push(path);
                }
                if self.shares.iter().zip(&before).all(|(share, before)| share.len() == before + count) {
                    break;
                }
            }
        }
    }

    /// Puts each disk into the condition while clients make requests, then calls `check`, and waits until the disk's
    /// share of the cache is complete again.
    fn each_disk_in_turn(&self, condition: Condition, check: impl Fn(&Node, usize)) {
        for disk in 0..DISKS {
            self.disks[disk].set(condition);
            self.load(disk);
            check(self, disk);
            self.assert_no_loop_waits();
            self.disks[disk].set(Condition::Well);
            self.wait_cached(disk);
            let status = self.status(disk);
            assert_eq!(status["disk_answers"], true, "{status:#}");
        }
    }

    /// Several clients of each share request all its objects, and new ones. All requests are answered, and those for
    /// the other disks from the cache.
    fn load(&self, bad: usize) {
        std::thread::scope(|scope| {
            for disk in 0..DISKS {
                for client in 0..CLIENTS {
                    scope.spawn(move || {
                        for round in 0..ROUNDS {
                            self.ask_for_all_of(disk, disk != bad);
                            let path = format!("/small/new/{bad}/{disk}/{client}/{round}");
                            assert_eq!(self.ask(&mut self.server.connect(), &path).0, "MISS", "{path}");
                        }
                    });
                }
            }
        });
    }

    /// Requests all objects of a share over one connection.
    fn ask_for_all_of(&self, disk: usize, is_well: bool) {
        let mut client = self.server.connect();
        for path in &self.shares[disk] {
            let (status, found, _) = self.ask(&mut client, path);
            assert_eq!(found, disk, "{path}");
            assert!(status == "HIT" || !is_well && status == "MISS", "{path}: {status}\n{}", self.server.log());
        }
    }

    /// Requests a path and checks every byte. Returns the cache status, the number of the disk, and the response.
    fn ask(&self, client: &mut Client, path: &str) -> (String, usize, Response) {
        let began = Instant::now();
        let response = client.get(path);
        assert!(began.elapsed() < DEADLINE / 2, "{path} took {:?}", began.elapsed());
        assert_eq!(response.status, 200, "{path}");
        assert!(response.body == body_of(path), "{path} has other bytes: {response:?}");
        let disk: usize = response.header("X-Disk").unwrap().parse().unwrap();
        (response.header("X-Cache").unwrap().to_owned(), disk - 1, response)
    }

    /// Waits until all objects of a share come from its disk, and a new one as well.
    fn wait_cached(&self, disk: usize) {
        let end = Instant::now() + DEADLINE;
        let is_of_it = |path: &String| self.ask(&mut self.server.connect(), path).1 == disk;
        let new = (0..).map(|number| format!("/large/new/{number}")).find(is_of_it);
        for path in self.shares[disk].iter().chain(&new) {
            while self.ask(&mut self.server.connect(), path).0 != "HIT" {
                assert!(Instant::now() < end, "{path} is not cached again\n{}", self.server.log());
            }
        }
    }

    /// The API's status of a disk's cache.
    fn status(&self, disk: usize) -> Value {
        let response = self.server.get(&format!("/api/9/http/caches/cache_{}", disk + 1));
        serde_json::from_slice(&response.body).expect("JSON")
    }

    /// Checks that no event loop has blocked on a disk. (Reading a page of the program takes less time.)
    fn assert_no_loop_waits(&self) {
        let response = self.server.get("/api/9/gale/stalls");
        let stalls: Value = serde_json::from_slice(&response.body).expect("JSON");
        let waits = |stall: &&Value| stall["kind"] == "blocked" && stall["time"].as_u64() >= Some(LONG_WAIT_MS);
        let waiting: Vec<&Value> = stalls.as_array().expect("a list").iter().filter(waits).collect();
        assert!(waiting.is_empty(), "{waiting:#?}");
    }

    fn stop(self) {
        self.assert_no_loop_waits();
        self.server.stop();
    }
}

/// The example with the test's addresses, and with header fields for the cache status and the disk.
fn configuration(driver: Driver, disks: &[Disk], backend: &Serving) -> String {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/three-disks.conf"));
    let mut text = text.expect("an example");
    for (number, disk) in (1..).zip(disks) {
        text = text.replace(&format!("/mnt/disk{number}"), disk.point().to_str().unwrap());
    }
    let more = format!(
        "daemon off; worker_processes 2; pid %DIR%/pid; error_log %DIR%/error.log info; events {{ use {}; }}",
        driver.name()
    );
    // Long enough that a busy machine does not look like a hung disk.
    let of_http = "http { access_log off; proxy_cache_disk_timeout 4s;";
    let of_server = "listen %UNIX%; add_header X-Cache $upstream_cache_status; add_header X-Disk $disk;
        location /api/ { api; }";
    text.replace("events {}", &more)
        .replace("http {", of_http)
        .replace("listen 8002;", of_server)
        .replace("127.0.0.1:8080", &backend.address)
        .replace("256m", "1m")
}

/// A backend that serves [`body_of`], with strong entity tags and ranges.
fn backend() -> Serving {
    Backend::tcp().serve(|asked, client| {
        let body = body_of(&asked.target);
        let whole = body.len();
        let tag = format!("\"{:x}\"", seed_of(&asked.target));
        let range = asked.header("Range").filter(|_| asked.header("If-Range") == Some(&*tag));
        let (status, range, part) = match range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
            Some((first, last)) => {
                let last = if last.is_empty() { whole - 1 } else { last.parse().unwrap() };
                let first: usize = first.parse().unwrap();
                ("206 Partial Content", format!("Content-Range: bytes {first}-{last}/{whole}\r\n"), first..last + 1)
            }
            None => ("200 OK", String::new(), 0..whole),
        };
        let length = part.len();
        let fields = format!("Cache-Control: max-age=600\r\nETag: {tag}\r\n{range}Content-Length: {length}");
        let head = format!("HTTP/1.1 {status}\r\n{fields}\r\n\r\n");
        client.try_send([head.as_bytes(), &body[part]].concat()).is_ok()
    })
}

/// A body of bytes that differ between paths, and between places of one path.
fn body_of(path: &str) -> Vec<u8> {
    let size = if path.starts_with("/large") { 300_000 } else { 1000 };
    let seed = seed_of(path);
    (0..size).map(|number: u32| ((number ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn seed_of(path: &str) -> u32 {
    path.bytes().fold(2_166_136_261, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619))
}
