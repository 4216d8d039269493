//! Gale's modules: one file per nginx module, with the name that it has in nginx's documentation.
//!
//! [`order`] lists the order of modules: in phases, in the filter chain and in lookups.

// The heads of files write directives as nginx's documentation does, with optional parts in [brackets].
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

/// Compiles the example of the page for module authors with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/writing-a-module.md")]
struct WritingAModule;
