//! HTTP/2 to upstream servers (`proxy_http_version 2`): shared connections, their limits and ends, windows, and faulty
//! servers.

use gale_protocol::http2::frame::{flag, frame_type};
use gale_protocol::http2::{ErrorCode, Limits};

use crate::support::http2::{Http2, block, frame};
use crate::support::http2_server::{Asked, Http2Server, limits};
use crate::support::{Backend, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    requests_share_a_connection_and_get_their_own_answers,
    a_server_gets_as_many_connections_as_its_stream_limit_makes_necessary,
    max_conns_bounds_the_requests_of_a_server_and_not_its_connections,
    a_connection_is_used_again_as_often_as_keepalive_requests_says,
    a_group_that_keeps_no_connections_ends_them_with_their_last_request,
    no_more_idle_connections_are_kept_than_keepalive_says,
    refused_request_with_any_method_is_sent_again,
    requests_behind_a_goaway_are_sent_again_and_those_before_it_end,
    a_stream_that_is_reset_is_a_bad_gateway_and_no_other_one_notices,
    a_body_waits_for_the_window_and_not_for_ever,
    windows_follow_the_settings,
    a_slow_client_holds_up_no_other_one,
    a_response_may_end_before_its_request,
    a_client_that_leaves_has_its_stream_reset,
    a_server_that_is_silent_is_left_and_asked_whether_it_is_there,
    a_connection_that_ends_is_told_by_status_or_by_a_broken_body,
    failed_connection_fails_for_all_waiting_requests,
    faults_of_a_server_are_bad_gateways,
    fields_of_the_connection_in_a_response_are_ignored,
    interim_responses_and_trailers_hide_the_same_fields_as_responses,
    heads_keep_their_fields_and_lose_those_of_the_connection,
    a_body_of_the_configuration_s_own_and_a_stored_one_are_sent,
    another_server_is_tried,
    a_request_is_written_anew_for_each_server_where_the_location_says_so,
    checks_speak_the_version_of_the_location,
    trailers_and_early_hints_pass_if_they_may,
);

/// A server on `%UNIX%` that passes all requests to a group of one backend.
fn setup(driver: Driver, backend: &Backend, group: &str, location: &str) -> Setup {
    let address = backend.address();
    Setup::http(
        driver,
        &format!(
            "upstream u {{ server {address}; {group} }}
             server {{ listen %UNIX%; http2 on; proxy_http_version 2;
             location / {{ proxy_pass http://u; {location} }} }}"
        ),
    )
}

fn start(driver: Driver, backend: &Backend, location: &str) -> Server {
    setup(driver, backend, "keepalive 8;", location).start()
}

/// The same with a group of two, of which the second is a backup.
fn start_with_spare(driver: Driver, [one, other]: [&Backend; 2], group: &str, location: &str) -> Server {
    let (one, other) = (one.address(), other.address());
    let text = format!(
        "upstream u {{ server {one} max_fails=0; server {other} backup; {group} }}
         server {{ listen %UNIX%; http2 on; location / {{ {location} }} }}"
    );
    Setup::http(driver, &text).start()
}

/// The first server answers 503, so the backup is asked and answers `here`. Returns both, with their requests.
fn refuse_and_answer(one: &Backend, spare: &Backend) -> [(Http2Server, Asked); 2] {
    let mut first = Http2Server::accept(one);
    let asked_first = first.whole_request();
    first.respond(asked_first.stream, 503, &[], true);
    let mut second = Http2Server::accept(spare);
    let asked_second = second.whole_request();
    second.answer(asked_second.stream, "here");
    [(first, asked_first), (second, asked_second)]
}

fn requests_share_a_connection_and_get_their_own_answers(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "add_header X-Status $upstream_status;");
    let mut client = Http2::unix(&server);
    let streams: Vec<_> = (0..3).map(|number| client.begin("GET", &format!("/{number}"), &[], true)).collect();
    let mut upstream = Http2Server::accept(&backend);
    let asked: Vec<_> = (0..3).map(|_| upstream.request()).collect();
    assert_eq!(asked.iter().map(|asked| asked.stream).collect::<Vec<_>>(), [1, 3, 5]);
    for asked in asked.iter().rev() {
        assert!(asked.is_complete);
        upstream.answer(asked.stream, &format!("this is {}", asked.path));
    }
    for (number, stream) in streams.into_iter().enumerate().rev() {
        let answer = client.answer(stream);
        assert_eq!((answer.status, answer.text()), (200, &*format!("this is /{number}")));
        assert_eq!(answer.header("x-status"), Some("200"));
    }
    assert!(backend.is_idle());
    server.stop();
}

fn a_server_gets_as_many_connections_as_its_stream_limit_makes_necessary(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let narrow = || Limits { concurrent_streams_max: 1, ..limits() };
    let first = client.begin("GET", "/first", &[], true);
    let second = client.begin("GET", "/second", &[], true);
    // The second request waits for the settings of the first connection, and finds no room there.
    let mut one = Http2Server::accept_with(&backend, narrow());
    let asked_first = one.request();
    let mut other = Http2Server::accept_with(&backend, narrow());
    let asked_second = other.request();
    assert_eq!((asked_first.path.as_str(), asked_second.path.as_str()), ("/first", "/second"));
    one.answer(asked_first.stream, "one");
    other.answer(asked_second.stream, "other");
    assert_eq!((client.answer(first).text(), client.answer(second).text()), ("one", "other"));
    server.stop();
}

fn max_conns_bounds_the_requests_of_a_server_and_not_its_connections(driver: Driver) {
    for pass in ["proxy_http_version 2; proxy_pass http://u;", "grpc_pass grpc://u;"] {
        let backend = Backend::tcp();
        let text = format!(
            "upstream u {{ server {} max_conns=2; keepalive 8; }}
             server {{ listen %UNIX%; http2 on; location / {{ {pass} }} }}",
            backend.address()
        );
        let server = Setup::http(driver, &text).start();
        let mut client = Http2::unix(&server);
        let first = client.begin("GET", "/first", &[], true);
        let mut upstream = Http2Server::accept(&backend);
        let asked_first = upstream.request();
        let second = client.begin("GET", "/second", &[], true);
        let asked_second = upstream.request();
        // The connection has room, but the server has none.
        assert_eq!(client.get("/third").status, 502, "{pass}");
        server.wait_logged("no live upstreams while connecting to upstream");
        upstream.answer(asked_first.stream, "one");
        assert_eq!(client.answer(first).text(), "one");
        let fourth = client.begin("GET", "/fourth", &[], true);
        let asked_fourth = upstream.request();
        assert_eq!(asked_fourth.path, "/fourth");
        upstream.answer(asked_second.stream, "two");
        upstream.answer(asked_fourth.stream, "four");
        assert_eq!((client.answer(second).text(), client.answer(fourth).text()), ("two", "four"));
        server.stop();
    }
}

fn a_connection_is_used_again_as_often_as_keepalive_requests_says(driver: Driver) {
    let backend = Backend::tcp();
    let server = setup(driver, &backend, "keepalive 8; keepalive_requests 2;", "").start();
    let mut client = server.connect();
    for _ in 0..2 {
        client.send("GET /a HTTP/1.1\r\nHost: x\r\n\r\n");
        let mut upstream = Http2Server::accept(&backend);
        let asked = upstream.request();
        upstream.answer(asked.stream, "a");
        assert_eq!(client.response().text(), "a");
        client.send("GET /b HTTP/1.1\r\nHost: x\r\n\r\n");
        let asked = upstream.request();
        assert_eq!(asked.stream, 3);
        upstream.answer(asked.stream, "b");
        assert_eq!(client.response().text(), "b");
        upstream.read_to_end();
        assert_eq!(upstream.goaways, [(0, ErrorCode::NO_ERROR)]);
    }
    server.stop();
}

fn a_group_that_keeps_no_connections_ends_them_with_their_last_request(driver: Driver) {
    let backend = Backend::tcp();
    let server = setup(driver, &backend, "keepalive 0;", "").start();
    let mut client = server.connect();
    for _ in 0..2 {
        client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        let mut upstream = Http2Server::accept(&backend);
        let asked = upstream.request();
        upstream.answer(asked.stream, "a");
        assert_eq!(client.response().text(), "a");
        upstream.read_to_end();
    }
    server.stop();
}

fn no_more_idle_connections_are_kept_than_keepalive_says(driver: Driver) {
    let backend = Backend::tcp();
    let server = setup(driver, &backend, "keepalive 1;", "").start();
    let mut client = Http2::unix(&server);
    let narrow = || Limits { concurrent_streams_max: 1, ..limits() };
    let first = client.begin("GET", "/first", &[], true);
    let mut one = Http2Server::accept_with(&backend, narrow());
    let asked_first = one.request();
    one.read_until(|one| !one.connection.awaits_settings_ack());
    let second = client.begin("GET", "/second", &[], true);
    let mut other = Http2Server::accept_with(&backend, narrow());
    let asked_second = other.request();
    one.answer(asked_first.stream, "one");
    client.answer(first);
    other.answer(asked_second.stream, "other");
    client.answer(second);
    // The connection that was idle for longest is closed.
    one.read_to_end();
    let third = client.begin("GET", "/third", &[], true);
    let asked_third = other.request();
    other.answer(asked_third.stream, "third");
    assert_eq!(client.answer(third).text(), "third");
    server.stop();
}

fn refused_request_with_any_method_is_sent_again(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/order", &[], false);
    client.send(stream, b"one", true);
    let mut one = Http2Server::accept(&backend);
    let asked = one.whole_request();
    one.reset(asked.stream, ErrorCode::REFUSED_STREAM);
    let mut other = Http2Server::accept(&backend);
    let asked = other.whole_request();
    assert_eq!((asked.method.as_str(), &asked.body[..]), ("POST", &b"one"[..]));
    other.answer(asked.stream, "done");
    assert_eq!(client.answer(stream).text(), "done");
    server.stop();
}

fn requests_behind_a_goaway_are_sent_again_and_those_before_it_end(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let first = client.begin("GET", "/first", &[], true);
    let mut one = Http2Server::accept(&backend);
    let asked_first = one.request();
    one.read_until(|one| !one.connection.awaits_settings_ack());
    let second = client.begin("GET", "/second", &[], true);
    assert_eq!(one.request().stream, 3);
    one.goaway(asked_first.stream, ErrorCode::NO_ERROR);
    let mut other = Http2Server::accept(&backend);
    let asked_second = other.request();
    assert_eq!(asked_second.path, "/second");
    other.answer(asked_second.stream, "other");
    assert_eq!(client.answer(second).text(), "other");
    one.answer(asked_first.stream, "one");
    assert_eq!(client.answer(first).text(), "one");
    one.read_to_end();
    server.stop();
}

fn a_stream_that_is_reset_is_a_bad_gateway_and_no_other_one_notices(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let first = client.begin("GET", "/first", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked_first = upstream.request();
    upstream.read_until(|upstream| !upstream.connection.awaits_settings_ack());
    let second = client.begin("GET", "/second", &[], true);
    let asked_second = upstream.request();
    upstream.reset(asked_first.stream, ErrorCode::INTERNAL_ERROR);
    assert_eq!(client.answer(first).status, 502);
    server.wait_logged("upstream rejected request with error 2 while reading response header from upstream");
    upstream.respond(asked_second.stream, 200, &[], false);
    upstream.send(asked_second.stream, b"a beginning", false);
    client.read_until(|client| client.answers.get(&second).is_some_and(|answer| !answer.body.is_empty()));
    upstream.reset(asked_second.stream, ErrorCode::INTERNAL_ERROR);
    let answer = client.answer(second);
    assert!(!answer.is_complete && answer.reset.is_some());
    let third = client.begin("GET", "/third", &[], true);
    let asked = upstream.request();
    upstream.answer(asked.stream, "third");
    assert_eq!(client.answer(third).text(), "third");
    server.stop();
}

fn a_body_waits_for_the_window_and_not_for_ever(driver: Driver) {
    let backend = Backend::tcp();
    let location = "client_max_body_size 0; location /hasty { proxy_pass http://u; proxy_send_timeout 1s; }";
    let server = start(driver, &backend, location);
    let mut client = Http2::unix(&server);
    let body = vec![b'x'; 300_000];
    let stream = client.begin("POST", "/", &[], false);
    client.send(stream, &body, true);
    let mut upstream = Http2Server::accept(&backend);
    // A peer that never opens the window gets as much as the window had.
    upstream.releases = false;
    let asked = upstream.request();
    upstream.open_window(0, 1 << 20);
    upstream.read_until(|upstream| upstream.asked[&asked.stream].body.len() >= 65_535);
    upstream.set_window(1 << 20);
    upstream.read_until(|upstream| upstream.asked[&asked.stream].is_complete);
    assert_eq!(upstream.asked[&asked.stream].body.len(), body.len());
    upstream.answer(asked.stream, "thanks");
    assert_eq!(client.answer(stream).text(), "thanks");
    // From now on the window stays closed.
    upstream.set_window(0);
    upstream.sync();
    let stream = client.begin("POST", "/hasty", &[], false);
    client.send(stream, &body, true);
    let asked = upstream.request();
    let answer = std::thread::scope(|scope| {
        let reading = scope.spawn(|| upstream.read_until(|upstream| upstream.asked[&asked.stream].reset.is_some()));
        let answer = client.answer(stream);
        reading.join().expect("the stream was reset");
        answer
    });
    assert_eq!(answer.status, 504);
    assert_eq!(upstream.asked[&asked.stream].reset, Some(ErrorCode::CANCEL));
    server.wait_logged("upstream timed out (110: Connection timed out) while sending request to upstream");
    server.stop();
}

fn windows_follow_the_settings(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "proxy_request_buffering off;");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/", &[], false);
    let narrow = Limits { stream_window: 5, ..limits() };
    let mut upstream = Http2Server::accept_with(&backend, narrow);
    upstream.releases = false;
    let asked = upstream.request();
    upstream.read_until(|upstream| !upstream.connection.awaits_settings_ack());
    client.send(stream, b"hello world", true);
    upstream.read_until(|upstream| upstream.asked[&asked.stream].body.len() == 5);
    assert_eq!(upstream.asked[&asked.stream].body, b"hello");
    upstream.connection.release(asked.stream, 5);
    upstream.flush();
    upstream.read_until(|upstream| upstream.asked[&asked.stream].body.len() == 10);
    upstream.connection.release(asked.stream, 5);
    upstream.flush();
    upstream.read_until(|upstream| upstream.asked[&asked.stream].is_complete);
    assert_eq!(upstream.asked[&asked.stream].body, b"hello world");
    upstream.answer(asked.stream, "well");
    assert_eq!(client.answer(stream).text(), "well");
    server.stop();
}

fn a_slow_client_holds_up_no_other_one(driver: Driver) {
    let backend = Backend::tcp();
    // Connections belong to one worker.
    let server = setup(driver, &backend, "keepalive 8;", "proxy_buffering off;")
        .replace("worker_processes 2;", "worker_processes 1;")
        .start();
    let mut slow = Http2::unix(&server);
    slow.releases = false;
    let mut fast = Http2::unix(&server);
    let slow_streams: Vec<_> = (0..4).map(|_| slow.begin("GET", "/slow", &[], true)).collect();
    let mut upstream = Http2Server::accept(&backend);
    let piece = vec![b's'; 16 * 1024];
    let mut held = Vec::new();
    for _ in &slow_streams {
        let asked = upstream.request();
        upstream.respond(asked.stream, 200, &[], false);
        // As much as the window permits at once.
        while upstream.send_some(asked.stream, &piece, false) > 0 {}
        held.push(asked.stream);
    }
    for _ in 0..3 {
        let stream = fast.begin("GET", "/fast", &[], true);
        let asked = upstream.request();
        upstream.respond(asked.stream, 200, &[], false);
        std::thread::scope(|scope| {
            scope.spawn(|| upstream.send(asked.stream, &vec![b'f'; 1_000_000], true));
            assert_eq!(fast.answer(stream).body.len(), 1_000_000);
        });
    }
    slow_streams.iter().for_each(|stream| slow.reset(*stream, ErrorCode::CANCEL));
    upstream.read_until(|upstream| held.iter().all(|stream| upstream.asked[stream].reset == Some(ErrorCode::CANCEL)));
    server.stop();
}

fn a_response_may_end_before_its_request(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "proxy_request_buffering off;");
    let mut client = Http2::unix(&server);
    let mut stream = client.begin("POST", "/", &[], false);
    let mut upstream = Http2Server::accept(&backend);
    for tells in [true, false] {
        client.send(stream, b"a beginning", false);
        let asked = upstream.request();
        upstream.read_until(|upstream| !upstream.asked[&asked.stream].body.is_empty());
        upstream.answer(asked.stream, "enough");
        if tells {
            upstream.reset(asked.stream, ErrorCode::NO_ERROR);
        }
        let answer = client.answer(stream);
        assert_eq!((answer.status, answer.text()), (200, "enough"));
        if !tells {
            upstream.read_until(|upstream| upstream.asked[&asked.stream].reset.is_some());
        }
        stream = client.begin("POST", "/", &[], false);
    }
    server.stop();
}

fn a_client_that_leaves_has_its_stream_reset(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let before = client.begin("GET", "/before", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    client.reset(before, ErrorCode::CANCEL);
    upstream.read_until(|upstream| upstream.asked[&asked.stream].reset == Some(ErrorCode::CANCEL));
    let within = client.begin("GET", "/within", &[], true);
    let asked = upstream.request();
    upstream.respond(asked.stream, 200, &[], false);
    upstream.send(asked.stream, b"some", false);
    client.read_until(|client| client.answers.get(&within).is_some_and(|answer| !answer.body.is_empty()));
    client.reset(within, ErrorCode::CANCEL);
    upstream.read_until(|upstream| upstream.asked[&asked.stream].reset == Some(ErrorCode::CANCEL));
    server.stop();
}

fn a_server_that_is_silent_is_left_and_asked_whether_it_is_there(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "location /hasty { proxy_pass http://u; proxy_read_timeout 1s; }");
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/hasty", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    assert_eq!(client.answer(stream).status, 504);
    server.wait_logged("upstream timed out (110: Connection timed out) while reading response header from upstream");
    // The connection stays open and gets the next request, too.
    upstream.read_until(|upstream| upstream.asked[&asked.stream].reset == Some(ErrorCode::CANCEL));
    upstream.sync();
    let stream = client.begin("GET", "/", &[], true);
    let asked = upstream.request();
    upstream.answer(asked.stream, "here");
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.text()), (200, "here"));
    server.stop();
}

fn a_connection_that_ends_is_told_by_status_or_by_a_broken_body(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    upstream.request();
    upstream.close();
    assert_eq!(client.answer(stream).status, 502);
    server.wait_logged("upstream prematurely closed connection while reading response header from upstream");
    let stream = client.begin("GET", "/", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    upstream.respond(asked.stream, 200, &[], false);
    upstream.send(asked.stream, b"some", false);
    client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| !answer.body.is_empty()));
    upstream.close();
    let answer = client.answer(stream);
    assert!(answer.reset.is_some() && !answer.is_complete);
    server.wait_logged("upstream prematurely closed connection while reading upstream");
    server.stop();
}

fn failed_connection_fails_for_all_waiting_requests(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address().to_owned();
    drop(backend);
    let server = Setup::server(
        driver,
        &format!("http2 on; proxy_http_version 2; location / {{ proxy_pass http://{address}; }}"),
    )
    .start();
    let mut client = Http2::unix(&server);
    let streams: Vec<_> = (0..5).map(|_| client.begin("GET", "/", &[], true)).collect();
    for stream in streams {
        assert_eq!(client.answer(stream).status, 502);
    }
    server.stop();
}

fn faults_of_a_server_are_bad_gateways(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    // Each of these ends its stream, and the connection goes on.
    let bad_heads: &[&[(&str, &str)]] = &[
        &[("x", "no status")],
        &[(":status", "2x0")],
        &[(":status", "101")],
        &[(":status", "200"), ("X-Capital", "x")],
        &[(":status", "200"), ("x", "a\nb")],
        &[(":status", "200"), ("content-length", "1"), ("content-length", "2")],
    ];
    let mut stream = client.begin("GET", "/", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    for head in bad_heads {
        let asked = upstream.request();
        upstream.raw(frame(frame_type::HEADERS, flag::END_HEADERS, asked.stream, block(head)));
        let answer = client.answer(stream);
        assert_eq!(answer.status, 502, "{head:?}");
        stream = client.begin("GET", "/", &[], true);
    }
    // More than announced.
    let asked = upstream.request();
    let head = block(&[(":status", "200"), ("content-length", "2")]);
    upstream.raw(frame(frame_type::HEADERS, flag::END_HEADERS, asked.stream, head));
    upstream.raw(frame(frame_type::DATA, flag::END_STREAM, asked.stream, b"three"));
    let answer = client.answer(stream);
    assert!(answer.status == 502 || answer.reset.is_some(), "{answer:?}");
    // Each of these ends its connection.
    for bytes in [
        frame(frame_type::DATA, 0, 0, b"no stream"),
        frame(frame_type::PUSH_PROMISE, flag::END_HEADERS, 1, [0; 8]),
        frame(frame_type::HEADERS, flag::END_HEADERS, 1, [0xff; 8]),
        frame(frame_type::SETTINGS, 0, 0, b"short"),
        frame(frame_type::WINDOW_UPDATE, 0, 0, [0; 4]),
    ] {
        let stream = client.begin("GET", "/", &[], true);
        let asked = upstream.request();
        upstream.raw(bytes);
        let answer = client.answer(stream);
        assert_eq!(answer.status, 502, "{asked:?}");
        upstream.read_to_end();
        assert!(upstream.goaways.iter().any(|(_, code)| *code != ErrorCode::NO_ERROR), "{:?}", upstream.goaways);
        let stream = client.begin("GET", "/", &[], true);
        upstream = Http2Server::accept(&backend);
        let asked = upstream.request();
        upstream.answer(asked.stream, "well again");
        assert_eq!(client.answer(stream).text(), "well again");
    }
    server.stop();
}

fn fields_of_the_connection_in_a_response_are_ignored(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/", &[], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    let fields = [("connection", "close"), ("keep-alive", "5"), ("transfer-encoding", "chunked"), ("upgrade", "x")];
    let head = block(&[&[(":status", "200"), ("x", "y")], &fields[..]].concat());
    upstream.raw(frame(frame_type::HEADERS, flag::END_HEADERS, asked.stream, head));
    upstream.raw(frame(frame_type::DATA, flag::END_STREAM, asked.stream, b"here"));
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.text(), answer.header("x")), (200, "here", Some("y")));
    assert!(fields.iter().all(|(name, _)| answer.header(name).is_none()), "{answer:?}");
    // The connection goes on.
    let stream = client.begin("GET", "/", &[], true);
    let asked = upstream.request();
    upstream.answer(asked.stream, "again");
    assert_eq!(client.answer(stream).text(), "again");
    server.stop();
}

fn heads_keep_their_fields_and_lose_those_of_the_connection(driver: Driver) {
    let backend = Backend::tcp();
    let location =
        "proxy_set_header X-Own $request_method; proxy_set_header Connection close; proxy_set_header TE gzip;
                    proxy_set_header Host a.example;";
    let server = start(driver, &backend, location);
    let mut client = server.connect();
    client.send(
        "GET /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Upper: Value\r\nConnection: x-listed\r\nX-Listed: 1\r\n\
         Keep-Alive: 5\r\nTE: trailers\r\nCookie: a=b\r\nAuthorization: Basic eDp5\r\n\r\n",
    );
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("GET", "/a%20b?c=d"));
    let mut headers = asked.headers.clone();
    headers.sort();
    let expected = [
        ("authorization", "Basic eDp5"),
        ("cookie", "a=b"),
        ("host", "a.example"),
        ("x-own", "GET"),
        ("x-upper", "Value"),
    ];
    assert_eq!(headers, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let fields = [("x-accel-expires", "1"), ("server", "s"), ("content-length", "2"), ("x-given", "yes")];
    upstream.respond(asked.stream, 200, &fields, false);
    upstream.send(asked.stream, b"ok", true);
    let response = client.response();
    assert_eq!((response.status, response.text(), response.header("x-given")), (200, "ok", Some("yes")));
    assert_eq!((response.header("content-length"), response.header("x-accel-expires")), (Some("2"), None));
    // The answer to HEAD has a length and no body.
    client.send("HEAD / HTTP/1.1\r\nHost: x\r\n\r\n");
    let asked = upstream.request();
    assert_eq!(asked.method, "HEAD");
    upstream.respond(asked.stream, 200, &[("content-length", "1000")], true);
    assert_eq!(client.response_to_head().header("content-length"), Some("1000"));
    server.stop();
}

fn a_body_of_the_configuration_s_own_and_a_stored_one_are_sent(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "location /own { proxy_pass http://u; proxy_set_body own; }");
    let mut client = server.connect();
    client.send("POST /own HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx");
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    assert_eq!((&asked.body[..], asked.header("content-length")), (&b"own"[..], Some("3")));
    upstream.answer(asked.stream, "a");
    assert_eq!(client.response().text(), "a");
    client.send("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n");
    let asked = upstream.whole_request();
    assert_eq!((&asked.body[..], asked.header("content-length")), (&b"hello"[..], Some("5")));
    upstream.answer(asked.stream, "b");
    assert_eq!(client.response().text(), "b");
    server.stop();
}

fn checks_speak_the_version_of_the_location(driver: Driver) {
    let backend = Backend::tcp();
    let check = "health_check interval=10ms uri=/health keepalive_time=1h match=fine; proxy_set_header X-Own own;";
    let setup = setup(driver, &backend, "keepalive 8;", check);
    let setup = setup.replace("upstream u", "match fine { status 200; body ~ fine; header X-A = b; } upstream u");
    let server = setup.start();
    let mut checks = Http2Server::accept(&backend);
    let first = checks.whole_request();
    assert_eq!((first.method.as_str(), first.path.as_str()), ("GET", "/health"));
    assert_eq!((first.header("host"), first.header("x-own")), (Some("u"), Some("own")));
    checks.respond(first.stream, 200, &[("x-a", "b")], false);
    checks.send(first.stream, b"all is fine", true);
    // Checks continue on one connection, beside that of requests.
    let held = checks.whole_request();
    assert_eq!(held.stream, 3);
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/", &[], true);
    let mut requests = Http2Server::accept(&backend);
    let asked = requests.request();
    requests.answer(asked.stream, "answer");
    assert_eq!(client.answer(stream).text(), "answer");
    checks.answer(held.stream, "no good");
    let held = checks.whole_request();
    server.wait_logged("unexpected body while checking body, health check \"fine\" of peer");
    server.wait_logged("peer is unhealthy while checking body");
    assert_eq!(client.get("/").status, 502);
    checks.reset(held.stream, ErrorCode::INTERNAL_ERROR);
    server.wait_logged("upstream rejected request with error 2 while reading response header from upstream");
    server.stop();
}

fn another_server_is_tried(driver: Driver) {
    let (one, other) = (Backend::tcp(), Backend::tcp());
    let location = "proxy_http_version 2; proxy_next_upstream error http_503; proxy_pass http://u;
         add_header X-Tried $upstream_status;";
    let server = start_with_spare(driver, [&one, &other], "keepalive 8;", location);
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/", &[], true);
    let _servers = refuse_and_answer(&one, &other);
    let answer = client.answer(stream);
    assert_eq!((answer.text(), answer.header("x-tried")), ("here", Some("503, 200")));
    server.stop();
}

fn a_request_is_written_anew_for_each_server_where_the_location_says_so(driver: Driver) {
    for pass in [
        "proxy_http_version 2; proxy_next_upstream http_503; proxy_request_dynamic on; proxy_pass http://u;
         proxy_set_header Host at-$upstream_last_addr; proxy_set_body at-$upstream_last_addr;",
        "grpc_next_upstream http_503; grpc_request_dynamic on; grpc_pass grpc://u;
         grpc_set_header Host at-$upstream_last_addr;",
    ] {
        let (one, other) = (Backend::tcp_at("127.0.0.5"), Backend::tcp_at("127.0.0.6"));
        let server = start_with_spare(driver, [&one, &other], "", pass);
        let mut client = Http2::unix(&server);
        let stream = client.begin("GET", "/", &[], true);
        let [(_first, asked_first), (_second, asked_second)] = refuse_and_answer(&one, &other);
        assert_eq!(asked_first.header("host"), Some("at-127.0.0.5"));
        assert_eq!(asked_second.header("host"), Some("at-127.0.0.6"));
        if pass.starts_with("proxy") {
            let told = (&asked_second.body[..], asked_second.header("content-length"));
            assert_eq!(told, (&b"at-127.0.0.6"[..], Some("12")));
        }
        assert_eq!(client.answer(stream).text(), "here");
        server.stop();
    }
}

fn interim_responses_and_trailers_hide_the_same_fields_as_responses(driver: Driver) {
    let backend = Backend::tcp();
    let text = "proxy_pass_trailers on; early_hints 1; proxy_hide_header X-Hidden;";
    let server = start(driver, &backend, text);
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/", &[("te", "trailers")], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    let hidden = [("x-hidden", "1"), ("x-accel-redirect", "/secret"), ("server", "inner"), ("content-length", "0")];
    for _ in 0..40 {
        upstream.respond(asked.stream, 103, &[&[("link", "</x>")], &hidden[..]].concat(), false);
    }
    upstream.respond(asked.stream, 200, &[], false);
    upstream.send(asked.stream, b"body", false);
    upstream.trailers(asked.stream, &[&[("x-trail", "er")], &hidden[..3]].concat());
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.text()), (200, "body"));
    assert!(answer.interim.iter().all(|&status| status == 103) && !answer.interim.is_empty(), "{answer:?}");
    assert_eq!(answer.trailers, [("x-trail".to_owned(), "er".to_owned())]);
    assert!(answer.interim_fields.iter().all(|(name, _)| name == "link"), "{:?}", answer.interim_fields);
    server.stop();
}

fn trailers_and_early_hints_pass_if_they_may(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "proxy_pass_trailers on; early_hints 1;");
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/", &[("te", "trailers")], true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    upstream.respond(asked.stream, 103, &[("link", "</x>; rel=preload")], false);
    upstream.respond(asked.stream, 200, &[], false);
    upstream.send(asked.stream, b"body", false);
    upstream.trailers(asked.stream, &[("x-trail", "er")]);
    let answer = client.answer(stream);
    assert_eq!((answer.text(), answer.interim.as_slice()), ("body", &[103][..]));
    assert_eq!(answer.trailers, [("x-trail".to_owned(), "er".to_owned())]);
    server.stop();
}
