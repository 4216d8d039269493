//! Directives that define variables, over real sockets: map, geo, split_clients.

use rustix::process::Signal;

use crate::support::{Client, Driver, Setup, with_each_driver};

with_each_driver!(
    maps_find_the_value_for_a_key,
    maps_of_host_names_know_wildcards,
    expressions_of_a_map_capture,
    maps_are_worked_out_once_unless_volatile,
    circles_of_variables_end,
    values_that_need_too_many_others_end_the_request,
    argument_that_maps_multiply_is_bounded,
    map_of_a_long_request_body_finds_its_value,
    an_expression_of_a_map_that_explodes_gives_the_default,
    geo_finds_the_smallest_network,
    geo_finds_ranges,
    geo_believes_proxies,
    geo_asks_for_the_client_that_realip_has_found,
    clients_are_split_as_nginx_splits_them,
    large_tables_are_searched_not_walked,
);

/// Requests `/` with each key as the argument `a` and compares the response's text.
#[track_caller]
fn assert_texts(client: &mut Client, cases: &[(&str, &str)]) {
    for (argument, text) in cases {
        let response = client.get(&format!("/?a={argument}"));
        assert_eq!((response.status, response.text()), (200, *text), "{argument}");
    }
}

/// A server that responds with a text, and the variables that it needs.
fn answering(driver: Driver, variables: &str, text: &str) -> Setup {
    Setup::http(driver, &format!("{variables}\nserver {{ listen %UNIX%; listen %TCP%; return 200 \"{text}\"; }}"))
}

fn maps_find_the_value_for_a_key(driver: Driver) {
    let setup = answering(
        driver,
        "map $arg_a $value {
             default none;
             Key value;
             \"two words\" \"$request_method $uri\";
             '' empty;
             \\default word;
             \\~x tilde;
             include rows;
             ~^re(gex)?$ expression;
             ~*^CASE less;
             regex never;
         }
         map $arg_a $without { x y; }",
        "$value $without",
    )
    .file("rows", "included yes;\n");
    let server = setup.start();
    let cases = [
        ("key", "value "),
        ("KEY", "value "),
        ("", "empty "),
        ("other", "none "),
        ("default", "word "),
        ("~x", "tilde "),
        ("included", "yes "),
        ("re", "expression "),
        // A plain key comes before a regular expression.
        ("regex", "never "),
        ("caseless", "less "),
        ("x", "none y"),
    ];
    assert_texts(&mut server.connect(), &cases);
    server.stop();
}

fn maps_of_host_names_know_wildcards(driver: Driver) {
    let setup = answering(
        driver,
        "map $arg_a $value {
             hostnames;
             default none;
             .example.com dot;
             www.example.com exact;
             *.wild.example head;
             mail.* tail;
             ~^host(\\d+) number$1;
         }",
        "$value",
    );
    let server = setup.start();
    let cases = [
        ("example.com", "dot"),
        ("a.example.com.", "dot"),
        ("WWW.example.com", "exact"),
        ("a.b.wild.example", "head"),
        ("wild.example", "none"),
        ("mail.anything", "tail"),
        ("host12", "number12"),
    ];
    assert_texts(&mut server.connect(), &cases);
    server.stop();
}

fn expressions_of_a_map_capture(driver: Driver) {
    let variables = "map $arg_a $value { ~^(.)(?<rest>.*)$ \"$1-$rest\"; default none; }";
    let server = answering(driver, variables, "$value $rest").start();
    assert_texts(&mut server.connect(), &[("abc", "a-bc bc"), ("", "none ")]);
    server.stop();
}

fn maps_are_worked_out_once_unless_volatile(driver: Driver) {
    let server = Setup::http(
        driver,
        "map $uri $kept { default $uri; }
         map $uri $fresh { volatile; default $uri; }
         geo $arg_g $kept_geo { default no; 10.0.0.0/8 ten; }
         geo $arg_g $fresh_geo { volatile; default no; 10.0.0.0/8 ten; }
         server {
             listen %UNIX%;
             location / { set $early \"$kept $fresh $kept_geo $fresh_geo\"; set $args g=10.1.1.1;
             rewrite ^ /second last; }
             location /second { return 200 \"$early, $kept $fresh $kept_geo $fresh_geo\"; }
             location /set { set $fresh own; return 200 \"$fresh $kept\"; }
         }",
    )
    .start();
    assert_eq!(server.get("/first").text(), "/first /first no no, /first /second no ten");
    assert_eq!(server.get("/set").text(), "own /set");
    server.stop();
}

fn circles_of_variables_end(driver: Driver) {
    let server = answering(
        driver,
        "map $uri $itself { default x$itself; }
         map $uri $one { volatile; default a$two$two; }
         map $uri $two { volatile; default b$one$one; }
         map $uri $three { default c$four$four; }
         map $uri $four { default d$three$three; }",
        "$arg_a",
    )
    .replace("\"$arg_a\"", "\"${itself}|$one|$three|end\"")
    .start();
    let response = server.get("/");
    assert!(response.status == 200 && response.body.len() < 1000, "{}", response.body.len());
    assert!(response.text().starts_with('x') && response.text().ends_with("|end"), "{}", response.text());
    let line = server.wait_logged("cycle while evaluating variable \"itself\"");
    assert!(line.contains("[error]"), "{line}");
    server.wait_logged_times("cycle while evaluating variable", 3);
    // The error ends with the request.
    assert_eq!(server.get("/").body, response.body);
    server.stop();
}

fn values_that_need_too_many_others_end_the_request(driver: Driver) {
    // Each variable contains the next one twice: 2^40 evaluations, or bytes.
    let chain = |name: &str, volatile: &str| -> String {
        let rows = (0..40).map(|number| {
            let next = format!("${name}{}", number + 1);
            format!("map $uri ${name}{number} {{ {volatile} default {next}{next}; }}\n")
        });
        rows.chain([format!("map $uri ${name}40 {{ default x; }}\n")]).collect()
    };
    let server = Setup::http(
        driver,
        &format!(
            "{}{}
             server {{ listen %UNIX%;
                 location /volatile {{ return 200 $v0; }}
                 location /kept {{ return 200 $k0; }}
                 location /field {{ add_header X-Field $v0 always; return 200 text; }}
                 location /page {{ error_page 500 /sorry; return 200 $v0; }}
                 location /sorry {{ return 200 sorry; }}
                 location /some {{ return 200 $v36; }} }}",
            chain("v", "volatile;"),
            chain("k", "")
        ),
    );
    let mut server = server.start();
    for (number, path) in ["/volatile", "/kept", "/field"].into_iter().enumerate() {
        assert_eq!(server.get(path).status, 500, "{path}");
        server.wait_logged_times("variables that refer to variables exceed the limit for one request", number + 1);
    }
    let page = server.get("/page");
    assert_eq!((page.status, page.text()), (500, "sorry"));
    let some = server.get("/some");
    assert_eq!((some.status, some.text()), (200, "xxxxxxxxxxxxxxxx"));
    server.end(Signal::TERM);
}

/// Each map doubles the argument.
fn argument_that_maps_multiply_is_bounded(driver: Driver) {
    let maps: String =
        (0..12).map(|number| format!("map $uri $m{} {{ default $m{number}$m{number}; }}\n", number + 1)).collect();
    let locations: String = (0..13).map(|number| format!("location /{number}/ {{ return 200 $m{number}; }}")).collect();
    let text = format!("map $uri $m0 {{ default $arg_a; }} {maps} server {{ listen %UNIX%; {locations} }}");
    let server = Setup::http(driver, &text).start();
    let argument = "a".repeat(7000);
    let get = |number: usize| server.get(&format!("/{number}/?a={argument}"));
    assert_eq!((get(8).status, get(8).body.len()), (200, 7000 << 8));
    assert_eq!(get(10).status, 500);
    assert_eq!(get(12).status, 500);
    server.stop();
}

/// The length of the body is limited by `client_max_body_size` alone.
fn map_of_a_long_request_body_finds_its_value(driver: Driver) {
    let server = Setup::http(
        driver,
        "map $request_body $seen { volatile; ~end$ seen; } map $seen $twice { default $seen$seen; }
         log_format seen '$status $twice'; client_max_body_size 16m; client_body_buffer_size 16m;
         server { listen %UNIX%; access_log %DIR%/seen.log seen; location / { test_store_body; } }",
    )
    .start();
    let body = format!("{}end", "x".repeat(6 << 20));
    let mut client = server.connect();
    client.send(format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len()));
    client.send(&body);
    assert_eq!(client.response().status, 200);
    server.directory.wait_line("seen.log", "200 seenseen");
    server.stop();
}

fn an_expression_of_a_map_that_explodes_gives_the_default(driver: Driver) {
    let variables = "map $arg_a $value { ~^(a+)+$ yes; default no; }";
    let mut server = answering(driver, variables, "$value").start();
    let long = format!("{}!", "a".repeat(100));
    assert_texts(&mut server.connect(), &[("aaa", "yes"), (&long, "no")]);
    assert!(server.wait_logged("pcre2_match() failed: -47 on").contains("[alert]"));
    server.end(Signal::TERM);
}

fn geo_finds_the_smallest_network(driver: Driver) {
    let setup = answering(
        driver,
        "geo $arg_a $value {
             default none;
             10.0.0.0/8 eight;
             10.1.0.0/16 sixteen;
             10.1.2.3 host;
             10.9.0.0/16 deleted;
             delete 10.9.0.0/16;
             include networks;
             2001:db8::/32 six;
             2001:db8:1::/48 longer;
             255.255.255.255 unknown;
         }
         geo $mine { default x; 127.0.0.1 tcp; 255.255.255.255 unix; }",
        "$value $mine",
    )
    .file("networks", "192.168.0.0/24 included;\n192.168.0.128/25 half;\n");
    let server = setup.start();
    let cases = [
        ("10.0.0.0", "eight unix"),
        ("9.255.255.255", "none unix"),
        ("10.255.255.255", "eight unix"),
        ("11.0.0.0", "none unix"),
        ("10.1.2.2", "sixteen unix"),
        ("10.1.2.3", "host unix"),
        ("10.1.2.4", "sixteen unix"),
        ("10.2.0.0", "eight unix"),
        ("10.9.0.1", "eight unix"),
        ("192.168.0.127", "included unix"),
        ("192.168.0.128", "half unix"),
        ("192.168.1.0", "none unix"),
        ("2001:db8::1", "six unix"),
        ("2001:db8:1::1", "longer unix"),
        ("2001:db9::", "none unix"),
        ("::ffff:10.1.2.3", "host unix"),
        ("word", "unknown unix"),
        ("", "unknown unix"),
    ];
    assert_texts(&mut server.connect(), &cases);
    assert_texts(&mut server.connect_tcp(1), &[("10.0.0.0", "eight tcp")]);
    server.stop();
}

fn geo_finds_ranges(driver: Driver) {
    let setup = answering(
        driver,
        "geo $arg_a $value {
             ranges;
             default none;
             10.0.0.0-10.3.255.255 outer;
             10.1.0.0-10.1.0.255 inner;
             10.1.0.0-10.1.0.10 first;
             10.2.255.0-10.2.255.255 last;
             10.7.0.0-10.7.0.255 deleted;
             delete 10.7.0.0-10.7.0.255;
         }",
        "$value",
    );
    let server = setup.start();
    let cases = [
        ("9.255.255.255", "none"),
        ("10.0.0.0", "outer"),
        ("10.1.0.5", "first"),
        ("10.1.0.11", "inner"),
        ("10.1.1.0", "outer"),
        ("10.2.254.255", "outer"),
        ("10.2.255.255", "last"),
        ("10.3.0.0", "outer"),
        ("10.4.0.0", "none"),
        ("10.7.0.1", "none"),
        ("2001:db8::1", "none"),
    ];
    assert_texts(&mut server.connect(), &cases);
    server.stop();
}

fn geo_believes_proxies(driver: Driver) {
    let rows = "default none; proxy 127.0.0.0/8; 1.0.0.0/8 one; 2.0.0.0/8 two; 127.0.0.0/8 proxy;";
    let variables = format!("geo $last {{ {rows} }} geo $far {{ proxy_recursive; {rows} }}");
    let server = answering(driver, &variables, "$last $far").start();
    let cases = [
        ("", "proxy proxy"),
        ("X-Forwarded-For: 1.2.3.4\r\n", "one one"),
        ("X-Forwarded-For: 1.2.3.4, 2.2.2.2\r\n", "two two"),
        ("X-Forwarded-For: 1.2.3.4, 127.0.0.5\r\n", "proxy one"),
        ("X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 127.0.0.5\r\n", "proxy one"),
        ("X-Forwarded-For: nonsense\r\n", "proxy proxy"),
    ];
    for (fields, text) in cases {
        let response = server.connect_tcp(1).ask(format!("GET / HTTP/1.1\r\nHost: x\r\n{fields}\r\n"));
        assert_eq!(response.text(), text, "{fields}");
    }
    // The peer of the other socket is not a trusted proxy.
    let response = server.connect().ask("GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n");
    assert_eq!(response.text(), "none none");
    server.stop();
}

fn geo_asks_for_the_client_that_realip_has_found(driver: Driver) {
    let variables = "set_real_ip_from unix:; geo $place { default none; 1.0.0.0/8 one; 255.255.255.255 unix; }";
    let server = answering(driver, variables, "$place").start();
    let mut client = server.connect();
    assert_eq!(client.get("/").text(), "unix");
    let response = client.ask("GET / HTTP/1.1\r\nHost: x\r\nX-Real-IP: 1.2.3.4\r\n\r\n");
    assert_eq!(response.text(), "one");
    server.stop();
}

/// The expected texts are nginx's answers with the same configuration.
fn clients_are_split_as_nginx_splits_them(driver: Driver) {
    let variables =
        "split_clients $arg_a $value { 10.5% a; 33.33% b; 0.01% c; * d; } split_clients x$arg_a $half { 50% one; }";
    let server = answering(driver, variables, "$value $half").start();
    let cases = &[
        ("", "a one"),
        ("a", "d one"),
        ("b", "d one"),
        ("c", "b one"),
        ("ab", "a "),
        ("client", "b one"),
        ("192.0.2.1", "d "),
        ("192.0.2.2", "b one"),
        ("192.0.2.3", "a one"),
        ("longer-text-of-a-client", "d one"),
    ];
    assert_texts(&mut server.connect(), cases);
    server.stop();
}

fn large_tables_are_searched_not_walked(driver: Driver) {
    use std::fmt::Write;
    let mut map = String::new();
    let mut networks = String::new();
    for number in 0..100_000_u32 {
        writeln!(map, "key{number} {};", number % 1000).expect("a string");
        let address = std::net::Ipv4Addr::from_bits(number << 12);
        writeln!(networks, "{address}/20 {};", number % 1000).expect("a string");
    }
    let variables = "map $arg_a $value { include map; } geo $arg_g $place { include networks; }";
    let server = answering(driver, variables, "$value $place").file("map", map).file("networks", networks).start();
    let mut client = server.connect();
    for number in (0..100_000_u32).step_by(9973) {
        let address = std::net::Ipv4Addr::from_bits((number << 12) + 77);
        let response = client.get(&format!("/?a=key{number}&g={address}"));
        assert_eq!(response.text(), format!("{0} {0}", number % 1000));
    }
    server.stop();
}
