//! Gale's modules: one file per nginx module, named as nginx's documentation
//! names it, each reading like a specification.
//!
//! [`order`] holds what an order among modules decides: phases, filters, lookup.

// The heads of the files write directives as nginx's documentation does, with what may be left out in [brackets].
#![allow(rustdoc::broken_intra_doc_links)]

pub mod core;
pub mod event;
pub mod http;
pub mod inert;
pub mod order;
pub mod shared;
pub mod stream;
#[cfg(feature = "test-hooks")]
pub mod test_service;

/// The example on the page for authors of modules is compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/writing-a-module.md")]
struct WritingAModule;
