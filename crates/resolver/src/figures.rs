//! Counters of name servers: questions by kind, responses by result. (`status_zone=`)

use gale_base::tally::Tally;

use super::message::{Content, Kind};
use super::{ResolveError, Servers};

/// Counters of questions and responses, in the order of the figures.
#[derive(Clone, Copy)]
enum Counter {
    Names,
    Services,
    Addresses,
    NoError,
    ServerFailure,
    NotFound,
    Unimplemented,
    Refused,
    TimedOut,
}

const COUNTERS: usize = 9;

/// Counters of name servers.
#[derive(Debug, Default)]
pub struct ResolverZone(Tally<COUNTERS>);

/// Figures of name servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResolverFigures {
    /// Questions for addresses of names (A, AAAA).
    pub names: u64,
    /// Questions for services (SRV).
    pub services: u64,
    /// Questions for names of addresses (PTR).
    pub addresses: u64,
    /// Responses with the requested data.
    pub no_error: u64,
    /// Responses: server failure.
    pub server_failure: u64,
    /// Responses: name not found.
    pub not_found: u64,
    /// Responses: not implemented.
    pub unimplemented: u64,
    /// Responses: query refused.
    pub refused: u64,
    /// Attempts that timed out.
    pub timed_out: u64,
}

impl ResolverZone {
    fn count(&self, counter: Counter) {
        self.0.own().add(counter as usize, 1);
    }

    pub(super) fn count_question(&self, kind: Kind) {
        self.count(match kind {
            Kind::Srv => Counter::Services,
            Kind::Ptr => Counter::Addresses,
            _ => Counter::Names,
        });
    }

    pub(super) fn count_answer(&self, content: &Content) {
        self.count(match content {
            Content::Error(ResolveError::NotFound) => Counter::NotFound,
            Content::Error(ResolveError::Unimplemented) => Counter::Unimplemented,
            Content::Error(ResolveError::Refused) => Counter::Refused,
            Content::Error(_) => Counter::ServerFailure,
            _ => Counter::NoError,
        });
    }

    pub(super) fn count_silence(&self) {
        self.count(Counter::TimedOut);
    }

    /// Current figures.
    pub fn figures(&self) -> ResolverFigures {
        let counters = self.0.since_reset();
        let of = |counter: Counter| counters[counter as usize];
        ResolverFigures {
            names: of(Counter::Names),
            services: of(Counter::Services),
            addresses: of(Counter::Addresses),
            no_error: of(Counter::NoError),
            server_failure: of(Counter::ServerFailure),
            not_found: of(Counter::NotFound),
            unimplemented: of(Counter::Unimplemented),
            refused: of(Counter::Refused),
            timed_out: of(Counter::TimedOut),
        }
    }

    /// Resets the figures.
    pub fn reset(&self) {
        self.0.reset();
    }
}

impl Servers {
    /// Counters of these servers, if they are counted.
    pub(super) fn zone(&self) -> Option<&ResolverZone> {
        self.counted.as_ref().map(|counted| &*counted.0)
    }
}
