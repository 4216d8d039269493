//! Service that fetches OCSP responses for the server's certificates. No handshake waits for it.
//!
//! As in nginx a response is fetched again five minutes before its validity ends, but after at least five minutes and
//! at most an hour; after a failure, in five minutes.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::wall_seconds;
use gale_worker::Worker;
use gale_worker::service::{Context, Service};

use super::message::{self, CertificateId, CertificateStatus};
use super::responder;
use crate::managed::Current;
use crate::staple::{ManagedStaple, Staple, StapleSource};

/// Queries in flight at a time.
const LANES: usize = 8;

/// Interval of the check for due certificates.
const PERIOD: Duration = Duration::from_secs(1);

/// Shortest pause, also after a failure, in seconds.
const PAUSE_MIN: u64 = 300;

/// Longest pause, in seconds.
const PAUSE_MAX: u64 = 3600;

/// Certificates of a configuration that have responders.
pub struct Stapling {
    /// Certificates from files, each once.
    pub staples: Vec<Arc<Staple>>,
    /// Certificates that services obtain.
    pub managed: Vec<Arc<ManagedStaple>>,
}

/// A certificate and the time of its next query.
struct Item<'s> {
    of: Asked<'s>,
    due: Cell<u64>,
}

/// Certificate to query.
enum Asked<'s> {
    /// A certificate from a file.
    One(&'s Staple),
    /// A managed certificate, and its version at the last query.
    Managed(&'s ManagedStaple, RefCell<Weak<Current>>),
}

impl Service for Stapling {
    async fn run(context: Context<Stapling>) {
        let staples = context.settings();
        let now = wall_seconds();
        let one = |staple: &'_ Arc<Staple>| first_due(staple.valid_until(), now);
        let items = staples.staples.iter().map(|staple| Item { of: Asked::One(staple), due: Cell::new(one(staple)) });
        let managed = staples.managed.iter();
        let managed = managed.map(|staple| Item { of: Asked::Managed(staple, RefCell::default()), due: Cell::new(0) });
        let items: Vec<Item<'_>> = items.chain(managed).collect();
        while !context.is_stopping() {
            let now = wall_seconds();
            let wanted: Vec<&Item<'_>> = items.iter().filter(|item| item.is_due(now)).collect();
            let next = Cell::new(0);
            let lane = async || {
                while let Some(item) = wanted.get(next.replace(next.get() + 1)) {
                    item.due.set(item.refresh(&context).await);
                }
            };
            if !wanted.is_empty() {
                let lanes: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> =
                    (0..LANES.min(wanted.len())).map(|_| Box::pin(lane()) as Pin<Box<_>>).collect();
                context.unless_stopping(all(lanes)).await;
            }
            context.unless_stopping(gale_runtime::sleep(PERIOD)).await;
        }
    }
}

/// Waits for all of these futures.
async fn all(mut futures: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>) {
    poll_fn(|context| {
        futures.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if futures.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Time of the first fetch: at once, unless an earlier configuration has fetched a response.
fn first_due(valid_until: Option<u64>, now: u64) -> u64 {
    valid_until.map_or(0, |valid_until| next_due(valid_until, now).min(now + PAUSE_MIN))
}

fn next_due(valid_until: u64, now: u64) -> u64 {
    valid_until.saturating_sub(PAUSE_MIN).min(now + PAUSE_MAX).max(now + PAUSE_MIN)
}

impl Item<'_> {
    /// `true` if a query is due; a newly obtained certificate is due at once.
    fn is_due(&self, now: u64) -> bool {
        if let Asked::Managed(staple, last) = &self.of {
            let Some(current) = staple.current() else { return false };
            let mut last = last.borrow_mut();
            if last.as_ptr() != Arc::as_ptr(&current) {
                *last = Arc::downgrade(&current);
                self.due.set(first_due(current.stapled_until(), now));
            }
        }
        self.due.get() <= now
    }

    /// Fetches a response and returns when the next one is due.
    async fn refresh(&self, context: &Context<Stapling>) -> u64 {
        match &self.of {
            Asked::One(staple) => match &staple.source {
                Some(source) => {
                    refresh(source, context, |response, valid_until| staple.set(response, valid_until)).await
                }
                None => u64::MAX,
            },
            Asked::Managed(staple, last) => {
                // A certificate that was replaced meanwhile is due at once.
                let Some(current) = last.borrow().upgrade() else { return 0 };
                match staple.source(&current) {
                    Ok(source) => {
                        refresh(&source, context, |response, valid_until| current.staple(response, valid_until)).await
                    }
                    Err(why) => {
                        context.log(Level::Warn, format!("\"ssl_stapling\" ignored, {why}"));
                        u64::MAX
                    }
                }
            }
        }
    }
}

async fn refresh(source: &StapleSource, context: &Context<Stapling>, set: impl FnOnce(Vec<u8>, u64)) -> u64 {
    let fetched = fetch(context.worker(), source).await;
    let now = wall_seconds();
    match fetched {
        Ok((response, valid_until)) => {
            set(response, valid_until);
            next_due(valid_until, now)
        }
        Err(message) => {
            let (host, name) = (&source.responder.host, &source.name);
            let message =
                format!("{message} while requesting certificate status, responder: {host}, certificate: \"{name}\"");
            context.log(Level::Error, message);
            now + PAUSE_MIN
        }
    }
}

async fn fetch(worker: &Rc<Worker>, source: &StapleSource) -> Result<(Vec<u8>, u64), String> {
    let id = CertificateId::of(&source.certificate, &source.issuer).ok_or("the certificate cannot be read")?;
    let response = responder::ask(worker, &source.responder, &source.lookup, &id.request()).await;
    let response = response.map_err(|error| error.to_string())?;
    let issuer = source.verifies.then_some(&*source.issuer);
    let told = message::read_response(&response, &id, issuer, wall_seconds()).map_err(|fault| fault.to_string())?;
    match told.status {
        CertificateStatus::Good => Ok((response, told.valid_until)),
        status => Err(format!("certificate status \"{status}\" in the OCSP response")),
    }
}
