//! dns: names are looked up at a server that refuses, lies or says nothing.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{io, thread};

use super::Experiment;
use super::exchange::{ask, get};
use super::origin::{Origin, Then, content, plain_answer};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, WAIT_MAX_MS, each_in_threads};
use crate::floods::Waits;
use crate::servers::Setting;
use std::io::Write as _;

pub const EXPERIMENT: Experiment = Experiment {
    name: "dns",
    does: "The DNS server answers with SERVFAIL, NXDOMAIN, nothing, noise, the address of a stranger under another \
           number or name, a truncated message or an endless alias.",
    holds: "Such requests end with 502 or 504 and none reaches the stranger; a bystander is answered within a second; \
            right answers work at once.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const REQUESTS: usize = 16;
const LIMIT: Duration = Duration::from_secs(15);
const RIGHT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Answer of the DNS server to a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Right,
    ServerFailure,
    NoSuchName,
    Silent,
    Noise,
    OtherNumber,
    OtherName,
    Truncated,
    Alias,
}

const MANNERS: [Manner; 9] = [
    Manner::Right,
    Manner::ServerFailure,
    Manner::NoSuchName,
    Manner::Silent,
    Manner::Noise,
    Manner::OtherNumber,
    Manner::OtherName,
    Manner::Truncated,
    Manner::Alias,
];

fn run(trial: &Trial) -> Result<Outcome, String> {
    let origin = Origin::plain()?;
    let port = origin.address.port();
    let stranger = Origin::start_at(&format!("{STRANGER}:{port}"), |_, stream| {
        let _ = stream.write_all(&plain_answer("/stranger/100"));
        Then::Close
    })?;
    let names = Names::start().map_err(|error| format!("DNS: {error}"))?;
    let setting = Setting {
        http: format!("resolver 127.0.0.1:{} valid=1s ipv6=off; resolver_timeout 1s;", names.port),
        server: format!(
            "location /named/ {{ set $name $arg_name.campaign; proxy_pass http://$name:{port}; \
             proxy_connect_timeout 2s; }}"
        ),
        ..Setting::default()
    };
    let mut watched = trial.start(setting)?;
    let (tally, is_over) = (Tally::default(), AtomicBool::new(false));
    let (first, begun) = ("/named/1000/0?name=first", Instant::now());
    tally.must_answer(begun, first, &ask(watched.address(), &get(first), LIMIT), &content(first));
    watched.read_again();
    let waits = thread::scope(|scope| {
        let bystander = scope.spawn(|| Waits::until(watched.address(), &is_over));
        for round in 0..2 {
            for (number, manner) in MANNERS.iter().enumerate() {
                names.manner.store(number, Ordering::Relaxed);
                each_in_threads(REQUESTS, REQUESTS, |request| {
                    // A name of its own, so that no answer is remembered.
                    let path = format!("/named/1000/{request}?name={manner:?}-{round}-{request}");
                    let begun = Instant::now();
                    let reply = ask(watched.address(), &get(&path), LIMIT);
                    match manner {
                        Manner::Right => tally.must_answer(begun, &path, &reply, &content(&path)),
                        _ => tally.may_end(begun, &path, &reply, &content(&path)),
                    }
                });
            }
        }
        is_over.store(true, Ordering::Relaxed);
        bystander.join().map_err(|_| "the bystander has failed".to_owned())
    })?;
    let waits = waits.map_err(|error| error.to_string())?;
    let mut outcome = watched.finish(&tally);
    outcome.lost += waits.failed;
    outcome.check(waits.longest_ms() < WAIT_MAX_MS, "the bystander waits a second");
    outcome.check(stranger.asked() == 0, format!("{} requests reached the stranger", stranger.asked()));
    outcome.check(names.asked() > 0, "the DNS server was not asked");
    Ok(outcome)
}

/// The DNS server.
struct Names {
    port: u16,
    manner: Arc<AtomicUsize>,
    asked: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
}

impl Names {
    fn start() -> io::Result<Names> {
        const LOOK_EVERY: Duration = Duration::from_millis(100);
        let socket = UdpSocket::bind((RIGHT, 0))?;
        socket.set_read_timeout(Some(LOOK_EVERY))?;
        let names = Names {
            port: socket.local_addr()?.port(),
            manner: Arc::default(),
            asked: Arc::default(),
            is_over: Arc::default(),
        };
        let (manner, asked, is_over) = (names.manner.clone(), names.asked.clone(), names.is_over.clone());
        thread::spawn(move || {
            let mut question = [0; 512];
            while !is_over.load(Ordering::Relaxed) {
                if let Ok((length, client)) = socket.recv_from(&mut question) {
                    asked.fetch_add(1, Ordering::Relaxed);
                    if let Some(answer) = answer(&question[..length], MANNERS[manner.load(Ordering::Relaxed)]) {
                        let _ = socket.send_to(&answer, client);
                    }
                }
            }
        });
        Ok(names)
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// An answer to a question of one name (RFC 1035, section 4.1).
fn answer(question: &[u8], manner: Manner) -> Option<Vec<u8>> {
    const NOT_FOUND: u8 = 3;
    const FAILURE: u8 = 2;
    let name_end = question.get(12..)?.iter().position(|&byte| byte == 0)? + 13;
    let asked = question.get(12..name_end + 4)?;
    let head = |flags: u8, code: u8, answers: u8| {
        [&question[..2], &[0x81 | flags, 0x80 | code, 0, 1, 0, answers, 0, 0, 0, 0]].concat()
    };
    // The name is a pointer to that of the question.
    let record = |kind: u8, data: &[u8]| [&[0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 1, 0, data.len() as u8], data].concat();
    let address = |address: Ipv4Addr| record(1, &address.octets());
    Some(match manner {
        Manner::Right => [head(0, 0, 1), asked.to_vec(), address(RIGHT)].concat(),
        Manner::ServerFailure => [head(0, FAILURE, 0), asked.to_vec()].concat(),
        Manner::NoSuchName => [head(0, NOT_FOUND, 0), asked.to_vec()].concat(),
        Manner::Silent => return None,
        Manner::Noise => [&question[..2], &[0xff; 40]].concat(),
        Manner::OtherNumber => {
            let mut answer = [head(0, 0, 1), asked.to_vec(), address(STRANGER)].concat();
            answer[1] ^= 1;
            answer
        }
        Manner::OtherName => {
            let mut answer = [head(0, 0, 1), asked.to_vec(), address(STRANGER)].concat();
            // Another letter in the name of the question.
            answer[13] = if answer[13] == b'x' { b'y' } else { b'x' };
            answer
        }
        Manner::Truncated => [head(2, 0, 0), asked.to_vec()].concat(),
        Manner::Alias => [head(0, 0, 1), asked.to_vec(), record(5, &[0xc0, 12])].concat(),
    })
}
