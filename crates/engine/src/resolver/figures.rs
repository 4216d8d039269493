//! What is counted of name servers: questions by kind, answers by what they say. (`status_zone=`)

use gale_base::tally::Tally;

use super::message::{Content, Kind};
use super::{ResolveError, Servers};

/// Questions and answers, in the order of their figures.
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

/// See the file's head.
#[derive(Debug, Default)]
pub struct ResolverZone(Tally<COUNTERS>);

/// The figures of name servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResolverFigures {
    /// Questions for addresses of names.
    pub names: u64,
    /// Questions for servers of services.
    pub services: u64,
    /// Questions for names of addresses.
    pub addresses: u64,
    /// Answers that have what was asked for.
    pub no_error: u64,
    /// Answers: the name servers failed.
    pub server_failure: u64,
    /// Answers: there is nothing of that name.
    pub not_found: u64,
    /// Answers: that is not answered.
    pub unimplemented: u64,
    /// Answers: we are not answered.
    pub refused: u64,
    /// Tries without an answer in time.
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

    /// The figures by now.
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

    /// What was counted so far counts no more.
    pub fn reset(&self) {
        self.0.reset();
    }
}

impl Servers {
    /// Where what is asked of them is counted, if anywhere.
    pub(super) fn zone(&self) -> Option<&ResolverZone> {
        self.counted.as_ref().map(|counted| &*counted.0)
    }
}
