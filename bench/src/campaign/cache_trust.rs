//! cache-trust: poisoning and deception of a cache. One client asks in a way that should leave nothing for another, and
//! then the other asks.

use std::io::Write;
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{Reply, ask};
use super::origin::{Origin, Request, Then};
use super::outcome::{Outcome, Tally};
use super::trial::Trial;
use crate::servers::Setting;

pub const EXPERIMENT: Experiment = Experiment {
    name: "cache-trust",
    does: "A client asks with fields that are no part of the key, with a range, a condition, HEAD, a cookie or another \
           host, or for an account under a path that looks static; then another client asks.",
    holds: "The second client gets what the backend has for it, and nothing of the first.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const LIMIT: Duration = Duration::from_secs(10);

/// Two requests; the second must be answered with this body.
struct Case {
    name: &'static str,
    first: &'static str,
    second: &'static str,
    body: &'static str,
}

/// `%` stands for the fields that every request has.
const CASES: [Case; 15] = [
    Case {
        name: "private",
        first: "GET /static/private HTTP/1.1\r\n%Cookie: first\r\n\r\n",
        second: "GET /static/private HTTP/1.1\r\n%Cookie: second\r\n\r\n",
        body: "for second",
    },
    Case {
        name: "Set-Cookie",
        first: "GET /static/set-cookie HTTP/1.1\r\n%Cookie: first\r\n\r\n",
        second: "GET /static/set-cookie HTTP/1.1\r\n%Cookie: second\r\n\r\n",
        body: "for second",
    },
    Case {
        name: "Authorization",
        first: "GET /static/authorization HTTP/1.1\r\n%Authorization: first\r\n\r\n",
        second: "GET /static/authorization HTTP/1.1\r\n%Authorization: second\r\n\r\n",
        body: "for second",
    },
    Case {
        name: "Vary",
        first: "GET /static/vary HTTP/1.1\r\n%X-Device: first\r\n\r\n",
        second: "GET /static/vary HTTP/1.1\r\n%X-Device: second\r\n\r\n",
        body: "for second",
    },
    Case {
        name: "Vary, without the field",
        first: "GET /static/vary-none HTTP/1.1\r\n%X-Device: first\r\n\r\n",
        second: "GET /static/vary-none HTTP/1.1\r\n%\r\n",
        body: "for nobody",
    },
    Case {
        name: "Vary, its value in two fields",
        first: "GET /static/vary-two HTTP/1.1\r\n%X-Device: first\r\nX-Device: second\r\n\r\n",
        second: "GET /static/vary-two HTTP/1.1\r\n%X-Device: first\r\n\r\n",
        body: "for first",
    },
    Case {
        name: "Vary: *",
        first: "GET /static/vary-any HTTP/1.1\r\n%X-Device: first\r\n\r\n",
        second: "GET /static/vary-any HTTP/1.1\r\n%X-Device: second\r\n\r\n",
        body: "for second",
    },
    Case {
        name: "HEAD",
        first: "HEAD /static/plain/head HTTP/1.1\r\n%\r\n",
        second: "GET /static/plain/head HTTP/1.1\r\n%\r\n",
        body: "the whole body",
    },
    Case {
        name: "Range",
        first: "GET /static/plain/range HTTP/1.1\r\n%Range: bytes=0-2\r\n\r\n",
        second: "GET /static/plain/range HTTP/1.1\r\n%\r\n",
        body: "the whole body",
    },
    Case {
        name: "a condition",
        first: "GET /static/plain/condition HTTP/1.1\r\n%If-None-Match: \"tag\"\r\n\r\n",
        second: "GET /static/plain/condition HTTP/1.1\r\n%\r\n",
        body: "the whole body",
    },
    Case {
        name: "a field that the backend refuses",
        first: "GET /static/plain/refused HTTP/1.1\r\n%X-Bad: 1\r\n\r\n",
        second: "GET /static/plain/refused HTTP/1.1\r\n%\r\n",
        body: "the whole body",
    },
    Case {
        name: "another Host",
        first: "GET /static/host HTTP/1.1\r\nHost: first\r\nConnection: close\r\n\r\n",
        second: "GET /static/host HTTP/1.1\r\n%\r\n",
        body: "for campaign",
    },
    Case {
        name: "another host in the target",
        first: "GET http://first/static/host/target HTTP/1.1\r\n%\r\n",
        second: "GET /static/host/target HTTP/1.1\r\n%\r\n",
        body: "for campaign",
    },
    Case {
        name: "two Host fields",
        first: "GET /static/host/two HTTP/1.1\r\n%Host: first\r\n\r\n",
        second: "GET /static/host/two HTTP/1.1\r\n%\r\n",
        body: "for campaign",
    },
    Case {
        name: "the same path in other letters",
        first: "GET /STATIC/vary HTTP/1.1\r\n%X-Device: first\r\n\r\n",
        second: "GET /static/vary HTTP/1.1\r\n%X-Device: third\r\n\r\n",
        body: "for third",
    },
];

/// Paths that lead to an account at a server that decodes them once, and may look static.
const ACCOUNTS: [&str; 12] = [
    "/account",
    "/account/x.css",
    "/account%2fx.css",
    "/account;x.css",
    "/account/..%2f..%2faccount/static/x.css",
    "/static/../account",
    "/static/..%2faccount",
    "/static/%2e%2e/account",
    "/static/%2e%2e%2faccount",
    "//static/..//account",
    "/static%2f..%2faccount",
    "/static/x/../../account?y=/static/x.css",
];

fn run(trial: &Trial) -> Result<Outcome, String> {
    let origin = Origin::start(|request, stream| {
        let _ = stream.write_all(answer(request).as_bytes());
        Then::Close
    })?;
    let setting = Setting {
        http: "proxy_cache_path cache keys_zone=cache:1m;".to_owned(),
        server: format!(
            "proxy_set_header Host $host; proxy_cache_key $scheme$host$request_uri;
             location /account {{ proxy_pass http://{0}; }} location /STATIC/ {{ proxy_pass http://{0}; }}
             location /static/ {{ proxy_pass http://{0}; proxy_cache cache; proxy_cache_valid 200 1h; }}",
            origin.address
        ),
        ..Setting::default()
    };
    let watched = trial.start(setting)?;
    let tally = Tally::default();
    let send = |text: &str| {
        let request = text.replace('%', "Host: campaign\r\nConnection: close\r\n");
        ask(watched.address(), request.as_bytes(), LIMIT)
    };
    for case in &CASES {
        // A HEAD is answered without a body, so it does not look whole.
        let _ = send(case.first);
        let begun = Instant::now();
        match send(case.second) {
            Ok(reply) if reply.status == 200 && reply.body == case.body.as_bytes() => tally.answered(begun),
            other => tally.wrong(format!("{}: {}", case.name, told(&other))),
        }
    }
    for path in ACCOUNTS {
        let account = |cookie: &str| {
            let fields = format!("Host: campaign\r\nConnection: close\r\n{cookie}\r\n");
            ask(watched.address(), format!("GET {path} HTTP/1.1\r\n{fields}").as_bytes(), LIMIT)
        };
        let _ = account("Cookie: first\r\n");
        let begun = Instant::now();
        match account("") {
            Ok(reply) if !told(&Ok(reply.clone())).contains("first") => tally.answered(begun),
            Ok(reply) => tally.wrong(format!("{path}: {}", told(&Ok(reply)))),
            Err(error) => tally.lost(format!("{path}: {error}")),
        }
    }
    Ok(watched.finish(&tally))
}

fn told(reply: &Result<Reply, String>) -> String {
    match reply {
        Ok(reply) => format!("{} \"{}\"", reply.status, String::from_utf8_lossy(&reply.body).escape_debug()),
        Err(error) => error.clone(),
    }
}

/// An application that says nothing of caches where it need not.
fn answer(request: &Request) -> String {
    let value = |name: &str| request.field(name).unwrap_or("nobody").to_owned();
    let devices: Vec<&str> = request.head.lines().filter_map(|line| line.strip_prefix("X-Device: ")).collect();
    let device = if devices.is_empty() { "nobody".to_owned() } else { devices.join(" and ") };
    let path = resolved(request.target.split('?').next().unwrap_or(""));
    let page = path.strip_prefix("/static/").unwrap_or("");
    let (fields, body) = match page.split('/').next().unwrap_or("") {
        _ if path.starts_with("/account") => ("", format!("account of {}", value("cookie"))),
        "private" => ("Cache-Control: private\r\n", format!("for {}", value("cookie"))),
        "set-cookie" => ("Set-Cookie: a=b\r\n", format!("for {}", value("cookie"))),
        "authorization" => ("", format!("for {}", value("authorization"))),
        "vary" | "vary-none" | "vary-two" => ("Vary: X-Device\r\n", format!("for {device}")),
        "vary-any" => ("Vary: *\r\n", format!("for {device}")),
        "host" => ("", format!("for {}", value("host"))),
        "plain" if request.field("x-bad").is_some() => {
            return "HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n".to_owned();
        }
        "plain" if request.field("if-none-match").is_some() => {
            return "HTTP/1.1 304 Not Modified\r\nETag: \"tag\"\r\n\r\n".to_owned();
        }
        "plain" if request.field("range").is_some() => {
            return "HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-2/14\r\nContent-Length: 3\r\n\r\nthe".to_owned();
        }
        "plain" => ("ETag: \"tag\"\r\n", "the whole body".to_owned()),
        _ => ("", "other".to_owned()),
    };
    let body_sent = if request.method == "HEAD" { "" } else { &body };
    format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\nConnection: close\r\n\r\n{body_sent}", body.len())
}

/// A path as an application resolves it: decoded once, then without dot segments and empty ones.
fn resolved(path: &str) -> String {
    let mut decoded = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((&byte, more)) = rest.split_first() {
        let digits = more.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|text| u8::from_str_radix(text, 16).ok()).filter(|_| byte == b'%') {
            Some(value) => {
                decoded.push(value);
                rest = &more[2..];
            }
            None => {
                decoded.push(byte);
                rest = more;
            }
        }
    }
    let decoded = String::from_utf8_lossy(&decoded).into_owned();
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            other => segments.push(other),
        }
    }
    format!("/{}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_accounts_lead_to_accounts() {
        for path in ACCOUNTS {
            let path = path.split('?').next().unwrap();
            assert!(resolved(path).starts_with("/account"), "{path}: {}", resolved(path));
        }
    }
}
