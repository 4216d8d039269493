//! HTTP/1 in a simulated world: whatever the network, the disks and the clients do, every request gets its answer,
//! complete, once and in order, or the connection ends for a reason that can be named; and nothing is left behind.
//!
//! The reference is the answer that each request gets when nothing goes wrong; that answer is compared with the
//! expectation of the test's author. `GALE_SEED` and `GALE_SEEDS` choose the worlds: see CONTRIBUTING.md.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use gale_files::SimulatedFiles;
use gale_process::Worker;
use gale_runtime::simulation::{Faults, Peer, PeerEnd, Random, Reading, Sending, Simulation, Transcript, each_seed};
use gale_runtime::{Bytes, SocketAddress, Stream, leased_bytes, sleep, task_count};

use crate::support::answer::{Answer, Baseline, Received};
use crate::support::clients::{
    Client, ClientPlan, LATENESS, SEEDS, SETTLING, check_nothing_is_left, faults_that_break, play, play_over_reloads,
};
use crate::support::requests::{
    After, CLIENT_HEADER_TIMEOUT, Item, KEEPALIVE_TIMEOUT, SEND_TIMEOUT, add_files, configuration, items,
};
use crate::support::{Task, address, run};

/// Capacity of a connection in one direction.
const WINDOW: usize = 64 * 1024;

struct Known {
    item: Item,
    baseline: Baseline,
}

/// Every request with its answer.
fn catalogue() -> &'static [Known] {
    static CATALOGUE: OnceLock<Vec<Known>> = OnceLock::new();
    CATALOGUE.get_or_init(|| {
        let known = |item: Item| Known { baseline: Baseline::of(&item), item };
        items().into_iter().map(known).collect()
    })
}

/// How a client ends its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    /// Reads all answers and waits until the server closes the connection.
    Waits,
    /// Reads all answers and closes.
    Closes,
    /// Shuts down its sending direction and reads until the server closes.
    HalfCloses,
    /// Closes or resets after sending this many bytes.
    Vanishes { after: usize, resets: bool },
    /// Sends this many bytes of another head, and then nothing.
    Stalls { head: usize },
    /// Stops reading after this many bytes, for longer than the server's send timeout.
    IsDeaf { after: usize },
}

/// Script of one client.
#[derive(Clone)]
struct Plan {
    items: Vec<usize>,
    /// Waits for every answer before the next request; otherwise requests are pipelined.
    waits: bool,
    /// Largest piece that is sent at once, in bytes.
    piece_max: usize,
    pause: Duration,
    reads: Reading,
    ending: Ending,
    delay: Duration,
    /// Request sent after the last one, although that one ends the connection.
    too_late: Option<usize>,
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.items.iter().map(|&index| catalogue()[index].item.name).collect();
        write!(f, "{names:?}, ")?;
        write!(f, "waits {}, pieces {} {:?}, {:?}, ", self.waits, self.piece_max, self.pause, self.reads)?;
        write!(f, "{:?}", self.ending)
    }
}

impl Plan {
    /// Makes a random plan.
    fn new(random: &Random) -> Plan {
        let count = random.up_to(5);
        let mut items = Vec::new();
        for _ in 0..count {
            let index = random.below(catalogue().len() as u64) as usize;
            items.push(index);
            if catalogue()[index].item.after != After::Open {
                break;
            }
        }
        let is_open = items.iter().all(|&index| catalogue()[index].item.after == After::Open);
        let sent: usize = items.iter().map(|&index| catalogue()[index].item.length()).sum();
        let received: usize = items.iter().map(|&index| catalogue()[index].baseline.answer.bytes.len()).sum();
        let interim = items.iter().any(|&index| catalogue()[index].item.waits());
        let delays = items.iter().any(|&index| catalogue()[index].item.delays());
        let ending = match random.below(8) {
            0 => {
                let after = random.below(sent as u64 + 1) as usize;
                Ending::Vanishes { after, resets: random.chance(500) }
            }
            1 if received > 150_000 && !interim => Ending::IsDeaf { after: random.below(received as u64 / 4) as usize },
            2 if is_open => Ending::Closes,
            3 if is_open && !delays => Ending::HalfCloses,
            4 if is_open => Ending::Stalls { head: random.below(STALLED_HEAD.len() as u64) as usize },
            _ => Ending::Waits,
        };
        let reads = match (ending, random.below(4)) {
            (Ending::IsDeaf { after }, _) => Reading::Until(after),
            (_, 0) => Reading::Slowly(random.up_to(20_000).max(2000), Duration::from_millis(random.below(1500))),
            _ => Reading::Eagerly,
        };
        let piece_max = *random.pick(&[40, 500, 5000, 100_000]);
        // At most slow enough that a body takes longer than each of the timeouts, which only count silence. A head must
        // not.
        let pauses: &[u64] = if piece_max < 500 { &[0, 100, 20_000] } else { &[0, 100, 20_000, 4_000_000] };
        Plan {
            waits: random.chance(500) && !matches!(ending, Ending::IsDeaf { .. }),
            piece_max,
            pause: Duration::from_micros(*random.pick(pauses)),
            reads,
            ending,
            delay: Duration::from_millis(random.below(2000)),
            too_late: None,
            items,
        }
    }

    /// `true` for each request that is a HEAD.
    fn heads(&self) -> Rc<[bool]> {
        self.items.iter().map(|&index| catalogue()[index].item.is_head()).collect()
    }

    /// Waits until this number of answers have arrived.
    fn awaits(&self, answers: usize) -> Sending {
        let heads = self.heads();
        Sending::Await(Rc::new(move |bytes| Received::new(bytes, &heads).complete >= answers))
    }

    fn script(&self) -> Vec<Sending> {
        let mut sends = Vec::new();
        for (number, &index) in self.items.iter().enumerate() {
            let item = &catalogue()[index].item;
            if self.waits || item.waits() {
                sends.push(self.awaits(number));
            }
            // The server's timeout runs from the last byte, so the first byte must be sent at the same time.
            let pause = if matches!(item.after, After::TimedOut(_)) { Duration::ZERO } else { self.pause };
            sends.extend(item.sends(number, self.heads()).into_iter().map(|step| match step {
                Sending::Bytes(bytes) => Sending::Pieces(bytes, self.piece_max, pause),
                step => step,
            }));
        }
        if let Some(index) = self.too_late {
            sends.extend(catalogue()[index].item.sends(self.items.len(), self.heads()));
        }
        match self.ending {
            Ending::Waits => {}
            Ending::Closes => sends.extend([self.awaits(self.items.len()), Sending::Close]),
            Ending::HalfCloses => sends.push(Sending::ShutDown),
            Ending::Vanishes { after, resets } => {
                sends = cut_off(sends, after);
                sends.push(if resets { Sending::Reset } else { Sending::Close });
            }
            Ending::Stalls { head } => {
                if self.waits {
                    sends.push(self.awaits(self.items.len()));
                }
                sends.push(Sending::Bytes(Bytes::from_static(&STALLED_HEAD[..head])));
            }
            Ending::IsDeaf { .. } => sends.push(Sending::Pause(SETTLING / 5)),
        }
        sends
    }

    /// The most that the client may receive: the answers to all requests that it has begun to send.
    fn expected(&self, offered: usize) -> Answer {
        let (mut answer, mut begins) = (Answer::default(), 0);
        for &index in &self.items {
            if offered <= begins {
                break;
            }
            let Known { item, baseline } = &catalogue()[index];
            answer.append(&baseline.answer);
            begins += item.length();
        }
        answer
    }

    /// `true` if the last answer breaks off because of a file.
    fn breaks_off(&self) -> bool {
        let last = self.items.last().map(|&index| catalogue()[index].item.after);
        matches!(last, Some(After::BrokenOff(_)))
    }

    /// `true` if the connection may end in the middle of an answer.
    fn may_break_off(&self) -> bool {
        matches!(self.ending, Ending::Vanishes { .. } | Ending::IsDeaf { .. }) || self.breaks_off()
    }

    /// Checks the transcript of a client of a server that closes connections at any time, but never within an answer.
    /// Its answers differ only in `Connection: close`.
    fn check_whole_answers(&self, transcript: &Transcript, was_cut: bool) {
        let received = Received::new(&transcript.received, &self.heads());
        assert!(
            !received.has_part || was_cut || self.may_break_off(),
            "{:?}",
            received.bytes.escape_ascii().to_string()
        );
        let keeps = self.expected(transcript.offered).first_difference(&received.bytes);
        if keeps.is_some() {
            // Only the last answer announces the end.
            let mut expected = Answer::default();
            for (number, &index) in self.items.iter().enumerate() {
                let answer = &catalogue()[index].baseline.answer;
                let is_last = number + 1 >= received.complete + usize::from(received.has_part);
                expected.append(&if is_last { answer.closing() } else { answer.clone() });
            }
            assert_eq!(expected.first_difference(&received.bytes), None, "{keeps:?}");
        }
    }

    /// Timeout after the client's last byte at which the server gives up, if the plan ends so.
    fn timeout(&self) -> Option<Duration> {
        match (self.ending, self.items.last().map(|&index| catalogue()[index].item.after)) {
            (Ending::Stalls { head: 1.. }, _) => Some(CLIENT_HEADER_TIMEOUT),
            (Ending::Waits, Some(After::TimedOut(time))) => Some(time),
            _ => None,
        }
    }
}

impl ClientPlan for Plan {
    type Seen = Transcript;

    async fn play(self, random: Random) -> Option<Transcript> {
        sleep(self.delay).await;
        let stream = Stream::connect(&address()).await.ok()?;
        let peer = Peer { sends: self.script(), reads: self.reads, patience: SETTLING };
        Some(peer.play(stream, &random).await)
    }

    fn address_of(transcript: &Transcript) -> &SocketAddress {
        &transcript.local
    }

    fn check(&self, transcript: &Transcript, was_cut: bool) {
        let Transcript { received, end, offered, .. } = transcript;
        let received = &Received::new(received, &self.heads()).bytes;
        let expected = self.expected(*offered);
        if let Some(at) = expected.first_difference(received) {
            let shown =
                |bytes: &[u8]| String::from_utf8_lossy(&bytes[at.min(bytes.len())..]).chars().take(200).collect();
            let (received, expected): (String, String) = (shown(received), shown(&expected.bytes));
            panic!("at {at}: received {received:?}, expected {expected:?}");
        }
        assert_ne!(*end, PeerEnd::GaveUp, "the server never closed the connection");
        if was_cut || matches!(self.ending, Ending::Vanishes { .. }) {
            return;
        }
        let is_whole = received.len() == expected.bytes.len();
        if let Ending::IsDeaf { after } = self.ending {
            let must_time_out = expected.bytes.len() > after + WINDOW + 1000;
            assert!(!(is_whole && must_time_out), "a client that reads nothing got everything");
            return;
        }
        let expected_end = if self.ending == Ending::Closes { PeerEnd::Left } else { PeerEnd::Closed };
        if !self.breaks_off() {
            assert!(is_whole, "{} of {} bytes, {end:?}", received.len(), expected.bytes.len());
            assert_eq!(*end, expected_end);
        }
        if let (Some(time), Some(scripted)) = (self.timeout(), transcript.scripted) {
            // The timeout begins when the client has received all earlier answers.
            let latest = scripted.max(transcript.last_received) + time + LATENESS;
            let is_right = transcript.ended + LATENESS >= scripted + time && transcript.ended <= latest;
            assert!(is_right, "the server gave up after {:?} instead of {time:?}", transcript.ended - scripted);
        }
    }
}

/// Clients with random plans.
fn clients(random: &Random) -> Vec<Client<Plan>> {
    (0..random.up_to(8)).map(|_| Client::spawn(Plan::new(random), random)).collect()
}

/// A head that never becomes complete.
const STALLED_HEAD: &[u8] = b"GET /hello HTTP/1.1\r\nHost: h\r\nX-Slow: ";

/// The first `bytes` bytes of a script, without its waits.
fn cut_off(sends: Vec<Sending>, mut bytes: usize) -> Vec<Sending> {
    let mut cut = Vec::new();
    for step in sends {
        if let Sending::Pieces(mut piece, max, pause) = step {
            piece.truncate(bytes);
            bytes -= piece.len();
            cut.push(Sending::Pieces(piece, max, pause));
        }
    }
    cut
}

/// Runs `test` in a world of each seed, after the reference answers are known.
fn each_world(test: impl Fn(&Simulation, &Random)) {
    // The reference answers come from worlds of their own, before this one.
    catalogue();
    each_seed(SEEDS, |simulation| test(simulation, &Random::new(simulation.seed())));
}

#[test]
fn without_faults_every_request_is_answered_as_it_should_be() {
    for Known { item, baseline } in catalogue() {
        let (begun, ended) = baseline.times;
        let time = ended - begun;
        let expected = match item.after {
            After::Open => KEEPALIVE_TIMEOUT,
            After::TimedOut(time) => time,
            After::Closed | After::BrokenOff(_) => Duration::ZERO,
        };
        let is_right = time >= expected && time < expected + Duration::from_millis(10);
        assert!(is_right, "{}: the connection lasted {time:?}", item.name);
        assert_eq!(baseline.end, PeerEnd::Closed, "{}", item.name);
    }
}

#[test]
fn answers_are_whole_and_in_order_despite_faults() {
    each_world(|simulation, random| {
        let mut faults = Faults::swarm(random);
        if random.chance(200) {
            // No client is at fault for a disk that is slower than every timeout.
            (faults.cold_files, faults.task_max) = (700, SEND_TIMEOUT * 3);
        }
        simulation.set_faults(faults);
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
fn client_that_sends_too_much_gets_the_answers_before() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults::swarm(random));
        add_files(simulation);
        // A client that half-closes and sends more causes a reset, which may take back the answer.
        let ends: Vec<usize> = (0..catalogue().len())
            .filter(|&index| {
                let item = &catalogue()[index].item;
                item.after == After::Closed && !item.asks_for_the_end()
            })
            .collect();
        run(simulation, &configuration(), async |serving| {
            let tasks = task_count();
            let mut plan = Plan::new(random);
            plan.items = vec![*random.pick(&ends)];
            (plan.waits, plan.reads, plan.ending) = (false, Reading::Eagerly, Ending::Waits);
            plan.too_late = Some(random.below(catalogue().len() as u64) as usize);
            let transcript = plan.clone().play(random.fork()).await.expect("a connection");
            let expected = plan.expected(transcript.offered);
            let received = Received::new(&transcript.received, &plan.heads()).bytes;
            assert_eq!(expected.first_difference(&received), None, "{plan:?}");
            assert_eq!(
                received.len(),
                expected.bytes.len(),
                "{plan:?} {:?}",
                catalogue()[plan.too_late.unwrap()].item.name
            );
            check_nothing_is_left(simulation, serving, tasks).await;
        });
    });
}

#[test]
fn server_that_ends_finishes_requests_in_flight() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults::swarm(random));
        add_files(simulation);
        run(simulation, &configuration(), async |serving| {
            let tasks = task_count();
            // A client that pipelines may lose an answer: a reset makes TCP discard it.
            let plan = |_| Plan { waits: true, ..Plan::new(random) };
            let clients: Vec<_> = (0..random.up_to(8)).map(plan).map(|plan| Client::spawn(plan, random)).collect();
            sleep(Duration::from_millis(random.below(4000))).await;
            simulation.note("drains", 0, serving.connections());
            serving.stop_accepting(true).await;
            let quiet = serving.drain(None);
            simulation.stop_listening(&address());
            quiet.await;
            assert_eq!(serving.connections(), 0);
            for client in clients {
                client.check_by(simulation, Plan::check_whole_answers).await;
            }
            // Nothing accepts any more.
            check_nothing_is_left(simulation, serving, tasks - 1).await;
        });
    });
}

#[test]
fn more_clients_than_connections_are_served_in_turn() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults::swarm(random));
        add_files(simulation);
        let configuration = configuration().replace("events { }", "events { worker_connections 4; }");
        run(simulation, &configuration, async |serving| {
            let tasks = task_count();
            let plan = |_| Plan { waits: true, ..Plan::new(random) };
            let clients: Vec<_> = (0..12).map(plan).map(|plan| Client::spawn(plan, random)).collect();
            for client in clients {
                client.check_by(simulation, Plan::check_whole_answers).await;
            }
            check_nothing_is_left(simulation, serving, tasks).await;
        });
    });
}

#[test]
fn without_memory_and_threads_no_request_hangs_or_is_lost() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults { pool_refusals: *random.pick(&[0, 100, 500]), ..Faults::swarm(random) });
        add_files(simulation);
        run(simulation, &configuration(), async |serving| {
            // The limit is set when the server starts, from the machine's memory; this one is lower.
            gale_runtime::set_leased_bytes_max(*random.pick(&[4096, 65536, 200_000, 1 << 20]));
            let tasks = task_count();
            let clients: Vec<_> = (0..12).map(|_| Client::spawn(Plan::new(random), random)).collect();
            for client in clients {
                // Requests may be refused, and answers may break off.
                let check = |plan: &Plan, transcript: &Transcript, _| {
                    Received::new(&transcript.received, &plan.heads());
                };
                client.check_by(simulation, check).await;
            }
            check_nothing_is_left(simulation, serving, tasks).await;
        });
    });
}

#[test]
fn many_clients_that_want_the_same_file_from_a_slow_disk_get_it_whole() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults {
            cold_files: *random.pick(&[300, 900, 1000]),
            slow_calls: *random.pick(&[0, 100, 900]),
            task_max: Duration::from_millis(*random.pick(&[1, 50, 5000])),
            ..Faults::swarm(random)
        });
        add_files(simulation);
        run(simulation, &configuration(), async |serving| {
            let tasks = task_count();
            let name = *random.pick(&["a large file", "a large file by sendfile", "a large file by a pool"]);
            let wanted = catalogue().iter().position(|known| known.item.name == name).expect("it is known");
            // Some clients leave in the middle, among them clients whose read others wait for.
            let clients: Vec<_> = (0..20)
                .map(|_| Plan { items: vec![wanted], ..Plan::new(random) })
                .map(|plan| Client::spawn(plan, random))
                .collect();
            for client in clients {
                client.check(simulation).await;
            }
            check_nothing_is_left(simulation, serving, tasks).await;
        });
    });
}

/// A file that is read in several pieces, none of which is in memory.
const COLD_SITE: &str = "error_log /log;
    events { }
    http { access_log off; client_body_temp_path %TEMP%; server { listen %ADDRESS%; root /www; send_timeout 60s; } }";
const COLD_FILE: &str = "/www/cold";
const COLD_BYTES: usize = 2 << 20;
const COLD_REQUEST: &str = "GET /cold HTTP/1.0\r\n\r\n";
const COLD: Faults = Faults { cold_files: 1000, ..Faults::NONE };

#[test]
fn connection_ends_with_its_client_while_a_disk_hangs() {
    for seed in 0..20 {
        let simulation = Simulation::new(seed, Faults { task_max: Duration::from_secs(1), ..COLD });
        simulation.add_file(COLD_FILE, &vec![b'x'; COLD_BYTES]).expect("memory for it");
        // Every second world has a filter, which waits for the disk in its client's place.
        let filter = if seed % 2 == 0 { "" } else { "sub_filter zz z; sub_filter_types *;" };
        run(
            &simulation,
            &COLD_SITE.replace("access_log off;", &format!("access_log off; {filter}")),
            async |serving| {
                let stream = Stream::connect(&address()).await.expect("somebody listens");
                let has_begun = Rc::new(Cell::new(false));
                let begins = Rc::clone(&has_begun);
                let expectation = Rc::new(move |received: &[u8]| {
                    begins.set(received.len() > 1000);
                    begins.get()
                });
                let sends = vec![Sending::Bytes(COLD_REQUEST.into()), Sending::Await(expectation), Sending::ShutDown];
                let peer = Peer { patience: Duration::from_secs(100), ..Peer::new(sends) };
                let client = Task::spawn(async move { peer.play(stream, &Random::new(0)).await });
                while !has_begun.get() {
                    sleep(Duration::from_millis(1)).await;
                }
                simulation.set_faults(Faults { task_max: Duration::from_secs(1_000_000), ..COLD });
                let transcript = client.take().await;
                let (is_whole, waited) = (transcript.received.len() >= COLD_BYTES, transcript.ended);
                assert!(!is_whole, "seed {seed}: the disk was quick");
                // Without a length only a reset shows that the answer is incomplete.
                let end = if filter.is_empty() { PeerEnd::Closed } else { PeerEnd::Reset };
                assert_eq!(transcript.end, end, "seed {seed}: at {waited:?}");
                sleep(Duration::from_secs(10)).await;
                assert_eq!((serving.connections(), leased_bytes()), (0, 0), "seed {seed}");
            },
        );
    }
}

#[test]
fn read_ahead_without_memory_waits_for_the_last_piece_to_be_sent() {
    for seed in 0..20 {
        let simulation = Simulation::new(seed, Faults { task_max: Duration::from_millis(100), ..COLD });
        simulation.add_file(COLD_FILE, &vec![b'x'; COLD_BYTES]).expect("memory for it");
        run(&simulation, COLD_SITE, async |_| {
            // Memory for the largest piece, but not for another one beside it.
            gale_runtime::set_leased_bytes_max(250_000);
            let stream = Stream::connect(&address()).await.expect("somebody listens");
            let sends = vec![Sending::Bytes(COLD_REQUEST.into())];
            let peer = Peer { reads: Reading::Slowly(8192, Duration::from_millis(5)), ..Peer::new(sends) };
            let transcript = peer.play(stream, &Random::new(seed)).await;
            let body = transcript.received.iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
            assert_eq!(transcript.received.len() - body.unwrap_or(0), COLD_BYTES, "seed {seed}");
        });
    }
}

#[test]
fn requests_are_answered_over_a_reload() {
    each_world(|simulation, random| {
        simulation.set_faults(Faults::swarm(random));
        play_over_reloads(simulation, &configuration(), random, || clients(random));
    });
}
