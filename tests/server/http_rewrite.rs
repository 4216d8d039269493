//! The rewrite module over real sockets: rewrite, if, set, break, return.

use rustix::process::Signal;

use crate::support::{Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    rewrites_change_path_and_arguments,
    rewrites_that_are_redirects_go_elsewhere,
    groups_are_encoded_where_the_uri_was,
    conditions_compare,
    conditions_ask_the_disk,
    steps_run_in_the_order_of_the_file,
    rewritten_requests_find_their_location_or_stay,
    an_if_is_a_scope_of_its_own,
    an_if_keeps_the_content_of_its_location,
    groups_are_those_of_the_last_match,
    arguments_may_be_set,
    variables_that_nginx_calls_changeable_may_be_set,
    variables_have_their_value_from_set_on,
    circles_of_rewrites_end_with_500,
    an_expression_that_explodes_ends_with_500,
    rewrites_are_logged_if_wanted,
);

/// Requests every path and compares status and text.
#[track_caller]
fn assert_answers(client: &mut Client, cases: &[(&str, u16, &str)]) {
    for (path, status, text) in cases {
        let response = client.get(path);
        assert_eq!((response.status, response.text()), (*status, *text), "{path}");
    }
}

#[track_caller]
fn assert_texts(client: &mut Client, cases: &[(&str, &str)]) {
    for (path, text) in cases {
        assert_answers(client, &[(path, 200, text)]);
    }
}

/// Target of the rewrites.
const ECHO: &str = "location /echo { return 200 \"$uri?$args\"; }";

fn rewrites_change_path_and_arguments(driver: Driver) {
    let server = Server::start(
        driver,
        &format!(
            "{ECHO}
             location /keep/ {{ rewrite ^/keep/(.*)$ /echo/$1 last; }}
             location /more/ {{ rewrite ^/more/(.*)$ /echo/$1?a=$1 last; }}
             location /drop/ {{ rewrite ^/drop/(.*)$ /echo/$1? last; }}
             location /only/ {{ rewrite ^/only/(.*)$ /echo?a=$1&b=$arg_b? last; }}
             location /groups {{ rewrite ^/groups/(a)?(b)?$ /echo/[$1][$2][$3] last; }}
             location /named {{ rewrite ^/named/(?<what>.*)$ /echo/${{what}}s last; }}
             location /none {{ rewrite ^/other$ /echo last; return 200 none; }}
             location /empty {{ rewrite ^ $arg_nothing last; }}"
        ),
    );
    let cases = [
        ("/keep/a?b=c", 200, "/echo/a?b=c"),
        ("/keep/a%2fb%3fc", 200, "/echo/a/b?c?"),
        ("/more/a", 200, "/echo/a?a=a"),
        ("/more/a?b=c", 200, "/echo/a?a=a&b=c"),
        ("/drop/a?b=c", 200, "/echo/a?"),
        ("/only/x?b=c", 200, "/echo?a=x&b=c"),
        ("/groups/ab", 200, "/echo/[a][b][]?"),
        ("/groups/b", 200, "/echo/[][b][]?"),
        ("/named/word", 200, "/echo/words?"),
        ("/none", 200, "none"),
    ];
    assert_answers(&mut server.connect(), &cases);
    assert_eq!(server.get("/empty").status, 500);
    server.wait_logged("[error]").find("the rewritten URI has a zero length").expect("the reason");
    server.stop();
}

fn rewrites_that_are_redirects_go_elsewhere(driver: Driver) {
    let server = Server::start(
        driver,
        "location /url/ { rewrite ^/url/(.*)$ http://other.example/$1; return 200 no; }
         location /scheme/ { rewrite ^/scheme/(.*)$ $scheme://other.example/$1?x=1 last; }
         location /found/ { rewrite ^/found/(.*)$ /x/$1?q=$1 redirect; }
         location /moved/ { rewrite ^/moved/(.*)$ /x/$1? permanent; }
         location /page/ { error_page 302 =200 /text; rewrite ^ /x redirect; }
         location = /text { return 200 text; }",
    );
    let mut client = server.connect();
    let places = [
        ("/url/a?b=c", 302, "http://other.example/a?b=c"),
        ("/url/a%20b%41", 302, "http://other.example/a%20bA"),
        ("/url/%C3%A9%3f", 302, "http://other.example/%C3%A9?"),
        ("/scheme/a?b=c", 302, "http://other.example/a?x=1&b=c"),
        ("/found/a%26b?c", 302, "http://localhost/x/a&b?q=a%26b&c"),
        ("/moved/a?c", 301, "http://localhost/x/a"),
    ];
    for (path, status, place) in places {
        let response = client.get(path);
        assert_eq!((response.status, response.header("Location")), (status, Some(place)), "{path}");
    }
    // A line end cannot get into the response head.
    let place = client.get("/url/%0d%0aSet-Cookie:x").header("Location").map(str::to_owned);
    assert!(!place.as_deref().unwrap_or_default().contains(['\r', '\n']), "{place:?}");
    assert_eq!(client.get("/page/x").status, 200);
    server.stop();
}

fn groups_are_encoded_where_the_uri_was(driver: Driver) {
    let server = Server::start(
        driver,
        &format!(
            "{ECHO}
             location /args/ {{ rewrite ^/args/(.*)$ /echo/$1?a=$1 last; }}
             location /set/ {{ if ($uri ~ ^/set/(.*)$) {{ set $value $1; }} return 200 $value; }}
             location /late/ {{
                 rewrite ^/late/(.*)$ /late/$1;
                 if ($uri ~ ^/late/(.*)$) {{ set $value $1; }}
                 return 200 $value;
             }}
             location ~ ^/text/(.*)$ {{ return 200 $1; }}"
        ),
    );
    let cases = [
        ("/args/a%26b%20c", "/echo/a&b c?a=a%26b%20c"),
        ("/args/a+b", "/echo/a+b?a=a%2Bb"),
        // The URI was not encoded, so its groups are not encoded either.
        ("/args/a&b", "/echo/a&b?a=a&b"),
        ("/args/a&b?c=%20", "/echo/a&b?a=a&b&c=%20"),
        // As in nginx, groups stay encoded until a rewrite has matched.
        ("/set/a%20b", "a%20b"),
        ("/late/a%20b", "a b"),
        ("/text/a%20b", "a b"),
    ];
    assert_texts(&mut server.connect(), &cases);
    server.stop();
}

fn conditions_compare(driver: Driver) {
    let server = Server::start(
        driver,
        "location / {
             set $r '';
             if ($arg_a) { set $r \"${r}s\"; }
             if ($arg_a = x1) { set $r \"${r}=\"; }
             if ( $arg_a != x1 ) { set $r \"${r}#\"; }
             if ($arg_a ~ ^x(.)) { set $r \"${r}~$1\"; }
             if ($arg_a ~* \"^x{1}\") { set $r \"${r}*\"; }
             if ($arg_a !~ ^x) { set $r \"${r}n\"; }
             if ($arg_a !~* ^x) { set $r \"${r}i\"; }
             if ($arg_a = \"$arg_b\") { set $r \"${r}b\"; }
             return 200 $r;
         }",
    );
    let cases = [
        ("/?b=0", "#ni"),
        ("/?a=", "#nib"),
        ("/?a=0", "#ni"),
        ("/?a=00", "s#ni"),
        ("/?a=x1", "s=~1*"),
        ("/?a=X2", "s#*n"),
        ("/?a=q&b=q", "s#nib"),
    ];
    assert_texts(&mut server.connect(), &cases);
    server.stop();
}

fn conditions_ask_the_disk(driver: Driver) {
    let server = Setup::server(
        driver,
        "location / {
             set $r '';
             set $file %DIR%/www$arg_f;
             if (-f $file) { set $r \"${r}f\"; }
             if (!-f $file) { set $r \"${r}F\"; }
             if (-d $file) { set $r \"${r}d\"; }
             if (!-d %DIR%/www$arg_f) { set $r \"${r}D\"; }
             if (-e $file) { set $r \"${r}e\"; }
             if (!-e $file) { set $r \"${r}E\"; }
             if (-x $file) { set $r \"${r}x\"; }
             if (!-x $file) { set $r \"${r}X\"; }
             return 200 $r;
         }
         location /after { if ($uri) { add_header X-If yes; } if (-f %DIR%/www/page) { return 200 file; }
         return 200 none; }
         location /page { root %DIR%/www; if (-f $request_filename) { return 200 file; }
         if (-d $request_filename) { return 200 directory; } return 200 none; }",
    )
    .file("www/page", "x")
    .file("www/dir/file", "x")
    .start();
    // The script continues after waiting for the disk, also inside an `if` that matched.
    let cases = [
        ("/after", "file"),
        ("/?f=/page", "fDeX"),
        ("/?f=/dir", "Fdex"),
        ("/?f=/dir/none", "FDEX"),
        ("/?f=/page/below", "FDEX"),
        ("/page", "file"),
        ("/page/", "none"),
    ];
    let mut client = server.connect();
    assert_texts(&mut client, &cases);
    let long = format!("/?f=/{}", "n".repeat(300));
    assert_texts(&mut client, &[(&long, "FDEX")]);
    server.stop();
}

fn steps_run_in_the_order_of_the_file(driver: Driver) {
    let server = Server::start(
        driver,
        &format!(
            "set $trace s;
             if ($arg_s) {{ set $trace \"${{trace}}i\"; rewrite ^/first/(.*)$ /second/$1; }}
             rewrite ^/second/(.*)$ /third/$1;
             set $trace \"${{trace}}e\";
             if ($arg_r) {{ return 403; }}
             {ECHO}
             location /first {{ return 200 \"first $trace\"; }}
             location /third {{
                 set $trace \"${{trace}}l\";
                 if ($arg_b) {{ set $trace \"${{trace}}b\"; break; set $trace \"${{trace}}never\"; }}
                 return 200 \"third $trace $uri\";
             }}
             location /again {{ set $a \"$a.\"; if ($a !~ ^....$) {{ rewrite ^ /again last; }}
             return 200 \"$trace $a\"; }}"
        ),
    );
    let cases = [
        ("/first/x", 200, "first se"),
        ("/first/x?s=1", 200, "third siel /third/x"),
        ("/second/x", 200, "third sel /third/x"),
        // Server rewrites run once; those of a location run each time.
        ("/again", 200, "se ...."),
    ];
    let mut client = server.connect();
    assert_answers(&mut client, &cases);
    assert_eq!((client.get("/x?r=1").status, client.get("/second/x?b=1").status), (403, 404));
    server.stop();
}

fn rewritten_requests_find_their_location_or_stay(driver: Driver) {
    let server = Setup::server(
        driver,
        &format!(
            "root %DIR%/www;
             rewrite ^/from-server/(.*)$ /inside/$1 last;
             {ECHO}
             location /inside {{ internal; return 200 inside; }}
             location /in {{ rewrite ^ /inside last; }}
             location /stay {{ add_header X-In stay; rewrite ^ /page break; return 200 no; }}
             location /stay-too {{ add_header X-In stay; rewrite ^ /page; break; return 200 no; }}
             location /on {{ rewrite ^/on /page; rewrite ^/page /echo/page; }}
             location /alias/ {{ alias %DIR%/www/; if ($arg_r) {{ rewrite ^ /alias/page break; }} }}
             location /named {{ error_page 404 = @name; return 404; }}
             location @name {{ rewrite ^/named/(.*)$ /echo/$1 last; }}
             location /lost {{ error_page 403 /lost/page; if ($uri = /lost) {{ return 403; }}
             rewrite ^/lost/(.*) /$1 break; }}"
        ),
    )
    .file("www/page", "page")
    .start();
    let cases = [
        ("/inside", 404, None),
        ("/in", 200, Some("inside")),
        ("/from-server/x", 200, Some("inside")),
        ("/stay", 200, Some("page")),
        ("/stay-too", 200, Some("page")),
        ("/on", 200, Some("/echo/page?")),
        ("/alias/page", 200, Some("page")),
        ("/named/x", 200, Some("/echo/x?")),
        ("/lost", 403, Some("page")),
    ];
    let mut client = server.connect();
    for (path, status, text) in cases {
        let response = client.get(path);
        assert_eq!(response.status, status, "{path}");
        text.inspect(|text| assert_eq!(response.text(), *text, "{path}"));
    }
    assert_eq!(client.get("/stay").header("X-In"), Some("stay"));
    // After a rewrite the prefix that alias replaces is unknown.
    assert_eq!(client.get("/alias/page?r=1").status, 500);
    server.wait_logged("\"alias\" cannot be used in location \"/alias/\" where URI was rewritten");
    let mut server = server;
    server.end(Signal::TERM);
}

fn an_if_is_a_scope_of_its_own(driver: Driver) {
    let server = Setup::server(
        driver,
        "location /last {
             if ($arg_a) { add_header X-A a; }
             if ($arg_b) { add_header X-B b; }
             return 204;
         }
         location /root { root %DIR%/one; if ($arg_two) { root %DIR%/two; } }
         location /tried { root %DIR%/one; if ($arg_a) { set $a 1; } try_files /fallback =404; }
         location /alias/ { alias %DIR%/one/; if ($arg_a) { add_header X-A a; } }
         location /changed { set $a 1; if ($a = 1) { set $a 2; add_header X-A $a; } if ($a = 2) { return 200 two; }
         return 200 one; }
         location /error { error_page 404 /page-of-location; if ($arg_a) { error_page 404 /page-of-if; } return 404; }
         location /page { return 200 $uri; }",
    )
    .file("one/root", "one")
    .file("two/root", "two")
    .file("one/fallback", "fallback")
    .start();
    let mut client = server.connect();
    let headers = |client: &mut Client, path: &str| {
        let response = client.get(path);
        ["X-A", "X-B"].map(|name| response.header(name).unwrap_or_default()).concat()
    };
    assert_eq!(headers(&mut client, "/last"), "");
    assert_eq!(headers(&mut client, "/last?a=1"), "a");
    // The last `if` that matches applies.
    assert_eq!(headers(&mut client, "/last?a=1&b=1"), "b");
    assert_eq!(headers(&mut client, "/changed"), "");
    assert_eq!(headers(&mut client, "/alias/root?a=1"), "a");
    let cases = [
        ("/root", 200, "one"),
        ("/root?two=1", 200, "two"),
        ("/changed", 200, "two"),
        ("/alias/root?a=1", 200, "one"),
        ("/tried", 200, "fallback"),
        ("/error", 404, "/page-of-location"),
        ("/error?a=1", 404, "/page-of-if"),
    ];
    assert_answers(&mut client, &cases);
    // try_files belongs to the location alone, as in nginx.
    assert_eq!(client.get("/tried?a=1").status, 404);
    server.stop();
}

fn an_if_keeps_the_content_of_its_location(driver: Driver) {
    let server = Setup::server(
        driver,
        "location / { root %DIR%; test_worker; if ($arg_a) { add_header X-A a; } if ($arg_b) { set $b 1; } }
         location /file { root %DIR%; if ($arg_a) { add_header X-A a; } }",
    )
    .file("file", "file")
    .start();
    let mut client = server.connect();
    let worker = client.get("/").text().to_owned();
    for path in ["/?a=1", "/?b=1", "/x?a=1&b=1"] {
        let response = client.get(path);
        assert_eq!((response.status, response.text()), (200, &*worker), "{path}");
    }
    assert_eq!(client.get("/?a=1").header("X-A"), Some("a"));
    assert_answers(&mut client, &[("/file?a=1", 200, "file")]);
    server.stop();
}

fn groups_are_those_of_the_last_match(driver: Driver) {
    let server = Server::start(
        driver,
        "location ~ ^/(?<name>[a-z]+)/(\\d+)$ {
             if ($arg_q ~ (z)) { return 200 \"$1 $2 $name\"; }
             if ($arg_q ~ (?<name>y)) { return 200 \"$1 $2 $name\"; }
             return 200 \"[$1] $name\";
         }
         location /kept { if ($arg_q ~ (.)(.)) { set $first $2; } return 200 \"$first$1\"; }",
    );
    let cases = [
        ("/abc/12?q=z", "z  abc"),
        ("/abc/12?q=y", "y  y"),
        ("/abc/12?q=x", "[] abc"),
        ("/kept?q=uv", "vu"),
        ("/kept", ""),
    ];
    assert_texts(&mut server.connect(), &cases);
    server.stop();
}

fn arguments_may_be_set(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { set $args \"n=$arg_a\"; return 200 \"$args|$arg_a|$arg_n|$is_args|$query_string\"; }
         location /header { set $http_x own; return 200 $http_x; }
         location /from-header { if ($arg_set) { set $http_y own; } return 200 $http_y; }",
    );
    let mut client = server.connect();
    assert_texts(&mut client, &[("/?a=b", "n=b||b|?|n=b"), ("/header", "own"), ("/from-header?set=1", "own")]);
    let response = client.ask("GET /from-header HTTP/1.1\r\nHost: localhost\r\nY: theirs\r\n\r\n");
    assert_eq!(response.text(), "theirs");
    server.stop();
}

fn variables_that_nginx_calls_changeable_may_be_set(driver: Driver) {
    let names = ["proxy_host", "proxy_port", "ssl_protocol", "ssl_client_verify", "ssl_server_name", "msie"];
    let steps: String = names.iter().map(|name| format!("set ${name} 7; ")).collect();
    let values: String = names.iter().map(|name| format!("${name}")).collect();
    let server = Server::start(driver, &format!("location / {{ {steps} return 200 {values}; }}"));
    assert_eq!(server.get("/").text(), "777777");
    server.stop();
}

fn variables_have_their_value_from_set_on(driver: Driver) {
    let server = Server::start(
        driver,
        "location /unset { return 200 \"[$later]\"; }
         location /quiet { uninitialized_variable_warn off; return 200 \"[$quiet]\"; }
         location /set { set $later 1; set $quiet 2; set $both \"$later$quiet\"; return 200 $both; }
         location /itself { set $itself \"$itself+\"; set $itself \"$itself+\"; return 200 $itself; }",
    );
    let cases = [("/unset", "[]"), ("/quiet", "[]"), ("/set", "12"), ("/itself", "++")];
    assert_texts(&mut server.connect(), &cases);
    let line = server.wait_logged("using uninitialized \"itself\" variable");
    assert!(line.contains("[warn]"), "{line}");
    server.wait_logged("using uninitialized \"later\" variable");
    assert!(!server.log().contains("\"quiet\" variable"));
    server.stop();
}

fn circles_of_rewrites_end_with_500(driver: Driver) {
    let server = Server::start(
        driver,
        "location /circle { rewrite ^ /circle last; }
         location /ten { set $n \"$n.\"; if ($n !~ \"^.{11}$\") { rewrite ^ /ten last; } return 200 $n; }",
    );
    assert_eq!(server.get("/circle").status, 500);
    let line = server.wait_logged("rewrite or internal redirection cycle while processing \"/circle\"");
    assert!(line.contains("[error]"), "{line}");
    // Ten cycles are allowed.
    assert_eq!(server.get("/ten").text(), "...........");
    server.stop();
}

fn an_expression_that_explodes_ends_with_500(driver: Driver) {
    let mut server = Server::start(
        driver,
        "location /if { if ($arg_a ~ ^(a+)+$) { return 200 yes; } return 200 no; }
         location /rewrite { rewrite ^/rewrite/(a+)+$ /if last; return 200 no; }
         location ~ ^/location/(a+)+$ { return 200 yes; }",
    );
    let long = "a".repeat(100);
    let mut client = server.connect();
    assert_texts(&mut client, &[("/if?a=aaa", "yes"), ("/if?a=b", "no"), ("/location/aaa", "yes")]);
    for path in ["/if?a=", "/rewrite/", "/location/"] {
        assert_eq!(server.get(&format!("{path}{long}!")).status, 500, "{path}");
    }
    let line = server.wait_logged("pcre2_match() failed: -47 on");
    assert!(line.contains("[alert]") && line.contains("!\" using \"^(a+)+$\""), "{line}");
    server.end(Signal::TERM);
}

fn rewrites_are_logged_if_wanted(driver: Driver) {
    let server = Server::start(
        driver,
        &format!(
            "{ECHO}
             location /logged {{
                 rewrite_log on;
                 rewrite ^/other$ /x;
                 if ($arg_a ~ b) {{ set $x 1; }}
                 rewrite ^/logged$ /echo?c=d last;
             }}
             location /redirect {{ rewrite_log on; rewrite ^ /x redirect; }}
             location /silent {{ rewrite ^/silent$ /echo last; }}"
        ),
    );
    let mut client = server.connect();
    client.get("/logged?a=b");
    client.get("/redirect");
    client.get("/silent");
    for message in [
        "\"^/other$\" does not match \"/logged\"",
        "\"b\" matches \"b\"",
        "\"^/logged$\" matches \"/logged\"",
        "rewritten data: \"/echo\", args: \"c=d&a=b\"",
        "rewritten redirect: \"/x\"",
    ] {
        let line = server.wait_logged(message);
        assert!(line.contains("[notice]"), "{line}");
    }
    assert!(!server.log().contains("\"/silent\""));
    server.stop();
}
