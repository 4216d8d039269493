//! geo: a session variable whose value depends on the client's address. See [`shared::geo`](crate::shared::geo).
//!   geo [$ADDRESS] $VARIABLE { ... }          stream
//! (<https://nginx.org/en/docs/stream/ngx_stream_geo_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_stream::session::Session;

use crate::shared::geo;

/// See the file's head.
pub static MODULE: Module =
    Module { name: "stream_geo", directives: &[geo::directive::<Session, ()>(Contexts::STREAM)], ..Module::EMPTY };
