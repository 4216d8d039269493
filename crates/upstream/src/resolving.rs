//! Repeated resolution of server names (`resolve`, `service`): a service in the process for each server.
//!
//! A changed response gives the group a new list of peers. Requests in flight go on with their list. If resolution
//! fails, the name keeps its addresses; a name that no longer exists has none.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_resolver::{ResolveError, ResolverSettings};
use gale_runtime::{Moment, default_pool, now, sleep};
use gale_worker::service::{Context, Service};

use super::plan::{Found, FoundService};
use super::{Balance, Group};

/// Shortest pause after a failure.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);

/// Pause for a name that does not exist, unless `valid=` overrides it.
const ASK_FOR_NOTHING_AFTER: Duration = Duration::from_secs(10);

/// Delay after the expiry, since name servers count in whole seconds.
const ASK_LATER_BY: Duration = Duration::from_secs(1);

/// Longest list that is built on the event loop; longer ones are built in a thread pool.
const PEERS_ON_LOOP_MAX: usize = 256;

/// Most addresses of a name.
const FOUND_MAX: usize = 4096;

/// Service that keeps a server's addresses up to date.
pub(super) struct Refresh {
    pub group: Arc<Group>,
    /// Index among the group's resolved servers.
    pub index: usize,
    pub resolver: Arc<ResolverSettings>,
    /// `resolver_timeout`
    pub timeout: Duration,
}

impl Service for Refresh {
    async fn run(context: Context<Refresh>) {
        while !context.is_stopping() {
            let settings = context.settings();
            let Some(pause) = context.unless_stopping(settings.refresh(&context)).await else { return };
            drop(settings);
            context.unless_stopping(sleep(pause)).await;
        }
    }
}

impl Refresh {
    /// Resolves once; returns the pause until the next time.
    async fn refresh(&self, context: &Context<Refresh>) -> Duration {
        match self.ask(context).await {
            Ok((found, valid_until)) => {
                self.take(found).await;
                valid_until.map_or(ASK_FOR_NOTHING_AFTER, |until| until.since(now()) + ASK_LATER_BY)
            }
            Err(error) => {
                self.complain(context, error);
                if error == ResolveError::NotFound {
                    self.take(Vec::new()).await;
                    return self.resolver.valid.unwrap_or(ASK_FOR_NOTHING_AFTER).max(RETRY_AFTER_MIN);
                }
                self.timeout.max(RETRY_AFTER_MIN)
            }
        }
    }

    async fn ask(&self, context: &Context<Refresh>) -> Result<(Vec<Found>, Option<Moment>), ResolveError> {
        let server = &self.group.plan.resolved[self.index];
        let resolver = context.worker().resolver(&self.resolver);
        let host = server.host.as_bytes();
        let Some(service) = &server.service else {
            let answer = resolver.resolve(host, self.timeout).await?;
            let found = answer.found.into_iter().map(|ip| Found { ip, service: None });
            return Ok((found.take(FOUND_MAX).collect(), answer.valid_until));
        };
        let answer = resolver.resolve_service(host, service.as_bytes(), self.timeout).await?;
        let first = answer.found.iter().map(|address| address.priority).min();
        let found = answer.found.into_iter().map(|server| {
            let is_secondary = Some(server.priority) != first;
            let (port, name, weight) = (server.address.port(), server.name, server.weight);
            Found { ip: server.address.ip(), service: Some(FoundService { port, name, weight, is_secondary }) }
        });
        Ok((found.take(FOUND_MAX).collect(), answer.valid_until))
    }

    fn complain(&self, context: &Context<Refresh>, error: ResolveError) {
        let server = &self.group.plan.resolved[self.index];
        let (host, code) = (&server.host, error.to_string());
        let reason = match code.split_once(": ") {
            Some((number, text)) => format!("({number}: {text})"),
            None => format!("({code})"),
        };
        let message = match &server.service {
            Some(service) => format!("service {service} of {host} could not be resolved {reason}"),
            None => format!("{host} could not be resolved {reason}"),
        };
        context.log(Level::Error, message);
    }

    /// Gives the group these addresses.
    async fn take(&self, found: Vec<Found>) {
        let count = found.len() + self.group.peer_count();
        let Some(version) = self.group.note_found(self.index, |earlier| in_order_of(earlier, found)) else { return };
        let group = Arc::clone(&self.group);
        // A consistent hash has many points for each peer.
        if count <= PEERS_ON_LOOP_MAX && group.plan.balance != Balance::ConsistentHash {
            group.renew(version);
        } else {
            // If the pool is full, the list is built here.
            let task = Arc::clone(&group);
            if default_pool().run(move || task.renew(version)).await.is_err() {
                group.renew(version);
            }
        }
    }
}

/// Sorts addresses: known ones in their previous order, then new ones.
fn in_order_of(earlier: &[Found], mut found: Vec<Found>) -> Vec<Found> {
    let places: HashMap<&Found, usize> = earlier.iter().zip(0..).collect();
    // The sort is stable, so new ones keep their order.
    found.sort_by_key(|found| places.get(found).copied().unwrap_or(usize::MAX));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(addresses: &[u8]) -> Vec<Found> {
        addresses.iter().map(|&last| Found { ip: [127, 0, 0, last].into(), service: None }).collect()
    }

    #[test]
    fn addresses_that_stay_keep_their_places() {
        assert_eq!(in_order_of(&found(&[1, 2, 3]), found(&[4, 3, 5, 1])), found(&[1, 3, 4, 5]));
        assert_eq!(in_order_of(&[], found(&[2, 1])), found(&[2, 1]));
    }
}
