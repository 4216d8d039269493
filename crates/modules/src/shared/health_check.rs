//! health_check: the common part of active checks in http and stream: parameters, schedule and log messages. The
//! protocol makes the check itself (`Asks`).
//!   health_check [interval=TIME] [jitter=TIME] [fails=N] [passes=N] [match=NAME] [port=N] [mandatory [persistent]]
//!
//! A service of the process runs the checks, with a task for each peer. The engine keeps the results and acts on them
//! ([`gale_upstream::Check`]); the group needs no `zone` for that.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Display;
use std::rc::{Rc, Weak};
use std::time::Duration;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Diagnostic, Span, Statement, Word};
use gale_log::ErrorLog;
use gale_runtime::{Notify, SocketAddress, TaskId, abort, random_u64, sleep, spawn};
use gale_upstream::{BeforeFirstCheck, Check, CheckedPeer, CheckedPeers, HealthChange, Thresholds};
use gale_worker::service::{Context, Service};

use super::limits::invalid_parameter;

/// Default time between two checks.
const INTERVAL_DEFAULT: Duration = Duration::from_secs(5);

/// Interval at which the group is searched for new and removed peers.
const LOOK_FOR_PEERS_EVERY: Duration = Duration::from_secs(1);

/// Maximum number of peers that a check asks at the same time, so that a large group does not use up the worker's
/// connections.
const UNDER_WAY_MAX: usize = 128;

/// Parameters that every check has.
#[derive(Clone)]
pub(crate) struct Rules {
    /// Place of the directive in the configuration.
    pub span: Span,
    pub interval: Duration,
    pub jitter: Duration,
    pub thresholds: Thresholds,
    /// Name of the `match` block.
    pub matches: Option<Word>,
    pub port: Option<u16>,
    pub before: BeforeFirstCheck,
}

impl Rules {
    /// Parses the parameters. `take_own` takes those of the protocol, and returns `false` for all others.
    pub fn parse(
        statement: &Statement,
        mut take_own: impl FnMut(&Word) -> Result<bool, Diagnostic>,
    ) -> Result<Rules, Diagnostic> {
        let mut rules = Rules {
            span: statement.span,
            interval: INTERVAL_DEFAULT,
            jitter: Duration::ZERO,
            thresholds: Thresholds { fails: 1, passes: 1 },
            matches: None,
            port: None,
            before: BeforeFirstCheck::Healthy,
        };
        let mut persistent = None;
        for word in &statement.args {
            if word.text == "persistent" {
                persistent = Some(word);
            } else if !take_own(word)? {
                rules.take(word)?;
            }
        }
        match (persistent, rules.before) {
            (None, _) => {}
            (Some(_), BeforeFirstCheck::Checking) => rules.before = BeforeFirstCheck::CheckingUnlessKnown,
            (Some(word), _) => {
                let error = Diagnostic::emerg("\"persistent\" requires \"mandatory\" parameter").at(word.span);
                return Err(error);
            }
        }
        Ok(rules)
    }

    fn take(&mut self, word: &Word) -> Result<(), Diagnostic> {
        let invalid = || invalid_parameter(word);
        let count = |text| units::parse_number(text).and_then(|count| u32::try_from(count).ok());
        let (name, value) = parameter(word);
        match (name, value) {
            (b"interval", Some(time)) => {
                self.interval = units::parse_time(time).filter(|time| !time.is_zero()).ok_or_else(invalid)?;
            }
            (b"jitter", Some(time)) => self.jitter = units::parse_time(time).ok_or_else(invalid)?,
            (b"fails", Some(text)) => {
                self.thresholds.fails = count(text).filter(|&count| count > 0).ok_or_else(invalid)?;
            }
            (b"passes", Some(text)) => {
                self.thresholds.passes = count(text).filter(|&count| count > 0).ok_or_else(invalid)?;
            }
            (b"match", Some(name)) => self.matches = Some(Word { text: name.into(), ..word.clone() }),
            (b"port", Some(text)) => {
                let port = count(text).and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0);
                self.port = Some(port.ok_or_else(invalid)?);
            }
            (b"mandatory", None) => self.before = BeforeFirstCheck::Checking,
            _ => return Err(invalid()),
        }
        Ok(())
    }

    /// Returns the address at which a peer is checked.
    pub fn address(&self, peer: &CheckedPeer) -> SocketAddress {
        match (peer.address.inet(), self.port) {
            (Some(mut address), Some(port)) => {
                address.set_port(port);
                SocketAddress::Inet(address)
            }
            _ => peer.address.clone(),
        }
    }
}

/// Splits a parameter, `name=value` or a name alone.
pub(crate) fn parameter(word: &Word) -> (&[u8], Option<&[u8]>) {
    let name_end = word.text.iter().position(|&byte| byte == b'=').unwrap_or(word.text.len());
    let (name, value) = word.text.split_at(name_end);
    (name, value.strip_prefix(b"="))
}

/// A protocol's way to check the peers of a group.
pub(crate) trait Asks: 'static {
    /// State kept for a peer between two checks, such as a connection.
    type Kept: Default;

    fn check(&self) -> &Check;

    fn rules(&self) -> &Rules;

    /// Checks a peer once and records the result.
    fn ask(&self, peer: &CheckedPeer, kept: &mut Self::Kept) -> impl Future<Output = ()>;
}

/// Checks the peers of a group repeatedly, until the service is to end.
pub(crate) async fn run<S: Service, A: Asks>(context: &Context<S>, asks: A) {
    let checker = Rc::new(Checker { asks, under_way: Cell::new(0), has_ended: Notify::new() });
    let mut tasks = Tasks::default();
    while !context.is_stopping() {
        tasks.settle(&checker);
        context.unless_stopping(sleep(LOOK_FOR_PEERS_EVERY)).await;
    }
}

/// Tasks of a service, which end with it.
#[derive(Default)]
struct Tasks {
    peers: Option<CheckedPeers>,
    tasks: Vec<Task>,
}

struct Task {
    peer: CheckedPeer,
    id: TaskId,
    /// Valid while the task runs.
    is_running: Weak<()>,
}

impl Tasks {
    /// Starts tasks for new peers and ends those of removed ones. A task that has panicked is started again.
    fn settle<A: Asks>(&mut self, checker: &Rc<Checker<A>>) {
        let has_run_dry = self.tasks.iter().any(|task| task.is_running.strong_count() == 0);
        let check = checker.asks.check();
        if !has_run_dry && self.peers.as_ref().is_some_and(|peers| peers.is_current(check)) {
            return;
        }
        let peers = check.peers();
        let mut known: HashMap<usize, Task> = self.tasks.drain(..).map(|task| (task.peer.key(), task)).collect();
        for peer in peers.iter() {
            let task = known.remove(&peer.key()).filter(|task| task.is_running.strong_count() > 0);
            self.tasks.push(task.unwrap_or_else(|| start(checker, peer)));
        }
        known.into_values().for_each(|task| abort(task.id));
        self.peers = Some(peers);
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.tasks.drain(..).for_each(|task| abort(task.id));
    }
}

fn start<A: Asks>(checker: &Rc<Checker<A>>, peer: CheckedPeer) -> Task {
    let running = Rc::new(());
    let is_running = Rc::downgrade(&running);
    let (checker, own) = (Rc::clone(checker), peer.clone());
    let id = spawn(async move {
        let _running = running;
        checker.check_peer(&own).await;
    });
    Task { peer, id, is_running }
}

/// State that the tasks of a service share.
struct Checker<A> {
    asks: A,
    /// Number of checks in flight.
    under_way: Cell<usize>,
    /// Notified when a check ends.
    has_ended: Notify,
}

impl<A: Asks> Checker<A> {
    /// Checks one peer for as long as the task runs.
    async fn check_peer(&self, peer: &CheckedPeer) {
        let (interval, jitter) = (self.asks.rules().interval, self.asks.rules().jitter);
        let mut kept = A::Kept::default();
        loop {
            if !jitter.is_zero() {
                let most = u64::try_from(jitter.as_millis()).unwrap_or(u64::MAX).max(1);
                sleep(Duration::from_millis(random_u64() % most)).await;
            }
            let permit = self.permit().await;
            self.asks.ask(peer, &mut kept).await;
            drop(permit);
            sleep(interval).await;
        }
    }

    /// Waits until another check may begin.
    async fn permit(&self) -> Permit<'_> {
        while self.under_way.get() >= UNDER_WAY_MAX {
            self.has_ended.notified().await;
        }
        self.under_way.set(self.under_way.get() + 1);
        Permit { under_way: &self.under_way, has_ended: &self.has_ended }
    }
}

/// Permit for a check in flight; dropping it lets another check begin.
struct Permit<'c> {
    under_way: &'c Cell<usize>,
    has_ended: &'c Notify,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.under_way.set(self.under_way.get() - 1);
        self.has_ended.notify_one();
    }
}

/// Reason why a peer failed a check.
pub(crate) struct Failed {
    /// The error, with the action that failed.
    pub text: String,
    /// The action that failed.
    pub action: &'static str,
}

/// Log of a check, with the context that follows each message.
pub(crate) struct CheckLog<'l> {
    pub log: &'l ErrorLog,
    pub check: &'l Check,
    pub peer: &'l CheckedPeer,
    /// Name of the `match` block; empty for none.
    pub matches: &'l BStr,
}

impl CheckLog<'_> {
    pub fn write(&self, level: Level, message: &dyn Display) {
        let (name, peer, group) = (self.matches, &self.peer.name, self.check.group().name());
        let message = format_args!("{message}, health check \"{name}\" of peer {peer} in upstream \"{group}\"");
        self.log.write(level, None, &message);
    }

    /// Records the result of a check and logs it.
    pub fn note(&self, result: Result<(), Failed>, thresholds: Thresholds) {
        let CheckLog { check, peer, .. } = self;
        // A peer that stays unhealthy is logged once.
        let is_known = check.finds_ill(peer);
        if let Err(failed) = &result {
            self.write(if is_known { Level::Info } else { Level::Error }, &failed.text);
        }
        match check.note(peer, result.is_ok(), thresholds) {
            HealthChange::None => {}
            HealthChange::Ill => {
                let action = result.map_or_else(|failed| failed.action, |()| "");
                self.write(Level::Warn, &format_args!("peer is unhealthy while {action}"));
            }
            HealthChange::Well => self.write(Level::Notice, &"peer is healthy"),
        }
    }
}
