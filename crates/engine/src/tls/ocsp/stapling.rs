//! The service that fetches what responders say of the server's certificates. No handshake ever waits for it.
//!
//! As with nginx a response is fetched again five minutes before it ends, in an hour at the latest, and in five minutes
//! at the earliest; and five minutes after a failure.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::wall_seconds;

use super::message::{self, CertificateId, CertificateStatus};
use super::responder;
use crate::service::{Context, Service};
use crate::tls::staple::{Staple, StapleSource};
use crate::worker::Worker;

/// How many responders are asked at a time.
const LANES: usize = 8;

/// How often it is looked what is due.
const PERIOD: Duration = Duration::from_secs(1);

/// The pause after a failure, and the shortest one, in seconds.
const PAUSE_MIN: u64 = 300;

/// The longest pause, in seconds.
const PAUSE_MAX: u64 = 3600;

/// The certificates of a configuration that have responders.
pub struct Stapling {
    /// Each once.
    pub staples: Vec<Arc<Staple>>,
}

impl Service for Stapling {
    async fn run(context: Context<Stapling>) {
        let staples = context.settings();
        let due: Vec<Cell<u64>> = staples.staples.iter().map(|staple| Cell::new(first_due(staple))).collect();
        while !context.is_stopping() {
            let now = wall_seconds();
            let wanted: Vec<usize> = (0..due.len()).filter(|&index| due[index].get() <= now).collect();
            let next = Cell::new(0);
            let lane = async || {
                while let Some(&index) = wanted.get(next.replace(next.get() + 1)) {
                    due[index].set(refresh(&staples.staples[index], &context).await);
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

/// Waits for all of these.
async fn all(mut futures: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>) {
    poll_fn(|context| {
        futures.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if futures.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// When a response is fetched first: at once, unless an earlier configuration has fetched one.
fn first_due(staple: &Staple) -> u64 {
    let now = wall_seconds();
    staple.valid_until().map_or(0, |valid_until| next_due(valid_until, now).min(now + PAUSE_MIN))
}

fn next_due(valid_until: u64, now: u64) -> u64 {
    valid_until.saturating_sub(PAUSE_MIN).min(now + PAUSE_MAX).max(now + PAUSE_MIN)
}

/// Fetches a response; says when the next one is due.
async fn refresh(staple: &Arc<Staple>, context: &Context<Stapling>) -> u64 {
    let Some(source) = &staple.source else { return u64::MAX };
    let fetched = fetch(context.worker(), source).await;
    let now = wall_seconds();
    match fetched {
        Ok((response, valid_until)) => {
            staple.set(response, valid_until);
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
