//! Locations of clients from databases of addresses, for requests and for sessions.

use rustix::process::{Signal, kill_process};

use crate::support::mmdb::{Mmdb, Value, map, named};
use crate::support::{Client, Driver, Server, Setup, configuration, http_configuration, with_each_driver};

with_each_driver!(
    variables_say_where_a_client_is,
    unknown_address_has_no_value,
    addresses_of_every_family_are_looked_up,
    organizations_are_those_of_every_kind_of_database,
    proxies_are_believed_if_they_are_trusted,
    sessions_have_the_variables,
    a_broken_record_is_told_once_and_has_no_value,
    databases_are_those_of_the_last_load,
    databases_that_do_not_fit_are_refused,
);

fn text(text: &'static str) -> Value {
    Value::Text(text)
}

fn country(code: &'static str, name: &'static str) -> (&'static str, Value) {
    ("country", map([("iso_code", text(code)), named(name)]))
}

fn countries() -> Mmdb {
    Mmdb::new("GeoLite2-Country")
        .network("127.0.0.0/8", &map([country("XK", "Kosovo")]))
        .network("192.0.2.0/24", &map([country("DE", "Germany")]))
        .network("192.0.2.128/25", &map([country("AT", "Austria")]))
        .network("2001:db8::/32", &map([country("US", "United States")]))
}

fn cities() -> Mmdb {
    let full = map([
        ("city", map([("geoname_id", Value::Number(1)), named("Oberammergau")])),
        ("continent", map([("code", text("EU")), named("Europe")])),
        country("DE", "Germany"),
        (
            "location",
            map([
                ("accuracy_radius", Value::Short(20)),
                ("latitude", Value::Double(47.598_34)),
                ("longitude", Value::Double(-11.0)),
                ("metro_code", Value::Short(807)),
            ]),
        ),
        ("postal", map([("code", text("82487"))])),
        (
            "subdivisions",
            Value::Array(vec![
                map([("iso_code", text("BY")), named("Bavaria")]),
                map([("iso_code", text("XX")), named("A district")]),
            ]),
        ),
    ]);
    Mmdb::new("GeoIP2-City").record_bits(28).network("192.0.2.0/24", &full).network(
        "198.51.100.0/24",
        &map([country("ZZ", "Nowhere"), ("location", map([("latitude", Value::Double(0.0))]))]),
    )
}

/// Answer to a request from this address through a trusted proxy.
#[track_caller]
fn of(client: &mut Client, address: &str) -> String {
    let request = format!("GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: {address}\r\n\r\n");
    let response = client.ask(request);
    assert_eq!(response.status, 200);
    response.text().to_owned()
}

/// A server on `%TCP%` that answers with this text and trusts its clients as proxies.
fn answering(driver: Driver, databases: &str, answer: &str) -> Setup {
    let text = format!("{databases}\ngeoip_proxy 127.0.0.0/8;\nserver {{ listen %TCP%; return 200 '{answer}'; }}");
    Setup::http(driver, &text)
}

const COUNTRY: &str = "$geoip_country_code|$geoip_country_code3|$geoip_country_name";

const CITY: &str = "$geoip_city|$geoip_city_continent_code|$geoip_city_country_code|$geoip_city_country_code3|\
                    $geoip_city_country_name|$geoip_region|$geoip_region_name|$geoip_postal_code|$geoip_latitude|\
                    $geoip_longitude|$geoip_dma_code|$geoip_area_code";

fn variables_say_where_a_client_is(driver: Driver) {
    let databases = "geoip_country %DIR%/country.mmdb; geoip_city %DIR%/city.mmdb utf8;";
    let setup = answering(driver, databases, &format!("{COUNTRY} {CITY}"));
    let server = setup.file("country.mmdb", countries().bytes()).file("city.mmdb", cities().bytes()).start();
    let mut client = server.connect_tcp(1);
    assert_eq!(
        of(&mut client, "192.0.2.1"),
        "DE|DEU|Germany Oberammergau|EU|DE|DEU|Germany|BY|Bavaria|82487|47.5983|-11.0000|807|"
    );
    // The smallest network wins.
    assert!(of(&mut client, "192.0.2.200").starts_with("AT|AUT|Austria Oberammergau"));
}

fn unknown_address_has_no_value(driver: Driver) {
    let databases = "geoip_country %DIR%/country.mmdb; geoip_city %DIR%/city.mmdb;
        map $geoip_country_code $known { '' no; default yes; }
        server { listen %UNIX%; return 200 '[$geoip_country_code$geoip_city] $known'; }
        server { listen %TCP2%; return 200 '[$geoip_org]'; }";
    let setup = answering(driver, databases, &format!("{COUNTRY} {CITY} $known"));
    let server = setup.file("country.mmdb", countries().bytes()).file("city.mmdb", cities().bytes()).start();
    let mut client = server.connect_tcp(1);
    // A record with few values, and a country without a three-letter code.
    assert_eq!(of(&mut client, "198.51.100.7"), "|| ||ZZ||Nowhere||||0.0000||| no");
    // An address without a record.
    assert_eq!(of(&mut client, "203.0.113.1"), "|| ||||||||||| no");
    assert_eq!(of(&mut client, "2001:db9::1"), "|| ||||||||||| no");
    // A client without an address, and no database.
    assert_eq!(server.get("/").text(), "[] no");
    assert_eq!(server.connect_tcp(2).get("/").text(), "[]");
}

fn addresses_of_every_family_are_looked_up(driver: Driver) {
    let v4 = Mmdb::new("DBIP-Country-Lite").v4_alone().record_bits(32);
    let v4 = v4.network("0.0.0.0/1", &map([country("FR", "France")]));
    for (database, of_v4, of_v6) in [(countries(), "DE", "US"), (v4, "", "")] {
        let setup = answering(driver, "geoip_country %DIR%/country.mmdb;", "$geoip_country_code");
        let server = setup.file("country.mmdb", database.bytes()).start();
        let mut client = server.connect_tcp(1);
        assert_eq!(of(&mut client, "192.0.2.1"), of_v4);
        assert_eq!(of(&mut client, "::ffff:192.0.2.1"), of_v4);
        assert_eq!(of(&mut client, "2001:db8:1::1"), of_v6);
        assert_eq!(of(&mut client, "::1"), "");
    }
}

fn organizations_are_those_of_every_kind_of_database(driver: Driver) {
    let system =
        [("autonomous_system_number", Value::Number(64496)), ("autonomous_system_organization", text("Example"))];
    let cases = [
        ("GeoIP2-ISP", map([("isp", text("A provider")), ("organization", text("Somebody"))]), "Somebody"),
        ("GeoIP2-ISP", map([("isp", text("A provider"))]), "A provider"),
        ("GeoLite2-ASN", map(system.clone()), "AS64496 Example"),
        ("GeoLite2-ASN", map([system[0].clone()]), "AS64496"),
        ("GeoIP2-Domain", map([("domain", text("example.com"))]), "example.com"),
        ("GeoIP2-Enterprise", map([("traits", map([("organization", text("Somebody"))]))]), "Somebody"),
        ("GeoIP2-Enterprise", map([("traits", map([("isp", text("A provider"))]))]), "A provider"),
        ("GeoLite2-ASN", map([]), ""),
    ];
    for (kind, record, organization) in cases {
        let setup = answering(driver, "geoip_org %DIR%/org.mmdb;", "$geoip_org");
        let server = setup.file("org.mmdb", Mmdb::new(kind).network("192.0.2.0/24", &record).bytes()).start();
        assert_eq!(of(&mut server.connect_tcp(1), "192.0.2.1"), organization, "{kind} {record:?}");
    }
}

fn proxies_are_believed_if_they_are_trusted(driver: Driver) {
    let answer = |proxies: &str| {
        let text = format!(
            "geoip_country %DIR%/country.mmdb; {proxies}
             server {{ listen %TCP%; return 200 '$geoip_country_code'; }}"
        );
        let server = Setup::http(driver, &text).file("country.mmdb", countries().bytes()).start();
        of(&mut server.connect_tcp(1), "2001:db8::1, 192.0.2.1, 192.0.2.129")
    };
    assert_eq!(answer(""), "XK");
    assert_eq!(answer("geoip_proxy 192.0.2.0/24;"), "XK");
    assert_eq!(answer("geoip_proxy 127.0.0.0/8; geoip_proxy_recursive off;"), "AT");
    assert_eq!(answer("geoip_proxy 127.0.0.0/8; geoip_proxy 192.0.2.129;"), "AT");
    assert_eq!(answer("geoip_proxy 127.0.0.0/8; geoip_proxy 192.0.2.129; geoip_proxy_recursive on;"), "DE");
    assert_eq!(answer("geoip_proxy 127.0.0.0/8; geoip_proxy 192.0.2.0/24; geoip_proxy_recursive on;"), "US");
    // The address found by realip is looked up.
    assert_eq!(answer("set_real_ip_from 127.0.0.1; real_ip_header X-Forwarded-For;"), "AT");
}

fn sessions_have_the_variables(driver: Driver) {
    let text = format!(
        "geoip_country %DIR%/country.mmdb; geoip_city %DIR%/city.mmdb; geoip_org %DIR%/org.mmdb;
         server {{ listen %TCP%; return '{COUNTRY} [$geoip_city]'; }}
         server {{ listen %TCP2% proxy_protocol; set_real_ip_from 127.0.0.1; return '{COUNTRY} {CITY} $geoip_org'; }}"
    );
    let systems =
        Mmdb::new("GeoLite2-ASN").network("192.0.2.0/24", &map([("autonomous_system_number", Value::Number(1))]));
    let setup = Setup::stream(driver, &text).file("org.mmdb", systems.bytes());
    let server = setup.file("country.mmdb", countries().bytes()).file("city.mmdb", cities().bytes()).start();
    assert_eq!(server.connect_tcp(1).read_to_end(), b"XK|XKX|Kosovo []");
    let mut client = server.connect_tcp(2);
    client.send("PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\r\n");
    assert_eq!(
        String::from_utf8_lossy(&client.read_to_end()),
        "DE|DEU|Germany Oberammergau|EU|DE|DEU|Germany|BY|Bavaria|82487|47.5983|-11.0000|807| AS1"
    );
}

fn a_broken_record_is_told_once_and_has_no_value(driver: Driver) {
    // A map of three rows that ends before the first one; a number in place of a map; a dangling pointer; a name of
    // another type; an empty record.
    let database = countries()
        .broken_network("203.0.113.0/32", &[7 << 5 | 3])
        .broken_network("203.0.113.1/32", &[6 << 5 | 1, 7])
        .broken_network("203.0.113.2/32", &[1 << 5 | 3 << 3, 0xff, 0xff, 0xff, 0xff])
        .network("203.0.113.3/32", &map([("country", map([("iso_code", Value::Double(1.0))]))]))
        .network_without_record("203.0.113.4/32");
    let setup = answering(driver, "geoip_country %DIR%/country.mmdb;", COUNTRY);
    let server = setup.file("country.mmdb", database.bytes()).start();
    let mut client = server.connect_tcp(1);
    for _ in 0..3 {
        for broken in 0..5 {
            assert_eq!(of(&mut client, &format!("203.0.113.{broken}")), "||", "{broken}");
        }
        assert_eq!(of(&mut client, "192.0.2.1"), "DE|DEU|Germany");
    }
    server.wait_logged("invalid GeoIP database \"");
    assert_eq!(server.log().matches("invalid GeoIP database").count(), 1, "{server}");
}

fn databases_are_those_of_the_last_load(driver: Driver) {
    let databases = "geoip_country %DIR%/country.mmdb;";
    let text = http_configuration(
        driver,
        &format!(
            "{databases} geoip_proxy 127.0.0.0/8;
            server {{ listen %TCP%; return 200 '$geoip_country_code'; }}"
        ),
    );
    let mut server = Setup::configuration(&text).file("country.mmdb", countries().bytes()).start();
    let ask = |server: &Server| of(&mut server.connect_tcp(1), "192.0.2.1");
    assert_eq!(ask(&server), "DE");
    // Changes of the file have no effect.
    server.directory.write("country.mmdb", "");
    assert_eq!(ask(&server), "DE");
    // A reload that cannot read the file keeps the loaded database.
    server.reload(&text);
    server.wait_logged("GeoIP_open(\"");
    assert_eq!(ask(&server), "DE");
    let other = Mmdb::new("GeoLite2-Country").network("192.0.2.0/24", &map([country("CH", "Switzerland")]));
    server.directory.write("country.mmdb", other.bytes());
    server.reload(&text);
    assert_eq!(ask(&server), "CH");
    // Without a change the loaded copy remains in use.
    server.reload(&text);
    assert_eq!(ask(&server), "CH");
    // A restarted worker process needs no file.
    server.directory.write("country.mmdb", "");
    let worker = server.worker();
    kill_process(worker, Signal::KILL).unwrap();
    server.wait_logged(&format!("worker process {worker} exited on signal 9"));
    assert_eq!(ask(&server), "CH");
}

fn databases_that_do_not_fit_are_refused(driver: Driver) {
    let whole = countries().bytes();
    let cut = &whole[..whole.len() / 2];
    let legacy = [&[0; 64][..], b"\xff\xff\xff\x6a"].concat();
    let systems = Mmdb::new("GeoLite2-ASN").network("192.0.2.0/24", &map([])).bytes();
    // The tree would be longer than the file.
    let long = [&b"\xab\xcd\xefMaxMind.com"[..], whole.split_at(whole.len() - 220).1].concat();
    let cases: [(&str, &[u8], &str); 12] = [
        ("geoip_country %DIR%/none.mmdb;", &whole, "none.mmdb\") failed (2: No such file or directory)"),
        ("geoip_country %DIR%;", &whole, "\") failed (22: Invalid argument)"),
        ("geoip_country %DIR%/db;", b"", "db\") failed: invalid database"),
        ("geoip_country %DIR%/db;", cut, "db\") failed: invalid database"),
        ("geoip_country %DIR%/db;", &long, "db\") failed: "),
        ("geoip_country %DIR%/db;", &legacy, "db\") failed: it is a legacy database (.dat)"),
        ("geoip_city %DIR%/db;", &legacy, "use a database in the current format (.mmdb)"),
        ("geoip_country %DIR%/db;", &systems, "db\" type:GeoLite2-ASN"),
        ("geoip_city %DIR%/db;", &whole, "invalid GeoIP City database"),
        ("geoip_org %DIR%/db;", &whole, "db\" type:GeoLite2-Country"),
        ("geoip_country %DIR%/db latin1;", &whole, "invalid parameter \"latin1\""),
        ("geoip_country %DIR%/db; geoip_country %DIR%/db;", &whole, "\"geoip_country\" directive is duplicate"),
    ];
    for (directive, bytes, message) in cases {
        for block in ["http", "stream"] {
            let text = configuration(driver, &format!("{block} {{ {directive} }}"));
            let mut refused = Setup::configuration(&text).file("db", bytes).argument("-t").launch();
            assert!(!refused.wait_exited().success(), "{directive}");
            assert!(refused.stderr().contains(message), "{directive}: {}", refused.stderr());
        }
    }
    let text = configuration(driver, "http { geoip_proxy nobody; }");
    let mut refused = Setup::configuration(&text).argument("-t").launch();
    assert!(!refused.wait_exited().success());
    assert!(refused.stderr().contains("invalid network \"nobody\""), "{}", refused.stderr());
}
