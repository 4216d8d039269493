//! Core directives of http without a file of their own: symbolic links, old browsers, errors during error handling,
//! variables of the connection; and paths that try to leave the root.

use std::os::unix::fs::{MetadataExt, symlink};

use crate::support::{Client, Driver, NOBODY, Response, Server, Setup, is_root, with_each_driver};

with_each_driver!(
    no_path_leads_out_of_its_root,
    an_alias_replaces_its_prefix_to_the_letter,
    dot_dot_from_a_request_leads_out_of_no_directory,
    names_with_a_null_byte_are_no_names,
    symbolic_links_may_be_refused,
    links_of_other_owners_may_be_refused,
    part_before_the_checked_one_may_be_a_link,
    index_and_try_files_do_not_pass_refused_links_either,
    the_first_location_decides_whether_errors_lead_on,
    texts_may_tell_their_status,
    old_browsers_get_long_pages_and_pages_that_lead_on,
    browsers_that_mishandle_kept_connections_get_none,
    redirects_follow_the_settings,
    missing_file_is_not_logged_with_log_not_found_off,
    the_rate_may_be_set,
    variables_tell_of_the_connection_and_the_real_root,
);

fn ask(client: &mut Client, target: &str) -> Response {
    client.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"))
}

/// Spellings of `../secret` that some parser might decode to it.
const WAYS_OUT: &[&str] = &[
    "../secret",
    "..%2fsecret",
    "%2e%2e/secret",
    "%2E%2E%2Fsecret",
    ".%2e/secret",
    "%2e./secret",
    "a/../../secret",
    "a/..%2f..%2fsecret",
    "a/%2e%2e/%2e%2e/secret",
    "./../secret",
    "././%2e%2e//secret",
    "//../secret",
    "a//../..//../secret",
    // Encoded twice, in overlong UTF-8, in UTF-16, with backslashes, with parameters: ordinary names.
    "%252e%252e/secret",
    "..%252fsecret",
    "%c0%ae%c0%ae/secret",
    "%c0%ae%c0%ae%c0%afsecret",
    "%e0%80%ae%e0%80%ae/secret",
    "%f0%80%80%ae%f0%80%80%ae%f0%80%80%afsecret",
    "..%c0%afsecret",
    "..%c1%9csecret",
    "..%e0%80%afsecret",
    "%uff0e%uff0e/secret",
    "..%u2215secret",
    "..\\secret",
    "..%5csecret",
    "%2e%2e%5csecret",
    "..;/secret",
    "..;a=b/secret",
    "...//secret",
    ".../secret",
    "....//secret",
    "..%00/secret",
    "..%0d%0a/secret",
    "..%09/secret",
    "..%20/secret",
];

fn no_path_leads_out_of_its_root(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/root; location /alias/ { alias %DIR%/root/; } location ~ ^/expression/(.*)$ { alias %DIR%/root/$1; }
         location /merged/ { alias %DIR%/root/; } location /try/ { alias %DIR%/root/; try_files $uri =404; }
         location /list/ { alias %DIR%/root/; autoindex on; }",
    );
    let server = setup.file("secret", "secret").file("root/a/public", "public").start();
    assert_eq!(server.get("/a/public").text(), "public");
    for beginning in ["/", "/a/", "/alias/", "/expression/", "/try/", "/list/", "/alias/a/"] {
        for way in WAYS_OUT {
            for end in ["", "?", "%23", "/"] {
                let target = format!("{beginning}{way}{end}");
                let response = ask(&mut server.connect(), &target);
                assert!([400, 404].contains(&response.status), "{target}: {response:?}");
                assert!(!response.text().contains("secret\""), "{target}: {response:?}");
            }
        }
    }
    // The same without merging slashes.
    let setup = Setup::server(driver, "merge_slashes off; root %DIR%/root;").file("secret", "secret");
    let plain = setup.file("root/a/public", "public").start();
    for way in WAYS_OUT {
        let response = ask(&mut plain.connect(), &format!("/{way}"));
        assert!([400, 404].contains(&response.status), "{way}: {response:?}");
    }
    server.stop();
    plain.stop();
}

fn an_alias_replaces_its_prefix_to_the_letter(driver: Driver) {
    let setup = Setup::server(
        driver,
        "location /files/ { alias %DIR%/root/; } location /bare { alias %DIR%/root; } \
         location = /exact { alias %DIR%/root/x; }
         location /slash { alias %DIR%/root/; } location /tried { alias %DIR%/root/; try_files $uri =404; }
         location /told { alias %DIR%/root/; try_files $uri /exact; }
         location /meant { alias %DIR%/root/a/; try_files /meant/../x /meant../x ../x /exact; }
         location /index { alias %DIR%/root/; index gale.conf; autoindex on; gzip_static always; }
         location /rewritten { root %DIR%/root; rewrite ^/rewritten(.*)$ /$1 break; }",
    );
    let setup = setup.file("root/a/y", "y");
    let server = setup.file("root/x", "x").file("root-beside/x", "beside").file("rootx", "glued").start();
    let mut client = server.connect();
    assert_eq!((ask(&mut client, "/files/x").text(), ask(&mut client, "/bare/x").text()), ("x", "x"));
    assert_eq!(ask(&mut client, "/exact").text(), "x");
    // A prefix with a slash does not match without it, so nothing is appended to the directory's name.
    for target in ["/files../secret", "/files..%2fgale.conf", "/files-beside/x", "/filesx"] {
        assert_eq!(ask(&mut client, target).status, 404, "{target}");
    }
    // The rest of the path is appended to a prefix without a slash, as nginx does and documents.
    assert_eq!(ask(&mut client, "/bare-beside/x").text(), "beside");
    assert_eq!(ask(&mut client, "/bare../gale.conf").status, 404);
    // But the rest of the path never leads out of the directory.
    for beginning in ["/slash", "/tried", "/index", "/rewritten"] {
        assert_eq!(ask(&mut client, &format!("{beginning}x")).text(), "x", "{beginning}");
        for end in ["../gale.conf", "../", "..", "..%2fgale.conf", "../root/x"] {
            let target = format!("{beginning}{end}");
            assert_eq!(ask(&mut client, &target).status, 404, "{target}");
        }
    }
    // Nor does an answer reveal that a file exists.
    for target in ["/told../gale.conf", "/told../nothing"] {
        assert_eq!(ask(&mut client, target).text(), "x", "{target}");
    }
    // Nor does a name in the configuration lead out of the directory.
    assert_eq!(ask(&mut client, "/meant").text(), "x");
    for name in ["/meant/../x", "../x"] {
        server.wait_logged(&format!(
            "unsafe path \"{name}\" was detected, client: unix:, server: , request: \"GET /meant "
        ));
    }
    server.wait_logged("unsafe path \"../gale.conf\" was detected");
    server.wait_logged("unsafe path \"/../gale.conf\" was detected");
    server.stop();
}

fn dot_dot_from_a_request_leads_out_of_no_directory(driver: Driver) {
    let setup = Setup::http(
        driver,
        "map $arg_m $sibling { default ../beside; }
         map $arg_m $passed { default $arg_m; }
         server { listen %UNIX%; root %DIR%/root;
             location ~ ^/named(?<rest>.*)$ { alias %DIR%/root/$rest; }
             location ~ ^/capture(.*)$ { alias %DIR%/root/.$1; }
             location ~ ^/tried(.*)$ { try_files /$1 =404; }
             location /alias/ { alias %DIR%/root/$arg_d/; }
             location /root/ { root %DIR%/root/$arg_d; }
             location /try { try_files /$arg_d/x =404; }
             location /index/ { alias %DIR%/root/; index $arg_d/x; }
             location /passed/ { alias %DIR%/root/$passed/; }
             location /set/ { set $made $arg_d/; alias %DIR%/root/$made; }
             location /dot { alias %DIR%/root/.; }
             location /own/map/ { alias %DIR%/root/$sibling/; }
             location /own/set/ { set $dir ../beside; alias %DIR%/root/$dir/; }
             location /own/text/ { alias %DIR%/root/../$arg_d/; }
             location /log { access_log %DIR%/$arg_d.log; }
             location /shown { root %DIR%/root/$arg_d; return 200 [$document_root]; } }",
    );
    let setup =
        ["x", "root/x", "root/a/x", "root/root/x", "beside/x"].iter().fold(setup, |setup, path| setup.file(path, path));
    let server = setup.start();
    let mut client = server.connect();
    let inside = [
        ("/named/x", "root/x"),
        ("/tried/x", "root/x"),
        ("/alias/x?d=a", "root/a/x"),
        ("/alias/x?d=./a/.", "root/a/x"),
        ("/root/x", "root/root/x"),
        ("/try?d=a", "root/a/x"),
        ("/passed/x?m=a", "root/a/x"),
        ("/set/x?d=a", "root/a/x"),
        ("/own/map/x", "beside/x"),
        ("/own/set/x", "beside/x"),
        ("/own/text/x?d=beside", "beside/x"),
        ("/shown?d=..", "[]"),
    ];
    for (target, text) in inside {
        let response = ask(&mut client, target);
        assert_eq!((response.status, response.text()), (200, text), "{target}");
    }
    let outside = [
        "/named../x",
        "/named..%2fx",
        "/named%2e./x",
        "/named../root/x",
        "/capture./x",
        "/tried../x",
        "/alias/x?d=..",
        "/alias/x?d=a/../..",
        "/root/x?d=..",
        "/try?d=..",
        "/try?d=a/../../beside",
        "/index/?d=..",
        "/passed/x?m=..",
        "/set/x?d=..",
        "/dot./x",
        "/own/text/x?d=../../x",
    ];
    for target in outside {
        assert_eq!(ask(&mut client, target).status, 404, "{target}");
    }
    // Nor is anything written elsewhere.
    for target in ["/log?d=root/../evil", "/log?d=good"] {
        ask(&mut client, target);
    }
    server.directory.wait_line("good.log", "d=good");
    assert!(!server.directory.path().join("evil.log").exists());
    server.wait_logged(&server.directory.replaced("unsafe path \"%DIR%/root/../evil.log\" was detected"));
    server.wait_logged(&server.directory.replaced("unsafe path \"%DIR%/root/../x\" was detected"));
    server.stop();
}

fn names_with_a_null_byte_are_no_names(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/root; location /arg { try_files /$arg_file =404; }");
    let server = setup.file("root/page", "page").start();
    for target in ["/page%00", "/page%00.html", "/%00page", "/a%00/../page"] {
        assert_eq!(ask(&mut server.connect(), target).status, 400, "{target}");
    }
    assert_eq!(ask(&mut server.connect(), "/arg?file=page").text(), "page");
    server.stop();
}

/// Adds `real/file`, a link to it, a link to the directory, and a circular link.
fn with_links(setup: Setup) -> Server {
    let server = setup.file("root/real/file", "contents").file("root/real/index.html", "index").start();
    let root = server.directory.path().join("root");
    symlink("real", root.join("link")).expect("a free name");
    symlink("file", root.join("real/alias")).expect("a free name");
    symlink("circle", root.join("circle")).expect("a free name");
    server
}

fn symbolic_links_may_be_refused(driver: Driver) {
    // A link in the path to the test's directory itself does not count.
    let server = with_links(Setup::server(
        driver,
        "root %DIR%/root; disable_symlinks on from=%DIR%;
         location /off/ { alias %DIR%/root/; disable_symlinks off; }",
    ));
    let mut client = server.connect();
    assert_eq!(ask(&mut client, "/real/file").text(), "contents");
    for path in ["/link/file", "/real/alias", "/circle"] {
        assert_eq!(ask(&mut client, path).status, 403, "{path}");
    }
    assert_eq!((ask(&mut client, "/real/none").status, ask(&mut client, "/real/file/").status), (404, 404));
    assert_eq!(ask(&mut client, "/real").status, 301);
    server.wait_logged("root/link/file\" failed (40: Too many levels of symbolic links)");
    for path in ["/off/link/file", "/off/real/alias"] {
        assert_eq!(ask(&mut client, path).text(), "contents", "{path}");
    }
    server.stop();
}

fn links_of_other_owners_may_be_refused(driver: Driver) {
    let server = with_links(Setup::server(driver, "root %DIR%/root; disable_symlinks if_not_owner from=%DIR%;"));
    let root = server.directory.path().join("root");
    let mut client = server.connect();
    for path in ["/real/file", "/link/file", "/real/alias", "/link/alias"] {
        assert_eq!(ask(&mut client, path).text(), "contents", "{path}");
    }
    let foreign = root.join("foreign");
    if is_root() {
        symlink("real/file", &foreign).expect("a free name");
        std::os::unix::fs::lchown(&foreign, Some(NOBODY), None).expect("root may");
    } else {
        symlink("/etc/passwd", &foreign).expect("a free name");
        assert_ne!(std::fs::metadata(&foreign).expect("it is there").uid(), rustix::process::getuid().as_raw());
    }
    assert_eq!(ask(&mut client, "/foreign").status, 403);
    server.stop();
}

fn part_before_the_checked_one_may_be_a_link(driver: Driver) {
    let server = with_links(Setup::server(
        driver,
        "location / { root %DIR%/root; disable_symlinks on from=$document_root/link; }
         location /slash/ { alias %DIR%/root/link/; disable_symlinks on from=$document_root; }
         location = /whole { alias %DIR%/root/real/alias; disable_symlinks on from=$document_root; }
         location /other/ { alias %DIR%/root/; disable_symlinks on from=/elsewhere; }",
    ));
    let mut client = server.connect();
    for path in ["/link/file", "/slash/file", "/whole"] {
        assert_eq!(ask(&mut client, path).text(), "contents", "{path}");
    }
    for path in ["/link/alias", "/slash/alias", "/other/link/file"] {
        assert_eq!(ask(&mut client, path).status, 403, "{path}");
    }
    server.stop();
}

fn index_and_try_files_do_not_pass_refused_links_either(driver: Driver) {
    let server = with_links(Setup::server(
        driver,
        "root %DIR%/root; disable_symlinks on from=%DIR%; open_file_cache max=10;
         location /try/ { alias %DIR%/root/; try_files $uri =418; }
         location /if { if (-f $document_root/$arg_file) { return 200 yes; } return 200 no; }",
    ));
    let mut client = server.connect();
    assert_eq!((ask(&mut client, "/real/").text(), ask(&mut client, "/link/").status), ("index", 403));
    assert_eq!(
        (ask(&mut client, "/try/real/file").text(), ask(&mut client, "/try/link/file").status),
        ("contents", 418)
    );
    assert_eq!(ask(&mut client, "/if?file=real/file").text(), "yes");
    assert_eq!(ask(&mut client, "/if?file=link/file").text(), "no");
    server.stop();
}

fn the_first_location_decides_whether_errors_lead_on(driver: Driver) {
    let text = |first: &str, second: &str| {
        format!(
            "location /first {{ recursive_error_pages {first}; error_page 404 /second; return 404; }}
             location /second {{ recursive_error_pages {second}; error_page 403 /third; return 403; }}
             location /third {{ return 200 third; }}"
        )
    };
    for (first, second, leads_on) in [("on", "off", true), ("off", "on", false), ("on", "on", true)] {
        let server = Server::start(driver, &text(first, second));
        let response = server.get("/first");
        assert_eq!(response.text() == "third", leads_on, "{first} {second}: {response:?}");
        server.stop();
    }
}

fn texts_may_tell_their_status(driver: Driver) {
    let server = Server::start(
        driver,
        "error_page 404 @page; error_page 403 =402 @page; error_page 401 = @page;
         location /own { return 410 $status; }
         location @page { return 200 $status; }
         location / { return 404; }
         location /replaced { return 403; }
         location /of-page { return 401; }",
    );
    for (path, status) in [("/own", 410), ("/", 404), ("/replaced", 402), ("/of-page", 200)] {
        let response = server.get(path);
        assert_eq!((response.status, response.text()), (status, &*status.to_string()), "{path}");
    }
    server.stop();
}

fn old_browsers_get_long_pages_and_pages_that_lead_on(driver: Driver) {
    let server = Server::start(
        driver,
        "msie_refresh on; location /moved { return 301 \"/to a?b\"; } location /off { msie_refresh off; return 302 /x; }
         location /short { msie_padding off; return 404; } location / { return 404; }",
    );
    let mut client = server.connect();
    let mut ask =
        |path: &str, agent: &str| client.ask(format!("GET {path} HTTP/1.1\r\nHost: h\r\nUser-Agent: {agent}\r\n\r\n"));
    const MSIE: &str = "Mozilla/4.0 (compatible; MSIE 7.0; Windows NT 6.0)";
    let plain = ask("/", "curl").body.len();
    for agent in [MSIE, "AppleWebKit/537.36 (KHTML, like Gecko) Chrome/99.0 Safari/537.36"] {
        let page = ask("/", agent);
        assert!(page.body.len() > 512 && page.text().ends_with("-->\r\n"), "{page:?}");
        assert_eq!(ask("/short", agent).body.len(), plain);
    }
    let moved = ask("/moved", MSIE);
    assert_eq!((moved.status, moved.header("Location")), (200, None));
    assert!(moved.text().contains("content=\"0; URL=/to%20a?b\">"), "{}", moved.text());
    assert_eq!((ask("/moved", "curl").status, ask("/off", MSIE).status), (301, 302));
    server.stop();
}

fn browsers_that_mishandle_kept_connections_get_none(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { return 200 ok; } location /none { keepalive_disable none; return 200 ok; }
         location /safari { keepalive_disable safari; return 200 ok; }
         location /several { keepalive_disable none; keepalive_disable safari; return 200 ok; }",
    );
    const MSIE: &str = "Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.0)";
    const SAFARI: &str = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15) AppleWebKit/605 (KHTML, like Gecko) Safari/605";
    let is_kept = |method: &str, path: &str, agent: &str| {
        let fields = format!("Host: h\r\nUser-Agent: {agent}\r\nContent-Length: 0\r\n");
        let response = server.connect().ask(format!("{method} {path} HTTP/1.1\r\n{fields}\r\n"));
        response.header("Connection") == Some("keep-alive")
    };
    assert!(!is_kept("POST", "/", MSIE) && is_kept("GET", "/", MSIE) && is_kept("POST", "/", SAFARI));
    assert!(is_kept("POST", "/none", MSIE) && is_kept("POST", "/safari", MSIE));
    assert!(!is_kept("GET", "/safari", SAFARI) && is_kept("GET", "/safari", "curl"));
    assert!(!is_kept("GET", "/several", SAFARI) && is_kept("POST", "/several", MSIE));
    server.stop();
}

fn redirects_follow_the_settings(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %TCP%; server_name first.example second.example; root %DIR%/root;
             location /relative/ { absolute_redirect off; } location /named/ { server_name_in_redirect on; }
             location /port/ { port_in_redirect off; }
             location /both/ { server_name_in_redirect on; port_in_redirect off; }
             location /elsewhere { return 302 http://elsewhere/; } location /text { return 301 text; } }",
    )
    .file("root/a b/x", "")
    .file("root/relative/d/x", "")
    .file("root/named/d/x", "")
    .file("root/port/d/x", "")
    .file("root/both/d/x", "")
    .start();
    let port = server.directory.address(1).port();
    let mut client = server.connect_tcp(1);
    let mut location = |path: &str, host: &str| {
        let response = client.ask(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        response.header("Location").expect("a redirect").to_owned()
    };
    assert_eq!(location("/a%20b?c=d", "asked.example:99"), format!("http://asked.example:{port}/a%20b/?c=d"));
    assert_eq!(location("/relative/d", "h"), "/relative/d/");
    assert_eq!(location("/named/d", "h"), format!("http://first.example:{port}/named/d/"));
    assert_eq!(location("/port/d", "h"), "http://h/port/d/");
    assert_eq!(location("/both/d", "h"), "http://first.example/both/d/");
    assert_eq!(location("/elsewhere", "h"), "http://elsewhere/");
    assert_eq!(location("/text", "h"), "text");
    server.stop();
}

fn missing_file_is_not_logged_with_log_not_found_off(driver: Driver) {
    let server = Server::start(
        driver,
        "root %DIR%; location /quiet { log_not_found off; } location /quiet/ { log_not_found off; index none; }",
    );
    for path in ["/quiet", "/quiet/", "/quiet/none", "/loud"] {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
    server.wait_logged("/loud\" failed (2: No such file or directory)");
    assert!(!server.log().contains("/quiet"), "{}", server.log());
    server.stop();
}

fn the_rate_may_be_set(driver: Driver) {
    let server = Server::start(
        driver,
        "limit_rate 1; location /set { set $limit_rate 8k; return 200 $limit_rate; }
         location /wrong { set $limit_rate fast; limit_rate 0; return 200 $limit_rate; }",
    );
    // A limit of one byte a second would take four seconds, which would show without a failure.
    assert_eq!((server.get("/set").text(), server.get("/wrong").text()), ("8192", "0"));
    server.wait_logged("invalid $limit_rate \"fast\"");
    server.stop();
}

fn variables_tell_of_the_connection_and_the_real_root(driver: Driver) {
    let setup = Setup::http(
        driver,
        "log_format real '$uri $realpath_root'; access_log %DIR%/real.log real;
         server { listen %TCP%; listen %UNIX%; root %DIR%/current; add_header X-Root $realpath_root;
             location /tcp { return 200 '$tcpinfo_rtt $tcpinfo_rttvar $tcpinfo_snd_cwnd $tcpinfo_rcv_space'; }
             location /none/ { alias %DIR%/none/; }
             location /file { } }",
    );
    let server = setup.file("one/file", "1").file("two/file", "2").start();
    let directory = server.directory.path().canonicalize().expect("it is there");
    let link = server.directory.path().join("current");
    let mut client = server.connect_tcp(1);
    for name in ["one", "two"] {
        // A new release replaces the old one atomically.
        symlink(name, server.directory.path().join("next")).expect("a free name");
        std::fs::rename(server.directory.path().join("next"), &link).expect("to the same directory");
        let expected = directory.join(name);
        let response = ask(&mut client, "/file");
        assert_eq!(response.header("X-Root"), expected.to_str(), "{response:?}");
        server.directory.wait_line("real.log", &format!("/file {}", expected.display()));
    }
    let response = ask(&mut client, "/tcp");
    let numbers: Vec<u64> = response.text().split(' ').map(|text| text.parse().expect("a number")).collect();
    assert!(numbers.len() == 4 && numbers[2] > 0, "{numbers:?}");
    assert_eq!(ask(&mut server.connect(), "/tcp").text(), "   ");
    let response = ask(&mut client, "/none/file");
    assert_eq!((response.status, response.header("X-Root")), (404, None));
    server.wait_logged("realpath() \"");
    server.stop();
}
