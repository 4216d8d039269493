//! Subrequests over real sockets: SSI, addition, auth_request, mirror.
//!
//! Slow ones are tasks of `test_pool` that wait at the test's gate, so that a test knows which have begun and decides
//! in which order they end.

use crate::support::{Client, Driver, Gate, Response, Server, Setup, Task, http_configuration, with_each_driver};

with_each_driver!(
    includes_run_at_the_same_time_and_come_in_order,
    document_waits_for_includes_with_wait,
    a_client_that_leaves_takes_the_subrequests_along,
    pages_that_include_themselves_end,
    commands_have_their_effects,
    conditions_choose_the_shown_part,
    mistakes_are_shown_as_the_page_wants,
    blocks_replace_missing_or_empty_includes,
    files_of_any_size_are_included,
    only_the_client_s_request_is_conditional_or_in_parts,
    a_head_is_all_that_a_head_request_starts,
    subrequests_share_variables_and_the_client,
    subrequests_are_logged_where_that_is_wanted,
    memory_of_pages_is_bounded,
    a_block_that_does_not_fit_stays_hidden,
    the_time_is_shown_in_the_format_of_the_page,
    additions_come_before_and_after,
    another_location_decides,
    the_method_shown_is_the_client_s,
    answers_of_the_deciding_location_become_variables,
    deciding_is_one_of_several_conditions,
    slow_auth_request_delays_no_others,
    other_filters_see_the_same_as_in_nginx,
    client_address_is_known_in_subrequests,
    client_address_set_in_a_subrequest_is_seen_by_all,
    a_place_taken_in_a_subrequest_is_held_until_the_request_is_over,
    copies_are_made_in_the_background,
    place_of_a_request_is_free_while_its_copy_runs,
    place_taken_by_a_copy_is_held_until_the_copy_is_over,
    the_body_of_a_copied_request_is_read_once,
    stop_waits_for_background_subrequests,
);

#[track_caller]
fn assert_answer(response: &Response, status: u16, text: &str) {
    assert_eq!((response.status, response.text()), (status, text));
}

/// A server with one worker, with files below `www` and the slow location `/slow?NAME`.
fn setup(driver: Driver, text: &str) -> Setup {
    let locations = "root %DIR%/www; location = /slow { test_pool gate %DIR%/gate; log_subrequest on; }";
    let server = format!("server {{ listen %UNIX%; {locations}\n{text}\n}}");
    let text = http_configuration(driver, &server).replace("worker_processes 2;", "worker_processes 1;");
    Setup::configuration(&format!("thread_pool gate threads=8;\n{text}"))
}

/// Sends a request without waiting for the response.
fn ask(server: &Server, path: &str) -> Client {
    let mut client = server.connect();
    client.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    client
}

/// Waits until `count` tasks have begun; returns them sorted by their names.
#[track_caller]
fn tasks(gate: &Gate, count: usize) -> Vec<(String, Task)> {
    let mut tasks: Vec<(String, Task)> = (0..count)
        .map(|_| {
            let mut task = gate.task();
            (task.says(), task)
        })
        .collect();
    tasks.sort_by(|(one, _), (other, _)| one.cmp(other));
    tasks
}

fn includes_run_at_the_same_time_and_come_in_order(driver: Driver) {
    let page = "1<!--#include virtual=\"/slow?a\" -->2<!--#include virtual=\"/fast.html\" -->3\
                <!--#include virtual=\"/inner.html\" -->4<!--#include virtual=\"/slow?d\" -->5";
    let inner = "(<!--#include virtual=\"/slow?b\" --><!--#include virtual=\"/slow?c\" -->)";
    let server = setup(driver, "location ~ html$ { ssi on; }")
        .file("www/page.html", page)
        .file("www/inner.html", inner)
        .file("www/fast.html", "fast")
        .start();
    let gate = Gate::new(&server);
    let mut client = ask(&server, "/page.html");
    // All tasks have begun although none has ended, including those of the inner page.
    let mut begun = tasks(&gate, 4);
    assert_eq!(begun.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    // The known part of the response is sent.
    assert_eq!(client.head().status, 200);
    assert_eq!(client.chunk().as_deref(), Some(&b"1"[..]));
    // The tasks end in reverse order.
    while begun.pop().is_some() {}
    let mut text = Vec::new();
    while let Some(chunk) = client.chunk() {
        text.extend(chunk);
    }
    assert_eq!(String::from_utf8(text).unwrap(), "done2fast3(donedone)4done5");
    server.stop();
}

fn document_waits_for_includes_with_wait(driver: Driver) {
    let waiting = "<!--#include virtual=\"/slow?a\" wait=\"yes\" -->,<!--#include virtual=\"/slow?b\" -->";
    let setting =
        "<!--#include virtual=\"/slow?a\" set=\"x\" -->[<!--#echo var=\"x\" -->]<!--#include virtual=\"/slow?b\" -->";
    let server = setup(driver, "location ~ html$ { ssi on; }")
        .file("www/waiting.html", waiting)
        .file("www/setting.html", setting)
        .start();
    let gate = Gate::new(&server);
    for (path, text) in [("/waiting.html", "done,done"), ("/setting.html", "[done]done")] {
        let mut client = ask(&server, path);
        let (name, first) = tasks(&gate, 1).remove(0);
        assert_eq!(name, "a");
        // Other requests are served meanwhile, and no other task has begun.
        assert_eq!(server.get("/none").status, 404);
        assert!(gate.is_empty());
        drop(first);
        assert_eq!(tasks(&gate, 1)[0].0, "b");
        assert_answer(&client.response(), 200, text);
    }
    server.stop();
}

fn a_client_that_leaves_takes_the_subrequests_along(driver: Driver) {
    let page = "1<!--#include virtual=\"/slow?a\" -->2<!--#include virtual=\"/inner.html\" -->3";
    let server = setup(driver, "location ~ html$ { ssi on; } location = /pools { test_pools; }")
        .file("www/page.html", page)
        .file("www/inner.html", "<!--#include virtual=\"/slow?b\" -->")
        .start();
    let gate = Gate::new(&server);
    let mut client = ask(&server, "/page.html");
    let begun = tasks(&gate, 2);
    assert_eq!(client.head().status, 200);
    drop(client);
    // The request is logged, but neither of its subrequests: they were aborted.
    server.directory.wait_line("access.log", "/page.html");
    assert!(!server.directory.read("access.log").contains("200 4"), "{server}");
    drop(begun);
    assert_eq!(server.get("/none").status, 404);
    server.stop();
}

fn pages_that_include_themselves_end(driver: Driver) {
    let server = setup(driver, "location / { ssi on; } location = /add.html { add_after_body /add.html; }")
        .file("www/loop.html", "<<!--#include virtual=\"/loop.html\" -->>")
        .file("www/beside.html", "<<!--#include virtual=\"beside.html\" wait=\"yes\" -->>")
        .file("www/add.html", "x")
        .start();
    for page in ["/loop.html", "/beside.html"] {
        let response = server.get(page);
        let depth = 52;
        let message = "[an error occurred while processing the directive]";
        assert_answer(&response, 200, &format!("{}{message}{}", "<".repeat(depth), ">".repeat(depth)));
        server.wait_logged(&format!("subrequests cycle while processing \"{page}\""));
    }
    assert_answer(&server.get("/add.html"), 200, "xx");
    server.stop();
}

fn commands_have_their_effects(driver: Driver) {
    let pages = [
        ("/echo.html?a=<b>%20&empty=", "<!--#echo var=\"arg_a\" -->", "&lt;b&gt;%20"),
        ("/echo2.html?a=<b>", "<!--#echo var=\"ARG_A\" encoding=\"none\" -->|<!--#echo var=\"arg_a\" -->", "<b>|<b>"),
        ("/echo3.html?a=<b>", "<!--#echo var=\"arg_a\" encoding=\"url\" -->", "%3Cb%3E"),
        (
            "/echo4.html",
            "<!--#echo var=\"arg_a\" -->|<!--#echo var=\"arg_a\" default=\"\" -->|\
                         <!--#echo var=\"arg_a\" default=\"x\" -->",
            "(none)||x",
        ),
        ("/echo5.html", "<!--#echo var=\"nonsense\" -->", "(none)"),
        ("/set.html?a=1", "<!--#set var=\"X\" value=\"$arg_a$arg_b-${arg_a}\\$\" --><!--#echo var=\"x\" -->", "1-1$"),
        (
            "/set2.html",
            "<!--#set var=\"x\" value=\"a\" --><!--#set var=\"x\" value=\"$x$x\" --><!--#echo var=\"x\" -->",
            "aa",
        ),
        ("/uri.html?q", "<!--#echo var=\"uri\" --><!--#echo var=\"args\" -->", "/uri.htmlq"),
        ("/include.html", "<!--#include virtual=\"/uri.html?in=1\" -->", "/uri.htmlin=1"),
        ("/directory/include.html", "<!--#include virtual=\"beside.html\" -->", "/directory/beside.html"),
        ("/directory/beside.html", "<!--#echo var=\"document_uri\" -->", "/directory/beside.html"),
        ("/directory/file.html", "<!--#include file=\"beside.html\" -->", "/directory/beside.html"),
        (
            "/variable.html?page=beside",
            "<!--#include virtual=\"/directory/$arg_page.html\" -->",
            "/directory/beside.html",
        ),
        ("/status.html", "<!--#echo var=\"status\" --><!--#echo var=\"sent_http_content_type\" -->", "200text/html"),
        ("/comment.html", "<!-- a comment --><!- <<b>", "<!-- a comment --><!- <<b>"),
        ("/broken.html", "a<!--#echo var=\"", "a"),
        ("/half.html", "a<!--", "a<!--"),
    ];
    let mut setup = setup(driver, "types { text/html html; } location / { ssi on; }");
    for (path, page, _) in pages {
        let name = path.split('?').next().unwrap_or(path);
        setup = setup.file(&format!("www{name}"), page);
    }
    let server = setup.start();
    let mut client = server.connect();
    for (path, page, text) in pages {
        let response = client.get(path);
        assert_eq!((response.status, response.text()), (200, text), "{path}: {page}");
        assert_eq!(
            response.header("Last-Modified").or(response.header("ETag")).or(response.header("Accept-Ranges")),
            None
        );
    }
    server.stop();
}

fn conditions_choose_the_shown_part(driver: Driver) {
    let page = "<!--#if expr=\"$arg_a = /^(x+)(?<rest>.*)/\" -->regex:<!--#echo var=\"1\" -->:<!--#echo var=\"rest\" \
        -->\
                <!--#elif expr=\"$arg_a = two\" -->two\
                <!--#elif expr=\"$arg_a != $arg_b\" -->differs\
                <!--#else -->else<!--#endif -->.";
    let skipped = "<!--#if expr=\"$arg_a\" --><!--#include virtual=\"/missing\" -->\
                   <!--#set var=\"x\" value=\"set\" --><!--#endif --><!--#echo var=\"x\" -->";
    let server = setup(driver, "location / { ssi on; } error_log %DIR%/error.log;")
        .file("www/page.html", page)
        .file("www/skipped.html", skipped)
        .file(
            "www/orphans.html",
            "a<!--#else -->b<!--#endif -->c<!--#if expr=\"1\" --><!--#if expr=\"1\" --><!--#endif -->",
        )
        .file(
            "www/wrong.html",
            "<!--#if expr=\"$a & $b\" -->x<!--#endif --><!--#if expr=\"$a = /(/\" -->y<!--#endif -->",
        )
        .start();
    let mut client = server.connect();
    assert_answer(&client.get("/page.html?a=xxyz"), 200, "regex:xx:yz.");
    assert_answer(&client.get("/page.html?a=two"), 200, "two.");
    assert_answer(&client.get("/page.html?a=1&b=2"), 200, "differs.");
    assert_answer(&client.get("/page.html?a=1&b=1"), 200, "else.");
    assert_answer(&client.get("/skipped.html"), 200, "(none)");
    let message = "[an error occurred while processing the directive]";
    assert_answer(&client.get("/orphans.html"), 200, &format!("a{message}b{message}c{message}"));
    server.wait_logged("invalid context of SSI command: \"else\"");
    server.wait_logged("the \"if\" command inside the \"if\" command");
    assert_eq!(client.get("/wrong.html").text().matches(message).count(), 4);
    server.wait_logged("invalid expression in \"$a & $b\"");
    server.wait_logged("pcre2_compile() failed: missing closing parenthesis in \"(\"");
    server.stop();
}

fn mistakes_are_shown_as_the_page_wants(driver: Driver) {
    let pages = [
        ("unknown", "<!--#nonsense -->", "invalid SSI command: \"nonsense\""),
        ("name", "<!--#echo name=\"x\" -->", "invalid parameter name: \"name\" in \"echo\" SSI command"),
        ("absent", "<!--#echo -->", "mandatory \"var\" parameter is absent in \"echo\" SSI command"),
        ("twice", "<!--#echo var=\"a\" var=\"b\" -->", "duplicate \"var\" parameter in \"echo\" SSI command"),
        ("nothing", "<!--#include -->", "no parameter in \"include\" SSI command"),
        ("both", "<!--#include virtual=\"/a\" file=\"b\" -->", "inclusion may be either virtual=\"/a\" or file=\"b\""),
        (
            "wait",
            "<!--#include virtual=\"/a\" wait=\"perhaps\" -->",
            "invalid value \"perhaps\" in the \"wait\" parameter",
        ),
        ("file", "<!--#include file=\"a\" wait=\"yes\" -->", "\"wait\" cannot be used with file=\"a\""),
        ("stub", "<!--#include virtual=\"/a\" stub=\"b\" -->", "\"stub\"=\"b\" for \"include\" not found"),
        ("set", "<!--#include virtual=\"/a\" stub=\"b\" set=\"c\" -->", "\"set\" and \"stub\" cannot be used together"),
        ("up", "<!--#include virtual=\"/a/../../b\" -->", "unsafe URI \"/a/../../b\" was detected"),
        ("variable", "<!--#set var=\"a\" value=\"${a\" -->", "the closing bracket in \"a\" variable is missing"),
        ("dollar", "<!--#set var=\"a\" value=\"$\" -->", "invalid variable name in \"$\""),
        ("syntax", "<!--#echo var=x -->", "unexpected \"x\" symbol before value of \"var\" parameter in \"echo\""),
        ("long", "<!--#echo var=\"0123456789\" -->", "too long \"012345678...\" value of \"var\" parameter"),
    ];
    let mut setup = setup(
        driver,
        "location / { ssi on; location /long { ssi on; ssi_value_length 8; } }
         location /silent/ { alias %DIR%/www/; ssi on; ssi_silent_errors on; }",
    );
    for (name, page, _) in pages {
        setup = setup.file(&format!("www/{name}.html"), format!("[{page}]"));
    }
    let own = "<!--#config errmsg=\"oh\" --><!--#nonsense --><!--#config errmsg=\"\" --><!--#nonsense -->\
               <!--#include virtual=\"/missing\" -->";
    let server = setup.file("www/own.html", own).start();
    let mut client = server.connect();
    for (name, page, message) in pages {
        let shown = "[[an error occurred while processing the directive]]";
        let response = client.get(&format!("/{name}.html"));
        assert_eq!((response.status, response.text()), (200, shown), "{page}");
        server.wait_logged(message);
    }
    assert_answer(&client.get("/silent/unknown.html"), 200, "[]");
    // A missing page is included as its error page.
    let response = client.get("/own.html");
    assert!(response.text().starts_with("oh<html>") && response.text().contains("404 Not Found"), "{response:?}");
    server.wait_logged(", subrequest: \"/missing\"");
    server.stop();
}

fn blocks_replace_missing_or_empty_includes(driver: Driver) {
    let page = "<!--#block name=\"one\" -->block of <!--#echo var='uri' --><!--#endblock -->\
                1<!--#include virtual=\"/missing\" stub=\"one\" -->\
                2<!--#include virtual=\"/there\" stub=\"one\" -->\
                3<!--#include virtual=\"/nothing\" stub=\"one\" -->\
                4<!--#include virtual=\"/paged\" stub=\"one\" -->";
    let locations = "location / { ssi on; }
         location = /there { return 200 there; }
         location = /nothing { return 204; }
         location = /paged { ssi on; error_page 403 /there; return 403; }";
    let server = setup(driver, locations).file("www/page.html", page).start();
    // Commands in a block run when the block replaces a response.
    let text = "1block of /missing2there3block of <!--#echo var=\"uri\" -->4block of /paged";
    assert_answer(&server.get("/page.html"), 200, text);
    server.stop();
}

fn files_of_any_size_are_included(driver: Driver) {
    let large: Vec<u8> =
        (0..3_000_000_u32).map(|number| b"0123456789abcdef\n"[(number % 1000 * 7919 % 17) as usize]).collect();
    let page = format!("{}<!--#include virtual=\"/large.txt\" -->{}", "a".repeat(100_000), "b".repeat(100_000));
    let all = [&page.as_bytes()[..100_000], &large, &page.as_bytes()[page.len() - 100_000..]].concat();
    for sendfile in ["on", "off"] {
        let locations =
            format!("sendfile {sendfile}; types {{ text/html html; text/plain txt; }} location ~ html$ {{ ssi on; }}");
        let server = setup(driver, &locations).file("www/page.html", &page).file("www/large.txt", &large).start();
        let mut client = server.connect();
        for _ in 0..2 {
            assert!(client.get("/page.html").body == all);
        }
        // The same over HTTP/1.0, without chunks.
        let response = client.ask("GET /page.html HTTP/1.0\r\nHost: localhost\r\n\r\n");
        assert!(response.body == all);
        server.stop();
    }
}

fn only_the_client_s_request_is_conditional_or_in_parts(driver: Driver) {
    let server = setup(
        driver,
        "types { text/html html; text/plain txt; } add_header X-Own yes; \
        location ~ html$ { ssi on; ssi_last_modified on; }",
    )
    .file("www/page.html", "[<!--#include virtual=\"/part.txt\" -->]")
    .file("www/part.txt", "0123456789")
    .start();
    let mut client = server.connect();
    let response = client.ask("GET /page.html HTTP/1.1\r\nHost: h\r\nRange: bytes=0-1\r\nIf-None-Match: *, x\r\n\r\n");
    assert_eq!((response.status, response.text()), (200, "[0123456789]"));
    assert!(response.header("ETag").is_some_and(|etag| etag.starts_with("W/")), "{response:?}");
    let modified = response.header("Last-Modified").expect("kept").to_owned();
    assert_eq!(response.headers.iter().filter(|(name, _)| name == "X-Own").count(), 1);
    let response = client.ask(format!("GET /page.html HTTP/1.1\r\nHost: h\r\nIf-Modified-Since: {modified}\r\n\r\n"));
    assert_eq!(response.status, 304);
    server.stop();
}

fn a_head_is_all_that_a_head_request_starts(driver: Driver) {
    let server = setup(driver, "log_subrequest on; location / { ssi on; add_after_body /part.html; }")
        .file("www/page.html", "[<!--#include virtual=\"/part.html\" -->]")
        .file("www/part.html", "part")
        .start();
    let mut client = server.connect();
    let response = client.ask("HEAD /page.html HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((response.status, response.header("Content-Length")), (200, None));
    assert_answer(&client.get("/part.html"), 200, "partpart");
    server.directory.wait_line("access.log", "GET /part.html");
    server.stop();
}

fn subrequests_share_variables_and_the_client(driver: Driver) {
    let locations = "location / { ssi on; }
         location ~ ^/named/(?<name>.*) { return 200 \"$name from $remote_addr $request_method $http_x\"; }
         location = /ids { return 200 $request_id; }
         location = /inside { internal; return 200 inside; }
         location ~ ^/groups/(.*)/(.*) { return 200 $1-$2; }";
    let page = "<!--#include virtual=\"/named/x\" wait=\"yes\" -->,<!--#echo var=\"name\" -->,\
                <!--#include virtual=\"/inside\" -->,<!--#include virtual=\"/groups/a/b\" -->";
    let server = setup(driver, locations)
        .file("www/page.html", page)
        .file("www/ids.html", "<!--#include virtual=\"/ids\" -->=<!--#echo var=\"request_id\" -->")
        .start();
    let mut client = server.connect();
    let response = client.ask("POST /page.html HTTP/1.1\r\nHost: h\r\nX: y\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(response.status, 405);
    let response = client.ask("GET /page.html HTTP/1.1\r\nHost: h\r\nX: y\r\n\r\n");
    assert_answer(&response, 200, "x from unix: GET y,x,inside,a-b");
    let response = client.get("/ids.html");
    let (one, other) = response.text().split_once('=').expect("two of them");
    assert!(one.len() == 32 && one == other);
    assert_eq!(client.get("/inside").status, 404);
    server.stop();
}

fn subrequests_are_logged_where_that_is_wanted(driver: Driver) {
    let locations = "location / { ssi on; }
         location = /told.html { log_subrequest on; access_log %DIR%/told.log told; }";
    let server = setup(driver, locations)
        .replace("http {", "http { log_format told \"$uri $status $request\";")
        .file("www/page.html", "<!--#include virtual=\"/told.html\" --><!--#include virtual=\"/untold.html\" -->")
        .file("www/told.html", "1")
        .file("www/untold.html", "2")
        .start();
    assert_answer(&server.get("/page.html"), 200, "12");
    server.directory.wait_line("told.log", "/told.html");
    assert_eq!(server.directory.read("told.log"), "/told.html 200 GET /page.html HTTP/1.1\n");
    server.directory.wait_line("access.log", "/page.html");
    assert_eq!(server.directory.read("access.log").lines().count(), 1);
    server.stop();
}

fn memory_of_pages_is_bounded(driver: Driver) {
    let locations = "location / { ssi on; } location ~ txt$ { subrequest_output_buffer_size 10; }
        location ~ none$ { subrequest_output_buffer_size 0; }";
    let doubling = format!("<!--#set var=\"x\" value=\"x\" -->{}.", "<!--#set var=\"x\" value=\"$x$x\" -->".repeat(40));
    let server = setup(driver, locations)
        .file("www/page.html", "<!--#include virtual=\"/$arg_page\" set=\"x\" -->[<!--#echo var=\"x\" -->]")
        .file("www/fits.txt", "0123456789")
        .file("www/larger.txt", "0123456789x")
        .file("www/empty.none", "")
        .file("www/byte.none", "x")
        .file("www/doubling.html", doubling)
        .start();
    let mut client = server.connect();
    assert_answer(&client.get("/page.html?page=fits.txt"), 200, "[0123456789]");
    assert_answer(&client.get("/page.html?page=missing"), 200, "[]");
    assert_answer(&client.get("/page.html?page=empty.none"), 200, "[]");
    let response = client.get("/doubling.html");
    assert!(response.status == 200 && response.text().ends_with("directive]."), "{response:?}");
    // As in nginx, the whole response breaks off.
    for page in ["larger.txt", "byte.none"] {
        let mut client = server.connect();
        client.send(format!("GET /page.html?page={page} HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert!(!client.read_to_end().ends_with(b"0\r\n\r\n"), "{page}");
    }
    server.wait_logged_times("too big subrequest response", 2);
    server.stop();
}

fn a_block_that_does_not_fit_stays_hidden(driver: Driver) {
    let inside = "<!--#else --><!--#nonsense -->inside";
    let page = format!(
        "before<!--#block name=\"large\" -->{inside}{}{inside}<!--#endblock -->,after<!--#include virtual=\"/none\" \
         stub=\"large\" -->.",
        "x".repeat(1024 * 1024)
    );
    let server =
        setup(driver, "location / { ssi on; } location = /none { return 204; }").file("www/page.html", page).start();
    assert!(server.get("/page.html").text() == "before,after.");
    server.wait_logged("the SSI page has too many or too long variables, blocks or includes");
    server.stop();
}

fn the_time_is_shown_in_the_format_of_the_page(driver: Driver) {
    let page = "<!--#config timefmt=\"<%Y>\" --><!--#set var=\"a\" value=\"$date_gmt\" --><!--#echo var=\"a\" \
        encoding=\"none\" -->\
                <!--#config timefmt=\"%s\" --><!--#echo var=\"date_local\" --><!--#include virtual=\"/other.html\" -->";
    let server = setup(driver, "location / { ssi on; add_header X-Date $date_gmt; }")
        .file("www/page.html", page)
        .file("www/other.html", ",<!--#echo var=\"date_gmt\" -->")
        .start();
    let response = server.get("/page.html");
    let (own, other) = response.text().split_once(',').expect("two documents");
    let (year, seconds) = own.split_once('>').expect("two times");
    assert!(year.len() == 5 && seconds.parse::<u64>().is_ok_and(|seconds| seconds > 1_600_000_000), "{own}");
    assert!(other.ends_with(" GMT") && other.contains("day, "), "{other}");
    assert!(response.header("X-Date").is_some_and(|date| date.ends_with(" GMT")), "{response:?}");
    server.stop();
}

fn additions_come_before_and_after(driver: Driver) {
    let locations = "types { text/html html; text/plain txt; }
         add_before_body /before; add_after_body /after;
         location = /before { return 200 \"<\"; }
         location = /after { add_after_body /before; return 200 \">\"; }
         location = /off.html { add_before_body ''; add_after_body ''; }
         location = /text.txt { addition_types text/plain; }
         location = /ssi.html { ssi on; }
         location = /202.html { return 202 body; }
         location = /large.html { sendfile on; }
         location = /missing.html { error_page 404 =200 /page.html; }";
    let large = "x".repeat(300_000);
    let server = setup(driver, locations)
        .file("www/page.html", "page")
        .file("www/off.html", "off")
        .file("www/text.txt", "text")
        .file("www/plain.txt", "plain")
        .file("www/ssi.html", "[<!--#include virtual=\"/page.html\" -->]")
        .file("www/large.html", &large)
        .start();
    let mut client = server.connect();
    let response = client.get("/page.html");
    assert_answer(&response, 200, "<page>");
    assert_eq!((response.header("Content-Length"), response.header("Accept-Ranges")), (None, None));
    assert!(response.header("ETag").is_some_and(|etag| etag.starts_with("W/")), "{response:?}");
    assert_answer(&client.get("/off.html"), 200, "off");
    assert_answer(&client.get("/text.txt"), 200, "<text>");
    assert_answer(&client.get("/plain.txt"), 200, "plain");
    // Additions apply to the document alone, not to its subrequests.
    assert_answer(&client.get("/ssi.html"), 200, "<[page]>");
    assert_answer(&client.get("/202.html"), 202, "body");
    assert_answer(&client.get("/large.html"), 200, &format!("<{large}>"));
    assert_answer(&client.get("/missing.html"), 200, "<page>");
    server.stop();
}

const DECISIONS: &str = "
    location = /auth/open { return 204; }
    location = /auth/open-200 { add_header WWW-Authenticate no; return 200 text; }
    location = /auth/challenge { auth_request /auth/forbidden; return 401; }
    location = /auth/forbidden { return 403; }
    location = /auth/error { return 404; }
    location = /auth/moved { return 302 /elsewhere; }
    location = /auth/closed { return 444; }
    location = /auth/paged { error_page 403 =204 /nothing; return 403; }
    location = /auth/file { alias %DIR%/www/page.html; }
    location = /nothing { return 204; }
";

fn another_location_decides(driver: Driver) {
    let mut locations = DECISIONS.to_owned();
    for name in ["open", "open-200", "challenge", "forbidden", "error", "moved", "closed", "paged", "file", "missing"] {
        locations.push_str(&format!("location = /{name} {{ auth_request /auth/{name}; alias %DIR%/www/page.html; }}"));
    }
    locations.push_str(
        "location /in/ { auth_request /auth/forbidden; alias %DIR%/www/; \
         location /in/off/ { auth_request off; alias %DIR%/www/; } }
         location = /stored { auth_request /auth/open; test_store_body; }",
    );
    let server = setup(driver, &locations).file("www/page.html", "page").start();
    let mut client = server.connect();
    for (path, status) in [
        ("/open", 200),
        ("/open-200", 200),
        ("/challenge", 401),
        ("/forbidden", 403),
        ("/error", 500),
        ("/moved", 500),
        ("/paged", 200),
        ("/file", 200),
        ("/missing", 500),
    ] {
        let mut client = server.connect();
        let response = client.get(path);
        assert_eq!((response.status, response.text() == "page"), (status, status == 200), "{path}: {response:?}");
        assert_eq!(response.header("WWW-Authenticate"), None);
    }
    server.wait_logged("auth request unexpected status: 404");
    server.wait_logged("auth request unexpected status: 302");
    let mut closed = server.connect();
    closed.send("GET /closed HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(closed.read_to_end(), b"");
    assert_eq!(client.get("/in/page.html").status, 403);
    assert_answer(&client.get("/in/off/page.html"), 200, "page");
    // The body is not sent to the location that decides.
    let response = client.ask("POST /stored HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello");
    assert!(response.text().starts_with("5 memory"), "{response:?}");
    server.stop();
}

fn the_method_shown_is_the_client_s(driver: Driver) {
    let locations = "
        location = /asked { auth_request /auth; alias %DIR%/www/page.html; }
        location = /auth { if ($request_method = POST) { return 403; } return 204; }";
    let server = setup(driver, locations).file("www/page.html", "page").start();
    let mut client = server.connect();
    assert_answer(&client.get("/asked"), 200, "page");
    let post = "POST /asked HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(client.ask(post).status, 403);
    server.stop();
}

fn answers_of_the_deciding_location_become_variables(driver: Driver) {
    let locations = "
        auth_request_set $user $arg_user;
        location /a/ { auth_request /auth; auth_request_set $kind \"$sent_http_content_type of $uri\";
                       add_header X-Kind $kind; alias %DIR%/www/; error_page 404 /fallback; }
        location = /b { auth_request /auth; add_header X-Kind \"<$kind>\"; add_header X-User \"<$user>\";
        return 200 x; }
        location = /c { auth_request /auth; add_header X-User \"<$user>\"; add_header X-Kind \"<$kind>\";
        alias %DIR%/www/page.html; }
        location = /auth { default_type application/json; return 200 '{}'; }
        location = /fallback { add_header X-Kind $kind always; return 200 fallback; }";
    let server = setup(driver, locations).file("www/page.html", "page").start();
    let mut client = server.connect();
    let kind = |response: &Response| response.header("X-Kind").map(str::to_owned);
    let response = client.get("/a/page.html");
    assert_eq!((response.text(), kind(&response).as_deref()), ("page", Some("application/json of /auth")));
    // The variables keep their values after a redirect.
    let response = client.get("/a/missing");
    assert_eq!((response.text(), kind(&response).as_deref()), ("fallback", Some("application/json of /auth")));
    // The values are those of the auth subrequest, which had no arguments.
    let response = client.get("/c?user=me");
    assert_eq!((response.header("X-User"), kind(&response).as_deref()), (Some("<>"), Some("<>")), "{response:?}");
    server.stop();
}

fn slow_auth_request_delays_no_others(driver: Driver) {
    let server = setup(driver, "location = /page.html { auth_request /slow; }").file("www/page.html", "page").start();
    let gate = Gate::new(&server);
    let (mut first, second) = (ask(&server, "/page.html"), ask(&server, "/page.html"));
    let begun = [gate.task(), gate.task()];
    assert_eq!(server.get("/none").status, 404);
    drop(second);
    server.directory.wait_line("access.log", "\"GET /page.html HTTP/1.1\" 499");
    drop(begun);
    assert_answer(&first.response(), 200, "page");
    server.stop();
}

fn copies_are_made_in_the_background(driver: Driver) {
    let locations = "location = /page.html { mirror /copy/one; mirror /slow; }
         location /off/ { mirror off; alias %DIR%/www/; }
         location = /copied.html { ssi on; mirror /copy/two; }
         location /copy/ { internal; log_subrequest on; access_log %DIR%/copies.log copy; return 200 unseen; }";
    let server = setup(driver, locations)
        .replace("http {", "http { log_format copy \"$request_method $uri $args\";")
        .file("www/page.html", "page")
        .file("www/copied.html", "<!--#include virtual=\"/page.html\" -->")
        .start();
    let gate = Gate::new(&server);
    let mut client = server.connect();
    assert_answer(&client.get("/page.html?a=b"), 200, "page");
    let mut task = gate.task();
    assert_eq!(task.says(), "a=b");
    // The connection is usable while the copy is in flight, and closing it does not affect the copy.
    assert_answer(&client.get("/off/page.html"), 200, "page");
    let response = client.ask("HEAD /page.html HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(response.status, 200);
    drop(client);
    drop((task, gate.task()));
    server.directory.wait_line("access.log", "\"HEAD /page.html HTTP/1.1\" 200");
    // Only the client's request is copied, not its subrequests.
    assert_answer(&server.get("/copied.html"), 200, "page");
    server.directory.wait_line("copies.log", "/copy/two");
    assert_eq!(server.directory.read("copies.log"), "GET /copy/one a=b\nHEAD /copy/one -\nGET /copy/two -\n");
    server.stop();
}

/// The place is taken by the client's request, or by a subrequest.
fn place_of_a_request_is_free_while_its_copy_runs(driver: Driver) {
    let locations = "location = /page.html { limit_conn one 1; mirror /slow; }
         location = /outer.html { ssi on; mirror /slow; }
         location = /counted.html { limit_conn one 1; }";
    let server = setup(driver, locations)
        .replace("http {", "http { limit_conn_zone all zone=one:1m;")
        .file("www/page.html", "page")
        .file("www/outer.html", "<!--#include virtual=\"/counted.html\" -->")
        .file("www/counted.html", "counted")
        .start();
    let gate = Gate::new(&server);
    let mut client = server.connect();
    let mut copies = Vec::new();
    for (path, text) in [("/page.html", "page"), ("/page.html", "page"), ("/outer.html", "counted")] {
        assert_answer(&client.get(path), 200, text);
        copies.push(gate.task());
    }
    assert_answer(&client.get("/counted.html"), 200, "counted");
    drop(copies);
    server.stop();
}

fn place_taken_by_a_copy_is_held_until_the_copy_is_over(driver: Driver) {
    let locations = "location = /page.html { mirror /copy; }
         location = /copy {
             limit_conn one 1; test_pool gate %DIR%/gate; log_subrequest on; access_log %DIR%/copies.log;
         }";
    let server = setup(driver, locations)
        .replace("http {", "http { limit_conn_zone all zone=one:1m;")
        .file("www/page.html", "page")
        .start();
    let gate = Gate::new(&server);
    let mut client = server.connect();
    assert_answer(&client.get("/page.html"), 200, "page");
    let copy = gate.task();
    assert_answer(&client.get("/page.html"), 200, "page");
    server.directory.wait_line("copies.log", "\"GET /page.html HTTP/1.1\" 503");
    drop(copy);
    server.directory.wait_line("copies.log", "\"GET /page.html HTTP/1.1\" 200");
    assert_answer(&client.get("/page.html"), 200, "page");
    drop(gate.task());
    server.stop();
}

fn the_body_of_a_copied_request_is_read_once(driver: Driver) {
    let locations = "client_body_buffer_size 1k;
         location = /store { mirror /copy; test_store_body; }
         location = /stream { mirror /copy; mirror_request_body off; test_store_body; }
         location = /copy { internal; test_store_body; log_subrequest on; access_log %DIR%/copies.log; }
         location = /limited { client_max_body_size 10; mirror /copy; test_store_body; }";
    let server = setup(driver, locations).start();
    let mut client = server.connect();
    let body = "x".repeat(5000);
    for path in ["/store", "/stream"] {
        let head = format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len());
        let response = client.ask(format!("{head}{body}"));
        assert!(response.text().starts_with("5000 file"), "{response:?}");
    }
    let chunked = "POST /limited HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n\
        01234567890123456789\r\n0\r\n\r\n";
    assert_eq!(client.ask(chunked).status, 413);
    server.directory.wait_until("two copies", |directory| {
        directory.try_read("copies.log").is_some_and(|log| log.lines().count() == 2)
    });
    assert_eq!(server.log().matches("is buffered to a temporary file").count(), 2, "{server}");
    server.stop();
}

fn stop_waits_for_background_subrequests(driver: Driver) {
    let server = setup(driver, "location = /page.html { mirror /slow; }").file("www/page.html", "page").start();
    let gate = Gate::new(&server);
    assert_answer(&server.get("/page.html"), 200, "page");
    let task = gate.task();
    server.signal(rustix::process::Signal::QUIT);
    server.wait_logged("gracefully shutting down");
    drop(task);
    server.directory.wait_line("access.log", "200 4");
    server.stop();
}

/// The combinations of `satisfy`, an address or password check, and the decision of `auth_request`.
fn deciding_is_one_of_several_conditions(driver: Driver) {
    let mut locations = DECISIONS.to_owned();
    let cases = [
        ("all", "allow all", "open", 200),
        ("all", "allow all", "challenge", 401),
        ("all", "allow all", "forbidden", 403),
        ("all", "deny all", "open", 403),
        ("all", "deny all", "challenge", 403),
        ("all", "auth_basic closed", "open", 401),
        ("all", "auth_basic closed", "forbidden", 401),
        ("any", "allow all", "open", 200),
        ("any", "allow all", "forbidden", 200),
        ("any", "deny all", "open", 200),
        ("any", "deny all", "challenge", 401),
        ("any", "deny all", "forbidden", 403),
        ("any", "auth_basic closed", "open", 200),
        ("any", "auth_basic closed", "challenge", 401),
        // The client may still send a password.
        ("any", "auth_basic closed", "forbidden", 401),
    ];
    for (index, (satisfy, other, decision, _)) in cases.iter().enumerate() {
        locations.push_str(&format!(
            "location = /{index} {{ satisfy {satisfy}; {other}; auth_basic_user_file %DIR%/passwords;
                auth_request /auth/{decision}; alias %DIR%/www/page.html; }}"
        ));
    }
    let server =
        setup(driver, &locations).file("www/page.html", "page").file("passwords", "me:{PLAIN}secret\n").start();
    for (index, (satisfy, other, decision, status)) in cases.iter().enumerate() {
        let response = server.get(&format!("/{index}"));
        assert_eq!(response.status, *status, "{satisfy} of {other} and {decision}");
        assert_eq!(response.header("WWW-Authenticate").is_some(), *status == 401 && other.starts_with("auth"));
    }
    server.stop();
}

fn other_filters_see_the_same_as_in_nginx(driver: Driver) {
    let locations = "types { text/html html; text/plain txt; } gzip_min_length 1;
         location = /page.html { ssi on; gzip on; sub_filter text TEXT; sub_filter_once off;
         add_after_body /after.txt; }
         location = /part.txt { gzip on; gzip_types *; }
         location = /marked.txt { sub_filter_types *; sub_filter text marked; }
         location = /after.txt { ssi on; ssi_types *; }";
    let page = "text <!--#include virtual=\"/part.txt\" --> te<!--#include virtual=\"/marked.txt\" -->xt ";
    let server = setup(driver, locations)
        .file("www/page.html", page)
        .file("www/part.txt", "text")
        .file("www/marked.txt", "text")
        .file("www/after.txt", "text <!--#echo var=\"uri\" -->")
        .start();
    let mut client = server.connect();
    // An included part passes the filters of its own location, and of the page's only those after `postpone`.
    let all = "TEXT text temarkedxt text /after.txt";
    assert_answer(&client.get("/page.html"), 200, all);
    let zipped = client.ask("GET /page.html HTTP/1.1\r\nHost: h\r\nAccept-Encoding: gzip\r\n\r\n");
    assert_eq!((zipped.status, zipped.header("Content-Encoding")), (200, Some("gzip")));
    assert!(zipped.body.starts_with(b"\x1f\x8b") && zipped.body != all.as_bytes(), "{zipped:?}");
    server.stop();
}

fn client_address_set_in_a_subrequest_is_seen_by_all(driver: Driver) {
    let locations = "location / { auth_request /who; ssi on; }
         location = /who { set_real_ip_from unix:; real_ip_header X-Real-IP; empty_gif; }
         location = /address { return 200 $remote_addr; }";
    let page = "<!--#echo var=\"remote_addr\" -->,<!--#include virtual=\"/address\" -->";
    let server = setup(driver, locations).file("www/page.html", page).start();
    let mut client = server.connect();
    for address in ["192.0.2.7", "192.0.2.8"] {
        let request = format!("GET /page.html HTTP/1.1\r\nHost: h\r\nX-Real-IP: {address}\r\n\r\n");
        assert_answer(&client.ask(&request), 200, &format!("{address},{address}"));
    }
    assert_answer(&client.get("/page.html"), 200, "unix:,unix:");
    server.stop();
}

fn a_place_taken_in_a_subrequest_is_held_until_the_request_is_over(driver: Driver) {
    let page = "<!--#include virtual=\"/counted.html\" wait=\"yes\" -->,<!--#include virtual=\"/slow?a\" -->";
    let server = setup(driver, "location / { ssi on; } location = /counted.html { limit_conn one 1; }")
        .replace("http {", "http { limit_conn_zone all zone=one:1m;")
        .file("www/page.html", page)
        .file("www/counted.html", "counted")
        .start();
    let gate = Gate::new(&server);
    let mut client = ask(&server, "/page.html");
    // The page continues after the subrequest that it has to wait for.
    let task = gate.task();
    assert_eq!(server.get("/counted.html").status, 503);
    drop(task);
    assert_answer(&client.response(), 200, "counted,done");
    assert_answer(&client.get("/counted.html"), 200, "counted");
    server.stop();
}

fn client_address_is_known_in_subrequests(driver: Driver) {
    let locations = "set_real_ip_from unix:; real_ip_header X-Real-IP;
         location / { ssi on; limit_req zone=one; }
         location = /address { return 200 $remote_addr; }
         location = /again.html { ssi on; limit_req zone=one; }";
    let server = setup(driver, locations)
        .replace("http {", "http { limit_req_zone $remote_addr zone=one:1m rate=1r/m;")
        .file("www/page.html", "<!--#echo var=\"remote_addr\" -->,<!--#include virtual=\"/again.html\" -->")
        .file("www/again.html", "<!--#include virtual=\"/address\" --> <!--#echo var=\"limit_req_status\" -->")
        .start();
    let mut client = server.connect();
    let request = "GET /page.html HTTP/1.1\r\nHost: h\r\nX-Real-IP: 192.0.2.7\r\n\r\n";
    // The client's request is limited once, not its subrequests.
    assert_answer(&client.ask(request), 200, "192.0.2.7,192.0.2.7 PASSED");
    assert_eq!(client.ask(request).status, 503);
    server.stop();
}
