//! Order in which peers are chosen, compared with the observed behaviour of nginx 1.31 for the same servers, requests
//! and failures. Peers are named by the last digit of their port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use gale_runtime::{EventLoop, LoopOptions, Moment, SocketAddress, spawn};

use super::balance::Choice;
use super::plan::{FoundService, ResolvedServer};
use super::*;

const START: Moment = Moment::from_nanos(1_000_000_000_000);

fn after(seconds: u64) -> Moment {
    START + Duration::from_secs(seconds)
}

/// A server of a test; its weight is 1 unless the text sets it (`weight=2`, `backup`).
fn server(port: u16, parameters: &str) -> FixedServer {
    let mut settings = ServerSettings::default();
    for parameter in parameters.split_whitespace() {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, "0"));
        let number = || value.parse::<u32>().unwrap();
        match name {
            "weight" => settings.weight = number(),
            "max_fails" => settings.max_fails = number(),
            "max_conns" => settings.max_conns = number(),
            "fail_timeout" => settings.fail_timeout = Duration::from_secs(number().into()),
            "slow_start" => settings.slow_start = Duration::from_secs(number().into()),
            "backup" => settings.is_backup = true,
            "down" => settings.standing = Standing::Down,
            "drain" => settings.standing = Standing::Draining,
            "route" => settings.route = Some(value.into()),
            _ => panic!("{parameter}"),
        }
    }
    let address = SocketAddress::Inet(SocketAddr::from(([127, 0, 0, 1], port)));
    FixedServer { name: address_name(&address).as_bytes().into(), addresses: vec![address], settings: settings.into() }
}

fn address_name(address: &SocketAddress) -> Arc<str> {
    super::peer::address_name(address)
}

struct Settings {
    balance: Balance,
    workers: usize,
    is_sticky: bool,
    queue: Option<QueueSettings>,
}

const IN_TURN: Settings = Settings { balance: Balance::RoundRobin, workers: 1, is_sticky: false, queue: None };

fn by(balance: Balance) -> Settings {
    Settings { balance, ..IN_TURN }
}

fn group(settings: Settings, servers: Vec<FixedServer>) -> Arc<Group> {
    group_of(settings, servers, Vec::new())
}

fn group_of(settings: Settings, fixed: Vec<FixedServer>, resolved: Vec<ResolvedServer>) -> Arc<Group> {
    let Settings { balance, workers, is_sticky, queue } = settings;
    let is_slow = fixed.iter().any(|server| !server.settings.slow_start.is_zero());
    let common = Common {
        balance,
        weight_unit: if is_slow { SLOW_WEIGHT_UNIT } else { 1 },
        queue: queue.map(Queue::new),
        ..Common::in_turn("test", Arc::default(), workers)
    };
    Group::new(common, Plan { balance, is_sticky, fixed, resolved })
}

impl Group {
    fn select_by(&self, key: &[u8]) -> Selection {
        let view = self.view_of(0);
        let choice = Choice::new(self.common.balance, &view, key);
        Selection::new(view, choice, None)
    }

    fn select_bound(&self, bound_to: &str) -> Selection {
        let view = self.view_of(0);
        let choice = Choice::new(self.common.balance, &view, b"");
        Selection::new(view, choice, Some(bound_to.into()))
    }

    fn has_failures(&self, index: usize) -> bool {
        self.view_of(0).peers.primary.peers[index].has_failures()
    }

    /// First choices of consecutive requests.
    fn first_choices(&self, count: usize) -> String {
        (0..count).map(|_| self.choice(b"")).collect()
    }

    fn choice(&self, key: &[u8]) -> char {
        called(&self.select_by(key).next_at(START).unwrap())
    }

    /// Peers that a request tries while those in `failing` fail; `p` marks the end of the list, where the group's name
    /// appears.
    fn tries(&self, key: &[u8], failing: &str, now: Moment) -> String {
        let mut selection = self.select_by(key);
        let mut tried = String::new();
        loop {
            let Ok(mut chosen) = selection.next_at(now) else { return tried + "p" };
            let name = called(&chosen);
            tried.push(name);
            if !failing.contains(name) {
                let timing = Timing { header: Some(Duration::ZERO), response: Duration::ZERO };
                chosen.succeed_at(Some(timing), now);
                return tried;
            }
            chosen.fail_at(now);
            if selection.tries_left() == 0 {
                return tried;
            }
        }
    }
}

/// Last digit of the port.
fn called(chosen: &Chosen) -> char {
    chosen.name().chars().last().unwrap()
}

#[test]
fn peers_come_in_turn_by_weight_as_in_nginx() {
    let choices = |parameters: &[&str]| {
        let servers = (19100..).zip(parameters).map(|(port, parameters)| server(port, parameters)).collect();
        group(IN_TURN, servers).first_choices(26)
    };
    assert_eq!(choices(&["weight=5", "", ""]), "00102000010200001020000102");
    assert_eq!(choices(&["", "", ""]), "01201201201201201201201201");
    assert_eq!(choices(&["weight=3", "weight=2", "weight=7", ""]), "20212320212022021232021202");
}

#[test]
fn each_worker_has_cursors_of_its_own() {
    let group = group(Settings { workers: 2, ..IN_TURN }, vec![server(1, ""), server(2, "")]);
    let of = |worker| {
        let mut selection = Selection::new(group.view_of(worker), Choice::RoundRobin, None);
        called(&selection.next_at(START).unwrap())
    };
    assert_eq!([of(0), of(1), of(1), of(0)], ['1', '1', '2', '2']);
}

#[test]
fn failures_put_peers_down_and_take_weight_as_in_nginx() {
    let servers = vec![
        server(19100, "weight=4 max_fails=2 fail_timeout=600"),
        server(19101, "weight=3 max_fails=0"),
        server(19102, "weight=2 max_fails=3 fail_timeout=600"),
    ];
    let group = group(IN_TURN, servers);
    let failing = "- - 0 0 - - 2 - - 2 - - - - - - - 0 - - 2 - - - -";
    let tries: Vec<String> = failing.split(' ').map(|failing| group.tries(b"", failing, START)).collect();
    assert_eq!(tries.join(" "), "0 1 2 01 1 2 0 1 0 21 0 1 0 2 0 1 0 1 0 2 1 0 2 0 1");
}

#[test]
fn backup_servers_come_when_all_others_were_tried_as_in_nginx() {
    let servers = vec![
        server(19100, "max_fails=0"),
        server(19101, "max_fails=0"),
        server(19102, "backup weight=2"),
        server(19103, "backup"),
    ];
    let group = group(IN_TURN, servers);
    let tries = ["", "01", "01", "", "01", "012", "0123", "", "01"].map(|failing| group.tries(b"", failing, START));
    // nginx writes the group's name when no peer is left.
    assert_eq!(tries.join(" "), "0 102 013 1 012 1023 013p 1 01p");
}

#[test]
fn a_failed_peer_is_tried_once_in_fail_timeout() {
    let group = group(IN_TURN, vec![server(1, "fail_timeout=10"), server(2, "")]);
    assert_eq!(group.tries(b"", "1", START), "12");
    assert_eq!(group.tries(b"", "", after(10)), "2");
    // Its trial: no other request uses it before that is over.
    let next = |now| group.select_by(b"").next_at(now).unwrap();
    let mut trial = std::iter::repeat_with(|| next(after(11))).find(|chosen| called(chosen) == '1').unwrap();
    assert!((0..4).all(|_| called(&next(after(12))) == '2'));
    trial.fail_at(after(12));
    drop(trial);
    assert!((0..4).all(|_| called(&next(after(22))) == '2'));
    assert!((0..4).any(|_| group.tries(b"", "", after(23)) == "1"));
    assert!(!group.has_failures(0));
    let choices: String = (0..4).map(|_| group.tries(b"", "", after(23))).collect();
    assert!(choices == "1212" || choices == "2121", "{choices}");
}

#[test]
fn a_failed_peer_of_which_nothing_was_asked_stays_as_it_was() {
    let group = group(IN_TURN, vec![server(1, "fail_timeout=10"), server(2, "")]);
    assert_eq!(group.tries(b"", "1", START), "12");
    let next = |now| group.select_by(b"").next_at(now).unwrap();
    let mut trial = std::iter::repeat_with(|| next(after(11))).find(|chosen| called(chosen) == '1').unwrap();
    trial.abandon();
    drop(trial);
    assert!(group.has_failures(0) && (0..4).all(|_| called(&next(after(21))) == '2'));
    assert!((0..4).any(|_| group.tries(b"", "", after(22)) == "1"));
    assert!(!group.has_failures(0));
}

#[test]
fn fewer_failures_than_max_fails_are_forgotten_after_fail_timeout() {
    let group = group(IN_TURN, vec![server(1, "max_fails=2 fail_timeout=10"), server(2, "down")]);
    assert_eq!(group.tries(b"", "1", START), "1");
    assert_eq!(group.tries(b"", "", after(10)), "1");
    assert!(group.has_failures(0), "too early for a trial");
    assert_eq!(group.tries(b"", "", after(11)), "1");
    assert!(!group.has_failures(0));
    assert_eq!(["1", "1", ""].map(|failing| group.tries(b"", failing, after(12))).join(" "), "1 1 p");
}

#[test]
fn only_a_failure_that_puts_a_peer_down_says_so() {
    let group = group(IN_TURN, vec![server(1, "max_fails=2 weight=100"), server(2, "max_fails=0")]);
    let fail = |now| group.select_by(b"").next_at(now).unwrap().fail_at(now);
    assert_eq!([fail(START), fail(START)], [false, true]);
    // The last peer is never put down.
    assert_eq!([fail(START), fail(START)], [false, false]);
}

#[test]
fn a_single_peer_is_never_put_down() {
    let group = group(IN_TURN, vec![server(1, "")]);
    for _ in 0..3 {
        assert_eq!(group.tries(b"", "1", START), "1");
    }
    let mut selection = group.select_by(b"");
    let mut chosen = selection.next_at(START).unwrap();
    assert!(!chosen.fail_at(START));
    assert_eq!(selection.tries_left(), 0);
    // Its idle connection had been closed, so the attempt does not count.
    selection.add_try();
    assert_eq!(selection.tries_left(), 1);
    assert!(selection.next_at(START).is_ok());
}

/// A group of `a` and `b` with one check.
fn checked(before: BeforeFirstCheck) -> (Arc<Group>, Check) {
    with_check(group(IN_TURN, vec![server(1, ""), server(2, "")]), before)
}

fn with_check(group: Arc<Group>, before: BeforeFirstCheck) -> (Arc<Group>, Check) {
    group.common.health.set(HealthPlan::new([before].into_iter().collect())).unwrap();
    let check = Check::new(&group, 0);
    (group, check)
}

/// The same group after a reload.
fn reloaded(group: &Group, before: BeforeFirstCheck) -> (Arc<Group>, Check) {
    let common = Common::in_turn("test", Arc::clone(&group.common.state), 1);
    let fixed = vec![server(1, ""), server(2, "")];
    let plan = Plan { balance: Balance::RoundRobin, is_sticky: false, fixed, resolved: Vec::new() };
    with_check(Group::new(common, plan), before)
}

/// Records results of the first peer.
fn note(check: &Check, results: &[bool]) -> Vec<HealthChange> {
    let peer = check.peers().iter().next().unwrap();
    let thresholds = Thresholds { fails: 3, passes: 2 };
    results.iter().map(|&has_passed| check.note_at(&peer, has_passed, thresholds, START)).collect()
}

/// Number of four requests that the first peer gets.
fn of_first(group: &Group) -> usize {
    (0..4)
        .filter(|_| {
            group.select_by(b"").next_at(START).is_ok_and(|chosen| chosen.address().inet().unwrap().port() == 1)
        })
        .count()
}

#[test]
fn results_in_a_row_make_a_peer_ill_and_well() {
    use HealthChange::{Ill, None, Well};
    let (group, check) = checked(BeforeFirstCheck::Healthy);
    assert_eq!(note(&check, &[false, false, true, false, false]), [None; 5]);
    assert_eq!(of_first(&group), 2);
    assert_eq!(note(&check, &[false, false]), [Ill, None]);
    assert_eq!(of_first(&group), 0);
    assert_eq!(note(&check, &[true, false, true]), [None; 3]);
    // A configuration without the check sends requests there; one with it does not.
    let fixed = vec![server(1, ""), server(2, "")];
    let plan = Plan { balance: Balance::RoundRobin, is_sticky: false, fixed, resolved: Vec::new() };
    let unchecked = Group::new(Common::in_turn("test", Arc::clone(&group.common.state), 1), plan);
    assert_eq!(of_first(&unchecked), 2);
    assert_eq!(of_first(&reloaded(&group, BeforeFirstCheck::Healthy).0), 0);
    assert_eq!(note(&check, &[true]), [Well]);
    assert_eq!(of_first(&group), 2);
}

#[test]
fn a_mandatory_check_is_passed_first() {
    use HealthChange::{Ill, None, Well};
    let (group, check) = checked(BeforeFirstCheck::Checking);
    assert_eq!(group.select_by(b"").next_at(START).err(), Some(NoPeer::NoneAlive));
    assert_eq!(note(&check, &[true, true]), [Well, None]);
    assert_eq!(of_first(&group), 4);
    let (again, check) = reloaded(&group, BeforeFirstCheck::Checking);
    assert_eq!(of_first(&again), 0);
    // The earlier configuration keeps its knowledge.
    assert_eq!(of_first(&group), 4);
    assert_eq!(note(&check, &[false, true, true]), [Ill, None, Well]);
    assert_eq!(of_first(&again), 4);
    assert_eq!(of_first(&reloaded(&again, BeforeFirstCheck::CheckingUnlessKnown).0), 4);
}

#[test]
fn peers_that_are_down_are_left_out() {
    let group = group(IN_TURN, vec![server(1, "down"), server(2, ""), server(3, "drain"), server(4, "")]);
    assert_eq!(group.first_choices(4), "2424");
    assert_eq!(group.select_by(b"").tries_left(), 2);
    let down = self::group(IN_TURN, vec![server(1, "down")]);
    assert_eq!(down.select_by(b"").next_at(START).unwrap_err(), NoPeer::NoneAlive);
    let nobody = self::group(IN_TURN, Vec::new());
    assert_eq!(nobody.select_by(b"").next_at(START).unwrap_err(), NoPeer::NoneAlive);
}

#[test]
fn more_peers_than_a_word_has_bits_are_each_tried_once() {
    let group = group(IN_TURN, (1000..1150).map(|port| server(port, "")).collect());
    let mut selection = group.select_by(b"");
    let mut names: Vec<String> =
        std::iter::from_fn(|| Some(selection.next_at(START).ok()?.name().to_owned())).collect();
    assert_eq!(names.len(), 150);
    names.sort();
    names.dedup();
    assert_eq!((names.len(), selection.tries_left()), (150, 0));
}

#[test]
fn after_a_failure_the_weight_grows_slowly() {
    let group = group(IN_TURN, vec![server(1, "slow_start=100 fail_timeout=1"), server(2, "max_fails=0")]);
    assert_eq!(group.tries(b"", "1", START), "12");
    while group.tries(b"", "", after(10)) != "1" {}
    let share = |now| (0..100).filter(|_| group.tries(b"", "", now) == "1").count();
    let shares = [share(after(11)), share(after(35)), share(after(60)), share(after(110)), share(after(111))];
    assert!(shares[0] <= 2 && (18..=22).contains(&shares[1]) && (32..=35).contains(&shares[2]), "{shares:?}");
    assert_eq!(shares[3..], [50, 50]);
}

#[test]
fn hashes_lead_to_the_same_peers_as_in_nginx() {
    let servers = || vec![server(19100, ""), server(19101, "weight=2"), server(19102, ""), server(19103, "down")];
    let mut keys: Vec<String> = (0..40).map(|number| format!("key{number}")).collect();
    keys.extend(["a", "b", "/index.html", "user@example.com"].map(str::to_owned));
    let choices = |balance: Balance, servers| -> String {
        let group = group(by(balance), servers);
        keys.iter().map(|key| group.choice(key.as_bytes())).collect()
    };
    assert_eq!(choices(Balance::Hash, servers()), "11221111221110012221011111202102101021211201");
    let host = FixedServer { name: (*b"localhost:19104").into(), ..server(19104, "") };
    let with_host = servers().into_iter().chain([host]).collect();
    assert_eq!(choices(Balance::ConsistentHash, with_host), "22422111201111112412102021121211411420141111");
}

#[test]
fn an_empty_key_is_chosen_for_in_turn() {
    for balance in [Balance::Hash, Balance::ConsistentHash] {
        assert_eq!(group(by(balance), vec![server(1, ""), server(2, "")]).first_choices(4), "1212");
    }
}

#[test]
fn hashes_go_on_to_the_same_peers_as_in_nginx() {
    let servers = || vec![server(19100, ""), server(19101, "weight=2"), server(19102, ""), server(19103, "down")];
    let tries = |group: Arc<Group>, failing| {
        let tries = (0..12).map(|number| group.tries(format!("key{number}").as_bytes(), failing, START));
        tries.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(tries(group(by(Balance::Hash), servers()), "1"), "12 2 2 2 0 0 0 2 2 2 0 0");
    let host = FixedServer { name: (*b"localhost:19104").into(), ..server(19104, "") };
    let with_host = group(by(Balance::ConsistentHash), servers().into_iter().chain([host]).collect());
    assert_eq!(tries(with_host, "0"), "2 2 4 2 2 1 1 1 2 02 1 1");
}

#[test]
fn clients_lead_to_the_same_peers_as_in_nginx() {
    let servers = vec![server(19100, ""), server(19101, "weight=2"), server(19102, ""), server(19103, "down")];
    let group = group(by(Balance::IpHash), servers);
    let clients = "127.0.0.1 10.0.0.1 10.0.1.1 192.0.2.7 192.0.3.7 198.51.100.200 203.0.113.5 8.8.8.8 1.1.1.1 \
                   172.16.254.3 100.64.0.1 2001:db8::1 2001:db8::2 ::1 fe80::1234:5678 \
                   2a00:1450:4001:81b::200e";
    let choices = clients.split_whitespace().map(|client| match client.parse().unwrap() {
        std::net::IpAddr::V4(ip) => group.choice(&ip.octets()),
        std::net::IpAddr::V6(ip) => group.choice(&ip.octets()),
    });
    assert_eq!(choices.collect::<String>(), "0010111210201001");
    // A client without an IP address counts as one with zeros.
    assert_eq!(group.choice(b""), group.choice(&[0, 0, 0, 9]));
}

#[test]
fn the_peer_with_the_fewest_requests_for_its_weight_is_chosen() {
    let in_turn =
        group(by(Balance::LeastConn), vec![server(19100, "weight=3"), server(19101, "weight=2"), server(19102, "")]);
    assert_eq!(in_turn.first_choices(26), "01021001021001021001021001");

    let group = group(by(Balance::LeastConn), vec![server(1, "weight=2"), server(2, ""), server(3, "backup")]);
    let mut held: Vec<Chosen> = (0..6).map(|_| group.select_by(b"").next_at(START).unwrap()).collect();
    let count = |held: &[Chosen], name| held.iter().filter(|chosen| called(chosen) == name).count();
    assert_eq!((count(&held, '1'), count(&held, '2')), (4, 2));
    held.retain(|chosen| called(chosen) == '1');
    assert_eq!(["", ""].map(|_| group.tries(b"", "", START)).concat(), "22");
}

#[test]
fn requests_of_all_workers_count_for_the_fewest() {
    let settings = Settings { workers: 2, ..by(Balance::LeastConn) };
    let group = group(settings, vec![server(1, ""), server(2, "")]);
    let of = |worker| Selection::new(group.view_of(worker), Choice::LeastConn, None).next_at(START).unwrap();
    let (first, second) = (of(0), of(1));
    assert_eq!((called(&first), called(&second)), ('1', '2'));
    // It ends on another worker's thread.
    std::thread::scope(|scope| scope.spawn(|| drop(first)).join().unwrap());
    assert_eq!(called(&of(1)), '1');
}

#[test]
fn the_peer_that_will_be_done_first_is_chosen() {
    let how = LeastTime { metric: Metric::LastByte, counts_inflight: false };
    let group = group(by(Balance::LeastTime(how)), vec![server(1, ""), server(2, "")]);
    let request = |milliseconds: [u64; 2]| {
        let mut chosen = group.select_by(b"").next_at(START).unwrap();
        let index = usize::from(called(&chosen) == '2');
        let response = Duration::from_millis(milliseconds[index]);
        chosen.succeed_at(Some(Timing { header: Some(Duration::from_millis(1)), response }), START);
        called(&chosen)
    };
    assert_eq!((0..8).map(|_| request([100, 10])).collect::<String>(), "12222222");
    // Times that differ little count as equal.
    let equal = self::group(by(Balance::LeastTime(how)), vec![server(1, ""), server(2, "")]);
    for chosen in (0..2).map(|_| equal.select_by(b"").next_at(START)) {
        let mut chosen = chosen.unwrap();
        let response = Duration::from_millis(if called(&chosen) == '1' { 21 } else { 39 });
        chosen.succeed_at(Some(Timing { header: Some(response), response }), START);
    }
    assert_eq!(equal.first_choices(4), "2121");
    // Five times as slow, but the other one has six requests.
    let held: Vec<Chosen> = (0..6).map(|_| group.select_by(b"").next_at(START).unwrap()).collect();
    assert_eq!(held.iter().map(called).collect::<String>(), "222222");
    assert_eq!(called(&group.select_by(b"").next_at(START).unwrap()), '1');
}

#[test]
fn requests_in_flight_make_a_peer_slower() {
    let how = LeastTime { metric: Metric::Header, counts_inflight: true };
    let group = group(by(Balance::LeastTime(how)), vec![server(1, ""), server(2, "")]);
    let hangs = group.select_by(b"").next_at(START).unwrap();
    assert_eq!(called(&hangs), '1');
    let later = after(3);
    for _ in 0..4 {
        let mut chosen = group.select_by(b"").next_at(later).unwrap();
        assert_eq!(called(&chosen), '2');
        chosen.header_received_at(Duration::from_millis(10), later);
        let timing = Timing { header: Some(Duration::from_millis(10)), response: Duration::from_millis(12) };
        chosen.succeed_at(Some(timing), later);
    }
}

#[test]
fn random_choice_follows_weights_and_skips_peers_that_are_down() {
    EventLoop::new(LoopOptions::default()).unwrap().run(async {
        let servers = vec![server(1, "weight=3"), server(2, "weight=1"), server(3, "down weight=4")];
        let group = group(by(Balance::Random(None)), servers);
        let ones = (0..4000).filter(|_| group.choice(b"") == '1').count();
        assert!((2800..3200).contains(&ones), "{ones}");
        assert!((0..4).all(|_| group.tries(b"", "12", START).len() == 2 || group.tries(b"", "", START) == "p"));
    });
}

#[test]
fn of_two_that_chance_draws_the_one_with_fewer_requests_is_chosen() {
    EventLoop::new(LoopOptions::default()).unwrap().run(async {
        let two = Balance::Random(Some(Preference::LeastConn));
        let group = group(by(two), vec![server(1, ""), server(2, "")]);
        let held: Vec<Chosen> = (0..10).map(|_| group.select_by(b"").next_at(START).unwrap()).collect();
        assert_eq!(held.iter().filter(|chosen| called(chosen) == '1').count(), 5);
    });
}

#[test]
fn max_conns_is_exact_over_workers() {
    let settings = Settings { workers: 4, ..IN_TURN };
    let servers = vec![server(1, "max_conns=3"), server(2, "max_conns=2")];
    let group = group(settings, servers);
    let held = [AtomicU32::new(0), AtomicU32::new(0)];
    let refused = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (group, held, refused) = (&group, &held, &refused);
            scope.spawn(move || {
                for _ in 0..5000 {
                    let select = || Selection::new(group.view_of(worker), Choice::RoundRobin, None).next_at(START);
                    let chosen: Vec<Chosen> = (0..2).filter_map(|_| select().ok()).collect();
                    refused.fetch_add(2 - chosen.len() as u32, Ordering::Relaxed);
                    for chosen in chosen {
                        let (count, max) = match called(&chosen) {
                            '1' => (&held[0], 3),
                            _ => (&held[1], 2),
                        };
                        assert!(count.fetch_add(1, Ordering::SeqCst) < max);
                        count.fetch_sub(1, Ordering::SeqCst);
                        drop(chosen);
                    }
                }
            });
        }
    });
    let all: Vec<Chosen> = (0..5).map(|_| group.select_by(b"").next_at(START).unwrap()).collect();
    assert_eq!(group.select_by(b"").next_at(START).unwrap_err(), NoPeer::NoneAlive);
    drop(all);
    assert!(group.select_by(b"").next_at(START).is_ok());
}

#[test]
fn sessions_stay_with_their_peer_as_long_as_it_can_be_chosen() {
    let sticky = || Settings { is_sticky: true, ..IN_TURN };
    let group = group(sticky(), vec![server(1, "route=a"), server(2, "route=b"), server(3, "route=c drain")]);
    let bound = |to: &str| called(&group.select_bound(to).next_at(START).unwrap());
    assert_eq!(["b", "b", "b", "c", "c"].map(bound), ['2', '2', '2', '3', '3']);
    // An unknown name does not bind.
    assert!(["x", ""].iter().all(|to| bound(to) != '3'));
    let mut selection = group.select_bound("b");
    selection.next_at(START).unwrap().fail_at(START);
    assert_eq!(called(&selection.next_at(START).unwrap()), '1');
    assert_eq!(bound("b"), '1');
    // A peer without a route is named by its address.
    let single = self::group(sticky(), vec![server(8081, "drain")]);
    let id = super::sticky::default_session_id("127.0.0.1:8081");
    assert!(single.select_bound(&id).next_at(START).is_ok());
    assert!(single.select_bound("other").next_at(START).is_err());
}

fn resolved() -> ResolvedServer {
    let settings = Arc::new(ServerSettings::default());
    ResolvedServer { host: "app".into(), service: None, port: 80, name: (*b"app").into(), settings }
}

impl Group {
    /// Sets the ports that the service has now.
    fn find(&self, ports: &[u16]) {
        let service = |port| FoundService { port, name: "app".into(), weight: 1, is_secondary: false };
        let found = |&port: &u16| Found { ip: [127, 0, 0, 1].into(), service: Some(service(port)) };
        if let Some(version) = self.note_found(0, |_| ports.iter().map(found).collect()) {
            self.renew(version);
        }
    }
}

#[test]
fn new_list_keeps_the_state_of_remaining_peers() {
    let group = group_of(IN_TURN, vec![server(1, "max_conns=1")], vec![resolved()]);
    group.find(&[2, 3]);
    let held = group.select_by(b"").next_at(START).unwrap();
    assert_eq!(called(&held), '1');
    assert_eq!(group.tries(b"", "2", START), "23");
    let mut began_before = group.select_by(b"");
    group.find(&[2, 4]);
    // The first is full, the second has failed.
    assert_eq!(group.first_choices(3), "444");
    assert_eq!(called(&began_before.next_at(START).unwrap()), '3');
    drop((held, began_before));
    assert!(group.first_choices(4).contains('1'));
    // A peer that was removed and comes back is a new one.
    group.find(&[4]);
    group.find(&[4, 2]);
    assert!(group.first_choices(6).contains('2'));
}

#[test]
fn a_new_list_goes_on_with_the_turns_of_the_old_one() {
    let group = group_of(IN_TURN, vec![server(1, "weight=2"), server(2, "")], vec![resolved()]);
    assert_eq!(group.first_choices(1), "1");
    group.find(&[9]);
    group.find(&[]);
    assert_eq!(group.first_choices(2), "21");
}

#[test]
fn resolved_addresses_follow_the_group_over_a_reload() {
    let state = Arc::new(GroupState::default());
    let group = || {
        let plan =
            Plan { balance: Balance::RoundRobin, is_sticky: false, fixed: Vec::new(), resolved: vec![resolved()] };
        Group::new(Common::in_turn("test", Arc::clone(&state), 1), plan)
    };
    let first = group();
    assert!(first.select_by(b"").next_at(START).is_err());
    first.find(&[1, 2]);
    assert_eq!(first.tries(b"", "1", START), "12");
    // So is the state of its peers.
    assert_eq!(group().first_choices(3), "222");
}

#[test]
fn a_request_waits_in_the_queue_until_another_one_ends() {
    EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
        let queue = Some(QueueSettings { requests_max: 1, timeout: Duration::from_secs(20) });
        let group = group(Settings { queue, ..IN_TURN }, vec![server(1, "max_conns=1")]);
        let select = |group: &Arc<Group>| {
            let mut selection = group.select();
            selection.group = Some(Arc::clone(group));
            selection
        };
        let held = select(&group).next().unwrap();
        let (sender, ended) = gale_runtime::oneshot::channel();
        let waits = Arc::clone(&group);
        spawn(async move {
            let mut selection = select(&waits);
            assert!(selection.next().is_err() && selection.can_wait());
            let _ = sender.send(selection.wait().await);
        });
        while !group.has_waiting() {
            gale_runtime::yield_now().await;
        }
        assert_eq!(select(&group).wait().await.unwrap_err(), NoPeer::QueueFull);
        drop(held);
        // Waiting requests come first.
        assert_eq!(select(&group).next().unwrap_err(), NoPeer::NoneAlive);
        let second = ended.await.unwrap().unwrap();
        assert!(!group.has_waiting());
        assert_eq!(select(&group).wait().await.unwrap_err(), NoPeer::QueueTimedOut);
        drop(second);
        assert!(select(&group).wait().await.is_ok());
    });
}

#[test]
fn addresses_found_at_run_time_are_tried_in_their_order() {
    EventLoop::new(LoopOptions::default()).unwrap().run(async {
        let addresses = [8081, 8082].map(|port| SocketAddress::Inet(SocketAddr::from(([127, 0, 0, 1], port))));
        let group = Group::of_addresses("app", &addresses);
        assert_eq!((group.name(), group.connections().is_none()), ("app", true));
        let mut selection = group.select();
        let names: String = std::iter::from_fn(|| selection.next().ok()).map(|chosen| called(&chosen)).collect();
        assert_eq!(names, "12");
        assert_eq!(address_name(&SocketAddress::unix("/tmp/s")).as_ref(), "unix:/tmp/s");
    });
}

#[test]
fn servers_of_a_service_have_its_weights_and_those_that_come_second_are_backup_servers() {
    let service = |weight| {
        let settings = Arc::new(ServerSettings { weight, ..ServerSettings::default() });
        ResolvedServer { settings, service: Some("http".into()), ..resolved() }
    };
    let find = |group: &Group| {
        let found = [(1, 3, false), (2, 0, false), (3, 5, true)].map(|(port, weight, is_secondary)| Found {
            ip: [127, 0, 0, 1].into(),
            service: Some(FoundService { port, name: "app".into(), weight, is_secondary }),
        });
        let version = group.note_found(0, |_| found.to_vec()).unwrap();
        group.renew(version);
    };
    let group = group_of(IN_TURN, Vec::new(), vec![service(1)]);
    find(&group);
    assert_eq!(group.first_choices(8), "11211121");
    assert_eq!(group.tries(b"", "12", START), "123");
    // A weight in the configuration overrides the service's.
    let group = group_of(IN_TURN, Vec::new(), vec![service(2)]);
    find(&group);
    assert_eq!(group.first_choices(4), "1212");
}
