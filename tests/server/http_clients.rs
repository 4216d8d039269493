//! Properties of clients over real sockets: the referring page, signed links, cookies that identify clients, and the
//! age of browsers.

use crate::support::{Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    a_referer_is_valid_if_the_location_names_it,
    names_of_the_server_count_wherever_they_stand,
    the_configuration_may_decide_about_the_referer_itself,
    a_signed_link_opens_the_file_until_it_expires,
    a_link_with_a_secret_word_is_the_path_behind_it,
    a_client_gets_an_identifier_once,
    an_identifier_is_sent_again_with_another_mark,
    an_identifier_is_made_anew_if_the_configuration_wants_it,
    cookies_that_are_none_are_logged,
    the_workers_never_give_the_same_identifier,
    browsers_are_told_apart_by_age,
);

#[track_caller]
fn get_with(server: &Server, path: &str, field: &str) -> Response {
    server.connect().ask(format!("GET {path} HTTP/1.1\r\nHost: www.example.com\r\n{field}\r\n\r\n"))
}

/// Asserts which values of `Referer` the location accepts as valid.
#[track_caller]
fn assert_referers(server: &Server, path: &str, cases: &[(&str, bool)]) {
    for (field, is_valid) in cases {
        let expected = if *is_valid { "<>" } else { "<1>" };
        assert_eq!(get_with(server, path, field).text(), expected, "{path} {field}");
    }
}

fn a_referer_is_valid_if_the_location_names_it(driver: Driver) {
    let server = Server::start(
        driver,
        "location /all {
             valid_referers none blocked *.example.org/a example.net ~^Regex\\.;
             return 200 <$invalid_referer>;
         }
         location /few { valid_referers example.net; return 200 <$invalid_referer>; }
         location /any { return 200 <$invalid_referer>; }",
    );
    assert_referers(
        &server,
        "/all",
        &[
            ("X: no referer", true),
            ("Referer: -----", true),
            ("Referer:", true),
            ("Referer: https://EXAMPLE.net:8/", true),
            ("Referer: http://www.example.org/a/b", true),
            ("Referer: http://www.example.org/b", false),
            ("Referer: http://regex.example/", true),
            ("Referer: http://example.com/example.net", false),
        ],
    );
    let cases = [("X: no referer", false), ("Referer: -----", false), ("Referer: http://example.net/", true)];
    assert_referers(&server, "/few", &cases);
    assert_referers(&server, "/any", &[("X: no referer", true), ("Referer: http://example.com/", true)]);
    server.stop();
}

fn names_of_the_server_count_wherever_they_stand(driver: Driver) {
    let server = Server::start(
        driver,
        "valid_referers server_names;
         location / { return 200 <$invalid_referer>; }
         server_name www.example.com .example.org ~^regex\\d$;",
    );
    assert_referers(
        &server,
        "/",
        &[
            ("Referer: http://www.example.com/x", true),
            ("Referer: http://a.b.example.org", true),
            ("Referer: http://regex7:80/", true),
            ("Referer: http://regex77/", false),
            ("X: no referer", false),
        ],
    );
    server.stop();
}

fn the_configuration_may_decide_about_the_referer_itself(driver: Driver) {
    let server = Server::start(
        driver,
        "valid_referers example.net;
         location /set { if ($arg_own) { set $invalid_referer $arg_own; } return 200 <$invalid_referer>; }",
    );
    assert_referers(&server, "/set", &[("X: none", false), ("Referer: http://example.net/", true)]);
    assert_eq!(get_with(&server, "/set?own=2", "Referer: http://example.net/").text(), "<2>");
    server.stop();
}

fn a_signed_link_opens_the_file_until_it_expires(driver: Driver) {
    // MD5 of "secret /file 4000000000" and of "secret /file 1000000000".
    const LATE: &str = "RtZojPAtgHMLopuFL13QHA";
    const EARLY: &str = "unrzRBHaRmgpx4vJ0BgCZg";
    let server = Setup::server(
        driver,
        "root %DIR%/html;
         error_page 403 410 /why;
         location / {
             secure_link $arg_md5,$arg_expires;
             secure_link_md5 \"secret $uri $arg_expires\";
             if ($secure_link = '') { return 403; }
             if ($secure_link = '0') { return 410; }
         }
         location = /why { return 200 \"<$secure_link> <$secure_link_expires>\"; }",
    )
    .file("html/file", "precious")
    .start();
    let ask = |arguments: &str| {
        let response = server.get(&format!("/file?{arguments}"));
        (response.status, response.text().to_owned())
    };
    let late = format!("md5={LATE}&expires=4000000000");
    assert_eq!(ask(&late), (200, "precious".to_owned()), "{}", server.log());
    // The error page still has the variables.
    assert_eq!(ask(&format!("md5={EARLY}&expires=1000000000")), (410, "<0> <1000000000>".to_owned()));
    assert_eq!(ask(&format!("md5={LATE}&expires=4000000001")).0, 403);
    assert_eq!(ask(&format!("md5={EARLY}&expires=4000000000")).0, 403);
    assert_eq!(ask("").0, 403);
    server.stop();
}

fn a_link_with_a_secret_word_is_the_path_behind_it(driver: Driver) {
    let server = Setup::server(
        driver,
        "root %DIR%/html;
         location /p/ {
             secure_link_secret secret;
             if ($secure_link = '') { return 403; }
             rewrite ^ /files/$secure_link break;
         }",
    )
    .file("html/files/test.html", "plain")
    .start();
    // MD5 of "test.htmlsecret".
    let response = server.get("/p/181a8c6df88b74bb87b14f72df0a86f9/test.html");
    assert_eq!((response.status, response.text()), (200, "plain"));
    for path in [
        "/p/",
        "/p/181a8c6df88b74bb87b14f72df0a86f9/",
        "/p/181a8c6df88b74bb87b14f72df0a86f9/test.htm",
        "/p/6b72b4fc5ad5c5a40a3af0d4a55d5a5a/test.html",
    ] {
        assert_eq!(server.get(path).status, 403, "{path}");
    }
    server.stop();
}

/// Cookie of a response, and the identifier in it.
#[track_caller]
fn cookie(response: &Response) -> String {
    let field = response.header("Set-Cookie").unwrap_or_else(|| panic!("no cookie: {response:?}"));
    field.split(';').next().expect("the first part").to_owned()
}

fn a_client_gets_an_identifier_once(driver: Driver) {
    let server = Server::start(
        driver,
        "userid on;
         add_header X-Got $uid_got; add_header X-Set $uid_set;
         location / { return 200; }
         location /log { userid log; return 200; }
         location /off { userid off; return 200; }
         location /v1 {
             userid v1; userid_service 258; userid_name me; userid_path /p; userid_domain example.com;
             userid_expires max; userid_p3p 'policyref=\"/p3p\"'; userid_flags secure samesite=lax; userid_mark x;
             return 200;
         }",
    );
    let first = server.get("/");
    let cookie = cookie(&first);
    assert_eq!(first.header("Set-Cookie"), Some(&*format!("{cookie}; path=/")));
    let set = first.header("X-Set").expect("shown").to_owned();
    assert!(set.starts_with("uid=00000000") && first.header("X-Got").is_none(), "{set}");
    let field = format!("Cookie: other=1; {cookie}");
    for path in ["/", "/log"] {
        let again = get_with(&server, path, &field);
        assert_eq!((again.header("X-Got"), again.header("X-Set")), (Some(&*set), None), "{path}");
        assert_eq!(again.header("Set-Cookie"), None);
    }
    let off = get_with(&server, "/off", &field);
    assert_eq!((off.header("X-Got"), off.header("Set-Cookie")), (None, None));
    let v1 = server.get("/v1");
    let field = v1.header("Set-Cookie").expect("a cookie");
    assert!(field.starts_with("me=AgEAA"), "the service in this machine's order: {field}");
    let rest = "x=; expires=Thu, 31-Dec-37 23:55:55 GMT; domain=example.com; path=/p; secure; samesite=lax";
    assert!(field.ends_with(rest), "{field}");
    assert_eq!(v1.header("P3P"), Some("policyref=\"/p3p\""));
    server.stop();
}

fn an_identifier_is_sent_again_with_another_mark(driver: Driver) {
    let server = Server::start(
        driver,
        "userid on; add_header X-Set $uid_set;
         location / { return 200; }
         location /mark { userid_mark m; return 200; }",
    );
    let plain = cookie(&server.get("/"));
    let marked = get_with(&server, "/mark", &format!("Cookie: {plain}"));
    assert_eq!(cookie(&marked), plain.replace("==", "m="));
    let again = get_with(&server, "/mark", &format!("Cookie: {}", cookie(&marked)));
    assert_eq!((again.header("Set-Cookie"), again.header("X-Set")), (None, None));
    server.stop();
}

fn an_identifier_is_made_anew_if_the_configuration_wants_it(driver: Driver) {
    let server = Server::start(
        driver,
        "userid on; add_header X-Got $uid_got; add_header X-Set $uid_set;
         location / { set $uid_reset $arg_reset; return 200; }",
    );
    let cookie = cookie(&server.get("/"));
    let field = format!("Cookie: {cookie}");
    let ask = |path| get_with(&server, path, &field);
    assert_eq!(ask("/?reset=0").header("Set-Cookie"), None);
    let reset = ask("/?reset=log");
    let (got, set) = (reset.header("X-Got").expect("it came"), reset.header("X-Set").expect("it was given"));
    assert!(reset.header("Set-Cookie").is_some() && got != set, "{got}");
    server.wait_logged(&format!("userid cookie \"{got}\" was reset"));
    server.stop();
}

fn cookies_that_are_none_are_logged(driver: Driver) {
    let server = Server::start(driver, "userid on; add_header X-Got $uid_got; location / { return 200; }");
    for (value, what) in [("short", "too short"), ("!!!!!!!!!!!!!!!!!!!!!!!!", "invalid"), ("", "too short")] {
        let response = get_with(&server, "/", &format!("Cookie: a=b; uid={value}"));
        assert!(response.header("Set-Cookie").is_some() && response.header("X-Got").is_none());
        server.wait_logged(&format!("client sent {what} userid cookie \"a=b; uid={value}\""));
    }
    // An identifier that was never issued.
    let zero = get_with(&server, "/", &format!("Cookie: uid={}", "A".repeat(24)));
    assert!(zero.header("Set-Cookie").is_some() && zero.header("X-Got").is_none());
    server.stop();
}

fn the_workers_never_give_the_same_identifier(driver: Driver) {
    let server = Setup::server(driver, "userid on; userid_service 1; return 200;")
        .replace("worker_processes 2", "worker_processes 4")
        .start();
    let mut given: Vec<String> = (0..64).map(|_| cookie(&server.get("/"))).collect();
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 64);
    server.stop();
}

fn browsers_are_told_apart_by_age(driver: Driver) {
    let server = Server::start(
        driver,
        "modern_browser msie 6; modern_browser unlisted; modern_browser_value new; ancient_browser Lynx;
         location / { return 200 \"$modern_browser|$ancient_browser|$msie\"; }
         location /own { ancient_browser wget; ancient_browser_value old; set $msie own;
                         return 200 \"$modern_browser|$ancient_browser|$msie\"; }",
    );
    let ask = |path, agent: &str| get_with(&server, path, &format!("User-Agent: {agent}")).text().to_owned();
    assert_eq!(ask("/", "Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.1)"), "new||1");
    assert_eq!(ask("/", "Mozilla/4.0 (compatible; MSIE 5.5; Windows NT 5.1)"), "|1|1");
    assert_eq!(ask("/", "Lynx/2.8"), "|1|");
    assert_eq!(ask("/", "wget"), "new||");
    assert_eq!(ask("/own", "wget"), "|old|own");
    assert_eq!(ask("/own", "Lynx/2.8"), "new||own");
    assert_eq!(get_with(&server, "/", "X: no agent").text(), "new||");
    server.stop();
}
