//! Parts of a request, each with the fields that are written together and forgotten together.
//!
//! ```text
//!   Arrival   facts of the client's request; a subrequest has them, too
//!   Routing   way through the phases, location and origin of the URI
//!   Outcome   decisions about the response, forgotten when the request begins anew
//!   Record    facts that the log and the counters need at the end
//!   Extras    fields that few requests use
//! ```
//!
//! A part is reset to its default as a whole, so that a new field is written down here and nowhere else. A tunnel keeps
//! every part but the outcome.

use std::cell::{Cell, RefCell};

use gale_runtime::{Bytes, Moment};

use crate::request::kind::Kind;
use crate::request::phases::Phase;
use crate::request::response::ShortText;
use crate::request::routing::{CountedMethod, UriFit, UriOrigin};
use crate::request::subrequest::Fallback;
use crate::request::tunnel::Tunnel;
use crate::request::{PassedTo, Request};

/// Facts of the client's request when it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Time at which the first byte was read; for a subrequest, at which it began.
    pub started: Moment,
    /// Number on the connection, from 1.
    pub number_on_connection: u64,
    /// Address that it came in by, as an index into those of the configuration.
    pub(crate) place: usize,
    /// True if it came before the previous response was sent.
    pub is_pipelined: bool,
    /// True if its body was refused for its length.
    pub(crate) body_was_refused: bool,
}

impl Default for Arrival {
    fn default() -> Arrival {
        Arrival {
            started: Moment::from_nanos(0),
            number_on_connection: 0,
            place: 0,
            is_pipelined: false,
            body_was_refused: false,
        }
    }
}

/// Way of the request through the phases, and the origin of its URI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Routing {
    pub(crate) kind: Kind,
    pub(crate) phase: Phase,
    /// Index of the phase's next handler.
    pub(crate) next_handler: usize,
    /// Redirects that were made, of [`REDIRECTS_MAX`](crate::request::REDIRECTS_MAX).
    pub(crate) redirects: u8,
    pub(crate) origin: UriOrigin,
    /// Relation between the URI and the location.
    pub(crate) fit: UriFit,
    /// Method that counts.
    pub(crate) method: CountedMethod,
    /// True if the URI names a file below the `alias` of a regular expression, which otherwise is the whole path.
    /// Set by `try_files`.
    pub adds_uri_to_alias: bool,
    /// True if the response is a piece of another one, whose filters see all of it.
    pub(crate) skips_filters: bool,
}

/// Decisions about the response, until it is sent.
#[derive(Default)]
pub struct Outcome {
    /// Status of the response, whatever its location says.
    pub status_override: Option<u16>,
    /// Media type of the response, whatever its location says, unless that is an error.
    pub content_type_override: Option<ShortText>,
    /// True if a filter has put subrequests into the response's body.
    pub makes_subrequests: bool,
    /// True while an `error_page` is made: another error does not lead to another page.
    pub(crate) is_error_page: bool,
    /// Status of the access phase unless one of its handlers is satisfied.
    pub(crate) refusal: Option<u16>,
    /// Other end of the tunnel that the connection becomes.
    pub(crate) tunnel: Option<Box<dyn Tunnel>>,
    /// Server that the request is passed to, or was last.
    pub(crate) passed_to: Option<PassedTo>,
    /// Removes a stored response that turns out to be wrong.
    pub(crate) when_refused: Option<fn(&Request)>,
}

/// Facts for the log and the counters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    /// Time at which the response began to leave.
    pub answered: Option<Moment>,
    /// True if the zone of its server counts it as in flight.
    pub is_counted: bool,
    /// Counts the use of a cache at the end.
    pub at_end: Option<fn(&Request)>,
    /// True if the connection ends with the response.
    pub closes_connection: Cell<bool>,
    /// Maximum of bytes in a second, once it is known; zero for no limit.
    pub limit_rate: Cell<Option<u64>>,
}

/// Fields that few requests use.
#[derive(Default)]
pub(crate) struct Extras {
    /// Called when the request is logged.
    pub when_logged: Vec<fn(&mut Request)>,
    /// Replaces a response that is an error or empty.
    pub fallback: Option<Fallback>,
    /// Fields behind the body of the response.
    pub trailers: RefCell<Vec<(Bytes, Bytes)>>,
}

impl Extras {
    /// True if the request has none.
    pub fn is_empty(&mut self) -> bool {
        let Extras { when_logged, fallback, trailers } = self;
        when_logged.is_empty() && fallback.is_none() && trailers.get_mut().is_empty()
    }
}
