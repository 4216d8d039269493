//! Asynchronous name resolution at run time: the directive `resolver`.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#resolver>)
//!
//! ```text
//! resolve(name) ─► cache ─► known ───────────────────────────────────► answer
//!                    │ no     ▲                                          ▲
//!                    ▼        └──────────────┐                           │
//!                 lookup of this name ─► task asks the servers ─► all that wait for it
//! ```
//!
//! Each event loop has its own resolvers, caches and sockets, as each worker process of nginx has. Concurrent requests
//! for one name share a single lookup, which continues when one of them gives up. A reload keeps the cache unless the
//! directive changed. As in nginx `/etc/hosts` and `/etc/resolv.conf` are never read.

mod asking;
mod cache;
mod figures;
#[doc(hidden)]
pub mod fuzzing;
mod message;
mod settings;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_runtime::Moment;
use slab::Slab;

use self::asking::{Asked, Report, ask};
use self::cache::Cache;
pub use self::figures::{ResolverFigures, ResolverZone};
use self::message::{Content, DnsName, Kind, Service};
pub use self::settings::NameServer;
pub use self::settings::ResolverSettings;
use gale_base::log_level::Level;
use gale_log::ErrorLog;

/// Most names in a resolver's cache: more than a server has upstreams, and at most some megabytes if untrusted clients
/// choose them.
const NAMES_MAX: usize = 4096;

/// Most resolvers that a loop keeps although no configuration may refer to them.
const KEPT_MAX: usize = 64;

/// Most concurrent lookups; each has a socket.
const LOOKUPS_MAX: usize = 512;

/// Most aliases followed from name to name, as in nginx.
const ALIASES_MAX: usize = 50;

/// Longest time that a negative answer is cached; the zone may shorten it. It is the time after which nginx lets
/// periodic queries ask again.
const NOTHING_VALID_MAX: Duration = Duration::from_secs(10);

/// Most servers of one service.
const SERVICES_MAX: usize = 64;

/// Reason why a name has no address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ResolveError {
    /// The name servers failed.
    ServerFailure,
    /// The name, or a record of the requested kind, does not exist.
    NotFound,
    /// The name server does not support the query.
    Unimplemented,
    /// The name server refused the query.
    Refused,
    /// No response in time.
    TimedOut,
    /// Too many concurrent lookups.
    Busy,
}

/// nginx's words: `3: Host not found`.
impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ResolveError::ServerFailure => "2: Server failure",
            ResolveError::NotFound => "3: Host not found",
            ResolveError::Unimplemented => "4: Unimplemented",
            ResolveError::Refused => "5: Operation refused",
            ResolveError::TimedOut => "110: Operation timed out",
            ResolveError::Busy => "11: Too many names are being resolved",
        })
    }
}

impl std::error::Error for ResolveError {}

/// Result of a lookup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolved<T> {
    /// Never empty; rotated for each caller.
    pub found: Vec<T>,
    /// Time of expiry; `None` for never.
    pub valid_until: Option<Moment>,
}

/// A server of a service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServiceAddress {
    /// Its address.
    pub address: SocketAddr,
    /// Its name.
    pub name: Arc<str>,
    /// Priority; lower values are used first.
    pub priority: u16,
    /// Weight among servers of the same priority.
    pub weight: u16,
}

/// Resolvers of one event loop.
#[derive(Default)]
pub struct Resolvers(Vec<(Arc<ResolverSettings>, Rc<Resolver>)>);

impl Resolvers {
    /// The resolver of a directive, created when first needed. Directives with the same settings share one, also with
    /// those of a configuration that was replaced.
    pub fn get(&mut self, settings: &Arc<ResolverSettings>, log: &Arc<ErrorLog>) -> Rc<Resolver> {
        if let Some((_, known)) = self.0.iter().find(|(known, _)| Arc::ptr_eq(known, settings)) {
            return Rc::clone(known);
        }
        let servers = Servers::of(settings);
        let same = self.0.iter().find(|(_, known)| known.servers == servers);
        let resolver = same.map_or_else(|| Resolver::of(servers, log), |(_, known)| Rc::clone(known));
        // Messages go to the newest configuration's log.
        resolver.log.replace(Arc::clone(log));
        // Keeps those of configurations still in use and some more, so that a reload finds all of them again in any
        // order.
        if self.0.len() >= KEPT_MAX {
            self.0.retain(|(settings, _)| Arc::strong_count(settings) > 1);
        }
        self.0.push((Arc::clone(settings), Rc::clone(&resolver)));
        resolver
    }
}

/// Settings of a directive, after the names of servers were resolved.
#[derive(PartialEq, Eq)]
struct Servers {
    addresses: Vec<SocketAddr>,
    valid: Option<Duration>,
    kinds: &'static [Kind],
    counted: Option<Counted>,
}

/// Counters of questions and responses; zones are equal only if identical.
struct Counted(Arc<ResolverZone>);

impl PartialEq for Counted {
    fn eq(&self, other: &Counted) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Counted {}

impl Servers {
    fn of(settings: &ResolverSettings) -> Servers {
        let kinds: &[Kind] = match (settings.ipv4, settings.ipv6) {
            (true, true) => &[Kind::A, Kind::Aaaa],
            (true, false) => &[Kind::A],
            _ => &[Kind::Aaaa],
        };
        let counted = settings.zone.clone().map(Counted);
        Servers { addresses: settings.servers(), valid: settings.valid, kinds, counted }
    }
}

/// A resolver: its name servers and its cache.
pub struct Resolver {
    servers: Servers,
    log: RefCell<Arc<ErrorLog>>,
    cache: RefCell<Cache<Key, Rc<Found>>>,
    lookups: RefCell<HashMap<Key, Rc<Lookup>>>,
    /// Server that the next lookup asks first.
    next_server: Cell<usize>,
}

/// Subject of a lookup.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    name: DnsName,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum What {
    Addresses,
    Services,
    Pointer,
}

/// Result in the cache.
enum Found {
    Addresses {
        v4: Vec<IpAddr>,
        v6: Vec<IpAddr>,
    },
    Services(Vec<Service>),
    Pointer(DnsName),
    Alias(DnsName),
    /// No records.
    Nothing,
}

/// A result and its expiry.
#[derive(Clone)]
struct Known {
    found: Rc<Found>,
    until: Moment,
}

type Outcome = Result<Known, ResolveError>;

impl Resolver {
    /// Creates a resolver of these settings on the running loop. Usually [`Resolvers::get`] does.
    pub fn new(settings: &ResolverSettings, log: &Arc<ErrorLog>) -> Rc<Resolver> {
        Self::of(Servers::of(settings), log)
    }

    fn of(servers: Servers, log: &Arc<ErrorLog>) -> Rc<Resolver> {
        Rc::new(Resolver {
            servers,
            log: RefCell::new(Arc::clone(log)),
            cache: RefCell::new(Cache::new(NAMES_MAX)),
            lookups: RefCell::default(),
            next_server: Cell::new(0),
        })
    }

    /// Resolves a name, or parses it if it is an address. A `time_max` of zero means no timeout.
    ///
    /// # Errors
    /// Why there are no addresses.
    pub async fn resolve(self: &Rc<Self>, name: &[u8], time_max: Duration) -> Result<Resolved<IpAddr>, ResolveError> {
        if let Some(address) = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok()) {
            return Ok(Resolved { found: vec![address], valid_until: None });
        }
        let name = DnsName::from_text(name).ok_or(ResolveError::NotFound)?;
        within(time_max, self.addresses(name)).await
    }

    /// Resolves a service (SRV): `http` of `example.com` is `_http._tcp.example.com`; `_x._udp` is used as it is. Lower
    /// priority numbers come first; within a priority the first server is drawn by weight. A `time_max` of zero means
    /// no timeout.
    ///
    /// # Errors
    /// Why there are no servers.
    pub async fn resolve_service(
        self: &Rc<Self>,
        name: &[u8],
        service: &[u8],
        time_max: Duration,
    ) -> Result<Resolved<ServiceAddress>, ResolveError> {
        let full = match service.contains(&b'.') {
            true => [service, b".", name].concat(),
            false => [b"_", service, b"._tcp.", name].concat(),
        };
        let name = DnsName::from_text(&full).ok_or(ResolveError::NotFound)?;
        within(time_max, self.service_addresses(name)).await
    }

    /// Resolves the name of an address (PTR). A `time_max` of zero means no timeout.
    ///
    /// # Errors
    /// Why there is no name.
    pub async fn resolve_address(self: &Rc<Self>, address: IpAddr, time_max: Duration) -> Result<String, ResolveError> {
        let key = Key { name: DnsName::of_address(address), what: What::Pointer };
        let known = within(time_max, self.follow(key)).await?;
        match &*known.found {
            Found::Pointer(name) => Ok(name.to_string()),
            _ => Err(ResolveError::NotFound),
        }
    }

    async fn addresses(self: &Rc<Self>, name: DnsName) -> Result<Resolved<IpAddr>, ResolveError> {
        let known = self.follow(Key { name, what: What::Addresses }).await?;
        let Found::Addresses { v4, v6 } = &*known.found else { return Err(ResolveError::NotFound) };
        let (mut v4, mut v6) = (v4.clone(), v6.clone());
        rotate(&mut v4);
        rotate(&mut v6);
        let mut found = [v4, v6].concat();
        rotate(&mut found);
        Ok(Resolved { found, valid_until: Some(known.until) })
    }

    async fn service_addresses(self: &Rc<Self>, name: DnsName) -> Result<Resolved<ServiceAddress>, ResolveError> {
        let known = self.follow(Key { name, what: What::Services }).await?;
        let Found::Services(services) = &*known.found else { return Err(ResolveError::NotFound) };
        let services: Vec<&Service> =
            services.iter().filter(|service| !service.target.is_root()).take(SERVICES_MAX).collect();
        // Starts all lookups before awaiting the first.
        for service in &services {
            let key = Key { name: service.target.clone(), what: What::Addresses };
            if self.known(&key).is_none() {
                // The loop below reports the error.
                let _ = self.lookup(&key);
            }
        }
        let (mut found, mut valid_until, mut error) = (Vec::new(), known.until, ResolveError::NotFound);
        for service in services {
            match self.addresses(service.target.clone()).await {
                Ok(addresses) => {
                    valid_until = addresses.valid_until.map_or(valid_until, |until| until.min(valid_until));
                    found.push((service, addresses.found));
                }
                Err(other) => error = other,
            }
        }
        if found.is_empty() {
            return Err(error);
        }
        found.sort_by_key(|(service, _)| service.priority);
        for same in found.chunk_by_mut(|one, other| one.0.priority == other.0.priority) {
            draw_first(same);
        }
        let servers = found.into_iter().flat_map(|(service, addresses)| {
            let name: Arc<str> = service.target.to_string().into();
            let Service { port, priority, weight, .. } = *service;
            addresses.into_iter().map(move |ip| ServiceAddress {
                address: SocketAddr::new(ip, port),
                name: Arc::clone(&name),
                priority,
                weight,
            })
        });
        Ok(Resolved { found: servers.collect(), valid_until: Some(valid_until) })
    }

    /// Looks up a name and follows its aliases.
    async fn follow(self: &Rc<Self>, mut key: Key) -> Outcome {
        let mut until: Option<Moment> = None;
        for _ in 0..=ALIASES_MAX {
            let mut known = self.look_up(&key).await?;
            known.until = until.map_or(known.until, |until| until.min(known.until));
            let Found::Alias(target) = &*known.found else { return Ok(known) };
            key.name = target.clone();
            until = Some(known.until);
        }
        Err(ResolveError::NotFound)
    }

    async fn look_up(self: &Rc<Self>, key: &Key) -> Outcome {
        match self.known(key) {
            Some(known) => Ok(known),
            None => Waiting { lookup: self.lookup(key)?, place: None }.await,
        }
    }

    fn known(&self, key: &Key) -> Option<Known> {
        let mut cache = self.cache.borrow_mut();
        let (found, until) = cache.get(key, gale_runtime::now())?;
        Some(Known { found: Rc::clone(found), until })
    }

    /// The lookup of a name: the one in progress, or a new one.
    fn lookup(self: &Rc<Self>, key: &Key) -> Result<Rc<Lookup>, ResolveError> {
        let mut lookups = self.lookups.borrow_mut();
        if let Some(lookup) = lookups.get(key) {
            return Ok(Rc::clone(lookup));
        }
        if self.servers.addresses.is_empty() || lookups.len() >= LOOKUPS_MAX {
            return Err(ResolveError::Busy);
        }
        let lookup = Rc::new(Lookup::default());
        lookups.insert(key.clone(), Rc::clone(&lookup));
        let first = self.next_server.get();
        self.next_server.set((first + 1) % self.servers.addresses.len());
        let end = LookupEnd { resolver: Rc::clone(self), key: key.clone(), lookup: Rc::clone(&lookup) };
        gale_runtime::spawn(async move { end.resolver.run_lookup(&end, first).await });
        Ok(lookup)
    }

    async fn run_lookup(&self, end: &LookupEnd, first: usize) {
        let LookupEnd { key, lookup, .. } = end;
        let kinds = match key.what {
            What::Addresses => self.servers.kinds,
            What::Services => &[Kind::Srv],
            What::Pointer => &[Kind::Ptr],
        };
        let mut asked: Asked = kinds.iter().map(|&kind| (kind, None)).collect();
        if let Some(zone) = self.servers.zone() {
            kinds.iter().for_each(|&kind| zone.count_question(kind));
        }
        if ask(&self.servers.addresses, first, &key.name, &mut asked, &(self, &**lookup)).await {
            lookup.finish(self.conclude(key, asked));
        }
    }

    /// Combines the answers to all questions about a name, caches the outcome and returns it. As in nginx an error of
    /// one kind is an error of the name, addresses of one kind suffice, and otherwise the last answer counts: that of
    /// IPv6, if it was asked for.
    fn conclude(&self, key: &Key, asked: Asked) -> Outcome {
        let now = gale_runtime::now();
        let (mut v4, mut v6, mut last, mut error) = (Vec::new(), Vec::new(), Found::Nothing, None);
        // Positive and negative answers have different times to live.
        let (mut ttl, mut nothing_ttl) = (Duration::MAX, Duration::MAX);
        for (kind, answer) in asked {
            let answer = answer.expect("all have been answered");
            if let Some(zone) = self.servers.zone() {
                zone.count_answer(&answer.content);
            }
            let is_nothing = matches!(answer.content, Content::Nothing | Content::Error(_));
            let ttl = if is_nothing { &mut nothing_ttl } else { &mut ttl };
            // Not cached if the zone gives no time to live. (RFC 2308 §5)
            *ttl = (*ttl).min(answer.ttl.unwrap_or_default());
            match answer.content {
                Content::Addresses(addresses) if kind == Kind::A => v4 = addresses,
                Content::Addresses(addresses) => v6 = addresses,
                Content::Alias(name) => last = Found::Alias(name),
                Content::Pointer(name) => last = Found::Pointer(name),
                Content::Services(services) => last = Found::Services(services),
                Content::Nothing => last = Found::Nothing,
                Content::Error(code) => error = Some(code),
                Content::Truncated => unreachable!("a truncated answer is asked for again over TCP"),
            }
        }
        let found = match error {
            Some(ResolveError::NotFound) => Found::Nothing,
            Some(error) => return Err(error),
            None if v4.is_empty() && v6.is_empty() => last,
            None => Found::Addresses { v4, v6 },
        };
        let valid = match &found {
            Found::Nothing => nothing_ttl.min(NOTHING_VALID_MAX),
            // `valid=0` keeps the answer's time to live, as in nginx.
            _ => self.servers.valid.filter(|valid| !valid.is_zero()).unwrap_or(ttl),
        };
        let known = Known { found: Rc::new(found), until: now + valid };
        if !valid.is_zero() {
            self.cache.borrow_mut().insert(key.clone(), Rc::clone(&known.found), known.until, now);
        }
        Ok(known)
    }
}

/// Reports for a lookup.
impl Report for (&Resolver, &Lookup) {
    fn report(&self, level: Level, message: &dyn fmt::Display, server: SocketAddr) {
        let log = Arc::clone(&self.0.log.borrow());
        log.write(level, None, &format_args!("{message}, resolver: {server}"));
    }

    fn note_silence(&self) {
        if let Some(zone) = self.0.servers.zone() {
            zone.count_silence();
        }
    }

    fn is_wanted(&self) -> bool {
        !self.1.waiters.borrow().is_empty()
    }
}

/// A lookup in progress and its waiters. Each waiter is a task of a request, so the limit on requests bounds them.
#[derive(Default)]
struct Lookup {
    outcome: OnceCell<Outcome>,
    waiters: RefCell<Slab<Waker>>,
}

impl Lookup {
    /// Sets the outcome and wakes the waiters; the first outcome counts.
    fn finish(&self, outcome: Outcome) {
        if self.outcome.set(outcome).is_ok() {
            self.waiters.borrow().iter().for_each(|(_, waker)| waker.wake_by_ref());
        }
    }
}

/// Guard that ends a lookup, however its task ends.
struct LookupEnd {
    resolver: Rc<Resolver>,
    key: Key,
    lookup: Rc<Lookup>,
}

impl Drop for LookupEnd {
    fn drop(&mut self) {
        self.resolver.lookups.borrow_mut().remove(&self.key);
        // Only has an effect if the task panicked or was aborted.
        self.lookup.finish(Err(ResolveError::ServerFailure));
    }
}

/// Future that waits for a lookup.
struct Waiting {
    lookup: Rc<Lookup>,
    place: Option<usize>,
}

impl Future for Waiting {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Some(outcome) = self.lookup.outcome.get() {
            return Poll::Ready(outcome.clone());
        }
        let waker = cx.waker().clone();
        let place = match self.place {
            Some(place) => {
                self.lookup.waiters.borrow_mut()[place] = waker;
                place
            }
            None => self.lookup.waiters.borrow_mut().insert(waker),
        };
        self.place = Some(place);
        Poll::Pending
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.lookup.waiters.borrow_mut().remove(place);
        }
    }
}

async fn within<T>(time_max: Duration, work: impl Future<Output = Result<T, ResolveError>>) -> Result<T, ResolveError> {
    if time_max.is_zero() {
        return work.await;
    }
    gale_runtime::timeout(time_max, work).await.unwrap_or(Err(ResolveError::TimedOut))
}

/// Rotates the list to a random beginning.
fn rotate<T>(list: &mut [T]) {
    if !list.is_empty() {
        list.rotate_left((gale_runtime::random_u64() % list.len() as u64) as usize);
    }
}

/// Moves an element drawn by weight to the front. (RFC 2782; without weights, the first)
fn draw_first(list: &mut [(&Service, Vec<IpAddr>)]) {
    let weight = |(service, addresses): &(&Service, Vec<IpAddr>)| u64::from(service.weight) * addresses.len() as u64;
    let total: u64 = list.iter().map(weight).sum();
    if total == 0 {
        return;
    }
    let mut drawn = gale_runtime::random_u64() % total;
    let first = list.iter().position(|entry| {
        let is_it = drawn < weight(entry);
        drawn = drawn.saturating_sub(weight(entry));
        is_it
    });
    list.rotate_left(first.unwrap_or(0));
}
