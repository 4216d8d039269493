//! hostile-server, leaving-client: the other side ends or falls silent after each byte.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;

use super::Experiment;
use super::exchange::{ask, connect, get};
use super::origin::{Origin, Then};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS, each_in_threads};
use crate::client::http2::{self, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, Scheme, frame};
use crate::floods::Waits;
use crate::servers::Setting;

pub const HOSTILE_SERVER: Experiment = Experiment {
    name: "hostile-server",
    does: "The backend closes, resets or falls silent after each byte of its response, with a length and in \
           chunks; the response is buffered, not buffered, and cached.",
    holds: "A part of a response is never told as the whole and never stored.",
    needs: &[],
    not_on_nginx: None,
    run: hostile_server,
};

pub const LEAVING_CLIENT: Experiment = Experiment {
    name: "leaving-client",
    does: "A client closes or resets after each byte of a GET, a POST with a length or in chunks, and a POST over \
           HTTP/2, all of them passed on.",
    holds: "Nothing is left of it, and a bystander is answered within a second.",
    needs: &[],
    not_on_nginx: None,
    run: leaving_client,
};

const BODY: &[u8] = b"The quick brown fox jumps over the lazy dog.";
const RESPONSES: [&[u8]; 2] = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 44\r\nX-Field: value\r\nConnection: close\r\n\r\n\
      The quick brown fox jumps over the lazy dog.",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n\
      13\r\nThe quick brown fox\r\n19\r\n jumps over the lazy dog.\r\n0\r\n\r\n",
];
const ENDS: [Then; 3] = [Then::Close, Then::Reset, Then::Hold];
const MODES: [&str; 3] = ["buffered", "unbuffered", "stored"];
const THREADS: usize = 64;
const LIMIT: Duration = Duration::from_secs(10);

/// One response that ends too early.
#[derive(Clone, Copy)]
struct Cut {
    mode: usize,
    shape: usize,
    length: usize,
    then: usize,
}

impl Cut {
    fn all() -> Vec<Cut> {
        let mut all = Vec::new();
        for mode in 0..MODES.len() {
            for (shape, response) in RESPONSES.iter().enumerate() {
                for length in 0..=response.len() {
                    all.extend((0..ENDS.len()).map(|then| Cut { mode, shape, length, then }));
                }
            }
        }
        all
    }

    fn path(self) -> String {
        format!("/{}/{}/{}/{}", MODES[self.mode], self.shape, self.length, self.then)
    }

    fn of_path(path: &str) -> Option<Cut> {
        let mut numbers = path.split('/').skip(2).map(str::parse::<usize>);
        let mut next = || numbers.next()?.ok();
        let (shape, length, then) = (next()?, next()?, next()?);
        let is_known = shape < RESPONSES.len() && then < ENDS.len() && length <= RESPONSES[shape].len();
        is_known.then_some(Cut { mode: 0, shape, length, then })
    }

    /// Nothing is missing, and nothing may take it away again.
    fn is_whole(self) -> bool {
        self.length == RESPONSES[self.shape].len() && ENDS[self.then] != Then::Reset
    }
}

fn hostile_server(trial: &Trial) -> Result<Outcome, String> {
    let is_well = Arc::new(AtomicBool::new(false));
    let well = Arc::clone(&is_well);
    let origin = Origin::start(move |request, stream| {
        let Some(cut) = Cut::of_path(&request.target) else { return Then::Reset };
        let is_well = well.load(Ordering::Relaxed);
        let length = if is_well { RESPONSES[cut.shape].len() } else { cut.length };
        let _ = stream.write_all(&RESPONSES[cut.shape][..length]);
        if is_well { Then::Close } else { ENDS[cut.then] }
    })?;
    let pass = format!("proxy_pass http://{}; proxy_http_version 1.1; proxy_read_timeout 500ms;", origin.address);
    let setting = Setting {
        http: "proxy_cache_path cache keys_zone=cache:1m;".to_owned(),
        server: format!(
            "location /buffered/ {{ {pass} }} location /unbuffered/ {{ {pass} proxy_buffering off; }}
             location /stored/ {{ {pass} proxy_cache cache; proxy_cache_valid 200 1h; }}"
        ),
        ..Setting::default()
    };
    let watched = trial.start(setting)?;
    let tally = Tally::default();
    let cuts = Cut::all();
    each_in_threads(THREADS, cuts.len(), |number| {
        let (cut, begun) = (cuts[number], Instant::now());
        let reply = ask(watched.address(), &get(&cut.path()), LIMIT);
        match cut.is_whole() {
            true => tally.must_answer(begun, &cut.path(), &reply, BODY),
            false => tally.may_end(begun, &cut.path(), &reply, BODY),
        }
    });
    is_well.store(true, Ordering::Relaxed);
    each_in_threads(THREADS / 8, cuts.len(), |number| {
        let begun = Instant::now();
        let path = cuts[number].path();
        tally.must_answer(begun, &format!("{path} afterwards"), &ask(watched.address(), &get(&path), LIMIT), BODY);
    });
    Ok(watched.finish(&tally))
}

/// Requests that clients begin to send.
fn requests() -> Vec<Vec<u8>> {
    let head = "Host: campaign\r\n";
    let h2 = http2::block(Scheme::Http, "/passed");
    vec![
        format!("GET /passed HTTP/1.1\r\n{head}\r\n").into_bytes(),
        format!("POST /passed HTTP/1.1\r\n{head}Content-Length: 20\r\n\r\n01234567890123456789").into_bytes(),
        format!("POST /passed HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n3\r\nfgh\r\n0\r\n\r\n")
            .into_bytes(),
        [
            PREFACE.to_vec(),
            frame(SETTINGS, 0, 0, &[]),
            frame(HEADERS, END_HEADERS, 1, &h2),
            frame(DATA, 0, 1, b"0123456789"),
            frame(DATA, END_STREAM, 1, b"0123456789"),
        ]
        .concat(),
    ]
}

fn leaving_client(trial: &Trial) -> Result<Outcome, String> {
    const THINKS: Duration = Duration::from_millis(20);
    let origin = Origin::start(|_, stream| {
        std::thread::sleep(THINKS);
        let _ = stream.write_all(RESPONSES[0]);
        Then::Close
    })?;
    let setting = Setting {
        http: "http2 on;".to_owned(),
        server: format!("location /passed {{ proxy_pass http://{}; proxy_request_buffering off; }}", origin.address),
        ..Setting::default()
    };
    let watched = trial.start(setting)?;
    let tally = Tally::default();
    let requests = requests();
    let attempts: Vec<(usize, usize, bool)> = (0..requests.len())
        .flat_map(|request| {
            (0..=requests[request].len()).flat_map(move |length| [(request, length, false), (request, length, true)])
        })
        .collect();
    let is_over = AtomicBool::new(false);
    let waits = std::thread::scope(|scope| {
        let bystander = scope.spawn(|| Waits::until(watched.address(), &is_over));
        each_in_threads(THREADS / 4, attempts.len(), |number| {
            let (request, length, resets) = attempts[number];
            match leave(watched.address(), &requests[request][..length], resets) {
                Ok(()) => tally.ended_by_fault(),
                Err(error) => tally.lost(error),
            }
        });
        is_over.store(true, Ordering::Relaxed);
        bystander.join().map_err(|_| "the bystander has failed".to_owned())
    })?;
    tally.add_waits(&waits.map_err(|error| error.to_string())?);
    let mut outcome = watched.finish(&tally);
    outcome.check(outcome.longest_ms < WAIT_MAX_MS, "the bystander waits a second");
    Ok(outcome)
}

/// Sends so much and goes, a moment later in every second case.
fn leave(address: &str, bytes: &[u8], resets: bool) -> Result<(), String> {
    let mut stream: TcpStream = connect(address, LIMIT)?;
    stream.write_all(bytes).map_err(|error| error.to_string())?;
    if bytes.len().is_multiple_of(2) {
        std::thread::sleep(Duration::from_millis(5));
    }
    if resets {
        set_socket_linger(&stream, Some(Duration::ZERO)).map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_hold_the_body() {
        for response in RESPONSES {
            let reply = super::super::exchange::parse(response).unwrap();
            assert!(reply.is_whole && reply.body == BODY);
        }
    }

    #[test]
    fn paths_name_their_cuts() {
        for cut in Cut::all() {
            let read = Cut::of_path(&cut.path()).unwrap();
            assert_eq!((read.shape, read.length, read.then), (cut.shape, cut.length, cut.then));
        }
    }
}
