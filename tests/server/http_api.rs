//! `api`: the server's state as JSON, and changes to it.

use serde_json::{Value, json};

use crate::support::{
    Backend, Driver, Response, Server, Serving, Setup, http_configuration, is_root, with_each_driver,
};

with_each_driver!(
    the_tree_is_nginx_s,
    servers_are_added_changed_and_removed,
    a_whole_list_is_replaced_at_once_or_not_at_all,
    lists_of_servers_are_made_in_a_thread,
    listed_servers_can_be_put_back_with_any_balancing_method,
    impossible_change_is_an_error_and_changes_nothing,
    changes_live_until_a_reload_alters_the_servers,
    state_file_has_the_changes,
    a_change_that_cannot_be_kept_does_not_happen,
);

/// A backend that answers with this text.
fn named(text: &'static str) -> Serving {
    Backend::tcp().serve(move |_, client| {
        client.try_send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len())).is_ok()
    })
}

/// A group with this text in its block, behind /, and the API.
fn configuration(group: &str) -> String {
    format!(
        "upstream app {{ {group} }} upstream other {{ least_conn; server 127.0.0.1:1; }}
         upstream hashed {{ ip_hash; server 127.0.0.1:1; }}
         server {{ listen %UNIX%; location / {{ proxy_pass http://app; }}
             location /api/ {{ api write=on; }} location /read/ {{ api; }} }}"
    )
}

fn start(driver: Driver, group: &str) -> Server {
    Setup::http(driver, &configuration(group)).start()
}

fn ask(server: &Server, method: &str, path: &str, body: &str) -> (u16, Value, Response) {
    let length = body.len();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{body}");
    let response = server.connect().ask(request);
    assert_eq!(response.header("Content-Type"), Some("application/json"), "{response:?}");
    (response.status, serde_json::from_slice(&response.body).expect("JSON"), response)
}

const SERVERS: &str = "/api/9/http/upstreams/app/servers";

fn get(server: &Server, path: &str) -> Value {
    let (status, value, _) = ask(server, "GET", path, "");
    assert_eq!(status, 200, "{path}: {value}");
    value
}

/// Numbers, addresses and weights of the group's servers.
fn listed(server: &Server) -> Vec<(u64, String, u64)> {
    let servers = get(server, SERVERS);
    let one = |server: &Value| {
        (
            server["id"].as_u64().unwrap(),
            server["server"].as_str().unwrap().to_owned(),
            server["weight"].as_u64().unwrap(),
        )
    };
    servers.as_array().unwrap().iter().map(one).collect()
}

/// Answers to some requests, each once.
fn answering(server: &Server) -> Vec<String> {
    let mut client = server.connect();
    let mut texts: Vec<String> = (0..8).map(|_| client.get("/").text().to_owned()).collect();
    texts.sort();
    texts.dedup();
    texts
}

fn the_tree_is_nginx_s(driver: Driver) {
    let server = start(driver, "server 127.0.0.1:1 weight=2 down; server unix:/nowhere backup;");
    assert_eq!(get(&server, "/api/"), json!([1, 2, 3, 4, 5, 6, 7, 8, 9]));
    assert!(get(&server, "/api/9").as_array().is_some_and(|roots| roots.contains(&json!("http"))));
    let of_http = ["requests", "server_zones", "location_zones", "caches", "limit_conns", "limit_reqs", "upstreams"];
    assert_eq!(get(&server, "/api/9/http/"), json!(of_http));
    let groups = get(&server, "/api/9/http/upstreams");
    let names: Vec<&String> = groups.as_object().unwrap().keys().collect();
    assert_eq!(names, ["app", "hashed", "other"]);
    assert_eq!(get(&server, "/read/9/http/upstreams/app/"), groups["app"]);
    assert_eq!(
        get(&server, "/api/9/http/upstreams?fields=zone,keepalive")["app"],
        json!({ "zone": "app", "keepalive": 0 })
    );
    for (peer, expected) in groups["app"]["peers"].as_array().unwrap().iter().zip([
        json!({ "id": 0, "server": "127.0.0.1:1", "name": "127.0.0.1:1", "backup": false, "weight": 2, "state": "down",
                "fails": 0 }),
        json!({ "id": 1, "server": "unix:/nowhere", "name": "unix:/nowhere", "backup": true, "weight": 1, "state": "up",
                "fails": 0 }),
    ]) {
        expected.as_object().unwrap().iter().for_each(|(field, value)| assert_eq!(&peer[field], value, "{peer:#}"));
    }
    let first = json!({
        "id": 0, "server": "127.0.0.1:1", "weight": 2, "max_conns": 0, "max_fails": 1, "fail_timeout": "10s",
        "slow_start": "0s", "route": "", "backup": false, "down": true
    });
    assert_eq!(get(&server, &format!("{SERVERS}/0")), first);
    for (method, path, status, code) in [
        ("GET", "/api/10/http", 404, "UnknownVersion"),
        ("GET", "/api/x", 404, "UnknownVersion"),
        ("GET", "/api/9/nothing", 404, "PathNotFound"),
        ("GET", "/api/9/http/upstreams/app/nothing", 404, "PathNotFound"),
        ("GET", "/api/9/http/upstreams/none", 404, "UpstreamNotFound"),
        ("GET", "/api/9/http/upstreams/app/servers/7", 404, "UpstreamServerNotFound"),
        ("GET", "/api/9/http/upstreams/app/servers/x", 400, "UpstreamBadServerId"),
        ("DELETE", "/read/9/http/upstreams/app", 405, "MethodDisabled"),
        ("POST", "/api/9", 405, "MethodDisabled"),
        ("PUT", "/api/9/http/upstreams/app/servers/0", 405, "MethodDisabled"),
        ("DELETE", "/read/9/http/upstreams/app/servers/0", 405, "MethodDisabled"),
        ("POST", "/read/9/http/upstreams/app/servers", 405, "MethodDisabled"),
    ] {
        let (found, error, _) = ask(&server, method, path, "");
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{method} {path}");
        assert_eq!(error["error"]["status"], status);
        assert!(error["error"]["text"].is_string() && error["request_id"].as_str().is_some_and(|id| id.len() == 32));
    }
    server.stop();
}

fn servers_are_added_changed_and_removed(driver: Driver) {
    let (one, two) = (named("one"), named("two"));
    let server = start(driver, &format!("server {};", one.address));
    assert_eq!(answering(&server), ["one"]);
    let body = json!({ "server": two.address, "max_fails": 3, "fail_timeout": "5s", "slow_start": 0 }).to_string();
    let (status, added, response) = ask(&server, "POST", SERVERS, &body);
    assert_eq!((status, &added["id"], &added["fail_timeout"]), (201, &json!(1), &json!("5s")));
    assert!(response.header("Location").is_some_and(|location| location.ends_with(&format!("{SERVERS}/1"))));
    server.wait_logged("servers of upstream \"app\" were changed by the API");
    assert_eq!(answering(&server), ["one", "two"]);
    let first = format!("{SERVERS}/0");
    assert_eq!(ask(&server, "PATCH", &first, r#"{"down":true}"#).1["down"], true);
    assert_eq!(answering(&server), ["two"]);
    assert_eq!(ask(&server, "PATCH", &first, r#"{"down":false,"weight":4}"#).1["weight"], 4);
    assert_eq!(answering(&server), ["one", "two"]);
    assert_eq!(ask(&server, "PATCH", &first, r#"{"drain":true}"#).1["drain"], true);
    assert_eq!(answering(&server), ["two"]);
    let (status, left, _) = ask(&server, "DELETE", &first, "");
    assert_eq!((status, left.as_array().map(Vec::len)), (200, Some(1)));
    assert_eq!((answering(&server), listed(&server)), (vec!["two".to_owned()], vec![(1, two.address.clone(), 1)]));
    // The last server can be removed, too.
    ask(&server, "DELETE", &format!("{SERVERS}/1"), "");
    assert_eq!(server.get("/").status, 502);
    server.wait_logged("no live upstreams while connecting to upstream");
    let (_, added, _) = ask(&server, "POST", SERVERS, &json!({ "server": one.address }).to_string());
    assert_eq!((added["id"].as_u64(), answering(&server)), (Some(2), vec!["one".to_owned()]));
    server.stop();
}

fn a_whole_list_is_replaced_at_once_or_not_at_all(driver: Driver) {
    let (one, two) = (named("one"), named("two"));
    let server = start(driver, &format!("server {};", one.address));
    let list = json!([{ "server": two.address, "weight": 2 }, { "server": one.address }]).to_string();
    let (status, now, _) = ask(&server, "PUT", SERVERS, &list);
    assert_eq!((status, now.as_array().map(Vec::len)), (200, Some(2)));
    let expected = vec![(1, two.address.clone(), 2), (0, one.address.clone(), 1)];
    assert_eq!((listed(&server), answering(&server)), (expected.clone(), vec!["one".to_owned(), "two".to_owned()]));
    let twice = json!([{ "server": "127.0.0.1:9" }, { "server": "127.0.0.1:9" }]).to_string();
    let wrong = json!([{ "server": "127.0.0.1:9" }, { "server": "app.example:9" }]).to_string();
    assert_eq!((ask(&server, "PUT", SERVERS, &twice).0, ask(&server, "PUT", SERVERS, &wrong).0), (409, 400));
    assert_eq!(listed(&server), expected);
    // The answer of GET can be sent back.
    let same = get(&server, SERVERS).to_string();
    assert_eq!((ask(&server, "PUT", SERVERS, &same).0, listed(&server)), (200, expected));
    let address = |number: u32| format!("127.1.{}.{}:80", number / 250, number % 250 + 1);
    let many: Vec<Value> = (0..10_000).map(|number| json!({ "server": address(number), "down": true })).collect();
    let many = json!([Value::Array(many).as_array().unwrap().as_slice(), &[json!({ "server": two.address })]].concat());
    assert_eq!(ask(&server, "PUT", SERVERS, &many.to_string()).0, 200);
    assert_eq!((listed(&server).len(), answering(&server)), (10_001, vec!["two".to_owned()]));
    server.stop();
}

fn lists_of_servers_are_made_in_a_thread(driver: Driver) {
    let server = start(driver, "server 127.0.0.1:1; server 127.0.0.1:2;");
    // Only this resource is answered without a task.
    let tasks = || {
        let pools = get(&server, "/api/9/gale/pools");
        let of_default = pools.as_array().unwrap().iter().find(|pool| pool["name"] == "default");
        of_default.and_then(|pool| pool["completed"].as_u64()).unwrap_or(0)
    };
    let list = get(&server, SERVERS).to_string();
    let (one, first) = (json!({ "server": "127.0.0.1:3" }).to_string(), format!("{SERVERS}/0"));
    // Reading JSON, changing the group and writing JSON.
    for (method, path, body, expected) in
        [("GET", SERVERS, "", 1), ("PUT", SERVERS, &list, 4), ("POST", SERVERS, &one, 2), ("DELETE", &first, "", 2)]
    {
        // A finished task may be counted after its answer.
        let mut before = tasks();
        server.directory.wait_until("threads without a task", |_| std::mem::replace(&mut before, tasks()) == tasks());
        assert!(ask(&server, method, path, body).0 < 300, "{method} {path}");
        server.directory.wait_until("task", |_| tasks() >= before + expected);
    }
    server.stop();
}

fn listed_servers_can_be_put_back_with_any_balancing_method(driver: Driver) {
    let methods = [
        "",
        "least_conn;",
        "least_time header;",
        "ip_hash;",
        "hash $uri;",
        "hash $uri consistent;",
        "random;",
        "random two least_conn;",
        "sticky cookie own;",
    ];
    let groups = (0..).zip(methods).map(|(number, method): (u32, &str)| {
        let servers = "server 127.0.0.1:1; server 127.0.0.1:2 weight=3 max_conns=4 max_fails=0 fail_timeout=1m down;";
        format!("upstream g{number} {{ {method} {servers} }}\n")
    });
    let groups = groups.collect::<String>();
    let server =
        Setup::http(driver, &format!("{groups} server {{ listen %UNIX%; location /api/ {{ api write=on; }} }}"))
            .start();
    for (number, method) in (0_u32..).zip(methods) {
        let path = format!("/api/9/http/upstreams/g{number}/servers");
        let told = get(&server, &path);
        let (status, now, _) = ask(&server, "PUT", &path, &told.to_string());
        assert_eq!((status, &now), (200, &told), "{method}");
        for one in told.as_array().unwrap() {
            let mut one = one.clone();
            let id = one["id"].as_u64().unwrap();
            one.as_object_mut().unwrap().retain(|name, _| !matches!(&**name, "server" | "backup"));
            let (status, now, _) = ask(&server, "PATCH", &format!("{path}/{id}"), &one.to_string());
            assert_eq!(
                (status, &now),
                (200, &told.as_array().unwrap().iter().find(|told| told["id"] == id).unwrap().clone())
            );
        }
        let slow = json!([{ "server": "127.0.0.1:1", "slow_start": "1s" }]).to_string();
        let takes_it = !["ip_hash", "hash", "random"].iter().any(|name| method.starts_with(name));
        assert_eq!(ask(&server, "PUT", &path, &slow).0, if takes_it { 200 } else { 400 }, "{method}");
    }
    server.stop();
}

fn impossible_change_is_an_error_and_changes_nothing(driver: Driver) {
    let server = start(driver, "server 127.0.0.1:1; server 127.0.0.1:2;");
    let before = listed(&server);
    let first = format!("{SERVERS}/0");
    let hashed = "/api/9/http/upstreams/hashed/servers";
    for (method, path, body, status, code) in [
        ("POST", SERVERS, r#"{"server":"127.0.0.1:2"}"#, 409, "EntryExists"),
        ("POST", SERVERS, r#"{"weight":1}"#, 400, "UpstreamConfFormatError"),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:3","weight":0}"#, 400, "UpstreamConfFormatError"),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:3","fail_timeout":"soon"}"#, 400, "UpstreamConfFormatError"),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:3","fail_timeout":"500ms"}"#, 400, "UpstreamConfFormatError"),
        (
            "POST",
            SERVERS,
            r#"{"server":"127.0.0.1:3","fail_timeout":18446744073709551615}"#,
            400,
            "UpstreamConfFormatError",
        ),
        (
            "POST",
            SERVERS,
            r#"{"server":"127.0.0.1:3","slow_start":18446744073709551615}"#,
            400,
            "UpstreamConfFormatError",
        ),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:99999"}"#, 400, "UpstreamBadAddress"),
        ("POST", SERVERS, r#"{"server":"app.example"}"#, 400, "UpstreamBadAddress"),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:3","wieght":1}"#, 415, "JsonError"),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:3""#, 415, "JsonError"),
        ("POST", SERVERS, "", 415, "JsonError"),
        ("POST", SERVERS, r#"{"server":"127.0.0.1:3","weight":-1}"#, 415, "JsonError"),
        ("POST", hashed, r#"{"server":"127.0.0.1:3","backup":true}"#, 400, "UpstreamConfFormatError"),
        ("PATCH", &first, r#"{"server":"127.0.0.1:3"}"#, 400, "UpstreamConfFormatError"),
        ("PATCH", "/api/9/http/upstreams/app/servers/5", r#"{"down":true}"#, 404, "UpstreamServerNotFound"),
        ("DELETE", "/api/9/http/upstreams/app/servers/5", "", 404, "UpstreamServerNotFound"),
        ("POST", "/api/9/http/upstreams/none/servers", r#"{"server":"127.0.0.1:3"}"#, 404, "UpstreamNotFound"),
    ] {
        let (found, error, _) = ask(&server, method, path, body);
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{method} {path} {body}: {error}");
    }
    assert_eq!(listed(&server), before);
    server.stop();
}

fn changes_live_until_a_reload_alters_the_servers(driver: Driver) {
    let (one, two) = (named("one"), named("two"));
    let group = format!("server {};", one.address);
    let mut server = start(driver, &group);
    ask(&server, "PUT", SERVERS, &json!([{ "server": two.address }]).to_string());
    server.reload_http(driver, &configuration(&format!("{group} keepalive 5;")));
    assert_eq!((answering(&server), listed(&server)), (vec!["two".to_owned()], vec![(1, two.address.clone(), 1)]));
    server.reload_http(driver, &configuration(&format!("server {} weight=3;", one.address)));
    assert_eq!((answering(&server), listed(&server).len()), (vec!["one".to_owned()], 1));
    server.stop();
}

fn state_file_has_the_changes(driver: Driver) {
    let (one, two) = (named("one"), named("two"));
    let text = http_configuration(driver, &configuration("state %DIR%/state/app;"));
    let mut server = Setup::configuration(&text).file("state/app", format!("server {};\n", one.address)).start();
    let directory = server.directory.path().join("state");
    if is_root() {
        // The worker's user writes there.
        std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    }
    let added = json!({ "server": two.address, "weight": 5, "max_conns": 9, "max_fails": 0, "fail_timeout": "1m",
        "slow_start": "1500ms", "route": "a b\"\\;", "backup": true, "down": true });
    assert_eq!(ask(&server, "POST", SERVERS, &added.to_string()).0, 201);
    let before = get(&server, SERVERS);
    server.reload(&text);
    assert_eq!(get(&server, SERVERS), before);
    ask(&server, "DELETE", &format!("{SERVERS}/0"), "");
    ask(&server, "PATCH", &format!("{SERVERS}/1"), r#"{"down":false,"drain":true}"#);
    let file = std::fs::read_to_string(directory.join("app")).unwrap();
    let expected = "weight=5 max_conns=9 max_fails=0 fail_timeout=60 slow_start=1500ms";
    assert_eq!(file, format!("server {} {expected} \"route=a b\\\"\\\\;\" backup drain;\n", two.address));
    let left: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["app"]);
    server.stop();
}

fn a_change_that_cannot_be_kept_does_not_happen(driver: Driver) {
    let server = start(driver, "state /proc/nowhere/app;");
    assert_eq!(ask(&server, "POST", SERVERS, r#"{"server":"127.0.0.1:1"}"#).1["error"]["code"], "StateNotWritten");
    server.wait_logged("servers of upstream \"app\" are not changed: the state file cannot be written");
    assert_eq!(listed(&server), []);
    server.stop();
}
