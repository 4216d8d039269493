//! HTTP/2 in a simulated world: whatever the network, the disks and the clients do, every stream gets the same answer
//! as its request gets alone over HTTP/1, or ends for a reason that can be named; and nothing is left behind.
//!
//! The requests are those of `http1.rs`. Faults of upstream servers are in `proxy.rs`.

use std::fmt;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use gale_files::SimulatedFiles;
use gale_process::Worker;
use gale_protocol::http2::{ErrorCode, StreamId};
use gale_runtime::simulation::{Faults, Random, Reading, Simulation, each_seed};
use gale_runtime::{AcceptOptions, Listener, SocketAddress, Stream, leased_bytes, now, sleep, spawn, task_count};

use crate::support::answer::Baseline;
use crate::support::clients::{
    Client, ClientPlan, LATENESS, SEEDS, check_nothing_is_left, faults_that_break, play, play_over_reloads,
};
use crate::support::http2::{Ask, Came, End, Http2Client, relay};
use crate::support::requests::{
    self, After, CLIENT_BODY_TIMEOUT, KEEPALIVE_TIMEOUT, SEND_TIMEOUT, add_files, items, pattern,
};
use crate::support::{Task, address, run};

/// Most requests of one client; more than it may have concurrent streams.
const ASKS_MAX: usize = 6;

fn configuration() -> String {
    let text = requests::configuration();
    let limits = "limit_conn simulated_places 1; limit_req zone=simulated_rates;";
    assert!(text.contains(limits), "a place for each connection");
    // The time of day would have another length in each run: Huffman codes of some digits are shorter.
    let date = "add_header Date \"Thu, 01 Jan 1970 00:00:00 GMT\" always;";
    text.replace(limits, &format!("http2 on; limit_conn simulated_places {ASKS_MAX}; {date}"))
}

/// A request with its answer.
struct Known {
    name: &'static str,
    ask: Ask,
    came: Came,
    /// Boundaries of multipart bodies differ in each run.
    varies: bool,
    /// Offset in the body at which reading the file fails.
    breaks_at: Option<usize>,
}

impl Known {
    /// Checks the part of the answer that a stream has received.
    fn check(&self, came: &Came) {
        let (name, own) = (self.name, &self.came);
        assert!(own.statuses.starts_with(&came.statuses), "{name}: {:?}", came.statuses);
        if let Some(good) = self.breaks_at {
            assert!(!came.is_complete && pattern(good).starts_with(&came.body), "{name}: {} bytes", came.body.len());
            return;
        }
        let is_right = if self.varies { came.body.len() <= own.body.len() } else { own.body.starts_with(&came.body) };
        assert!(is_right, "{name}: another body");
        if came.is_complete {
            assert!(came.statuses == own.statuses && came.body.len() == own.body.len(), "{name}: {came:?}");
        }
    }
}

/// Requests that HTTP/2 can carry, with the answer that a client gets when it is alone.
fn catalogue() -> &'static [Known] {
    static CATALOGUE: OnceLock<Vec<Known>> = OnceLock::new();
    CATALOGUE.get_or_init(|| {
        let known = |item: requests::Item| {
            let ask = item.ask()?;
            let simulation = Simulation::new(0, Faults::NONE);
            add_files(&simulation);
            let came = run(&simulation, &configuration(), async |_| {
                let stream = Stream::connect(&address()).await.expect("somebody listens");
                let client = Http2Client::begin(stream, 1 << 20, Reading::Eagerly);
                let id = client.ask(&ask).expect("a stream");
                client.send_body(id, &ask.body, 100_000, Duration::ZERO, true, &Random::new(0)).await;
                client.until(id, |_| false).await;
                client.leave(false);
                client.ended().await;
                client.came(id)
            });
            let head = item.statuses().len();
            let answer = Baseline::of(&item).answer.bytes;
            let mut body = &answer[..];
            for _ in 0..head {
                let end = body.windows(4).position(|end| end == b"\r\n\r\n").expect("a head");
                body = &body[end + 4..];
            }
            let body = body.strip_suffix(b"<last chunk>").unwrap_or(body);
            let breaks_at = if let After::BrokenOff(good) = item.after { Some(good) } else { None };
            let varies = answer.windows(9).any(|text| text == b"boundary=");
            assert_eq!(came.statuses, item.statuses(), "{}", item.name);
            match breaks_at {
                Some(_) => assert_eq!(came.reset, Some(ErrorCode::INTERNAL_ERROR), "{}", item.name),
                None => assert!(came.is_complete && (varies || came.body == body), "{}: as over HTTP/1", item.name),
            }
            Some(Known { name: item.name, ask, came, varies, breaks_at })
        };
        items().into_iter().filter_map(known).collect()
    })
}

/// Runs `test` in a world of each seed, after the reference answers are known.
fn each_world(test: impl Fn(&Simulation, &Random)) {
    // The reference answers come from worlds of their own, before this one.
    catalogue();
    each_seed(SEEDS, |simulation| test(simulation, &Random::new(simulation.seed())));
}

#[test]
fn without_faults_every_request_has_the_answer_of_http1() {
    assert!(catalogue().len() > 45, "{}", catalogue().len());
}

/// Plan of a client for one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wish {
    Answer,
    /// Resets the stream after this many bytes of the body.
    Reset(usize),
    /// Never opens the stream's window again.
    Hold,
}

/// How a client ends its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    /// Waits until the server closes the connection.
    Waits,
    /// Closes after the last answer.
    Closes,
    /// Closes or resets after this time.
    Vanishes { after: Duration, resets: bool },
}

/// Script of one client.
#[derive(Clone)]
struct Plan {
    asks: Vec<(usize, Wish)>,
    /// Waits for every answer before the next request.
    waits: bool,
    window: u32,
    piece_max: usize,
    pause: Duration,
    reads: Reading,
    ending: Ending,
    delay: Duration,
}

/// A client's observations.
struct Seen {
    streams: Vec<(StreamId, Came)>,
    goaway: Option<(StreamId, ErrorCode)>,
    end: End,
    local: SocketAddress,
}

impl Plan {
    fn new(random: &Random) -> Plan {
        let window = *random.pick(&[1000, 20_000, 65_535, 1 << 20]);
        let mut holds = false;
        let mut asks = Vec::new();
        for _ in 0..random.up_to(ASKS_MAX) {
            let index = random.below(catalogue().len() as u64) as usize;
            let known = &catalogue()[index];
            if known.varies {
                continue; // like the time of day
            }
            let length = known.came.body.len();
            let wish = match random.below(8) {
                0 => Wish::Reset(random.below(length as u64 + 1) as usize),
                1 if !holds && length > window as usize && known.breaks_at.is_none() => {
                    holds = true;
                    Wish::Hold
                }
                _ => Wish::Answer,
            };
            asks.push((index, wish));
        }
        let ending = match random.below(4) {
            0 => {
                let after = Duration::from_micros(random.below(*random.pick(&[2_000, 100_000, 20_000_000])));
                Ending::Vanishes { after, resets: random.chance(500) }
            }
            1 => Ending::Closes,
            _ => Ending::Waits,
        };
        // Fast enough that a window is open again before the server gives the stream up.
        let reads = match random.below(4) {
            0 => Reading::Slowly(10_000 + random.up_to(10_000), Duration::from_millis(random.below(500))),
            _ => Reading::Eagerly,
        };
        Plan {
            asks,
            waits: random.chance(300),
            window,
            piece_max: *random.pick(&[40, 500, 5000, 100_000]),
            pause: Duration::from_micros(*random.pick(&[0, 100, 20_000])),
            reads,
            ending,
            delay: Duration::from_millis(random.below(2000)),
        }
    }

    /// `true` if a window may have stayed closed for too long: its data are read slowly, and in small pieces on some
    /// networks.
    fn is_late_with_windows(&self, came: &Came) -> bool {
        matches!(self.reads, Reading::Slowly(..)) && came.body.len() >= self.window as usize
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |&(index, wish): &(usize, Wish)| (catalogue()[index].name, wish);
        let asks: Vec<_> = self.asks.iter().map(named).collect();
        write!(f, "{asks:?}, waits {}, window {}, ", self.waits, self.window)?;
        write!(f, "pieces {} {:?}, {:?}, {:?}", self.piece_max, self.pause, self.reads, self.ending)
    }
}

impl ClientPlan for Plan {
    type Seen = Seen;

    async fn play(self, random: Random) -> Option<Seen> {
        sleep(self.delay).await;
        let stream = Stream::connect(&address()).await.ok()?;
        let client = Http2Client::begin(stream, self.window, self.reads);
        if let Ending::Vanishes { after, resets } = self.ending {
            let client = Rc::clone(&client);
            spawn(async move {
                sleep(after).await;
                client.leave(resets);
            });
        }
        let mut streams = Vec::new();
        let mut tasks = Vec::new();
        for &(index, wish) in &self.asks {
            let ask = &catalogue()[index].ask;
            let Some(id) = client.ask(ask) else { break };
            streams.push(id);
            if wish == Wish::Hold {
                client.held.set(Some(id));
            }
            let task = Task::spawn(want(Rc::clone(&client), id, index, wish, self.clone(), random.fork()));
            if self.waits { task.take().await } else { tasks.push(task) }
        }
        for task in tasks {
            task.take().await;
        }
        if self.ending == Ending::Closes {
            client.leave(false);
        }
        let end = client.ended().await;
        let streams = streams.into_iter().map(|id| (id, client.came(id))).collect();
        Some(Seen { streams, goaway: client.goaway(), end, local: client.local.clone() })
    }

    fn address_of(seen: &Seen) -> &SocketAddress {
        &seen.local
    }

    fn check(&self, seen: &Seen, was_cut: bool) {
        let is_alone_to_blame = was_cut || matches!(self.ending, Ending::Vanishes { .. });
        for (&(index, wish), (id, came)) in self.asks.iter().zip(&seen.streams) {
            let known = &catalogue()[index];
            known.check(came);
            let reason = match (came.reset, known.breaks_at, wish) {
                _ if came.is_complete => continue,
                (None, ..) if is_alone_to_blame => "the client or the network has ended the connection",
                (None, _, Wish::Reset(_)) => "the client has given it up",
                (Some(ErrorCode::INTERNAL_ERROR), Some(_), _) => "the file cannot be read",
                (Some(ErrorCode::CANCEL), _, Wish::Hold) => "the client has opened no window",
                (Some(ErrorCode::CANCEL), ..) if self.is_late_with_windows(came) => {
                    "the client has opened one too late"
                }
                (reset, ..) => panic!("stream {id}, {}: {reset:?}, {} bytes", known.name, came.body.len()),
            };
            assert!(!reason.is_empty());
        }
        if is_alone_to_blame {
            return;
        }
        assert_eq!(seen.streams.len(), self.asks.len(), "the connection took no more");
        match self.ending {
            Ending::Closes => assert_eq!(seen.end, End::Left),
            _ => {
                assert_eq!(seen.end, End::Closed);
                let last = seen.streams.last().map_or(0, |(id, _)| *id);
                // GOAWAY is only sent if that needs no waiting.
                let said = seen.goaway.unwrap_or((last, ErrorCode::NO_ERROR));
                assert_eq!(said, (last, ErrorCode::NO_ERROR));
            }
        }
    }
}

/// Clients with random plans.
fn clients(random: &Random) -> Vec<Client<Plan>> {
    (0..random.up_to(6)).map(|_| Client::spawn(Plan::new(random), random)).collect()
}

/// Plays the plan for the stream of a request that was begun.
async fn want(client: Rc<Http2Client>, id: StreamId, index: usize, wish: Wish, plan: Plan, random: Random) {
    let ask = &catalogue()[index].ask;
    client.send_body(id, &ask.body, plan.piece_max, plan.pause, true, &random).await;
    match wish {
        Wish::Reset(length) => {
            client.until(id, |came| came.body.len() >= length && !came.statuses.is_empty()).await;
            client.reset(id);
        }
        Wish::Answer | Wish::Hold => client.until(id, |_| false).await,
    }
}

#[test]
fn streams_get_their_own_answers_despite_faults() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults::swarm(random));
        play(simulation, &configuration(), || clients(random));
    });
}

#[test]
fn connections_that_break_or_are_never_made_cost_only_themselves() {
    each_world(|simulation, random| {
        simulation.set_faults(faults_that_break(random));
        play(simulation, &configuration(), || clients(random));
    });
}

#[test]
fn streams_are_answered_over_a_reload() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults::swarm(random));
        play_over_reloads(simulation, &configuration(), random, || clients(random));
    });
}

#[test]
fn bodies_that_stop_end_their_streams_alone_and_in_time() {
    each_world(|simulation, random| {
        // In one world nothing is late.
        let is_punctual = simulation.seed() == 0;
        simulation.set_faults(if is_punctual { Faults::NONE } else { Faults::swarm(random) });
        add_files(simulation);
        run(simulation, &configuration(), async |serving| {
            let tasks = task_count();
            let stream = Stream::connect(&address()).await.expect("somebody listens");
            let client = Http2Client::begin(stream, 1 << 20, Reading::Eagerly);
            let body = pattern(20_000);
            let post = |target: &str| Ask {
                method: "POST".into(),
                target: target.into(),
                body: body.clone(),
                ..Ask::default()
            };
            let half = &body[..random.below(20_000) as usize];
            let mut streams = Vec::new();
            for _ in 0..ASKS_MAX - 1 {
                let id = client.ask(&post("/store")).expect("a stream");
                client.send_body(id, half, 5000, Duration::ZERO, false, random).await;
                streams.push(id);
            }
            let begun = now();
            let whole = client.ask(&post("/store")).expect("a stream");
            client.send_body(whole, &body, 5000, Duration::ZERO, true, random).await;
            client.until(whole, |_| false).await;
            assert!(client.came(whole).is_complete && client.came(whole).statuses == [200]);
            for id in streams {
                client.until(id, |came| came.reset.is_some()).await;
                let came = client.came(id);
                assert!(came.is_complete && came.statuses == [408], "{came:?}");
                let waited = now().since(begun);
                assert!(waited + LATENESS >= CLIENT_BODY_TIMEOUT, "{waited:?}");
                assert!(!is_punctual || waited < CLIENT_BODY_TIMEOUT + LATENESS, "{waited:?}");
            }
            assert_eq!(client.ended().await, End::Closed);
            let lasted = now().since(begun);
            assert!(!is_punctual || lasted < CLIENT_BODY_TIMEOUT + KEEPALIVE_TIMEOUT + LATENESS, "{lasted:?}");
            drop(client);
            check_nothing_is_left(simulation, serving, tasks).await;
        });
    });
}

#[test]
fn a_client_that_does_not_read_its_socket_loses_the_connection_in_time() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults { completions: *random.pick(&[0, 500, 1000]), ..Faults::NONE });
        add_files(simulation);
        run(simulation, &configuration(), async |serving| {
            let tasks = task_count();
            let stream = Stream::connect(&address()).await.expect("somebody listens");
            // It reads rarely: far more data wait for it than the socket holds.
            let client = Http2Client::begin(stream, 1 << 20, Reading::Slowly(1000, SEND_TIMEOUT * 20));
            let get = Ask { method: "GET".into(), target: "/large.bin".into(), ..Ask::default() };
            (0..3).for_each(|_| assert!(client.ask(&get).is_some()));
            let begun = now();
            while serving.connections() > 0 {
                sleep(Duration::from_millis(100)).await;
            }
            let waited = now().since(begun);
            assert!(waited >= SEND_TIMEOUT && waited < SEND_TIMEOUT + LATENESS, "{waited:?}");
            sleep(Duration::from_secs(1)).await;
            assert_eq!(leased_bytes(), 0, "what waited for it");
            client.ended().await;
            drop(client);
            check_nothing_is_left(simulation, serving, tasks).await;
        });
    });
}

/// Delay of the network in one direction.
const DELAY: Duration = Duration::from_millis(25);
/// Address of a relay to the server with a delay.
const FAR: &str = "192.0.2.3:80";
const LONG: usize = 16 << 20;

const FAR_SITE: &str = "error_log /log info;
    events { }
    http {
        access_log off; http2 on; client_max_body_size 100m;
        server { listen %ADDRESS%; root /www;
                 location /echo { test_echo; }
                 location /far/ { proxy_http_version 2; proxy_buffering off; proxy_pass http://192.0.2.3:80/; } } }";

/// Adds a delay to all connections to [`FAR`].
fn lengthen_the_way() {
    let from = SocketAddress::Inet(FAR.parse().expect("an address"));
    let listener = Listener::bind(&from, 64, AcceptOptions::default()).expect("nobody else is there");
    spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            relay(near, Stream::connect(&address()).await.expect("somebody listens"), DELAY);
        }
    });
}

/// Time of an exchange for a near or a far client; the answer has the length of [`LONG`].
fn time_of(ask: &Ask, is_far: bool) -> Duration {
    let simulation = Simulation::new(1, Faults::NONE);
    simulation.add_file("/www/long.bin", &vec![b'l'; LONG]).expect("memory for it");
    run(&simulation, FAR_SITE, async |_| {
        lengthen_the_way();
        let address = if is_far { SocketAddress::Inet(FAR.parse().expect("an address")) } else { address() };
        let stream = Stream::connect(&address).await.expect("somebody listens");
        let client = Http2Client::begin(stream, 32 << 20, Reading::Eagerly);
        let begun = now();
        let id = client.ask(ask).expect("a stream");
        client.send_body(id, &ask.body, 64 * 1024, Duration::ZERO, true, &Random::new(0)).await;
        client.until(id, |_| false).await;
        let came = client.came(id);
        assert!(came.is_complete && came.statuses == [200] && came.body.len() == LONG, "{:?}", came.statuses);
        let time = now().since(begun);
        client.leave(false);
        client.ended().await;
        time
    })
}

#[test]
fn an_upload_on_a_long_way_through_a_relay_is_not_held_up_by_windows() {
    let ask = Ask { method: "POST".into(), target: "/echo".into(), body: vec![b'u'; LONG], ..Ask::default() };
    let time = time_of(&ask, true);
    // With the initial window of 64 KiB it would take 12 seconds.
    assert!(time < Duration::from_millis(1500), "{time:?}");
}

#[test]
fn a_response_of_a_server_far_behind_a_relay_is_not_held_up_by_windows() {
    let ask = Ask { method: "GET".into(), target: "/far/long.bin".into(), ..Ask::default() };
    let time = time_of(&ask, false);
    // With the initial window of 256 KiB it would take 3 seconds.
    assert!(time < Duration::from_millis(1500), "{time:?}");
}
