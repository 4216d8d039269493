//! Decides which responses may be stored, for how long they are fresh, and when they may be used: RFC 9111 and nginx's
//! rules.
//!
//! Pure functions over heads and the time: nothing here waits, reads a file or a clock. Where nginx and the RFC differ,
//! [`Rules`] chooses between them, one field per point; the reasons are in `docs/decisions/0028-cache-rules.md`.

#[cfg(test)]
mod against_nginx;
pub mod cache_control;
pub mod decision;
pub mod freshness;
pub mod no_vary_search;
pub mod rules;
#[cfg(test)]
mod table;
pub mod vary;

pub use cache_control::{RequestDirectives, ResponseDirectives};
pub use decision::Verdict;
pub use freshness::{Lifetime, NotStored, Storing, current_age, is_of_later};
pub use no_vary_search::SearchRules;
pub use rules::{Conformance, Rules};
