//! nginx's configuration language: texts, words, statements, directive tables, settings. Knows no directive but
//! `include`.
//!
//! Data flow:
//!
//! ```text
//! Files ──read──▶ Sources ──lexer──▶ Word ──parser──▶ Statement ──Tables──▶ Store ──▶ Setting
//!                    │                 │                   │                  │
//!                    └──── Span ───────┴───────────────────┴── Diagnostic ────┘
//! ```
//!
//! Files are accessed only through [`Files`], so that a configuration can come from the disk, from a bundle or from a
//! test. Every size that depends on the text is bounded: see the limits in [`parser`] and [`lexer`].
//!
//! Sources: nginx's documentation, and its behaviour where the documentation is silent.
#![forbid(unsafe_code)]

pub mod diagnostic;
pub mod directive;
pub mod files;
pub mod glob;
pub mod lexer;
pub mod parser;
pub mod server_address;
pub mod setting;
pub mod source;
pub mod statement;
pub mod store;
pub mod suggest;
pub mod tables;
pub mod values;

pub use diagnostic::{Diagnostic, Diagnostics, Related, Reporter, Severity};
pub use directive::{Body, Contexts, Directive, Takes};
pub use files::{DiskFiles, Files, MemoryFiles};
pub use lexer::{lex, quote};
pub use parser::{Parsed, parse, parse_parameter, parse_text};
pub use setting::Setting;
pub use source::{Position, Source, SourceId, Sources, Span};
pub use statement::{Statement, Word};
pub use store::{Custom, Inert, InertValue, Many, ManyWith, One, OneWith, Slot, Store, Updated};
pub use tables::{Found, Tables};
