//! `No-Vary-Search`: requests whose queries only differ in ignored parameters share an entry.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{Backend, Client, Directory, Driver, Response, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    queries_that_do_not_matter_find_the_same,
    the_field_is_followed_only_where_that_is_said_and_it_is_valid,
    the_latest_rules_are_the_only_ones,
    the_rules_of_a_part_that_is_not_stored_do_not_count,
    rules_and_entries_are_there_after_a_restart,
    purges_reach_entries_that_stand_for_other_queries,
    purge_wins_over_a_later_response_with_rules,
    a_request_that_changes_something_takes_it_away,
);

const KEY: &str = "proxy_cache_key $scheme$host$request_uri; proxy_cache_no_vary_search on;";

fn caching(driver: Driver, directory: &str, behind: &str, more: &str) -> Server {
    let text = "proxy_cache_path CACHE keys_zone=one:1m; proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; proxy_cache_purge $http_x_purge;
        add_header X-Cache $upstream_cache_status always;
        location / { proxy_pass http://BEHIND; MORE } location /off { proxy_pass http://BEHIND; } }";
    let text = text.replace("BEHIND", behind).replace("CACHE", directory).replace("MORE", more);
    Setup::http(driver, &text).start()
}

/// A server that answers with the `No-Vary-Search` in the request's `X-Rules`, and with 206 if it has `X-Part`; the
/// body is the number of the request.
fn origin() -> Serving {
    let count = AtomicU64::new(0);
    Backend::tcp().serve(move |asked, client| {
        let body = (count.fetch_add(1, Ordering::SeqCst) + 1).to_string();
        let rules = asked.header("X-Rules").map(|rules| format!("No-Vary-Search: {rules}\r\n")).unwrap_or_default();
        let length = body.len();
        let status = match asked.header("X-Part") {
            Some(range) => format!("206 Partial Content\r\nContent-Range: bytes {range}"),
            None => "200 OK".to_owned(),
        };
        client.send(format!(
            "HTTP/1.1 {status}\r\nCache-Control: max-age=60\r\n{rules}Content-Length: {length}\r\n\r\n{body}"
        ));
        true
    })
}

fn send(server: &Server, method: &str, target: &str, fields: &str) -> Response {
    server.connect().ask(format!("{method} {target} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
}

/// Cache status and body; a response of the server has these rules.
#[track_caller]
fn get(server: &Server, target: &str, rules: &str) -> String {
    let fields = if rules.is_empty() { String::new() } else { format!("X-Rules: {rules}\r\n") };
    let response = send(server, "GET", target, &fields);
    format!("{} {}", response.header("X-Cache").unwrap_or("-"), response.text())
}

fn purge(server: &Server, target: &str) -> u16 {
    send(server, "GET", target, "X-Purge: 1\r\n").status
}

const UTM: &str = "params=(\"utm\")";

fn queries_that_do_not_matter_find_the_same(driver: Driver) {
    let backend = origin();
    let server = caching(driver, "%DIR%/cache", &backend.address, KEY);
    assert_eq!(get(&server, "/a?utm=1&id=1", UTM), "MISS 1");
    for target in ["/a?utm=2&id=1", "/a?id=1", "/a?id=1&utm", "/a?utm=1&id=%31", "/a?utm=1&id=1"] {
        assert_eq!(get(&server, target, ""), "HIT 1", "{target}");
    }
    assert_eq!(get(&server, "/a?id=2&utm=1", UTM), "MISS 2");
    assert_eq!(get(&server, "/a?id=2", ""), "HIT 2");
    assert_eq!(get(&server, "/a?id=1", ""), "HIT 1");
    // Without a query; and another path.
    assert_eq!(get(&server, "/a", UTM), "MISS 3");
    assert_eq!(get(&server, "/a?utm=7", ""), "HIT 3");
    assert_eq!(get(&server, "/b?utm=7", UTM), "MISS 4");
    // The order matters unless `key-order` is given.
    assert_eq!(get(&server, "/c?x=1&y=2", "key-order"), "MISS 5");
    assert_eq!(get(&server, "/c?y=2&x=1", ""), "HIT 5");
    assert_eq!(get(&server, "/d?id=1&any=2", "params, except=(\"id\")"), "MISS 6");
    assert_eq!(get(&server, "/d?other=3&id=1", ""), "HIT 6");
    assert_eq!(get(&server, "/d?other=3&id=2", "params, except=(\"id\")"), "MISS 7");
    server.stop();
}

fn the_field_is_followed_only_where_that_is_said_and_it_is_valid(driver: Driver) {
    let backend = origin();
    let server = caching(driver, "%DIR%/cache", &backend.address, KEY);
    let mut count = 0;
    let mut is_found_by_its_own_query = |server: &Server, path: &str, rules: &str| {
        count += 1;
        assert_eq!(get(server, &format!("{path}?utm=1"), rules), format!("MISS {count}"), "{rules}");
        assert_eq!(get(server, &format!("{path}?utm=1"), rules), format!("HIT {count}"), "{rules}");
        count += 1;
        assert_eq!(get(server, &format!("{path}?utm=2"), rules), format!("MISS {count}"), "{rules}");
    };
    is_found_by_its_own_query(&server, "/off", UTM);
    let wrong =
        ["params=(utm)", "params=(\"utm\"", "params=?0", "params=(\"utm\"), except=(\"id\")", "except=(\"id\")"];
    for (number, rules) in wrong.into_iter().enumerate() {
        is_found_by_its_own_query(&server, &format!("/wrong{number}"), rules);
    }
    server.stop();
    // Rules have no effect on a key without a query.
    let server =
        caching(driver, "%DIR%/cache", &backend.address, "proxy_cache_key $uri; proxy_cache_no_vary_search on;");
    count += 1;
    assert_eq!(get(&server, "/key?utm=1&id=1", UTM), format!("MISS {count}"));
    assert_eq!(get(&server, "/key?id=2", ""), format!("HIT {count}"));
    server.stop();
}

fn the_latest_rules_are_the_only_ones(driver: Driver) {
    let backend = origin();
    let server = caching(driver, "%DIR%/cache", &backend.address, KEY);
    assert_eq!(get(&server, "/a?utm=1&id=1", UTM), "MISS 1");
    assert_eq!(get(&server, "/a?utm=2&id=1", ""), "HIT 1");
    assert_eq!(get(&server, "/a?utm=1&id=2", "params=(\"id\")"), "MISS 2");
    assert_eq!(get(&server, "/a?utm=1&id=3", ""), "HIT 2");
    assert_eq!(get(&server, "/a?utm=2&id=1", UTM), "MISS 3");
    assert_eq!(get(&server, "/a?utm=9&id=1", ""), "HIT 3");
    // A response without rules answers its own query.
    assert_eq!(get(&server, "/a?utm=9&id=4", ""), "MISS 4");
    assert_eq!(get(&server, "/a?utm=9&id=4", ""), "HIT 4");
    assert_eq!(get(&server, "/a?utm=8&id=4", ""), "MISS 5");
    server.stop();
}

fn the_rules_of_a_part_that_is_not_stored_do_not_count(driver: Driver) {
    let backend = origin();
    let server = caching(driver, "%DIR%/cache", &backend.address, KEY);
    assert_eq!(get(&server, "/a?utm=1", UTM), "MISS 1");
    for (target, answer) in [("/a?id=1", "MISS 2"), ("/a?id=1", "MISS 3")] {
        let part = send(&server, "GET", target, "X-Part: 0-0/9\r\nX-Rules: params=(\"id\")\r\n");
        assert_eq!(part.status, 206);
        assert_eq!(format!("{} {}", part.header("X-Cache").unwrap(), part.text()), answer);
    }
    assert_eq!(get(&server, "/a?utm=2", ""), "HIT 1");
    server.stop();
}

fn entries_in(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().len() == 32).count()
}

fn rules_and_entries_are_there_after_a_restart(driver: Driver) {
    let (backend, directory) = (origin(), Directory::new());
    let serve = || caching(driver, directory.path().to_str().expect("text"), &backend.address, KEY);
    let server = serve();
    assert_eq!(get(&server, "/a?utm=1&id=1", UTM), "MISS 1");
    directory.wait_until("the response and its mark are stored", |_| entries_in(directory.path()) == 2);
    server.stop();
    let server = serve();
    // If the journal lacked them when the server stopped, the loader has found them.
    server.wait_logged("1 entries");
    assert_eq!(get(&server, "/a?utm=2&id=1", ""), "HIT 1");
    assert_eq!(purge(&server, "/a?utm=3&id=1"), 204);
    server.stop();
    let server = serve();
    assert_eq!(get(&server, "/a?utm=2&id=1", UTM), "MISS 2");
    server.stop();
}

fn purges_reach_entries_that_stand_for_other_queries(driver: Driver) {
    let backend = origin();
    let server = caching(driver, "%DIR%/cache", &backend.address, KEY);
    // While there may be unknown files, no entry counts as absent.
    server.wait_logged("0 entries");
    assert_eq!(get(&server, "/a?utm=1&id=1", UTM), "MISS 1");
    assert_eq!(get(&server, "/a?utm=1&id=2", UTM), "MISS 2");
    assert_eq!(purge(&server, "/a?id=1&utm=5"), 204);
    assert_eq!(get(&server, "/a?utm=1&id=1", UTM), "MISS 3");
    assert_eq!(get(&server, "/a?utm=3&id=2", ""), "HIT 2");
    assert_eq!(purge(&server, "/a?id=3"), 404);
    // A prefix that extends into the query also purges entries that answer other queries.
    assert_eq!(purge(&server, "/a?ut*"), 204);
    assert_eq!(get(&server, "/a?utm=3&id=2", UTM), "MISS 4");
    assert_eq!(get(&server, "/a?utm=3&id=1", UTM), "MISS 5");
    server.stop();
}

fn purge_wins_over_a_later_response_with_rules(driver: Driver) {
    let backend = Backend::tcp();
    let server = caching(driver, "%DIR%/cache", backend.address(), KEY);
    let ask = |target: &str| -> (Client, Client) {
        let mut client = server.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"));
        let mut behind = backend.accept();
        behind.request();
        (client, behind)
    };
    let answer = |body: &str| {
        format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nNo-Vary-Search: {UTM}\r\nConnection: close\r\n\
             Content-Length: 1\r\n\r\n{body}"
        )
    };
    // The fill does not know yet that it will answer the purged query.
    let (mut client, mut behind) = ask("/a?utm=1&id=1");
    purge(&server, "/a?utm=2&id=1");
    behind.send(answer("a"));
    assert_eq!(client.response().text(), "a");
    let (mut client, mut behind) = ask("/a?utm=2&id=1");
    behind.send(answer("b"));
    assert_eq!(client.response().text(), "b");
    assert_eq!(get(&server, "/a?utm=3&id=1", ""), "HIT b");
    server.stop();
}

fn a_request_that_changes_something_takes_it_away(driver: Driver) {
    let backend = origin();
    let server = caching(driver, "%DIR%/cache", &backend.address, KEY);
    assert_eq!(get(&server, "/a?utm=1&id=1", UTM), "MISS 1");
    assert_eq!(get(&server, "/a?utm=2&id=1", ""), "HIT 1");
    assert_eq!(send(&server, "DELETE", "/a?utm=3&id=1", "").status, 200);
    assert_eq!(get(&server, "/a?utm=2&id=1", UTM), "MISS 3");
    server.stop();
}
