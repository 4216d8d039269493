//! Tests of the shared modules with a session that is not a request: a toy protocol of this test.

#[path = "shared/session.rs"]
mod session;

use std::sync::Arc;

use gale_config::Statement;
use gale_engine::variables::subject::Subject;
use gale_modules::shared::access::decide;
use gale_modules::shared::realip::proxied_client;
use gale_runtime::{Buffer, SocketAddress};
use session::{Session, read};

/// Returns the text named `line` for a session of this client.
#[track_caller]
fn line(configuration: &str, client: &str) -> String {
    Session::new(&read(configuration).unwrap(), client).text("line")
}

#[test]
fn template_is_evaluated_for_a_session() {
    assert_eq!(
        line("text line 'number $connection from ${realip_remote_addr}';", "192.0.2.1"),
        "number 7 from 192.0.2.1"
    );
    assert_eq!(read("text line $nonsense;").err().unwrap(), ["unknown \"nonsense\" variable"]);
}

#[test]
fn map_chooses_by_name_wildcard_and_expression() {
    let map = |host: &str| {
        let text = "map HOST $kind { hostnames; default other; a.example exact; *.example wild;
                                     ~^(?<first>.)b two-$first-$1; } text line $kind;";
        line(&text.replace("HOST", host), "192.0.2.1")
    };
    assert_eq!(map("A.Example"), "exact");
    assert_eq!(map("x.y.example"), "wild");
    assert_eq!(map("xbz"), "two-x-x");
    assert_eq!(map("nobody"), "other");
}

#[test]
fn map_is_evaluated_once_for_a_session_and_its_captures_stay() {
    let configuration = read("map x$connection $seven { ~^x(.)$ ''; } text line '[$seven$1]';").unwrap();
    let session = Session::new(&configuration, "192.0.2.1");
    assert_eq!(session.text("line"), "[7]");
    session.forget_match();
    assert_eq!(session.text("line"), "[]");
}

#[test]
fn maps_that_ask_for_each_other_have_no_value() {
    let configuration = read("map $b $a { default $b; } map $a $b { default $a; } text line <$a>;").unwrap();
    let session = Session::new(&configuration, "192.0.2.1");
    assert_eq!(session.text("line"), "<>");
    let told = session.told.borrow();
    assert_eq!(told.len(), 1);
    assert!(told[0].starts_with("cycle while evaluating variable"), "{told:?}");
}

#[test]
fn geo_knows_the_client_of_a_session() {
    let geo = "geo $where { default far; 192.0.2.0/24 near; 192.0.2.7 here; 2001:db8::/32 six; } text line $where;";
    for (client, place) in
        [("192.0.2.1", "near"), ("192.0.2.7", "here"), ("198.51.100.1", "far"), ("2001:db8::1", "six")]
    {
        assert_eq!(line(geo, client), place, "{client}");
    }
    assert_eq!(
        line("geo $a $where { default far; 10.0.0.0/8 ten; } map x $a { x 10.1.1.1; } text line $where;", "::1"),
        "ten"
    );
}

#[test]
fn geo_without_forwarding_takes_no_proxies() {
    assert_eq!(read("geo $where { proxy 192.0.2.1; }").err().unwrap(), ["invalid network \"proxy\""]);
    assert_eq!(read("geo $where { proxy_recursive; }").err().unwrap(), ["invalid number of the geo parameters"]);
}

#[test]
fn split_clients_divides_sessions() {
    // The hash of 192.0.2.1 lies at 78 %.
    let split = "split_clients $realip_remote_addr $part { 50% one; 25% two; * three; } text line $part;";
    assert_eq!(line(split, "192.0.2.1"), "three");
    assert_eq!(line(&split.replace("25%", "40%"), "192.0.2.1"), "two");
}

#[test]
fn access_is_decided_by_the_first_rule() {
    let configuration = read("deny 192.0.2.7; allow 192.0.2.0/24; deny all;").unwrap();
    let allows = |client| decide(configuration.conf().rules.get(), Session::new(&configuration, client).remote());
    assert_eq!(allows("192.0.2.1"), Some(true));
    assert_eq!(allows("192.0.2.7"), Some(false));
    assert_eq!(allows("::1"), Some(false));
}

#[test]
fn limit_conn_counts_sessions_until_they_are_over() {
    let zone = "limit_conn_zone $realip_remote_addr zone=one:1m; limit_conn one 2; text line $limit_conn_status;";
    let configuration = read(zone).unwrap();
    let limits = &configuration.conf().limits;
    let begin = |client| {
        let mut session = Session::new(&configuration, client);
        let is_admitted = limits.admit(&mut session);
        (session, is_admitted)
    };
    let (mut first, second) = (begin("192.0.2.1"), begin("192.0.2.1"));
    assert!(first.1 && second.1);
    assert_eq!(first.0.text("line"), "PASSED");
    // A second call does not count the subject again.
    assert!(limits.admit(&mut first.0));
    let (third, is_admitted) = begin("192.0.2.1");
    assert!(!is_admitted);
    assert_eq!(third.text("line"), "REJECTED");
    assert_eq!(*third.told.borrow(), ["limiting connections by zone \"one\""]);
    assert!(begin("192.0.2.2").1);
    drop(first);
    assert!(begin("192.0.2.1").1);
}

#[test]
fn realip_takes_the_client_from_a_trusted_proxy() {
    let configuration = read("set_real_ip_from 192.0.2.0/24; text line $realip_remote_addr;").unwrap();
    let client_behind = |proxy| {
        let session = Session::new(&configuration, proxy);
        let mut told = Buffer::new();
        told.append(b"PROXY TCP4 198.51.100.9 192.0.2.1 1 2\r\n").unwrap();
        assert_eq!(session.connection().take_proxy_header(&mut told), Ok(true));
        let client = proxied_client(&session, configuration.conf().trusted.get());
        if let Some(client) = client {
            session.set_remote(SocketAddress::Inet(client));
        }
        assert_eq!(session.text("line"), proxy);
        session.remote().inet().unwrap().ip().to_string()
    };
    assert_eq!(client_behind("192.0.2.1"), "198.51.100.9");
    assert_eq!(client_behind("203.0.113.1"), "203.0.113.1");
}

#[test]
fn log_format_makes_the_line_of_a_session() {
    let configuration =
        read("map x$connection $odd { default 'a\"b'; } log_format short escape=json '$connection <$odd>';");
    let configuration = configuration.unwrap();
    let session = Session::new(&configuration, "192.0.2.1");
    let name = Statement::synthetic("SHORT", Vec::new()).name;
    let mut line = Vec::new();
    configuration.conf().formats.find(&name).unwrap().append(&session, &mut line);
    assert_eq!(line, br#"7 <a\"b>"#);
    assert_eq!(read("log_format a x; log_format a y;").err().unwrap(), ["duplicate \"log_format\" name \"a\""]);
}

#[test]
fn configuration_is_shared_between_threads() {
    fn is_shared<T: Send + Sync>(_: &Arc<T>) {}
    is_shared(&read("map a $b { } geo $c { }").unwrap());
}
