//! Checks the nginx column of the table against nginx itself, which `GALE_TEST_NGINX` names; skipped without that.
//!
//! A server behind nginx answers with the fields of a row, whose dates are moved from the table's time to the current
//! time. The file that nginx writes tells when it received the response, and until when it regards it as fresh.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime};

use gale_base::http_date;

use super::table::Is::{Fresh, Not};
use super::table::{NOW, ROWS, Row};
use crate::key::id_of;

/// Results of nginx from which `proxy_cache_conformance nginx` differs on purpose: decision 0028 gives the reasons.
const DIFFERENCES: [(&str, Option<i64>); 3] = [
    ("9111 1.2.2: a number that is too large", Some(99_999_999_999)),
    ("9111 4.1: Vary *", Some(60)),
    ("9111 5.3: Expires in another time zone", Some(60)),
];

/// Attempts for each row: a second may begin between the server's clock and nginx's.
const TRIES: usize = 5;

#[test]
fn nginx_agrees_with_its_column() {
    let Some(program) = std::env::var_os("GALE_TEST_NGINX") else {
        crate::skips::skip("GALE_TEST_NGINX names no nginx");
        return;
    };
    let nginx = Nginx::start(&program);
    let mut wrong = Vec::new();
    // nginx has no heuristics.
    for (number, row) in ROWS.iter().enumerate().filter(|(_, row)| row.heuristic.is_none()) {
        let expected = expected(row);
        let found: Vec<_> = (0..TRIES).map(|attempt| nginx.lifetime(row, &format!("{number}-{attempt}"))).collect();
        if !found.contains(&expected) {
            wrong.push(format!("{}: {found:?}, not {expected:?}", row.section));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Seconds for which nginx should regard a row as fresh; `None` if it does not store it.
fn expected(row: &Row) -> Option<i64> {
    if let Some((_, found)) = DIFFERENCES.iter().find(|(section, _)| *section == row.section) {
        return *found;
    }
    match row.nginx {
        Fresh(seconds) => Some(seconds),
        Not(_) => None,
    }
}

/// A response with a row's fields.
fn response(row: &Row) -> String {
    let fields: String = row.fields.iter().map(|field| format!("{}\r\n", moved(field))).collect();
    let body = if row.status == 204 { "" } else { "Content-Length: 1\r\n\r\na" };
    let end = if body.is_empty() { "\r\n" } else { body };
    format!("HTTP/1.1 {} A\r\nConnection: close\r\n{fields}{end}", row.status)
}

/// Moves a field's date from the table's time to now, in its original format.
fn moved(field: &str) -> String {
    let (name, value) = field.split_once(": ").expect("a field");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time").as_secs();
    let to_now = |seconds: u64| now + seconds - NOW;
    if let Some(seconds) = value.strip_prefix('@').and_then(|digits| digits.parse().ok()) {
        return format!("{name}: @{}", to_now(seconds));
    }
    let Some(seconds) = http_date::parse(value.replace("UTC", "GMT").as_bytes()) else { return field.to_owned() };
    let date = String::from_utf8(http_date::format(to_now(seconds)).to_vec()).expect("a date");
    let words: Vec<&str> = date.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let [_, day, month, year, time, _] = words[..] else { unreachable!("a date has six parts") };
    match value.split(' ').count() {
        // nginx does not compare the name of the day with the date either.
        4 => format!("{name}: Sunday, {day}-{month}-{} {time} GMT", &year[2..]),
        6 if value.ends_with("UTC") => format!("{name}: {}", date.replace("GMT", "UTC")),
        6 if value.ends_with("GMT") => format!("{name}: {date}"),
        _ => format!("{name}: Sun {month} {day} {time} {year}"),
    }
}

struct Nginx {
    directory: PathBuf,
    behind: TcpListener,
    process: Child,
}

impl Nginx {
    fn start(program: &OsStr) -> Nginx {
        let directory = std::env::temp_dir().join(format!("gale-against-nginx-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a directory");
        let behind = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let text = "daemon off; master_process off; pid DIR/pid; events {}
            http { access_log off; proxy_temp_path DIR/temp; client_body_temp_path DIR/body; fastcgi_temp_path DIR/f;
            uwsgi_temp_path DIR/u; scgi_temp_path DIR/s; proxy_cache_path DIR/cache keys_zone=one:1m;
            server { listen unix:DIR/socket; proxy_cache one; proxy_cache_key $uri;
            location / { proxy_pass http://BEHIND; }
            location /valid/ { proxy_cache_valid any 30s; proxy_pass http://BEHIND; } } }";
        let text = text.replace("DIR", directory.to_str().expect("a path of text"));
        let address = behind.local_addr().expect("an address").to_string();
        std::fs::write(directory.join("conf"), text.replace("BEHIND", &address)).expect("written");
        let at = |name: &str| directory.join(name);
        let mut command = Command::new(program);
        command.arg("-p").arg(&directory).arg("-c").arg(at("conf")).arg("-e").arg(at("error.log"));
        let process = command.spawn().expect("nginx starts");
        let nginx = Nginx { directory, behind, process };
        let end = Instant::now() + Duration::from_secs(60);
        while UnixStream::connect(nginx.directory.join("socket")).is_err() {
            assert!(Instant::now() < end, "nginx does not listen");
            std::thread::yield_now();
        }
        nginx
    }

    /// Requests a row under a name through nginx. Returns the seconds for which nginx regards it as fresh.
    fn lifetime(&self, row: &Row, name: &str) -> Option<i64> {
        assert!(matches!(row.valid, None | Some(30)), "there is a location for it");
        let path = format!("{}/{name}", row.valid.map_or("", |_| "/valid"));
        let authorization = if row.authorization { "Authorization: Basic eDp5\r\n" } else { "" };
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{authorization}\r\n");
        let mut client = UnixStream::connect(self.directory.join("socket")).expect("nginx listens");
        client.write_all(request.as_bytes()).expect("sent");
        let (mut server, _) = self.behind.accept().expect("nginx connects");
        read_until(&mut server, |read| read.windows(4).any(|end| end == b"\r\n\r\n"));
        server.write_all(response(row).as_bytes()).expect("sent");
        drop(server);
        // nginx closes the connection when it has stored the response.
        read_until(&mut client, |_| false);
        let name: String = id_of(path.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        stored_lifetime(&self.directory.join("cache").join(name))
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Reads until `is_enough` returns true, or the connection ends.
fn read_until(stream: &mut impl Read, is_enough: impl Fn(&[u8]) -> bool) {
    let (mut read, mut bytes) = (Vec::new(), [0; 4096]);
    while !is_enough(&read) {
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(length) => read.extend_from_slice(&bytes[..length]),
        }
    }
}

/// Reads the lifetime from nginx's file. Its header has numbers of eight bytes: version, end of freshness, two more
/// times, last modification, time of receipt.
fn stored_lifetime(path: &Path) -> Option<i64> {
    let file = std::fs::read(path).ok()?;
    let number = |at: usize| i64::from_ne_bytes(file[8 * at..8 * at + 8].try_into().expect("eight bytes"));
    Some(number(1) - number(5))
}
