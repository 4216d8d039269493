//! The cache of open files: which files it keeps, and that every response matches the file on disk, or the state that
//! nginx's cache would still have.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use crate::support::{
    Client, DEADLINE, Driver, Response, Server, Setup, descriptors_of, is_root, skip, with_each_driver,
};

with_each_driver!(
    a_small_file_in_memory_is_always_that_on_disk,
    a_large_file_that_is_held_open_is_always_that_on_disk,
    few_files_are_held_open,
    files_of_every_size_arrive_whole_however_often_they_are_asked_for,
    unwatchable_file_is_served_as_it_is,
    off_keeps_nothing,
    a_cache_tells_of_changes_although_it_would_believe_for_an_hour,
    a_cache_believes_for_a_while_as_nginx_does,
    file_is_kept_open_from_min_uses_on_until_it_is_inactive,
    errors_are_kept_only_if_told_so,
    directories_are_kept,
    max_bounds_open_files_and_a_reload_applies_another_max,
    heads_and_bodies_are_of_one_file_while_it_is_replaced,
    bodies_in_memory_have_a_bound_together_and_those_that_go_make_room,
);

/// `site/current -> releases/7`, with pages in `releases/7` and `releases/8`.
const ROOT: &str = "root %DIR%/site/current; log_not_found off; keepalive_requests 1000000;";

fn site(setup: Setup) -> Server {
    let server = setup.start();
    rebuild(&server);
    server
}

fn rebuild(server: &Server) {
    let site = server.directory.path().join("site");
    let _ = fs::remove_dir_all(&site);
    for release in ["7", "8"] {
        server.directory.write(&format!("site/releases/{release}/page"), format!("page {release}"));
    }
    symlink("releases/7", site.join("current")).expect("a link");
}

/// A change to `site/current/page`, and the expected response after it.
type Change = (&'static str, fn(&Path), (u16, &'static str));

const CHANGES: &[Change] = &[
    ("written in place", |site| fs::write(site.join("releases/7/page"), "PAGE 7").expect("written"), (200, "PAGE 7")),
    (
        "longer",
        |site| fs::write(site.join("releases/7/page"), "a longer page").expect("written"),
        (200, "a longer page"),
    ),
    ("empty", |site| fs::write(site.join("releases/7/page"), "").expect("written"), (200, "")),
    ("replaced", |site| rename(site, "releases/8/page", "releases/7/page"), (200, "page 8")),
    ("unlinked", |site| fs::remove_file(site.join("releases/7/page")).expect("there"), (404, "")),
    ("renamed", |site| rename(site, "releases/7/page", "releases/7/other"), (404, "")),
    ("a parent renamed", |site| rename(site, "releases", "elsewhere"), (404, "")),
    (
        "the link switched",
        |site| {
            symlink("releases/8", site.join("new")).expect("a link");
            rename(site, "new", "current");
        },
        (200, "page 8"),
    ),
    (
        "written by another name",
        |site| {
            fs::hard_link(site.join("releases/7/page"), site.join("other")).expect("a name");
            fs::write(site.join("other"), "PAGE 7").expect("written");
        },
        (200, "PAGE 7"),
    ),
];

fn rename(site: &Path, from: &str, to: &str) {
    fs::rename(site.join(from), site.join(to)).expect("renamed");
}

fn answer(response: &Response) -> (u16, &str) {
    (response.status, if response.status == 200 { response.text() } else { "" })
}

/// True if the kernel notifies the worker process of changes to this file.
fn is_watched(server: &Server, path: &Path) -> bool {
    let inode = format!(" ino:{:x} ", fs::metadata(path).expect("there").ino());
    let descriptors = fs::read_dir(format!("/proc/{}/fdinfo", server.worker().as_raw_nonzero())).expect("a process");
    let texts = descriptors.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).any(|line| line.contains(&inode))
}

/// Repeats a request until the response is as expected, since the end of work on other threads is not signalled.
#[track_caller]
fn ask_until(client: &mut Client, path: &str, mut is_so: impl FnMut(&Response) -> bool) {
    let end = Instant::now() + DEADLINE;
    while !is_so(&client.get(path)) {
        assert!(Instant::now() < end, "{path}: it does not come");
    }
}

fn a_small_file_in_memory_is_always_that_on_disk(driver: Driver) {
    let server = site(Setup::server(driver, ROOT));
    let site = server.directory.path().join("site");
    let mut client = server.connect();
    for (what, change, expected) in CHANGES.iter().cycle().take(3 * CHANGES.len()) {
        rebuild(&server);
        let page = site.join("releases/7/page");
        ask_until(&mut client, "/page", |response| {
            assert_eq!(answer(response), (200, "page 7"), "before {what}");
            is_watched(&server, &page)
        });
        assert_eq!(client.get("/page").text(), "page 7");
        let head = client.ask("HEAD /page HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!((head.status, head.header("Content-Length")), (200, Some("6")));
        let part = client.ask("GET /page HTTP/1.1\r\nHost: h\r\nRange: bytes=5-\r\n\r\n");
        assert_eq!((part.status, part.text()), (206, "7"));
        change(&site);
        assert_eq!(answer(&client.get("/page")), *expected, "{what}");
        assert_eq!(answer(&server.connect().get("/page")), *expected, "{what}, another worker");
    }
    if is_root() {
        rebuild(&server);
        let page = site.join("releases/7/page");
        ask_until(&mut client, "/page", |_| is_watched(&server, &page));
        fs::set_permissions(&page, PermissionsExt::from_mode(0o000)).expect("ours");
        assert_eq!(client.get("/page").status, 403);
        fs::set_permissions(&page, PermissionsExt::from_mode(0o644)).expect("ours");
        assert_eq!(client.get("/page").text(), "page 7");
    } else {
        skip("a part: only root has another user to become");
    }
    server.stop();
}

/// Files of the site that the worker process has open.
fn open_files(server: &Server) -> Vec<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", server.worker().as_raw_nonzero())).expect("a process");
    let paths = descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    paths.filter(|path| path.starts_with(server.directory.path().join("site"))).collect()
}

fn a_large_file_that_is_held_open_is_always_that_on_disk(driver: Driver) {
    let server = site(Setup::server(driver, &format!("{ROOT} sendfile on;")));
    let site = server.directory.path().join("site");
    let mut client = server.connect();
    let answer = |response: &Response| {
        let (status, text) = answer(response);
        (status, text.trim_end().to_owned())
    };
    for (what, change, (status, text)) in CHANGES {
        rebuild(&server);
        for release in ["7", "8"] {
            let text = format!("page {release}{}", " ".repeat(199_994));
            server.directory.write(&format!("site/releases/{release}/page"), text);
        }
        let page = site.join("releases/7/page");
        ask_until(&mut client, "/page", |response| {
            assert_eq!(answer(response), (200, "page 7".to_owned()), "before {what}");
            is_watched(&server, &page) && open_files(&server).contains(&page)
        });
        let response = client.get("/page");
        assert_eq!((answer(&response), response.body.len()), ((200, "page 7".to_owned()), 200_000));
        change(&site);
        assert_eq!(answer(&client.get("/page")), (*status, (*text).to_owned()), "{what}");
        assert_eq!(answer(&server.connect().get("/page")), (*status, (*text).to_owned()), "{what}, another worker");
    }
    // Deleted files and files no longer requested are closed.
    fs::remove_dir_all(&site).expect("ours");
    ask_until(&mut client, "/page", |response| response.status == 404 && open_files(&server).is_empty());
    server.stop();
}

fn few_files_are_held_open(driver: Driver) {
    let setup = Setup::server(driver, ROOT).replace("daemon off;", "daemon off; worker_rlimit_nofile 640;");
    let server = site(setup);
    for number in 0..60 {
        server.directory.write(&format!("site/releases/7/{number}"), vec![b'x'; 100_000]);
    }
    let mut client = server.connect();
    for number in 0..60 {
        ask_until(&mut client, &format!("/{number}"), |response| {
            assert_eq!(response.body.len(), 100_000);
            let held = open_files(&server);
            // A sixteenth of the descriptors, and the file that is being sent.
            assert!(held.len() <= 640 / 16 + 1, "{}", held.len());
            held.len() >= 640 / 16 || held.iter().any(|path| path.ends_with(number.to_string()))
        });
    }
    ask_until(&mut client, "/none", |_| open_files(&server).is_empty());
    server.stop();
}

fn files_of_every_size_arrive_whole_however_often_they_are_asked_for(driver: Driver) {
    let sizes = [0, 1, 4096, 4097, 40_000, 65_535, 65_536, 65_537];
    let contents = |size: usize| (0..size).map(|number| b'a' + (number % 23) as u8).collect::<Vec<u8>>();
    let locations = format!("location /cached/ {{ alias %DIR%/files/; {AN_HOUR} }}");
    let server = Setup::server(driver, &format!("root %DIR%; keepalive_requests 10000; sendfile on; {locations}"));
    let setup = sizes.iter().fold(server, |setup, &size| setup.file(&format!("files/{size}"), contents(size)));
    let server = setup.start();
    let mut client = server.connect();
    for _ in 0..30 {
        for (directory, size) in ["/files", "/cached"].iter().flat_map(|directory| sizes.map(|size| (directory, size)))
        {
            let path = format!("{directory}/{size}");
            let response = client.get(&path);
            assert_eq!((response.status, response.header("Content-Length")), (200, Some(&*size.to_string())), "{path}");
            assert!(response.body == contents(size), "{path}");
            if size > 100 {
                let part = client.ask(format!("GET {path} HTTP/1.1\r\nHost: h\r\nRange: bytes=100-\r\n\r\n"));
                assert!(part.status == 206 && part.body == contents(size)[100..], "{path}");
            }
        }
    }
    server.stop();
}

fn unwatchable_file_is_served_as_it_is(driver: Driver) {
    if !is_root() {
        return skip("only root has another user to become");
    }
    let server = site(Setup::server(driver, ROOT));
    let site = server.directory.path().join("site");
    // The directory can be searched but not read, so the kernel does not report its changes.
    fs::set_permissions(site.join("releases"), PermissionsExt::from_mode(0o711)).expect("ours");
    let mut client = server.connect();
    for number in 0..200 {
        let text = format!("page {number}");
        fs::write(site.join("releases/7/page"), &text).expect("written");
        for _ in 0..number % 20 {
            assert_eq!(client.get("/page").text(), text);
        }
    }
    assert!(!is_watched(&server, &site.join("releases/7/page")));
    server.stop();
}

fn off_keeps_nothing(driver: Driver) {
    let server = site(Setup::server(driver, &format!("{ROOT} open_file_cache off;")));
    let mut client = server.connect();
    for _ in 0..100 {
        assert_eq!(client.get("/page").text(), "page 7");
    }
    assert!(!is_watched(&server, &server.directory.path().join("site/releases/7/page")));
    server.stop();
}

const AN_HOUR: &str = "open_file_cache max=100 inactive=1h; open_file_cache_valid 1h;";

fn a_cache_tells_of_changes_although_it_would_believe_for_an_hour(driver: Driver) {
    let server = site(Setup::server(driver, &format!("{ROOT} {AN_HOUR}")));
    let site = server.directory.path().join("site");
    let mut client = server.connect();
    for (what, change, expected) in CHANGES {
        rebuild(&server);
        let page = site.join("releases/7/page");
        ask_until(&mut client, "/page", |response| answer(response) == (200, "page 7") && is_watched(&server, &page));
        change(&site);
        ask_until(&mut client, "/page", |response| {
            let is_new = answer(response) == *expected;
            assert!(is_new || answer(response) == (200, "page 7"), "{what}: {:?}", answer(response));
            is_new
        });
    }
    server.stop();
}

fn a_cache_believes_for_a_while_as_nginx_does(driver: Driver) {
    let server = site(Setup::server(driver, &format!("{ROOT} {AN_HOUR}")));
    let mut client = server.connect();
    assert_eq!(client.get("/page").text(), "page 7");
    let site = server.directory.path().join("site");
    symlink("releases/8", site.join("new")).expect("a link");
    rename(&site, "new", "current");
    // After a single request the entry is not watched yet, and the file itself is unchanged.
    assert_eq!(client.get("/page").text(), "page 7");
    // An entry in use is watched.
    ask_until(&mut client, "/page", |response| response.text() == "page 8");
    // A change to the file itself is seen without watching.
    assert_eq!(client.get("/./page?").text(), "page 8");
    server.directory.write("site/releases/8/other", "one");
    assert_eq!(client.get("/other").text(), "one");
    server.directory.write("site/releases/8/other", "two");
    assert_eq!(client.get("/other").text(), "two");
    fs::remove_file(site.join("releases/8/other")).expect("there");
    assert_eq!(client.get("/other").status, 404);
    server.stop();
}

fn file_is_kept_open_from_min_uses_on_until_it_is_inactive(driver: Driver) {
    let locations = "open_file_cache_min_uses 2; location = /quick { return 200 ok; }
        location /large { open_file_cache max=100 inactive=1h; }
        location /short { open_file_cache max=100 inactive=3s; }";
    let server = site(Setup::server(driver, &format!("{ROOT} {locations}")));
    for name in ["large", "short"] {
        server.directory.write(&format!("site/releases/7/{name}"), vec![b'x'; 200_000]);
    }
    let mut client = server.connect();
    let is_open = |name: &str| open_files(&server).iter().any(|path| path.ends_with(name));
    for is_kept in [false, true, true] {
        assert_eq!(client.get("/large").body.len(), 200_000);
        assert_eq!(client.get("/quick").text(), "ok");
        assert_eq!(is_open("7/large"), is_kept);
    }
    // Kept as well, and closed after a time without requests.
    ask_until(&mut client, "/short", |_| is_open("7/short"));
    ask_until(&mut client, "/quick", |_| !is_open("7/short"));
    assert!(is_open("7/large"));
    server.stop();
}

fn errors_are_kept_only_if_told_so(driver: Driver) {
    let locations = format!("location /kept {{ {ROOT} {AN_HOUR} open_file_cache_errors on; }} {AN_HOUR}");
    let server = site(Setup::server(driver, &format!("{ROOT} {locations}")));
    let mut client = server.connect();
    for (path, status) in [("/kept", 404), ("/plain", 200)] {
        assert_eq!(client.get(path).status, 404);
        server.directory.write(&format!("site/releases/7{path}"), "here");
        assert_eq!(client.get(path).status, status, "{path}");
    }
    // An error in use is watched, and replaced once the file exists.
    ask_until(&mut client, "/kept", |response| response.status == 200);
    server.stop();
}

fn directories_are_kept(driver: Driver) {
    let locations = "location /tried/ { try_files $uri $uri/ $uri.html =418; }";
    let server = site(Setup::server(driver, &format!("{ROOT} {AN_HOUR} open_file_cache_errors on; {locations}")));
    let site = server.directory.path().join("site");
    server.directory.write("site/releases/7/folder/index.html", "index");
    server.directory.write("site/releases/7/tried/page.html", "tried");
    let mut client = server.connect();
    for _ in 0..20 {
        assert_eq!(client.get("/folder").status, 301);
        assert_eq!(client.get("/folder/").text(), "index");
        assert_eq!(client.get("/tried/page").text(), "tried");
        assert_eq!(client.get("/tried/nothing").status, 418);
    }
    fs::remove_file(site.join("releases/7/folder/index.html")).expect("there");
    ask_until(&mut client, "/folder/", |response| response.status == 403);
    server.directory.write("site/releases/7/tried/nothing.html", "something");
    ask_until(&mut client, "/tried/nothing", |response| response.status == 200);
    server.stop();
}

fn max_bounds_open_files_and_a_reload_applies_another_max(driver: Driver) {
    let text = |max: &str| format!("server {{ listen %UNIX%; {ROOT} location = /quick {{ return 200 ok; }} {max} }}");
    let mut server = site(Setup::http(driver, &text("open_file_cache max=3;")));
    for number in 0..20 {
        server.directory.write(&format!("site/releases/7/{number}"), vec![b'x'; 100_000]);
    }
    let mut client = server.connect();
    client.get("/quick");
    let before = descriptors_of(server.worker());
    let fetch = |client: &mut Client| {
        for number in 0..20 {
            assert_eq!(client.get(&format!("/{number}")).body.len(), 100_000);
        }
    };
    fetch(&mut client);
    // The cache's own descriptors: events and mounts.
    let watches = 3;
    ask_until(&mut client, "/quick", |_| {
        (before + 3..=before + 3 + watches).contains(&descriptors_of(server.worker()))
    });
    server.reload_http(driver, &text("open_file_cache off;"));
    fetch(&mut client);
    ask_until(&mut client, "/quick", |_| descriptors_of(server.worker()) <= before + watches);
    server.stop();
}

/// Content of a version: one letter, and a length that no other version has. Every second version is held open instead
/// of in memory.
fn version(number: usize) -> Vec<u8> {
    vec![b'a' + (number % 26) as u8; 1000 + 137 * (number % 26) + 100_000 * (number % 2)]
}

fn heads_and_bodies_are_of_one_file_while_it_is_replaced(driver: Driver) {
    let locations = format!("location /cached/ {{ alias %DIR%/site/current/; {AN_HOUR} }} sendfile on;");
    let server = site(Setup::server(driver, &format!("{ROOT} {locations}")));
    let site = server.directory.path().join("site");
    let replace = |number: usize| {
        fs::write(site.join("new"), version(number)).expect("written");
        rename(&site, "new", "releases/7/page");
    };
    replace(0);
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|reader| {
                let (server, has_ended) = (&server, &has_ended);
                scope.spawn(move || {
                    let mut client = server.connect();
                    let path = ["/page", "/cached/page"][reader % 2];
                    while !has_ended.load(Ordering::Relaxed) {
                        let response = client.get(path);
                        assert_eq!(response.status, 200);
                        let number = usize::from(response.body[0] - b'a');
                        assert!(response.body == version(number), "{path}: a mixture");
                        let etag = response.header("ETag").expect("an ETag");
                        assert!(etag.ends_with(&format!("-{:x}\"", response.body.len())), "{path}: {etag}");
                    }
                })
            })
            .collect();
        let mut client = server.connect();
        for number in 1..300 {
            replace(number);
            assert!(client.get("/page").body == version(number), "no cache is configured here: exact");
            if number % 10 == 0 {
                // Enough requests for the file to be kept in memory.
                for _ in 0..30 {
                    client.get("/page");
                }
            }
        }
        has_ended.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().expect("no mixture"));
    });
    server.stop();
}

/// Size of each file; `FITTING` of them fill the 32 MiB of the bodies in memory.
const BODY: usize = 60_000;
const FITTING: usize = (32 << 20) / BODY;
const BODIES: usize = FITTING + 40;

fn bodies_in_memory_have_a_bound_together_and_those_that_go_make_room(driver: Driver) {
    let text = format!("{ROOT} open_file_cache max=5000; location = /files {{ test_files; }}");
    let server = site(Setup::server(driver, &text));
    let mut client = server.connect();
    for folder in ["one", "two"] {
        let path = |number: usize| format!("site/current/{folder}/{number}");
        let content = |number: usize| vec![number as u8; BODY];
        (0..BODIES).for_each(|number| server.directory.write(&path(number), content(number)));
        // Files that do not fit are sent all the same.
        let wait_full = |client: &mut Client, content: &dyn Fn(usize) -> Vec<u8>| {
            let end = Instant::now() + DEADLINE;
            loop {
                let before = from_memory(client);
                for number in 0..BODIES {
                    assert!(client.get(&format!("/{folder}/{number}")).body == content(number), "{folder}/{number}");
                }
                let found = from_memory(client) - before;
                if found == FITTING {
                    break;
                }
                assert!(found < FITTING && Instant::now() < end, "{found} of {FITTING}");
            }
        };
        wait_full(&mut client, &content);
        // Replaced files are sent correctly, and their memory becomes available to others.
        let other = |number: usize| if number < 20 { vec![b'x'; BODY + number] } else { content(number) };
        for number in 0..20 {
            server.directory.write("site/current/new", other(number));
            rename(&server.directory.path().join("site"), "current/new", &format!("current/{folder}/{number}"));
            ask_until(&mut client, &format!("/{folder}/{number}"), |response| response.body == other(number));
            server.directory.write(&path(number), content(number));
            ask_until(&mut client, &format!("/{folder}/{number}"), |response| response.body == content(number));
        }
        for number in 0..BODIES {
            fs::remove_file(server.directory.path().join(path(number))).expect("there");
            ask_until(&mut client, &format!("/{folder}/{number}"), |response| response.status == 404);
        }
    }
    server.stop();
}

/// Number of bodies sent from memory so far.
fn from_memory(client: &mut Client) -> usize {
    let response = client.get("/files");
    let found = response.text().split_ascii_whitespace().find_map(|word| word.strip_prefix("memory="));
    found.and_then(|number| number.parse().ok()).expect("a figure")
}
