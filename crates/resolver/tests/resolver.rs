//! The resolver against name servers on the same loop, over real sockets in virtual time.

/// `resolver_io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: DriverChoice = DriverChoice::Epoll;

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use domain::base::iana::{Rcode, Rtype};
use domain::base::message_builder::AnswerBuilder;
use domain::base::{Message, MessageBuilder, Name, Serial, Ttl};
use domain::rdata::{A, Aaaa, Cname, Ptr, Soa, Srv};
use gale_log::ErrorLog;
use gale_resolver::{ResolveError, Resolved, Resolver, ResolverSettings, Resolvers};
use gale_runtime::simulation::{Faults, each_seed};
use gale_runtime::{
    AcceptOptions, Buffer, Datagram, DriverChoice, EventLoop, Listener, LoopOptions, Output, SocketAddress, now, sleep,
    spawn, yield_now,
};

const LONG: Duration = Duration::from_secs(30);
const HOUR: u32 = 3600;

/// Runs `main` on a loop in virtual time.
fn run<T>(main: impl Future<Output = T>) -> T {
    let options = LoopOptions { driver: crate::DRIVER, ..LoopOptions::simulated_time() };
    EventLoop::new(options).unwrap().run(main)
}

/// A free port of an address unique to this process: UDP and TCP assign ports independently, and a server needs the
/// same one for both. (127.0.0.0/8 is local; 127.64.0.0/10 has room for every process ID.)
fn any_port() -> SocketAddress {
    let [_, b, c, d] = std::process::id().to_be_bytes();
    SocketAddress::Inet(SocketAddr::from(([127, 64 | b, c, d], 0)))
}

fn name(text: &str) -> Name<Vec<u8>> {
    text.parse().unwrap()
}

/// A query received by a server.
struct Query {
    bytes: Vec<u8>,
    name: String,
    kind: Rtype,
    /// Address of the sender.
    from: SocketAddress,
}

impl Query {
    fn parse(bytes: &[u8], from: SocketAddress) -> Query {
        let message = Message::from_octets(bytes).unwrap();
        let question = message.sole_question().unwrap();
        assert!(message.header().rd() && !message.header().qr());
        let (name, kind) = (question.qname().to_string(), question.qtype());
        Query { bytes: bytes.to_vec(), name, kind, from }
    }

    /// An empty answer.
    fn answer(&self) -> AnswerBuilder<Vec<u8>> {
        let message = Message::from_octets(&self.bytes).unwrap();
        MessageBuilder::new_vec().start_answer(&message, Rcode::NOERROR).unwrap()
    }

    fn error(&self, code: Rcode) -> Vec<u8> {
        let message = Message::from_octets(&self.bytes).unwrap();
        MessageBuilder::new_vec().start_answer(&message, code).unwrap().finish()
    }

    /// An answer with an address for A, and an empty one for other types.
    fn address(&self, address: [u8; 4], ttl: u32) -> Vec<u8> {
        let mut answer = self.answer();
        if self.kind == Rtype::A {
            answer.push((name(&self.name), ttl, a(address))).unwrap();
        }
        answer.finish()
    }

    fn alias(&self, target: &str, ttl: u32) -> Vec<u8> {
        let mut answer = self.answer();
        answer.push((name(&self.name), ttl, Cname::new(name(target)))).unwrap();
        answer.finish()
    }
}

fn a(address: [u8; 4]) -> A {
    A::new(Ipv4Addr::from(address))
}

fn soa(ttl: u32) -> Soa<Name<Vec<u8>>> {
    let time = Ttl::from_secs(HOUR);
    Soa::new(name("ns.example"), name("x.example"), Serial::from(1), time, time, time, Ttl::from_secs(ttl))
}

/// A name server, until the test ends.
struct Server {
    address: SocketAddr,
    queries: Rc<RefCell<Vec<(String, Rtype)>>>,
}

impl Server {
    /// Answers each query with these datagrams.
    fn start(answer: impl Fn(&Query) -> Vec<Vec<u8>> + 'static) -> Server {
        Self::start_at(&any_port(), answer)
    }

    fn start_at(address: &SocketAddress, answer: impl Fn(&Query) -> Vec<Vec<u8>> + 'static) -> Server {
        let socket = Datagram::bind(address).unwrap();
        let address = socket.local_address().unwrap().inet().unwrap();
        let server = Server { address, queries: Rc::default() };
        let queries = Rc::clone(&server.queries);
        spawn(async move {
            let mut bytes = [0; 512];
            loop {
                let Ok((length, from)) = socket.recv(&mut bytes).await else { continue };
                let query = Query::parse(&bytes[..length], from);
                queries.borrow_mut().push((query.name.clone(), query.kind));
                for datagram in answer(&query) {
                    // The sender may be gone.
                    let _ = socket.send_to(&datagram, &query.from);
                }
            }
        });
        server
    }

    /// Also answers over TCP, at the same port.
    fn and_tcp(self, answer: impl Fn(&Query) -> Vec<u8> + 'static) -> Server {
        let listener = Listener::bind(&self.address.into(), 16, AcceptOptions::default()).unwrap();
        spawn(async move {
            while let Ok((stream, from)) = listener.accept().await {
                let mut input = Buffer::new();
                while input.len() < 2 || input.len() < 2 + usize::from(length_of(input.readable())) {
                    assert_ne!(stream.recv(&mut input, 512).await.unwrap(), 0);
                }
                let answer = answer(&Query::parse(&input.readable()[2..], from));
                // In two pieces, as TCP may deliver it.
                let mut output = Output::new();
                output.append(&(answer.len() as u16).to_be_bytes()).unwrap();
                output.append(&answer[..answer.len() / 2]).unwrap();
                stream.send_all(&mut output).await.unwrap();
                yield_now().await;
                output.append(&answer[answer.len() / 2..]).unwrap();
                // A client that needs no more may be gone.
                let _ = stream.send_all(&mut output).await;
            }
        });
        self
    }

    fn query_count(&self) -> usize {
        self.queries.borrow().len()
    }
}

fn length_of(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

/// A server with one address for all names, valid for an hour.
fn plain() -> Server {
    Server::start(|query| vec![query.address([192, 0, 2, 1], HOUR)])
}

fn silent() -> Server {
    Server::start(|_| Vec::new())
}

fn log() -> Arc<ErrorLog> {
    Arc::new(ErrorLog::new(Vec::new()))
}

fn resolver(servers: &[&Server]) -> Rc<Resolver> {
    resolver_with(servers, |_| {})
}

fn resolver_with(servers: &[&Server], change: impl FnOnce(&mut ResolverSettings)) -> Rc<Resolver> {
    let mut settings = ResolverSettings::new(servers.iter().map(|server| server.address));
    change(&mut settings);
    Resolver::new(&settings, &log())
}

async fn addresses(resolver: &Rc<Resolver>, name: &str) -> Result<String, ResolveError> {
    resolver.resolve(name.as_bytes(), LONG).await.map(text)
}

fn text(resolved: Resolved<IpAddr>) -> String {
    let mut found: Vec<String> = resolved.found.iter().map(ToString::to_string).collect();
    found.sort();
    found.join(" ")
}

fn found(text: &str) -> Result<String, ResolveError> {
    Ok(text.to_owned())
}

#[test]
fn addresses_of_both_kinds_are_found_and_kept_for_their_time() {
    run(async {
        let server = Server::start(|query| {
            let mut answer = query.answer();
            match query.kind {
                Rtype::A => answer.push((name(&query.name), 100, a([192, 0, 2, 1]))).unwrap(),
                _ => answer.push((name(&query.name), 60, Aaaa::new(Ipv6Addr::LOCALHOST))).unwrap(),
            }
            vec![answer.finish()]
        });
        let resolver = resolver(&[&server]);
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1 ::1"));
        assert_eq!(addresses(&resolver, "A.eXample.").await, found("192.0.2.1 ::1"));
        assert_eq!(server.query_count(), 2);
        sleep(Duration::from_secs(59)).await;
        let resolved = resolver.resolve(b"a.example", LONG).await.unwrap();
        assert_eq!(resolved.valid_until.unwrap().since(now()).as_secs_f64().round(), 1.0);
        assert_eq!(server.query_count(), 2);
        sleep(Duration::from_secs(2)).await;
        addresses(&resolver, "a.example").await.unwrap();
        assert_eq!(server.query_count(), 4);
    });
}

#[test]
fn valid_replaces_the_time_of_an_answer() {
    run(async {
        let server = Server::start(|query| vec![query.address([192, 0, 2, 1], 1)]);
        let resolver = resolver_with(&[&server], |settings| settings.valid = Some(Duration::from_secs(5)));
        addresses(&resolver, "a.example").await.unwrap();
        sleep(Duration::from_secs(4)).await;
        addresses(&resolver, "a.example").await.unwrap();
        assert_eq!(server.query_count(), 2);
        sleep(Duration::from_secs(2)).await;
        addresses(&resolver, "a.example").await.unwrap();
        assert_eq!(server.query_count(), 4);
    });
}

#[test]
fn answer_with_time_to_live_0_is_not_kept() {
    run(async {
        let server = Server::start(|query| vec![query.address([192, 0, 2, 1], 0)]);
        let resolver = resolver_with(&[&server], |settings| settings.ipv6 = false);
        addresses(&resolver, "a.example").await.unwrap();
        addresses(&resolver, "a.example").await.unwrap();
        assert_eq!(server.query_count(), 2);
    });
}

#[test]
fn only_the_wanted_kind_is_asked_for() {
    run(async {
        let server = plain();
        for (ipv4, expected) in [(true, Rtype::A), (false, Rtype::AAAA)] {
            let resolver = resolver_with(&[&server], |settings| (settings.ipv4, settings.ipv6) = (ipv4, !ipv4));
            let _ = addresses(&resolver, "a.example").await;
            assert_eq!(server.queries.take(), [("a.example".to_owned(), expected)]);
        }
    });
}

#[test]
fn addresses_and_names_that_are_none_are_not_asked_for() {
    run(async {
        let server = plain();
        let resolver = resolver(&[&server]);
        assert_eq!(addresses(&resolver, "192.0.2.9").await, found("192.0.2.9"));
        assert_eq!(addresses(&resolver, "2001:db8::9").await, found("2001:db8::9"));
        let long_label = "x".repeat(64);
        let long_name = "x.".repeat(130);
        for none in ["", ".", "a..b", ".a", &long_label, &long_name] {
            assert_eq!(addresses(&resolver, none).await, Err(ResolveError::NotFound), "{none}");
        }
        assert_eq!(server.query_count(), 0);
    });
}

#[test]
fn a_name_that_is_not_there_is_forgotten_as_soon_as_the_zone_says() {
    run(async {
        let server = Server::start(|query| {
            let Some(ttl) = query.name.strip_prefix("soa").and_then(|rest| rest.split('.').next()) else {
                return vec![query.error(Rcode::NXDOMAIN)];
            };
            let mut answer = query.answer();
            if query.kind == Rtype::A {
                answer.header_mut().set_rcode(Rcode::NXDOMAIN);
            }
            let mut authority = answer.authority();
            authority.push((name("example"), HOUR, soa(ttl.parse().unwrap()))).unwrap();
            vec![authority.finish()]
        });
        let resolver = resolver(&[&server]);
        // Seconds for which it is not asked for again.
        for (name, kept) in [("a.example", 0), ("soa5.example", 5), ("soa300.example", 10)] {
            assert_eq!(addresses(&resolver, name).await, Err(ResolveError::NotFound));
            if kept > 0 {
                server.queries.take();
                sleep(Duration::from_secs(kept - 1)).await;
                assert_eq!(addresses(&resolver, name).await, Err(ResolveError::NotFound));
                assert_eq!(server.query_count(), 0, "{name}");
                sleep(Duration::from_secs(2)).await;
            }
            server.queries.take();
            assert_eq!(addresses(&resolver, name).await, Err(ResolveError::NotFound));
            assert_eq!(server.query_count(), 2, "{name}");
        }
    });
}

#[test]
fn an_error_of_one_kind_is_one_of_the_name_and_is_not_kept() {
    run(async {
        let is_broken = Rc::new(Cell::new(true));
        let broken = Rc::clone(&is_broken);
        let server = Server::start(move |query| match query.kind {
            Rtype::AAAA if broken.get() => vec![query.error(Rcode::SERVFAIL)],
            _ => vec![query.address([192, 0, 2, 1], HOUR)],
        });
        let resolver = resolver(&[&server]);
        assert_eq!(addresses(&resolver, "a.example").await, Err(ResolveError::ServerFailure));
        is_broken.set(false);
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
    });
}

#[test]
fn codes_of_servers_have_their_names() {
    run(async {
        let server =
            Server::start(|query| vec![query.error(if query.name == "a" { Rcode::REFUSED } else { Rcode::NOTIMP })]);
        let resolver = resolver(&[&server]);
        assert_eq!(addresses(&resolver, "a").await.unwrap_err().to_string(), "5: Operation refused");
        assert_eq!(addresses(&resolver, "b").await.unwrap_err().to_string(), "4: Unimplemented");
    });
}

#[test]
fn a_server_that_says_nothing_gives_way_to_the_next_one() {
    run(async {
        let (silent, server) = (silent(), plain());
        let resolver = resolver(&[&silent, &server]);
        let begin = now();
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
        assert_eq!(now().since(begin).as_secs(), 5);
        assert_eq!((silent.query_count(), server.query_count()), (2, 2));
        // The next lookup begins with the next server.
        assert_eq!(addresses(&resolver, "b.example").await, found("192.0.2.1"));
        assert_eq!(silent.query_count(), 2);
    });
}

#[test]
fn only_unanswered_questions_are_asked_again() {
    run(async {
        let half = Server::start(|query| match query.kind {
            Rtype::A => vec![query.address([192, 0, 2, 7], HOUR)],
            _ => Vec::new(),
        });
        let server = plain();
        let resolver = resolver(&[&half, &server]);
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.7"));
        assert_eq!(server.queries.take(), [("a.example".to_owned(), Rtype::AAAA)]);
    });
}

/// An address without a server, for which the kernel reports an error.
fn absent() -> SocketAddr {
    Datagram::bind(&any_port()).unwrap().local_address().unwrap().inet().unwrap()
}

#[test]
fn a_server_that_is_not_there_costs_no_time() {
    run(async {
        let server = plain();
        let settings = ResolverSettings::new([absent(), absent(), server.address]);
        // Their sockets are closed when the turn ends.
        yield_now().await;
        let begin = now();
        assert_eq!(addresses(&Resolver::new(&settings, &log()), "a.example").await, found("192.0.2.1"));
        assert!(now().since(begin) < Duration::from_secs(1));
    });
}

#[test]
fn a_server_that_comes_back_is_asked_again() {
    run(async {
        let address = absent();
        yield_now().await;
        let begin = now();
        spawn(async move {
            sleep(Duration::from_secs(7)).await;
            Server::start_at(&address.into(), |query| vec![query.address([192, 0, 2, 1], HOUR)]);
        });
        let resolver = Resolver::new(&ResolverSettings::new([address]), &log());
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
        assert_eq!(now().since(begin).as_secs(), 10);
    });
}

#[test]
fn lookup_that_times_out_ends_with_an_error() {
    run(async {
        let server = silent();
        let resolver = resolver(&[&server]);
        let begin = now();
        let result = resolver.resolve(b"a.example", Duration::from_secs(12)).await;
        assert_eq!(result.unwrap_err().to_string(), "110: Operation timed out");
        assert_eq!(now().since(begin).as_secs(), 12);
        // At 0, 5 and 10 seconds; the lookup stops when nothing waits for it.
        sleep(Duration::from_secs(60)).await;
        assert_eq!(server.query_count(), 6);
    });
}

#[test]
fn truncated_answer_is_asked_for_over_tcp() {
    run(async {
        let server = Server::start(|query| {
            let mut answer = query.answer();
            answer.header_mut().set_tc(true);
            answer.push((name(&query.name), HOUR, a([192, 0, 2, 99]))).unwrap();
            vec![answer.finish()]
        })
        .and_tcp(|query| {
            let mut answer = query.answer();
            if query.kind == Rtype::A {
                (0..200).for_each(|number| answer.push((name(&query.name), HOUR, a([192, 0, 2, number]))).unwrap());
            }
            answer.finish()
        });
        let resolver = resolver(&[&server]);
        let resolved = resolver.resolve(b"a.example", LONG).await.unwrap();
        // Bounds a name's size in the cache; more are not needed.
        assert_eq!(resolved.found.len(), 64);
    });
}

#[test]
fn a_server_without_tcp_gives_way_to_the_next_one() {
    run(async {
        let truncating = Server::start(|query| {
            let mut answer = query.answer();
            answer.header_mut().set_tc(true);
            vec![answer.finish()]
        });
        let server = plain();
        let resolver = resolver(&[&truncating, &server]);
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
    });
}

#[test]
fn forged_answers_are_ignored() {
    run(async {
        let server = Server::start(|query| {
            let forged = |change: &dyn Fn(&mut Vec<u8>)| {
                let mut bytes = query.address([203, 0, 113, 66], HOUR);
                change(&mut bytes);
                bytes
            };
            let mut other_owner = query.answer();
            if query.kind == Rtype::A {
                other_owner.push((name("evil.example"), HOUR, a([203, 0, 113, 66]))).unwrap();
                other_owner.push((name(&query.name), HOUR, a([192, 0, 2, 1]))).unwrap();
            }
            vec![
                // Wrong ID.
                forged(&|bytes| bytes[0] ^= 1),
                // A query.
                forged(&|bytes| bytes[2] &= 0x7f),
                // Wrong question: first letter, type, class.
                forged(&|bytes| bytes[13] = b'z'),
                forged(&|bytes| bytes[12 + 11 + 1] ^= 2),
                forged(&|bytes| bytes[12 + 11 + 3] ^= 2),
                // No question, and two.
                forged(&|bytes| bytes[5] = 0),
                forged(&|bytes| bytes[5] = 2),
                // The genuine one, with an additional unrelated record.
                other_owner.finish(),
            ]
        });
        let resolver = resolver(&[&server]);
        let begin = now();
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
        assert!(now().since(begin) < Duration::from_secs(1));
    });
}

#[test]
fn datagrams_from_other_addresses_are_ignored() {
    run(async {
        let stranger = Rc::new(Datagram::bind(&any_port()).unwrap());
        let server = Server::start(move |query| {
            stranger.send_to(&query.address([203, 0, 113, 66], HOUR), &query.from).unwrap();
            vec![query.address([192, 0, 2, 1], HOUR)]
        });
        let resolver = resolver(&[&server]);
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
    });
}

#[test]
fn each_query_has_a_port_and_a_number_of_its_own() {
    run(async {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let log = Rc::clone(&seen);
        let server = Server::start(move |query| {
            log.borrow_mut().push((query.from.inet().unwrap().port(), length_of(&query.bytes)));
            vec![query.address([192, 0, 2, 1], HOUR)]
        });
        let resolver = resolver_with(&[&server], |settings| settings.ipv6 = false);
        for number in 0..20 {
            addresses(&resolver, &format!("n{number}.example")).await.unwrap();
        }
        let distinct = |pick: fn(&(u16, u16)) -> u16| {
            let mut numbers: Vec<u16> = seen.borrow().iter().map(pick).collect();
            numbers.sort();
            numbers.dedup();
            numbers.len()
        };
        // Two of twenty may collide by chance, but not many.
        assert!(distinct(|seen| seen.0) > 15 && distinct(|seen| seen.1) > 15);
    });
}

#[test]
fn under_a_flood_of_forged_answers_tcp_decides() {
    run(async {
        let server = Server::start(|query| {
            let mut forged = query.address([203, 0, 113, 66], HOUR);
            forged[0] ^= 1;
            // Even a correct guess comes too late then.
            let mut datagrams = vec![forged; 40];
            datagrams.push(query.address([203, 0, 113, 66], HOUR));
            datagrams
        })
        .and_tcp(|query| query.address([192, 0, 2, 1], HOUR));
        let resolver = resolver_with(&[&server], |settings| settings.ipv6 = false);
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
    });
}

#[test]
fn garbage_is_ignored_and_the_question_asked_again() {
    run(async {
        let count = Cell::new(0);
        let server = Server::start(move |query| {
            count.set(count.get() + 1);
            if count.get() > 2 {
                return vec![query.address([192, 0, 2, 1], HOUR)];
            }
            // A format error, nothing, zeros, ones.
            let mut datagrams = vec![query.error(Rcode::FORMERR), Vec::new(), vec![0; 100], vec![0xff; 100]];
            if query.kind == Rtype::A {
                let good = query.address([192, 0, 2, 66], HOUR);
                // Truncated; an owner that points at itself; an address of three bytes.
                datagrams.push(good[..good.len() - 1].to_vec());
                let owner = query.bytes.len();
                let mut circle = good.clone();
                circle.splice(owner..good.len() - 14, [0xc0, owner as u8]);
                datagrams.push(circle);
                let mut short = good[..good.len() - 1].to_vec();
                short[good.len() - 5] = 3;
                datagrams.push(short);
            }
            datagrams
        });
        let resolver = resolver(&[&server]);
        let begin = now();
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
        assert_eq!(now().since(begin).as_secs(), 5);
    });
}

#[test]
fn aliases_are_followed_within_an_answer_and_beyond() {
    run(async {
        let server = Server::start(|query| match &*query.name {
            "a.example" => vec![query.alias("b.example", 20)],
            "b.example" => {
                let mut answer = query.answer();
                // In the wrong order.
                if query.kind == Rtype::A {
                    answer.push((name("d.example"), HOUR, a([192, 0, 2, 4]))).unwrap();
                }
                answer.push((name("c.example"), HOUR, Cname::new(name("D.example")))).unwrap();
                answer.push((name("b.example"), 10, Cname::new(name("c.example")))).unwrap();
                vec![answer.finish()]
            }
            _ => vec![query.error(Rcode::NXDOMAIN)],
        });
        let resolver = resolver_with(&[&server], |settings| settings.ipv6 = false);
        let resolved = resolver.resolve(b"a.example", LONG).await.unwrap();
        assert_eq!(resolved.valid_until.unwrap().since(now()).as_secs_f64().round(), 10.0);
        assert_eq!(text(resolved), "192.0.2.4");
        assert_eq!(server.query_count(), 2);
        addresses(&resolver, "b.example").await.unwrap();
        assert_eq!(server.query_count(), 2);
    });
}

#[test]
fn aliases_without_end_are_given_up() {
    run(async {
        let server = Server::start(|query| {
            let number: u32 = query.name.trim_start_matches('n').parse().unwrap();
            vec![query.alias(&format!("n{}", number + 1), HOUR)]
        });
        let endless = resolver_with(&[&server], |settings| settings.ipv6 = false);
        assert_eq!(addresses(&endless, "n0").await, Err(ResolveError::NotFound));
        assert_eq!(server.query_count(), 51);
        let server = Server::start(|query| vec![query.alias(if query.name == "a" { "b" } else { "a" }, HOUR)]);
        let circle = resolver_with(&[&server], |settings| settings.ipv6 = false);
        assert_eq!(addresses(&circle, "a").await, Err(ResolveError::NotFound));
        assert_eq!(server.query_count(), 2);
        // Too many in one answer, and a cycle in one: both count as no such name.
        let server = Server::start(|query| {
            let mut answer = query.answer();
            let count = if query.name == "n0" { 100 } else { 2 };
            for number in 0..count {
                let target = if count == 2 { 1 - number } else { number + 1 };
                let alias = Cname::new(name(&format!("n{target}")));
                answer.push((name(&format!("n{number}")), HOUR, alias)).unwrap();
            }
            vec![answer.finish()]
        });
        let resolver = resolver_with(&[&server], |settings| settings.ipv6 = false);
        assert_eq!(addresses(&resolver, "n0").await, Err(ResolveError::NotFound));
        assert_eq!(addresses(&resolver, "n1").await, Err(ResolveError::NotFound));
    });
}

#[test]
fn hundred_lookups_of_one_name_share_a_query_and_its_addresses() {
    run(async {
        let server = Server::start(|query| {
            let mut answer = query.answer();
            if query.kind == Rtype::A {
                (0..4).for_each(|number| answer.push((name(&query.name), 0, a([192, 0, 2, number]))).unwrap());
            }
            vec![answer.finish()]
        });
        let resolver = resolver(&[&server]);
        let firsts = Rc::new(RefCell::new(Vec::new()));
        for _ in 0..100 {
            let (resolver, firsts) = (Rc::clone(&resolver), Rc::clone(&firsts));
            spawn(async move {
                let resolved = resolver.resolve(b"a.example", LONG).await.unwrap();
                assert_eq!(resolved.found.len(), 4);
                firsts.borrow_mut().push(resolved.found[0]);
            });
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!((server.query_count(), firsts.borrow().len()), (2, 100));
        firsts.borrow_mut().sort();
        firsts.borrow_mut().dedup();
        assert_eq!(firsts.borrow().len(), 4, "each comes first for some");
    });
}

#[test]
fn lookup_that_gives_up_leaves_the_answer_to_the_others() {
    run(async {
        let count = Cell::new(0);
        let server = Server::start(move |query| {
            count.set(count.get() + 1);
            if count.get() > 2 { vec![query.address([192, 0, 2, 1], HOUR)] } else { Vec::new() }
        });
        let resolver = resolver(&[&server]);
        let impatient = Rc::clone(&resolver);
        spawn(async move {
            let result = impatient.resolve(b"a.example", Duration::from_secs(1)).await;
            assert_eq!(result, Err(ResolveError::TimedOut));
        });
        assert_eq!(addresses(&resolver, "a.example").await, found("192.0.2.1"));
    });
}

#[test]
fn too_many_names_at_once_are_refused_and_the_others_are_not() {
    run(async {
        let server = silent();
        let resolver = resolver(&[&server]);
        let results = Rc::new(RefCell::new(Vec::new()));
        for number in 0..520 {
            let (resolver, results) = (Rc::clone(&resolver), Rc::clone(&results));
            spawn(async move {
                let name = format!("n{number}.example");
                let result = resolver.resolve(name.as_bytes(), Duration::from_secs(20)).await;
                results.borrow_mut().push(result.unwrap_err());
            });
        }
        sleep(Duration::from_secs(60)).await;
        let busy = results.borrow().iter().filter(|&&error| error == ResolveError::Busy).count();
        assert_eq!((results.borrow().len(), busy), (520, 8));
    });
}

#[test]
fn addresses_have_names() {
    run(async {
        let server = Server::start(|query| {
            let mut answer = query.answer();
            assert_eq!((&*query.name, query.kind), ("1.2.0.192.in-addr.arpa", Rtype::PTR));
            answer.push((name(&query.name), HOUR, Cname::new(name("1.0-25.2.0.192.in-addr.arpa")))).unwrap();
            answer.push((name("1.0-25.2.0.192.in-addr.arpa"), HOUR, Ptr::new(name("www.example")))).unwrap();
            vec![answer.finish()]
        });
        let resolver = resolver(&[&server]);
        for _ in 0..2 {
            let found = resolver.resolve_address("192.0.2.1".parse().unwrap(), LONG).await;
            assert_eq!(found.as_deref(), Ok("www.example"));
        }
        assert_eq!(server.query_count(), 1);
    });
}

#[test]
fn services_have_servers_by_priority() {
    run(async {
        let server = Server::start(|query| {
            let mut answer = query.answer();
            match (&*query.name, query.kind) {
                ("_http._tcp.example", Rtype::SRV) => {
                    for (priority, port, target) in
                        [(2, 81, "b.example"), (1, 80, "a.example"), (1, 82, "gone.example")]
                    {
                        let service = Srv::new(priority, 10, port, name(target));
                        answer.push((name(&query.name), HOUR, service)).unwrap();
                    }
                }
                ("gone.example", _) => return vec![query.error(Rcode::NXDOMAIN)],
                ("a.example" | "b.example", _) => return vec![query.address([192, 0, 2, 1], 60)],
                _ => return vec![query.error(Rcode::SERVFAIL)],
            }
            vec![answer.finish()]
        });
        let resolver = resolver(&[&server]);
        let resolved = resolver.resolve_service(b"example", b"http", LONG).await.unwrap();
        let servers: Vec<String> = resolved
            .found
            .iter()
            .map(|server| format!("{} {} {} {}", server.address, server.name, server.priority, server.weight))
            .collect();
        assert_eq!(servers, ["192.0.2.1:80 a.example 1 10", "192.0.2.1:81 b.example 2 10"]);
        assert_eq!(resolved.valid_until.unwrap().since(now()).as_secs_f64().round(), 60.0);
        let failed = resolver.resolve_service(b"example", b"_x._udp", LONG).await;
        assert_eq!(failed, Err(ResolveError::ServerFailure));
    });
}

#[test]
fn unchanged_directive_keeps_its_cache() {
    run(async {
        let (server, other) = (plain(), plain());
        let settings = |server: &Server| Arc::new(ResolverSettings::new([server.address]));
        let (before, after, changed) = (settings(&server), settings(&server), settings(&other));
        let mut resolvers = Resolvers::default();
        addresses(&resolvers.get(&before, &log()), "a.example").await.unwrap();
        drop(before);
        addresses(&resolvers.get(&after, &log()), "a.example").await.unwrap();
        assert_eq!(server.query_count(), 2);
        addresses(&resolvers.get(&changed, &log()), "a.example").await.unwrap();
        assert_eq!(other.query_count(), 2);
    });
}

#[test]
fn name_is_found_despite_lost_and_duplicated_datagrams() {
    each_seed(40, |simulation| {
        simulation.set_faults(Faults {
            datagram_losses: 300,
            datagram_copies: 300,
            latency_max: Duration::from_millis(80),
            ..Faults::NONE
        });
        let mut event_loop = EventLoop::simulated(simulation, LoopOptions::default()).unwrap();
        event_loop.run(async {
            let ports = [5301, 5302].map(|port| SocketAddress::Inet(SocketAddr::from(([192, 0, 2, 53], port))));
            let servers =
                ports.map(|address| Server::start_at(&address, |query| vec![query.address([192, 0, 2, 1], 1)]));
            let resolver = resolver(&[&servers[0], &servers[1]]);
            for number in 0..20 {
                let found = resolver.resolve(format!("n{number}.example").as_bytes(), Duration::ZERO).await;
                assert_eq!(found.map(text), Ok("192.0.2.1".to_owned()));
            }
        });
    });
}
