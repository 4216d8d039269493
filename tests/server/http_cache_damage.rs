//! Damaged cache files: cut or changed anywhere, they are never sent as the stored response.

use std::path::{Path, PathBuf};

use crate::support::{Backend, Directory, Driver, Response, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    no_damaged_byte_of_a_large_body_is_sent_and_the_next_request_fetches_it_anew,
    rest_after_a_damaged_block_comes_from_the_upstream_if_it_can_be_resumed,
    rest_of_a_damaged_body_is_cut_from_all_of_it_where_the_upstream_sends_no_part,
    entry_cut_while_it_is_in_use_is_fetched_anew,
    parts_of_a_damaged_body_are_right_or_broken_off,
    a_copy_of_a_damaged_body_gets_no_new_header,
    blocks_are_checked_once_and_go_by_sendfile_from_then_on,
    a_large_body_without_sums_of_its_blocks_is_served,
);

/// Five blocks of 64 KiB, less the bytes of header and table.
const LENGTH: usize = 300_000;

/// Length of the table in bytes.
const TABLE: usize = 5 * 4;

/// Body of a path: bytes at a distance of 251 differ, and so do any two bodies.
fn body_of(path: &str) -> Vec<u8> {
    let salt = path.bytes().map(usize::from).sum::<usize>();
    (0..LENGTH).map(|at| (at % 251 + at / 65_536 + salt) as u8).collect()
}

/// Answers with the body of the path, or the requested range; with a strong entity tag below `/tagged`, and never with
/// a range below `/tagged-whole`.
fn origin() -> Serving {
    Backend::tcp().serve(|asked, client| {
        let body = body_of(&asked.target);
        let tag = if asked.target.starts_with("/tagged") { "ETag: \"1\"\r\nAccept-Ranges: bytes\r\n" } else { "" };
        let range = asked.header("Range").filter(|_| !asked.target.starts_with("/tagged-whole"));
        let range = range.and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some(first.parse::<usize>().ok()?..last.parse::<usize>().ok()? + 1)
        });
        let (status, range, part) = match range {
            Some(part) => {
                let range = format!("Content-Range: bytes {}-{}/{LENGTH}\r\n", part.start, part.end - 1);
                ("206 Partial Content", range, part)
            }
            None => ("200 OK", String::new(), 0..LENGTH),
        };
        let fields = format!("Cache-Control: max-age=600\r\n{tag}{range}Content-Length: {}", part.len());
        let head = format!("HTTP/1.1 {status}\r\n{fields}\r\n\r\n");
        client.try_send([head.as_bytes(), &body[part]].concat()).is_ok()
    })
}

fn setup(driver: Driver, directory: &Path, backend: &Serving, more: &str) -> Setup {
    let text = "proxy_cache_path PATH keys_zone=one:1m; proxy_cache_key $uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s; MORE
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status;
        proxy_force_ranges on; sendfile on;
        location / { proxy_pass http://BACKEND; }
        location /api/ { proxy_cache off; api; } location = /files { proxy_cache off; test_files; } }";
    let text = text.replace("PATH", directory.to_str().unwrap()).replace("MORE", more);
    Setup::http(driver, &text.replace("BACKEND", &backend.address))
}

fn file_of(directory: &Path, path: &str) -> PathBuf {
    use md5::{Digest, Md5};
    let sum: String = Md5::digest(path).iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(sum)
}

fn count_files(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().len() == 32).count()
}

/// Stores these paths and damages the file of each.
fn damaged(driver: Driver, directory: &Directory, backend: &Serving, paths: &[(String, Damage)]) {
    let server = setup(driver, directory.path(), backend, "").start();
    let mut client = server.connect();
    for (path, _) in paths {
        assert!(client.get(path).body == body_of(path), "{path}");
    }
    directory.wait_until("all are stored", |_| count_files(directory.path()) == paths.len());
    server.stop();
    for (path, damage) in paths {
        let file = file_of(directory.path(), path);
        let mut bytes = std::fs::read(&file).unwrap();
        let header_length = bytes.len() - LENGTH - TABLE;
        damage.apply(&mut bytes, header_length);
        std::fs::write(&file, &bytes).unwrap();
    }
}

/// Damage to a file.
#[derive(Clone, Copy, Debug)]
enum Damage {
    /// One bit of the byte at this offset in the file.
    Flip(usize),
    /// The same, at this offset in the body.
    FlipBody(usize),
    /// The same, at this distance from the end.
    FlipEnd(usize),
    /// The file ends at this offset.
    Cut(usize),
    /// The file is longer by a byte.
    Longer,
    /// Blocks that were allocated and never written, as after a loss of power.
    Zeros(usize),
}

impl Damage {
    fn apply(self, bytes: &mut Vec<u8>, header_length: usize) {
        let length = bytes.len();
        match self {
            Damage::Flip(at) => bytes[at] ^= 1,
            Damage::FlipBody(at) => bytes[header_length + at] ^= 0x80,
            Damage::FlipEnd(at) => bytes[length - at] ^= 0x10,
            Damage::Cut(at) => bytes.truncate(at),
            Damage::Longer => bytes.push(0),
            Damage::Zeros(at) => bytes[at..at + 4096].fill(0),
        }
    }

    /// `true` if only the body after its first block is damaged: then the head was sent before the damage is found.
    fn is_behind_first_block(self) -> bool {
        matches!(self, Damage::FlipBody(at) if at >= 65_536)
            || matches!(self, Damage::Zeros(at) | Damage::Flip(at) if at >= 65_536)
    }
}

const DAMAGES: [Damage; 26] = [
    Damage::Flip(8),
    Damage::Flip(9),
    Damage::Flip(17),
    Damage::Flip(90),
    Damage::Flip(100),
    Damage::FlipBody(0),
    Damage::FlipBody(1),
    Damage::FlipBody(40_000),
    Damage::Flip(65_535),
    Damage::Flip(65_536),
    Damage::Flip(131_071),
    Damage::Flip(131_072),
    Damage::FlipBody(150_001),
    Damage::FlipBody(LENGTH - 65_536),
    Damage::FlipBody(LENGTH - 1),
    Damage::FlipEnd(1),
    Damage::FlipEnd(TABLE),
    Damage::Zeros(4096),
    Damage::Zeros(69_632),
    Damage::Zeros(196_608),
    Damage::Cut(0),
    Damage::Cut(90),
    Damage::Cut(200),
    Damage::Cut(131_072),
    Damage::Cut(LENGTH),
    Damage::Longer,
];

fn paths(prefix: &str) -> Vec<(String, Damage)> {
    DAMAGES.iter().enumerate().map(|(number, &damage)| (format!("/{prefix}{number}"), damage)).collect()
}

/// Reads the body until it or the connection ends, and the cache status.
fn read(server: &Server, request: &str) -> Response {
    let mut client = server.connect();
    client.send(request);
    let mut response = client.head();
    response.body = client.read_to_end();
    response
}

fn get(path: &str, fields: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{fields}\r\n")
}

fn no_damaged_byte_of_a_large_body_is_sent_and_the_next_request_fetches_it_anew(driver: Driver) {
    // With `aio off` a connection would send the file without checking it.
    for more in ["", "aio off;"] {
        let (directory, backend) = (Directory::new(), origin());
        let paths = paths("plain");
        damaged(driver, &directory, &backend, &paths);
        let server = setup(driver, directory.path(), &backend, more).start();
        let mut broken_off = 0;
        for (path, damage) in &paths {
            let asked = backend.asked().len();
            let response = read(&server, &get(path, ""));
            let right = body_of(path);
            assert!(right.starts_with(&response.body), "{damage:?}: {} bytes", response.body.len());
            if response.body.len() < LENGTH {
                assert_eq!((response.header("X-Cache"), backend.asked().len()), (Some("HIT"), asked), "{damage:?}");
                broken_off += 1;
            } else {
                assert_eq!((response.header("X-Cache"), backend.asked().len()), (Some("MISS"), asked + 1));
            }
            // Damage that can be found before the head is sent was found.
            assert_eq!(response.body.len() < LENGTH, damage.is_behind_first_block(), "{damage:?}");
            let response = read(&server, &get(path, ""));
            assert!(response.body == right, "{damage:?}: {} bytes", response.body.len());
            assert_eq!(backend.asked().len(), asked + 1, "{damage:?}: fetched anew, once");
        }
        assert!(broken_off > 0);
        server.wait_logged_times("is damaged", broken_off);
        // An unknown version or missing magic does not count as damage.
        let figures = server.get("/api/9/http/caches/one").text().to_owned();
        let count: usize =
            figures.split("\"damaged\":").nth(1).unwrap().split([',', '}']).next().unwrap().parse().unwrap();
        assert!((DAMAGES.len() - 3..=DAMAGES.len()).contains(&count), "{figures}");
        server.stop();
    }
}

fn rest_after_a_damaged_block_comes_from_the_upstream_if_it_can_be_resumed(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let paths = paths("tagged");
    damaged(driver, &directory, &backend, &paths);
    let server = setup(driver, directory.path(), &backend, "").start();
    for (path, damage) in &paths {
        let response = read(&server, &get(path, ""));
        assert!(response.body == body_of(path), "{damage:?}: {} bytes", response.body.len());
        let (_, asked) = backend.asked().pop().unwrap();
        assert_eq!(asked.header("If-Range").is_some(), damage.is_behind_first_block(), "{damage:?}");
    }
    server.stop();
}

fn rest_of_a_damaged_body_is_cut_from_all_of_it_where_the_upstream_sends_no_part(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let paths = paths("tagged-whole");
    damaged(driver, &directory, &backend, &paths);
    let server = setup(driver, directory.path(), &backend, "").start();
    for (path, damage) in &paths {
        // Also ranges that end before the body does.
        let (fields, wanted) = match damage {
            Damage::FlipBody(_) => ("Range: bytes=100-280000\r\n", 100..280_001),
            _ => ("", 0..LENGTH),
        };
        let response = read(&server, &get(path, fields));
        assert!(response.body == body_of(path)[wanted], "{damage:?}: {} bytes", response.body.len());
    }
    let resumed = backend.asked().iter().filter(|(_, asked)| asked.header("If-Range").is_some()).count();
    let behind = DAMAGES.iter().filter(|damage| damage.is_behind_first_block()).count();
    assert!(resumed > 0 && resumed <= behind, "{resumed}");
    server.stop();
}

fn entry_cut_while_it_is_in_use_is_fetched_anew(driver: Driver) {
    for more in ["", "aio off;"] {
        let (directory, backend) = (Directory::new(), origin());
        let server = setup(driver, directory.path(), &backend, more).start();
        for (number, cut) in [0, 90, 4096, 65_536, 70_000, 131_072, LENGTH - 1].into_iter().enumerate() {
            let path = format!("/plain{number}");
            assert!(read(&server, &get(&path, "")).body == body_of(&path));
            let file = file_of(directory.path(), &path);
            directory.wait_until("it is stored", |_| file.exists());
            // Each worker has the file open and has checked it.
            for _ in 0..8 {
                assert!(read(&server, &get(&path, "")).body == body_of(&path));
            }
            let asked = backend.asked().len();
            std::fs::File::options().write(true).open(&file).unwrap().set_len(cut as u64).unwrap();
            let response = read(&server, &get(&path, ""));
            assert_eq!((response.status, response.header("X-Cache")), (200, Some("MISS")), "cut to {cut}");
            assert!(response.body == body_of(&path), "cut to {cut}");
            assert_eq!(backend.asked().len(), asked + 1);
            assert!(read(&server, &get(&path, "")).body == body_of(&path), "cut to {cut}");
        }
        server.stop();
    }
}

fn parts_of_a_damaged_body_are_right_or_broken_off(driver: Driver) {
    for more in ["", "aio off;"] {
        let (directory, backend) = (Directory::new(), origin());
        let damages = [70_000, 70_100, 200_000].map(Damage::FlipBody);
        let asked = ["70000-70000", "69000-71000", "0-99,150000-150009", "0-99,69900-70200,290000-299999"];
        let cases = asked.iter().flat_map(|asked| damages.map(|damage| (*asked, damage)));
        let cases: Vec<(&str, Damage)> = cases.collect();
        let paths: Vec<(String, Damage)> =
            cases.iter().enumerate().map(|(number, &(_, damage))| (format!("/plain{number}"), damage)).collect();
        damaged(driver, &directory, &backend, &paths);
        let server = setup(driver, directory.path(), &backend, more).start();
        for ((path, damage), (ranges, _)) in paths.iter().zip(&cases) {
            let response = read(&server, &get(path, &format!("Range: bytes={ranges}\r\n")));
            assert_eq!(response.status, 206, "{ranges} {damage:?}");
            let right = body_of(path);
            let parts: Vec<&[u8]> = ranges
                .split(',')
                .map(|range| {
                    let (first, last) = range.split_once('-').unwrap();
                    &right[first.parse().unwrap()..=last.parse().unwrap()]
                })
                .collect();
            match &*parts {
                [part] => assert!(part.starts_with(&response.body), "{ranges} {damage:?}"),
                parts => assert!(is_multipart_of(&response.body, parts), "{ranges} {damage:?}"),
            }
            let length: usize = response.header("Content-Length").unwrap().parse().unwrap();
            let Damage::FlipBody(at) = *damage else { unreachable!() };
            let reads_damage = ranges.split(',').any(|range| {
                let (first, last) = range.split_once('-').unwrap();
                // Blocks are counted from the start of the file, where the header is.
                let block = |at: usize| (at + 1000) / 65_536;
                (block(first.parse().unwrap())..=block(last.parse().unwrap())).contains(&block(at))
            });
            let is_whole = response.body.len() == length;
            assert!(is_whole || response.header("X-Cache") == Some("HIT") && reads_damage, "{ranges} {damage:?}");
        }
        server.stop();
    }
}

/// `true` if a multipart body consists of these parts or a beginning of them.
fn is_multipart_of(body: &[u8], parts: &[&[u8]]) -> bool {
    let mut rest = body;
    for part in parts {
        let Some(at) = rest.windows(4).position(|window| window == b"\r\n\r\n") else {
            // It broke off within the head of the part or before.
            return rest.len() < 300;
        };
        rest = &rest[at + 4..];
        if rest.len() < part.len() {
            return part.starts_with(rest);
        }
        if !rest.starts_with(part) {
            return false;
        }
        rest = &rest[part.len()..];
    }
    true
}

/// A 304 with longer fields needs a file with a longer header, into which the body is copied.
fn a_copy_of_a_damaged_body_gets_no_new_header(driver: Driver) {
    let directory = Directory::new();
    let backend = Backend::tcp().serve(|asked, client| {
        let more = format!("X-More: {}\r\n", "m".repeat(2000));
        let answer = match asked.header("If-None-Match") {
            Some(_) => format!("HTTP/1.1 304 Not Modified\r\nCache-Control: max-age=600\r\n{more}\r\n").into_bytes(),
            None => {
                let fields = format!("Cache-Control: max-age=60\r\nAge: 90\r\nETag: \"1\"\r\nContent-Length: {LENGTH}");
                [format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n").as_bytes(), &body_of(&asked.target)].concat()
            }
        };
        client.try_send(answer).is_ok()
    });
    let more = "proxy_cache_revalidate on; proxy_cache_status gale;";
    let paths = ["/right", "/damaged"];
    let server = setup(driver, directory.path(), &backend, more).start();
    for path in paths {
        assert!(server.get(path).body == body_of(path));
    }
    directory.wait_until("both are stored", |_| count_files(directory.path()) == 2);
    server.stop();
    let damaged = file_of(directory.path(), "/damaged");
    let mut bytes = std::fs::read(&damaged).unwrap();
    bytes[250_000] ^= 4;
    std::fs::write(&damaged, bytes).unwrap();
    let server = setup(driver, directory.path(), &backend, more).start();
    // A HEAD does not read the body.
    for path in paths {
        let mut client = server.connect();
        client.send(format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        let head = client.response_to_head();
        assert_eq!((head.status, head.header("X-Cache")), (200, Some("REVALIDATED")), "{path}");
    }
    let right = file_of(directory.path(), "/right");
    directory.wait_until("the right one has been copied", |_| {
        std::fs::read(&right).is_ok_and(|file| file.windows(20).any(|window| window == b"mmmmmmmmmmmmmmmmmmmm"))
    });
    directory.wait_until("the damaged one has gone", |_| !damaged.exists());
    server.wait_logged("the body is damaged");
    let response = read(&server, &get("/right", ""));
    assert!(response.header("X-Cache") == Some("HIT") && response.body == body_of("/right"));
    let response = read(&server, &get("/damaged", ""));
    assert!(response.header("X-Cache") == Some("MISS") && response.body == body_of("/damaged"));
    // The new response is stored on the disk.
    let status = response.header("Cache-Status").unwrap();
    assert!(status.ends_with("; stored"), "{status}");
    server.stop();
}

/// Bytes sent by `sendfile` for a hit, from the counters of files.
fn sent_by_sendfile(server: &Server, path: &str) -> u64 {
    let figure = || {
        let text = server.get("/files").text().to_owned();
        let word = text.split_whitespace().find_map(|word| word.strip_prefix("sendfile_bytes=")).expect("a figure");
        word.parse::<u64>().unwrap()
    };
    let before = figure();
    assert!(server.get(path).body == body_of(path));
    figure() - before
}

fn blocks_are_checked_once_and_go_by_sendfile_from_then_on(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = setup(driver, directory.path(), &backend, "").start();
    assert!(server.get("/plain").body == body_of("/plain"));
    directory.wait_until("it is stored", |_| count_files(directory.path()) == 1);
    // Each of the two workers checks it once. A loop that had to wait for its core takes the device for slow, and reads
    // for a while.
    let mut was_read = false;
    server.directory.wait_until("it goes by sendfile", |_| {
        let sent = sent_by_sendfile(&server, "/plain");
        was_read |= sent == 0;
        sent == LENGTH as u64
    });
    assert!(was_read);
    server.stop();
}

/// The format of earlier versions: the header has a checksum of the whole, and the body is not followed by a table.
fn a_large_body_without_sums_of_its_blocks_is_served(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    damaged(driver, &directory, &backend, &[("/plain".to_owned(), Damage::Longer)]);
    let file = file_of(directory.path(), "/plain");
    let mut bytes = std::fs::read(&file).unwrap();
    let header_length = bytes.len() - 1 - LENGTH - TABLE;
    bytes.truncate(header_length + LENGTH);
    bytes[8] = 1;
    bytes[88..96].fill(0);
    let sum = crc32fast::hash(&bytes[..header_length]);
    bytes[92..96].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let server = setup(driver, directory.path(), &backend, "").start();
    let response = read(&server, &get("/plain", ""));
    assert_eq!(response.header("X-Cache"), Some("HIT"));
    assert!(response.body == body_of("/plain"));
    server.stop();
}
