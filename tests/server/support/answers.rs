//! Requests, and backends that give every request the same kind of answer.

use super::{Asked, Backend, Client, Response, Serving};

/// Requests `target` with this `Host`.
pub fn ask(client: &mut Client, host: &str, target: &str) -> Response {
    client.ask(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
}

/// Sends one response with these fields, each ending in CR LF, and this body.
pub fn respond(client: &mut Client, fields: &str, body: &str) {
    client.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()));
}

/// A backend that answers with the request's target.
pub fn echo() -> Serving {
    Backend::tcp().serve(|asked, client| {
        respond(client, "", &asked.target);
        true
    })
}

/// A backend that answers with the whole request: request line, fields, an empty line and the body.
pub fn mirror() -> Serving {
    Backend::tcp().serve(|asked, client| {
        respond(client, "", &shown(asked));
        true
    })
}

pub fn shown(asked: &Asked) -> String {
    let Asked { method, target, version, .. } = asked;
    format!("{method} {target} {version}\n{}\n{}", asked.fields(), asked.text())
}

pub fn post(client: &mut Client, target: &str, fields: &str, body: &str) -> Response {
    client.ask(format!("POST {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n{body}"))
}

/// A backend that answers each target with these bytes, and then closes the connection if they end with `CLOSE`.
pub fn scripted(answers: &'static [(&'static str, &'static str)]) -> Serving {
    Backend::tcp().serve(move |asked, client| {
        let path = asked.target.split('?').next();
        let (_, answer) = answers.iter().find(|(target, _)| Some(*target) == path).expect("a target of the script");
        let (answer, closes) = answer.strip_suffix("CLOSE").map_or((*answer, false), |answer| (answer, true));
        client.send(answer);
        !closes
    })
}

/// Fields of a response without those that every response has.
pub fn own_fields(response: &Response) -> Vec<String> {
    let is_own = |name: &str| !["Server", "Date", "Connection"].contains(&name);
    response.headers.iter().filter(|(name, _)| is_own(name)).map(|(name, value)| format!("{name}: {value}")).collect()
}

/// A group that keeps connections to its servers open.
pub const KEEPALIVE: &str =
    "upstream u { server ADDRESS; } server { listen %UNIX%; location / { proxy_pass http://u; } }";

pub const LENGTH: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
