//! Access control over real sockets: by address, method, password, and fields from trusted proxies.

use std::time::{Duration, Instant};

use crate::support::{Client, Driver, Response, Setup, with_each_driver};

with_each_driver!(
    access_is_decided_by_address,
    a_level_with_rules_of_its_own_takes_none_from_outside,
    all_or_any_have_to_be_satisfied,
    other_methods_have_settings_of_their_own,
    passwords_of_every_form_are_understood,
    without_the_right_password_one_is_asked_for_it,
    changes_to_a_password_file_count_at_once,
    unreadable_password_file_lets_no_user_in,
    the_password_file_may_depend_on_the_request,
    a_password_may_be_needed_for_some_methods_only,
    wrong_password_is_delayed,
    a_client_that_leaves_while_it_waits_is_logged,
    slow_password_hash_delays_no_other_requests,
    trusted_servers_set_the_client_address,
    untrusted_address_cannot_set_the_client_address,
    the_client_is_found_behind_several_servers,
    client_address_comes_from_the_proxy_protocol,
);

/// Status of a request for `path`, a file in the server's directory.
#[track_caller]
fn status(client: &mut Client, path: &str) -> u16 {
    client.get(path).status
}

fn setup(driver: Driver, text: &str) -> Setup {
    let setup = Setup::http(driver, &format!("root %DIR%/html; server {{ listen %UNIX%; listen %TCP%; {text} }}"));
    ["f", "a/f", "b/f", "b/c/f", "d/f", "e/f"]
        .into_iter()
        .fold(setup, |setup, path| setup.file(&format!("html/{path}"), format!("this is {path}")))
}

/// `Authorization` for a user whose name and password need no padding and consist of letters.
fn basic(user: &str, password: &str) -> String {
    format!("Authorization: Basic {}\r\n", base64(format!("{user}:{password}").as_bytes()))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = |chunk: &[u8]| -> String {
        let bits = (0..3).fold(0, |bits: u32, at| bits << 8 | u32::from(*chunk.get(at).unwrap_or(&0)));
        let digit = |at: usize| char::from(DIGITS[(bits >> (18 - 6 * at)) as usize & 63]);
        (0..4).map(|at| if at <= chunk.len() { digit(at) } else { '=' }).collect()
    };
    bytes.chunks(3).map(digits).collect()
}

#[track_caller]
fn ask(client: &mut Client, method: &str, path: &str, fields: &str) -> Response {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n");
    match method {
        "HEAD" => {
            client.send(request);
            client.response_to_head()
        }
        _ => client.ask(request),
    }
}

fn access_is_decided_by_address(driver: Driver) {
    let server = setup(
        driver,
        "location /a/ { allow unix:; deny all; }
         location /b/ { deny 127.0.0.2; allow 127.0.0.0/8; deny all; }
         location /d/ { deny ::/0; }
         location /e/ { deny 0.0.0.0/0; }",
    )
    .start();
    let (mut unix, mut tcp) = (server.connect(), server.connect_tcp(1));
    let seen = ["/a/f", "/b/f", "/d/f", "/e/f", "/f"].map(|path| (status(&mut unix, path), status(&mut tcp, path)));
    assert_eq!(seen, [(200, 403), (403, 200), (200, 200), (200, 403), (200, 200)]);
    server.wait_logged("access forbidden by rule, client: unix:, server: , request: \"GET /b/f HTTP/1.1\", host: \"");
    server.wait_logged("access forbidden by rule, client: 127.0.0.1, server: , request: \"GET /e/f HTTP/1.1\"");
    server.stop();
}

fn a_level_with_rules_of_its_own_takes_none_from_outside(driver: Driver) {
    let server = setup(
        driver,
        "deny all;
         location / { }
         location /b/ { allow unix:; location /b/c/ { deny 192.0.2.1; } }
         location /d/ { error_page 403 /e/f; }
         location /e/ { allow all; }",
    )
    .start();
    let mut client = server.connect();
    let seen = ["/f", "/b/f", "/b/c/f"].map(|path| status(&mut client, path));
    assert_eq!(seen, [403, 200, 200]);
    // Rules also apply to internal redirects, each at its target.
    let page = client.get("/d/f");
    assert_eq!((page.status, page.text()), (403, "this is e/f"));
    server.stop();
}

const USERS: &str = "anna:{PLAIN}secret\nbert:{PLAIN}other\n";

fn all_or_any_have_to_be_satisfied(driver: Driver) {
    let server = setup(
        driver,
        "auth_basic \"the realm\"; auth_basic_user_file %DIR%/users;
         location /a/ { satisfy all; allow all; }
         location /b/ { satisfy any; allow unix:; deny all; }
         location /d/ { satisfy any; deny all; auth_basic off; }
         location /e/ { deny unix:; allow all; }",
    )
    .file("users", USERS)
    .start();
    let (mut unix, mut tcp) = (server.connect(), server.connect_tcp(1));
    let right = basic("anna", "secret");
    let wrong = basic("anna", "other");
    let mut seen = |path: &str| {
        let both = |fields: &str, unix: &mut Client, tcp: &mut Client| {
            [unix, tcp].map(|client| ask(client, "GET", path, fields).status)
        };
        [both("", &mut unix, &mut tcp), both(&right, &mut unix, &mut tcp), both(&wrong, &mut unix, &mut tcp)]
    };
    assert_eq!(seen("/a/f"), [[401, 401], [200, 200], [401, 401]]);
    assert_eq!(seen("/b/f"), [[200, 401], [200, 200], [200, 401]]);
    assert_eq!(seen("/d/f"), [[403, 403]; 3]);
    assert_eq!(seen("/e/f"), [[403, 401], [403, 200], [403, 401]]);
    let response = ask(&mut unix, "GET", "/b/f", "");
    assert_eq!(response.header("WWW-Authenticate"), None);
    server.wait_logged("access forbidden by rule, client: unix:, server: , request: \"GET /d/f HTTP/1.1\"");
    server.stop();
}

fn other_methods_have_settings_of_their_own(driver: Driver) {
    let server = setup(
        driver,
        "location /a/ { limit_except GET { deny all; } }
         location /b/ { limit_except get Post { deny all; } }
         location /d/ { limit_except PROPFIND { deny all; } }
         location /e/ { deny all; limit_except GET { allow all; } }
         location = /gif { empty_gif; limit_except GET { allow all; } }
         location = /x { error_page 404 = @named; }
         location @named { limit_except POST { deny all; } return 200 named; }",
    )
    .start();
    let mut client = server.connect();
    let mut statuses = |path: &str, methods: &[&str]| -> Vec<u16> {
        methods.iter().map(|method| ask(&mut client, method, path, "").status).collect()
    };
    let all = ["GET", "HEAD", "POST", "PUT", "PROPFIND", "FROBNICATE"];
    // A file can only answer GET and HEAD: other permitted methods get 405.
    assert_eq!(statuses("/a/f", &all), [200, 200, 403, 403, 403, 403]);
    assert_eq!(statuses("/b/f", &all), [200, 200, 405, 403, 403, 403]);
    assert_eq!(statuses("/d/f", &all), [403, 403, 403, 403, 405, 403]);
    assert_eq!(statuses("/e/f", &all), [403, 403, 405, 405, 405, 405]);
    // The content handler of the location answers here.
    assert_eq!(statuses("/gif", &["GET", "POST", "DELETE"]), [200, 405, 405]);
    // A named location is like any other.
    assert_eq!(statuses("/x", &["GET"]), [403]);
    server.stop();
}

/// Hashes of `password` in other formats.
const FORMS: &[(&str, &str)] = &[
    ("des", "abJnggxhB/yWI"),
    ("md5", "$1$salt$qJH7.N4xYta3aEG/dfqo/0"),
    ("sha256", "$5$rounds=1000$salt$p.wiWs2zrZ7irikO2AL64QDIJo00A3KDq2xWHpLJGgB"),
    (
        "sha512",
        "$6$rounds=1000$salt$O0nhCLTaysO7YRx7RhswA9LUudDbe8n/29Fg0mCv48MlTSygeX82/gn5a5m7.zIERei.MTm0LX6AbQbQLYGS5.",
    ),
    ("bcrypt", "$2y$04$abcdefghijklmnopqrstuughE8Ev8uGFaUgY2cNEySvxngrb/Jzdm"),
    ("yescrypt", "$y$j75$abcdefgh$hycRI05iyPwUdPZDaw/SJaABdj2h8B1Bgxi1Z/4Xke0"),
    ("apr1", "$apr1$abcdefgh$FBwExRW4dCc8aL.OvjpIE1"),
    ("plain", "{PLAIN}password"),
    ("sha", "{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g="),
    ("ssha", "{SSHA}yI6cZwQadOA1e+/f+T+H3eCQQhRzYWx0"),
];

fn passwords_of_every_form_are_understood(driver: Driver) {
    let users: String = FORMS.iter().map(|(user, stored)| format!("{user}:{stored}\n")).collect();
    let server = setup(driver, "auth_basic realm; auth_basic_user_file %DIR%/users;").file("users", users).start();
    let mut client = server.connect();
    for (user, stored) in FORMS {
        for (password, expected) in [("password", 200), ("passwort", 401), ("password", 200)] {
            let response = ask(&mut client, "GET", "/f", &basic(user, password));
            assert_eq!(response.status, expected, "{stored} with {password}\n{server}");
        }
    }
    server.wait_logged("user \"des\": password mismatch, client: unix:, server: , request: \"GET /f HTTP/1.1\"");
    server.stop();
}

fn without_the_right_password_one_is_asked_for_it(driver: Driver) {
    let server = setup(driver, "auth_basic \"closed site\"; auth_basic_user_file %DIR%/users;")
        .file("users", format!("{USERS}strange:$9$what\n"))
        .start();
    let mut client = server.connect();
    let challenged = [
        "".to_owned(),
        "Authorization: Bearer YW5uYTpzZWNyZXQ=\r\n".to_owned(),
        "Authorization: Basic YW5uYQ==\r\n".to_owned(),
        "Authorization: Basic ???\r\n".to_owned(),
        basic("anna", ""),
        basic("anna", "secret\0"),
        basic("Anna", "secret"),
        basic("ann", "secret"),
        basic("annab", "secret"),
        basic("li\nne", "secret"),
        basic("strange", "$9$what"),
    ];
    for fields in challenged {
        let response = ask(&mut client, "GET", "/f", &fields);
        assert_eq!(response.status, 401, "{fields}");
        assert_eq!(response.header("WWW-Authenticate"), Some("Basic realm=\"closed site\""), "{fields}");
    }
    server.wait_logged("no user/password was provided for basic authentication");
    server.wait_logged(&server.directory.replaced("user \"Anna\" was not found in \"%DIR%/users\""));
    // The client's user name cannot break its log line.
    server.wait_logged("user \"li\\x0Ane\" was not found");
    assert_eq!(ask(&mut client, "GET", "/f", &basic("anna", "secret")).status, 200);
    let line = server.directory.wait_line("access.log", "\"GET /f HTTP/1.1\" 200");
    assert!(line.starts_with("unix: - anna ["), "{line}");
    server.stop();
}

fn changes_to_a_password_file_count_at_once(driver: Driver) {
    let server = setup(driver, "auth_basic realm; auth_basic_user_file %DIR%/users;").file("users", USERS).start();
    let path = server.directory.path().join("users");
    // Its modification time seems old although the file is new: its contents must not be cached.
    let age = |path: &std::path::Path| {
        let file = std::fs::File::options().write(true).open(path).expect("it is there");
        file.set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).expect("it can be");
    };
    age(&path);
    let mut client = server.connect();
    let mut statuses = |users: [(&str, &str); 3]| {
        users.map(|(user, password)| ask(&mut client, "GET", "/f", &basic(user, password)).status)
    };
    let all = [("anna", "secret"), ("bert", "other"), ("anna", "new")];
    assert_eq!(statuses(all), [200, 200, 401]);
    assert_eq!(statuses(all), [200, 200, 401]);
    server.directory.write("users", "anna:{PLAIN}new\n");
    assert_eq!(statuses(all), [401, 401, 200]);
    // Another file in its place, of the same length and the same age.
    server.directory.write("users", USERS);
    age(&path);
    assert_eq!(statuses(all), [200, 200, 401]);
    server.directory.write("others", USERS.replace("secret", "Secret"));
    age(&server.directory.path().join("others"));
    std::fs::rename(server.directory.path().join("others"), &path).expect("it can be moved");
    assert_eq!(statuses(all), [401, 200, 401]);
    server.stop();
}

fn unreadable_password_file_lets_no_user_in(driver: Driver) {
    let server = setup(
        driver,
        "auth_basic realm;
         location /a/ { auth_basic_user_file missing; }
         location /b/ { auth_basic_user_file %DIR%; }
         location /d/ { auth_basic_user_file %DIR%/f/x; }",
    )
    .file("f", "")
    .start();
    let anna = basic("anna", "secret");
    let seen = ["/a/f", "/b/f", "/d/f"].map(|path| ask(&mut server.connect(), "GET", path, &anna).status);
    assert_eq!(seen, [403, 500, 500]);
    // Relative to the directory of the configuration.
    server.wait_logged(&server.directory.replaced("open() \"%DIR%/missing\" failed (2: No such file or directory)"));
    server.wait_logged(&server.directory.replaced("pread() \"%DIR%\" failed (21: Is a directory)"));
    server.wait_logged(&server.directory.replaced("open() \"%DIR%/f/x\" failed (20: Not a directory)"));
    server.stop();
}

fn the_password_file_may_depend_on_the_request(driver: Driver) {
    let server = setup(driver, "auth_basic $arg_realm; auth_basic_user_file $arg_file;")
        .file("one", "anna:{PLAIN}1\n")
        .file("two", "anna:{PLAIN}2\n")
        .start();
    let mut client = server.connect();
    let mut status = |args: &str| ask(&mut client, "GET", &format!("/f?{args}"), &basic("anna", "1")).status;
    assert_eq!(status("realm=r&file=one"), 200);
    assert_eq!(status("realm=r&file=two"), 401);
    assert_eq!(status("realm=r&file=three"), 403);
    assert_eq!(status("realm=off&file=three"), 200);
    // But a variable cannot lead out of the directory.
    assert_eq!((status("realm=r&file=x/../one"), status("realm=r&file=./one")), (403, 200));
    server.stop();
}

fn a_password_may_be_needed_for_some_methods_only(driver: Driver) {
    let server =
        setup(driver, "location / { limit_except GET { auth_basic realm; auth_basic_user_file %DIR%/users; } }")
            .file("users", USERS)
            .start();
    let mut client = server.connect();
    assert_eq!(ask(&mut client, "GET", "/f", "").status, 200);
    assert_eq!(ask(&mut client, "PUT", "/f", "").status, 401);
    assert_eq!(ask(&mut client, "PUT", "/f", &basic("anna", "secret")).status, 405);
    server.stop();
}

fn wrong_password_is_delayed(driver: Driver) {
    let server = setup(
        driver,
        "auth_basic realm; auth_basic_user_file %DIR%/users;
         location /a/ { auth_delay 300ms; }
         location /b/ { auth_delay 300ms; satisfy any; deny all; }
         location /d/ { auth_delay 1h; deny all; }",
    )
    .file("users", USERS)
    .start();
    let mut client = server.connect();
    for path in ["/a/f", "/b/f"] {
        let asked = Instant::now();
        assert_eq!(ask(&mut client, "GET", path, &basic("anna", "other")).status, 401);
        // Less than the whole delay: the worker's clock stands still within a turn, which may be long.
        assert!(asked.elapsed() >= Duration::from_millis(100), "{path}: {:?}", asked.elapsed());
        assert_eq!(ask(&mut client, "GET", path, &basic("anna", "secret")).status, 200);
    }
    assert_eq!(ask(&mut client, "GET", "/d/f", "").status, 403);
    server.wait_logged("delaying unauthorized request, client: unix:");
    server.stop();
}

fn a_client_that_leaves_while_it_waits_is_logged(driver: Driver) {
    let server = setup(driver, "auth_basic realm; auth_basic_user_file users; auth_delay 1h;").start();
    let mut client = server.connect();
    client.send("GET /left HTTP/1.1\r\nHost: h\r\n\r\n");
    server.wait_logged("delaying unauthorized request");
    drop(client);
    server
        .wait_logged("client prematurely closed connection, client: unix:, server: , request: \"GET /left HTTP/1.1\"");
    server.directory.wait_line("access.log", "\"GET /left HTTP/1.1\" 499");
    server.stop();
}

fn slow_password_hash_delays_no_other_requests(driver: Driver) {
    // A hash that takes minutes to verify.
    const SLOW: &str = "slow:$2y$20$abcdefghijklmnopqrstuuWG29KuyeAicPCJODk1zjyGvyQUU2awu\n";
    let server = setup(driver, "location /a/ { auth_basic realm; auth_basic_user_file %DIR%/users; } location / { }")
        .file("users", SLOW)
        .start();
    // More requests than the pool has threads.
    let slow: Vec<Client> = (0..20)
        .map(|_| {
            let mut client = server.connect();
            client.send(format!("GET /a/f HTTP/1.1\r\nHost: h\r\n{}\r\n", basic("slow", "password")));
            client
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(server.get("/f").status, 200);
    }
    drop(slow);
    server.directory.wait_until("twenty that left", |directory| {
        let log = directory.try_read("access.log").unwrap_or_default();
        log.lines().filter(|line| line.contains("\"GET /a/f HTTP/1.1\" 499")).count() == 20
    });
    server.stop();
}

/// Answers with the client's address in a response field.
const TELL: &str = "add_header X-Client \"$remote_addr|$remote_port|$realip_remote_addr\";";

#[track_caller]
fn client_of(client: &mut Client, path: &str, fields: &str) -> String {
    let response = ask(client, "GET", path, fields);
    response.header("X-Client").unwrap_or_default().to_owned()
}

fn trusted_servers_set_the_client_address(driver: Driver) {
    let server = setup(
        driver,
        &format!(
            "set_real_ip_from unix:; {TELL}
             location /a/ {{ deny 192.0.2.1; allow all; }}
             location /b/ {{ real_ip_header X-Client-Is; set_real_ip_from localhost; }}
             location /d/ {{ real_ip_header x-real-ip; }}"
        ),
    )
    .start();
    let (mut unix, mut tcp) = (server.connect(), server.connect_tcp(1));
    let real = "X-Real-IP: 192.0.2.1\r\n";
    assert_eq!(client_of(&mut unix, "/f", real), "192.0.2.1||unix:");
    assert_eq!(client_of(&mut unix, "/f", "X-Real-IP: [2001:DB8::1]:44\r\n"), "2001:db8::1|44|unix:");
    assert_eq!(client_of(&mut unix, "/d/f", real), "192.0.2.1||unix:");
    // The address applies to access rules and logs, and only for this request.
    assert_eq!(ask(&mut unix, "GET", "/a/f", real).status, 403);
    assert_eq!(ask(&mut unix, "GET", "/a/f", "").status, 200);
    server.wait_logged("access forbidden by rule, client: 192.0.2.1, server: ");
    server.directory.wait_line("access.log", "192.0.2.1 - - [");
    // A location may trust other proxies and use another field.
    assert_eq!(client_of(&mut unix, "/b/f", real), "192.0.2.1||unix:", "the server has asked before");
    assert_eq!(client_of(&mut tcp, "/b/f", "X-Client-Is: 192.0.2.9:80\r\n"), "192.0.2.9|80|127.0.0.1");
    server.stop();
}

fn untrusted_address_cannot_set_the_client_address(driver: Driver) {
    let server = setup(driver, &format!("set_real_ip_from unix:; set_real_ip_from 10.0.0.0/8; {TELL}")).start();
    let (mut unix, mut tcp) = (server.connect(), server.connect_tcp(1));
    assert!(client_of(&mut tcp, "/f", "X-Real-IP: 192.0.2.1\r\n").starts_with("127.0.0.1|"));
    for nonsense in ["", "unknown", "192.0.2.256", "192.0.2.1:99999", "192.0.2.1 x", "[::1"] {
        assert_eq!(client_of(&mut unix, "/f", &format!("X-Real-IP: {nonsense}\r\n")), "unix:||unix:", "{nonsense}");
    }
    server.stop();
}

fn the_client_is_found_behind_several_servers(driver: Driver) {
    let server = setup(
        driver,
        &format!(
            "set_real_ip_from unix:; set_real_ip_from 10.0.0.0/8; real_ip_header X-Forwarded-For; {TELL}
             location /a/ {{ set_real_ip_from unix:; }}"
        ),
    )
    .start();
    let mut client = server.connect();
    let list = "X-Forwarded-For: 192.0.2.1, 192.0.2.2\r\nX-Forwarded-For: 10.1.1.1\r\n";
    assert_eq!(client_of(&mut client, "/f", list), "10.1.1.1||unix:");
    server.stop();
    let recursive = format!(
        "set_real_ip_from unix:; set_real_ip_from 10.0.0.0/8; real_ip_header X-Forwarded-For; real_ip_recursive on; \
         {TELL}"
    );
    let server = setup(driver, &recursive).start();
    let mut client = server.connect();
    assert_eq!(client_of(&mut client, "/f", list), "192.0.2.2||unix:");
    assert_eq!(client_of(&mut client, "/f", "X-Forwarded-For: x, 10.1.1.1\r\n"), "10.1.1.1||unix:");
    server.stop();
}

fn client_address_comes_from_the_proxy_protocol(driver: Driver) {
    let server = setup(
        driver,
        &format!(
            "real_ip_header proxy_protocol; {TELL}
             location / {{ set_real_ip_from unix:; deny 192.0.2.9; allow all; }}
             location /a/ {{ set_real_ip_from 10.0.0.0/8; }}"
        ),
    )
    .replace("listen %UNIX%;", "listen %UNIX% proxy_protocol;")
    .start();
    let proxied = |line: &str| {
        let mut client = server.connect();
        client.send(line);
        client
    };
    let mut client = proxied("PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\r\n");
    assert_eq!(client_of(&mut client, "/f", "X-Real-IP: 192.0.2.7\r\n"), "192.0.2.1|1234|unix:");
    assert_eq!(client_of(&mut client, "/f", ""), "192.0.2.1|1234|unix:");
    assert_eq!(client_of(&mut client, "/a/f", ""), "unix:||unix:");
    assert_eq!(client_of(&mut proxied("PROXY UNKNOWN\r\n"), "/f", ""), "unix:||unix:");
    let mut refused = proxied("PROXY TCP4 192.0.2.9 192.0.2.2 1234 5678\r\n");
    assert_eq!(status(&mut refused, "/f"), 403);
    server.stop();
}
