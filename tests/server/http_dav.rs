//! Changes of files by PUT, DELETE, MKCOL, COPY and MOVE, over real sockets.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::support::{DEADLINE, Driver, Response, Server, Setup, Watch, is_root, skip, with_each_driver};

with_each_driver!(
    put_makes_a_file_and_replaces_it,
    a_file_has_the_rights_and_the_time_that_are_wanted,
    directories_on_the_way_are_created_only_if_wanted,
    put_goes_to_another_file_system,
    a_body_that_was_read_before_is_put_too,
    an_upload_that_breaks_off_leaves_nothing,
    an_upload_with_a_wrong_head_is_refused_at_once,
    delete_removes_files_trees_and_links_themselves,
    delete_asks_how_deep_a_path_is,
    collections_are_made_one_by_one,
    copies_keep_rights_and_times,
    moves_replace_an_existing_target_if_allowed,
    destinations_that_lead_elsewhere_are_refused,
    nothing_is_copied_into_itself,
    only_files_and_directories_are_copied,
    methods_that_are_off_are_not_allowed,
);

const ALL: &str = "dav_methods PUT DELETE MKCOL COPY MOVE;";

fn start(driver: Driver, text: &str) -> Server {
    let setup = Setup::server(driver, &format!("root %DIR%/html; absolute_redirect off; {text}"));
    // The directories belong to the tests' user.
    let setup = if is_root() { setup.replace("daemon off;", "daemon off; user root;") } else { setup };
    setup.file("html/file", "content").file("html/tree/a", "A").file("html/tree/sub/b", "B").start()
}

#[track_caller]
fn ask(server: &Server, method: &str, path: &str, fields: &str) -> Response {
    let fields = fields.replace('\n', "\r\n");
    server.connect().ask(format!("{method} {path} HTTP/1.1\r\nHost: www.example.com\r\n{fields}\r\n"))
}

#[track_caller]
fn status(server: &Server, method: &str, path: &str, fields: &str) -> u16 {
    ask(server, method, path, fields).status
}

#[track_caller]
fn put(server: &Server, path: &str, fields: &str, body: &[u8]) -> Response {
    let mut client = server.connect();
    let length = body.len();
    client.send(format!("PUT {path} HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: {length}\r\n\r\n"));
    client.send(body);
    client.response()
}

#[track_caller]
fn to(server: &Server, method: &str, path: &str, destination: &str) -> u16 {
    status(server, method, path, &format!("Destination: {destination}\n"))
}

fn html(server: &Server) -> PathBuf {
    server.directory.path().join("html")
}

/// Waits until a directory has files, or until it is empty.
#[track_caller]
fn wait_files(directory: &Path, are_there: bool) {
    let (watch, end) = (Watch::new(directory), Instant::now() + DEADLINE);
    loop {
        watch.clear();
        if tree(directory).is_empty() != are_there {
            return;
        }
        assert!(watch.wait(end), "{:?}", tree(directory));
    }
}

/// All paths below a directory, in order.
fn tree(path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            found.push(entry.path().strip_prefix(path).unwrap().to_str().unwrap().to_owned());
            if entry.file_type().unwrap().is_dir() {
                directories.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

fn put_makes_a_file_and_replaces_it(driver: Driver) {
    let server = start(driver, &format!("client_max_body_size 10m; client_body_buffer_size 1k; {ALL}"));
    let large: Vec<u8> = (0..500_000_u32).map(|index| (index % 251) as u8).collect();
    let made = put(&server, "/new%20name", "", &large);
    assert_eq!(
        (made.status, made.header("Location"), made.header("Content-Length")),
        (201, Some("/new%20name"), Some("0"))
    );
    assert_eq!(fs::read(html(&server).join("new name")).unwrap(), large);
    assert_eq!(server.get("/new%20name").body, large);
    let replaced = put(&server, "/new%20name", "", b"short");
    assert_eq!((replaced.status, replaced.header("Location"), replaced.header("Content-Length")), (204, None, None));
    assert_eq!(server.get("/new%20name").text(), "short");
    let chunks =
        "PUT /chunked HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n";
    assert_eq!(server.connect().ask(chunks).status, 201);
    assert_eq!(server.get("/chunked").text(), "hello world");
    assert_eq!((put(&server, "/empty", "", b"").status, server.get("/empty").text()), (201, ""));
    assert_eq!(
        tree(&html(&server)),
        ["chunked", "empty", "file", "new name", "tree", "tree/a", "tree/sub", "tree/sub/b"]
    );
    server.stop();
}

fn a_file_has_the_rights_and_the_time_that_are_wanted(driver: Driver) {
    let server = start(
        driver,
        &format!(
            "{ALL} create_full_put_path on;
             location /all/ {{ dav_access group:rw all:r; }}
             location /read/ {{ dav_access user:r; }}"
        ),
    );
    let mode = |path: &str| fs::metadata(html(&server).join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(put(&server, "/own", "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n", b"x").status, 201);
    assert_eq!(mode("own"), 0o600);
    assert_eq!(fs::metadata(html(&server).join("own")).unwrap().mtime(), 784_111_777);
    assert_eq!(put(&server, "/all/x/f", "Date: nonsense\r\n", b"x").status, 201);
    assert_eq!(put(&server, "/read/f", "", b"x").status, 201);
    assert_eq!((mode("all/x/f"), mode("read/f"), mode("read")), (0o664, 0o400, 0o500));
    // The umask removes some of a directory's permissions.
    assert_eq!(mode("all/x") & 0o755, 0o755);
    assert_eq!((status(&server, "MKCOL", "/made/", ""), mode("made")), (201, 0o700));
    server.stop();
}

fn directories_on_the_way_are_created_only_if_wanted(driver: Driver) {
    let server = start(driver, &format!("{ALL} location /full/ {{ create_full_put_path on; }}"));
    assert_eq!(put(&server, "/none/f", "", b"x").status, 409);
    server.wait_logged("html/none/f\" failed (2: No such file or directory)");
    assert_eq!(put(&server, "/full/a/b/f", "", b"x").status, 201);
    assert_eq!(server.get("/full/a/b/f").text(), "x");
    // A file is not a directory, whatever the method.
    assert_eq!(put(&server, "/file/f", "", b"x").status, 409);
    assert_eq!(put(&server, "/full/a/b/f/g", "", b"x").status, 409);
    assert_eq!(put(&server, "/tree", "", b"x").status, 409);
    wait_files(&server.directory.path().join("body"), false);
    server.stop();
}

fn put_goes_to_another_file_system(driver: Driver) {
    let elsewhere = Path::new("/dev/shm").join(format!("gale-dav-{}-{driver:?}", std::process::id()));
    if fs::create_dir(&elsewhere).is_err() {
        return skip("there is no /dev/shm");
    }
    fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o777)).unwrap();
    let server =
        start(driver, &format!("{ALL} create_full_put_path on; client_body_temp_path {};", elsewhere.display()));
    let is_elsewhere = fs::metadata(&elsewhere).unwrap().dev() != fs::metadata(html(&server)).unwrap().dev();
    let large = vec![b'x'; 300_000];
    let made = put(&server, "/a/b/far", "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n", &large);
    let replaced = put(&server, "/a/b/far", "", &large[1..]);
    assert_eq!((made.status, replaced.status, is_elsewhere), (201, 204, is_elsewhere), "{}", server.log());
    assert_eq!(server.get("/a/b/far").body, large[1..]);
    assert_eq!(tree(&html(&server).join("a")), ["b", "b/far"]);
    wait_files(&elsewhere, false);
    server.stop();
    fs::remove_dir(&elsewhere).unwrap();
}

fn a_body_that_was_read_before_is_put_too(driver: Driver) {
    let server = start(
        driver,
        &format!("client_body_buffer_size 1k; {ALL} location / {{ mirror /copy; }} location = /copy {{ return 204; }}"),
    );
    let large = vec![b'x'; 100_000];
    assert_eq!(put(&server, "/short", "", b"in memory").status, 201);
    assert_eq!(put(&server, "/long", "", &large).status, 201);
    assert_eq!((server.get("/short").text(), server.get("/long").body), ("in memory", large));
    server.stop();
}

fn an_upload_that_breaks_off_leaves_nothing(driver: Driver) {
    let server = start(driver, ALL);
    let mut client = server.connect();
    client.send("PUT /half HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n");
    client.send(vec![b'x'; 150_000]);
    wait_files(&server.directory.path().join("body"), true);
    drop(client);
    server.wait_logged("client prematurely closed connection");
    wait_files(&server.directory.path().join("body"), false);
    assert_eq!(server.get("/half").status, 404);
    server.stop();
}

fn an_upload_with_a_wrong_head_is_refused_at_once(driver: Driver) {
    let server = start(driver, &format!("{ALL} client_max_body_size 10;"));
    assert_eq!(put(&server, "/tree/", "", b"x").status, 409);
    assert_eq!(put(&server, "/part", "Content-Range: bytes 0-0/5\r\n", b"x").status, 501);
    assert_eq!(put(&server, "/long", "", &[b'x'; 11]).status, 413);
    for path in ["/../up", "/%2e%2e/up", "/tree/..%2f..%2fup", "/nul%00"] {
        let status = put(&server, path, "", b"x").status;
        assert!((400..500).contains(&status), "{path} {status}");
    }
    assert_eq!(tree(&html(&server)), ["file", "tree", "tree/a", "tree/sub", "tree/sub/b"]);
    assert!(!server.directory.path().join("up").exists());
    server.stop();
}

fn delete_removes_files_trees_and_links_themselves(driver: Driver) {
    let server = start(driver, ALL);
    let html = html(&server);
    server.directory.write("outside/precious", "precious");
    let outside = server.directory.path().join("outside");
    symlink(&outside, html.join("tree/link")).unwrap();
    symlink("nowhere", html.join("tree/sub/dangling")).unwrap();
    symlink(&outside, html.join("link")).unwrap();
    let mut deep = html.join("tree");
    for _ in 0..1_000 {
        deep.push("d");
    }
    fs::create_dir_all(&deep).unwrap();
    let delete = |path: &str, fields: &str| status(&server, "DELETE", path, fields);
    assert_eq!((delete("/tree", ""), delete("/file/", ""), delete("/link/", "")), (409, 409, 409));
    for depth in ["0", "1", "2", "Infinity"] {
        assert_eq!(delete("/tree/", &format!("Depth: {depth}\n")), 400, "{depth}");
    }
    assert_eq!((delete("/file", "Depth: 1\n"), delete("/nothing", ""), delete("/file/x", "")), (400, 404, 409));
    assert_eq!(delete("/file", "Content-Length: 5\n\nabcde"), 415);
    assert_eq!(
        (delete("/link", ""), delete("/tree/", "Depth: infinity\n"), delete("/file", "Depth: 0\n")),
        (204, 204, 204)
    );
    assert_eq!(tree(&html), [""; 0]);
    assert_eq!(server.directory.read("outside/precious"), "precious");
    server.stop();
}

fn delete_asks_how_deep_a_path_is(driver: Driver) {
    let server = start(driver, &format!("{ALL} min_delete_depth 2;"));
    assert_eq!(status(&server, "DELETE", "/file", ""), 409);
    server.wait_logged("insufficient URI depth:1 to DELETE");
    assert_eq!(status(&server, "DELETE", "/tree/", ""), 409);
    server.wait_logged("insufficient URI depth:2 to DELETE");
    assert_eq!((status(&server, "DELETE", "/tree/a", ""), status(&server, "DELETE", "/tree/sub/", "")), (204, 204));
    server.stop();
}

fn collections_are_made_one_by_one(driver: Driver) {
    let server = start(driver, ALL);
    let made = ask(&server, "MKCOL", "/new/", "");
    assert_eq!((made.status, made.header("Location"), made.header("Content-Length")), (201, Some("/new/"), Some("0")));
    let make = |path: &str, fields: &str| status(&server, "MKCOL", path, fields);
    assert_eq!((make("/new/", ""), make("/file/", "")), (405, 405));
    assert_eq!((make("/new", ""), make("/none/below/", ""), make("/file/below/", "")), (409, 409, 409));
    assert_eq!(make("/other/", "Content-Length: 1\n\nx"), 415);
    server.stop();
}

fn copies_keep_rights_and_times(driver: Driver) {
    let server = start(driver, ALL);
    let html = html(&server);
    let time = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    for name in ["file", "tree/sub/b", "tree/sub"] {
        fs::File::open(html.join(name)).unwrap().set_modified(time).unwrap();
    }
    fs::set_permissions(html.join("tree/sub/b"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("a", html.join("tree/link")).unwrap();
    assert_eq!(to(&server, "COPY", "/file", "/copy"), 204);
    assert_eq!(to(&server, "COPY", "/tree/", "http://WWW.example.com:81/tree2/"), 201);
    assert_eq!(tree(&html.join("tree2")), ["a", "sub", "sub/b"]);
    for name in ["copy", "tree2/sub/b", "tree2/sub"] {
        assert_eq!(fs::metadata(html.join(name)).unwrap().modified().unwrap(), time, "{name}");
    }
    assert_eq!(fs::metadata(html.join("tree2/sub/b")).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(status(&server, "COPY", "/tree/", "Destination: /empty/\nDepth: 0\n"), 201);
    assert_eq!((tree(&html.join("empty")).len(), server.get("/copy").text()), (0, "content"));
    // The target of a link may be copied if it may be read.
    assert_eq!((to(&server, "COPY", "/tree/link", "/from_link"), server.get("/from_link").text()), (204, "A"));
    assert_eq!((to(&server, "COPY", "/none", "/x"), to(&server, "COPY", "/file", "/none/x")), (404, 409));
    assert_eq!((to(&server, "COPY", "/tree", "/x"), to(&server, "COPY", "/file/", "/x/")), (400, 404));
    assert_eq!((to(&server, "COPY", "/tree/", "/x"), to(&server, "COPY", "/file", "/x/")), (409, 409));
    assert_eq!(status(&server, "COPY", "/file", "Destination: /x\nDepth: 1\n"), 400);
    assert_eq!(status(&server, "COPY", "/file", "Destination: /x\nContent-Length: 1\n\nx"), 415);
    server.stop();
}

fn moves_replace_an_existing_target_if_allowed(driver: Driver) {
    let server = start(driver, ALL);
    let html = html(&server);
    server.directory.write("html/other/old", "old");
    server.directory.write("html/there", "there");
    for overwrite in ["F", "f"] {
        let fields = format!("Destination: /there\nOverwrite: {overwrite}\n");
        assert_eq!(status(&server, "MOVE", "/file", &fields), 412);
    }
    assert_eq!(status(&server, "MOVE", "/file", "Destination: /there\nOverwrite: no\n"), 400);
    assert_eq!(status(&server, "MOVE", "/file", "Destination: /there\nDepth: 0\n"), 400);
    assert_eq!(server.get("/there").text(), "there");
    assert_eq!((to(&server, "MOVE", "/file", "/there"), server.get("/there").text()), (204, "content"));
    assert_eq!((to(&server, "MOVE", "/there", "/tree"), to(&server, "MOVE", "/there", "/deep/er/f")), (409, 204));
    assert_eq!(status(&server, "MOVE", "/tree/", "Destination: /other/\nOverwrite: F\n"), 412);
    assert_eq!(to(&server, "MOVE", "/tree/", "/other/"), 201);
    assert_eq!(tree(&html), ["deep", "deep/er", "deep/er/f", "other", "other/a", "other/sub", "other/sub/b"]);
    server.stop();
}

fn destinations_that_lead_elsewhere_are_refused(driver: Driver) {
    let server = start(driver, &format!("{ALL} location /alias/ {{ alias %DIR%/html/tree/; }}"));
    for destination in [
        "/../up",
        "/tree/../../up",
        "/%2e%2e/up",
        "/tree/%2e%2e%2f%2e%2e%2fup",
        "/nul%00",
        "",
        "relative",
        "ftp://www.example.com/up",
        "https://www.example.com/up",
        "http://www.example.com",
        "http://www.example.com.evil/up",
        "http://www.example.com:80x/up",
        "http://evil/up",
        "http://user@www.example.com/up",
    ] {
        assert_eq!(to(&server, "COPY", "/file", destination), 400, "{destination}");
    }
    assert_eq!(status(&server, "COPY", "/file", ""), 400);
    assert_eq!(server.connect().ask("COPY /file HTTP/1.0\r\nDestination: http://x/y\r\n\r\n").status, 400);
    // Below an alias only paths within it have a URI.
    assert_eq!(to(&server, "COPY", "/alias/a", "/elsewhere"), 400);
    assert_eq!(to(&server, "COPY", "/alias/a", "/alias/c?args"), 204);
    assert_eq!(tree(&html(&server)), ["file", "tree", "tree/a", "tree/c", "tree/sub", "tree/sub/b"]);
    assert!(!server.directory.path().join("up").exists());
    server.stop();
}

fn nothing_is_copied_into_itself(driver: Driver) {
    let server = start(driver, ALL);
    let html = html(&server);
    symlink("tree", html.join("link")).unwrap();
    symlink("file", html.join("filelink")).unwrap();
    for method in ["COPY", "MOVE"] {
        for (from, destination) in [
            ("/file", "/file"),
            ("/file", "//./file"),
            ("/file", "/filelink"),
            ("/tree/", "/tree/"),
            ("/tree/", "/tree/sub/new/"),
            ("/tree/", "/./tree/sub/"),
            ("/tree/sub/", "/tree/"),
            ("/tree/", "/link/sub/"),
            ("/tree/", "/link/new/"),
            ("/link/sub/", "/tree/"),
        ] {
            assert_eq!(to(&server, method, from, destination), 403, "{method} {from} {destination}");
        }
    }
    assert_eq!(tree(&html), ["file", "filelink", "link", "tree", "tree/a", "tree/sub", "tree/sub/b"]);
    // A name that begins with the other one.
    assert_eq!(to(&server, "COPY", "/tree/", "/tree.copy/"), 201);
    server.stop();
}

fn only_files_and_directories_are_copied(driver: Driver) {
    let server = start(driver, ALL);
    let fifo = html(&server).join("tree/fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert_eq!(to(&server, "COPY", "/tree/fifo", "/copy"), 403);
    assert_eq!(to(&server, "COPY", "/tree/", "/copy/"), 201);
    assert_eq!(tree(&html(&server).join("copy")), ["a", "sub", "sub/b"]);
    assert_eq!((to(&server, "MOVE", "/tree/fifo", "/fifo"), status(&server, "DELETE", "/fifo", "")), (204, 204));
    server.stop();
}

fn methods_that_are_off_are_not_allowed(driver: Driver) {
    let server = start(driver, "dav_methods PUT; location /off/ { dav_methods off; } location /none/ { }");
    assert_eq!(put(&server, "/new", "", b"x").status, 201);
    for (method, path) in [("DELETE", "/new"), ("MKCOL", "/new/"), ("COPY", "/new"), ("PUT", "/off/x")] {
        assert_eq!(status(&server, method, path, "Content-Length: 0\nDestination: /x\n"), 405, "{method} {path}");
    }
    assert_eq!(server.get("/new").text(), "x");
    server.stop();
}
