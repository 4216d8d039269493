//! proxy: the URIs that upstream servers are asked for, and the parts of the request that they receive.

use crate::support::answers::{ask, echo, mirror, respond};
use crate::support::{Backend, Driver, Setup, with_each_driver};

with_each_driver!(
    the_location_of_a_uri_is_replaced_as_documented,
    a_request_has_the_usual_fields_and_those_that_are_set,
    fields_that_are_set_are_inherited_all_or_none,
    fields_of_the_clients_connection_are_not_passed_on,
    forwarded_names_the_client_the_host_and_the_protocol,
    a_unix_socket_is_a_server_too,
);

/// Configuration, and pairs of the client's target and the target that the upstream server receives.
type Row = (&'static str, &'static [(&'static str, &'static str)]);

/// `B` stands for the upstream server.
const URIS: &[Row] = &[
    // Without a URI: as the client sent it.
    (
        "location / { proxy_pass http://B; }",
        &[
            ("/a/b?x=1", "/a/b?x=1"),
            ("/a%20b//%2e%2E/c/../d?x=%20", "/a%20b//%2e%2E/c/../d?x=%20"),
            ("/?", "/?"),
            ("/\u{e4}%e4", "/\u{e4}%e4"),
            ("http://h/abs/x%20y?z", "/abs/x%20y?z"),
            ("http://h?x=1", "/?x=1"),
            ("http://h", "/"),
        ],
    ),
    (
        "location /name/ { proxy_pass http://B; } location ~ ^/re { proxy_pass http://B; }",
        &[("/name/x%2fy", "/name/x%2fy"), ("/other/../name/z", "/other/../name/z"), ("/re%20a/b", "/re%20a/b")],
    ),
    // With a URI: it replaces the location's prefix.
    (
        "location /name/ { proxy_pass http://B/remote/; }",
        &[
            ("/name/x", "/remote/x"),
            ("/name/", "/remote/"),
            ("/name/?a=b&c", "/remote/?a=b&c"),
            ("/name//x/./y/../z", "/remote/x/z"),
            ("/%6eame/x", "/remote/x"),
            ("/name/x%20y", "/remote/x%20y"),
            ("/name/x%3fy%23z", "/remote/x%3Fy%23z"),
            ("/name/x%25y", "/remote/x%25y"),
            ("/name/a%2fb", "/remote/a/b"),
            ("/name/a%2Fb%2e%2e", "/remote/a/b.."),
            ("/name/%0d%0aX:y", "/remote/%0D%0AX:y"),
            ("/name/\u{e4}", "/remote/\u{e4}"),
            ("/name/%c3%a4", "/remote/%C3%A4"),
            ("http://h/name/x?y", "/remote/x?y"),
        ],
    ),
    ("merge_slashes off; location /name/ { proxy_pass http://B/remote/; }", &[("/name//x", "/remote//x")]),
    ("location /name/ { proxy_pass http://B/remote; }", &[("/name/x", "/remotex"), ("/name/", "/remote")]),
    ("location /name { proxy_pass http://B/remote/; }", &[("/name/x", "/remote//x"), ("/names", "/remote/s")]),
    (
        "location /name { proxy_pass http://B/bare; } location ^~ /name/ { proxy_pass http://B/slashed/; }",
        &[("/name", "/bare"), ("/name/", "/slashed/"), ("/name/x", "/slashed/x"), ("/names", "/bares")],
    ),
    ("location / { proxy_pass http://B/; }", &[("/a%20b/./c?d", "/a%20b/c?d"), ("/", "/")]),
    ("location / { proxy_pass http://B?x=1; }", &[("/a", "/?x=1a"), ("/?b", "/?x=1?b")]),
    (
        "location = /exact { proxy_pass http://B/other?z=1; } location ^~ /first/ { proxy_pass http://B/1/; }",
        &[("/exact", "/other?z=1"), ("/exact?q", "/other?z=1?q"), ("/first/x", "/1/x")],
    ),
    (
        "location /outer/ { proxy_pass http://B/o/; location /outer/inner/ { proxy_pass http://B/i/; } }",
        &[("/outer/x", "/o/x"), ("/outer/inner/x", "/i/x")],
    ),
    // After `rewrite ... break`: the whole changed URI; the URI of `proxy_pass` is ignored.
    (
        "location /name/ { rewrite /name/([^/]+) /users?name=$1 break; proxy_pass http://B/ignored/; }
         location /plain/ { rewrite ^/plain/(.*)$ /changed/$1 break; proxy_pass http://B; }",
        &[
            ("/name/bob", "/users?name=bob"),
            ("/name/bob?a=1", "/users?name=bob&a=1"),
            ("/plain/a%20b?x", "/changed/a%20b?x"),
            ("/plain/a%3Fb", "/changed/a%3Fb"),
        ],
    ),
    // With variables: exactly their value, or the request's URI if they contain none.
    (
        "set $b B; location /uri/ { proxy_pass http://B$request_uri; }
         location /fixed/ { proxy_pass http://$b/fixed; }
         location /args/ { proxy_pass http://$b/with$is_args$args; }
         location /none/ { proxy_pass http://$b; }
         location /query/ { proxy_pass http://$b?q=$arg_q; }
         location ~ ^/re/(.*)$ { proxy_pass http://$b/$1; }
         location /changed/ { rewrite ^/changed/(.*)$ /to/$1 break; proxy_pass http://$b; }
         location /decoded/ { proxy_pass http://$b$uri; }",
        &[
            ("/uri/x%20y//?z", "/uri/x%20y//?z"),
            ("http://h/uri/x?z", "/uri/x?z"),
            ("/fixed/x?y", "/fixed"),
            ("/args/x?y=1", "/with?y=1"),
            ("/args/x", "/with"),
            ("/none/x%20y?z", "/none/x%20y?z"),
            ("/query/?q=7", "/?q=7"),
            ("/re/x/y", "/x/y"),
            ("/changed/x%20y?z", "/to/x%20y?z"),
            ("/decoded/xy", "/decoded/xy"),
        ],
    ),
    // Locations without a prefix that could be replaced.
    (
        "location / { try_files /nothing @there; } location @there { proxy_pass http://B; }
         location /changed/ { rewrite ^/changed/(.*)$ /to/$1 break; try_files /nothing @there; }
         location /error { error_page 404 =200 @there; return 404; }",
        &[("/a%20b//c?d", "/a%20b//c?d"), ("/changed/x%20y?z", "/to/x%20y?z"), ("/error%20?x", "/error%20?x")],
    ),
    (
        "location / { if ($arg_a) { proxy_pass http://B; } }
         location /set/ { proxy_pass http://B/main/; if ($arg_a) { set $x y; } if ($arg_b) { proxy_pass http://B; } }",
        &[("/x%20?a=1", "/x%20?a=1"), ("/set/x?a=1", "/main/x?a=1"), ("/set/x?b=1", "/set/x?b=1")],
    ),
    // After a redirect: the changed URI, encoded again.
    (
        "location /start { rewrite ^/start(.*)$ /out/new$1 last; }
         location /error { error_page 404 =200 /out/e?f=$arg_x; return 404; }
         location /try/ { try_files /nothing /out/t$is_args$args; }
         location /out/ { proxy_pass http://B; } location /replaced/ { proxy_pass http://B/r/; }
         location /second { rewrite ^/second(.*)$ /replaced$1 last; }",
        &[
            ("/start/a%20b?x=%20", "/out/new/a%20b?x=%20"),
            ("/error?x=1", "/out/e?f=1"),
            ("/try/x?y=1", "/out/t?y=1"),
            ("/second/a%20b%3f?x", "/r/a%20b%3F?x"),
        ],
    ),
    ("location / { limit_except POST { proxy_pass http://B; } return 404; }", &[("/x%20?a=1", "/x%20?a=1")]),
];

fn the_location_of_a_uri_is_replaced_as_documented(driver: Driver) {
    let backend = echo();
    let server = |(number, (conf, _)): (usize, &Row)| {
        format!("server {{ listen %UNIX%; server_name h{number}; {conf} }}\n").replace('B', &backend.address)
    };
    let configuration: String = URIS.iter().enumerate().map(server).collect();
    let server = Setup::http(driver, &configuration).start();
    let mut client = server.connect();
    let mut wrong = Vec::new();
    for (number, (conf, targets)) in URIS.iter().enumerate() {
        for (target, expected) in *targets {
            let target = target.replace("http://h", &format!("http://h{number}"));
            let response = ask(&mut client, &format!("h{number}"), &target);
            let shown = String::from_utf8_lossy(&response.body);
            if (response.status, &*shown) != (200, *expected) {
                wrong.push(format!("{target} with {conf}: {} {shown}, not {expected}", response.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    server.stop();
}

fn a_request_has_the_usual_fields_and_those_that_are_set(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://B; }
         location /1.0 { proxy_http_version 1.0; proxy_pass http://B; }
         location /set { proxy_pass http://B;
             proxy_set_header Host $http_host; proxy_set_header X-One 1; proxy_set_header X-One 2;
             proxy_set_header X-Own \"\"; proxy_set_header X-None $arg_none;
             proxy_set_header x-ADDED \"<$remote_addr>\";
             proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; }
         location /empty { proxy_pass http://B; proxy_set_header Host \"\"; proxy_set_header Connection close;
             proxy_set_header Content-Length 7; proxy_set_header Transfer-Encoding chunked; }
         location /variables { return 200 $proxy_host,$proxy_port; }
         location /named/ { proxy_set_header X-Host $proxy_host; proxy_set_header X-Port $proxy_port;
             proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    let mut get = |target: &str| {
        let fields = "X-Own: a\r\nX-Own: b\r\nx_under: c\r\nAccept: */*\r\nX-Forwarded-For: 1.1.1.1\r\n";
        let response = client.ask(format!("GET {target} HTTP/1.1\r\nHost: h:81\r\n{fields}\r\n"));
        response.text().replace(&backend.address, "B")
    };
    let own = "X-Own: a\nX-Own: b\n";
    let rest = "Accept: */*\nX-Forwarded-For: 1.1.1.1\n";
    assert_eq!(get("/a"), format!("GET /a HTTP/1.1\nHost: B\n{own}{rest}\n"));
    assert_eq!(get("/1.0"), format!("GET /1.0 HTTP/1.0\nHost: B\n{own}{rest}\n"));
    let set = "X-One: 1\nX-One: 2\nx-ADDED: <unix:>\nX-Forwarded-For: 1.1.1.1, unix:\n";
    assert_eq!(get("/set"), format!("GET /set HTTP/1.1\nHost: h:81\n{set}Accept: */*\n\n"));
    // A request in HTTP/1.1 has a Host, and the configuration cannot set the length.
    assert_eq!(get("/empty"), format!("GET /empty HTTP/1.1\nHost: B\nConnection: close\n{own}{rest}\n"));
    assert_eq!(get("/variables"), ",");
    let port = backend.address.rsplit(':').next().expect("a port");
    assert_eq!(get("/named/"), format!("GET /named/ HTTP/1.1\nHost: B\nX-Host: B\nX-Port: {port}\n{own}{rest}\n"));
    server.stop();
}

fn fields_that_are_set_are_inherited_all_or_none(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "proxy_set_header X-Outer 1; proxy_set_header X-More 2;
         location /inherits { proxy_pass http://B; }
         location /own { proxy_set_header X-Own 3; proxy_pass http://B; }
         location /more { proxy_pass http://B; location /more/inner { proxy_pass http://B; } }",
    );
    let server = setup.replace("B", &backend.address).start();
    for (target, expected) in
        [("/inherits", "X-Outer: 1\nX-More: 2\n"), ("/own", "X-Own: 3\n"), ("/more/inner", "X-Outer: 1\nX-More: 2\n")]
    {
        let text = server.connect().ask(format!("GET {target} HTTP/1.0\r\n\r\n")).text().to_owned();
        assert_eq!(text, format!("GET {target} HTTP/1.1\nHost: {}\n{expected}\n", backend.address));
    }
    server.stop();
}

fn fields_of_the_clients_connection_are_not_passed_on(driver: Driver) {
    let backend = mirror();
    let server = Setup::server(driver, "location / { proxy_pass http://B; }").replace("B", &backend.address).start();
    let fields = "Connection: keep-alive, X-Listed , Authorization,Cookie, Content-Length, Host, HTTP2-Settings\r\n\
        Connection: x-ALSO\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\n\
        Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nX-Listed: 1\r\nX-Also: 2\r\nX-Stays: 3\r\n\
        Authorization: Basic x\r\nCookie: a=b\r\nContent-Length: 2\r\n";
    let response = server.connect().ask(format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\nab"));
    assert_eq!(
        response.text().replace(&backend.address, "B"),
        "POST / HTTP/1.1\nHost: B\nContent-Length: 2\nX-Stays: 3\nAuthorization: Basic x\nCookie: a=b\n\nab"
    );
    server.stop();
}

fn a_unix_socket_is_a_server_too(driver: Driver) {
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://unix:%DIR%/backend; } \
         location /uri/ { proxy_pass http://unix:%DIR%/backend:/to/; }
         location /variable/ { set $b unix:%DIR%/backend; proxy_pass http://$b:/v$request_uri; }
         location /missing { proxy_pass http://unix:%DIR%/missing; }",
    );
    let server = setup.start();
    let backend = Backend::unix(&server.directory.path().join("backend")).serve(|asked, client| {
        respond(client, "", &format!("{} {}", asked.header("Host").expect("a host"), asked.target));
        true
    });
    let mut client = server.connect();
    assert_eq!(client.get("/a?b").text(), "localhost /a?b");
    assert_eq!(client.get("/uri/a").text(), "localhost /to/a");
    assert_eq!(client.get("/variable/a").text(), "localhost /v/variable/a");
    assert_eq!(client.get("/missing").status, 502);
    server.wait_logged("connect() to unix:");
    server.wait_logged("failed (2: No such file or directory) while connecting to upstream");
    drop(backend);
    server.stop();
}

fn forwarded_names_the_client_the_host_and_the_protocol(driver: Driver) {
    let backend = mirror();
    let setup = Setup::http(
        driver,
        "server { listen %UNIX%; set_real_ip_from unix:; real_ip_header X-Client;
             proxy_set_header Forwarded $proxy_add_forwarded; proxy_pass_request_headers off;
             location / { proxy_pass http://ADDRESS; } }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    for (fields, expected) in [
        ("Host: a.example:81\r\nX-Client: 192.0.2.7\r\n", "for=192.0.2.7;host=\"a.example:81\";proto=http"),
        ("Host: h\r\nX-Client: 2001:db8::7\r\n", "for=\"[2001:db8::7]\";host=\"h\";proto=http"),
        ("Host: h\r\n", "for=unknown;host=\"h\";proto=http"),
        (
            "Host: h\r\nX-Client: 192.0.2.7\r\nForwarded: for=a\r\nforwarded: for=b;by=c, for=d\r\n",
            "for=a, for=b;by=c, for=d, for=192.0.2.7;host=\"h\";proto=http",
        ),
    ] {
        let shown = server.connect().ask(format!("GET / HTTP/1.1\r\n{fields}\r\n")).text().to_owned();
        assert!(shown.contains(&format!("\nForwarded: {expected}\n")), "{shown}");
    }
    server.stop();
}
