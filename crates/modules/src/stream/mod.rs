//! The modules of the `stream` block.

pub mod access;
pub mod core;
pub mod geo;
pub mod geoip;
pub mod health;
pub mod limit_conn;
pub mod limit_session;
pub mod log;
pub mod map;
pub mod pass;
pub mod proxy;
pub mod realip;
pub mod return_text;
pub mod set;
pub mod split_clients;
pub mod ssl;
pub mod ssl_preread;
pub mod upstream;
pub mod variables;

use gale_config::{Body, Contexts, Inert, Takes};
use gale_engine::module::Directive;

/// Contexts of most directives.
const PLACE: Contexts = Contexts::STREAM.or(Contexts::STREAM_SERVER);

/// Common fields of the directive rows; a module sets the others.
const ROW: Directive = Directive {
    name: "",
    contexts: PLACE,
    takes: Takes::Exactly(1),
    body: Body::None,
    default: "",
    about: "",
    store: &Inert,
};
