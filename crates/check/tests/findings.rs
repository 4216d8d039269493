//! Unsafe configurations, and safe ones that look similar.

use gale_check::{Finding, check};
use gale_config::{MemoryFiles, Sources, Tables, parse_text};

/// The names of the checks that report these directives of a server, with the lines.
fn found(text: &str) -> Vec<(&'static str, u32)> {
    let all = findings(&format!("http {{ server {{\n{text}\n}} }}"));
    let mut found: Vec<_> = all.iter().map(|one| (one.check, one.place.line - 1)).collect();
    found.sort_unstable();
    found
}

fn findings(text: &str) -> Vec<Finding> {
    let (mut sources, mut files) = (Sources::new(), MemoryFiles::new().with("/x.conf", text));
    let parsed = gale_config::parse(&mut sources, &mut files, "/x.conf".as_ref(), "/".as_ref()).expect("it is there");
    assert!(parsed.errors.is_empty(), "{}", parsed.errors.render(&sources, "check"));
    check(&parsed, &sources, &Tables::<()>::new([], &[])).findings
}

#[test]
fn an_alias_that_a_request_gets_out_of() {
    assert_eq!(found("location /i { alias /data/i/; }"), [("alias_traversal", 1)]);
    assert_eq!(found("location ^~ /i { alias /data/i/; }"), [("alias_traversal", 1)]);
    for safe in [
        "location /i/ { alias /data/i/; }",
        "location /i { alias /data/i; }",
        "location = /i { alias /data/; }",
        "location ~ ^/i(.*) { alias /data/$1; }",
    ] {
        assert_eq!(found(safe), [], "{safe}");
    }
}

#[test]
fn fields_that_a_client_can_end() {
    for unsafe_one in [
        "return 301 https://$host$uri;",
        "return https://a.example$document_uri;",
        "add_header X-Path $uri;",
        "location / { proxy_pass http://backend$uri; }",
        "location ~ ^/([^/]*)/x$ { add_header X-Part $1; }",
        "location ~ ^/(?<part>[^.]*)$ { return 302 https://a.example/$part; }",
        "set $where $uri; return 301 https://a.example$where;",
        "rewrite ^/([^/]*) /x break; proxy_set_header X-Part $1;",
    ] {
        let checks: Vec<_> = found(unsafe_one).iter().map(|(check, _)| *check).collect();
        assert_eq!(checks, ["header_splitting"], "{unsafe_one}");
    }
    for safe in [
        "return 301 https://$host$request_uri;",
        "return 200 $uri;",
        "location ~ ^/(.*)$ { return 302 https://a.example/$1; }",
        "location ~ ^/([a-z]+)$ { add_header X-Part $1; }",
        // Look-behind is not supported by the analysis.
        "location ~ ^/(?<!a)([^/]*) { add_header X-Part $1; }",
        "set $a $b; set $b $a; add_header X $a;",
    ] {
        assert_eq!(found(safe), [], "{safe}");
    }
}

#[test]
fn servers_that_a_client_chooses() {
    for unsafe_one in [
        "location / { proxy_pass http://$arg_host; }",
        "location / { proxy_pass $http_x_target; }",
        "location / { proxy_pass http://$host/; }",
        "location ~ ^/proxy/(.*)$ { proxy_pass http://$1; }",
        "location ~ ^/p/([^/]+)/ { set $to $1; fastcgi_pass $to:9000; }",
    ] {
        assert_eq!(found(unsafe_one), [("ssrf", 1)], "{unsafe_one}");
    }
    for safe in [
        "location / { proxy_pass http://backend$request_uri; }",
        "location / { proxy_pass http://backend/$arg_page; }",
        "location / { internal; proxy_pass http://$arg_host; }",
        "location ~ ^/([a-z]+)/ { proxy_pass http://$1.internal; }",
        "location / { proxy_pass http://unix:/run/x.sock:/x; }",
        "set $backend http://10.0.0.1; location / { proxy_pass $backend; }",
    ] {
        assert_eq!(found(safe), [], "{safe}");
    }
}

#[test]
fn names_that_an_application_is_told() {
    assert_eq!(found("proxy_set_header Host $http_host;"), [("host_spoofing", 1)]);
    assert_eq!(found("proxy_set_header host $arg_host;"), [("host_spoofing", 1)]);
    assert_eq!(found("proxy_set_header Host $host;\nfastcgi_param HTTP_HOST $http_host;"), []);
    assert_eq!(found("proxy_set_header X-Host $http_host;"), []);
}

#[test]
fn hosts_that_share_cached_responses() {
    let server = |names: &str, more: &str| {
        found(&format!("server_name {names};\nproxy_cache one; location / {{ proxy_pass http://10.0.0.1; {more} }}"))
    };
    let told = "proxy_set_header Host $host;";
    let shared = [("cache_shared_by_hosts", 2)];
    assert_eq!(server("a.example b.example", told), shared);
    assert_eq!(server("*.example", told), shared);
    assert_eq!(server("~^(.+)\\.example$", &format!("{told} proxy_cache_key $uri;")), shared);
    assert_eq!(server("a.example", told), []);
    assert_eq!(server("a.example b.example", ""), []);
    assert_eq!(server("a.example b.example", &format!("{told} proxy_cache_key $host$uri;")), []);
    assert_eq!(server("a.example b.example", &format!("{told} proxy_cache off;")), []);
}

#[test]
fn origins_that_others_pass_for() {
    let origin = |expression: &str| found(&format!("if ($http_origin ~ {expression}) {{ set $x 1; }}"));
    assert_eq!(origin("'^https://a\\.example'"), [("origins", 1)]);
    assert_eq!(origin("'^https://a.example$'"), [("origins", 1)]);
    assert_eq!(origin("'^https://a\\.example$'"), []);
    assert_eq!(found("if ($http_referer ~ ^https://a\\.example/) { return 403; }"), []);
    assert_eq!(found("valid_referers none blocked a.example;"), [("valid_referers", 1)]);
    assert_eq!(found("valid_referers blocked a.example;"), []);
}

#[test]
fn access_rules_that_are_bypassed() {
    assert_eq!(found("location / { deny all; return 200 secret; }"), [("return_bypasses_access", 1)]);
    assert_eq!(found("location / { deny all; return 403; }"), []);
    assert_eq!(found("location / { deny all; if ($x) { return 200; } }"), []);
}

#[test]
fn fields_that_are_lost() {
    let inner = |text: &str| found(&format!("add_header A 1; add_header B 2;\nlocation / {{ {text} }}"));
    assert_eq!(inner("add_header a 3; add_header C 4;"), [("add_header_redefinition", 2)]);
    assert_eq!(inner("add_header b 3; add_header A 4;"), []);
    assert_eq!(inner("add_header_inherit merge; add_header C 4;"), []);
    assert_eq!(inner("add_header_inherit on; add_header C 4;"), [("add_header_redefinition", 2)]);
    assert_eq!(found("add_header A 'x\n y';"), [("add_header_multiline", 1)]);
}

#[test]
fn conditions_that_do_something_else() {
    assert_eq!(found("location / { if ($x) { add_header A 1; add_header B 2; } }"), [("if_trap", 1)]);
    assert_eq!(found("location / { if ($x) { set $y 1; }\ntry_files $uri =404; }"), [("if_trap", 1)]);
    assert_eq!(found("location / { if ($x) { return 404; }\ntry_files $uri =404; }"), []);
    assert_eq!(found("if ($x) { set $y 1; }"), []);
}

#[test]
fn findings_are_bounded_and_sorted_by_severity() {
    let many = "location /i { alias /data/; add_header X $uri; }\n".repeat(1000);
    let all = findings(&format!("http {{ server {{ valid_referers none; {many} }} }}"));
    assert_eq!(all.len(), 2 * gale_check::PLACES_MAX + 1);
    assert!(all.is_sorted_by_key(|finding| finding.severity));
}

#[test]
fn any_text_is_survived() {
    let (mut sources, mut files) = (Sources::new(), MemoryFiles::new());
    for text in ["", "if", "http { server { if { } location { } alias; return; add_header; set; rewrite; } }", "a { b"]
    {
        let parsed = parse_text(&mut sources, &mut files, "text", text.into(), "/".as_ref());
        check(&parsed, &sources, &Tables::<()>::new([], &[]));
    }
    for rule in ["location ~ ( { alias a/; }", "if ($x ~ \"(\") { set $y $1; }", "set $x $1$x; add_header A $x;"] {
        found(rule);
    }
}
