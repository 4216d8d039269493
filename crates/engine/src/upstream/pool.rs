//! The idle connections of a group (`keepalive`): one pool for all workers, of so many for each of them.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#keepalive>)

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_runtime::{IdleOptions, IdleStreams, Moment, SocketAddress, Timer, WeakIdleStreams, now};

use super::idle_permits::{IdlePermit, IdlePermits};
use super::warm;
use crate::tls::IdleTls;
use crate::transport::Transport;
use crate::worker::{CountedConnection, ParkedConnection, Worker};

/// An idle connection is not used in the last second before its peer closes it, as far as that has said when.
const ANNOUNCED_MARGIN: Duration = Duration::from_secs(1);

/// Connections that their peers are about to close which one `take` closes at most, before it says that there is none.
const CLOSED_PER_TAKE_MAX: usize = 16;

/// What is kept of connections between two requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepaliveSettings {
    /// `keepalive`: how many are kept for each worker at most, by whichever of them; one at least.
    pub connections: usize,
    /// `local`: whether a connection is used again only by the settings (the location) that it was made for.
    pub is_local: bool,
    /// `keepalive_requests`
    pub requests_max: u64,
    /// `keepalive_time`
    pub time_max: Duration,
    /// `keepalive_timeout`
    pub timeout: Duration,
    /// `ntlm`: whether a connection that its client has authenticated goes on as that client's own.
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

/// Which connections may stand for each other.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PoolKey {
    /// The peer.
    pub peer: SocketAddress,
    /// What else tells connections apart: the address that they are bound to, a PROXY header, settings of TLS. Whoever
    /// makes connections puts that into bytes; `None` for nothing of that.
    pub made_with: Option<Arc<[u8]>>,
    /// The settings (the location) that they were made for: looked at only with `local`.
    pub user: usize,
}

impl PoolKey {
    /// Connections to this peer that nothing else tells apart, for the settings `user`.
    pub fn new(peer: &SocketAddress, user: usize) -> PoolKey {
        PoolKey { peer: peer.clone(), made_with: None, user }
    }
}

/// The past of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionAge {
    /// When it was opened.
    pub opened: Moment,
    /// How many requests it has carried.
    pub requests: u64,
    /// How long its peer said that it keeps it when it is idle (`Keep-Alive: timeout=`).
    pub announced_timeout: Option<Duration>,
    /// Since when it is idle.
    pub idle_since: Moment,
}

impl ConnectionAge {
    /// One that is opened now.
    pub fn new() -> ConnectionAge {
        let now = now();
        ConnectionAge { opened: now, requests: 0, announced_timeout: None, idle_since: now }
    }

    /// It has carried one request more, and its peer says that it closes it when it is idle for so many seconds.
    pub fn note_request(&mut self, idle_seconds: Option<u64>) {
        self.requests += 1;
        self.announced_timeout = idle_seconds.map(Duration::from_secs);
    }

    /// Whether its peer may be about to close it, because it was idle for almost as long as the peer has announced.
    pub fn is_near_end(&self, now: Moment) -> bool {
        self.announced_timeout.is_some_and(|timeout| now.since(self.idle_since) + ANNOUNCED_MARGIN >= timeout)
    }
}

impl Default for ConnectionAge {
    fn default() -> ConnectionAge {
        ConnectionAge::new()
    }
}

/// A connection that may be kept between two requests, and counts as one of its worker's. It goes back and forth
/// between requests and their pool in its box.
pub struct PooledConnection {
    /// The connection.
    pub transport: Transport,
    /// Its past.
    pub age: ConnectionAge,
    /// Its part in `worker_connections`.
    pub counted: CountedConnection,
    /// How long its peer may be silent before an answer: each request sets it anew. It goes with the connection, since
    /// a deadline that moves later costs a tenth of a new timer.
    pub silence: Timer,
}

impl PooledConnection {
    /// Whether nothing has come on it, its end included.
    pub(super) fn is_idle(&self, knowledge: Knowledge) -> bool {
        match knowledge {
            Knowledge::Driver => self.transport.is_idle(),
            Knowledge::Kernel => self.transport.is_idle() && !self.transport.socket().has_input(),
        }
    }

    /// With this past.
    pub fn new(transport: Transport, age: ConnectionAge, counted: CountedConnection) -> Box<PooledConnection> {
        Box::new(PooledConnection { transport, age, counted, silence: Timer::new() })
    }
}

/// By whose word a connection that was used a moment ago is still idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// The driver's, which has not heard otherwise: costs nothing.
    Driver,
    /// The kernel's, asked now: a system call.
    Kernel,
}

/// What is known of a parked connection.
struct Parked {
    age: ConnectionAge,
    /// The session above the socket.
    tls: Option<IdleTls>,
    _counted: ParkedConnection,
    _permit: IdlePermit,
}

/// See the file's head. A clone is the same pool.
#[derive(Clone, Debug)]
pub struct Pool {
    settings: KeepaliveSettings,
    workers: usize,
    permits: IdlePermits,
    streams: IdleStreams<PoolKey, Parked>,
}

/// A pool that others keep.
pub(super) struct WeakPool(WeakIdleStreams<PoolKey, Parked>);

impl WeakPool {
    pub fn is_of(&self, pool: &Pool) -> bool {
        self.0.is_of(&pool.streams)
    }

    /// How many connections the running worker has parked there.
    pub fn own_len(&self) -> usize {
        self.0.upgrade().map_or(0, |streams| streams.own_len())
    }

    /// Closes the connection that the running worker has parked there and that has been idle for longest.
    pub fn close_oldest_own(&self) -> bool {
        self.0.upgrade().is_some_and(|streams| streams.close_oldest_own())
    }
}

impl Pool {
    /// A pool for so many workers.
    ///
    /// # Panics
    /// It is to hold none.
    pub fn new(settings: KeepaliveSettings, workers: usize) -> Pool {
        let KeepaliveSettings { connections, timeout, .. } = settings;
        // How many there are of all workers is a matter of permits.
        let options = IdleOptions { loops: workers, per_loop_max: connections.saturating_mul(workers), timeout };
        Pool { settings, workers, permits: IdlePermits::new(connections, workers), streams: IdleStreams::new(options) }
    }

    /// What is kept.
    pub fn settings(&self) -> &KeepaliveSettings {
        &self.settings
    }

    pub(super) fn is_for(&self, settings: KeepaliveSettings, workers: usize) -> bool {
        self.settings == settings && self.workers == workers
    }

    /// An idle connection with this key, the one that was parked last. One that its peer is about to close is not given
    /// out.
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

    /// Parks a connection that has carried a request more since it was opened or taken; its age counts it. False if it
    /// was closed instead: it has had its requests or its time, or it is not idle.
    pub fn park(&self, worker: &Rc<Worker>, key: PoolKey, mut connection: Box<PooledConnection>) -> bool {
        connection.age.idle_since = now();
        if self.is_spent(&connection.age) {
            return false;
        }
        warm::keep(worker, self, self.own_key(key), connection)
    }

    /// Whether a connection has had its requests or its time, or its peer is about to close it.
    pub(super) fn is_spent(&self, age: &ConnectionAge) -> bool {
        let now = now();
        let KeepaliveSettings { requests_max, time_max, .. } = self.settings;
        age.requests >= requests_max || now.since(age.opened) > time_max || age.is_near_end(now)
    }

    /// Parks a connection for all workers. A session of TLS goes with its socket; what its server sends from now on,
    /// be it a ticket, ends both.
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

    /// Whether both are one pool.
    pub fn is_same(&self, other: &Pool) -> bool {
        self.streams.is_same(&other.streams)
    }

    /// Where its workers keep connections.
    pub(super) fn permits(&self) -> &IdlePermits {
        &self.permits
    }

    /// A permit for a worker that has so many, if need be that of the parked connection that has been idle for longest.
    pub(super) fn take_permit(&self, held: usize) -> bool {
        if !self.permits.are_free() {
            self.streams.close_oldest();
        }
        self.permits.take(held)
    }

    /// Which connections of this pool may stand for each other, where these keys would tell them apart.
    pub fn own_key(&self, key: PoolKey) -> PoolKey {
        PoolKey { user: if self.settings.is_local { key.user } else { 0 }, ..key }
    }

    /// How many connections are parked, without those that a worker keeps warm.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether none is parked.
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use gale_runtime::{ClockChoice, EventLoop, LoopOptions, Stream, sleep};

    use super::*;
    use crate::log::ErrorLog;

    const SETTINGS: KeepaliveSettings = KeepaliveSettings {
        connections: 2,
        is_local: false,
        requests_max: 3,
        time_max: Duration::from_secs(100),
        timeout: Duration::from_secs(3600),
        binds_clients: false,
    };

    /// Connections to one server, whose ends are kept open.
    struct Server {
        listener: TcpListener,
        ends: Vec<TcpStream>,
    }

    impl Server {
        fn start() -> Server {
            Server { listener: TcpListener::bind("127.0.0.1:0").unwrap(), ends: Vec::new() }
        }

        /// A new connection with this past.
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

    /// Until what nobody takes is everybody's.
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

    /// As many as a pool gives a worker, one after the other.
    fn taken_by(worker: &Rc<Worker>, pool: &Pool, key: &PoolKey) -> usize {
        let taken: Vec<_> = std::iter::from_fn(|| pool.take(worker, key, Knowledge::Driver)).collect();
        taken.len()
    }

    #[test]
    fn a_worker_keeps_what_the_others_do_not_need() {
        run(async || {
            let (worker, pool, mut server) = (worker(), Pool::new(SETTINGS, 2), Server::start());
            for _ in 0..5 {
                assert!(pool.park(&worker, server.key(0), server.connect(&worker, carried(1))));
            }
            assert_eq!(taken_by(&worker, &pool, &server.key(0)), 4);
        });
    }

    #[test]
    fn a_worker_keeps_its_own_number_and_others_give_up_what_is_more() {
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
    fn what_a_pool_has_too_many_of_is_closed_and_does_not_cool_down() {
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
            // The older one is not about to be closed.
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
