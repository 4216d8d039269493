//! Idle connections of a group (`keepalive`): one pool for all workers, with a number of connections for each.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#keepalive>)

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_runtime::{IdleOptions, IdleStreams, Moment, SocketAddress, Timer, WeakIdleStreams, now};
use gale_tls::IdleTls;
use gale_tls::Transport;
use gale_worker::{CountedConnection, ParkedConnection, Worker};

use super::idle_permits::{IdlePermit, IdlePermits};
use super::warm;

/// Time before the announced end of an idle connection in which it is not used.
const ANNOUNCED_MARGIN: Duration = Duration::from_secs(1);

/// Most expired connections that one `take` closes before it gives up.
const CLOSED_PER_TAKE_MAX: usize = 16;

/// Settings of `keepalive`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepaliveSettings {
    /// `keepalive`: most idle connections for each worker, usable by all workers; at least one.
    pub connections: usize,
    /// `local`: only the location that made a connection uses it again.
    pub is_local: bool,
    /// `keepalive_requests`
    pub requests_max: u64,
    /// `keepalive_time`
    pub time_max: Duration,
    /// `keepalive_timeout`
    pub timeout: Duration,
    /// `ntlm`: an authenticated connection is bound to its client.
    pub binds_clients: bool,
}

impl Default for KeepaliveSettings {
    /// nginx's defaults.
    fn default() -> KeepaliveSettings {
        KeepaliveSettings {
            connections: 32,
            is_local: true,
            requests_max: 1000,
            time_max: Duration::from_secs(3600),
            timeout: Duration::from_secs(60),
            binds_clients: false,
        }
    }
}

/// Key of interchangeable connections.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PoolKey {
    /// The peer.
    pub peer: SocketAddress,
    /// Options of the connection, encoded by the code that opens it: local address, PROXY header, TLS settings. `None`
    /// if there are none.
    pub made_with: Option<Arc<[u8]>>,
    /// The settings (location) that opened it; only compared with `local`.
    pub user: usize,
}

impl PoolKey {
    /// Key of connections to this peer without options, for the settings `user`.
    pub fn new(peer: &SocketAddress, user: usize) -> PoolKey {
        PoolKey { peer: peer.clone(), made_with: None, user }
    }
}

/// History of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionAge {
    /// Time when it was opened.
    pub opened: Moment,
    /// Requests carried.
    pub requests: u64,
    /// Idle timeout announced by the peer (`Keep-Alive: timeout=`).
    pub announced_timeout: Option<Duration>,
    /// Start of the idle time.
    pub idle_since: Moment,
}

impl ConnectionAge {
    /// History of a connection opened now.
    pub fn new() -> ConnectionAge {
        let now = now();
        ConnectionAge { opened: now, requests: 0, announced_timeout: None, idle_since: now }
    }

    /// Counts a request and stores the idle timeout that the peer has announced, in seconds.
    pub fn note_request(&mut self, idle_seconds: Option<u64>) {
        self.requests += 1;
        self.announced_timeout = idle_seconds.map(Duration::from_secs);
    }

    /// `true` if the peer may be about to close it, because its announced idle timeout has almost passed.
    pub fn is_near_end(&self, now: Moment) -> bool {
        self.announced_timeout.is_some_and(|timeout| now.since(self.idle_since) + ANNOUNCED_MARGIN >= timeout)
    }
}

impl Default for ConnectionAge {
    fn default() -> ConnectionAge {
        ConnectionAge::new()
    }
}

/// A connection that may be kept between two requests and counts towards its worker's limit. It moves between requests
/// and their pool in its box.
pub struct PooledConnection {
    /// The connection.
    pub transport: Transport,
    /// Its history.
    pub age: ConnectionAge,
    /// Its place within `worker_connections`.
    pub counted: CountedConnection,
    /// Timeout for the peer's response, set anew by each request. It stays with the connection because moving a
    /// deadline later costs a tenth of a new timer.
    pub silence: Timer,
}

impl PooledConnection {
    /// `true` if nothing was received on it, including its end.
    pub(super) fn is_idle(&self, knowledge: Knowledge) -> bool {
        match knowledge {
            Knowledge::Driver => self.transport.is_idle(),
            Knowledge::Kernel => self.transport.is_idle() && !self.transport.socket().has_input(),
        }
    }

    /// Combines a connection with its history.
    pub fn new(transport: Transport, age: ConnectionAge, counted: CountedConnection) -> Box<PooledConnection> {
        Box::new(PooledConnection { transport, age, counted, silence: Timer::new() })
    }
}

/// Source of the knowledge that a recently used connection is still idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// Ask the driver, which mostly knows without a system call.
    Driver,
    /// Ask the kernel, with a system call.
    Kernel,
}

/// State of a parked connection.
struct Parked {
    age: ConnectionAge,
    /// TLS session of the connection.
    tls: Option<IdleTls>,
    _counted: ParkedConnection,
    _permit: IdlePermit,
}

/// Idle connections of a group. Clones share the pool.
#[derive(Clone, Debug)]
pub struct Pool {
    settings: KeepaliveSettings,
    workers: usize,
    permits: IdlePermits,
    streams: IdleStreams<PoolKey, Parked>,
}

/// Weak reference to a pool.
pub(super) struct WeakPool(WeakIdleStreams<PoolKey, Parked>);

impl WeakPool {
    pub fn is_of(&self, pool: &Pool) -> bool {
        self.0.is_of(&pool.streams)
    }

    /// Connections that the running worker has parked.
    pub fn own_len(&self) -> usize {
        self.0.upgrade().map_or(0, |streams| streams.own_len())
    }

    /// Closes the longest idle connection that the running worker has parked.
    pub fn close_oldest_own(&self) -> bool {
        self.0.upgrade().is_some_and(|streams| streams.close_oldest_own())
    }
}

impl Pool {
    /// Creates a pool for this many workers.
    ///
    /// # Panics
    /// Panics if the settings allow no connections.
    pub fn new(settings: KeepaliveSettings, workers: usize) -> Pool {
        let KeepaliveSettings { connections, timeout, .. } = settings;
        // Permits limit the number over all workers.
        let options = IdleOptions { loops: workers, per_loop_max: connections.saturating_mul(workers), timeout };
        Pool { settings, workers, permits: IdlePermits::new(connections, workers), streams: IdleStreams::new(options) }
    }

    /// Settings of the pool.
    pub fn settings(&self) -> &KeepaliveSettings {
        &self.settings
    }

    pub(super) fn is_for(&self, settings: KeepaliveSettings, workers: usize) -> bool {
        self.settings == settings && self.workers == workers
    }

    /// Takes the idle connection with this key that was parked last. Connections about to be closed by the peer are not
    /// returned.
    pub fn take(&self, worker: &Rc<Worker>, key: &PoolKey, knowledge: Knowledge) -> Option<Box<PooledConnection>> {
        let key = self.own_key(key.clone());
        warm::take(worker, self, &key, knowledge).or_else(|| self.take_cold(worker, &key))
    }

    fn take_cold(&self, worker: &Rc<Worker>, key: &PoolKey) -> Option<Box<PooledConnection>> {
        let now = now();
        for _ in 0..CLOSED_PER_TAKE_MAX {
            let (stream, Parked { age, tls, .. }) = self.streams.take(key)?;
            let transport = Transport::from_idle(stream, tls);
            if !age.is_near_end(now) {
                let counted = CountedConnection::taken(worker);
                return Some(PooledConnection::new(transport, age, counted));
            }
        }
        None
    }

    /// Parks a connection that has carried another request; its age includes the request. Returns `false` if it was
    /// closed instead because it has reached its limits or is not idle.
    pub fn park(&self, worker: &Rc<Worker>, key: PoolKey, mut connection: Box<PooledConnection>) -> bool {
        connection.age.idle_since = now();
        if self.is_spent(&connection.age) {
            return false;
        }
        warm::keep(worker, self, self.own_key(key), connection)
    }

    /// `true` if a connection has reached its limits, or its peer is about to close it.
    pub(super) fn is_spent(&self, age: &ConnectionAge) -> bool {
        let now = now();
        let KeepaliveSettings { requests_max, time_max, .. } = self.settings;
        age.requests >= requests_max || now.since(age.opened) > time_max || age.is_near_end(now)
    }

    /// Parks a connection for all workers. Its TLS session is kept with the socket; anything that the server sends
    /// meanwhile, even a ticket, ends both.
    pub(super) fn park_cold(
        &self,
        worker: &Worker,
        key: PoolKey,
        connection: PooledConnection,
        permit: IdlePermit,
    ) -> bool {
        let PooledConnection { transport, age, counted, .. } = connection;
        drop(counted);
        let Some((stream, tls)) = transport.into_idle() else { return false };
        let counted = worker.connections.count_parked();
        self.streams.park(key, stream, Parked { age, tls, _counted: counted, _permit: permit })
    }

    pub(super) fn downgrade(&self) -> WeakPool {
        WeakPool(self.streams.downgrade())
    }

    /// `true` if both are the same pool.
    pub fn is_same(&self, other: &Pool) -> bool {
        self.streams.is_same(&other.streams)
    }

    pub(super) fn permits(&self) -> &IdlePermits {
        &self.permits
    }

    /// Takes a permit for a worker that holds `held`; if none is free, first closes the longest idle parked connection.
    pub(super) fn take_permit(&self, held: usize) -> bool {
        if !self.permits.are_free() {
            self.streams.close_oldest();
        }
        self.permits.take(held)
    }

    /// Key within this pool: without `local` the user does not count.
    pub fn own_key(&self, key: PoolKey) -> PoolKey {
        PoolKey { user: if self.settings.is_local { key.user } else { 0 }, ..key }
    }

    /// Number of parked connections, without workers' warm ones.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// `true` if none is parked.
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use gale_runtime::{ClockChoice, EventLoop, LoopOptions, Stream, sleep};

    use super::*;
    use gale_log::ErrorLog;

    const SETTINGS: KeepaliveSettings = KeepaliveSettings {
        connections: 2,
        is_local: false,
        requests_max: 3,
        time_max: Duration::from_secs(100),
        timeout: Duration::from_secs(3600),
        binds_clients: false,
    };

    /// Connections to one server, whose other ends stay open.
    struct Server {
        listener: TcpListener,
        ends: Vec<TcpStream>,
    }

    impl Server {
        fn start() -> Server {
            Server { listener: TcpListener::bind("127.0.0.1:0").unwrap(), ends: Vec::new() }
        }

        /// A new connection with this history.
        fn connect(&mut self, worker: &Rc<Worker>, age: ConnectionAge) -> Box<PooledConnection> {
            let stream = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
            self.ends.push(self.listener.accept().unwrap().0);
            let transport = Transport::Plain(Stream::from_fd(stream.into()).unwrap());
            PooledConnection::new(transport, age, CountedConnection::open(worker).unwrap())
        }

        fn key(&self, user: usize) -> PoolKey {
            PoolKey::new(&SocketAddress::Inet(self.listener.local_addr().unwrap()), user)
        }
    }

    fn run(test: impl AsyncFnOnce()) {
        let options = LoopOptions { clock: ClockChoice::Virtual, ..LoopOptions::default() };
        EventLoop::new(options).unwrap().run(test());
    }

    fn worker() -> Rc<Worker> {
        Worker::new(10, Arc::new(ErrorLog::new(Vec::new())))
    }

    /// Waits until unused warm connections have moved to the pool.
    async fn cool_down() {
        sleep(Duration::from_secs(1)).await;
    }

    fn carried(requests: u64) -> ConnectionAge {
        ConnectionAge { requests, ..ConnectionAge::new() }
    }

    #[test]
    fn the_connection_that_was_parked_last_is_taken_first_and_no_more_are_kept_than_may_be() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 1), Server::start());
            for requests in [0, 1, 2] {
                assert!(pool.park(&worker, server.key(0), server.connect(&worker, carried(requests))));
            }
            let taken =
                [(); 3].map(|()| pool.take(&worker, &server.key(0), Knowledge::Driver).map(|taken| taken.age.requests));
            assert_eq!(taken, [Some(2), Some(1), None]);
        });
    }

    /// Number of connections that a worker can take.
    fn taken_by(worker: &Rc<Worker>, pool: &Pool, key: &PoolKey) -> usize {
        let taken: Vec<_> = std::iter::from_fn(|| pool.take(worker, key, Knowledge::Driver)).collect();
        taken.len()
    }

    #[test]
    fn worker_keeps_permits_that_the_others_do_not_need() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 2), Server::start());
            for _ in 0..5 {
                assert!(pool.park(&worker, server.key(0), server.connect(&worker, carried(1))));
            }
            assert_eq!(taken_by(&worker, &pool, &server.key(0)), 4);
        });
    }

    #[test]
    fn worker_keeps_its_own_number_and_others_give_up_the_surplus() {
        run(async || {
            let (worker, other, pool, mut server) = (worker(), worker(), Pool::new(SETTINGS, 2), Server::start());
            let key = server.key(0);
            let mut park = |by: &Rc<Worker>| assert!(pool.park(by, key.clone(), server.connect(by, carried(1))));
            (0..4).for_each(|_| park(&worker));
            (0..3).for_each(|_| park(&other));
            (0..3).for_each(|_| park(&worker));
            assert_eq!(taken_by(&other, &pool, &key), 2);
            assert_eq!(taken_by(&worker, &pool, &key), 2);
        });
    }

    #[test]
    fn surplus_connections_of_a_pool_are_closed_and_do_not_cool_down() {
        run(async || {
            let (worker, other, pool, mut server) = (worker(), worker(), Pool::new(SETTINGS, 2), Server::start());
            let key = server.key(0);
            let mut park = |by: &Rc<Worker>| assert!(pool.park(by, key.clone(), server.connect(by, carried(1))));
            (0..4).for_each(|_| park(&worker));
            (0..2).for_each(|_| park(&other));
            cool_down().await;
            assert_eq!(pool.len(), 4);
        });
    }

    #[test]
    fn permits_that_a_worker_does_not_need_are_soon_for_others() {
        run(async || {
            let (worker, other, pool, mut server) = (worker(), worker(), Pool::new(SETTINGS, 2), Server::start());
            let key = server.key(0);
            let mut park = |by: &Rc<Worker>| assert!(pool.park(by, key.clone(), server.connect(by, carried(1))));
            (0..4).for_each(|_| park(&worker));
            assert_eq!(taken_by(&worker, &pool, &key), 4);
            cool_down().await;
            cool_down().await;
            (0..4).for_each(|_| park(&other));
            assert_eq!(taken_by(&other, &pool, &key), 4);
        });
    }

    #[test]
    fn a_parked_connection_makes_room_for_one_that_was_used_later() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 1), Server::start());
            let key = server.key(0);
            let mut park = |requests| {
                assert!(pool.park(&worker, key.clone(), server.connect(&worker, carried(requests))));
            };
            (0..2).for_each(|_| park(1));
            cool_down().await;
            assert_eq!(pool.len(), 2);
            park(2);
            assert_eq!(pool.len(), 1);
            park(2);
            assert_eq!((pool.len(), taken_by(&worker, &pool, &key)), (0, 2));
        });
    }

    #[test]
    fn a_warm_connection_cools_down_for_the_other_workers() {
        run(async || {
            let (worker, other, pool, mut server) = (worker(), worker(), Pool::new(SETTINGS, 1), Server::start());
            assert!(pool.park(&worker, server.key(0), server.connect(&worker, carried(1))));
            assert!(pool.take(&other, &server.key(0), Knowledge::Driver).is_none());
            cool_down().await;
            assert_eq!(pool.len(), 1);
            assert!(pool.take(&other, &server.key(0), Knowledge::Driver).is_some() && pool.is_empty());
        });
    }

    #[test]
    fn a_warm_connection_that_its_peer_has_closed_is_not_taken() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 1), Server::start());
            assert!(pool.park(&worker, server.key(0), server.connect(&worker, carried(1))));
            server.ends.clear();
            assert!(pool.take(&worker, &server.key(0), Knowledge::Driver).is_none());
        });
    }

    #[test]
    fn a_connection_that_has_had_its_requests_or_its_time_is_closed() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 1), Server::start());
            assert!(!pool.park(&worker, server.key(0), server.connect(&worker, carried(3))));
            let age = carried(1);
            sleep(Duration::from_secs(101)).await;
            assert!(!pool.park(&worker, server.key(0), server.connect(&worker, age)));
            assert!(pool.is_empty());
        });
    }

    #[test]
    fn a_connection_that_its_peer_is_about_to_close_is_not_used_again() {
        let age =
            |idle_since| ConnectionAge { announced_timeout: Some(Duration::from_secs(5)), idle_since, ..age_at(0) };
        fn age_at(seconds: u64) -> ConnectionAge {
            let moment = Moment::from_nanos(seconds * 1_000_000_000);
            ConnectionAge { opened: moment, requests: 1, announced_timeout: None, idle_since: moment }
        }
        let at = |seconds: u64| Moment::from_nanos(seconds * 1_000_000_000);
        assert!(!age(at(10)).is_near_end(at(13)));
        assert!(age(at(10)).is_near_end(at(14)));
        assert!(!age_at(0).is_near_end(at(10_000)));
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 1), Server::start());
            let announced = ConnectionAge { announced_timeout: Some(Duration::from_secs(5)), ..carried(1) };
            assert!(pool.park(&worker, server.key(0), server.connect(&worker, carried(2))));
            assert!(pool.park(&worker, server.key(0), server.connect(&worker, announced)));
            sleep(Duration::from_secs(4)).await;
            // The older one is not near its end.
            assert_eq!(pool.take(&worker, &server.key(0), Knowledge::Driver).map(|taken| taken.age.requests), Some(2));
            assert!(pool.take(&worker, &server.key(0), Knowledge::Driver).is_none() && pool.is_empty());
            let soon = ConnectionAge { announced_timeout: Some(Duration::from_secs(1)), ..carried(1) };
            assert!(!pool.park(&worker, server.key(0), server.connect(&worker, soon)));
        });
    }

    #[test]
    fn connections_are_told_apart_by_all_that_they_were_made_with() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 1), Server::start());
            let bound = PoolKey { made_with: Some(b"127.0.0.2".as_slice().into()), ..server.key(0) };
            assert!(pool.park(&worker, bound.clone(), server.connect(&worker, carried(1))));
            assert!(pool.take(&worker, &server.key(0), Knowledge::Driver).is_none());
            assert!(pool.take(&worker, &bound, Knowledge::Driver).is_some());
        });
    }

    #[test]
    fn local_connections_are_used_by_those_alone_that_they_were_made_for() {
        run(async || {
            let (worker, mut server) = (worker(), Server::start());
            for (is_local, is_shared) in [(false, true), (true, false)] {
                let pool = Pool::new(KeepaliveSettings { is_local, ..SETTINGS }, 1);
                assert!(pool.park(&worker, server.key(7), server.connect(&worker, carried(1))));
                assert_eq!(pool.take(&worker, &server.key(8), Knowledge::Driver).is_some(), is_shared);
                assert_eq!(pool.take(&worker, &server.key(7), Knowledge::Driver).is_some(), !is_shared);
            }
        });
    }
}
