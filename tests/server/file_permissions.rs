//! The permissions of all files that a run creates: those of the table in `docs/signals-and-processes.md`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::support::{self, Backend, Driver, Server, Setup, is_root, skip, with_each_driver};

with_each_driver!(
    created_files_have_permissions_of_table_with_any_umask,
    cache_files_of_earlier_version_are_taken_from_others,
    state_of_cache_follows_its_directory_to_another_user
);

/// Permissions at the beginning of a row of the table; `None` if there is no such row.
fn row(created: &str) -> Option<u32> {
    let text = include_str!("../../docs/signals-and-processes.md");
    let line = text.lines().find(|line| line.starts_with(&format!("| {created}")))?;
    let mode = line.rsplit_once('|')?.0.rsplit_once('|')?.1;
    let digits = mode.split(|sign: char| !sign.is_ascii_digit()).find(|word| word.len() == 4)?;
    u32::from_str_radix(digits, 8).ok()
}

/// The file's row of the table, and `true` if the umask applies; `None` for files of the test.
fn kind(path: &str, is_directory: bool) -> Option<(&'static str, bool)> {
    Some(match path {
        "gale.conf" | "stdout" | "stderr" | "notify" | "html" | "state" => return None,
        "pid" => ("pid file", true),
        "access.log" | "error.log" | "named-a.log" | "access.log.1" | "error.log.1" => ("logs", true),
        "gale.sock" => ("Unix sockets of `listen`", false),
        "state/app" => ("state files", true),
        _ if path.starts_with("html/") => ("stored responses", true),
        _ if is_directory => ("directories of caches", true),
        _ if path.starts_with("cache/") => ("cached responses", true),
        _ if path.starts_with("body/") || path.starts_with("temp/") => ("temporary files", true),
        _ => panic!("{path} is in no row of the table"),
    })
}

/// All files below a directory, each with its relative path.
fn walk(top: &Path, below: &str, found: &mut Vec<(String, PathBuf)>) {
    for entry in fs::read_dir(top.join(below)).expect("it can be read") {
        let name = entry.expect("an entry").file_name().into_string().expect("names are text");
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        let full = top.join(&path);
        if fs::symlink_metadata(&full).is_ok_and(|metadata| metadata.is_dir()) {
            walk(top, &path, found);
        }
        found.push((path, full));
    }
}

fn created_files_have_permissions_of_table_with_any_umask(driver: Driver) {
    let backend = Backend::tcp().serve(|_, client| {
        client.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 5\r\n\r\nwhole");
        true
    });
    for umask in [0, 0o077] {
        let text = "proxy_cache_path %DIR%/cache levels=1:2 keys_zone=one:1m; proxy_temp_path %DIR%/temp;
            upstream app { zone app 64k; state %DIR%/state/app; }
            server { listen %UNIX%; root %DIR%/html; client_max_body_size 10m;
            location /cached/ { proxy_pass http://BACKEND; proxy_cache one; proxy_cache_key $uri;
                proxy_cache_purge $arg_purge; }
            location /log/ { access_log %DIR%/named-$arg_name.log; return 204; }
            location /kept/ { client_body_in_file_only on; proxy_pass http://BACKEND; }
            location /stored/ { proxy_store on; proxy_pass http://BACKEND; }
            location /put/ { dav_methods PUT MKCOL; create_full_put_path on; }
            location /api { api write=on; } }";
        let text = text.replace("BACKEND", &backend.address);
        let setup = Setup::http(driver, &text).umask(umask).file("html/page", "page").file("state/page", "page");
        let server = setup.start();
        let top = server.directory.path().to_owned();
        if is_root() {
            for place in ["state", "html", ""] {
                // The worker's user writes there.
                fs::set_permissions(top.join(place), PermissionsExt::from_mode(0o777)).expect("ours");
            }
        }
        let ask = |server: &Server, method: &str, path: &str, body: &str| {
            let length = body.len();
            let request = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}");
            server.connect().ask(request).status
        };
        assert_eq!(ask(&server, "GET", "/cached/a", ""), 200);
        assert_eq!(ask(&server, "GET", "/log/?name=a", ""), 204);
        assert_eq!(ask(&server, "POST", "/kept/a", "a body"), 200);
        assert_eq!(ask(&server, "GET", "/stored/a/b", ""), 200);
        assert_eq!(ask(&server, "PUT", "/put/a/b", "a file"), 201);
        assert_eq!(ask(&server, "MKCOL", "/put/c/", ""), 201);
        assert_eq!(ask(&server, "POST", "/api/9/http/upstreams/app/servers", r#"{"server":"127.0.0.1:1"}"#), 201);
        // 404 only after the loader has scanned the directory.
        assert!(matches!(ask(&server, "GET", "/cached/b?purge=1", ""), 204 | 404));
        let wait = |server: &Server, name: &str| {
            server.directory.wait_until(name, |_| top.join(name).exists());
        };
        for name in ["cache/.gale.journal", "cache/.gale.lock", "named-a.log", "html/stored/a/b", "state/app"] {
            wait(&server, name);
        }
        server.directory.wait_until("the response is stored", |_| {
            let mut found = Vec::new();
            walk(&top, "cache", &mut found);
            found.iter().any(|(path, _)| path.rsplit('/').next().is_some_and(|name| name.len() == 32))
        });
        for log in ["access.log", "error.log"] {
            fs::rename(top.join(log), top.join(format!("{log}.1"))).expect("ours");
        }
        server.signal(rustix::process::Signal::USR1);
        for log in ["access.log", "error.log"] {
            wait(&server, log);
        }

        let mut found = Vec::new();
        walk(&top, "", &mut found);
        let mut seen = BTreeSet::new();
        for (path, full) in found {
            // A temporary file may have been removed.
            let Ok(metadata) = fs::symlink_metadata(&full) else { continue };
            if path.ends_with("/page") {
                continue;
            }
            let Some((created, counts_umask)) = kind(&path, metadata.is_dir()) else { continue };
            let of_table = row(created).unwrap_or_else(|| panic!("no row for {created}"));
            let of_table = if metadata.is_dir() && path.starts_with("html/") { 0o700 } else { of_table };
            let expected = if counts_umask { of_table & !umask } else { of_table };
            let mode = metadata.permissions().mode() & 0o7777;
            assert_eq!(mode, expected, "{path}: {mode:o}, not {expected:o}, with umask {umask:o}");
            seen.insert(created);
        }
        assert_eq!(seen.len(), 8, "{seen:?}");
        server.stop();
    }
}

fn cache_files_of_earlier_version_are_taken_from_others(driver: Driver) {
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m;
        server { listen %UNIX%; location / { proxy_pass http://127.0.0.1:1; proxy_cache one; proxy_cache_key $uri;
        proxy_cache_purge 1; } }";
    let names = ["cache/.gale.journal", "cache/.gale.lock"];
    let directory = support::Directory::new();
    fs::create_dir(directory.path().join("cache")).expect("ours");
    for name in names {
        directory.write(name, "");
        fs::set_permissions(directory.path().join(name), PermissionsExt::from_mode(0o666)).expect("ours");
    }
    if is_root() {
        // They belong to the worker's user, as does the directory.
        let nobody = Some(support::NOBODY);
        for name in ["cache", names[0], names[1]] {
            std::os::unix::fs::chown(directory.path().join(name), nobody, nobody).expect("ours");
        }
    }
    let mut server = Setup::http(driver, text).launch_in(directory, &[]);
    server.wait_notified("READY=1");
    assert!(matches!(server.get("/a").status, 204 | 404));
    server.directory.wait_until("both are this user's alone", |directory| {
        names.iter().all(|name| {
            fs::metadata(directory.path().join(name)).is_ok_and(|file| file.permissions().mode() & 0o777 == 0o600)
        })
    });
    server.stop();
}

fn state_of_cache_follows_its_directory_to_another_user(driver: Driver) {
    if !is_root() {
        return skip("only root has another user to become");
    }
    let backend = Backend::tcp().serve(|_, client| {
        client.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 5\r\n\r\nwhole");
        true
    });
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m;
        server { listen %UNIX%; add_header X-Cache $upstream_cache_status;
        location / { proxy_pass http://BACKEND; proxy_cache one; proxy_cache_key $uri;
        proxy_cache_purge $arg_purge; } }";
    let text = text.replace("BACKEND", &backend.address);
    let directory = support::Directory::new();
    let outside = directory.path().join("outside");
    directory.write("outside", "root's");
    let mut directory = Some(directory);
    for user in ["daemon", "bin"] {
        let setup = Setup::http(driver, &text).replace("daemon off;", &format!("daemon off; user {user};"));
        let mut server = setup.launch_in(directory.take().expect("of the run before"), &[]);
        server.wait_notified("READY=1");
        let outcome = |path: &str| {
            let response = server.get(path);
            (response.status, response.header("X-Cache").map(str::to_owned))
        };
        if user == "daemon" {
            assert_eq!(outcome("/a"), (200, Some("MISS".to_owned())));
            // The link does not belong to the directory's former owner.
            std::os::unix::fs::symlink(&outside, server.directory.path().join("cache/.gale.link")).expect("ours");
        }
        server.wait_logged(" entries, ");
        let files = ["cache/.gale.journal", "cache/.gale.lock"].map(|name| server.directory.path().join(name));
        server.look_until("both are the user's, as the directory is", || {
            let owner = fs::metadata(server.directory.path().join("cache")).expect("it is there").uid();
            let is_right = |file: fs::Metadata| file.uid() == owner && owner != 0 && file.mode() & 0o777 == 0o600;
            files.iter().all(|file| fs::metadata(file).is_ok_and(is_right))
        });
        assert_eq!(fs::metadata(&outside).expect("it is there").uid(), 0);
        let log = server.directory.read("error.log");
        assert!(!log.contains("cannot be"), "{log}");
        server.end(rustix::process::Signal::TERM);
        fs::remove_file(server.directory.path().join("notify")).expect("the socket of this run");
        directory = Some(std::mem::replace(&mut server.directory, support::Directory::new()));
    }
}
