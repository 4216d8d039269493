//! proxy: what servers are asked for, what of the request they get, and what of their answers the client gets.

mod support;

use support::{Asked, Backend, Client, Driver, Response, Serving, Setup, with_each_driver};

with_each_driver!(the_location_of_a_uri_is_replaced_as_documented,);


/// A request for `target` of the server named so.
fn ask(client: &mut Client, host: &str, target: &str) -> Response {
    client.ask(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
}

/// Sends one response with these fields, each with its line's end, and this body.
fn respond(client: &mut Client, fields: &str, body: &str) {
    client.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()));
}

/// A backend that answers with the target that it was asked for.
fn echo() -> Serving {
    Backend::tcp().serve(|asked, client| {
        respond(client, "", &asked.target);
        true
    })
}

/// What a server says, and what comes out of which targets.
type Row = (&'static str, &'static [(&'static str, &'static str)]);

/// `B` is the server.
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
    // With one: in place of the location.
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
    // Changed by `rewrite ... break`: the whole changed URI, and that of `proxy_pass` is ignored.
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
    // With variables: exactly what they say, or the request's where they say no URI.
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
    // Where nothing can be replaced.
    (
        "location / { try_files /nothing @there; } location @there { proxy_pass http://B; }
         location /changed/ { rewrite ^/changed/(.*)$ /to/$1 break; try_files /nothing @there; }
         location /error { error_page 404 @there; return 404; }",
        &[("/a%20b//c?d", "/a%20b//c?d"), ("/changed/x%20y?z", "/to/x%20y?z"), ("/error%20?x", "/error%20?x")],
    ),
    (
        "location / { if ($arg_a) { proxy_pass http://B; } return 404; }
         location /set/ { proxy_pass http://B/main/; if ($arg_a) { set $x y; } if ($arg_b) { proxy_pass http://B; } }",
        &[("/x%20?a=1", "/x%20?a=1"), ("/set/x?a=1", "/main/x?a=1"), ("/set/x?b=1", "/set/x?b=1")],
    ),
    // Elsewhere: as the redirect has left it, encoded again.
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
    (
        "location / { limit_except POST { proxy_pass http://B; } return 404; }",
        &[("/x%20?a=1", "/x%20?a=1")],
    ),
];

fn the_location_of_a_uri_is_replaced_as_documented(driver: Driver) {
    let backend = echo();
    let server = |(number, (conf, _)): (usize, &Row)| {
        format!("server {{ listen %UNIX%; server_name h{number}; {conf} }}\n").replace('B', &backend.address)
    };
    let configuration: String = URIS.iter().enumerate().map(server).collect();
    let server = Setup::http(driver, &configuration).start();
    let mut client = server.connect();
    for (number, (conf, targets)) in URIS.iter().enumerate() {
        for (target, expected) in *targets {
            let target = target.replace("http://h", &format!("http://h{number}"));
            let response = ask(&mut client, &format!("h{number}"), &target);
            let shown = String::from_utf8_lossy(&response.body);
            assert_eq!((response.status, &*shown), (200, *expected), "{target} with {conf}");
        }
    }
    server.stop();
}
