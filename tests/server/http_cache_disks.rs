//! Cache directories: entries after a restart, size limits, and disks that are full, hung or used by another server.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;

use crate::support::fuse;
use crate::support::{
    self, Backend, Client, Directory, Driver, Response, Server, Serving, Setup, SmallDisk, has_own_mounts, skip,
    with_each_driver,
};

with_each_driver!(
    entries_are_found_after_a_restart_and_after_a_crash,
    purges_hold_after_a_restart,
    purges_that_were_answered_hold_after_a_crash,
    a_damaged_journal_loses_no_purge,
    a_purge_waits_only_so_long_for_a_disk_that_hangs,
    the_cache_is_no_larger_than_it_may_be,
    unused_entry_is_removed,
    a_second_server_on_the_same_directory_is_told_so,
    files_of_others_stay_and_are_told_of,
    three_disks_have_their_shares_and_pools,
    a_full_disk_costs_only_storing,
    a_disk_that_hangs_costs_its_requests_a_bounded_time,
    a_large_hit_on_a_disk_that_hangs_is_answered_by_the_upstream,
    a_hit_whose_disk_fails_on_the_way_goes_on_from_the_upstream,
    a_hit_in_constant_use_comes_from_memory_while_its_disk_does_not_answer,
    a_hit_without_a_strong_tag_is_cut_off_where_its_disk_fails,
    a_disk_that_answers_others_is_slow_and_not_silent,
    a_journal_that_takes_long_is_waited_for_in_vain_only_once,
    an_entry_that_could_not_be_read_in_time_is_not_stored_once_more,
    replacement_of_an_unreadable_entry_is_shared_by_all_waiting_clients,
    a_response_that_is_stored_waits_only_so_long_for_a_disk_that_hangs,
    response_is_whole_whichever_call_of_its_disk_fails,
    max_size_is_about_the_room_that_files_take,
    unfinished_files_of_a_killed_process_are_removed,
    a_directory_that_was_removed_is_used_again,
    a_flipped_bit_of_a_body_is_found_when_it_is_opened,
    a_fill_goes_on_over_a_reload,
    a_304_renews_the_file_of_a_large_entry,
    purger_removes_files_of_purged_entries,
    so_much_of_the_disk_stays_free_as_min_free_says,
    caches_go_on_over_a_reload,
);

/// A server whose cacheable answers contain the number of the request.
fn origin() -> Serving {
    let count = std::sync::atomic::AtomicU64::new(0);
    Backend::tcp().serve(move |asked, client| {
        let number = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
        let size = asked.target.split_once("size=").map_or(0, |(_, size)| size.parse().unwrap());
        let body = format!("{number}{}", ".".repeat(size));
        let fields = "Cache-Control: max-age=600\r\nSurrogate-Key: t\r\n";
        if asked.target.starts_with("/chunked") {
            let chunk = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
            client.send(format!("HTTP/1.1 200 OK\r\n{fields}Transfer-Encoding: chunked\r\n\r\n{chunk}"));
        } else {
            client.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()));
        }
        true
    })
}

/// A server with a cache in this directory.
fn caching(driver: Driver, directory: &Path, parameters: &str, backend: &Serving) -> Setup {
    let text = "proxy_cache_path PATH keys_zone=one:1m PARAMETERS; proxy_cache_key $uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status;
        location / { proxy_pass http://BACKEND; proxy_cache_purge $http_x_purge;
        proxy_cache_tag_header Surrogate-Key; proxy_cache_purge_tags $http_x_tags; } }";
    let text = text.replace("PATH", directory.to_str().unwrap()).replace("PARAMETERS", parameters);
    Setup::http(driver, &text.replace("BACKEND", &backend.address))
}

fn outcome(response: &Response) -> (&str, &str) {
    (response.header("X-Cache").unwrap_or("-"), response.text())
}

fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
}

/// Number of entries in a directory, and their bytes.
fn stored(directory: &Path) -> (usize, u64) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let sizes = entries.filter(|entry| entry.file_name().len() == 32).filter_map(|entry| entry.metadata().ok());
    sizes.fold((0, 0), |(count, bytes), metadata| (count + 1, bytes + metadata.len()))
}

/// `true` if a directory has an entry whose body ends with this text.
fn is_stored(directory: &Path, body: &str) -> bool {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut entries = entries.filter(|entry| entry.file_name().len() == 32);
    entries.any(|entry| std::fs::read(entry.path()).is_ok_and(|file| file.ends_with(body.as_bytes())))
}

fn entries_are_found_after_a_restart_and_after_a_crash(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let setup = || caching(driver, directory.path(), "", &backend);
    let server = setup().start();
    for number in 0..20 {
        assert_eq!(server.get(&format!("/{number}")).header("X-Cache"), Some("MISS"));
    }
    directory.wait_until("all are stored", |_| stored(directory.path()).0 == 20);
    server.stop();
    let mut server = setup().start();
    server.wait_logged("20 entries");
    assert_eq!(outcome(&server.get("/7")), ("HIT", "8"));
    server.get("/20");
    directory.wait_until("the new one is stored, too", |_| stored(directory.path()).0 == 21);
    // The processes are killed without time to write anything.
    let worker = server.worker();
    rustix::process::kill_process(worker, Signal::KILL).unwrap();
    server.wait_logged("21 entries");
    assert_eq!((outcome(&server.get("/20")), outcome(&server.get("/0"))), (("HIT", "21"), ("HIT", "1")));
    server.end(Signal::TERM);
    assert_eq!(backend.asked().len(), 21);
}

fn purges_hold_after_a_restart(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let setup = || caching(driver, directory.path(), "", &backend);
    let server = setup().start();
    server.wait_logged("0 entries");
    server.get("/a");
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    assert_eq!(ask(&mut server.connect(), "/", "X-Purge: 1\r\nX-Tags: t\r\n").status, 204);
    server.stop();
    let server = setup().start();
    assert_eq!(outcome(&server.get("/a")), ("MISS", "2"));
    server.stop();
}

fn purges_that_were_answered_hold_after_a_crash(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "", &backend).start();
    server.wait_logged("0 entries");
    // A purged entry may keep its name for a while: a new file is recognised by its contents.
    let body = |number: usize| format!("{number}{}", ".".repeat(20));
    let path = "/a?size=20";
    for (number, purge) in ["X-Purge: 1\r\nX-Tags: t\r\n", "X-Purge: 1\r\n"].into_iter().enumerate() {
        let before = body(2 * number + 1);
        assert_eq!(outcome(&server.get(path)), ("MISS", &*before));
        directory.wait_until("it is stored", |_| is_stored(directory.path(), &before));
        assert_eq!(outcome(&server.get(path)), ("HIT", &*before));
        let worker = server.worker();
        assert_eq!(ask(&mut server.connect(), "/a", purge).status, 204);
        rustix::process::kill_process(worker, Signal::KILL).unwrap();
        server.wait_logged_times("entries, ", number + 2);
        let after = body(2 * number + 2);
        assert_eq!(outcome(&server.get(path)), ("MISS", &*after));
        directory.wait_until("it is stored", |_| is_stored(directory.path(), &after));
        assert_eq!(ask(&mut server.connect(), "/a", purge).status, 204);
    }
    let mut server = server;
    server.end(Signal::TERM);
}

/// Kind of a journal's record for an entry with a file.
const STORED: u8 = 1;

/// Offsets and kinds of a journal's records: length (2), kind (1), payload, checksum (4).
fn records_of(journal: &[u8]) -> Vec<(usize, u8)> {
    let mut records = Vec::new();
    let mut at = 28;
    while let Some(&[low, high, kind]) = journal.get(at..at + 3) {
        records.push((at, kind));
        at += 2 + usize::from(u16::from_le_bytes([low, high])) + 4;
    }
    records
}

/// Waits until the journal has this number of entries. A file gets its name a moment before its entry is in the index,
/// and an entry that is purged or stopped in between never gets a record.
fn wait_for_entries_in_journal(directory: &Directory, count: usize) {
    directory.wait_until("its entry is in the journal", |directory| {
        let journal = std::fs::read(directory.path().join(".gale.journal")).unwrap_or_default();
        records_of(&journal).iter().filter(|record| record.1 == STORED).count() == count
    });
}

fn a_damaged_journal_loses_no_purge(driver: Driver) {
    const PURGED_TAG: u8 = 5;
    let damaged = "has lost purges: all entries older than these count as purged";
    // Kind of the damaged record, log message, and outcome for entries stored before the purge and after it. (All
    // entries have the tag.)
    for (kind, told, before, after) in [
        (STORED, "is damaged: 55 bytes are lost, but no purge", "MISS", "HIT"),
        (PURGED_TAG, damaged, "MISS", "HIT"),
        // Even the start of the journal is damaged: the age of the purges is unknown.
        (0, damaged, "MISS", "MISS"),
    ] {
        let (directory, backend) = (Directory::new(), origin());
        let setup = || caching(driver, directory.path(), "", &backend);
        let server = setup().start();
        server.wait_logged("0 entries");
        server.get("/before");
        wait_for_entries_in_journal(&directory, 1);
        assert_eq!(ask(&mut server.connect(), "/", "X-Purge: 1\r\nX-Tags: t\r\n").status, 204);
        server.get("/after");
        wait_for_entries_in_journal(&directory, 2);
        server.stop();
        let path = directory.path().join(".gale.journal");
        let mut journal = std::fs::read(&path).unwrap();
        match records_of(&journal).iter().find(|record| record.1 == kind) {
            Some(record) => journal[record.0 + 5] ^= 0x10,
            None => journal[..28].fill(0),
        }
        std::fs::write(&path, journal).unwrap();
        let server = setup().start();
        server.wait_logged(told);
        server.wait_logged(" entries, ");
        assert_eq!(server.get("/before").header("X-Cache"), Some(before), "{told}");
        assert_eq!(server.get("/after").header("X-Cache"), Some(after), "{told}");
        // From then on the journal works.
        assert_eq!(server.get("/before").header("X-Cache"), Some("HIT"), "{told}");
        server.stop();
        let server = setup().start();
        assert_eq!(server.get("/before").header("X-Cache"), Some("HIT"), "{told}");
        assert_eq!(server.log().matches("is damaged").count(), 0);
        server.stop();
    }
}

fn a_purge_waits_only_so_long_for_a_disk_that_hangs(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let setup = caching(driver, directory.path(), "", &backend);
    let server = setup.replace("proxy_cache_disk_timeout 60s", "proxy_cache_disk_timeout 1s").start();
    server.wait_logged("0 entries");
    assert_eq!(outcome(&server.get("/a")), ("MISS", "1"));
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    // A pipe in its place: opening it for writing waits for a reader.
    let (pipe, journal) = (directory.path().join("pipe"), directory.path().join(".gale.journal"));
    let rights = rustix::fs::Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rights, 0).unwrap();
    rustix::fs::chmod(&pipe, rights).unwrap();
    std::fs::rename(&pipe, &journal).unwrap();
    assert_eq!(ask(&mut server.connect(), "/", "X-Purge: 1\r\nX-Tags: t\r\n").status, 204);
    server.wait_logged("a purge of cache \"one\" is in effect, but not in its journal yet");
    assert_eq!(outcome(&server.get("/a")), ("MISS", "2"));
    // The disk answers again.
    let reader = std::fs::File::open(&journal).unwrap();
    server.stop();
    drop(reader);
}

fn the_cache_is_no_larger_than_it_may_be(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "max_size=200k", &backend).start();
    for number in 0..100 {
        server.get(&format!("/{number}?size=10000"));
    }
    directory.wait_until("it is full", |_| stored(directory.path()).0 >= 15);
    // A response larger than the cache evicts nothing, whether its length is known or not.
    for path in ["/large?size=300000", "/chunked/large?size=300000"] {
        for _ in 0..2 {
            let response = server.get(path);
            assert!(response.header("X-Cache") == Some("MISS") && response.body.len() > 300_000, "{path}");
        }
    }
    server.stop();
    let (count, bytes) = stored(directory.path());
    assert!(bytes <= 200 * 1024 && count >= 15, "{count} {bytes}");
}

fn unused_entry_is_removed(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "", &backend).start();
    server.get("/a");
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    server.stop();
    let server = caching(driver, directory.path(), "inactive=1s", &backend).start();
    directory.wait_until("it has gone", |_| stored(directory.path()).0 == 0);
    assert_eq!(server.get("/a").header("X-Cache"), Some("MISS"));
    server.stop();
}

fn a_second_server_on_the_same_directory_is_told_so(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let first = caching(driver, directory.path(), "", &backend).start();
    first.wait_logged("0 entries");
    let second = caching(driver, directory.path(), "", &backend).start();
    second.wait_logged("which manages it until it exits");
    assert_eq!(outcome(&first.get("/a")), ("MISS", "1"));
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    // Each server finds entries of the other one.
    assert_eq!(outcome(&second.get("/a")), ("HIT", "1"));
    first.stop();
    second.wait_logged("1 entries");
    second.stop();
}

fn files_of_others_stay_and_are_told_of(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let names = ["b7f54b2df7773722d382f4809d65029c", "b7f54b2df7773722d382f4809d65029c.0000000001", "notes.txt"];
    for name in names {
        directory.write(name, [5, 0, 0, 0, 0, 0, 0, 0, 1]);
    }
    let server = caching(driver, directory.path(), "", &backend).start();
    server.wait_logged("3 files were not written by Gale and are left alone");
    server.stop();
    assert!(names.iter().all(|name| directory.path().join(name).exists()));
}

fn three_disks_have_their_shares_and_pools(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/three-disks.conf"));
    let text = text.expect("an example").replace("/mnt", directory.path().to_str().unwrap());
    let text = text.replace("127.0.0.1:8080", &backend.address).replace("listen 8002", "listen %UNIX%");
    let places: Vec<_> = (1..=3).map(|number| directory.path().join(format!("disk{number}"))).collect();
    let more =
        format!("daemon off; pid %DIR%/pid; error_log %DIR%/error.log info; events {{ use {}; }}", driver.name());
    let text = text.replace("http {", "http { proxy_cache_disk_timeout 60s;");
    let server = Setup::configuration(&text.replace("events {}", &more).replace("256m", "1m")).start();
    for number in 0..60 {
        server.get(&format!("/{number}"));
        assert_eq!(server.get(&format!("/{number}")).text(), (number + 1).to_string());
    }
    server.stop();
    let counts: Vec<usize> = places.iter().map(|place| files_below(place)).collect();
    assert!(counts.iter().sum::<usize>() == 60 && counts.iter().all(|&count| count >= 8), "{counts:?}");
}

fn files_below(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.path().is_dir() {
            true => files_below(&entry.path()),
            false => usize::from(entry.file_name().len() == 32),
        })
        .sum()
}

fn a_full_disk_costs_only_storing(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let (directory, backend) = (Directory::new(), origin());
    let Some(disk) = SmallDisk::mount(directory.path(), 256) else { return };
    let server = caching(driver, directory.path(), "", &backend).start();
    // Small responses and those written while they arrive: all are complete, whatever the disk's errors.
    for size in [1, 150_000, 400_000, 100_000, 900_000] {
        let response = server.get(&format!("/{size}?size={size}"));
        assert_eq!(response.body.len(), response.header("Content-Length").unwrap().parse::<usize>().unwrap());
        assert!(response.body.len() > size);
    }
    server.wait_logged("No space left on device");
    assert_eq!(server.get("/1?size=1").header("X-Cache"), Some("HIT"));
    server.stop();
    let left = std::fs::read_dir(directory.path()).unwrap().flatten().map(|entry| entry.file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy()[1..].contains('.') || name.len() < 32), "nothing half");
    drop(disk);
}

fn a_disk_that_hangs_costs_its_requests_a_bounded_time(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let Some(mounted) = fuse::FileSystem::mount() else { return };
    let (directory, backend) = (Directory::new(), origin());
    let text = "proxy_cache_path FUSE keys_zone=hung:1m; proxy_cache_path OTHER keys_zone=well:1m;
        proxy_cache_key $uri; server { listen %UNIX%; proxy_cache $arg_c;
        add_header X-Cache $upstream_cache_status; location / { proxy_pass http://BACKEND; } }";
    let text = text.replace("FUSE", mounted.point().to_str().unwrap());
    let text = text.replace("OTHER", directory.path().to_str().unwrap()).replace("BACKEND", &backend.address);
    let mut server = Setup::http(driver, &text).start();
    assert_eq!(server.get("/a?c=well").header("X-Cache"), Some("MISS"));
    // The cache waits for its lock and looks for files that it does not know.
    server.wait_logged("of cache \"hung\" cannot be locked");
    mounted.set_hung(true);
    // The first requests find that the disk does not answer; after that only one request a second waits.
    let began = Instant::now();
    for number in 0..50 {
        let response = server.get(&format!("/{number}?c=hung"));
        assert_eq!(response.header("X-Cache"), Some("MISS"));
        assert_eq!(server.get("/a?c=well").header("X-Cache"), Some("HIT"));
    }
    assert!(began.elapsed() < Duration::from_secs(60), "nobody waits for the disk");
    server.wait_logged("does not respond, requests are passed to the upstream");
    mounted.set_hung(false);
    drop(mounted);
    server.signal(Signal::TERM);
    server.wait_exited();
}

fn caches_go_on_over_a_reload(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let mut server: Server = caching(driver, directory.path(), "", &backend).start();
    server.wait_logged("0 entries");
    server.get("/a");
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    let configuration = server.directory.read("gale.conf");
    server.reload(&configuration.replace("keys_zone=one:1m", "keys_zone=one:1m inactive=1h"));
    assert_eq!(outcome(&server.get("/a")), ("HIT", "1"));
    server.reload(&configuration.replace("keys_zone=one:1m", "keys_zone=one:1m inactive=1s"));
    directory.wait_until("the new parameter counts", |_| stored(directory.path()).0 == 0);
    // Another directory under the same name is refused, as in nginx.
    let other = format!("{}/other", directory.path().display());
    server.reload(&configuration.replace(directory.path().to_str().unwrap(), &other));
    server.wait_logged("cache path while previously it used");
    server.get("/b");
    server.end(Signal::TERM);
}

/// Length of the bodies of [`large_origin`].
const LARGE: usize = 300_000;

fn large_body() -> Vec<u8> {
    (0..LARGE as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// A server of large bodies, with a strong entity tag and ranges below `/tagged`.
fn large_origin() -> Serving {
    Backend::tcp().serve(|asked, client| {
        let body = large_body();
        let tag = if asked.target.starts_with("/tagged") { "ETag: \"1\"\r\nAccept-Ranges: bytes\r\n" } else { "" };
        let range = asked.header("Range").filter(|_| asked.header("If-Range") == Some("\"1\""));
        let (status, range, part) = match range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
            Some((first, last)) => {
                let part = first.parse().unwrap()..last.parse::<usize>().unwrap() + 1;
                ("206 Partial Content", format!("Content-Range: bytes {first}-{last}/{LARGE}\r\n"), part)
            }
            None => ("200 OK", String::new(), 0..LARGE),
        };
        let length = part.len();
        let fields = format!("Cache-Control: max-age=600\r\n{tag}{range}Content-Length: {length}");
        let head = format!("HTTP/1.1 {status}\r\n{fields}\r\n\r\n");
        client.try_send([head.as_bytes(), &body[part]].concat()).is_ok()
    })
}

/// A cache `hung` on the test's file system, with a copy of an entry of the cache `well`; both have the same key.
fn on_a_disk_of_the_test(
    driver: Driver,
    path: &str,
    backend: &Serving,
) -> Option<(Server, fuse::FileSystem, Directory)> {
    let mounted = fuse::FileSystem::mount()?;
    let directory = Directory::new();
    let text = "proxy_cache_path FUSE keys_zone=hung:1m; proxy_cache_path OTHER keys_zone=well:1m;
        proxy_cache_key $uri; server { listen %UNIX%; proxy_cache $arg_c;
        add_header X-Cache $upstream_cache_status; location / { proxy_pass http://BACKEND; } }";
    let text = text.replace("FUSE", mounted.point().to_str().unwrap());
    let text = text.replace("OTHER", directory.path().to_str().unwrap()).replace("BACKEND", &backend.address);
    let server = Setup::http(driver, &text).start();
    assert_eq!(server.get(&format!("{path}?c=well")).header("X-Cache"), Some("MISS"));
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    let files = std::fs::read_dir(directory.path()).unwrap().flatten();
    let file = files.into_iter().find(|entry| entry.file_name().len() == 32).unwrap();
    mounted.put(file.file_name().to_str().unwrap(), std::fs::read(file.path()).unwrap());
    // From now on the index's misses are looked for on the disk.
    server.wait_logged("of cache \"hung\" cannot be locked");
    Some((server, mounted, directory))
}

/// Cache status of a response, after a check of its body.
fn used(response: &Response) -> Option<&str> {
    assert!(response.body == large_body(), "{} bytes", response.body.len());
    response.header("X-Cache")
}

fn a_large_hit_on_a_disk_that_hangs_is_answered_by_the_upstream(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let backend = large_origin();
    let Some((mut server, mounted, _directory)) = on_a_disk_of_the_test(driver, "/plain", &backend) else { return };
    // The client's connection stays open, whatever the source of the answer.
    let mut client = server.connect();
    // Repeated until a busy machine is in time.
    while used(&client.get("/plain?c=hung")) != Some("HIT") {}
    let asked = backend.asked().len();
    mounted.set_fault(Some((fuse::Fault::Hangs, 0)));
    // The open file is kept but not read: neither its head nor its body is sent.
    assert_eq!(used(&client.get("/plain?c=hung")), Some("MISS"));
    assert_eq!(backend.asked().len(), asked + 1);
    server.wait_logged("does not respond, requests are passed to the upstream");
    // The upstream server's answer is used for a moment.
    let mut hits = 0;
    server.look_until("it is used, and asked for again", || {
        match used(&client.get("/plain?c=hung")) {
            Some("HIT") => hits += 1,
            other => assert_eq!(other, Some("MISS")),
        }
        hits > 0 && backend.asked().len() >= asked + 3
    });
    // The disk is tried once a second.
    mounted.set_fault(None);
    while used(&client.get("/plain?c=hung")) != Some("HIT") {}
    drop(mounted);
    server.end(Signal::TERM);
}

fn a_hit_whose_disk_fails_on_the_way_goes_on_from_the_upstream(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let backend = large_origin();
    let Some((mut server, mounted, _directory)) = on_a_disk_of_the_test(driver, "/tagged", &backend) else { return };
    let mut client = server.connect();
    for fault in [fuse::Fault::Fails, fuse::Fault::Hangs] {
        mounted.set_fault(None);
        while used(&client.get("/tagged?c=hung")) != Some("HIT") {}
        mounted.set_fault(Some((fault, 200_000)));
        // The disk delivers the first part and the server the rest; the client notices nothing.
        loop {
            let asked = backend.asked().len();
            let response = client.get("/tagged?c=hung");
            if used(&response) == Some("HIT") {
                let asked = &backend.asked()[asked].1;
                assert_eq!(asked.header("If-Range"), Some("\"1\""), "{fault:?}");
                let range = asked.header("Range").unwrap();
                assert!(range.starts_with("bytes=1") && range.ends_with("-299999"), "{fault:?} {range}");
                break;
            }
        }
    }
    mounted.set_fault(None);
    drop(mounted);
    server.end(Signal::TERM);
}

/// A disk of the test that can hang; skips and returns `None` where it cannot be mounted.
fn mounted() -> Option<fuse::disk::Disk> {
    if has_own_mounts() { fuse::disk::Disk::mount() } else { None }
}

/// The files of one cache lie on two disks: the popular one on a disk that works, the others on one that hangs. So the
/// test sees how the cache treats a file in memory while "its" disk does not answer.
fn a_hit_in_constant_use_comes_from_memory_while_its_disk_does_not_answer(driver: Driver) {
    let Some(disk) = mounted() else { return };
    let (directory, backend) = (Directory::new(), large_origin());
    let text = "proxy_cache_path PATH levels=1 keys_zone=one:1m; proxy_cache_key $uri; server { listen %UNIX%;
        proxy_cache one; add_header X-Cache $upstream_cache_status; location / { proxy_pass http://BACKEND; }
        location /cold { proxy_pass http://BACKEND; proxy_cache_disk_timeout 10ms; } location /api/ { api; } }";
    let text = text.replace("PATH", directory.path().to_str().unwrap()).replace("BACKEND", &backend.address);
    let mut server = Setup::http(driver, &text).start();
    server.wait_logged("0 entries");
    let hot = "/tagged/hot";
    assert_eq!(used(&server.get(hot)), Some("MISS"));
    let place_of = |digit: char| directory.path().join(digit.to_string());
    let digits = || ('0'..='9').chain('a'..='f');
    server.look_until("it is stored", || digits().any(|digit| stored(&place_of(digit)).0 == 1));
    let own = digits().find(|&digit| place_of(digit).exists()).unwrap();
    for digit in digits().filter(|&digit| digit != own) {
        std::os::unix::fs::symlink(disk.point(), place_of(digit)).unwrap();
    }
    let is_on_the_other_disk = |path: &String| {
        let before = (stored(&place_of(own)).0, stored(&disk.point()).0);
        assert_eq!(used(&server.get(path)), Some("MISS"));
        let now = || (stored(&place_of(own)).0, stored(&disk.point()).0);
        server.look_until("it is stored", || now() != before);
        now().1 > before.1
    };
    let cold = (0..).map(|number| format!("/cold/{number}")).find(is_on_the_other_disk).unwrap();
    // A worker that has the file open knows its disk.
    for _ in 0..20 {
        while used(&server.get(&cold)) != Some("HIT") {}
    }
    disk.set(fuse::disk::Condition::Hung);
    let answers = || server.get("/api/9/http/caches/one").text().contains("\"disk_answers\":true");
    let is_done = std::sync::atomic::AtomicBool::new(false);
    let is_hit_while_silent = || {
        used(&server.get(&cold));
        let (asked, is_silent) = (backend.asked().len(), !answers());
        // One request a second may try the disk, and finds its data in memory.
        let is_hit = (0..5).all(|_| used(&server.get(hot)) == Some("HIT"));
        // The journal is on the disk that works, which makes the cache's disk answer again, a second later.
        is_hit && is_silent && !answers() && backend.asked().len() == asked
    };
    std::thread::scope(|scope| {
        // Polls in a thread of its own, because a busy machine would poll too seldom.
        scope.spawn(|| {
            while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                used(&server.get(hot));
            }
        });
        let end = Instant::now() + support::DEADLINE;
        let is_right = std::iter::repeat_with(is_hit_while_silent).any(|is_right| is_right || Instant::now() >= end);
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(is_right && Instant::now() < end, "only the upstream answers\n{}", server.log());
    });
    disk.set(fuse::disk::Condition::Well);
    server.end(Signal::TERM);
}

fn a_hit_without_a_strong_tag_is_cut_off_where_its_disk_fails(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let backend = large_origin();
    let Some((mut server, mounted, _directory)) = on_a_disk_of_the_test(driver, "/plain", &backend) else { return };
    while used(&server.get("/plain?c=hung")) != Some("HIT") {}
    mounted.set_fault(Some((fuse::Fault::Fails, 200_000)));
    loop {
        let mut client = server.connect();
        client.send("GET /plain?c=hung HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        let head = client.head();
        let body = client.read_to_end();
        assert!(large_body().starts_with(&body));
        if head.header("X-Cache") == Some("HIT") {
            assert!(body.len() < LARGE, "the client notices that it is not all");
            break;
        }
    }
    server.wait_logged("reading a response failed");
    mounted.set_fault(None);
    drop(mounted);
    server.end(Signal::TERM);
}

/// Some reads of one disk hang, others do not.
fn a_disk_that_answers_others_is_slow_and_not_silent(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let backend = large_origin();
    let Some((mut server, mounted, _directory)) = on_a_disk_of_the_test(driver, "/tagged", &backend) else { return };
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Other requests are for readable data.
        scope.spawn(|| {
            while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                // A connection has a limit of requests (`keepalive_requests`).
                let response = ask(&mut server.connect(), "/tagged?c=hung", "Range: bytes=0-999\r\n");
                assert!(response.status == 206 && response.body == large_body()[..1000]);
            }
        });
        // If no other request came while one waited, the disk was silent; then another read begins when it answers
        // again.
        let end = Instant::now() + support::DEADLINE;
        let is_slow =
            || server.log().contains("the disk of cache \"hung\" is slow, a request is passed to the upstream");
        while !is_slow() && Instant::now() < end {
            mounted.set_fault(None);
            while used(&server.get("/tagged?c=hung")) != Some("HIT") && Instant::now() < end {}
            mounted.set_fault(Some((fuse::Fault::Hangs, 200_000)));
            used(&server.get("/tagged?c=hung"));
        }
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(is_slow(), "{}", server.log());
    });
    mounted.set_fault(None);
    drop(mounted);
    server.end(Signal::TERM);
}

/// A pipe in place of the journal is read when the test wants, and the disk answers other operations all the time.
fn a_journal_that_takes_long_is_waited_for_in_vain_only_once(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let (journal, file) = (directory.path().join(".gale.journal"), directory.path().join("file"));
    rustix::fs::mknodat(rustix::fs::CWD, &journal, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::set_permissions(&journal, PermissionsExt::from_mode(0o666)).unwrap();
    let writes_it = std::fs::File::options().read(true).write(true).open(&journal).unwrap();
    std::fs::write(&file, vec![b'x'; 300_000]).unwrap();
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri; server { listen %UNIX%;
        proxy_cache one; add_header X-Cache $upstream_cache_status; location /api/ { api; }
        location /short { proxy_cache_disk_timeout 10ms; proxy_pass http://BACKEND; }
        location /long { proxy_cache_disk_timeout 1h; proxy_pass http://BACKEND; } location /file { root PATH; } }";
    let text = text.replace("PATH", directory.path().to_str().unwrap()).replace("BACKEND", &backend.address);
    let mut server = Setup::http(driver, &text).start();
    assert_eq!(outcome(&server.get("/short")), ("MISS", "1"));
    let answers = || server.get("/api/9/http/caches/one").text().contains("\"disk_answers\":true");
    assert!(!answers());
    if lies_in_memory(&file) {
        skip("no disk can answer here");
    } else {
        server.look_until("the disk answers others", || {
            let opened = std::fs::File::open(&file).unwrap();
            opened.sync_all().unwrap();
            rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            server.get("/file").body.len() == 300_000 && answers()
        });
    }
    assert_eq!(outcome(&server.get("/long")), ("MISS", "2"));
    // The journal was empty and is not read again.
    std::fs::remove_file(&journal).unwrap();
    drop(writes_it);
    server.wait_logged(" entries, ");
    assert_eq!(server.get("/long").text().len(), 1);
    server.end(Signal::TERM);
}

fn lies_in_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).unwrap().f_type == 0x0102_1994
}

fn an_entry_that_could_not_be_read_in_time_is_not_stored_once_more(driver: Driver) {
    let Some(disk) = mounted() else { return };
    let backend = Backend::tcp();
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri; proxy_cache_lock on;
        proxy_cache_disk_timeout 2s; server { listen %UNIX%; proxy_cache one; proxy_cache_status us;
        add_header X-Cache $upstream_cache_status;
        location / { proxy_pass http://BACKEND; } location /api/ { api; } }";
    let text = text.replace("PATH", disk.point().to_str().unwrap()).replace("BACKEND", backend.address());
    let mut server = Setup::http(driver, &text).start();
    server.wait_logged("0 entries");
    // Long enough to be sent from its file.
    let answer = |letter: &str| {
        let fields = "Cache-Control: max-age=600\r\nContent-Length: 300000";
        let mut behind = backend.accept();
        behind.request();
        behind.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{}", letter.repeat(300_000)));
    };
    let request = "GET /a HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut first = server.connect();
    first.send(request);
    answer("a");
    assert!(first.response().text() == "a".repeat(300_000));
    server.look_until("it is stored", || stored(&disk.point()).0 == 1);
    disk.set(fuse::disk::Condition::Hung);
    let mut late = server.connect();
    late.send(request);
    let mut behind = backend.accept();
    behind.request();
    // The disk answers again before the backend does.
    disk.set(fuse::disk::Condition::Well);
    let answers = || server.get("/api/9/http/caches/one").text().contains("\"disk_answers\":true");
    server.look_until("the disk answers", answers);
    let fields = "Cache-Control: max-age=600\r\nContent-Length: 300000";
    behind.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{}", "b".repeat(150_000)));
    let head = late.head();
    assert_eq!(head.header("Cache-Status"), Some("us; fwd=uri-miss; detail=disk"));
    assert_eq!(head.header("X-Cache"), Some("MISS"));
    // Other clients read along.
    let mut other = server.connect();
    other.send(request);
    assert_eq!(other.head().header("X-Cache"), Some("HIT"));
    behind.send("b".repeat(150_000));
    assert!(other.take(300_000) == "b".repeat(300_000).as_bytes());
    assert!(late.take(300_000) == "b".repeat(300_000).as_bytes());
    // When the last reader has left, the entry on the disk is used again.
    server.look_until("what is on the disk", || outcome(&server.get("/a")) == ("HIT", &*"a".repeat(300_000)));
    drop(disk);
    server.end(Signal::TERM);
}

fn replacement_of_an_unreadable_entry_is_shared_by_all_waiting_clients(driver: Driver) {
    let Some(disk) = mounted() else { return };
    let backend = Backend::tcp();
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri; proxy_cache_lock on;
        proxy_cache_disk_timeout 1s; server { listen %UNIX%; proxy_cache one;
        location / { proxy_pass http://BACKEND; } location /api/ { api; } }";
    let text = text.replace("PATH", disk.point().to_str().unwrap()).replace("BACKEND", backend.address());
    let setup = || Setup::http(driver, &text);
    let server = setup().start();
    let answer = |text: &str| {
        let mut behind = backend.accept();
        behind.request();
        // Head and body arrive in one piece.
        let fields = "Cache-Control: max-age=600\r\nContent-Length: 3";
        behind.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{text}"));
    };
    let ask = |server: &Server| {
        let mut client = server.connect();
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        client
    };
    let mut first = ask(&server);
    answer("old");
    assert_eq!(first.response().text(), "old");
    server.look_until("it is stored", || stored(&disk.point()).0 == 1);
    drop(first);
    // The next process has no copy in memory.
    server.stop();
    let mut server = setup().start();
    server.wait_logged("1 entries");
    disk.set(fuse::disk::Condition::Hung);
    let mut late: Vec<Client> = (0..3).map(|_| ask(&server)).collect();
    let is_late = || server.get("/api/9/http/caches/one").text().contains("\"disk_timeouts\":3");
    server.look_until("all have waited for the disk", is_late);
    answer("new");
    assert!(late.iter_mut().all(|client| client.response().text() == "new"));
    disk.set(fuse::disk::Condition::Well);
    drop(disk);
    server.end(Signal::TERM);
}

fn a_response_that_is_stored_waits_only_so_long_for_a_disk_that_hangs(driver: Driver) {
    let Some(disk) = mounted() else { return };
    let (backend, size) = (origin(), 3_000_000);
    let setup = caching(driver, &disk.point(), "", &backend);
    let mut server = setup.replace("proxy_cache_disk_timeout 60s", "proxy_cache_disk_timeout 50ms").start();
    server.wait_logged("0 entries");
    for point in [fuse::disk::Point::Create, fuse::disk::Point::Write(500_000)] {
        let end = Instant::now() + support::DEADLINE;
        // Repeated until a busy machine is in time.
        for number in 0.. {
            assert!(Instant::now() < end, "{point:?}\n{}", server.log());
            disk.hang_at(point);
            let began = Instant::now();
            let response = server.get(&format!("/{number}?size={size}"));
            assert_eq!((response.status, response.body.len() > size), (200, true));
            let (took, was_waiting) = (began.elapsed(), disk.waiting() > 0);
            disk.set(fuse::disk::Condition::Well);
            server.look_until("the file goes", || being_written(&disk.point()) == 0);
            if was_waiting && took < Duration::from_secs(4) {
                break;
            }
        }
    }
    drop(disk);
    server.end(Signal::TERM);
}

fn response_is_whole_whichever_call_of_its_disk_fails(driver: Driver) {
    let Some(disk) = mounted() else { return };
    let (backend, size) = (origin(), 300_000);
    let mut server = caching(driver, &disk.point(), "", &backend).start();
    server.wait_logged("0 entries");
    let is_whole = |response: &Response| {
        response.status == 200 && response.text().trim_start_matches(|c: char| c.is_ascii_digit()) == ".".repeat(size)
    };
    for errno in [Errno::NOSPC, Errno::IO] {
        for number in 1..=12 {
            let path = format!("/{}/{number}?size={size}", errno.raw_os_error());
            disk.fail_call(Some(number), errno);
            assert!(is_whole(&server.get(&path)), "{path}");
            disk.fail_call(None, errno);
            if errno == Errno::NOSPC {
                // The call that fails with EIO may be the one that removes the file.
                server.look_until("no file is being written", || being_written(&disk.point()) == 0);
            }
            // A hit, or fetched anew.
            assert!(is_whole(&server.get(&path)), "{path}");
        }
    }
    drop(disk);
    server.end(Signal::TERM);
}

fn max_size_is_about_the_room_that_files_take(driver: Driver) {
    use std::os::unix::fs::MetadataExt;
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "max_size=100k", &backend).start();
    for number in 0..100 {
        server.get(&format!("/{number}?size=1000"));
    }
    server.stop();
    let entries = std::fs::read_dir(directory.path()).unwrap().flatten().filter(|entry| entry.file_name().len() == 32);
    let sizes: Vec<_> = entries.filter_map(|entry| entry.metadata().ok()).map(|file| file.blocks() * 512).collect();
    let room: u64 = sizes.iter().sum();
    assert!(room <= 100 * 1024 && !sizes.is_empty(), "{} files take {room} bytes", sizes.len());
}

/// Number of temporary files in a directory.
fn being_written(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().len() == 43).count()
}

fn unfinished_files_of_a_killed_process_are_removed(driver: Driver) {
    let (directory, backend) = (Directory::new(), Backend::tcp());
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri; proxy_cache_disk_timeout 60s;
        server { listen %UNIX%; proxy_cache one; location / { proxy_pass http://BACKEND; } }";
    let text = text.replace("PATH", directory.path().to_str().unwrap()).replace("BACKEND", backend.address());
    let mut server = Setup::http(driver, &text).start();
    server.wait_logged("0 entries");
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut behind = backend.accept();
    behind.request();
    let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 600000\r\n\r\n";
    behind.send([head.as_bytes(), &[b'x'; 500_000]].concat());
    directory.wait_until("it is being written", |_| being_written(directory.path()) == 1);
    rustix::process::kill_process(server.worker(), Signal::KILL).unwrap();
    server.wait_logged_times("entries, ", 2);
    assert_eq!((being_written(directory.path()), stored(directory.path()).0), (0, 0));
    server.end(Signal::TERM);
}

/// Requests uncached paths until the condition is true of a directory without a watch.
#[track_caller]
fn ask_until(what: &str, server: &Server, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + support::DEADLINE;
    while !is_true() {
        assert!(Instant::now() < end, "no {what} in time\n{}", server.log());
        ask(&mut server.connect(), "/none", "X-Purge: 1\r\n");
    }
}

fn a_directory_that_was_removed_is_used_again(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let cache = directory.path().join("cache");
    let server = caching(driver, &cache, "", &backend).start();
    server.wait_logged("0 entries");
    server.get("/a");
    ask_until("it is stored", &server, || stored(&cache).0 == 1);
    std::fs::remove_dir_all(&cache).unwrap();
    server.wait_logged("of cache \"one\" was removed");
    ask_until("it is locked again", &server, || cache.join(".gale.lock").exists());
    assert_eq!(server.get("/b").header("X-Cache"), Some("MISS"));
    ask_until("it is stored", &server, || stored(&cache).0 == 1);
    assert_eq!(server.get("/b").header("X-Cache"), Some("HIT"));
    // A second server finds the lock taken.
    let second = caching(driver, &cache, "", &backend).start();
    second.wait_logged("which manages it until it exits");
    second.stop();
    server.stop();
}

fn a_flipped_bit_of_a_body_is_found_when_it_is_opened(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let setup = || caching(driver, directory.path(), "", &backend);
    let server = setup().start();
    server.get("/a?size=200000");
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    server.stop();
    let files = std::fs::read_dir(directory.path()).unwrap().flatten();
    let file = files.into_iter().find(|entry| entry.file_name().len() == 32).unwrap().path();
    let server = setup().start();
    assert_eq!(server.get("/a?size=200000").header("X-Cache"), Some("HIT"));
    server.stop();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[150_000] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let server = setup().start();
    let response = server.get("/a?size=200000");
    assert_eq!(response.header("X-Cache"), Some("MISS"));
    assert!(response.text()[1..].bytes().all(|byte| byte == b'.'));
    server.wait_logged("is damaged");
    server.stop();
}

fn a_fill_goes_on_over_a_reload(driver: Driver) {
    let (directory, backend) = (Directory::new(), Backend::tcp());
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri; proxy_cache_disk_timeout 60s;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status;
        location / { proxy_pass http://BACKEND; } }";
    let text = text.replace("PATH", directory.path().to_str().unwrap()).replace("BACKEND", backend.address());
    let mut server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut behind = backend.accept();
    behind.request();
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\nab");
    assert_eq!(client.head().status, 200);
    assert_eq!(client.take(2), b"ab");
    let configuration = server.directory.read("gale.conf");
    server.reload(&configuration.replace("keys_zone=one:1m", "keys_zone=one:1m inactive=1h"));
    // New clients read it, too.
    let mut second = server.connect();
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(second.head().header("X-Cache"), Some("HIT"));
    behind.send("cd");
    assert_eq!((client.take(2), second.take(4)), (b"cd".to_vec(), b"abcd".to_vec()));
    assert_eq!(outcome(&server.get("/a")), ("HIT", "abcd"));
    assert!(backend.is_idle());
    server.end(Signal::TERM);
}

fn purger_removes_files_of_purged_entries(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "purger=on", &backend).start();
    server.wait_logged("0 entries");
    for path in ["/a/1", "/a/2", "/b"] {
        server.get(path);
    }
    directory.wait_until("they are stored", |_| stored(directory.path()).0 == 3);
    assert_eq!(ask(&mut server.connect(), "/a/*", "X-Purge: 1\r\n").status, 204);
    directory.wait_until("the files have gone", |_| stored(directory.path()).0 == 1);
    assert_eq!(outcome(&server.get("/b")), ("HIT", "3"));
    server.stop();
}

fn so_much_of_the_disk_stays_free_as_min_free_says(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let (directory, backend) = (Directory::new(), origin());
    let Some(disk) = SmallDisk::mount(directory.path(), 2048) else { return };
    let server = caching(driver, directory.path(), "min_free=1m", &backend).start();
    server.wait_logged("0 entries");
    for number in 0..30 {
        server.get(&format!("/{number}?size=50000"));
    }
    ask_until("so much is free", &server, || {
        let stat = rustix::fs::statvfs(directory.path()).unwrap();
        stat.f_bavail * stat.f_frsize >= 1 << 20
    });
    let (count, bytes) = stored(directory.path());
    assert!(count > 0 && bytes <= 1 << 20, "{count} {bytes}");
    server.stop();
    drop(disk);
}

fn a_304_renews_the_file_of_a_large_entry(driver: Driver) {
    let directory = Directory::new();
    let backend = Backend::tcp().serve(|asked, client| {
        let answer = match asked.header("If-None-Match") {
            Some(_) => "HTTP/1.1 304 Not Modified\r\nCache-Control: max-age=600\r\n\r\n".to_owned(),
            None => {
                let fields = "Cache-Control: max-age=60\r\nAge: 90\r\nETag: \"1\"\r\nContent-Length: 400000";
                format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{}", ".".repeat(400_000))
            }
        };
        client.try_send(answer).is_ok()
    });
    let setup = || {
        caching(driver, directory.path(), "", &backend)
            .replace("proxy_cache one;", "proxy_cache one; proxy_cache_revalidate on;")
    };
    let server = setup().start();
    assert_eq!(server.get("/a").header("X-Cache"), Some("MISS"));
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    let response = server.get("/a");
    assert_eq!((response.header("X-Cache"), response.body.len()), (Some("REVALIDATED"), 400_000));
    server.stop();
    assert_eq!(backend.asked().len(), 2);
    // The next process knows it from the file.
    std::fs::remove_file(directory.path().join(".gale.journal")).unwrap();
    let server = setup().start();
    server.wait_logged("1 entries");
    let response = server.get("/a");
    assert_eq!((response.header("X-Cache"), response.body.len()), (Some("HIT"), 400_000));
    server.stop();
}
