//! Interrupted fills: by `kill -9` at any point, by a slow disk, and by an upgrade.

use std::path::Path;

use rustix::process::{Signal, kill_process};

use crate::support::fuse::disk::{Condition, Disk, Point};
use crate::support::{
    Backend, Directory, Driver, Response, Server, Serving, Setup, has_own_mounts, wait_ended, with_each_driver,
};

with_each_driver!(
    a_process_that_is_killed_while_it_stores_leaves_nothing_that_is_served_wrongly,
    a_response_is_served_and_not_stored_when_its_disk_falls_behind,
    a_new_process_serves_hits_at_once_and_keeps_the_journal_when_the_old_one_has_gone,
);

/// A body written at once when it is complete, and one written while it arrives.
const SMALL: usize = 3_000;
const LARGE: usize = 400_000;

/// Body of a path `/N`, which has `N` bytes: bytes at a distance of 251 differ.
fn body_of(path: &str) -> Vec<u8> {
    let length: usize = path.trim_start_matches('/').parse().expect("a length");
    (0..length).map(|at| (at % 251) as u8 ^ (at / 65_536) as u8).collect()
}

fn origin() -> Serving {
    Backend::tcp().serve(|asked, client| {
        let body = body_of(&asked.target);
        let head = format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nContent-Length: {}\r\n\r\n", body.len());
        client.try_send([head.as_bytes(), &body].concat()).is_ok()
    })
}

fn setup(driver: Driver, directory: &Path, backend: &str) -> Setup {
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; proxy_cache_purge $http_x_purge;
        add_header X-Cache $upstream_cache_status;
        add_header X-Pid $pid; location / { proxy_pass http://BACKEND; } }";
    Setup::http(driver, &text.replace("PATH", directory.to_str().unwrap()).replace("BACKEND", backend))
}

/// Cache status of a response, after a check of its body.
#[track_caller]
fn used(response: &Response, path: &str) -> String {
    assert!(response.body == body_of(path), "{} bytes of {path}", response.body.len());
    response.header("X-Cache").unwrap_or("-").to_owned()
}

/// Names of temporary files.
fn being_written(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.len() == 43).collect()
}

/// True if a temporary file has bytes.
fn has_bytes(directory: &Path) -> bool {
    let metadata = |name: String| std::fs::metadata(directory.join(name));
    being_written(directory).into_iter().any(|name| metadata(name).is_ok_and(|metadata| metadata.len() > 0))
}

/// A disk of the test; skips and returns `None` where it cannot be mounted.
fn disk() -> Option<Disk> {
    if has_own_mounts() { Disk::mount() } else { None }
}

/// Kills all processes at once, without time to clean up; the disk does not answer.
fn kill_all_of(server: Server, disk: &Disk) {
    let (master, worker) = (server.pid(), server.worker());
    kill_process(master, Signal::KILL).unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    disk.interrupt_waiting();
    assert!(wait_ended(master) && wait_ended(worker));
}

fn a_process_that_is_killed_while_it_stores_leaves_nothing_that_is_served_wrongly(driver: Driver) {
    let points = [
        (SMALL, Point::Create),
        (SMALL, Point::Write(0)),
        (SMALL, Point::Write(50)),
        (SMALL, Point::Write(SMALL)),
        (SMALL, Point::Rename),
        (SMALL, Point::Renamed),
        (LARGE, Point::Create),
        (LARGE, Point::Write(0)),
        (LARGE, Point::Write(100_000)),
        (LARGE, Point::Write(LARGE)),
        (LARGE, Point::Header),
        (LARGE, Point::Rename),
        (LARGE, Point::Renamed),
    ];
    for (length, point) in points {
        let Some(disk) = disk() else { return };
        let (backend, path) = (origin(), format!("/{length}"));
        let setup = || setup(driver, &disk.point(), &backend.address);
        let server = setup().start();
        server.wait_logged(" 0 entries");
        disk.hang_at(point);
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        server.look_until("the disk hangs", || disk.waiting() > 0);
        kill_all_of(server, &disk);
        // The next process finds nothing or the whole response.
        let mut server = setup().start();
        server.wait_logged(if point == Point::Renamed { " 1 entries" } else { " 0 entries" });
        assert_eq!(being_written(&disk.point()), [""; 0], "{length} {point:?}");
        let first = if point == Point::Renamed { "HIT" } else { "MISS" };
        for expected in [first, "HIT", "HIT"] {
            assert_eq!(used(&server.get(&path), &path), expected, "{length} {point:?}");
        }
        server.end(Signal::TERM);
    }
}

fn a_response_is_served_and_not_stored_when_its_disk_falls_behind(driver: Driver) {
    const LENGTH: usize = 6 << 20;
    let Some(disk) = disk() else { return };
    let backend = Backend::tcp();
    let mut server = setup(driver, &disk.point(), backend.address()).start();
    server.wait_logged(" 0 entries");
    let path = format!("/{LENGTH}");
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let mut client = server.connect();
    client.send(&request);
    let mut behind = backend.accept();
    behind.request();
    let (body, begun) = (body_of(&path), 300_000);
    let head = format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nContent-Length: {LENGTH}\r\n\r\n");
    behind.send([head.as_bytes(), &body[..begun]].concat());
    // Bytes in it, so that opening it has ended.
    server.look_until("a file that is written", || has_bytes(&disk.point()));
    disk.set(Condition::Hung);
    let mut sender = behind.sender();
    let rest = body[begun..].to_vec();
    let sending = std::thread::spawn(move || sender.send(rest));
    // As fast as the client reads, once the wait for the disk is over.
    let mut response = client.head();
    response.body = client.read_to_end();
    assert_eq!(used(&response, &path), "MISS");
    sending.join().unwrap();
    server.wait_logged("the cache's disk is too slow, a response is not stored");
    disk.set(Condition::Well);
    let mut second = server.connect();
    second.send(&request);
    let mut behind = backend.accept();
    behind.request();
    behind.send("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na");
    assert_eq!(second.response().text(), "a", "it was not stored");
    drop(disk);
    server.end(Signal::TERM);
}

/// Number of records of stored entries in a journal. A record: length (2), kind (1), payload, checksum (4).
fn journaled(directory: &Path) -> usize {
    const HEADER: usize = 28;
    const STORED: u8 = 1;
    let journal = std::fs::read(directory.join(".gale.journal")).unwrap_or_default();
    let (mut count, mut at) = (0, HEADER);
    while let Some(record) = journal.get(at..at + 3) {
        count += usize::from(record[2] == STORED);
        at += 2 + usize::from(u16::from_le_bytes([record[0], record[1]])) + 4;
    }
    count
}

fn a_new_process_serves_hits_at_once_and_keeps_the_journal_when_the_old_one_has_gone(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let mut server = setup(driver, directory.path(), &backend.address).start();
    server.wait_logged(" 0 entries");
    let (old, old_worker) = (server.pid(), server.worker());
    assert_eq!(used(&server.get("/10"), "/10"), "MISS");
    directory.wait_until("it is in the journal", |_| journaled(directory.path()) == 1);
    kill_process(old, Signal::USR2).unwrap();
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    assert_ne!(new, old);
    // Both processes answer; the new one finds the old one's entries, although it does not have the lock.
    let pid_of = |response: &Response| response.header("X-Pid").unwrap().to_owned();
    server.look_until("an answer of the new process", || {
        let mut client = server.connect();
        let response = client.get("/10");
        assert_eq!(used(&response, "/10"), "HIT");
        if pid_of(&response) == old_worker.to_string() {
            return false;
        }
        // Without the lock it has no journal for its purges.
        assert_eq!(client.ask("GET /12 HTTP/1.1\r\nHost: a\r\nX-Purge: 1\r\n\r\n").status, 204);
        true
    });
    server.wait_logged("a purge of cache \"one\" applies to this process only, which does not manage the directory");
    server.wait_logged(&format!("is in use by process {old_worker}, which manages it until it exits"));
    kill_process(old, Signal::QUIT).unwrap();
    assert!(server.wait_exited().success(), "{server}");
    server.wait_logged(" 1 entries");
    // From now on the journal is its own.
    assert_eq!(used(&server.get("/11"), "/11"), "MISS");
    directory.wait_until("both are in the journal", |_| journaled(directory.path()) == 2);
    kill_process(server.worker(), Signal::KILL).unwrap();
    server.wait_logged(" 2 entries");
    for path in ["/10", "/11"] {
        assert_eq!(used(&server.get(path), path), "HIT", "{path}");
    }
    kill_process(new, Signal::QUIT).unwrap();
    assert!(wait_ended(new));
    server.assert_nothing_left();
}
