//! Hooks of a request for the crates above: calls at its end, and the upstream server that its log messages show.

use crate::request::{PassedTo, Request};

impl Request {
    /// Calls `count` when the request is over, however it ends.
    pub fn call_at_end(&mut self, count: fn(&Request)) {
        self.record.at_end = Some(count);
    }

    /// Calls `forget` if the response turns out to be wrong ([`Request::refuse_response`]).
    pub fn call_when_refused(&mut self, forget: fn(&Request)) {
        self.outcome.when_refused = Some(forget);
    }

    /// Sets the upstream server that log messages show.
    pub fn show_passed_to(&mut self, passed_to: PassedTo) {
        self.outcome.passed_to = Some(passed_to);
    }

    /// Returns the bytes of subrequests' bodies that are counted separately ([`Request::count_part`]).
    pub fn counted_in_parts(&self) -> u64 {
        self.shared.counted_bytes.get()
    }

    /// Counts bytes of this subrequest's body separately, not as a part of the response to the client.
    pub fn count_part(&self, bytes: u64) {
        let counted = &self.shared.counted_bytes;
        counted.set(counted.get() + bytes);
    }
}
