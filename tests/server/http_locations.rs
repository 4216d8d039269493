//! Directives of locations over real sockets: return, error_page, internal, try_files, index, root and alias, types,
//! add_header, captures.

use crate::support::{Client, Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    return_takes_a_code_a_text_or_a_place,
    error_pages_take_every_form,
    error_page_target_with_status_names_the_answer_s_status,
    error_page_for_status_494_answers_400,
    return_304_describes_no_body,
    named_location_for_a_uri_that_cannot_be_decoded_is_500,
    error_pages_are_fetched_with_get,
    error_pages_may_lead_on_if_allowed,
    circles_end_with_500,
    internal_locations_are_for_ourselves,
    the_most_fitting_location_answers,
    captures_of_locations_and_names_are_variables,
    try_files_takes_the_first_that_is_there,
    try_files_with_alias_takes_the_prefix_off_names_with_variables_only,
    try_files_with_alias_takes_a_repeated_prefix_off_the_last_parameter,
    index_takes_the_first_that_is_there,
    root_and_alias_find_files,
    roots_may_have_variables,
    types_follow_the_extension,
    headers_are_added_as_the_location_says,
    values_cannot_add_lines_to_a_response,
    server_tokens_say_as_much_as_wanted,
);

#[track_caller]
fn assert_answer(response: &Response, status: u16, text: &str) {
    assert_eq!((response.status, response.text()), (status, text));
}

fn return_takes_a_code_a_text_or_a_place(driver: Driver) {
    let server = Server::start(
        driver,
        "location = /text { return 200 \"hello $arg_name\"; }
         location = /empty { return 200 ''; }
         location = /code { return 418; }
         location = /none { return 204 text; }
         location = /error { return 503; }
         location = /error-text { return 503 sorry; }
         location = /unknown { return 599 x; }
         location = /zero { return 0 x; }
         location = /moved { return 301 /else$is_args$args; }
         location = /found { return https://other.example$request_uri; }
         location = /scheme { return $scheme://other.example; }
         location = /see { return 303 there; }
         location = /temporary { return 307 http://other.example/; }
         location = /permanent { return 308 /x; }
         location = /first { return 200 first; return 200 second; }
         location = /json { default_type application/json; return 200 '{}'; }",
    );
    let mut client = server.connect();
    assert_answer(&client.get("/text?name=you"), 200, "hello you");
    assert_answer(&client.get("/empty"), 200, "");
    assert_eq!(client.get("/code").status, 418);
    let response = client.get("/none");
    assert_eq!((response.status, response.header("Content-Length")), (204, None));
    let response = client.get("/error");
    assert!(response.status == 503 && response.text().contains("503 Service Temporarily Unavailable"), "{response:?}");
    assert_answer(&client.get("/error-text"), 503, "sorry");
    assert_answer(&client.get("/unknown"), 599, "x");
    let places = [
        ("/moved?a=b", 301, "http://localhost/else?a=b"),
        ("/found?a", 302, "https://other.example/found?a"),
        ("/scheme", 302, "http://other.example"),
        ("/see", 303, "there"),
        ("/temporary", 307, "http://other.example/"),
        ("/permanent", 308, "http://localhost/x"),
    ];
    for (path, status, place) in places {
        let response = client.get(path);
        assert_eq!((response.status, response.header("Location")), (status, Some(place)), "{path}");
        assert!(response.text().starts_with("<html>"), "{path}");
    }
    assert_answer(&client.get("/first"), 200, "first");
    assert_eq!(client.get("/json").header("Content-Type"), Some("application/json"));
    let sub = Server::start(driver, "return 200 server; location / { return 200 location; }");
    assert_answer(&sub.get("/"), 200, "server");
    sub.stop();
    server.stop();
}

const ERROR_PAGES: &str = "root %DIR%/files;
    error_page 404 /404.html;
    location /plain/ { }
    location /replaced/ { error_page 404 =200 /404.html; }
    location /target/ { error_page 404 = /answer; }
    location /target-code/ { error_page 404 =503 /answer; }
    location /named/ { error_page 404 @named; }
    location /named-target/ { error_page 404 = @named; }
    location /url/ { error_page 404 http://other.example/gone; }
    location /url-code/ { error_page 404 =301 http://other.example$uri; }
    location /several/ { error_page 403 404 500 502 /several.html; }
    location /args/ { error_page 404 /show?from=$uri; }
    location /absent/ { error_page 404 /nowhere.html; }
    location /own/ { error_page 500 /never; }
    location /empty/ { error_page 404 =204 /404.html; }
    location /status/ { error_page 404 /which; }
    location /status-code/ { error_page 404 =503 /which; }
    location /which { return 200 \"$status\"; }
    location /answer { return 201 \"answer to $uri\"; }
    location /show { return 404 \"$uri|$args|$request_uri\"; }
    location @named { return 202 \"named $uri\"; }
    location @named { return 202 \"only the first of a name counts\"; }";

fn error_pages_take_every_form(driver: Driver) {
    let setup = Setup::server(driver, ERROR_PAGES);
    let server = setup.file("files/404.html", "own page").file("files/several.html", "several").start();
    let mut client = server.connect();
    let missing = |client: &mut Client, directory: &str| client.get(&format!("/{directory}/missing"));
    assert_answer(&missing(&mut client, "plain"), 404, "own page");
    assert_eq!(missing(&mut client, "plain").header("Content-Type"), Some("text/html"));
    assert_answer(&missing(&mut client, "replaced"), 200, "own page");
    assert_answer(&missing(&mut client, "target"), 201, "answer to /answer");
    assert_answer(&missing(&mut client, "target-code"), 503, "answer to /answer");
    assert_answer(&missing(&mut client, "named"), 404, "named /named/missing");
    assert_answer(&missing(&mut client, "named-target"), 202, "named /named-target/missing");
    let response = missing(&mut client, "url");
    assert_eq!((response.status, response.header("Location")), (302, Some("http://other.example/gone")));
    let response = missing(&mut client, "url-code");
    assert_eq!((response.status, response.header("Location")), (301, Some("http://other.example/url-code/missing")));
    assert_answer(&missing(&mut client, "several"), 404, "several");
    assert_answer(&missing(&mut client, "args"), 404, "/show|from=/args/missing|/args/missing");
    // The page itself is missing, so the built-in one is sent.
    let response = missing(&mut client, "absent");
    assert!(response.status == 404 && response.text().contains("<title>404 Not Found</title>"), "{response:?}");
    // The location's own error_page replaces the inherited ones.
    assert!(missing(&mut client, "own").text().contains("<title>404 Not Found</title>"));
    let response = missing(&mut client, "empty");
    assert_eq!((response.status, response.header("Content-Length")), (204, None));
    assert_eq!((response.header("Content-Type"), response.header("Last-Modified")), (None, None));
    // A page that shows the status.
    assert_answer(&missing(&mut client, "status"), 404, "404");
    assert_answer(&missing(&mut client, "status-code"), 503, "503");
    // An error page is not subject to ranges and conditions.
    let response = client.ask("GET /plain/missing HTTP/1.1\r\nHost: h\r\nRange: bytes=0-1\r\nIf-None-Match: *\r\n\r\n");
    assert_answer(&response, 404, "own page");
    // Malformed requests have error pages, too.
    assert_eq!(server.connect().ask("GET / HTTP/1.1\r\n\r\n").status, 400);
    server.stop();
}

fn error_page_target_with_status_names_the_answer_s_status(driver: Driver) {
    let server = Server::start(
        driver,
        "recursive_error_pages on;
         error_page 404 /error/$status; error_page 502 503 http://other.example/$status;
         error_page 410 =200 /out?$status;
         error_page 403 = /own/$status; error_page 400 /error/$status;
         location /404 { return 404; } location /503 { return 503; } location /410 { return 410; }
         location /403 { return 403; } location /twice { error_page 404 /410; return 404; }
         location /error/ { return 200 \"$uri $status\"; } location /out { return 200 \"$args\"; }
         location /own/ { return 201 $uri; }",
    );
    let mut client = server.connect();
    assert_answer(&client.get("/404"), 404, "/error/404 404");
    assert_eq!(client.get("/503").header("Location"), Some("http://other.example/503"));
    assert_answer(&client.get("/410"), 200, "200");
    assert_answer(&client.get("/twice"), 200, "200");
    // The response will have the status of the target, which is not known yet.
    assert_answer(&client.get("/403"), 201, "/own/000");
    assert_answer(&server.connect().ask("GET / HTTP/1.1\r\n\r\n"), 400, "/error/400 400");
    server.stop();
}

/// Status 494 is internal to nginx and is never sent to a client.
fn error_page_for_status_494_answers_400(driver: Driver) {
    let server = Server::start(
        driver,
        "large_client_header_buffers 2 1k; error_page 494 /page/$status;
         location /page/ { return 200 \"$uri $status\"; }
         location /replaced { error_page 494 =431 /page/$status; return 494; }",
    );
    let field = "x".repeat(2000);
    let mut client = server.connect();
    assert_answer(&client.ask(format!("GET / HTTP/1.1\r\nHost: h\r\nX: {field}\r\n\r\n")), 400, "/page/400 400");
    assert_answer(&server.get("/replaced"), 431, "/page/431 431");
    server.stop();
}

/// A length in a 304 would be that of the 200 response (RFC 9110, section 8.6), which is not known.
fn return_304_describes_no_body(driver: Driver) {
    let server = Server::start(driver, "location / { return 304; } location /text { return 304 text; }");
    let mut client = server.connect();
    for path in ["/", "/text"] {
        let response = client.get(path);
        let fields = (response.header("Content-Length"), response.header("Content-Type"));
        assert_eq!((response.status, fields, response.text()), (304, (None, None), ""), "{path}");
    }
    server.stop();
}

/// No location runs without a URI.
fn named_location_for_a_uri_that_cannot_be_decoded_is_500(driver: Driver) {
    let locations =
        "error_page 400 405 @page; error_page 500 /never; location @page { return 200 \"page of [$uri]\"; }";
    let server = Server::start(driver, locations);
    for target in ["/%zz", "/../x"] {
        let response = server.connect().ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert!(response.status == 500 && response.text().contains("500 Internal Server Error"), "{response:?}");
    }
    server.wait_logged_times("empty URI in redirect to named location \"@page\", client: unix:", 2);
    let response = server.connect().ask("GET / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n");
    assert_answer(&response, 400, "page of [/]");
    assert_answer(&server.connect().ask("CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n"), 405, "page of [/]");
    server.stop();
}

fn error_pages_are_fetched_with_get(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files; client_max_body_size 5; error_page 404 405 413 /page; error_page 400 /offence;
         location /echo { return 404; error_page 404 /method; }
         location /method { return 404 \"$request_method\"; }
         location /offence { return 400 \"own $request_method\"; }",
    );
    let server = setup.file("files/page", "own page").start();
    let mut client = server.connect();
    assert_answer(&client.ask("POST /missing HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"), 404, "own page");
    assert_answer(&client.ask("DELETE /page HTTP/1.1\r\nHost: h\r\n\r\n"), 405, "own page");
    let head = client.ask("HEAD /missing HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((head.status, head.header("Content-Length")), (404, Some("8")));
    let mut closing = server.connect();
    assert_answer(&closing.ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nlonger"), 413, "own page");
    closing.assert_closed();
    let mut closing = server.connect();
    assert_answer(&closing.ask("NO REQUEST\r\n\r\n"), 400, "own GET");
    closing.assert_closed();
    assert_answer(&client.ask("PUT /echo HTTP/1.1\r\nHost: h\r\n\r\n"), 404, "GET");
    server.stop();
}

fn error_pages_may_lead_on_if_allowed(driver: Driver) {
    let text = "location /first { return 404; } error_page 404 /second; location /second { return 403; } \
        error_page 403 /third;
        location /third { return 200 third; }";
    let server = Server::start(driver, text);
    let response = server.get("/first");
    assert!(response.status == 403 && response.text().contains("403 Forbidden"), "{response:?}");
    server.stop();
    let server = Server::start(driver, &format!("recursive_error_pages on; {text}"));
    assert_answer(&server.get("/first"), 403, "third");
    server.stop();
}

fn circles_end_with_500(driver: Driver) {
    let server = Server::start(
        driver,
        "recursive_error_pages on; root %DIR%;
         location /errors { error_page 404 /errors; return 404; }
         location /named { error_page 404 @named; return 404; } location @named { error_page 404 @named; return 404; }
         location /try { try_files /missing /try; }
         location /index/ { index /index/; }",
    );
    std::fs::create_dir(server.directory.path().join("index")).expect("a directory");
    for (path, message) in [
        ("/errors", "rewrite or internal redirection cycle while internally redirecting to \"/errors\""),
        ("/named", "rewrite or internal redirection cycle while redirect to named location \"@named\""),
        ("/try", "rewrite or internal redirection cycle while internally redirecting to \"/try\""),
        ("/index/", "rewrite or internal redirection cycle while internally redirecting to \"/index/\""),
    ] {
        let mut client = server.connect();
        assert_eq!(client.get(path).status, 500, "{path}");
        client.assert_closed();
        server.wait_logged(message);
    }
    server.stop();
}

fn internal_locations_are_for_ourselves(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files; location /inside/ { internal; } location /page { try_files /missing /inside/page; }
         location /error { error_page 404 /inside/page; return 404; } location /indexed/ { index /inside/page; }
         location /passed/ { internal; proxy_pass http://127.0.0.1:1; }",
    );
    let server = setup.file("files/inside/page", "inside").start();
    let mut client = server.connect();
    // A request from outside is not proxied by an internal location either.
    assert_eq!(client.get("/passed").status, 404);
    let response = client.get("/inside/page");
    assert!(response.status == 404 && response.text().contains("404 Not Found"), "{response:?}");
    assert_answer(&client.get("/page"), 200, "inside");
    assert_answer(&client.get("/error"), 404, "inside");
    assert_answer(&client.get("/indexed/"), 200, "inside");
    server.stop();
}

fn the_most_fitting_location_answers(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { return 200 root; }
         location = / { return 200 exact; }
         location /a/ { return 200 prefix; location /a/b/ { return 200 nested;
         location ~ c$ { return 200 nested-regex; } } }
         location ^~ /static/ { return 200 static; }
         location ~ \\.php$ { return 200 regex; }
         location ~* \\.PNG$ { return 200 case; }
         location ~ ^/a/b/d { return 200 late; }",
    );
    let mut client = server.connect();
    let cases = [
        ("/", "exact"),
        ("/x", "root"),
        ("/a", "root"),
        ("/a/", "prefix"),
        ("/a/b/", "nested"),
        ("/a/b/c", "nested-regex"),
        ("/a/b/d", "late"),
        ("/static/x.php", "static"),
        ("/x.php", "regex"),
        ("/x.PHP", "root"),
        ("/x.pNg", "case"),
        ("/%73tatic/", "static"),
    ];
    for (path, expected) in cases {
        assert_eq!(client.get(path).text(), expected, "{path}");
    }
    server.stop();
}

fn captures_of_locations_and_names_are_variables(driver: Driver) {
    let server = Server::start(
        driver,
        "server_name ~^(?<user>[^.]+)\\.(?<zone>example)$;
         location ~ ^/(?<kind>\\w+)/(\\d+) { return 200 \"$user $zone $kind $2\"; }
         location / { return 200 \"$user|$1\"; }",
    );
    let ask = |host: &str, path: &str| server.connect().ask(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_answer(&ask("Joe.Example:80", "/item/42"), 200, "joe example item 42");
    assert_answer(&ask("joe.example", "/"), 200, "joe|joe");
    assert_answer(&ask("other", "/"), 200, "|");
    server.stop();
}

fn try_files_takes_the_first_that_is_there(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files;
         location / { try_files $uri $uri/ /fallback?from=$uri; }
         location /code/ { try_files $uri =418; }
         location /named/ { try_files $uri @named; } location @named { return 200 \"named $uri\"; }
         location /html/ { try_files $uri.html $uri =404; default_type text/x; }
         location /alias/ { alias %DIR%/files/html/; try_files $uri page.html =404; }
         location ~ ^/whole$ { alias %DIR%/files; try_files /directory/ =404; }
         location /fallback { return 200 \"$uri $args\"; }",
    );
    let server = setup
        .file("files/page", "a page")
        .file("files/directory/index.html", "an index")
        .file("files/html/page.html", "html")
        .start();
    let mut client = server.connect();
    assert_answer(&client.get("/page"), 200, "a page");
    assert_answer(&client.get("/directory/"), 200, "an index");
    assert_eq!(client.get("/directory").status, 301);
    assert_answer(&client.get("/missing?x"), 200, "/fallback from=/missing");
    assert_eq!(client.get("/code/missing").status, 418);
    assert_answer(&client.get("/named/missing"), 200, "named /named/missing");
    let response = client.get("/html/page");
    assert_eq!((response.text(), response.header("Content-Type")), ("html", Some("text/html")));
    assert_eq!(client.get("/html/missing").status, 404);
    assert_answer(&client.get("/alias/missing"), 200, "html");
    assert_answer(&client.get("/alias/page.html"), 200, "html");
    // The directory exists, but its name does not become the URI.
    let response = client.get("/whole");
    assert_eq!(response.status, 301);
    assert!(response.header("Location").is_some_and(|location| location.ends_with("/whole/")));
    let circle = server.directory.path().join("files/code");
    std::os::unix::fs::symlink("code", &circle).expect("a link to itself");
    assert_eq!(client.get("/code/page").status, 418);
    server.wait_logged("files/code/page\" failed (40: Too many levels of symbolic links)");
    server.stop();
}

fn try_files_with_alias_takes_the_prefix_off_names_with_variables_only(driver: Driver) {
    let setup = Setup::server(
        driver,
        "location / { alias %DIR%/b; try_files /x.txt =404; }
         location /d/ { alias %DIR%/b/; try_files /d/y.txt =404; }
         location /variable/ { alias %DIR%/b/; try_files $uri /variable/$arg_name x.txt; }
         location /short/ { alias %DIR%/b/; try_files $arg_name =404; }
         location /directory { alias %DIR%/b; try_files /d/ =404; }",
    );
    let server = setup.file("b/x.txt", "x").file("b/y.txt", "y").file("b/d/y.txt", "d/y").start();
    let mut client = server.connect();
    assert_answer(&client.get("/anything"), 200, "x");
    assert_answer(&client.get("/d/anything"), 200, "d/y");
    assert_answer(&client.get("/variable/x.txt"), 200, "x");
    assert_answer(&client.get("/variable/z?name=d/y.txt"), 200, "d/y");
    assert_answer(&client.get("/short/z?name=y.txt"), 200, "y");
    assert_answer(&client.get("/short/z?name=/short/y.txt"), 200, "y");
    let response = client.get("/directory");
    assert!(response.header("Location").is_some_and(|location| location.ends_with("/directory/d/")), "{response:?}");
    server.stop();
}

fn try_files_with_alias_takes_a_repeated_prefix_off_the_last_parameter(driver: Driver) {
    // Configurations for nginx write this, since nginx removes the prefix once.
    let setup = Setup::server(
        driver,
        "location /app/ { alias %DIR%/b/; try_files $uri $uri/ /app//app/index.php?$args;
                          location ~ php$ { return 200 \"app $uri $args\"; } }
         location /bare { alias %DIR%/b; try_files $uri /bare/bare/index.php?$args;
                          location ~ php$ { return 200 \"bare $uri $args\"; } }
         location /outer/ { alias %DIR%/b/; try_files $uri /outer//index.php?$args; }
         location /once/ { alias %DIR%/b/; try_files $uri /once/index.php?$args;
                           location ~ php$ { return 200 \"once $uri $args\"; } }
         location /b { alias %DIR%/b; try_files $uri /b/best.php?$args;
                       location ~ php$ { return 200 \"b $uri $args\"; } }
         location = /index.php { return 200 \"root $args\"; }",
    );
    let server = setup.file("b/x.txt", "x").start();
    let mut client = server.connect();
    assert_answer(&client.get("/app/x.txt"), 200, "x");
    assert_answer(&client.get("/app/news?a=1"), 200, "app /app/index.php a=1");
    assert_answer(&client.get("/bare/news?a=1"), 200, "bare /bare/index.php a=1");
    assert_answer(&client.get("/b/news?a=1"), 200, "b /b/best.php a=1");
    assert_answer(&client.get("/outer/news?a=1"), 200, "root a=1");
    assert_answer(&client.get("/once/news?a=1"), 200, "once /once/index.php a=1");
    server.stop();
}

fn index_takes_the_first_that_is_there(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files; location / { } location /own/ { index first.$arg_kind second.html; }
         location /else/ { index missing.html /page; } location ~ \\.php$ { return 200 \"script $uri\"; }
         location /script/ { index index.php; } location /named/ { index sub index.html; }",
    );
    let server = setup
        .file("files/index.html", "index")
        .file("files/own/second.html", "second")
        .file("files/own/first.html", "first")
        .file("files/own/index.html", "never")
        .file("files/else/x", "")
        .file("files/script/index.php", "source")
        .file("files/page", "a page")
        .file("files/named/index.html", "index")
        .file("files/named/sub/x", "")
        .start();
    let mut client = server.connect();
    assert_answer(&client.get("/"), 200, "index");
    assert_answer(&client.get("/own/?kind=html"), 200, "first");
    assert_answer(&client.get("/own/"), 200, "second");
    assert_answer(&client.get("/else/"), 200, "a page");
    // The URI of the index file is matched against the locations again.
    assert_answer(&client.get("/script/"), 200, "script /script/index.php");
    // A directory of that name also matches and is redirected to.
    let response = client.get("/named/");
    assert!(response.status == 301 && response.header("Location").is_some_and(|to| to.ends_with("/named/sub/")));
    server.stop();
}

fn root_and_alias_find_files(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/one; location /two/ { root %DIR%; } location /alias/ { alias %DIR%/two/; }
         location /bare { alias %DIR%/two; } location = /exact { alias %DIR%/two/page; }
         location ~ ^/numbers/(.*)$ { alias %DIR%/two/$1; }
         location /name { return 200 \"$document_root $request_filename\"; }",
    );
    let server = setup.file("one/page", "one").file("two/page", "two").file("two/a b", "spaces").start();
    let mut client = server.connect();
    assert_answer(&client.get("/page"), 200, "one");
    assert_answer(&client.get("/two/page"), 200, "two");
    assert_answer(&client.get("/alias/page"), 200, "two");
    assert_answer(&client.get("/alias/a%20b"), 200, "spaces");
    assert_eq!(client.get("/alias/../page").text(), "one");
    assert_answer(&client.get("/bare/page"), 200, "two");
    assert_answer(&client.get("/exact"), 200, "two");
    assert_answer(&client.get("/numbers/page"), 200, "two");
    let root = server.directory.path().join("one");
    assert_eq!(client.get("/name").text(), format!("{0} {0}/name", root.display()));
    server.stop();
}

fn roots_may_have_variables(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/sites/$host; location /alias/ { alias %DIR%/sites/$arg_site/; }");
    let server = setup.file("sites/one.example/page", "one").file("sites/two.example/page", "two").start();
    let mut client = server.connect();
    let mut ask = |host: &str, path: &str| client.ask(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_answer(&ask("one.example", "/page"), 200, "one");
    assert_answer(&ask("TWO.example:8080", "/page"), 200, "two");
    assert_eq!(ask("three.example", "/page").status, 404);
    assert_answer(&ask("one.example", "/alias/page?site=two.example"), 200, "two");
    // A host cannot lead out of the root directory.
    assert_eq!(ask("..", "/page").status, 400);
    server.stop();
}

fn types_follow_the_extension(driver: Driver) {
    let names = ["page.html", "PAGE.HTML", "x.css", "x.unknown", "none", "archive.tar.gz", ".html", "dir.css/file"];
    let setup = Setup::server(
        driver,
        "root %DIR%/files; types { text/html html; text/css css; application/gzip gz; } \
         default_type application/octet-stream;
         location /own/ { alias %DIR%/files/; types { } default_type text/own; }",
    );
    let server = names.iter().fold(setup, |setup, name| setup.file(&format!("files/{name}"), "")).start();
    let mut client = server.connect();
    let octets = "application/octet-stream";
    let types = ["text/html", "text/html", "text/css", octets, octets, "application/gzip", "text/html", octets];
    for (name, expected) in names.into_iter().zip(types) {
        assert_eq!(client.get(&format!("/{name}")).header("Content-Type"), Some(expected), "{name}");
        assert_eq!(client.get(&format!("/own/{name}")).header("Content-Type"), Some("text/own"), "{name}");
    }
    server.stop();
}

fn headers_are_added_as_the_location_says(driver: Driver) {
    let server = Server::start(
        driver,
        "add_header X-Server $host; add_header X-Always yes always;
         location / { return 200 ok; }
         location /own { add_header X-Own $uri; add_header X-Empty \"$arg_none\"; add_header X-Own two; return 200 ok; }
         location /error { return 500; } location /moved { return 301 /; }
         location /etag { add_header ETag '\"own\"'; return 200 ok; }",
    );
    let mut client = server.connect();
    let response = client.get("/");
    assert_eq!((response.header("X-Server"), response.header("X-Always")), (Some("localhost"), Some("yes")));
    let response = client.get("/own");
    let own: Vec<&str> =
        response.headers.iter().filter(|(name, _)| name == "X-Own").map(|(_, value)| &**value).collect();
    assert_eq!((own, response.header("X-Server"), response.header("X-Empty")), (vec!["/own", "two"], None, None));
    assert_eq!(client.get("/moved").header("X-Server"), Some("localhost"));
    assert_eq!(client.get("/etag").header("ETag"), Some("\"own\""));
    let response = client.get("/error");
    assert_eq!((response.header("X-Server"), response.header("X-Always")), (None, Some("yes")));
    server.stop();
}

fn values_cannot_add_lines_to_a_response(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { add_header X-Uri $uri always; return 302 http://other.example$uri; }
         location /error { error_page 404 http://other.example$uri; return 404; }",
    );
    for path in ["/a%0d%0aX-Evil:%20yes", "/error%0d%0a%0d%0aevil"] {
        let response = server.get(path);
        assert_eq!((response.status, response.header("X-Evil")), (302, None), "{response:?}");
        assert!(response.text().starts_with("<html>"), "{response:?}");
    }
    server.stop();
}

fn server_tokens_say_as_much_as_wanted(driver: Driver) {
    let server = Server::start(
        driver,
        "location /on { return 404; } location /off { server_tokens off; return 404; }
         location /own { server_tokens \"mine $uri\"; return 404; } location /none { server_tokens ''; return 404; }",
    );
    let mut client = server.connect();
    let mut server_of = |path: &str| {
        let response = client.get(path);
        let signature = response.header("Server").unwrap_or_default().to_owned();
        assert!(response.text().contains(&format!("<center>{signature}</center>")) || signature.is_empty(), "{path}");
        signature
    };
    assert!(server_of("/on").starts_with("gale/"));
    assert_eq!(server_of("/off"), "gale");
    assert_eq!(server_of("/own"), "mine /own");
    assert_eq!(server_of("/none"), "");
    server.stop();
}
